"""Attention distance and normalised mutual information: how far, and how much by the query, do heads attend?

With p_ij the attention of patch query i to patch key j (prefix tokens dropped, rows renormalised), n patches,

    distance = (1/n) Σ_i Σ_j p_ij · patch size · ‖place_i − place_j‖₂
    NMI      = I(q, k) / √(H(q) H(k)),   p(q) = 1/n,   p(q, k) = p_ij / n        (p_ij with 10⁻⁸ added first)

Sources: Dosovitskiy et al. 2021 (distance); Strehl & Ghosh 2002 (NMI); Park et al. 2023, Sections 2 and E.

Shapes: B images, H heads, T tokens, n patches, S layers (encoder, site).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.analyses.attention.charts import figures as figures
from sightline.analyses.attention.charts import headlines as headlines
from sightline.analyses.attention.charts import key_numbers as key_numbers
from sightline.analyses.attention.viewer import Viewer, patch_size, problem
from sightline.core.arrays import Array, as_tensor, like
from sightline.core.errors import InputError
from sightline.core.groups import Kept, Mean, Spread
from sightline.core.results import ABSENT, ENDS, NOT_FINITE
from sightline.encoders.attention import AttentionProduct
from sightline.images.pipeline import Batch
from sightline.measure import contract
from sightline.measure.estimators.attention import EPSILON, distance_and_nmi, nmi_of, patch_distances, unattended
from sightline.measure.groups import GROUPS, ImageGroups
from sightline.measure.layers import Layers, add_images, mean_of_images
from sightline.measure.plan import Cost, Key, Plan

TOPIC = "attention"
TITLE = "Attention distance and NMI"
QUESTION = "How far do attention heads look, and does it depend on where they look from?"
FORMULA = """\
distance = (1/n) Σ_i Σ_j p_ij · patch size · ‖place_i − place_j‖
NMI = I(q, k) / √(H(q) · H(k)),  p(q) = 1/n,  p(q, k) = p_ij / n
p_ij: attention of patch i to patch j of n, CLS and other prefix tokens dropped, rows renormalised
For NMI 10⁻⁸ is added to p_ij before rows are renormalised: slightly lower for heads that attend almost only to CLS"""
HOW_TO_READ = """\
Distance is how far, on average, a patch is from the patches it attends to: small is local, like a small convolution,
large is global. Attention that is spread evenly over a square image gives 0.37 of the diagonal; compare this fraction
where encoders take images of different size. NMI says how much of the choice of keys is decided by the query. Near 0,
all queries attend to the same keys whatever their place: attention has collapsed into homogeneity. At 1, every query
has keys of its own. Each small point is a head: a mean can hide one outlier, which the spread over heads and the
densities show. Park et al. report that encoders trained by joint embedding (MoCo, DINO) attend globally and
homogeneously in their later blocks, and those trained by reconstruction (SimMIM, MAE) locally and depending on the
query. That is a claim about their models; the curves say what yours do."""
SOURCE = (
    'Dosovitskiy et al. 2021, "An Image is Worth 16×16 Words" (attention distance); '
    'Strehl, Ghosh 2002, "Cluster Ensembles" (normalised mutual information); '
    'Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Figures 2–4, 10, C.1, C.2, E.1, F.1'
)
SITES = ("block.*.attn_map", "decoder.block.*.attn_map")
SPLITS = ("test",)
ANY_SITE = False
BY_DEFAULT = True
# The numbers do not depend on the batching, but a byte of the viewer's maps may round the other way.
INVARIANT_TO: frozenset[str] = frozenset({"order"})

MEASURES = ("distance", "nmi")
UNREAD = "no image could be read"


@dataclass(frozen=True)
class AttentionConfig:
    """`viewer_images`: how many test images have their maps kept, to look at in the report; 0 keeps none."""

    viewer_images: int = 4

    def __post_init__(self) -> None:
        if self.viewer_images < 0:
            raise InputError(
                f"The number of images for the attention viewer is {self.viewer_images}; 0 or more is expected"
            )


# The pure functions


def attention_distance(maps: Array, grid: tuple[int, int], patch_size: float = 1, prefix: int = 0) -> Array:
    """Mean distance between queries and the keys they attend to: maps (B, H, T, T) → (B, H), in float64.

    `grid` is (rows, columns) of the patches, `prefix` the number of leading tokens to drop. A row without attention
    to any patch gives NaN.

    >>> even = np.full((1, 1, 5, 5), 1 / 5)  # CLS and 2 × 2 patches: 0, 1, 1 and √2 away
    >>> attention_distance(even, (2, 2), patch_size=16, prefix=1).round(2)
    array([[13.66]])
    """
    rows = _patch_rows(maps, prefix)
    if math.prod(grid) != rows.shape[-1]:
        raise InputError(
            f"Maps of {rows.shape[-1] + prefix} tokens with {prefix} prefix tokens do not fit a grid of "
            f"{grid[0]} × {grid[1]} patches; give the grid as (rows, columns)"
        )
    distances = patch_distances(grid, rows.device) * patch_size
    return like(maps, (rows * distances).sum(-1).mean(-1))


def attention_nmi(maps: Array, prefix: int = 0) -> Array:
    """Normalised mutual information of queries and keys: maps (B, H, T, T) → (B, H), in float64.

    10⁻⁸ is added to the attention to each patch before rows are renormalised, as the authors' numbers have it.

    >>> own, same = np.eye(4), np.eye(4)[[2, 2, 2, 2]]  # each query its own key; all queries the same key
    >>> attention_nmi(np.stack([own, same])[None]).round(4) + 0
    array([[1., 0.]])
    """
    rows = _patch_rows(maps, prefix, EPSILON)
    return like(maps, nmi_of(rows.sum(-2), torch.special.entr(rows).neg().sum((-2, -1))))


def _patch_rows(maps: Tensor | npt.NDArray[Any], prefix: int, epsilon: float = 0.0) -> Tensor:
    """Attention among patches in float64: prefix tokens dropped, `epsilon` added, rows renormalised."""
    given = as_tensor(maps)
    if given.ndim != 4 or given.shape[-1] != given.shape[-2] or not 0 <= prefix < given.shape[-1]:
        raise InputError(
            "Attention maps (images, heads, tokens, tokens) with more tokens than the prefix are expected; "
            f"got {tuple(given.shape)} and a prefix of {prefix}"
        )
    rows = given.detach()[..., prefix:, prefix:].double()
    total = rows.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, math.nan)  # a row without attention to any patch is not an even one
    return (rows + epsilon) / (total + rows.shape[-1] * epsilon)


# The streaming analysis


class Reduction(NamedTuple):
    """What is kept of a map."""

    values: Tensor  # (B, H + 1, 2): distance in patches and NMI, their means over heads first
    unattended: Tensor  # bool (B,)
    maps: Tensor | None  # uint8 (chosen images, H, queries, keys)


class AttentionAnalysis(contract.Analysis):
    """Sums both numbers of every head over images, and keeps quantised maps of a few images."""

    products = True
    sums: Tensor  # (G, S, 3, 2 (H + 1))
    flaws: Tensor  # (S, 2): images whose numbers are not finite, those of them where a mask is why
    seen: Tensor  # (viewer images,)

    def __init__(self, config: AttentionConfig, plan: Plan) -> None:
        super().__init__()
        self.config, self.plan, self.layers = config, plan, Layers(plan.sites)
        self.problems = [problem(plan.encoders[e], plan.shapes[e][s]) for e, s in self.layers]
        if all(self.problems):
            whose, why = next(zip(self.layers, self.problems, strict=True))
            raise InputError(f"attention cannot be measured: at {whose[1]} of {whose[0]}, {why}; leave it out")
        self.heads = max(plan.shapes[encoder][site][0] for encoder, site in self.layers)
        self.viewer, self.groups = Viewer(config.viewer_images, plan), ImageGroups(plan.images, plan.splits)
        s, shown = len(self.layers), len(self.viewer.rows)
        states = {"sums": (GROUPS, s, 3, 2 * (self.heads + 1)), "flaws": (s, 2), "seen": (shown,)}
        for name, shape in states.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        for name, sizes in self.viewer.shapes.items():
            # One process fills the slot of an image, so that bytes cannot overflow in their sum.
            self.add_state(name, torch.zeros(sizes, dtype=torch.uint8), dist_reduce_fx="sum")

    def begin(self, batch: Batch) -> None:
        self.viewer.begin(batch)

    def reduce(self, key: Key, product: AttentionProduct) -> Reduction | None:
        """Both numbers of every image and head, without the whole map."""
        tokens = self.plan.encoders[key.encoder].tokens
        if self.problems[self.layers.index(key.encoder, key.site)] or tokens is None:
            return None
        values = torch.stack(distance_and_nmi(product, tokens), -1)  # (B, H, 2)
        values = torch.cat([values.mean(1, keepdim=True), values], 1)
        maps = self.viewer.maps(key.encoder, product, tokens.prefix)
        return Reduction(values, unattended(product, tokens.prefix), maps)

    def update(self, batch: Batch, reductions: Mapping[Key, Reduction | None]) -> None:
        """Add the numbers of a batch, and fill the slots of its images in the viewer."""
        if slots := self.viewer.slots:
            self.seen[slots] += 1
            for name, look in self.viewer.looks.items():
                pictures = self.viewer.pictures(name, batch)
                getattr(self, f"viewer_pixels_{look.number}")[slots] = pictures.to(self.seen.device)
                for layer, site in enumerate(look.sites):
                    shown = reductions[Key(name, site, "plain")]
                    if shown is not None and shown.maps is not None:
                        state = getattr(self, f"viewer_map_{look.number}")
                        state[slots, layer, : shown.maps.shape[1]] = shown.maps
        members = self.groups.members(batch, self.sums.device)
        for layer, (encoder, site) in enumerate(self.layers):
            if (numbers := reductions[Key(encoder, site, "plain")]) is None:
                continue
            bad = ~numbers.values[:, 0].isfinite().all(-1)  # the mean over heads has the flaw of any of them
            self.flaws[layer] += torch.stack([bad.sum(), (bad & numbers.unattended).sum()])
            add_images(self.sums, layer, torch.where(bad[:, None, None], math.nan, numbers.values).flatten(1), members)

    def compute(self) -> xr.Dataset:
        layers, axes = self.layers, ("encoder", "site")
        parts = [part.reshape(len(layers), -1, 2) for part in mean_of_images(self.sums)]
        of_layer = [self.plan.encoders[encoder] for encoder, _ in layers]
        scales = {
            "distance": np.array([patch_size(encoder) for encoder in of_layer]),
            "distance_relative": np.array([1 / math.hypot(*e.tokens.grid) if e.tokens else 1.0 for e in of_layer]),
            "nmi": np.ones(len(layers)),
        }
        data: dict[str, Any] = {}
        for name, scale in scales.items():
            at = MEASURES.index(name.removesuffix("_relative"))
            for end, part in zip(ENDS, parts, strict=True):
                values = part[..., at] * scale[:, None]
                data[name + end] = ((*axes, "head"), layers.spread(values[:, 1:]))
                data[f"{name}_mean{end}"] = (axes, layers.spread(values[:, 0]))
            spread = [_deviation(row) for row in parts[0][:, 1:, at] * scale[:, None]]
            data[f"{name}_std"] = (axes, layers.spread(np.array(spread)))
        data["reason"] = (axes, layers.spread([self._reason(i) for i in range(len(layers))], ABSENT))
        attrs = {
            "interval": "95 % over images",
            "std": "over the heads of a layer",
            "images": int(self.sums[:, :, 0, 0].sum(0).max()),
            "viewer_images": int(self.seen.sum()),
        }
        result = xr.Dataset(data, coords={**layers.coords(), "head": np.arange(self.heads)}, attrs=attrs)
        result = self._kept(scales).beside(result)
        seen = self.seen.numpy(force=True) > 0
        return result.assign(self.viewer.variables(self.metric_state, seen)) if seen.any() else result

    def _kept(self, scales: Mapping[str, npt.NDArray[np.float64]]) -> Kept:
        layers, kept, axes = self.layers, Kept({"group": self.groups.axis}), ("encoder", "site")
        sums = self.sums.reshape(*self.sums.shape[:-1], -1, 2)  # (G, S, 3, H + 1, 2)
        images = ((*axes, "group"), layers.by_group(sums[:, :, 0, 0, 0]))
        for name, scale in scales.items():
            measure = name.removesuffix("_relative")
            of = sums[:, :, 1, :, MEASURES.index(measure)]
            parts = {
                "images": images,
                f"{measure}_sum": ((*axes, "group", "head"), layers.by_group(of[:, :, 1:])),
                f"{measure}_mean_sum": ((*axes, "group"), layers.by_group(of[:, :, 0])),
                f"{name}_unit": (axes, layers.spread(scale)),
            }
            kept.add(f"{name}_mean", Mean(f"{measure}_mean_sum", "images", f"{name}_unit"), **parts)
            kept.add(name, Mean(f"{measure}_sum", "images", f"{name}_unit"))
            kept.add(f"{name}_std", Spread(name, "head"))
        return kept

    def _reason(self, layer: int) -> str:
        images = int(self.sums[:, layer, 0, 0].sum())
        bad, masked = (int(count) for count in self.flaws[layer])
        if masked:
            return f"in {masked} of {images} images a query may attend to no patch"
        if bad:
            return f"{NOT_FINITE} in {bad} of {images} images"
        return self.problems[layer] or ("" if images else UNREAD)


def _deviation(heads: npt.NDArray[np.float64]) -> float:
    """Standard deviation over the heads that a layer has; the rest of the axis is NaN."""
    finite = heads[np.isfinite(heads)]
    return float(finite.std()) if len(finite) else math.nan


def cost(config: AttentionConfig, plan: Plan) -> Cost:
    heads = [plan.shapes[encoder][site][0] for encoder, site in Layers(plan.sites)]
    viewer = sum(math.prod(shape) for shape in Viewer(config.viewer_images, plan).shapes.values())
    return Cost(memory=viewer + 8 * 3 * 2 * GROUPS * len(heads) * (max(heads) + 1), disk=0)
