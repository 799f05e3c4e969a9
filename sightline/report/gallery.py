"""Pictures of a result, in rows: an image and what each encoder makes of it, side by side.

A result has

    gallery   (gallery_row, gallery_column, gallery_y, gallery_x, gallery_rgb) uint8

with the captions of the rows in `gallery_row`, the names of the columns in `gallery_column`, and in the attributes of
`gallery` its `title` and `caption`. The pictures lie in the page as PNG.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from PIL import Image


@dataclass(frozen=True)
class Row:
    """Pictures side by side."""

    caption: str
    pictures: Sequence[str]  # addresses that hold the picture itself


@dataclass(frozen=True)
class Gallery:
    """What the page shows."""

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]


def pack_gallery(result: xr.Dataset) -> Gallery | None:
    """The gallery of a result; None for results without one."""
    if "gallery" not in result:
        return None
    axes = [f"gallery_{axis}" for axis in ("row", "column", "y", "x", "rgb")]
    pictures = result.gallery.transpose(*axes)
    rows = zip(pictures.gallery_row.values, pictures.values, strict=True)
    return Gallery(
        str(pictures.attrs["title"]),
        str(pictures.attrs["caption"]),
        [str(name) for name in pictures.gallery_column.values],
        [Row(str(caption), [_png(picture) for picture in row]) for caption, row in rows],
    )


def _png(pixels: np.ndarray[Any, Any]) -> str:  # uint8 (h, w, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
