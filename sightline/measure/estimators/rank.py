"""Effective rank of a spectrum (RankMe, Garrido et al. 2023)."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["effective_rank", "rankme"]


Array = TypeVar("Array", np.ndarray, Tensor)


def effective_rank(singular_values: Array) -> Array:
    """RankMe, exp of the entropy of σ / Σσ over the last axis: from 1, one direction, to R, all alike; NaN for zeros.

    >>> effective_rank(np.array([[2.0, 2.0, 0.0], [5.0, 0.0, 0.0]])).round(6)
    array([2., 1.])
    """
    if not isinstance(singular_values, Tensor):
        return effective_rank(torch.from_numpy(np.array(singular_values, order="C"))).numpy()
    values = singular_values.double()
    share = values / values.sum(-1, keepdim=True)
    rank: Tensor = torch.special.entr(share).sum(-1).exp()
    return rank


def rankme(features: Tensor) -> float:  # (n, D)
    """Effective rank of the features of images, which are not centred: 1 to min(n, D).

    >>> round(rankme(torch.eye(6)), 6), round(rankme(torch.ones(6, 3)), 6)
    (6.0, 1.0)
    """
    return float(effective_rank(torch.linalg.svdvals(features.double())))
