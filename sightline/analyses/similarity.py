"""Similarity of layers by measures other than CKA, side by side on the same images and pairs of layers.

Procrustes, the angular shape metric, SVCCA, PWCCA, RSA and mutual k-NN: formulas and sources are in
measure/estimators/similarity.py. Features go to disk in the pass, where k-NN and probes find them as well, and all
pairs of layers are compared when it is over: Procrustes and CCA from the cross-moments of all images, summed over
blocks; RSA and mutual k-NN, which look at pairs of images, on a sample that is the same for all layers.

Shapes: n images, m of them in the sample, S layers (encoder, site), T token views, M measures, G groups of images.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.analyses.cka.charts import Measure, pair_figures
from sightline.analyses.cka.charts import headlines as pair_headlines
from sightline.analyses.cka.charts import likeness as pair_likeness
from sightline.analyses.cka.matching import depths_of, summaries
from sightline.core.errors import InputError, nearest
from sightline.core.groups import Axis, Kept, LeftOut, Picked
from sightline.core.processes import shared, world
from sightline.core.progress import bar_of_steps
from sightline.core.provenance import fingerprint
from sightline.core.results import ABSENT, ENDS, NOT_FINITE
from sightline.images.sets import FEWEST
from sightline.measure.estimators.cka import GROUPS, TOKENS, own_of, ratio
from sightline.measure.estimators.similarity import (
    Cloud,
    bootstrap_linear,
    centred_ranks,
    check_choices,
    cloud_of,
    compare,
    influence_of_ratio,
    neighbours_of,
    overlap,
    rank_products,
)
from sightline.measure.estimators.similarity import angular_distance as angular_distance
from sightline.measure.estimators.similarity import mutual_knn as mutual_knn
from sightline.measure.estimators.similarity import procrustes as procrustes
from sightline.measure.estimators.similarity import pwcca as pwcca
from sightline.measure.estimators.similarity import rsa as rsa
from sightline.measure.estimators.similarity import svcca as svcca
from sightline.measure.layers import Layers
from sightline.measure.plan import Cost, Plan
from sightline.measure.pooled import FLAT, Pooled, Wanted, disk, widths
from sightline.report.figures import Figure, Likeness

TOPIC = "alike"
TITLE = "Similarity by other measures"
QUESTION = "Do Procrustes, CCA, RSA and shared neighbours say the same about two layers as CKA?"
FORMULA = """\
Procrustes = ‖XᵀY‖_* / (‖X‖_F ‖Y‖_F), X and Y (images × features) with centred columns; shape distance = arccos of it
SVCCA = mean of the canonical correlations ρ_k of the principal components that explain 99 % of the variance
PWCCA = Σ_k α_k ρ_k, α_k ∝ Σ_j |⟨h_k, x_j⟩| of the canonical variates h_k and the features x_j, mean of both sides
RSA = Spearman's correlation of ‖x_i − x_j‖ and ‖y_i − y_j‖ over all pairs of images of a sample
mutual k-NN = mean over the images of a sample of |N_k(x_i) ∩ N_k(y_i)| / k, N_k the k nearest images by cosine"""
HOW_TO_READ = """\
1 means that two layers agree; for the shape distance it is 0. What counts as agreement differs: Procrustes and RSA see
the same geometry up to rotation and scale, as CKA does, but CKA goes mostly by the largest directions, Procrustes by
all in proportion; CCA asks only whether one layer can be read off the other linearly, small directions as much as large
ones; mutual k-NN looks at the nearest images alone. Where they disagree, the claim that two layers are alike depends on
the measure. None is unbiased: with few images and wide features unrelated layers come out far above 0, so read every
value against the shuffled-pair null, where each image is paired with another one. The interval is a 95 % bootstrap over
images, to first order: rotations, directions and neighbours are held fixed."""
SOURCE = (
    'Williams, Kunz, Kornblith, Linderman 2021, "Generalized Shape Metrics on Neural Representations"; '
    'Ding, Denain, Steinhardt 2021, "Grounding Representation Similarity with Statistical Testing" (Procrustes); '
    'Raghu et al. 2017, "SVCCA"; Morcos, Raghu, Bengio 2018, "Insights on representational similarity" (PWCCA); '
    'Kriegeskorte, Mur, Bandettini 2008, "Representational similarity analysis"; '
    'Huh, Cheung, Wang, Isola 2024, "The Platonic Representation Hypothesis" (mutual k-NN)'
)
SITES = ("block.*", "decoder.block.*")
PROJECTION = ("head.*",)
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = False
INVARIANT_TO = frozenset({"rotation", "scale", "batching", "order"})  # the neighbours by cosine see a translation

MEASURES = {
    "procrustes": Measure("similarity", "Procrustes similarity"),
    "shape": Measure("similarity", "shape distance (radians)", distance=True, domain=(0, math.pi / 2)),
    "svcca": Measure("similarity", "SVCCA"),
    "pwcca": Measure("similarity", "PWCCA"),
    "rsa": Measure("similarity", "RSA"),
    "mutual_knn": Measure("similarity", "mutual k-NN"),
}
BY_MOMENTS = ("procrustes", "svcca", "pwcca")
PAIR = ("encoder_a", "encoder_b", "site_a", "site_b")


@dataclass(frozen=True)
class SimilarityConfig:
    """What is compared, and how.

    measures        of procrustes, shape, svcca, pwcca, rsa, mutual_knn; all but pwcca do not see a rotation
    tokens          token views as in CKA; all and patches, flattened, take disk and memory for all tokens of all images
    sample          images for RSA and mutual k-NN
    variance        share of the variance that the principal components for CCA explain
    k               neighbours
    dissimilarity   of RSA: euclidean, cosine or correlation
    bootstrap       resamplings of the images for the intervals
    """

    measures: tuple[str, ...] = ("procrustes", "shape", "svcca", "rsa", "mutual_knn")
    tokens: tuple[str, ...] = ("mean", "cls")
    sample: int = 1024
    variance: float = 0.99
    k: int = 10
    dissimilarity: str = "euclidean"
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        for what, given, known in (("measure", self.measures, MEASURES), ("token view", self.tokens, TOKENS)):
            for name in given:
                if name not in known:
                    raise InputError(f"Similarity has no {what} {name!r}{nearest(name, known)}")
            if not given or len(set(given)) < len(given):
                raise InputError(f"Similarity needs one {what} or several different ones, not {given}")
        check_choices(self.variance, self.k, self.dissimilarity)
        if self.sample < FEWEST or self.bootstrap < 1:
            raise InputError(
                f"Similarity needs a sample of at least {FEWEST} images and one resampling, not {self.sample} and "
                f"{self.bootstrap}"
            )


class DrawnImages(NamedTuple):
    """Images in random order: their groups for the interval, and for each image another one for the null."""

    groups: list[Tensor]
    others: Tensor  # (n,)


class Found(NamedTuple):
    """One measure of all pairs of layers."""

    value: npt.NDArray[np.float64]  # (S, S)
    null: npt.NDArray[np.float64]  # (S, S)
    influences: npt.NDArray[np.float64]  # (G, S, S)


class SimilarityAnalysis(Pooled):
    """Writes features of the pass to disk; all pairs of layers are compared at the end."""

    def __init__(self, config: SimilarityConfig, plan: Plan) -> None:
        if (images := sum(len(plan.images.indices(split)) for split in plan.splits)) < FEWEST:
            raise InputError(
                f"Similarity needs at least {FEWEST} images, but the {' and '.join(plan.splits)} split of "
                f"{plan.images.name} has {images}; give more, or leave similarity out (--only knn)"
            )
        super().__init__(plan, plan.splits, _wanted(config, plan))
        self.config, self.layers = config, Layers(plan.sites, plan.stages)

    def compute(self) -> xr.Dataset:
        self.finish()
        images = sum(len(rows) for rows in self.rows.values())
        if images < FEWEST:
            raise InputError(f"Only {images} images could be read, but similarity needs {FEWEST}; give more")
        measured, reasons = zip(*(self._view(view, images) for view in self.config.tokens), strict=True)
        dims, names = ("measure", "tokens", *PAIR), self.config.measures
        parts = {
            end: np.stack([[view[name][at] for view in measured] for name in names])
            for at, end in enumerate((*ENDS, "_null"))
        }
        result = xr.Dataset(
            {
                **{
                    f"similarity{end}": (dims, np.stack([self.layers.spread_pairs(each) for each in values]))
                    for end, values in parts.items()
                },
                "reason": (("tokens", "encoder", "site"), self.layers.spread_rows(np.array(reasons), ABSENT)),
                "measure_reason": (
                    "measure",
                    [self._why_none(name, images) or self._why_some(name, measured, reasons) for name in names],
                ),
            },
            coords={
                "measure": list(names),
                "is_distance": ("measure", [MEASURES[name].distance for name in names]),
                "measure_title": ("measure", [MEASURES[name].title for name in names]),
                "tokens": list(self.config.tokens),
                **self.layers.pair_coords(),
            },
            attrs={
                "interval": "95 % bootstrap over images, to first order",
                "images": images,
                "sample": min(self.config.sample, images),
                "k": min(self.config.k, min(self.config.sample, images) - 1),
                "variance": self.config.variance,
                "dissimilarity": self.config.dissimilarity,
            },
        )
        left_out = np.stack([[self.layers.spread_pairs(view[name][-1]) for view in measured] for name in names])
        return self._kept(left_out).beside(result.merge(self._in_short(result)))

    def _in_short(self, result: xr.Dataset) -> xr.Dataset:
        """Closest layers, the same depth, and similarity over distance, for each measure."""
        depths = depths_of([self.plan.encoders[name] for name in self.layers.encoders])
        parts = [
            summaries(result.sel(measure=name, drop=True), "similarity", MEASURES[name].distance, depths)
            for name in self.config.measures
        ]
        return xr.concat(parts, result.measure, coords="minimal", compat="override")

    def _why_none(self, measure: str, images: int) -> str:
        """Why a measure has no number of any pair of layers."""
        count = min(self.config.sample, images)
        every = measure == "mutual_knn" and count <= self.config.k + 1
        return f"all of {count} images are among the {self.config.k} nearest neighbours of each other" if every else ""

    def _why_some(
        self,
        measure: str,
        found: Sequence[Mapping[str, tuple[npt.NDArray[np.float64], ...]]],
        reasons: Sequence[Sequence[str]],
    ) -> str:
        """Why a measure has no number of some layers that others have one of."""
        if measure != "mutual_knn":
            return ""
        untold = [
            f"{site} of {encoder} ({view})"
            for view, of, why in zip(self.config.tokens, found, reasons, strict=True)
            for number, (encoder, site) in enumerate(self.layers)
            if not why[number] and np.isnan(of[measure][0][number, number])
        ]
        names = ", ".join([*untold[:3], *["…"] * (len(untold) > 3)])
        return f"all images have the same direction, so that none is nearer than another, in {names}" if untold else ""

    def _kept(self, left_out: npt.NDArray[np.float64]) -> Kept:
        which = [[self.plan.images.digest(split) for split in self.splits], self.plan.seed, self.config.sample]
        words = f"groups of {' and '.join(self.splits)} images"
        kept = Kept({"group": Axis(fingerprint(["similarity", *which])[:16], words)})
        part = (("measure", "tokens", "group", *PAIR), left_out.astype(np.float32))
        kept.add("similarity", LeftOut("left_out"), left_out=part)
        kept.add("diagonal", Picked("similarity", "site_b", "diagonal_site"))
        return kept

    def _view(self, view: str, images: int) -> tuple[dict[str, tuple[npt.NDArray[np.float64], ...]], list[str]]:
        """Value, ends of the interval and null of each measure of a token view, (S, S); why layers have none."""
        reads = [self._reader(*layer, view) for layer in self.layers]
        clouds = [None if read is None else cloud_of(read, images, self.config.variance) for read in reads]
        reasons = [_why(cloud) for cloud in clouds]
        usable = [number for number, why in enumerate(reasons) if not why]
        measured: dict[str, Found] = {}
        if usable and set(self.config.measures) & {*BY_MOMENTS, "shape"}:
            some = [cloud for number in usable if (cloud := clouds[number]) is not None]
            measured |= self._by_moments(some, _draw(images, self.plan.seed))
        if usable and {"rsa", "mutual_knn"} & set(self.config.measures):
            chosen = _permutation(images, self.plan.seed)[: self.config.sample].sort().values
            measured |= self._by_sample([read(chosen) for n in usable if (read := reads[n]) is not None])
        return {name: self._with_interval(name, measured, usable) for name in self.config.measures}, reasons

    def _with_interval(
        self, name: str, found: Mapping[str, Found], usable: Sequence[int]
    ) -> tuple[npt.NDArray[np.float64], ...]:
        """Value, low, high and null over all layers (S, S), NaN where one has none; without each group (G, S, S)."""
        s = len(self.layers)
        parts = [np.full((s, s), np.nan) for _ in range(4)]
        left_out = np.full((GROUPS, s, s), np.nan)
        if usable:
            value, null, influences = found["procrustes" if name == "shape" else name]
            low, high = bootstrap_linear(value, influences, self.config.bootstrap, self.plan.seed, self.device)
            numbers = [value, low, high, null]
            if name == "shape":  # falls with Procrustes, so that its ends change places
                numbers = [np.arccos(np.clip(part, -1, 1)) for part in (value, high, low, null)]
            for part, some in zip(parts, numbers, strict=True):
                part[np.ix_(usable, usable)] = some
            # Where there are fewer groups, those that are missing change nothing; without one, others count for more.
            g = len(influences)
            rest = np.broadcast_to(value, (GROUPS, *value.shape)).copy()
            rest[:g] -= influences * g / max(g - 1, 1)
            rest = np.arccos(np.clip(rest, -1, 1)) if name == "shape" else rest
            left_out[:, np.array(usable)[:, None], usable] = rest
        return (*parts, left_out)

    def _reader(self, encoder: str, site: str, view: str) -> Callable[[Tensor], Tensor] | None:
        """Reads features of images by their number among those of all splits; None where there is no such view."""
        feature = _feature(self.plan, encoder, site, view)
        if feature is None:
            return None
        parts = [self.features(encoder, site, feature, "plain", split, labelled=False) for split in self.splits]
        starts = np.cumsum([0, *map(len, parts)])

        def read(rows: Tensor) -> Tensor:
            numbers = rows.numpy(force=True)
            drawn = np.empty((len(numbers), parts[0].shape[1]))
            for part, start in zip(parts, starts, strict=False):
                here = (numbers >= start) & (numbers < start + len(part))
                drawn[here] = part.some(numbers[here] - start)[:]
            return torch.from_numpy(drawn).to(self.seen.device)

        return read

    def _by_moments(self, clouds: Sequence[Cloud], drawn: DrawnImages) -> dict[str, Found]:
        """Procrustes, SVCCA and PWCCA, as far as they are asked for; processes share the pairs."""
        asked = dict.fromkeys("procrustes" if name == "shape" else name for name in self.config.measures)
        names = [name for name in asked if name in BY_MOMENTS]
        pairs = list(itertools.combinations_with_replacement(range(len(clouds)), 2))
        with bar_of_steps("Comparing layers", -(-len(pairs) // world())) as move:

            def both(pair: tuple[int, int]) -> dict[str, tuple[float, float, npt.NDArray[np.float64]]]:
                a, b = (clouds[number] for number in pair)
                of_pair = compare(a, b, names)
                shuffled = compare(a, b, names, drawn.others, influences=False)
                move()
                return {
                    name: (value, shuffled[name].value, _grouped(influences, drawn.groups))
                    for name, (value, influences) in of_pair.items()
                }

            answers = shared(pairs, both)
        measured = {}
        for name in names:
            value, null = np.zeros((2, len(clouds), len(clouds)))
            influences = np.zeros((len(drawn.groups), *value.shape))
            for (a, b), answer in zip(pairs, answers, strict=True):
                for i, j in ((a, b), (b, a)):
                    value[i, j], null[i, j], influences[:, i, j] = answer[name]
            measured[name] = Found(value, null, influences)
        return measured

    def _by_sample(self, features: Sequence[Tensor]) -> dict[str, Found]:
        """RSA and mutual k-NN of the features of the sampled images, as far as they are asked for."""
        m, measured = len(features[0]), {}
        drawn = _draw(m, self.plan.seed)
        if "rsa" in self.config.measures:
            ranks = [centred_ranks(x, self.config.dissimilarity) for x in features]
            sums = rank_products(ranks, drawn.groups)
            null = ratio(rank_products(ranks, drawn.groups, drawn.others).sum(0), own_of(sums.sum(0)))
            # Whose image comes first is chance: the null of A with B is that of B with A.
            measured["rsa"] = Found(ratio(sums.sum(0)), (null + null.T) / 2, influence_of_ratio(sums, degree=2))
        if "mutual_knn" in self.config.measures:
            near = [neighbours_of(x, min(self.config.k, m - 1)) for x in features]
            value, null = np.full((2, len(near), len(near)), np.nan)
            influences = np.zeros((len(drawn.groups), *value.shape))
            pairs = itertools.combinations_with_replacement(range(len(near)), 2)
            for a, b in pairs if not self._why_none("mutual_knn", m) else ():
                mine, theirs = near[a], near[b]
                if mine is None or theirs is None:
                    continue
                each = overlap(mine, theirs)
                mean = float(each.mean())
                moved = _grouped((each - mean) / m, drawn.groups)
                for i, j in ((a, b), (b, a)):
                    value[i, j], influences[:, i, j] = mean, moved
                    null[i, j] = float(overlap(mine, theirs, drawn.others).mean())
            measured["mutual_knn"] = Found(value, null, influences)
        return measured


def _feature(plan: Plan, encoder: str, site: str, view: str) -> str | None:
    """The feature on disk that is a token view of a site: the mean of a single vector is that vector."""
    there = widths(plan, encoder, site)
    names = {"mean": ("gap_without_cls", "gap")}.get(view, (view,))
    return next((name for name in names if name in there), None)


def _wanted(config: SimilarityConfig, plan: Plan) -> Wanted:
    names_of = {
        layer: tuple(name for view in config.tokens if (name := _feature(plan, *layer, view)) is not None)
        for layer in Layers(plan.sites)
    }
    return {layer: names for layer, names in names_of.items() if names}


def _why(cloud: Cloud | None) -> str:
    if cloud is None:
        return "this site has no such token view"
    if not math.isfinite(cloud.square):
        return NOT_FINITE
    return "the activations are the same for all images" if cloud.constant else ""


def _permutation(images: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).permutation(images))


def _draw(images: int, seed: int) -> DrawnImages:
    order = _permutation(images, seed)
    others = torch.empty_like(order)
    others[order] = order.roll(1)
    return DrawnImages(list(order.tensor_split(min(GROUPS, images))), others)


def _grouped(values: Tensor | None, groups: Sequence[Tensor]) -> npt.NDArray[np.float64]:
    """Sums over the images of each group."""
    assert values is not None
    return np.array([float(values[rows.to(values.device)].sum()) for rows in groups])


def cost(config: SimilarityConfig, plan: Plan) -> Cost:
    n = sum(len(plan.images.indices(split)) for split in plan.splits)
    layers = [widths(plan, *layer) for layer in Layers(plan.sites)]
    wide = [
        max([of[name] for name in (*FLAT, "gap") if name in (*config.tokens, "gap") and name in of] or [0])
        for of in layers
    ]
    held = sum(min(n, width) * (width + 2 * min(n, width)) for width in wide)
    ranks = len(layers) * min(n, config.sample) ** 2 // 2 * ("rsa" in config.measures)
    return Cost(8 * (held + ranks + 4 * min(n, 4096) * max(wide)), disk(plan, plan.splits, _wanted(config, plan)))


# Figures


def figures(result: xr.Dataset) -> list[Figure]:
    """For each measure, of which the page shows one at a time, what the page of CKA shows of CKA."""
    drawn = [
        replace(
            figure,
            name=f"{name}-{figure.name}",
            title=f"{MEASURES[name].title}: {figure.title.lower()}",
            choice=name,
            folded=figure.name.startswith("distance"),
        )
        for name in result.measure.values.tolist()
        for figure in pair_figures(result.sel(measure=name, drop=True), MEASURES[name])
        if len(figure.table)
    ]
    places = {name: place for place, name in enumerate(result.measure.values.tolist())}
    return sorted(drawn, key=lambda figure: (places[figure.choice], figure.folded))


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    return [
        (label, number, f"{MEASURES[name].title}, {detail}")
        for name in result.measure.values.tolist()
        for label, number, detail in pair_headlines(result.sel(measure=name, drop=True), MEASURES[name])[:1]
    ]


def likeness(result: xr.Dataset) -> Likeness | None:
    for name in result.measure.values.tolist():
        if not MEASURES[name].distance:
            pairs = pair_likeness(result.sel(measure=name, drop=True), MEASURES[name])
            return None if pairs is None else replace(pairs, place=3)
    return None
