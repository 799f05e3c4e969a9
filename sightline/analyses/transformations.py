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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from sightline.core.arrays import as_tensor
from sightline.core.errors import InputError, nearest
from sightline.core.groups import Kept, Mean
from sightline.core.results import ABSENT, ENDS, NOT_FINITE, interval
from sightline.images.pipeline import Batch
from sightline.images.views import make_view
from sightline.measure import contract
from sightline.measure.estimators.resampling import draw_groups, percentile_ends
from sightline.measure.groups import GROUPS, ImageGroups
from sightline.measure.layers import Layers
from sightline.measure.plan import Cost, Key, Plan
from sightline.measure.pooled import CONSTANT, POOLINGS, poolings, widths
from sightline.report.figures import Figure, KeyNumber, heatmap, key_number, over_depth, present

TOPIC = "robust"
TITLE = "Transformations"
QUESTION = "Which changes to an image does a layer not see: mirroring, colours, sharpness, place, size?"
FORMULA = """\
distance(T) = √( mean ‖f(x) − f(T x)‖² / mean ‖f(x) − f(x′)‖² )        x, x′ two different images
crops       = √( mean ‖f(c x) − f(c′ x)‖² / mean ‖f(x) − f(x′)‖² )     c, c′ two light crops of the same image
to_crops(T) = √( mean ‖f(x) − f(T x)‖² / mean ‖f(c x) − f(c′ x)‖² )"""
HOW_TO_READ = """\
0 means that a layer gives an image and the transformed image the same features: it is invariant. 1 means that they lie
as far apart as two different images do on average; more is possible, since a transformed image may look like none of
the others. Two light crops of an image, the last row and the dashes, are the floor that every encoder has: what lies at
or below it is as good as ignored, what lies well above it is kept. Follow a row to the right: where it darkens towards
the last blocks, the encoder has learned that this does not matter. An image is compared with itself, so that a layer
that keeps the orientation is found even where objects face either way, which no probe for left and right can tell.
Amounts (an angle, a share of the image) are part of the names; compare encoders within a row. Intervals: 95 % bootstrap
over images."""
SOURCE = (
    'The question: Shekhar, Bordes, Vincent, Morcos 2023, "Objectives Matter", section 2.2 (what features are '
    "invariant to, seen in generated pictures); response to a transformation against response to images: Goodfellow, "
    'Le, Saxe, Lee, Ng 2009, "Measuring Invariances in Deep Networks"'
)
SITES = ("block.*", "decoder.block.*")
PROJECTION = ("head.*",)
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = False
INVARIANT_TO = frozenset({"rotation", "scale", "translation"})

NO_FEATURE = "this site has no such feature"
SAME_CROPS = "the two light crops of every image have the same features"
CROPS = "two light crops"  # as figures call them
FEWEST = 2  # images of a batch that lie apart


@dataclass(frozen=True)
class TransformationsConfig:
    """`transformations`: by name, see images/transformations.py, or other views, such as `noise:0.3`.

    `crop` is the policy of the two light crops; `features` are gap (mean of all tokens), cls, gap_without_cls.
    """

    transformations: tuple[str, ...] = (
        "mirror",
        "upside_down",
        "rotation:90",
        "grey",
        "blur:0.02",
        "shift:0.1",
        "scale:1.25",
    )
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


def views(config: TransformationsConfig, split: str) -> tuple[str, ...]:
    return ("plain", *config.transformations, *(f"augment:{config.crop}:{copy}" for copy in range(2)))


def relative_distance(x: Tensor | npt.NDArray[np.float64], y: Tensor | npt.NDArray[np.float64]) -> float:
    """How far features (n, D) of images lie from those of the same images transformed, relative to different images.

    >>> x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])  # which way an object faces
    >>> relative_distance(x, x), round(relative_distance(x, -x) ** 2, 3)  # twice as far as others, of which half agree
    (0.0, 1.5)
    """
    a, b = (as_tensor(part).flatten(1).double() for part in (x, y))
    if a.shape != b.shape or len(a) < FEWEST:
        raise InputError(f"Features of the same {FEWEST} images or more are needed, not {a.shape} and {b.shape}")
    return math.sqrt((a - b).square().sum() / _apart(a).sum())


def _apart(x: Tensor) -> Tensor:
    """What each image adds to the sum of ‖x_i − x_j‖² over its batch, (B, D) → (B,): Σ = B · mean over all i ≠ j.

    The mean over all others j has the same sum, but half the spread: an image counts as either of a pair in intervals.
    """
    spread = (x - x.mean(0)).square().sum(1)
    return 2 * len(x) / (len(x) - 1) * spread


class TransformationsAnalysis(contract.Analysis):
    """Sums of squared distances by groups of images, for a paired bootstrap; features are gone with their batch."""

    sums: Tensor  # (G, S, F, K): transformations, two light crops, different images, ‖x‖²
    seen: Tensor  # (S, F): batches that had the feature
    infinite: Tensor  # (S, F): batches with one that was not finite
    dropped: Tensor

    def __init__(self, config: TransformationsConfig, plan: Plan) -> None:
        super().__init__()
        self.config, self.plan, self.layers = config, plan, Layers(plan.sites, plan.stages)
        self.groups = ImageGroups(plan.images, plan.splits)
        layers = (len(self.layers), len(config.features))
        sums = (GROUPS, *layers, len(config.transformations) + 3)
        shapes = {"sums": sums, "seen": layers, "infinite": layers, "dropped": ()}
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def reduce(self, key: Key, activation: Tensor) -> dict[str, Tensor]:
        """Pooled features, copied: an activation may be overwritten after the hook."""
        vectors = poolings(activation, self.plan.encoders[key.encoder], self.config.features)
        return {name: values.to(torch.float32, copy=True) for name, values in vectors.items()}

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        """Add the squared distances of this batch to the groups of its images."""
        if len(batch.ids) < FEWEST:  # nothing to lie apart from
            self.dropped += len(batch.ids)
            return
        members = self.groups.members(batch, self.sums.device)
        names = views(self.config, batch.split)
        for s, (encoder, site) in enumerate(self.layers):
            vectors = {view: reductions[Key(encoder, site, view)] for view in names}
            for f, feature in enumerate(self.config.features):
                if feature in vectors["plain"]:
                    values = _squares([vectors[view][feature].double() for view in names])
                    self.sums[:, s, f] += members @ values
                    self.seen[s, f] += 1
                    self.infinite[s, f] += ~values.isfinite().all()

    def compute(self) -> xr.Dataset:
        sums = self.sums.numpy(force=True)
        values = _numbers(_distances(self.sums.sum(0)))
        ends = self._bootstrap(self.sums[self.sums[..., -1].flatten(1).any(1)])
        reason = self._reasons(sums.sum(0))
        over = ("encoder", "site", "feature")
        # Without a distance between crops there is no floor: they may be the same ones, where none fits the input.
        crops_reason = np.where((reason == "") & (sums.sum(0)[..., -3] == 0), SAME_CROPS, reason)
        data: dict[str, Any] = {
            "reason": (over, self.layers.spread(reason, ABSENT)),
            "crops_reason": (over, self.layers.spread(crops_reason, ABSENT)),
        }
        for end, part in zip(ENDS, (values, *ends), strict=True):
            for name, numbers in part.items():
                valid = (reason if name == "distance" else crops_reason) == ""
                each = np.where(valid.reshape(valid.shape + (1,) * (numbers.ndim - 2)), numbers, np.nan)
                data[f"{name}{end}"] = ((*over, "transformation")[: numbers.ndim + 1], self.layers.spread(each))
        result = xr.Dataset(
            data,
            coords={
                **self.layers.coords(),
                "feature": list(self.config.features),
                "transformation": list(self.config.transformations),
            },
            attrs={
                "light_crops": self.config.crop,
                "batch": self.plan.batch,
                "interval": "95 % bootstrap over images",
                "dropped_images": int(self.dropped),
            },
        )
        return self._kept(sums).beside(result)

    def _kept(self, sums: npt.NDArray[np.float64]) -> Kept:
        kept = Kept({"group": self.groups.axis})
        each = self.layers.spread(sums.swapaxes(0, 1))  # (encoders, sites, G, F, K)
        dims = ("encoder", "site", "group", "feature", "transformation")
        moved, crop, apart = (dims, each[..., :-3]), (dims[:4], each[..., -3]), (dims[:4], each[..., -2])
        kept.add("distance", Mean("moved", "apart", root=True), moved=moved, apart=apart)
        kept.add("crops", Mean("crop", "apart", root=True), crop=crop)
        kept.add("to_crops", Mean("moved", "crop", root=True))
        return kept

    def _bootstrap(self, groups: Tensor) -> tuple[Numbers, Numbers]:
        """Ends of the 95 % intervals: groups of images drawn anew, sums and distances taken again; NaN of one group."""
        count, whole = len(groups), _distances(groups.sum(0))
        if count < 2:
            nothing = {name: torch.full_like(part, torch.nan) for name, part in whole.items()}
            return _numbers(nothing), _numbers(nothing)
        draws = draw_groups(count, self.config.bootstrap, self.plan.seed, self.device)
        layers = [_distances(torch.tensordot(draws, part, 1)) for part in groups.unbind(1)]  # each (R, F, …)
        low, high = dict[str, Tensor](), dict[str, Tensor]()
        for name in layers[0]:
            ends = (
                percentile_ends(layer[name], count, value) for layer, value in zip(layers, whole[name], strict=True)
            )
            low[name], high[name] = (torch.stack(end) for end in zip(*ends, strict=True))
        return _numbers(low), _numbers(high)

    def _reasons(self, total: npt.NDArray[np.float64]) -> npt.NDArray[np.str_]:
        """Why a layer has no value, (S, F)."""
        seen, infinite = (state.numpy(force=True) for state in (self.seen, self.infinite))
        constant = total[..., -2] <= CONSTANT**2 * total[..., -1]
        whys = [NO_FEATURE, NOT_FINITE, "the features are the same for all images"]
        return np.select([seen == 0, infinite > 0, constant], whys, "").astype(str)


Numbers = dict[str, "npt.NDArray[np.float64]"]


def _squares(features: Sequence[Tensor]) -> Tensor:
    """Squared distances of each image (B, K): to its transformations, of its two crops, to other images, to 0."""
    plain, *transformed, one, other = features
    pairs = [(plain, changed) for changed in transformed] + [(one, other)]
    distances = [(a - b).square().sum(1) for a, b in pairs]
    return torch.stack([*distances, _apart(plain), plain.square().sum(1)], 1)


def _distances(sums: Tensor) -> dict[str, Tensor]:
    """From sums (…, K) the relative distances of transformations (…, T) and of crops (…), and their ratio (…, T)."""
    distances = {
        "distance": (sums[..., :-3] / sums[..., -2, None]).sqrt(),
        "crops": (sums[..., -3] / sums[..., -2]).sqrt(),
        "to_crops": (sums[..., :-3] / sums[..., -3, None]).sqrt(),
    }
    return {name: torch.where(values.isfinite(), values, torch.nan) for name, values in distances.items()}


def _numbers(found: Mapping[str, Tensor]) -> Numbers:
    return {name: values.numpy(force=True) for name, values in found.items()}


def cost(config: TransformationsConfig, plan: Plan) -> Cost:
    layers = [widths(plan, encoder, site) for encoder, site in Layers(plan.sites)]
    features = sum(width for layer in layers for name, width in layer.items() if name in config.features)
    sums = 8 * GROUPS * len(layers) * len(config.features) * (len(config.transformations) + 3)
    return Cost(memory=sums + 4 * plan.batch * features * len(views(config, "test")), disk=0)


# Report


def figures(result: xr.Dataset) -> list[Figure]:
    floor = result.assign(distance_null=result.crops.broadcast_like(result.distance))
    curves = [figure for feature in result.feature.values for figure in _curves(floor.sel(feature=feature))]
    return [_map(result), *curves] if curves else []


def _map(result: xr.Dataset) -> Figure:
    """A panel for each encoder and feature: transformations, and the crops last, against layers."""
    layers, names = result.sel(site=result.layer_type.isin(["block", "head"])), ("value", "low", "high")
    parts = []
    for variable in ("distance", "crops"):
        columns = dict(zip((f"{variable}{end}" for end in ENDS), names, strict=True))
        reason = "crops_reason" if variable == "crops" else "reason"
        parts.append(present(layers[[*columns, reason]]).rename(columns=columns))
    cells = pd.concat([parts[0], parts[1].assign(transformation=CROPS)], ignore_index=True)
    cells = cells[cells.reason != NO_FEATURE].rename(columns={"transformation": "row"})
    # The user's order of encoders, not the alphabet's.
    places = [cells[name].map([str(v) for v in result[name].values].index) for name in ("site", "feature", "encoder")]
    cells = cells.iloc[np.lexsort(places)]
    one = len(result.feature) == 1
    cells = cells.assign(map=cells.encoder if one else cells.encoder + ", " + cells.feature)
    cells["column"] = cells.groupby("map", sort=False).site.transform(lambda sites: pd.factorize(sites)[0])
    cells = cells[["map", "encoder", "feature", "row", "column", "site", *names, "reason"]]
    chart = heatmap(
        cells,
        row_title="",
        column_title="layer",
        value_title="distance, 1 = different images",
        facet="map",
        rows=[CROPS, *map(str, result.transformation.values[::-1])],
        details={"site": "layer"},
    )
    text = (
        "How far each transformation moves an image, relative to the distance of two different images: dark is "
        "invariant. The last row is the floor, two light crops of the same image. Layers in order of computation."
    )
    return Figure("map", "Which invariances each encoder has learned", text, chart, cells)


def _curves(result: xr.Dataset) -> list[Figure]:
    """Each transformation over depth, by one feature; the crops as dashes."""
    feature = str(result.feature.item())
    text = (
        f"The same over depth (feature {feature}), a panel for each transformation. Dashes: two light crops of an "
        "image; the line at 1: two different images. Bands are 95 % intervals."
    )
    return over_depth(
        result,
        "distance",
        name=f"depth-{feature}",
        title=f"Distance over depth, {feature}",
        caption=text,
        value_title="relative distance",
        types=("block", "head"),
        facet="transformation",
        reference=(1.0, "two different images"),
    )


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    name = str(result.transformation.values[0])
    lines = []
    for encoder, last in _last_blocks(result):
        here = last.sel(transformation=name)
        ends = interval(float(here.distance_low), float(here.distance_high), ".2f")
        detail = f"{name} at {last.site.item()}, {last.feature.item()}, {ends}"
        if np.isfinite(last.crops):
            detail += f"; two light crops: {float(last.crops):.2f}"
        lines.append((encoder, f"{float(here.distance):.2f}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    first = result.isel(transformation=0)
    which = str(first.transformation.item())
    about = f"how far {which} moves an image in the last block; 1: as far as another image"
    return key_number(first, "distance", at="last", title=which, about=about)


def summary(result: xr.Dataset) -> list[str]:
    """What the last block of each encoder ignores, in sentences: what moves an image less than a light crop does."""
    sentences = []
    for encoder, last in _last_blocks(result):
        if not np.isfinite(last.crops):
            continue
        below = [str(t) for t in last.transformation.values[(last.to_crops_high < 1).values]]
        above = [(float(r), str(t)) for t, r in zip(last.transformation.values, last.to_crops.values, strict=True)]
        above = sorted((r, t) for r, t in above if r > 1)
        what = " and ".join(filter(None, [", ".join(below[:-1]), *below[-1:]])) or "nothing"
        moves = "move" if len(below) > 1 else "moves"
        words = f"{encoder}, {last.site.item()} ({last.feature.item()}): {what} {moves} an image less than a light crop"
        if above:
            words += f"; {above[-1][1]} moves it farthest, {above[-1][0]:.1f} times as far as a light crop"
        sentences.append(words + ".")
    return sentences


def _last_blocks(result: xr.Dataset) -> Iterator[tuple[str, xr.Dataset]]:
    """Of each encoder its last block that has values (not of a decoder), by the first feature that it has."""
    blocks = [str(site) for site in result.site.values if str(site).startswith("block.")]
    for encoder in map(str, result.encoder.values):
        for feature in result.feature.values:
            layers = result.sel(encoder=encoder, feature=feature, site=blocks)
            measured = np.flatnonzero(layers.distance.notnull().any("transformation").values)
            if len(measured):
                yield encoder, layers.isel(site=int(measured[-1]))
                break
