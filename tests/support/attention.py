"""Made products of queries and keys, and attention distance and mutual information of a map as loops."""

import math
from typing import Any

import numpy as np
import torch

from sightline.encoders.attention import AttentionProduct
from sightline.encoders.sites import Tokens


def product_of(
    tokens: Tokens, scale: float = 0.25, bias: torch.Tensor | None = None, images: int = 3, dtype: Any = torch.float32
) -> AttentionProduct:
    generator = torch.Generator().manual_seed(0)
    q, k, _ = torch.randn(images, tokens.count, 3, 4, 16, generator=generator).to(dtype).permute(2, 0, 3, 1, 4)
    return AttentionProduct(q, k, bias, scale)  # strided as in a ViT


def plain_distance(row_of: np.ndarray, grid: tuple[int, int], patch: float, prefix: int) -> float:
    """One map, with loops over queries and keys."""
    places = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    total = 0.0
    for i, (r, c) in enumerate(places):
        row = row_of[prefix + i, prefix:].astype(np.float64)
        row = row / row.sum()
        total += sum(p * patch * math.hypot(r - y, c - x) for p, (y, x) in zip(row, places, strict=True))
    return total / len(places)


def plain_nmi(row_of: np.ndarray, prefix: int) -> float:
    """One map, from the joint distribution of queries and keys."""
    joint = row_of[prefix:, prefix:].astype(np.float64) + 1e-8
    joint = joint / joint.sum(1, keepdims=True) / len(joint)
    q, k = joint.sum(1), joint.sum(0)
    information = (joint * np.log(joint / np.outer(q, k))).sum()
    return float(information / np.sqrt((q * np.log(q)).sum() * (k * np.log(k)).sum()))
