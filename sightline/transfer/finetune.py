"""Fine-tuning: an encoder and labelled images become a classifier, `run:FOLDER`, end to end.

The folder is described in training/folder.py; with `keep`, RUN/steps/00000000, … hold the classifier at points of the
training, `run:FOLDER?step=*`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric

from sightline.core.errors import InputError, nearest
from sightline.core.files import write_atomically
from sightline.core.processes import by_first, rank
from sightline.core.progress import console
from sightline.core.schedules import Progress, points
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.images.augment.policy import RADII, Policy
from sightline.images.sets import Images
from sightline.training.feed import Feed
from sightline.training.folder import compile_blocks, start, tell_skipped, training_folder
from sightline.training.launch import Launch
from sightline.training.loop import Loop
from sightline.training.monitor import read_metrics
from sightline.training.soft_labels import Mixing
from sightline.transfer.classification import ClassificationObjective
from sightline.transfer.classifier_head import POOLS, layers_of, with_classifier
from sightline.transfer.evaluate import accuracy
from sightline.transfer.recipe import TransferRecipe, assemble, overrides, resolve
from sightline.transfer.relative_positions import own_tables

NAME = "finetune"  # of the objective in recipes
ACCURACIES = ("val_accuracy", "test_accuracy")


@dataclass(frozen=True)
class FinetuneConfig:
    """What is fine-tuned, and how the images are changed on the way."""

    encoder: str = ""  # reference
    pool: str = ""  # what the classifier sees: cls, gap (mean of the patches), or the model's own
    keep_head: bool = False  # go on with the encoder's own classifier, whose classes must be those of the images
    reinit: str = ""  # first:n or last:n blocks get random weights before the training
    layer_decay: float = 0.75  # learning rate of a layer over that of the next
    drop_path: float = 0.1  # largest rate of stochastic depth
    crop: tuple[float, float] = (0.08, 1.0)  # share of the image that is seen
    flip: float = 0.5  # probability of the mirror image
    randaugment: tuple[float, float] = (9.0, 0.5)  # magnitude and its standard deviation; magnitude 0: without
    mixup: float = 0.8  # α of the beta distribution; 0: without
    cutmix: float = 1.0
    label_smoothing: float = 0.1
    erase: float = 0.0  # probability that a rectangle of an image becomes noise
    ema: float = 0.0  # momentum of an average of the weights, which is then what is kept; 0: without
    keep: str | int = ""  # points at which the classifier is kept: "log", or so many at equal distances; "": none

    def __post_init__(self) -> None:
        if self.pool not in POOLS:
            raise InputError(f"There is no pooling {self.pool!r}{nearest(self.pool, filter(None, POOLS))}")
        if not 0 < self.layer_decay <= 1:
            raise InputError(f"layer_decay is {self.layer_decay}; it must be in (0, 1]")
        for key in ("drop_path", "ema"):
            if not 0 <= getattr(self, key) < 1:
                raise InputError(f"{key} is {getattr(self, key)}; it must be in [0, 1)")
        points(self.keep, 1)
        Mixing(self.mixup, self.cutmix, self.label_smoothing).check()
        Policy(1, self.crop, flip=self.flip, randaugment=self.randaugment, erase=self.erase)  # says what cannot be


def make_recipe(*layers: Mapping[str, Any]) -> TransferRecipe[FinetuneConfig]:
    """Put a recipe together; later layers override earlier ones, and unknown keys are errors.

    >>> make_recipe({"layer_decay": 0.75}, {"layer_decay": 0.65, "lr": 1e-3}).config.layer_decay
    0.65
    """
    return assemble(NAME, FinetuneConfig, layers)


def finetune(
    encoder: str | Encoder | None,
    images: str | Images | None,
    out: str | Path,
    recipe: str | Path | None,
    settings: Mapping[str, Any],
    launch: Launch,
) -> Encoder:
    """Fine-tune an encoder, see `sightline.api`; gives the classifier, `run:{out}`."""
    out = Path(out)
    wanted = resolve(make_recipe, NAME, out, recipe, overrides(settings, images, encoder), launch)
    begins_with = encoder if isinstance(encoder, Encoder) else load_encoder(wanted.config.encoder)
    fabric, data = start(wanted, images, launch)
    parts = _prepare(wanted, own_tables(begins_with), data, fabric, launch)
    with training_folder(out, NAME, wanted, data, resume=launch.resume, begins_with=begins_with) as folder:
        last = _train(wanted, data, parts, folder.path, fabric, launch)
        by_first(lambda: _note_results(out))
        if launch.show_progress:
            tell_skipped(parts.feed)
    tuned = folder.encoder(last)
    results = json.loads((out / "run.json").read_text()).get("results", {})
    told = [f"{key.replace('_', ' ').capitalize()}: {value:.1%}" for key, value in results.items()]
    return replace(tuned, notes=[*tuned.notes, *told])


class _Parts(NamedTuple):
    encoder: Encoder
    objective: ClassificationObjective
    feed: Feed


def _prepare(
    wanted: TransferRecipe[FinetuneConfig], begins_with: Encoder, data: Images, fabric: Fabric, launch: Launch
) -> _Parts:
    """Everything that the training consists of; settings that do not fit are found here, before anything is written."""
    config, seed = wanted.config, wanted.training.seed
    if len(set(data.labels_of("train").tolist()) - {-1}) < 2:
        raise InputError(
            f"Fine-tuning needs labels of at least two classes, but {data.name} does not have them; give other images"
        )
    encoder = with_classifier(
        begins_with,
        data.classes,
        pool=config.pool,
        drop_path=config.drop_path,
        reinit=config.reinit,
        keep_head=config.keep_head,
        seed=seed,
    )
    if launch.show_progress and rank() == 0:
        for note in encoder.notes:
            console().print(note)
    objective = ClassificationObjective(
        encoder.module,
        {} if config.layer_decay == 1 else layers_of(encoder),
        len(data.classes),
        layer_decay=config.layer_decay,
        mixup=config.mixup,
        cutmix=config.cutmix,
        label_smoothing=config.label_smoothing,
        ema=config.ema,
    )
    if wanted.training.compile:
        compile_blocks(objective)
    return _Parts(encoder, objective, _feed(wanted, encoder, objective, data, fabric.device, launch.workers))


def _feed(
    wanted: TransferRecipe[FinetuneConfig],
    encoder: Encoder,
    objective: ClassificationObjective,
    data: Images,
    device: torch.device,
    workers: int | None,
) -> Feed:
    return Feed(
        data,
        (_view(wanted.config, encoder),),
        batch=wanted.optimization.batch,
        epochs=wanted.optimization.epochs,
        seed=wanted.training.seed,
        accumulate=wanted.optimization.accumulate,
        mean=encoder.preprocess.mean,
        std=encoder.preprocess.std,
        device=device,
        workers=workers,
        pairs=objective.pairs,
    )


def _train(
    wanted: TransferRecipe[FinetuneConfig], data: Images, parts: _Parts, out: Path, fabric: Fabric, launch: Launch
) -> dict[str, float]:
    """Gives the last row of the metrics, nothing if the training was finished already."""
    torch.manual_seed(wanted.training.seed + 1 + rank())  # drop path differs between processes
    return Loop(
        objective=parts.objective,
        feed=parts.feed,
        settings=wanted.optimization,
        folder=out,
        fabric=fabric,
        title=f"{parts.encoder.name} on {data.name}",
        encoder=parts.encoder,
        watchers=[_Accuracies(parts.objective, parts.encoder, data, fabric.device, launch)],
        evaluate_every=wanted.training.evaluate_every,
        keep=points(wanted.config.keep, parts.feed.steps),
        log_every=wanted.training.log_every,
        save_minutes=wanted.training.save_minutes,
        show_progress=launch.show_progress,
    ).run()


def _view(config: FinetuneConfig, encoder: Encoder) -> Policy:
    """One crop of each image, in the size and with the interpolation that the encoder is used with."""
    height, width = encoder.preprocess.size
    if height != width:
        raise InputError(f"{encoder.reference} sees images of {height} × {width}; only square ones can be trained on")
    how = encoder.preprocess.interpolation
    return Policy(
        height,
        config.crop,
        flip=config.flip,
        interpolation=how if how in RADII else "bicubic",
        randaugment=config.randaugment,
        erase=config.erase,
    )


class _Accuracies:
    """Accuracy on val on the way, and on test when all is done; processes share the images."""

    evaluates = True

    def __init__(
        self, objective: ClassificationObjective, encoder: Encoder, data: Images, device: torch.device, launch: Launch
    ) -> None:
        self.objective, self.preprocess, self.data = objective, encoder.preprocess, data
        self.device, self.workers = device, launch.workers
        self.splits = [
            split for split in ("val", "test") if split in data.splits and (data.labels_of(split) >= 0).any()
        ]
        if "val" not in self.splits and rank() == 0 and launch.show_progress:
            console().print(f"{data.name} has no labelled val split, so accuracy is not measured while training")

    def evaluate(self, progress: Progress) -> dict[str, float]:
        return {
            f"{split}_accuracy": accuracy(
                self.objective.encoder,
                self.data,
                split,
                preprocess=self.preprocess,
                device=self.device,
                workers=self.workers,
            )
            for split in self.splits
            if split == "val" or progress.step == progress.steps
        }

    def warning(self, row: Mapping[str, float]) -> str | None:
        return None


def _note_results(out: Path) -> None:
    """The accuracies of the finished training, from the last row of its metrics into run.json."""
    rows = read_metrics(out / "metrics.csv")
    about = json.loads((out / "run.json").read_text())
    about["results"] = {key: float(rows[-1][key]) for key in ACCURACIES if rows and rows[-1].get(key)}
    write_atomically(out / "run.json", json.dumps(about, indent=2).encode())
