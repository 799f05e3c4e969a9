"""Pictures of a result → sheets of the report, and PNG files.

A result with pictures has

    pictures       (picture_sheet, picture_row, picture_column, picture_y, picture_x, picture_rgb) uint8; attributes
                   `title` and `caption`
    picture_note   (picture_sheet, picture_row, picture_column): what pointing at it tells; "" where there is none

with the names of sheets and columns as coordinates. A sheet is what can be chosen alone, such as an encoder.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from PIL import Image

SHOWN = 64  # pixels on the screen that a picture has at least
GAP = 2  # pixels between the pictures of a file


@dataclass(frozen=True)
class Picture:
    """One picture as the page has it; without a source there is none."""

    source: str  # a data URL
    note: str


@dataclass(frozen=True)
class Sheet:
    """Rows of pictures under a name."""

    name: str
    rows: Sequence[Sequence[Picture]]


@dataclass(frozen=True)
class Pictures:
    """What the page shows of a result."""

    title: str
    caption: str
    columns: Sequence[str]
    sheets: Sequence[Sheet]
    side: int  # pixels on the screen


def pack_pictures(result: xr.Dataset) -> Pictures | None:
    """The pictures of a result; None for results without any."""
    if "picture_note" not in result:
        return None
    values, notes = result.pictures.values, result.picture_note.values.astype(str)
    sheets = [
        Sheet(str(name), [[_picture(*pair) for pair in zip(*row, strict=True)] for row in zip(*both, strict=True)])
        for name, *both in zip(result.picture_sheet.values, values, notes, strict=True)
    ]
    about, size = result.pictures.attrs, values.shape[-3]
    columns = [str(name) for name in result.picture_column.values]
    side = size * max(1, -(-SHOWN // size))  # a whole multiple: pixels stay squares
    return Pictures(str(about["title"]), str(about["caption"]), columns, sheets, side)


def _picture(pixels: np.ndarray[Any, Any], note: str) -> Picture:
    return Picture(f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}" if note else "", note)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels, np.uint8)).save(file, "PNG")
    return file.getvalue()


def sheet_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """A sheet (row, column, y, x, rgb) as one file on white, small pictures enlarged by a whole factor.

    >>> Image.open(io.BytesIO(sheet_png(np.zeros((2, 3, 24, 24, 3), np.uint8)))).size
    (220, 146)
    """
    rows, columns, height, width, _ = pixels.shape
    times = max(1, -(-SHOWN // height))
    large = pixels.repeat(times, 2).repeat(times, 3)
    framed = np.pad(large, ((0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=255)
    whole = framed.transpose(0, 2, 1, 3, 4).reshape(rows * (height * times + GAP), columns * (width * times + GAP), 3)
    return png(whole[:-GAP, :-GAP])
