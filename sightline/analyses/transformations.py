"""Transformations: how far does an image move in a layer when it is mirrored, turned, greyed, blurred, shifted, scaled?

    distance(T) = √( mean_i ‖f(x_i) − f(T x_i)‖² / mean_{i ≠ j} ‖f(x_i) − f(x_j)‖² )

0: the layer is invariant to T; 1: T moves an image as far as two different images lie apart. Beside it stands the same
for two light crops of an image, which no encoder should care about, and the ratio of the two:

    to_crops(T) = √( mean_i ‖f(x_i) − f(T x_i)‖² / mean_i ‖f(c x_i) − f(c′ x_i)‖² )

An image is compared with itself, so that it does not matter which way its objects face. Different images are all pairs
within a batch, whose mean does not depend on the size of the batch but for the draw.

Source: the question is that of Shekhar et al. 2023, section 2.2; invariance by comparing what a unit does under a
transformation with what it does over all images: Goodfellow et al. 2009.

Shapes: B images of a batch, D features, S layers (encoder, site), F poolings, K distances, G groups of images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.core.results import ABSENT, ENDS, NOT_FINITE, interval
from sightline.images.views import make_view
from sightline.measure.contract import Analysis as Base
from sightline.measure.estimators.cka import GROUPS
from sightline.measure.layers import Layers
from sightline.measure.plan import Cost, Key, Plan
from sightline.measure.pooled import CONSTANT, POOLINGS, poolings, widths
from sightline.report.figures import Figure, curve_over_depth, heatmap, with_depth

if TYPE_CHECKING:
    import numpy.typing as npt

    from sightline.images.pipeline import Batch


TITLE = "Transformations"
QUESTION = "Which changes of an image does a layer not see: its mirror image, colours, sharpness, place, size?"
FORMULA = """\
distance(T) = √( mean ‖f(x) − f(T x)‖² / mean ‖f(x) − f(x′)‖² )        x, x′ two different images
crops       = √( mean ‖f(c x) − f(c′ x)‖² / mean ‖f(x) − f(x′)‖² )     c, c′ two light crops of the same image
to_crops(T) = √( mean ‖f(x) − f(T x)‖² / mean ‖f(c x) − f(c′ x)‖² )"""
HOW_TO_READ = """\
0 means that a layer gives an image and the transformed image the same features: it is invariant. 1 means that they lie
as far apart as two different images do on average; more is possible, since a transformed image may look like none of
the others. Two light crops of an image, the last row and the dashes, are the floor that every encoder has: what lies at
or below it is as good as ignored, what lies well above it is kept. Follow a row to the right: where it darkens towards
the last blocks, the encoder has learned that this does not matter. An image is compared with itself, so that orientation
is found even where objects face either way, which a probe for left and right cannot tell. Amounts (an angle, a share of
the image) are part of the names; compare encoders within a row. Intervals: 95 % bootstrap over images."""
SOURCE = (
    'The question: Shekhar, Bordes, Vincent, Morcos 2023, "Objectives Matter", section 2.2 (what features are invariant '
    "to, seen in generated pictures); response to a transformation against response to images: Goodfellow, Le, Saxe, "
    'Lee, Ng 2009, "Measuring Invariances in Deep Networks"'
)
SITES = ("block.*", "decoder.block.*")
PROJECTION = ("head.*",)
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = False
INVARIANT_TO = frozenset({"rotation", "scale", "translation"})

CROPS = "two light crops"  # as figures call them
FEWEST = 2  # images of a batch that lie apart


@dataclass(frozen=True)
class Config:
    """`transformations`: views by name, see images/transformations.py; `noise:0.3` and `augment:simclr:0` are views, too.

    `crop` is the policy of the two light crops; `features` are gap (mean of all tokens), cls, gap_without_cls.
    """

    transformations: tuple[str, ...] = (
        "mirror", "upside_down", "rotation:90", "grey", "blur:0.02", "shift:0.1", "scale:1.25",
    )  # fmt: skip
    crop: str = "supervised?crop=[0.8, 1]&ratio=[1, 1]&flip=0"
    features: tuple[str, ...] = ("gap", "cls")
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        names = self.transformations
        if not names or len(set(names)) < len(names) or "plain" in names:
            raise InputError(f"One transformation or several different ones are needed (mirror, grey, …), not {names}")
        for name in views(self, "test"):
            make_view(name, torch.zeros(1, 3, 32, 32, dtype=torch.uint8), ["a"])
        for feature in self.features:
            if feature not in POOLINGS:
                raise InputError(f"There is no feature {feature!r}{nearest(feature, POOLINGS)}")
        if not self.features or self.bootstrap < 1:
            raise InputError(
                f"A feature and a bootstrap sample are needed at least, not {len(self.features)} and {self.bootstrap}"
            )


def views(config: Config, split: str) -> tuple[str, ...]:
    """The images, the transformed images, and two light crops."""
    return ("plain", *config.transformations, *(f"augment:{config.crop}:{copy}" for copy in range(2)))


def relative_distance(x: Tensor | npt.NDArray[np.float64], y: Tensor | npt.NDArray[np.float64]) -> float:
    """How far features (n, D) of images lie from those of the same images transformed, relative to different images.

    >>> x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])  # which way an object faces
    >>> relative_distance(x, x), round(relative_distance(x, -x) ** 2, 3)  # twice as far as others, of which half agree
    (0.0, 1.5)
    """
    a, b = (torch.as_tensor(part).flatten(1).double() for part in (x, y))
    if a.shape != b.shape or len(a) < FEWEST:
        raise InputError(f"Features of the same {FEWEST} images or more are needed, not {a.shape} and {b.shape}")
    return math.sqrt((a - b).square().sum() / _apart(a).sum())


def _apart(x: Tensor) -> Tensor:
    """Mean of ‖x_i − x_j‖² over all others j, for each image: (B, D) → (B,)."""
    own = (x - x.mean(0)).square().sum(1)
    return (len(x) * own + own.sum()) / (len(x) - 1)


class Analysis(Base):
    """Sums of squared distances by groups of images, for a paired bootstrap; features are gone with their batch."""

    sums: Tensor  # (G, S, F, K): transformations, two light crops, different images, ‖x‖²
    seen: Tensor  # (S, F): batches that had the feature
    infinite: Tensor  # (S, F): batches with one that was not finite
    dropped: Tensor

    def __init__(self, config: Config, plan: Plan) -> None:
        super().__init__()
        self.config, self.plan, self.layers = config, plan, Layers(plan.sites)
        layers = (len(self.layers), len(config.features))
        shapes = {"sums": (GROUPS, *layers, len(config.transformations) + 3), "seen": layers, "infinite": layers, "dropped": ()}
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def reduce(self, key: Key, activation: Tensor) -> dict[str, Tensor]:
        """Pooled features, copied: an activation may be overwritten after the hook."""
        found = poolings(activation, self.plan.encoders[key.encoder], self.config.features)
        return {name: values.to(torch.float32, copy=True) for name, values in found.items()}

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        """Add the squared distances of this batch to the groups of its images."""
        if len(batch.ids) < FEWEST:  # nothing to lie apart from
            self.dropped += len(batch.ids)
            return
        groups = (batch.rows % GROUPS).to(self.sums.device)
        names = views(self.config, batch.split)
        for s, (encoder, site) in enumerate(self.layers):
            found = {view: reductions[Key(encoder, site, view)] for view in names}
            for f, feature in enumerate(self.config.features):
                if feature in found["plain"]:
                    values = _squares([found[view][feature].double() for view in names])
                    self.sums[:, s, f].index_add_(0, groups, values)
                    self.seen[s, f] += 1
                    self.infinite[s, f] += ~values.isfinite().all()

    def compute(self) -> xr.Dataset:
        """Relative distances of all transformations and of two light crops, with interval and reasons."""
        sums = self.sums.numpy(force=True)
        values = _distances(sums.sum(0))
        reason = self._reasons(sums.sum(0))
        lows, highs = self._intervals(sums[sums[:, ..., -1].any((1, 2))])
        over = ("encoder", "site", "feature")
        data = {
            f"{name}{end}": self._over_layers(np.where(_fit(reason, part[name]) == "", part[name], np.nan))
            for end, part in zip(ENDS, (values, lows, highs), strict=True)
            for name in values
        }
        return xr.Dataset(
            {
                **{n: (over if part.ndim == 3 else (*over, "transformation"), part) for n, part in data.items()},
                "reason": (over, self.layers.spread(reason, ABSENT)),
            },
            coords={
                "transformation": list(self.config.transformations), **self.layers.coords(),
                "feature": list(self.config.features),
            },
            attrs={
                "crops": self.config.crop, "batch": self.plan.batch, "interval": "95 % bootstrap over images",
                "dropped_images": int(self.dropped),
            },
        )  # fmt: skip
