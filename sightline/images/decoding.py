"""Image files to uint8 RGB, as official evaluations see them, or the reason why not.

`open_image` opens every file of pixels that Sightline reads. Pillow alone would take any of forty formats whatever the
name of the file, and start Ghostscript for one that holds PostScript; and it would decode whatever fits its own limit.
"""

import errno
import os
import stat
import warnings
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from sightline.core.errors import InputError, first_line
from sightline.images.sets import Item

READERS = {  # format → module of Pillow
    "JPEG": "JpegImagePlugin",
    "PNG": "PngImagePlugin",
    "BMP": "BmpImagePlugin",
    "GIF": "GifImagePlugin",
    "WEBP": "WebPImagePlugin",
    "TIFF": "TiffImagePlugin",
    "PPM": "PpmImagePlugin",
    "AVIF": "AvifImagePlugin",  # from Pillow 11.3 on
    "JPEG2000": "Jpeg2KImagePlugin",
}
ENDINGS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2"}
)
GONE = os.strerror(errno.ENOENT).lower()  # the reason of a file that is not there
OUTSIDE = "its path {!r} leads out of the folder of its data set"
LARGEST = 2**26  # pixels that are decoded at once, in some 10 bytes each
LARGEST_OF = {"WEBP": 2**25, "JPEG2000": 2**25}  # whose decoders take 16 to 20 bytes
ROWS = 256  # of a picture that are scaled at a time, as float64
ORIENTATION = 0x0112  # in EXIF data
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(file: Path | bytes, upright: bool = True, whole: bool = False) -> Item:
    """Decode a file or its bytes: uint8 (H, W, 3), upright unless it is wanted as it is stored.

    EXIF rotation is applied, transparency is dropped (`convert("RGB")`, as torchvision and timm do), greyscale is
    repeated, 16 bits are scaled to 8, of an animation the first frame is taken. A JPEG of very many pixels is read
    reduced, unless its pixels are wanted one by one, `whole`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of palettes, odd EXIF data, large images: all handled here
            with open_image(file, whole) as image:
                image.load()
                return Item(_rgb(image, upright), None)
    except Exception as error:  # PIL's readers raise whatever their parsing of broken bytes runs into
        return Item(None, reason(file, error))


def open_image(file: Path | bytes, whole: bool = True) -> Image.Image:
    """Open a file or its bytes as one of the formats above, so that decoding it takes bounded memory."""
    if isinstance(file, Path) and not stat.S_ISREG(kind := file.stat().st_mode) and not stat.S_ISDIR(kind):
        raise OSError("it is a pipe or a device, not a file")
    image = Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=_formats())
    try:
        _reduce(image, whole)
    except Exception:
        image.close()
        raise
    return image


@cache
def _formats() -> tuple[str, ...]:
    readable = []
    for name, module in READERS.items():
        with suppress(ImportError):
            import_module(f"PIL.{module}")
            readable.append(name)
    return tuple(readable)


def _reduce(image: Image.Image, whole: bool) -> None:
    """Refuse an image of too many pixels, or have it decoded at a half or a quarter of its size."""
    pixels = image.width * image.height
    if image.format == "TIFF":  # tiles are decoded one by one, and may be larger than the image
        pixels = max(pixels, _tag(image, 322) * _tag(image, 323))
    most = LARGEST_OF.get(image.format or "", LARGEST)
    if pixels <= most:
        return
    halvings = next(n for n in range(1, 64) if pixels >> 2 * n <= most)
    if image.format in ("JPEG", "MPO") and not whole and "progressive" not in image.info:
        image.draft(None, (image.width >> halvings, image.height >> halvings))
    elif image.format == "JPEG2000" and not whole:
        image.reduce = halvings  # type: ignore[method-assign,assignment]
    else:
        raise ValueError(
            f"it has {image.width} × {image.height} pixels, but at most {most / 1e6:.0f} million of such a file are "
            "decoded; make it smaller"
        )


def _tag(image: Any, number: int) -> int:
    value = image.tag_v2.get(number, 0)
    return value if isinstance(value, int) else 0


def turn(image: Image.Image) -> Image.Transpose | None:
    """What brings an image upright, by its EXIF data."""
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # an unreadable EXIF block says nothing about rotation
        return None


def _rgb(image: Image.Image, upright: bool) -> np.ndarray:
    if upright and (turned := turn(image)) is not None:
        image = image.transpose(turned)
    if image.mode.startswith("I") or image.mode == "F":
        grey = _to_8_bits(np.asarray(image))
        return np.repeat(grey[:, :, None], 3, 2)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


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
    scaled = np.empty(values.shape, np.uint8)
    for rows in range(0, len(values), ROWS):
        part = values[rows : rows + ROWS].astype(np.float64)
        scaled[rows : rows + ROWS] = np.floor(part * (255 / top) + 0.5)
    return scaled


def reason(file: Path | bytes, error: Exception) -> str:
    """Why a file cannot be read."""
    check_descriptors(error)
    if file == b"" or (isinstance(file, Path) and file.is_file() and not file.stat().st_size):
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return f"it is not an image of a format that is read ({', '.join(READERS)})"
    if isinstance(error, Image.DecompressionBombError):
        return "it has more pixels than PIL accepts, which may be a decompression bomb"
    if isinstance(error, MemoryError):
        return "decoding it takes more memory than there is"
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        return (error.strerror or "it cannot be opened").lower()
    return first_line(error)


def check_descriptors(error: Exception) -> None:
    """Too few file descriptors say nothing about a file: that is an error of its own."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise InputError("Too many files are open to read another; raise the limit, such as ulimit -n 1024") from error


def inside(folder: Path, name: str) -> bool:
    """Whether a name that a file gives stays in a folder by its text; links in there may lead anywhere.

    >>> inside(Path("data"), "train/1.png"), inside(Path("data"), "../1.png"), inside(Path("data"), "/dev/stdin")
    (True, False, False)
    """
    top = os.path.abspath(folder)
    return os.path.commonpath([top, os.path.abspath(os.path.join(top, name))]) == top
