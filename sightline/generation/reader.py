"""The reader: a small network, trained on real images, that reads attributes off pictures.

| attribute | what it is | from |
|---|---|---|
| class | of the image | labels |
| orientation | whether the picture is as in the set of images, or mirrored | nothing: images are mirrored for it |
| position, size | centre and √area of the largest object's box, as shares of the picture | boxes |
| object, background | mean colour inside and outside the largest object's mask | masks |
| colour | mean colour of the whole picture | nothing |

How well it reads real test images is the ceiling of what can be said about pictures by it.

B pictures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn

from sightline.generation.training import by_row, centre_crop
from sightline.images.augment.crops import boxes
from sightline.images.sets import Images, TargetSource
from sightline.images.targets import Targets, move
from sightline.training.feed import Feed
from sightline.training.loop import Loop
from sightline.training.objective import Learner, Views
from sightline.training.optimization import Optimization

if TYPE_CHECKING:
    import numpy.typing as npt


CLASS, ORIENTATION = "class", "orientation"
FLIP = 0x4EA
LARGEST = 4096  # images that it learns from
TOGETHER = 256  # images that are read at a time
EPOCHS, BATCH, LR = 12, 64, 2e-3


def attributes_of(images: Images, split: str, size: int) -> dict[str, npt.NDArray[np.float64]]:
    """What is known of the images of a split, (n, m) each; NaN where an image says nothing."""
    positions, source = images.indices(split).tolist(), images.source
    widths = {"colour": 3}
    if isinstance(source, TargetSource):
        widths |= {"position": 2, "size": 1, "object": 3, "background": 3}
    found = {name: np.full((len(positions), width), np.nan) for name, width in widths.items()}
    for start in range(0, len(positions), TOGETHER):
        some = positions[start : start + TOGETHER]
        targets = source.targets(some) if isinstance(source, TargetSource) else [None] * len(some)
        for row, (item, known) in enumerate(zip(source.read(some), targets, strict=True), start):
            if item.image is not None:
                for name, values in _attributes(item.image, known, size).items():
                    found[name][row] = values
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


def _attributes(
    image: npt.NDArray[np.uint8], targets: Targets[npt.NDArray[Any]] | None, size: int
) -> dict[str, npt.NDArray[Any]]:
    """Those of one image, of the part that is drawn."""
    height, width = (np.array([side]) for side in image.shape[:2])
    box = boxes(height, width, centre_crop(size), np.zeros(1, np.uint64))[0]
    top, left, side, _ = box.tolist()
    pixels = image[top : top + side, left : left + side] / 255
    found: dict[str, npt.NDArray[Any]] = {"colour": pixels.mean((0, 1))}
    seen = None if targets is None else move(targets, box, False, side)
    if seen is None or not len(seen.labels):
        return found
    largest = int(np.prod(seen.boxes[:, 2:] - seen.boxes[:, :2], 1).argmax())
    x0, y0, x1, y1 = seen.boxes[largest] / side
    found |= {"position": np.array([(x0 + x1) / 2, (y0 + y1) / 2]), "size": np.sqrt((x1 - x0) * (y1 - y0))}
    if seen.masks is not None and not (mask := seen.masks[largest]).all():
        found |= {"object": pixels[mask].mean(0), "background": pixels[~mask].mean(0)}
    return found


def mirrored_attributes(values: Mapping[str, Tensor], mirrored: Tensor) -> dict[str, Tensor]:
    """The attributes of images of which some are mirrored: only where an object lies changes."""
    found = dict(values)
    if "position" in found:
        turned = found["position"] * torch.tensor([-1.0, 1.0]) + torch.tensor([1.0, 0.0])
        found["position"] = torch.where(mirrored.cpu()[:, None], turned, found["position"])
    return found


@dataclass(frozen=True, eq=False)
class _Scale:
    """Mean and deviation of an attribute over training images."""

    mean: Tensor
    deviation: Tensor


class AttributeReader(Learner):
    """Convolutions over a picture, then a Linear for each attribute."""

    def __init__(
        self, known: Mapping[str, npt.NDArray[np.float64]], labels: npt.NDArray[np.int64], classes: int
    ) -> None:
        super().__init__()
        self.known = {name: torch.from_numpy(values).float() for name, values in known.items()}
        self.labels, self.classes = torch.from_numpy(labels), classes
        self.scales = {
            name: _Scale(values.nanmean(0), (values - values.nanmean(0)).square().nanmean(0).sqrt().clamp(min=1e-6))
            for name, values in self.known.items()
        }
        self.body = nn.Sequential(
            *_block(3, 32, 1), *_block(32, 64, 2), *_block(64, 64, 1), *_block(64, 128, 2), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Linear(128 * 16, 128), nn.SiLU(),
        )  # fmt: skip
        widths = {name: values.shape[1] for name, values in self.known.items()}
        if classes > 1:
            widths[CLASS] = classes
        self.heads = nn.ModuleDict({name: nn.Linear(128, width) for name, width in (widths | {ORIENTATION: 2}).items()})

    def scores(self, pictures: Tensor) -> dict[str, Tensor]:
        """What it makes of pictures (B, 3, h, w) in [−1, 1]: standardised numbers, or scores of classes."""
        seen = self.body(pictures)
        return {name: head(seen) for name, head in self.heads.items()}

    @torch.no_grad()
    def read(self, pictures: Tensor) -> dict[str, npt.NDArray[np.float64]]:
        """Attributes of pictures, (B, m): numbers as they are, probabilities of classes."""
        self.eval()
        parts = [self.scores(part) for part in torch.split(pictures, TOGETHER)]
        found = {}
        for name in self.heads:
            values = torch.cat([part[name] for part in parts]).cpu()
            if name in self.scales:
                values = values * self.scales[name].deviation + self.scales[name].mean
            else:
                values = values.softmax(1)
            found[name] = values.double().numpy()
        return found

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Squared errors of what is known, and cross-entropies."""
        rows = views.labels.cpu()
        mirrored = views.random(1, FLIP)[:, 0] < 0.5
        pictures = torch.where(mirrored.view(-1, 1, 1, 1), views.pixels[0].flip(-1), views.pixels[0])
        scores = self.scores(pictures)
        loss = F.cross_entropy(scores[ORIENTATION], mirrored.long())
        truth = mirrored_attributes({name: values[rows] for name, values in self.known.items()}, mirrored)
        for name, values in truth.items():
            wanted = ((values - self.scales[name].mean) / self.scales[name].deviation).to(loss.device)
            there = wanted.isfinite()
            loss = loss + ((scores[name] - wanted.nan_to_num()).square() * there).mean()
        if CLASS in scores:
            labels = self.labels[rows].to(loss.device)
            loss = loss + F.cross_entropy(scores[CLASS], labels.clamp(min=0), reduction="none")[
                labels >= 0
            ].sum() / len(labels)
        return loss, {}


def _block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.SiLU()]


def train_reader(
    images: Images, size: int, folder: Path, fabric: Fabric, *, seed: int, epochs: float = EPOCHS, **loop: Any
) -> AttributeReader:
    """A reader of pictures of this size, trained on real images, or taken from the folder if it is finished there."""
    some = images.sample(LARGEST, seed)
    classes = len(images.classes) if len(set(some.labels_of("train").tolist()) - {-1}) > 1 else 0
    torch.manual_seed(seed)
    reader = AttributeReader(attributes_of(some, "train", size), some.labels_of("train"), classes)
    batch = min(BATCH, len(some.indices("train")))
    feed = Feed(
        by_row(some, "train"),
        (centre_crop(size),),
        batch=batch,
        epochs=epochs,
        seed=seed,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        device=fabric.device,
        workers=0,
    )
    settings = Optimization(batch=batch, epochs=epochs, lr=LR, weight_decay=0.05, warmup_epochs=min(1, epochs / 10))
    Loop(reader, feed, settings, folder, fabric, "reader of pictures", **loop).run()
    return reader


def read_accuracies(
    reader: AttributeReader,
    pictures: Tensor,
    known: Mapping[str, npt.NDArray[np.float64]],
    labels: npt.NDArray[np.int64],
) -> dict[str, float]:
    """How well it reads real pictures and their mirror images: R² of numbers, accuracy of classes."""
    both = torch.cat([pictures, pictures.flip(-1)])
    mirrored = torch.arange(len(both)) >= len(pictures)
    read = reader.read(both.to(next(reader.parameters()).device))
    twice = {name: torch.from_numpy(np.concatenate([values, values])) for name, values in known.items()}
    found = {ORIENTATION: float((read[ORIENTATION].argmax(1) == mirrored.numpy()).mean())}
    for name, values in mirrored_attributes({k: v.float() for k, v in twice.items()}, mirrored).items():
        if name in read:
            truth = values.double().numpy()
            there = np.isfinite(truth).all(1)
            left = float(np.square(read[name][there] - truth[there]).sum())
            whole = float(np.square(truth[there] - truth[there].mean(0)).sum())
            found[name] = 1 - left / whole if whole > 0 else math.nan  # nothing to be read where all are alike
    if CLASS in read:
        truth = np.concatenate([labels, labels])
        found[CLASS] = float((read[CLASS].argmax(1) == truth)[truth >= 0].mean())
    return found
