"""Effective rank of a spectrum (RankMe, Garrido et al. 2023)."""

import torch
from torch import Tensor

from sightline.core.arrays import Array, as_tensor, like


def effective_rank(singular_values: Array) -> Array:
    """RankMe, exp of the entropy of σ / Σσ over the last axis: from 1, one direction, to R, all alike; NaN for zeros.

    >>> effective_rank(torch.tensor([[2.0, 2.0, 0.0], [5.0, 0.0, 0.0]])).round(decimals=6)
    tensor([2., 1.], dtype=torch.float64)
    """
    values = as_tensor(singular_values).double()
    share = values / values.sum(-1, keepdim=True)
    return like(singular_values, torch.special.entr(share).sum(-1).exp())


def rankme(features: Tensor) -> float:  # (n, D)
    """Effective rank of the features of images, which are not centred: 1 to min(n, D).

    >>> round(rankme(torch.eye(6)), 6), round(rankme(torch.ones(6, 3)), 6)
    (6.0, 1.0)
    """
    return float(effective_rank(torch.linalg.svdvals(features.double())))
