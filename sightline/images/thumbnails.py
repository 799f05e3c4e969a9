"""Small pictures for the report."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["THUMBNAIL", "thumbnail_size", "thumbnails"]


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
