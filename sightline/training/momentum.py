"""Momentum encoders, and what keeps embeddings from collapse."""

import copy
import itertools
from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.nn.functional as F
from timm.layers.drop import DropPath
from torch import Tensor, nn

from sightline.training.checkpoints import tensors_of
from sightline.training.collectives import total

M = TypeVar("M", bound=nn.Module)


def momentum_copy(module: M) -> M:
    """A copy that follows `module` by `follow`, gets no gradients and drops no paths."""
    follower = copy.deepcopy(module).requires_grad_(False)
    for part in follower.modules():
        if isinstance(part, DropPath):
            part.drop_prob = 0.0
    return follower


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, momentum: float, buffers: bool = False) -> None:
    """average ← momentum · average + (1 − momentum) · model, for all parameters.

    With `buffers` also for the statistics of norms, while counters are copied; otherwise buffers are the average's own.

    >>> average, model = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(average.weight, 1.0), nn.init.constant_(model.weight, 2.0)
    >>> follow(average, model, 0.75)
    >>> average.weight.item()
    1.25
    """
    ours, theirs = (
        list(tensors_of(module).values()) if buffers else [p.detach() for p in module.parameters()]
        for module in (average, model)
    )
    moves = [bool(momentum) and tensor.is_floating_point() for tensor in ours]
    if any(moves):
        torch._foreach_lerp_(_chosen(ours, moves), _chosen(theirs, moves), 1 - momentum)
    if not all(moves):  # exactly equal, where lerp would round
        stay = [not move for move in moves]
        torch._foreach_copy_(_chosen(ours, stay), _chosen(theirs, stay))


def _chosen(tensors: Iterable[Tensor], which: Iterable[bool]) -> list[Tensor]:
    return list(itertools.compress(tensors, which))


@torch.no_grad()
def embedding_std(z: Tensor) -> Tensor:  # (B, d) -> ()
    """How far embeddings are from collapse: standard deviation of the unit vectors · √d; 0 where all are the same.

    Of features before any batch normalisation, which would blow up the smallest remainder.

    >>> round(embedding_std(torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))).item(), 2)
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
