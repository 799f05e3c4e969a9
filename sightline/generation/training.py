"""The training of RCDM: one UNet for all encoders, images and conditions flipped together, on the one loop.

Every picture of a batch is given the representation of one of the encoders, drawn again in each epoch: they share one
prior, and what differs between them are their conditions. Encoders are never trained: their representations lie on disk
before the first step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.folders import latest
from sightline.core.keyed_random import fold
from sightline.core.processes import rank
from sightline.core.schedules import Progress
from sightline.core.settings import flatten
from sightline.encoders.encoder import Encoder
from sightline.generation.conditions import Conditions, Feature
from sightline.generation.denoiser import Denoiser, Shape, save_model
from sightline.generation.noise import normal_noise, process_named
from sightline.images.augment.policy import Policy
from sightline.images.sets import Images
from sightline.training.feed import Feed
from sightline.training.folder import check_unchanged, kept_recipe, tell_skipped, training_folder
from sightline.training.launch import Launch
from sightline.training.loop import Loop
from sightline.training.momentum import follow, momentum_copy
from sightline.training.objective import Learner, Views
from sightline.training.optimization import Optimization
from sightline.training.recipe import Training, make_parts

NAME = "rcdm"  # of the objective in recipes
NUMBERS, NOISE = 0x5CD, 0x5CE  # what random numbers are drawn for


@dataclass(frozen=True)
class DiffusionConfig(Shape):
    """What is drawn from what."""

    encoders: tuple[str, ...] = ()  # references
    feature: str = ""  # SITE.POOLING, norm.cls or block.6.gap; by default each encoder's last
    ema: float = 0.995  # momentum of an average of the weights, which is what is kept; 0: without
    sampling_steps: int = 12  # of the scheduler

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ema < 1:
            raise InputError(f"ema is {self.ema}; it must lie in [0, 1)")
        if self.sampling_steps < 2:
            raise InputError(f"sampling_steps is {self.sampling_steps}, but at least 2 are needed")

    @property
    def network(self) -> Shape:
        """The part of it that builds the network."""
        return Shape(**{key: getattr(self, key) for key in Shape.__dataclass_fields__})


@dataclass(frozen=True)
class DiffusionRecipe:
    """Everything that decides a training."""

    optimization: Optimization
    training: Training
    config: DiffusionConfig
    objective: str = NAME

    def values(self) -> dict[str, Any]:
        """All settings in one flat table."""
        return flatten(NAME, self.config, self.training, self.optimization)


def make_recipe(*layers: Mapping[str, Any]) -> DiffusionRecipe:
    """Put a recipe together; later layers override earlier ones, and unknown keys are errors.

    >>> make_recipe({"size": 24}, {"size": 32, "lr": 1e-3}).config.size
    32
    """
    if other := {layer.get("objective", NAME) for layer in layers} - {NAME}:
        raise InputError(f"This is a recipe of {other.pop()}, not of rcdm; use it with its own command")
    return DiffusionRecipe(*make_parts(NAME, (Optimization, Training, DiffusionConfig), layers))


class DiffusionObjective(Learner):
    """Denoise pictures, each with the representation of one of the encoders."""

    def __init__(
        self, denoiser: Denoiser, conditions: Sequence[Conditions], about: Sequence[Mapping[str, Any]], ema: float
    ) -> None:
        super().__init__()
        self.denoiser, self.sources, self.about, self.ema = denoiser, tuple(conditions), tuple(about), ema
        self.process = process_named(denoiser.shape.process)
        for condition, own in zip(denoiser.conditions, conditions, strict=True):
            mean, scale = own.standards()
            condition.mean.copy_(torch.from_numpy(mean))  # type: ignore[operator]
            condition.scale.fill_(scale)  # type: ignore[operator]
        self.average = momentum_copy(denoiser) if ema else None

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss; `views.labels` are the rows of the images in their split."""
        pictures, rows = views.pixels[0], views.labels.numpy(force=True)
        flips, turns, levels = views.random(3, NUMBERS).unbind(1)
        mirrored = flips < 0.5
        pictures = torch.where(mirrored.view(-1, 1, 1, 1), pictures.flip(-1), pictures)
        which = (turns * len(self.sources)).long()
        own = which.numpy(force=True)
        features = [
            conditions.at(rows[own == number], mirrored.numpy(force=True)[own == number])
            for number, conditions in enumerate(self.sources)
        ]
        embedded = self.denoiser.embed(features, which)
        noise = normal_noise(fold(views.keys, 1, NOISE), tuple(pictures.shape[1:])).to(pictures.device)
        losses = self.process.losses(
            lambda noisy, times: self.denoiser(noisy, times, embedded), pictures, noise, levels
        )
        return losses.mean(), {}

    def after_step(self, progress: Progress) -> None:
        """The average follows; at first faster, so that it forgets the weights that it began with."""
        if self.average is not None:
            follow(self.average, self.denoiser, min(self.ema, (1 + progress.step) / (10 + progress.step)))

    def export(self, folder: Path, encoder: Encoder | None) -> None:
        """The model that is kept, in the format of diffusers."""
        save_model(folder, self.average or self.denoiser, self.about)


def by_row(images: Images, split: str) -> Images:
    """The same images, each labelled with its row in a split: a step then knows which images it sees."""
    labels = np.full(len(images.ids), -1, np.int64)
    labels[images.indices(split)] = np.arange(len(images.indices(split)))
    return replace(images, labels=labels)


def centre_crop(size: int) -> Policy:
    """The largest square in the middle of an image."""
    return Policy(size, crop=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0)


def train_denoiser(
    members: Mapping[str, tuple[Encoder, Feature]],
    conditions: Mapping[str, Conditions],
    data: Images,
    out: Path,
    wanted: DiffusionRecipe,
    fabric: Fabric,
    launch: Launch,
) -> Path:
    """Train into a folder, or go on there; gives the folder of the finished checkpoint."""
    if (kept := kept_recipe(out, launch)) is not None:
        check_unchanged(out, make_recipe(kept), wanted)
    torch.manual_seed(wanted.training.seed)
    about = [
        {"name": name, "reference": encoder.reference, "weights": encoder.weights, "feature": str(feature)}
        for name, (encoder, feature) in members.items()
    ]
    denoiser = Denoiser(wanted.config.network, [conditions[name].width for name in members])
    objective = DiffusionObjective(denoiser, [conditions[name] for name in members], about, wanted.config.ema)
    feed = Feed(
        by_row(data, "train"),
        (centre_crop(wanted.config.size),),
        batch=wanted.optimization.batch,
        epochs=wanted.optimization.epochs,
        seed=wanted.training.seed,
        accumulate=wanted.optimization.accumulate,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        device=fabric.device,
        workers=launch.workers,
    )
    with training_folder(out, NAME, wanted, data, resume=launch.resume) as folder:
        torch.manual_seed(wanted.training.seed + 1 + rank())
        Loop(
            objective=objective,
            feed=feed,
            settings=wanted.optimization,
            folder=folder.path,
            fabric=fabric,
            title=f"rcdm of {', '.join(members)} on {data.name}",
            log_every=wanted.training.log_every,
            save_minutes=wanted.training.save_minutes,
            show_progress=launch.show_progress,
        ).run()
        if launch.show_progress:
            tell_skipped(feed)
    fabric.barrier()
    checkpoint = latest(out)
    assert checkpoint is not None
    return checkpoint
