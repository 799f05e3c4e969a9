"""Plans with made encoders, images and activations, for analyses that need no model to be tested."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from sightline.encoders.sites import Tokens
from sightline.images.pipeline import Batch
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images
from sightline.measure.contract import result_of
from sightline.measure.plan import Key, Plan

Array = np.ndarray[Any, Any]

WIDTH, TRAIN, TEST = 6, 40, 24
LAYOUT = Tokens(prefix=2, cls=0, grid=(2, 2))
TOKENS, MAP = (LAYOUT.count, WIDTH), (WIDTH, 3, 3)
LAYERS = {"vit": {"block.0": TOKENS, "block.1": TOKENS, "norm": TOKENS}, "cnn": {"block.0": MAP, "block.1": MAP}}
PLAIN = {"train": ("plain",), "test": ("plain",)}


def make_images(labels: Array, splits: Mapping[str, int], classes: tuple[str, ...], **extras: Array) -> Images:
    ends = np.cumsum(list(splits.values()))
    where = {name: np.arange(end - n, end) for (name, n), end in zip(splits.items(), ends, strict=True)}
    ids = np.array([f"image-{i:03d}" for i in range(ends[-1])])
    source: Any = None
    return Images("made", source, ids, labels, classes, where, extras=extras)


def make_plan(
    cache: Path,
    labels: Array | None = None,
    layers: Mapping[str, Mapping[str, tuple[int, ...]]] = LAYERS,
    views: Mapping[str, tuple[str, ...]] = PLAIN,
    classes: tuple[str, ...] = ("a", "b", "c"),
    **extras: Array,
) -> Plan:
    """A plan for 40 training images and 24 of each other split; encoders are named vit… (with CLS) or otherwise."""
    splits = {split: TRAIN if split == "train" else TEST for split in views}
    labels = np.arange(sum(splits.values())) % len(classes) if labels is None else labels
    images = make_images(labels, splits, classes, **extras)
    encoders: Any = {
        name: SimpleNamespace(
            name=name,
            weights=name,
            module=nn.Identity(),
            reference=name,
            family="made",
            depth=2,
            heads=None,
            patch=None,
            tokens=LAYOUT if name.startswith("vit") else None,
            preprocess=Preprocess(),
            classes=None,
            has_places=lambda _: True,
            stages=(),
            sites=tuple(layers[name]),
        )
        for name in layers
    }
    sites = {name: tuple(of) for name, of in layers.items()}
    return Plan(encoders, sites, layers, images, tuple(splits), views, 8, 8, 0, "float32", cache, {})


def activations(plan: Plan) -> dict[Key, torch.Tensor]:
    """Activations of all images at all sites; all but the first block know the class."""
    random = torch.Generator().manual_seed(0)
    found = {}
    label = torch.from_numpy(plan.images.labels)
    for encoder, sites in plan.sites.items():
        for site in sites:
            values = torch.randn((len(label), *plan.shapes[encoder][site]), generator=random)
            if site != "block.0":
                wide = values.shape[1 if values.ndim in (2, 4) else 2]
                signal = nn.functional.one_hot(label.clamp(min=0), wide).float() * 2
                values += signal.view({2: (-1, wide), 3: (-1, 1, wide), 4: (-1, wide, 1, 1)}[values.ndim])
            found[Key(encoder, site, "plain")] = values
    return found


def feed(metric: Any, plan: Plan, data: Mapping[Key, torch.Tensor], size: int = 8, part: slice = slice(None)) -> None:
    """Give the analysis all images in shuffled batches, or those of some batches."""
    numbered = [
        (split, rows)
        for split in sorted(plan.splits)
        for rows in torch.randperm(len(plan.images.indices(split))).split(size)
    ]
    for number, (split, rows) in list(enumerate(numbered))[part]:
        where = torch.from_numpy(plan.images.indices(split))[rows]
        labels = torch.from_numpy(plan.images.labels)[where]
        batch = Batch(split, number, rows, tuple(plan.images.ids[where]), labels, {}, {}, ())
        metric.begin(batch)
        seen = {key: values[where] for key, values in data.items() if key.view in plan.views[split]}
        metric.update(batch, {key: metric.reduce(key, values) for key, values in seen.items()})


def computed(metric: Any, plan: Plan, data: Mapping[Key, torch.Tensor], size: int = 8) -> Any:
    """The result of an analysis of these activations."""
    torch.manual_seed(0)
    feed(metric, plan, data, size)
    return result_of(metric)
