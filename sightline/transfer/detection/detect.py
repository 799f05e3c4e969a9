"""A detector on one encoder: Mask R-CNN is trained on its maps, and finds the objects of the test images.

The folder is described in training/folder.py. Beside it there is

RUN/detections.json   what was found in the test images: labels, scores, boxes and masks (COCO's run lengths) by image

and, if the encoder was trained along, `run:FOLDER` is that encoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from sightline.core.errors import InputError, counted
from sightline.core.processes import rank
from sightline.core.progress import console
from sightline.core.schedules import Progress
from sightline.encoders.encoder import Encoder
from sightline.images.augment.policy import RADII, Policy
from sightline.images.sets import Images
from sightline.training.feed import Feed, check_batch
from sightline.training.folder import compile_blocks
from sightline.training.launch import Launch
from sightline.training.watchers import Watcher
from sightline.transfer.classifier_head import layers_of
from sightline.transfer.detection.average_precision import KINDS, Range, ap_of
from sightline.transfer.detection.cached import CachedFeed, cache_bytes
from sightline.transfer.detection.detector import Detector, Heads
from sightline.transfer.detection.features import FeatureMaps, Standard, check_trainable, trainable, whole_patches
from sightline.transfer.detection.objective import DetectionObjective
from sightline.transfer.detection.objects import (
    Detections,
    Objects,
    objects_of,
    parse_detections,
    read_detections,
    write_detections,
)
from sightline.transfer.detection.pyramid import SimplePyramid, StagePyramid
from sightline.transfer.head_training import HeadTraining, Parts, plain_feed, train_head
from sightline.transfer.recipe import TransferRecipe, assemble

NAME = "detect"  # of the objective in recipes
ALL = Range("all", 0, 1e5)
FILE = "detections.json"


@dataclass(frozen=True)
class DetectConfig(Heads):
    """What a detector stands on, and how the images are changed on the way; `Heads` are its measures."""

    encoder: str = ""  # reference
    frozen: bool = True  # False: the encoder is trained along
    blocks: str | int = "last"  # whose maps are seen: last, or several, last-3,last-2,last-1,last
    size: int = 0  # of the images in pixels, rounded up to whole patches; 0: the encoder's own
    standardize: bool = True  # every channel by its mean and deviation over the training images
    layer_decay: float = 0.7  # learning rate of a layer over that of the next, if the encoder is trained along
    drop_path: float = 0.1  # largest rate of stochastic depth, likewise
    scale: tuple[float, float] = (1.0, 1.0)  # of the image within its view: large-scale jitter
    flip: float = 0.5  # probability of the mirror image
    areas: tuple[float, ...] = ()  # √area in pixels between small, medium and large; empty: COCO's, or terciles
    cache_gb: float = 4.0  # memory for the maps of a frozen encoder; 0: they are computed at each step

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.layer_decay <= 1:
            raise InputError(f"layer_decay is {self.layer_decay}; it must be in (0, 1]")
        if not 0 <= self.drop_path < 1:
            raise InputError(f"drop_path is {self.drop_path}; it must be in [0, 1)")
        for key in ("size", "cache_gb"):
            if not getattr(self, key) >= 0:
                raise InputError(f"{key} is {getattr(self, key)}, but it cannot be negative")
        if self.areas and not (len(self.areas) == 2 and 0 < self.areas[0] < self.areas[1]):
            raise InputError(f"areas is {list(self.areas)}, but two sides in pixels are expected, such as [32, 96]")
        Policy(1, fit=self.scale, flip=self.flip)  # says what cannot be


def make_recipe(*layers: Mapping[str, Any]) -> TransferRecipe[DetectConfig]:
    """Put a recipe together; later layers override earlier ones, and unknown keys are errors.

    >>> make_recipe({"channels": 256}, {"channels": 64, "lr": 1e-3}).config.channels
    64
    """
    return assemble(NAME, DetectConfig, layers)


def train_detector(
    what: str | Encoder | None = None,
    images: str | Images | None = None,
    out: str | Path = "runs/detect",
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    launch: Launch | None = None,
) -> dict[str, Detections]:
    """Train a detector on an encoder, or a reference to one; gives what it finds in the test images, by their ids.

    `recipe` is the name of one of Sightline's or a file, by default `detect`, the small one; `settings` override it.
    """
    train_head(_DETECTOR, what, images, out := Path(out), recipe, settings, launch or Launch())
    return read_detections(out / FILE)


def check(wanted: TransferRecipe[DetectConfig], encoder: Encoder, data: Images) -> None:
    """Find what does not fit before anything is trained: the images, and the maps of the encoder."""
    config = wanted.config
    check_images(data, config.masks)
    check_batch(data, len(data.indices("train")), wanted.optimization.batch, wanted.optimization.accumulate)
    if not config.frozen:
        check_trainable(encoder)
    FeatureMaps(encoder, whole_patches(encoder, config.size), config.blocks)


@dataclass(frozen=True)
class _Parts(Parts[DetectionObjective]):
    cached: bool  # whether the maps of all training images are kept in memory


def _prepare(wanted: TransferRecipe[DetectConfig], begins_with: Encoder, data: Images, launch: Launch) -> _Parts:
    """Everything that the training consists of; settings that do not fit are found here, before anything is written."""
    config = wanted.config
    check_images(data, config.masks)
    check_batch(data, len(data.indices("train")), wanted.optimization.batch, wanted.optimization.accumulate)
    size = whole_patches(begins_with, config.size)
    encoder = begins_with
    if config.frozen:
        features = FeatureMaps(encoder, size, config.blocks)
    else:
        encoder, features = trainable(
            encoder, lambda copied: FeatureMaps(copied, size, config.blocks), config.drop_path
        )
    torch.manual_seed(wanted.training.seed)
    widths = [shape[0] for shape in features.shapes]
    pyramid = (
        StagePyramid(widths, config.channels, config.strides)
        if features.staged
        else SimplePyramid(widths[0], config.channels, config.strides)
    )
    how = encoder.preprocess.interpolation
    policy = Policy(size, None, fit=config.scale, flip=config.flip, interpolation=how if how in RADII else "bicubic")
    cached = _fits(config, features, encoder, data, launch)
    objective = DetectionObjective(
        features,
        Standard(widths),
        Detector(pyramid, len(data.classes), config),
        frozen=config.frozen,
        cached=cached,
        tight=config.scale != (1.0, 1.0),
        layers={} if config.frozen or config.layer_decay == 1 else layers_of(encoder),
        layer_decay=config.layer_decay,
    )
    if wanted.training.compile:
        compile_blocks(features)
    return _Parts(encoder, objective, features, policy, cached)


def _fits(config: DetectConfig, features: FeatureMaps, encoder: Encoder, data: Images, launch: Launch) -> bool:
    """Whether the maps of all training images are kept in memory; every process of a machine has a copy of its own."""
    if not config.frozen:
        return False
    needed = cache_bytes(features, len(data.indices("train")), bool(config.flip))
    cached = config.scale == (1.0, 1.0) and needed * launch.processes()[0] <= config.cache_gb * 10**9
    if launch.show_progress and rank() == 0:
        why = "kept in memory" if cached else "computed at each step"
        console().print(
            f"Maps of {encoder.name} for {counted(len(data.indices('train')), 'image')}: {decimal(needed)}, {why}"
        )
    return cached


def check_images(data: Images, masks: bool) -> None:
    """Refuse images on which nothing can be learned or found."""
    source = data.target_source()
    for split in ("train", "test"):
        some = source.targets([int(position) for position in data.indices(split)[:16]])
        if masks and any(one.masks is None for one in some):
            raise InputError(f"{data.name} has boxes without masks; set masks=false for boxes alone")
        for one in some:
            if len(one.labels) and one.labels.max() >= len(data.classes):
                raise InputError(
                    f"{data.name} has an object of class {one.labels.max()}, but only "
                    f"{counted(len(data.classes), 'class')}; name all classes"
                )


def _feed(parts: _Parts, data: Images, shown: bool, settings: Mapping[str, Any]) -> Feed:
    """The images of the steps, or their maps."""
    if not parts.cached:
        return plain_feed(parts, data, shown, settings)
    standard, preprocess = parts.objective.standard, parts.encoder.preprocess
    return CachedFeed(parts.features, standard, preprocess, data, parts.policy, show_progress=shown, **settings)


def truth_of(data: Images, split: str) -> dict[str, Objects]:
    """What is to be found in the images of a split, by their ids."""
    where = data.indices(split)
    source = data.target_source()
    return {str(data.ids[i]): objects_of(source.targets([int(i)])[0]) for i in where}


def _found_in(
    parts: _Parts, data: Images, split: str, device: torch.device, workers: int | None
) -> dict[str, Detections]:
    """What the detector finds in the images of a split."""
    return parts.objective.detect(
        data,
        split,
        preprocess=parts.encoder.preprocess,
        interpolation=parts.policy.interpolation,
        device=device,
        workers=workers,
    )


class _Precision:
    """AP on val on the way; processes share the images."""

    evaluates = True

    def __init__(self, parts: _Parts, data: Images, device: torch.device, workers: int | None) -> None:
        self.parts, self.data, self.device, self.workers = parts, data, device, workers
        self.truth = truth_of(data, "val")

    def evaluate(self, progress: Progress) -> dict[str, float]:
        found = _found_in(self.parts, self.data, "val", self.device, self.workers)
        return {f"val_{key}": value for key, value in _numbers(self.parts, self.data, self.truth, found).items()}

    def warning(self, row: Mapping[str, float]) -> str | None:
        return None


def _numbers(
    parts: _Parts, data: Images, truth: Mapping[str, Objects], found: Mapping[str, Detections]
) -> dict[str, float]:
    """AP of all objects by kind, of the images that could be read."""
    seen = {name: one for name, one in truth.items() if name in found}
    kinds = KINDS if parts.objective.detector.heads.masks else KINDS[:1]
    return {f"{kind}_AP": float(ap_of(seen, found, len(data.classes), [ALL], kind)[0, 0]) for kind in kinds}


def _watchers(parts: _Parts, data: Images, device: torch.device, workers: int | None) -> list[Watcher]:
    return [_Precision(parts, data, device, workers)] if "val" in data.splits and len(data.indices("val")) else []


def _find(parts: _Parts, data: Images, device: torch.device, workers: int | None) -> dict[str, Detections]:
    return _found_in(parts, data, "test", device, workers)


def _write(parts: _Parts, data: Images, found: Mapping[str, Detections]) -> tuple[dict[str, float], bytes]:
    """AP of the test images, as it is of what can be read again, and the detections."""
    content = write_detections(found, data.classes)
    return _numbers(parts, data, truth_of(data, "test"), parse_detections(content)), content


_DETECTOR = HeadTraining(NAME, FILE, make_recipe, _prepare, _watchers, _find, _write, _feed)
