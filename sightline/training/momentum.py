"""Momentum encoders, and what keeps embeddings from collapse."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from timm.layers.drop import DropPath
from torch import Tensor, nn

from sightline.training.collectives import total

__all__ = ["momentum_copy", "sinkhorn", "spread", "update_momentum"]


M = TypeVar("M", bound=nn.Module)


def momentum_copy(module: M) -> M:
    """A copy that follows `module` by `update_momentum`, gets no gradients and drops no paths."""
    follower = copy.deepcopy(module).requires_grad_(False)
    for part in follower.modules():
        if isinstance(part, DropPath):
            part.drop_prob = 0.0
    return follower


@torch.no_grad()
def update_momentum(follower: nn.Module, leader: nn.Module, momentum: float) -> None:
    """follower ← momentum · follower + (1 − momentum) · leader, for all parameters; buffers are its own."""
    ours, theirs = ([p.detach() for p in module.parameters()] for module in (follower, leader))
    if momentum == 0:  # exactly equal, where lerp would round
        torch._foreach_copy_(ours, theirs)
    else:
        torch._foreach_lerp_(ours, theirs, 1 - momentum)


@torch.no_grad()
def spread(z: Tensor) -> Tensor:  # (B, d) -> ()
    """How far embeddings are from collapse: standard deviation of the unit vectors · √d; 0 where all are the same.

    Of features before any batch normalisation, which would blow up the smallest remainder.

    >>> round(spread(torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))).item(), 2)
    1.0
    """
    z = F.normalize(z.float(), dim=1)
    deviation: Tensor = z.std(0, correction=0).mean() * z.shape[1] ** 0.5
    return deviation


@torch.no_grad()
def sinkhorn(p: Tensor, iterations: int = 3) -> Tensor:  # (B, K) -> (B, K)
    """Give each prototype the same weight over the images of all processes, then each image a sum of one; repeat.

    >>> sinkhorn(torch.tensor([[0.9, 0.1], [0.9, 0.1]]))
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    for _ in range(iterations):
        p = p / total(p.sum(0)).clamp_min(torch.finfo(p.dtype).tiny)  # a prototype that nobody wants stays unused
        p = p / p.sum(1, keepdim=True)
    return p
