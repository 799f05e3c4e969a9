"""What an objective is given in each step, and what several objectives need.

An objective is one file of `training/objectives/`:

    Config                    a frozen dataclass, its settings
    views(config, backbone)   the policies by which the views of an image are made
    Objective(backbone, config)   nn.Module with
        encoder               the module that is kept, evaluated and compared (for DINO the teacher's)
        forward(views)        -> (loss, scalars)
        before_step(progress) optional: between backward and the optimiser's step
        after_step(progress)  after the optimiser's step
        head_of(encoder)      optional: layers of the projection head that `encoder` feeds, which are saved with it
        lr_scales()           optional: by what the learning rate of parameters is multiplied, by their names
        export(folder, encoder)   optional: writes what others load, instead of the encoder with its decoder or head
                              (export.py); an objective that has this may end in no `encoder`
        pairs                 optional: whether it mixes images two by two, so that shares of a batch must be even
    TARGETS                   optional: True if it learns from boxes, masks or maps, which are then in `views.targets`
    first(config, backbone)   optional: a `First`, what has to be trained before (BEiT's tokenizer); the trained module
                              is then passed to Objective(backbone, config, first)

B images, V views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sightline.core.keyed_random import Keys, fold, uniform
from sightline.core.schedules import Progress
from sightline.images.augment.policy import Policy
from sightline.images.targets import Targets

__all__ = ["First", "Objective", "Views"]


class Views:
    """What a step sees: the views of B images, their labels, and random numbers of their own."""

    # No dataclass: Fabric takes dataclasses apart to look for tensors, and does not put frozen ones together again.
    def __init__(
        self,
        pixels: Sequence[Tensor],
        labels: Tensor,
        keys: Keys,
        progress: Progress,
        seed: int = 0,
        targets: Sequence[Sequence[Targets[Tensor]]] = (),
    ) -> None:
        self.pixels = tuple(pixels)  # one (B, 3, h, w) per policy, normalised
        self.labels = labels  # int64 (B,), −1 without a label
        self.keys = keys  # uint64 (B,), another one in each epoch
        self.progress = progress  # before this step
        self.seed = seed  # of the training: for what all images of a step share
        self.targets = tuple(map(tuple, targets))  # for each policy those of B images; empty unless they are asked for

    def random(self, n: int, purpose: int = 0) -> Tensor:
        """Numbers in [0, 1) for each image, (B, n): the same whatever the number of processes."""
        numbers = torch.from_numpy(uniform(fold(self.keys, 1, purpose), n)).float()
        return numbers.clamp_(max=1 - 2**-24).to(self.labels.device)  # rounding may give 1

    def part(self, which: slice) -> Views:
        """The same images with some of their views."""
        return Views(self.pixels[which], self.labels, self.keys, self.progress, self.seed, self.targets[which])


@dataclass(frozen=True)
class First:
    """What an objective needs trained before it on the same images; the loop trains it with AdamW and a cosine."""

    name: str  # of its folder within the run
    objective: nn.Module  # forward(views) -> (loss, scalars), after_step(progress)
    views: tuple[Policy, ...]
    epochs: float
    lr: float


class Objective(Protocol):
    """The contract of `Objective` in a file of `training/objectives/`."""

    @property
    def encoder(self) -> nn.Module:
        """What is kept, evaluated and compared."""

    def __call__(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and what else is worth a curve."""

    def after_step(self, progress: Progress) -> None:
        """Whatever follows the optimiser's step, such as the momentum encoder's."""

    def __getattr__(self, name: str) -> Any: ...
