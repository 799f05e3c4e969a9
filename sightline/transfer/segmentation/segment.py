"""A segmenter on one encoder: a linear head or UperNet is trained on its maps, and decides on every test pixel.

The folder is described in training/folder.py. Beside it there is

RUN/segments.npz   of every test image its id, and the pixels of each class that are right, decided, and there,
                   (n, 3, K); of some of them small pictures of the decisions

and, if the encoder was trained along, `run:FOLDER` is that encoder.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sightline.core.errors import InputError, nearest
from sightline.core.schedules import Progress
from sightline.encoders.encoder import Encoder
from sightline.images.augment.policy import RADII, Policy
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images
from sightline.measure.estimators.overlap import iou_of, mean_over_classes
from sightline.training.feed import check_batch
from sightline.training.folder import compile_blocks
from sightline.training.launch import Launch
from sightline.training.watchers import Watcher
from sightline.transfer.classifier_head import layers_of
from sightline.transfer.detection.features import FeatureMaps, Standard, trainable, whole_patches
from sightline.transfer.head_training import HeadTraining, Parts, train_head
from sightline.transfer.recipe import TransferRecipe, assemble
from sightline.transfer.segmentation.heads import SCALES, Auxiliary, LinearHead, Scales, UperNet
from sightline.transfer.segmentation.objective import SegmentationObjective
from sightline.transfer.segmentation.sliding import Segmented, Sliding

NAME = "segment"  # of the objective in recipes
HEADS = ("linear", "upernet")
FILE = "segments.npz"
SHOWN = 6  # test images whose decisions are kept as pictures


@dataclass(frozen=True)
class SegmentConfig:
    """What a segmenter stands on, and how the images are changed on the way."""

    encoder: str = ""  # reference
    head: str = "linear"  # or upernet
    frozen: bool = True  # False: the encoder is trained along
    blocks: str | int = ""  # whose maps are seen; empty: after the final norm (linear), four over the depth (upernet)
    size: int = 0  # of the windows in pixels, rounded up to whole patches; 0: the encoder's own
    standardize: bool = True  # every channel by its mean and deviation over the training images
    channels: int = 768  # of UperNet
    dropout: float = 0.1  # of channels before the last layer
    auxiliary: float = 0.4  # weight of the auxiliary head of UperNet; 0: without
    auxiliary_channels: int = 256
    layer_decay: float = 0.9  # learning rate of a layer over that of the next, if the encoder is trained along
    drop_path: float = 0.1  # largest rate of stochastic depth, likewise
    scale: tuple[float, float] = (0.5, 2.0)  # longer side of an image over that of its view
    flip: float = 0.5  # probability of the mirror image
    jitter: tuple[float, ...] = ()  # brightness, contrast, saturation, hue; empty: without

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise InputError(f"There is no head {self.head!r}{nearest(self.head, HEADS)}")
        if not 0 < self.layer_decay <= 1:
            raise InputError(f"layer_decay is {self.layer_decay}; it must lie in (0, 1]")
        for key in ("drop_path", "dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise InputError(f"{key} is {getattr(self, key)}; it must lie in [0, 1)")
        for key in ("size", "auxiliary"):
            if not getattr(self, key) >= 0:
                raise InputError(f"{key} is {getattr(self, key)}, but it cannot be negative")
        if min(self.channels, self.auxiliary_channels) < 1:
            raise InputError("channels and auxiliary_channels must be 1 at least")
        if len(self.jitter) not in (0, 4):
            raise InputError(f"jitter is {list(self.jitter)}, but brightness, contrast, saturation, hue are expected")
        Policy(1, fit=self.scale, flip=self.flip)  # says what cannot be


def make_recipe(*layers: Mapping[str, Any]) -> TransferRecipe[SegmentConfig]:
    """Put a recipe together; later layers override earlier ones, and unknown keys are errors.

    >>> make_recipe({"head": "linear"}, {"head": "upernet", "lr": 1e-3}).config.head
    'upernet'
    """
    return assemble(NAME, SegmentConfig, layers)


def train_segmenter(
    what: str | Encoder | None = None,
    images: str | Images | None = None,
    out: str | Path = "runs/segment",
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    launch: Launch | None = None,
) -> dict[str, Segmented]:
    """Train a segmenter on an encoder, or a reference to one; gives what came of the test images, by their ids.

    `recipe` is the name of one of Sightline's or a file, by default `segment`, the small one; `settings` override it.
    """
    train_head(_SEGMENTER, what, images, out := Path(out), recipe, settings, launch or Launch())
    return _read(out / FILE)


@dataclass(frozen=True)
class _Parts(Parts[SegmentationObjective]):
    window: Preprocess  # of the views that are evaluated

    def sliding(self, data: Images, device: torch.device, workers: int | None) -> Sliding:
        return Sliding(self.objective, self.window, len(data.classes) + 1, device, workers)


def check(wanted: TransferRecipe[SegmentConfig], encoder: Encoder, data: Images) -> None:
    """Say what cannot be, before the first of several encoders is trained."""
    _prepare(wanted, encoder, data, Launch())


def _prepare(wanted: TransferRecipe[SegmentConfig], begins_with: Encoder, data: Images, launch: Launch) -> _Parts:
    """Everything that the training consists of; settings that do not fit are found here, before anything is written."""
    config = wanted.config
    for split in ("train", "test"):
        if any(one.segmentation is None for one in data.targets(data.indices(split)[:1])):
            raise InputError(f"{data.name} has no segmentation maps; give others, such as shapes:scenes or masks:PATH")
    share = check_batch(data, len(data.indices("train")), wanted.optimization.batch, wanted.optimization.accumulate)
    if wanted.config.head == "upernet" and share < 2:
        raise InputError(
            "UperNet normalises over the images of a forward and needs two images or more in each forward; raise batch "
            "or lower accumulate"
        )
    size, encoder, blocks = whole_patches(begins_with, config.size), begins_with, _blocks(config, begins_with)
    if config.frozen:
        features = FeatureMaps(encoder, size, blocks)
    else:
        encoder, features = trainable(encoder, lambda copied: FeatureMaps(copied, size, blocks), config.drop_path)
    torch.manual_seed(wanted.training.seed)
    if wanted.training.compile:
        compile_blocks(features)
    how = encoder.preprocess.interpolation
    how = how if how in RADII else "bicubic"
    jitter: Any = config.jitter or None
    policy = Policy(size, None, fit=config.scale, flip=config.flip, jitter=jitter, interpolation=how)
    window = replace(encoder.preprocess, size=(size, size), resize=None, interpolation=how)
    return _Parts(encoder, _objective(config, encoder, features, len(data.classes) + 1), features, policy, window)


def _blocks(config: SegmentConfig, encoder: Encoder) -> str | int:
    """What the head looks at where nothing else is said; of a CNN there are its stages only."""
    if str(config.blocks) or encoder.tokens is None:
        return config.blocks if str(config.blocks) else "last"
    if config.head == "linear":
        return "norm" if "norm" in encoder.sites else "last"
    depth = encoder.depth
    if depth < SCALES:
        raise InputError(f"UperNet looks at {SCALES} blocks, but {encoder.reference} has {depth}; set head=linear")
    chosen = sorted({depth // 3 - 1, depth // 2 - 1, depth * 2 // 3 - 1, depth - 1} - {-1})
    spare = [block for block in range(depth) if block not in chosen]
    return ",".join(map(str, sorted([*chosen, *spare[: SCALES - len(chosen)]])))


def _objective(config: SegmentConfig, encoder: Encoder, features: FeatureMaps, classes: int) -> SegmentationObjective:
    widths = [shape[0] for shape in features.shapes]
    more: dict[str, Any] = {}
    head: LinearHead | UperNet
    if config.head == "linear":
        if features.staged:
            raise InputError(f"head=linear is for encoders with patches; set head=upernet for {encoder.reference}")
        head = LinearHead(widths[0], classes, config.dropout)
    else:
        if not features.staged:
            if len(features.sites) != SCALES:
                raise InputError(f"UperNet looks at {SCALES} blocks, not at blocks={config.blocks}; name {SCALES}")
            widths = [widths[0] // SCALES] * SCALES
            more["scales"] = Scales(widths[0])
        head = UperNet(widths, config.channels, classes, config.dropout)
        if config.auxiliary:
            more["auxiliary"] = Auxiliary(widths[2], config.auxiliary_channels, classes, config.dropout)
            more["auxiliary_weight"] = config.auxiliary
    return SegmentationObjective(
        features,
        Standard([shape[0] for shape in features.shapes]),
        head,
        frozen=config.frozen,
        layers={} if config.frozen or config.layer_decay == 1 else layers_of(encoder),
        layer_decay=config.layer_decay,
        **more,
    )


class _Overlap:
    """mIoU on val on the way."""

    evaluates = True

    def __init__(self, data: Images, sliding: Sliding) -> None:
        self.data, self.sliding = data, sliding

    def evaluate(self, progress: Progress) -> dict[str, float]:
        return {"val_miou": _miou(self.sliding.over(self.data, "val"))}

    def warning(self, row: Mapping[str, float]) -> str | None:
        return None


def _miou(found: Mapping[str, Segmented]) -> float:
    return float(mean_over_classes(iou_of(np.sum([one.counts for one in found.values()], 0))))


def shown_ids(data: Images) -> list[str]:
    """The test images that are shown as pictures, evenly over the split."""
    where = data.indices("test")
    return [str(data.ids[i]) for i in where[:: max(1, len(where) // SHOWN)][:SHOWN]]


def _watchers(parts: _Parts, data: Images, device: torch.device, workers: int | None) -> list[Watcher]:
    apart = {"val", "test"} <= set(data.splits)  # without a test split, val is what is measured at the end
    return [_Overlap(data, parts.sliding(data, device, workers))] if apart else []


def _find(parts: _Parts, data: Images, device: torch.device, workers: int | None) -> dict[str, Segmented]:
    segmented = parts.sliding(data, device, workers).over(data, "test", frozenset(shown_ids(data)))
    if not segmented:
        raise InputError(f"None of the test images of {data.name} could be read; give some")
    return segmented


def _write(parts: _Parts, data: Images, found: Mapping[str, Segmented]) -> tuple[dict[str, float], bytes]:
    """mIoU of the test images, and what came of each of them."""
    return {"test_miou": _miou(found)}, _written(found)


def _written(found: Mapping[str, Segmented]) -> bytes:
    buffer = io.BytesIO()
    pictures = {f"picture_{i}": one.picture for i, one in enumerate(found.values()) if one.picture.size}
    arrays: dict[str, Any] = {"counts": np.stack([one.counts for one in found.values()]), **pictures}
    np.savez_compressed(buffer, ids=np.array(list(found)), **arrays)
    return buffer.getvalue()


def _read(file: Path) -> dict[str, Segmented]:
    try:
        with np.load(file, allow_pickle=False) as kept:
            nothing = np.zeros((0, 0), np.int16)
            return {
                str(name): Segmented(counts, kept.get(f"picture_{i}", nothing))
                for i, (name, counts) in enumerate(zip(kept["ids"], kept["counts"], strict=True))
            }
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{file} is damaged; delete it, and the same command segments the test images again"
        ) from error


_SEGMENTER = HeadTraining(NAME, FILE, make_recipe, _prepare, _watchers, _find, _write)
