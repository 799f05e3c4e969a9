"""A head trained on the maps of one encoder, in a folder of its own: what detectors and segmenters share.

The folder is described in training/folder.py; the file that a kind of training adds is written last, so that where it
is, all is done.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from lightning.fabric import Fabric

from sightline.core.files import write_atomically
from sightline.core.processes import barrier, by_first, rank
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.images.augment.policy import Policy
from sightline.images.sets import Images
from sightline.training.feed import Feed
from sightline.training.folder import start, tell_skipped, training_folder
from sightline.training.launch import Launch
from sightline.training.loop import Loop
from sightline.training.watchers import Watcher
from sightline.transfer.detection.cached import fitted, whole_image
from sightline.transfer.detection.features import FeatureMaps
from sightline.transfer.on_encoder import OnEncoder
from sightline.transfer.recipe import TransferRecipe, overrides, resolve
from sightline.transfer.relative_positions import own_tables

MEASURED = 256  # training images that the channels are standardised by

Learned = TypeVar("Learned", bound=OnEncoder)
Own = TypeVar("Own", bound="Parts[Any]")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Parts(Generic[Learned]):
    """What a training consists of."""

    encoder: Encoder
    objective: Learned
    features: FeatureMaps
    policy: Policy  # of the views that are trained on


def plain_feed(parts: Parts[Any], data: Images, shown: bool, settings: Mapping[str, Any]) -> Feed:
    """Images with their targets, computed on at each step."""
    preprocess = parts.encoder.preprocess
    return Feed(data, (parts.policy,), mean=preprocess.mean, std=preprocess.std, targets=True, **settings)


@dataclass(frozen=True)
class HeadTraining(Generic[Own, Found]):
    """One kind of training, as functions.

    `prepare` makes the parts, and finds whatever does not fit before anything is written; `find` looks at the test
    images, processes sharing them, and `write` makes of it the numbers for run.json and the content of `file`.
    """

    name: str  # of the objective in recipes
    file: str
    recipe: Callable[..., TransferRecipe[Any]]
    prepare: Callable[[TransferRecipe[Any], Encoder, Images, Launch], Own]
    watchers: Callable[[Own, Images, torch.device, int | None], Sequence[Watcher]]  # what is told of val on the way
    find: Callable[[Own, Images, torch.device, int | None], Found]
    write: Callable[[Own, Images, Found], tuple[Mapping[str, float], bytes]]
    feed: Callable[[Own, Images, bool, Mapping[str, Any]], Feed] = plain_feed


def train_head(
    kind: HeadTraining[Own, Found],
    what: str | Encoder | None,
    images: str | Images | None,
    out: Path,
    recipe: str | Path | None,
    settings: Mapping[str, Any] | None,
    launch: Launch,
) -> None:
    """Train a head on an encoder, or a reference to one, until its file is there."""
    wanted = resolve(kind.recipe, kind.name, out, recipe, overrides(settings, images, what), launch)
    begins_with = what if isinstance(what, Encoder) else load_encoder(wanted.config.encoder)
    fabric, data = start(wanted, images, launch)
    parts = kind.prepare(wanted, begins_with if wanted.config.frozen else own_tables(begins_with), data, launch)
    with training_folder(out, kind.name, wanted, data, resume=launch.resume, begins_with=begins_with):
        if not (out / kind.file).is_file():
            feed = _feed(kind, wanted, parts, data, fabric.device, launch)
            _train(kind, wanted, parts, data, feed, out, fabric, launch)
            found = kind.find(parts, data, fabric.device, launch.workers)
            by_first(lambda: _finish(out, kind.file, *kind.write(parts, data, found)))
            if launch.show_progress:
                tell_skipped(feed)
    barrier()  # the first process has written everything


def _feed(
    kind: HeadTraining[Own, Found],
    wanted: TransferRecipe[Any],
    parts: Own,
    data: Images,
    device: torch.device,
    launch: Launch,
) -> Feed:
    """What the steps are made on; the channels are measured first."""
    objective, preprocess = parts.objective.to(device), parts.encoder.preprocess
    if wanted.config.standardize:
        some = data.sample(MEASURED, wanted.training.seed)
        policy = whole_image(parts.policy.size, parts.policy.interpolation)
        objective.standard.learn(
            parts.features.look(preprocess.normalize(part.pixels.to(device)))
            for part in fitted(some, some.indices("train"), policy, workers=launch.workers)
            if part.rows
        )
    settings: dict[str, Any] = {
        "batch": wanted.optimization.batch,
        "epochs": wanted.optimization.epochs,
        "seed": wanted.training.seed,
        "accumulate": wanted.optimization.accumulate,
        "device": device,
        "workers": launch.workers,
    }
    return kind.feed(parts, data, launch.show_progress and rank() == 0, settings)


def _train(
    kind: HeadTraining[Own, Found],
    wanted: TransferRecipe[Any],
    parts: Own,
    data: Images,
    feed: Feed,
    out: Path,
    fabric: Fabric,
    launch: Launch,
) -> None:
    every = wanted.training.evaluate_every
    torch.manual_seed(wanted.training.seed + 1 + rank())  # regions and dropout differ between processes
    Loop(
        objective=parts.objective,
        feed=feed,
        settings=wanted.optimization,
        folder=out,
        fabric=fabric,
        title=f"{parts.encoder.name} on {data.name}",
        encoder=None if wanted.config.frozen else parts.encoder,
        watchers=kind.watchers(parts, data, fabric.device, launch.workers) if every else (),
        evaluate_every=every,
        log_every=wanted.training.log_every,
        save_minutes=wanted.training.save_minutes,
        show_progress=launch.show_progress,
    ).run()


def _finish(out: Path, file: str, results: Mapping[str, float], content: bytes) -> None:
    about = json.loads((out / "run.json").read_text()) | {"results": dict(results)}
    write_atomically(out / "run.json", json.dumps(about, indent=2).encode())
    write_atomically(out / file, content)
