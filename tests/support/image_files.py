"""Small image files."""

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RAMP = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4


def write(path: Path, array: Any = RAMP, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


def png(image: Image.Image, **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, "png", **options)
    return stream.getvalue()


def plain_png(width: int, height: int, bits: int, colours: int, rows: bytes) -> bytes:
    """A PNG of these filtered rows, which need not be in memory as pixels."""
    header = struct.pack(">2I5B", width, height, bits, colours, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
