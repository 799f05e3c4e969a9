"""Positions for another grid of patches, as the official codes resize them.

Position embeddings are resized bicubically, without antialiasing.

Of a table of relative positions the last three rows (CLS to patch, patch to CLS, CLS to CLS) stay. The others are taken
for samples at distances 0, ±1, ±(1 + q), ±(1 + q + q²), …, with q such that they reach over the new grid, and an
interpolating bicubic spline through them is read off at the new distances. Along a side that stays as long as it is,
they stay as they are.

D width, H heads, positions on a grid of r × c patches, R = (2r − 1)(2c − 1) + 3 rows of a table.
"""

import functools
from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.core.errors import InputError

Resize = Callable[[Tensor, tuple[int, int]], Tensor]  # positions (1, D, r, c) to another grid: (1, D, rows, columns)


def by_size(patches: Tensor, grid: tuple[int, int]) -> Tensor:  # (1, D, r, c) -> (1, D, rows, columns)
    """As MAE and DeiT do; MSN's scale √(n/N) is the ratio of the sides of the grids, which is the same."""
    return F.interpolate(patches, size=grid, mode="bicubic", align_corners=False)


def by_scale(patches: Tensor, grid: tuple[int, int]) -> Tensor:  # (1, D, r, c) -> (1, D, rows, columns)
    """As DINO does: the scale is 0.1 patches too large, which its code has against rounding errors."""
    scale = tuple((new + 0.1) / old for new, old in zip(grid, patches.shape[2:], strict=True))
    return F.interpolate(patches, scale_factor=scale, mode="bicubic")


# Relative positions


def resize_table(table: Tensor, grid: tuple[int, int]) -> Tensor:  # (R, H) -> (R', H)
    """A table of relative positions on a square grid for another grid (rows, columns) of patches."""
    side = isqrt(len(table) - 3)
    if side < 4:  # a cubic has four coefficients
        raise InputError(
            f"A table of {side} × {side} relative positions is too small for a cubic spline and cannot be resized; "
            "keep to images of its own size, or take smaller patches"
        )
    # A spline is linear in its samples: two matrices are enough, and gradients pass through them.
    rows, columns = (_spline(side, 2 * patches - 1).to(table.device) for patches in grid)
    bias = table[:-3].double().reshape(side, side, -1)
    bias = torch.einsum("ri,cj,ijh->rch", rows, columns, bias)
    return torch.cat([bias.flatten(0, 1).float(), table[-3:].float()])


@functools.lru_cache(maxsize=16)
def _spline(old: int, new: int) -> Tensor:  # (new, old), float64
    """The matrix that takes samples at geometric positions to values at whole numbers −(new // 2) … new // 2."""
    from scipy.interpolate import make_interp_spline

    if old == new:  # q is above 1, and would move them
        with torch.inference_mode(False):
            return torch.eye(old, dtype=torch.float64)
    at = geometric_positions(old, new)
    # Outside of the samples, official splines go on with their last value.
    distances = np.arange(-(new // 2), new // 2 + 1).clip(at[0], at[-1])
    with torch.inference_mode(False):  # or a training could not use what an analysis has left here
        return torch.from_numpy(make_interp_spline(at, np.eye(old), k=3)(distances))


def geometric_positions(old: int, new: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Where `old` relative positions are taken to be among `new` ones at whole numbers; q is found by bisection.

    >>> geometric_positions(27, 47)[13:18].round(3).tolist()
    [0.0, 1.0, 2.09, 3.279, 4.575]
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        q = (low + high) / 2
        if (1 - q ** (old // 2)) / (1 - q) > new // 2:
            high = q
        else:
            low = q
    distances = np.cumsum(q ** np.arange(old // 2))
    return np.concatenate([-distances[::-1], [0.0], distances])
