"""What an objective is given in each step, and what several objectives need.

An objective is one file of `objectives/`:

    Config                    a frozen dataclass, its settings
    views(config, backbone)   the policies by which the views of an image are made
    Objective(backbone, config)   nn.Module with
        encoder               the module that is kept, evaluated and compared (for DINO the teacher's)
        forward(views)        -> (loss, scalars)
        before_step(progress) optional: between backward and the optimiser's step
        after_step(progress)  after the optimiser's step
        head_of(encoder)      optional: layers of the projection head that `encoder` feeds, which are saved with it
        lr_scales()           optional: by what the learning rate of parameters is multiplied, by their names
        pairs                 optional: whether it mixes images two by two, so that shares of a batch must be even
    first(config, backbone)   optional: a `First`, what has to be trained before (BEiT's tokenizer); the trained module
                              is then passed to Objective(backbone, config, first)

B images, V views.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from timm.layers.drop import DropPath
from torch import Tensor, nn

from sightline.augment import Policy
from sightline.distributed import total
from sightline.draws import Keys, fold, uniform

__all__ = [
    "First",
    "Objective",
    "Progress",
    "Views",
    "cosine",
    "linear",
    "momentum_copy",
    "sinkhorn",
    "spread",
    "update_momentum",
    "warmup_cosine",
]


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Progress:
    """How far a training is: `step` steps are done, of `steps`; an epoch has `per_epoch` of them."""

    step: int
    steps: int
    per_epoch: int

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the next step lies, from 0."""
        return self.step // self.per_epoch

    @property
    def fraction(self) -> float:
        """Share of the training that is done, 0 … 1."""
        return self.step / self.steps


class Views:
    """What a step sees: the views of B images, their labels, and random numbers of their own."""

    # No dataclass: Fabric takes dataclasses apart to look for tensors, and does not put frozen ones together again.
    def __init__(self, pixels: Sequence[Tensor], labels: Tensor, keys: Keys, progress: Progress, seed: int = 0) -> None:
        self.pixels = tuple(pixels)  # one (B, 3, h, w) per policy, normalised
        self.labels = labels  # int64 (B,), −1 without a label
        self.keys = keys  # uint64 (B,), another one in each epoch
        self.progress = progress  # before this step
        self.seed = seed  # of the training: for what all images of a step share

    def random(self, n: int, purpose: int = 0) -> Tensor:
        """Numbers in [0, 1) for each image, (B, n): the same whatever the number of processes."""
        numbers = torch.from_numpy(uniform(fold(self.keys, 1, purpose), n)).float()
        return numbers.clamp_(max=1 - 2**-24).to(self.labels.device)  # rounding may give 1

    def part(self, which: slice) -> Views:
        """The same images with some of their views."""
        return Views(self.pixels[which], self.labels, self.keys, self.progress, self.seed)


@dataclass(frozen=True)
class First:
    """What an objective needs trained before it on the same images; the loop trains it with AdamW and a cosine."""

    name: str  # of its folder within the run
    objective: nn.Module  # forward(views) -> (loss, scalars), after_step(progress)
    views: tuple[Policy, ...]
    epochs: float
    lr: float


class Objective(Protocol):
    """The contract of `Objective` in a file of `objectives/`."""

    @property
    def encoder(self) -> nn.Module:
        """What is kept, evaluated and compared."""

    def __call__(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and what else is worth a curve."""

    def after_step(self, progress: Progress) -> None:
        """Whatever follows the optimiser's step, such as the momentum encoder's."""

    def __getattr__(self, name: str) -> Any: ...


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


def cosine(start: float, end: float, fraction: float) -> float:
    """From start to end along half a cosine.

    >>> cosine(0.99, 1.0, 0.0), cosine(0.99, 1.0, 1.0), round(cosine(0.0, 1.0, 0.5), 12)
    (0.99, 1.0, 0.5)
    """
    return end + (start - end) * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0))) / 2


def warmup_cosine(step: float, steps: float, warmup: float) -> float:
    """Share of a peak that rises linearly from 0 over `warmup` steps, then falls to 0 along half a cosine.

    >>> [round(warmup_cosine(step, 100, 20), 3) for step in (0, 10, 20, 60, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return step / warmup if step < warmup else cosine(1.0, 0.0, (step - warmup) / max(1.0, steps - warmup))


def linear(start: float, end: float, fraction: float) -> float:
    """From start to end along a line.

    >>> linear(0.5, 1.0, 0.0), linear(0.5, 1.0, 1.0), linear(0.5, 1.0, 0.25)
    (0.5, 1.0, 0.625)
    """
    return start + (end - start) * min(max(fraction, 0.0), 1.0)


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
