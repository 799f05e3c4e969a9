"""Small image files."""

from __future__ import annotations

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
