"""Image files to uint8 RGB, as official evaluations see them, or the reason why not."""

from __future__ import annotations

import errno
import os
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sightline.core.errors import first_line
from sightline.images.sets import Item

ENDINGS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2"}
)


GONE = os.strerror(errno.ENOENT).lower()  # the reason of a file that is not there


def decode(file: Path | bytes, upright: bool = True) -> Item:
    """Decode a file or its bytes: uint8 (H, W, 3), upright unless it is wanted as it is stored.

    EXIF rotation is applied, transparency is dropped (`convert("RGB")`, as torchvision and timm do), greyscale is
    repeated, 16 bits are scaled to 8, of an animation the first frame is taken.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of palettes, odd EXIF data, large images: all handled here
            with Image.open(BytesIO(file) if isinstance(file, bytes) else file) as image:
                image.load()
                return Item(_rgb(image, upright), None)
    except Exception as error:  # PIL's readers raise whatever their parsing of broken bytes runs into
        return Item(None, _reason(file, error))


def _rgb(image: Image.Image, upright: bool) -> np.ndarray:
    try:
        image = ImageOps.exif_transpose(image) if upright else image
    except Exception:  # an unreadable EXIF block says nothing about rotation
        image.getexif().clear()
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_8_bits(np.asarray(image)))
    return np.array(image.convert("RGB"))


def _to_8_bits(values: np.ndarray[Any, Any]) -> np.ndarray:
    """Greyscale of more than 8 bits, where PIL's convert would clip at 255.

    >>> _to_8_bits(np.array([[0, 128, 257, 65535]], np.uint16)).tolist()
    [[0, 0, 1, 255]]
    >>> _to_8_bits(np.array([[0.0, 0.5, 1.0]], np.float32)).tolist()
    [[0, 128, 255]]
    """
    top: float = 65535 if values.dtype.kind in "iu" else 1
    if values.size and (values.min() < 0 or not np.isfinite(values).all()):
        raise ValueError("it has negative or infinite values")
    if values.size and values.max() > top:
        top = 2**32 - 1 if values.dtype.kind in "iu" else 255
        if values.max() > top:
            raise ValueError(f"its values go up to {values.max()}, and the scale is unknown")
    scaled: np.ndarray = np.floor(values.astype(np.float64) * (255 / top) + 0.5).astype(np.uint8)
    return scaled


def _reason(file: Path | bytes, error: Exception) -> str:
    if file == b"" or (isinstance(file, Path) and file.is_file() and not file.stat().st_size):
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return "it is not an image that PIL can identify"
    if isinstance(error, Image.DecompressionBombError):
        return "it has more pixels than PIL accepts, which may be a decompression bomb"
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        return (error.strerror or "it cannot be opened").lower()
    return first_line(error)
