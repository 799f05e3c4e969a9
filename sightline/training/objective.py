"""What an objective is given in each step, and what several objectives need.

An objective is one file of `training/objectives/`, or a module of another package: `ObjectiveFile` is what it must
have, `ObjectivePlugin` what the engine sees, with the defaults of `OPTIONAL`. Its class derives from `Objective`.

B images, V views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from sightline.core import plugins
from sightline.core.keyed_random import Keys, fold, uniform
from sightline.core.schedules import Progress
from sightline.encoders.encoder import Encoder
from sightline.encoders.modules.projection import Trained
from sightline.images.augment.policy import Policy
from sightline.images.targets import Targets
from sightline.training.backbones import Backbone
from sightline.training.export import export_encoder


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
    objective: Learner
    views: tuple[Policy, ...]
    epochs: float
    lr: float


class Learner(nn.Module):
    """What the loop trains: `forward(views)` gives the loss, and what else is worth a curve."""

    def before_step(self, progress: Progress) -> None:
        """Between backward and the optimiser's step."""

    def after_step(self, progress: Progress) -> None:
        """Whatever follows the optimiser's step, such as the momentum encoder's."""

    def lr_scales(self) -> Mapping[str, float] | None:
        """By what the learning rate of parameters is multiplied, by their names."""
        return None

    def export(self, folder: Path, encoder: Encoder | None) -> None:
        """Write into a checkpoint what others load; `encoder` says how that of an objective is called and built."""


class Objective(Learner):
    """The base of `Objective` in the file of an objective."""

    @property
    def encoder(self) -> nn.Module:
        """What is kept, evaluated and compared (for DINO the teacher's)."""
        raise NotImplementedError

    @property
    def pairs(self) -> bool:
        """Whether it mixes images two by two, so that shares of a batch must be even."""
        return False

    @property
    def fewest(self) -> int:
        """How many images a forward must see, over all processes: 2 where images are compared or normalised over."""
        return 1

    def check_views(self, views: Sequence[Policy]) -> None:
        """InputError: the backbone cannot take one of the views; asked before anything is written."""

    def head_of(self, encoder: nn.Module) -> tuple[Trained, ...]:
        """Layers of the projection head that `encoder` feeds, which are saved with it."""
        return ()

    def saved_decoder(self) -> nn.Module | None:
        """The decoder that is saved with the encoder, if there is one."""
        return None

    def export(self, folder: Path, encoder: Encoder | None) -> None:
        """The encoder, with its decoder or its head; an objective may leave something else."""
        if encoder is not None:
            export_encoder(self, folder, encoder)


class ObjectiveFile(Protocol):
    """What the file of an objective must have."""

    TITLE: str
    KIND: str  # "reconstructive" and "joint-embedding" ones can be the parts of a hybrid

    @property
    def views(self) -> Callable[[Any, Backbone], tuple[Policy, ...]]:
        """The policies by which the views of an image are made."""


class ObjectivePlugin(ObjectiveFile, Protocol):
    """What the engine sees: also what a file may leave out."""

    LABELS: bool  # whether it learns from labels: the backbone then has a classifier
    TARGETS: bool  # whether it learns from boxes, masks or maps, which are then in `views.targets`

    @property
    def Config(self) -> type[Any]:  # noqa: N802
        """Its settings, in the file `class …Config`: a frozen dataclass."""

    @property
    def Objective(self) -> Callable[..., Objective]:  # noqa: N802
        """In the file `class …Objective`: of backbone and config, and of what `first` has trained if there is any."""

    @property
    def first(self) -> Callable[[Any, Backbone], First | None]:
        """What has to be trained before, such as BEiT's tokenizer."""


OPTIONAL: Mapping[str, Any] = {"LABELS": False, "TARGETS": False, "first": lambda config, backbone: None}


def objective_named(name: str) -> ObjectivePlugin:
    return cast(ObjectivePlugin, plugins.held_to(ObjectivePlugin, "objectives", name, OPTIONAL))
