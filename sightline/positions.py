"""Position embeddings for another grid of patches, as the official codes resize them: bicubic, without antialiasing.

D width, positions on a grid of r × c patches.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

__all__ = ["Resize", "by_scale", "by_size"]

Resize = Callable[[Tensor, tuple[int, int]], Tensor]  # positions (1, D, r, c) to another grid: (1, D, rows, columns)


def by_size(patches: Tensor, grid: tuple[int, int]) -> Tensor:  # (1, D, r, c) -> (1, D, rows, columns)
    """As MAE and DeiT do; MSN's scale √(n/N) is the ratio of the sides of the grids, which is the same."""
    return F.interpolate(patches, size=grid, mode="bicubic", align_corners=False)


def by_scale(patches: Tensor, grid: tuple[int, int]) -> Tensor:  # (1, D, r, c) -> (1, D, rows, columns)
    """As DINO does: the scale is 0.1 patches too large, which its code has against rounding errors."""
    scale = tuple((new + 0.1) / old for new, old in zip(grid, patches.shape[2:], strict=True))
    return F.interpolate(patches, scale_factor=scale, mode="bicubic")
