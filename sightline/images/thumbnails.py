"""Small pictures for the report and for notebooks."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    import numpy as np


THUMBNAIL = 112  # pixels of the longer side


def thumbnails(pixels: Tensor) -> Tensor:
    """uint8 (B, 3, h, w) → uint8 (B, y, x, 3), averaged over areas."""
    small = F.adaptive_avg_pool2d(pixels.float(), thumbnail_size(pixels.shape[2:]))
    return small.round().to(torch.uint8).permute(0, 2, 3, 1)


def thumbnail_size(size: Sequence[int]) -> tuple[int, int]:
    """Height and width whose longer side is at most 112.

    >>> thumbnail_size((224, 448)), thumbnail_size((32, 32))
    ((56, 112), (32, 32))
    """
    shrink = min(THUMBNAIL / max(size), 1)
    return max(round(size[0] * shrink), 1), max(round(size[1] * shrink), 1)


def picture(pixels: np.ndarray, title: str) -> str:
    """An image element with uint8 pixels (H, W, 3) made small; `title` is told when the mouse is on it."""
    height, width = thumbnail_size(pixels.shape[:2])
    content = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX).save(content, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    return f'<img src="{url}" alt="{escape(title)}" title="{escape(title)}" style="margin:.2em;height:64px">'
