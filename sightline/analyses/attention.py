"""Attention distance and normalised mutual information: how far, and how much by the query, do heads attend?

With p_ij the attention of patch query i to patch key j (prefix tokens dropped, rows renormalised), n patches,

    distance = (1/n) Σ_i Σ_j p_ij · patch size · ‖place_i − place_j‖₂
    NMI      = I(q, k) / √(H(q) H(k)),   p(q) = 1/n,   p(q, k) = p_ij / n        (p_ij with 10⁻⁸ added first)

Sources: Dosovitskiy et al. 2021 (distance); Strehl & Ghosh 2002 (NMI); Park et al. 2023, Sections 2 and E.

Shapes: B images, H heads, T tokens, n patches, S layers (encoder, site).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torchmetrics
import xarray as xr
from torch import Tensor

from sightline.attending import (
    EPSILON,
    Viewer,
    distance_and_nmi,
    nmi_of,
    patch_distances,
    patch_size,
    problem,
    unattended,
)
from sightline.errors import InputError
from sightline.layers import NOT_FINITE, Layers, add_images, mean_of_images
from sightline.plan import Cost, Key, Plan
from sightline.run import ABSENT

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd

    from sightline.figures import Figure
    from sightline.images import Batch
    from sightline.products import AttentionProduct

__all__ = ["Analysis", "Config", "attention_distance", "attention_nmi", "figures"]

TITLE = "Attention distance and NMI"
QUESTION = "How far do attention heads look, and does it depend on where they look from?"
FORMULA = """\
distance = (1/n) Σ_i Σ_j p_ij · patch size · ‖place_i − place_j‖
NMI = I(q, k) / √(H(q) · H(k)),  p(q) = 1/n,  p(q, k) = p_ij / n
p_ij: attention of patch i to patch j of n, CLS and other prefix tokens dropped, rows renormalised"""
HOW_TO_READ = """\
Distance is how far, on average, a patch is from the patches it attends to: small is local, like a small convolution,
large is global. Attention that is spread evenly over a square image gives 0.37 of the diagonal; compare this fraction
where encoders take images of different size. NMI says how much of the choice of keys is decided by the query. Near 0,
all queries attend to the same keys whatever their place: attention has collapsed into homogeneity. At 1, every query
has keys of its own. Each small point is a head: a mean can hide one outlier, which the spread over heads and the
densities show. Park et al. report that encoders trained by joint embedding (MoCo, DINO) attend globally and
homogeneously in their later blocks, and those trained by reconstruction (SimMIM, MAE) locally and by the query. That is
a claim about their models; the curves say what yours do."""
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
THIRDS = ("first third of the blocks", "middle third", "last third")
UNREAD = "no image could be read"
Values = TypeVar("Values", Tensor, "npt.NDArray[Any]")


@dataclass(frozen=True)
class Config:
    """`viewer_images`: how many test images have their maps kept, to look at in the report; 0 keeps none."""

    viewer_images: int = 4

    def __post_init__(self) -> None:
        if self.viewer_images < 0:
            raise InputError(
                f"The number of images for the attention viewer is {self.viewer_images}; 0 or more is expected"
            )


def views(config: Config, split: str) -> tuple[str, ...]:
    """The images as they are."""
    return ("plain",)


# ---------------------------------------------------------------------------------------------------------------
# The pure functions


def attention_distance(maps: Values, grid: tuple[int, int], patch_size: float = 1, prefix: int = 0) -> Values:
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
    return _like((rows * distances).sum(-1).mean(-1), maps)


def attention_nmi(maps: Values, prefix: int = 0) -> Values:
    """Normalised mutual information of queries and keys: maps (B, H, T, T) → (B, H), in float64.

    10⁻⁸ is added to the attention to each patch before rows are renormalised, as the authors' numbers have it.

    >>> own, same = np.eye(4), np.eye(4)[[2, 2, 2, 2]]  # each query its own key; all queries the same key
    >>> attention_nmi(np.stack([own, same])[None]).round(4) + 0
    array([[1., 0.]])
    """
    rows = _patch_rows(maps, prefix, EPSILON)
    return _like(nmi_of(rows.sum(-2), torch.special.entr(rows).neg().sum((-2, -1))), maps)


def _patch_rows(maps: Tensor | npt.NDArray[Any], prefix: int, epsilon: float = 0.0) -> Tensor:
    """Attention among patches in float64: prefix tokens dropped, `epsilon` added, rows renormalised."""
    given = maps if isinstance(maps, Tensor) else torch.from_numpy(np.array(maps, order="C"))
    if given.ndim != 4 or given.shape[-1] != given.shape[-2] or not 0 <= prefix < given.shape[-1]:
        raise InputError(
            "Attention maps (images, heads, tokens, tokens) with more tokens than the prefix are expected; "
            f"got {tuple(given.shape)} and a prefix of {prefix}"
        )
    rows = given.detach()[..., prefix:, prefix:].double()
    total = rows.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, math.nan)  # a row without attention to any patch is not an even one
    return (rows + epsilon) / (total + rows.shape[-1] * epsilon)


def _like(result: Tensor, given: Values) -> Values:
    return result if isinstance(given, Tensor) else result.numpy(force=True)


# ---------------------------------------------------------------------------------------------------------------
# The streaming analysis


class Reduction(NamedTuple):
    """What is kept of a map."""

    values: Tensor  # (B, H + 1, 2): distance in patches and NMI, their means over heads first
    unattended: Tensor  # bool (B,)
    maps: Tensor | None  # uint8 (chosen images, H, queries, keys)


class Analysis(torchmetrics.Metric):
    """Sums both numbers of every head over images, and keeps quantised maps of a few images."""

    full_state_update = False
    products = True
    sums: Tensor  # (S, 3, 2 (H + 1))
    flaws: Tensor  # (S, 2): images whose numbers are not finite, those of them where a mask is why
    seen: Tensor  # (viewer images,)

    def __init__(self, config: Config, plan: Plan) -> None:
        super().__init__()
        self.config, self.plan, self.layers = config, plan, Layers(plan.sites)
        self.problems = [problem(plan.encoders[e], plan.shapes[e][s]) for e, s in self.layers]
        if all(self.problems):
            whose, why = next(zip(self.layers, self.problems, strict=True))
            raise InputError(f"attention cannot be measured: at {whose[1]} of {whose[0]}, {why}; leave it out")
        self.heads = max(plan.shapes[encoder][site][0] for encoder, site in self.layers)
        self.viewer = Viewer(config.viewer_images, plan)
        s, shown = len(self.layers), len(self.viewer.rows)
        for name, shape in {"sums": (s, 3, 2 * (self.heads + 1)), "flaws": (s, 2), "seen": (shown,)}.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        for name, sizes in self.viewer.shapes.items():
            # One process fills the slot of an image, so that bytes cannot overflow in their sum.
            self.add_state(name, torch.zeros(sizes, dtype=torch.uint8), dist_reduce_fx="sum")

    def begin(self, batch: Batch) -> None:
        """Note which images of the batch are for the viewer."""
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
        for layer, (encoder, site) in enumerate(self.layers):
            if (found := reductions[Key(encoder, site, "plain")]) is None:
                continue
            bad = ~found.values[:, 0].isfinite().all(-1)  # the mean over heads has the flaw of any of them
            self.flaws[layer] += torch.stack([bad.sum(), (bad & found.unattended).sum()])
            add_images(self.sums, layer, torch.where(bad[:, None, None], math.nan, found.values).flatten(1))

    def compute(self) -> xr.Dataset:
        """Distance, its fraction of the diagonal, and NMI of every head and layer, and the maps of the viewer."""
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
            for end, part in zip(("", "_low", "_high"), parts, strict=True):
                values = part[..., at] * scale[:, None]
                data[name + end] = ((*axes, "head"), layers.spread(values[:, 1:]))
                data[f"{name}_mean{end}"] = (axes, layers.spread(values[:, 0]))
            spread = [_deviation(row) for row in parts[0][:, 1:, at] * scale[:, None]]
            data[f"{name}_std"] = (axes, layers.spread(np.array(spread)))
        data["reason"] = (axes, layers.spread([self._reason(i) for i in range(len(layers))], ABSENT))
        attrs = {
            "interval": "95 % over images",
            "std": "over the heads of a layer",
            "images": int(self.sums[:, 0, 0].max()),
            "viewer_images": int(self.seen.sum()),
        }
        result = xr.Dataset(data, coords={**layers.coords(), "head": np.arange(self.heads)}, attrs=attrs)
        seen = self.seen.numpy(force=True) > 0
        return result.assign(self.viewer.variables(self.metric_state, seen)) if seen.any() else result

    def _reason(self, layer: int) -> str:
        images = int(self.sums[layer, 0, 0])
        bad, masked = (int(count) for count in self.flaws[layer])
        if masked:
            return f"in {masked} of {images} images a query may attend to no patch"
        if bad:
            return f"{NOT_FINITE} in {bad} of {images} images"
        return self.problems[layer] or ("" if images else UNREAD)


def _deviation(heads: npt.NDArray[np.float64]) -> float:
    """Standard deviation over the heads that a layer has; the rest of the axis is NaN."""
    known = heads[np.isfinite(heads)]
    return float(known.std()) if len(known) else math.nan


def cost(config: Config, plan: Plan) -> Cost:
    """Memory for the sums and the viewer's maps; nothing on disk."""
    heads = [plan.shapes[encoder][site][0] for encoder, site in Layers(plan.sites)]
    viewer = sum(math.prod(shape) for shape in Viewer(config.viewer_images, plan).shapes.values())
    return Cost(memory=viewer + 8 * 3 * 2 * len(heads) * (max(heads) + 1), disk=0)


# ---------------------------------------------------------------------------------------------------------------
# Figures


def figures(result: xr.Dataset) -> list[Figure]:
    """Distance and NMI over depth with a point for each head, the spread over heads, and their densities."""
    from sightline.figures import Figure

    layers, heads, title = _tables(result)
    if layers.empty:
        return []
    names = [str(name) for name in result.encoder.values]
    images = f"{result.attrs['images']} images"
    decoder = " Blocks of a decoder follow those of its encoder." if layers.decoder.any() else ""
    found = [
        Figure(
            "distance",
            "Attention distance over depth",
            "How far patches attend, in pixels: the line is the mean over heads, with its 95 % interval over "
            f"{images}, a small point is a head. High is global, low is local.{decoder}",
            _over_depth(layers, heads, "distance", "attention distance (pixels)", title, names),
            heads[["encoder", "site", "block", "head", "distance", "distance_relative"]],
        ),
        Figure(
            "nmi",
            "Normalised mutual information over depth",
            "How much the keys depend on the query: the line is the mean over heads, the wide band their standard "
            f"deviation, a small point is a head. Near 0, all queries attend to the same keys.{decoder}",
            _over_depth(layers, heads, "nmi", "normalised mutual information", title, names),
            heads[["encoder", "site", "block", "head", "nmi"]],
        ),
        _spread_figure(layers, title, names),
    ]
    for measure, what in (("distance_relative", "distance / image diagonal"), ("nmi", "normalised mutual information")):
        curves = densities(heads, measure)
        caption = (
            f"Distribution over the heads of all blocks of a third of the depth: {what}. Gaussian kernel density; a "
            "point is a head. A bump of its own is a few heads that behave differently from the rest."
        )
        name = f"{measure.removesuffix('_relative')}-heads"
        title_of = "Distances of heads" if measure != "nmi" else "NMI of heads"
        found.append(Figure(name, title_of, caption, _density_chart(curves, heads, measure, what, names), curves))
    return found


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    """NMI and distance of the last third of each encoder's blocks: (label, number, detail)."""
    layers, _, _ = _tables(result)
    late = layers[layers.third == THIRDS[2]] if len(layers) else layers
    return [
        (
            str(name),
            f"NMI {rows.nmi_mean.mean():z.2f}",
            f"attention distance {rows.distance_mean.mean():.0f} pixels, "
            f"{rows.distance_relative_mean.mean():.0%} of the diagonal; "
            f"block{'s' * (len(rows) > 1)} {'–'.join(map(str, sorted({rows.block.min(), rows.block.max()})))}, "
            "mean over heads",
        )
        for name, rows in (late.groupby("encoder", sort=False) if len(late) else ())
    ]


def _tables(result: xr.Dataset) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """A row for each layer and one for each head, both with their depth, and the title of the depth axis."""
    from sightline.figures import with_depth

    numbers = result[[name for name in result.data_vars if not str(name).startswith("viewer_")]]
    by_layer = [name for name, values in numbers.data_vars.items() if values.dims == ("encoder", "site")]
    layers = numbers[by_layer].to_dataframe().reset_index()
    layers, title = with_depth(layers[layers.reason != ABSENT])
    layers["decoder"] = layers.site.str.startswith("decoder.")
    blocks = layers[~layers.decoder].groupby("encoder").block
    size = blocks.transform("size")  # counted from the end, so that the last block is of the last third at any depth
    third = (2 - 3 * (size - blocks.rank()) // size).reindex(layers.index, fill_value=3)
    layers["third"] = [(*THIRDS, "decoder")[int(place)] for place in third]
    layers = layers.dropna(subset="nmi_mean")  # only now: a layer without a number keeps its place in the depth
    heads = numbers[["distance", "distance_relative", "nmi"]].to_dataframe().reset_index().dropna(subset="nmi")
    heads = heads.merge(layers[["encoder", "site", "depth", "third"]], on=["encoder", "site"])
    return layers, heads, title


def _over_depth(
    layers: pd.DataFrame, heads: pd.DataFrame, measure: str, what: str, depth_title: str, names: list[str]
) -> Any:
    """Mean over heads as a line, and a small point for each head."""
    import altair as alt

    from sightline.figures import curve_over_depth

    ends = {f"{measure}_mean": "value", f"{measure}_mean_low": "low", f"{measure}_mean_high": "high"}
    points = layers.rename(columns={**ends, "encoder": "series"})
    points = points.assign(below=points.value - points[f"{measure}_std"], above=points.value + points[f"{measure}_std"])
    top = 1.05 * float(heads[measure].max())
    bottom = min(0.0, float(heads[measure].min()), float(points.below.min()) if measure == "nmi" else 0.0)
    chart = curve_over_depth(
        points[["series", "site", "depth", "value", "low", "high"]],
        value_title=what, depth_title=depth_title, series_title="encoder", series=names, domain=(bottom, top),
    )  # fmt: skip
    colour = alt.Color("series:N", title="encoder").scale(domain=names, range="category")
    colour = colour.legend(orient="bottom", columns=2, symbolOpacity=1)
    x, y = alt.X("depth:Q"), alt.Y(f"{measure}:Q")
    dots = alt.Chart(heads.rename(columns={"encoder": "series"})[["series", "site", "head", "depth", measure]])
    tip = ["series:N", "site:N", "head:Q", alt.Tooltip(f"{measure}:Q", format=".4f")]
    chart += dots.mark_circle(size=14, opacity=0.45).encode(x=x, y=y, color=colour, tooltip=tip)
    if measure == "nmi":
        spread = alt.Chart(points[["series", "depth", "below", "above"]]).mark_area(opacity=0.1)
        chart += spread.encode(x=x, y=alt.Y("below:Q"), y2="above:Q", color=colour)
    return chart


def _spread_figure(layers: pd.DataFrame, depth_title: str, names: list[str]) -> Figure:
    import pandas as pd

    from sightline.figures import Figure, curve_over_depth

    both = {"distance_relative_std": "distance / image diagonal", "nmi_std": "normalised mutual information"}
    table = pd.concat(
        layers[["encoder", "site", "block", "depth"]].assign(measure=what, value=layers[name])
        for name, what in both.items()
    ).rename(columns={"encoder": "series"})
    chart = curve_over_depth(
        table, value_title="standard deviation over heads", depth_title=depth_title, series_title="encoder",
        series=names, facet="measure", domain=(0, max(0.05, math.ceil(20 * table.value.max()) / 20)), percent=True,
    )  # fmt: skip
    caption = (
        "Standard deviation over the heads of a layer. A peak says that some heads of this layer attend differently "
        "from the others, and that its mean is not typical of them."
    )
    return Figure("spread", "Spread over heads", caption, chart, table)


def densities(heads: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Gaussian kernel density of the heads of each encoder and third of its blocks, with Silverman's bandwidth."""
    import pandas as pd

    low, high = heads[measure].min(), heads[measure].max()
    room = max(high - low, 0.02)
    grid = np.linspace(low - 0.15 * room, high + 0.15 * room, 120)
    found = []
    for (encoder, third), rows in heads.groupby(["encoder", "third"], sort=False):
        values = rows[measure].to_numpy()
        # A floor, or heads that are all the same would have a density without width.
        width = max(0.9 * values.std() * len(values) ** -0.2, 0.02 * room)
        kernel = np.exp(-0.5 * ((grid[:, None] - values) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        about = {"encoder": encoder, "third": third, "heads": len(values), "bandwidth": width}
        found.append(pd.DataFrame({"value": grid, "density": kernel.mean(1)}).assign(**about))
    return pd.concat(found, ignore_index=True)


def _density_chart(curves: pd.DataFrame, heads: pd.DataFrame, measure: str, what: str, names: list[str]) -> Any:
    """A panel for each third of the depth; small points under the curves are the heads."""
    import altair as alt
    import pandas as pd

    dots = heads.rename(columns={measure: "value"})[["encoder", "third", "site", "head", "value"]]
    table = pd.concat([curves, dots.assign(density=math.nan, zero=0.0)], ignore_index=True)
    order = [third for third in (*THIRDS, "decoder") if third in set(table.third)]
    base = alt.Chart(table)
    x = alt.X("value:Q", title=what).scale(zero=False, nice=False)
    colour = alt.Color("encoder:N", title="encoder").scale(domain=names, range="category")
    colour = colour.legend(orient="bottom", columns=2, symbolOpacity=1)
    lines = base.transform_filter("isValid(datum.density)").mark_line(strokeWidth=2)
    points = base.transform_filter("isValid(datum.zero)").mark_point(size=24, opacity=0.6)
    chart = alt.layer(
        lines.encode(x=x, y=alt.Y("density:Q", title="density").axis(tickCount=4), color=colour),
        points.encode(
            x=x, y=alt.Y("zero:Q"), color=colour, tooltip=["encoder:N", "site:N", "head:Q", "value:Q"],
            shape=alt.Shape("encoder:N", title="encoder").scale(domain=names),
        ),
    )  # fmt: skip
    panels = alt.Facet("third:N", title=None, sort=order)
    return chart.properties(width=260, height=160).facet(panels, columns=3).properties(usermeta={"shape": "density"})
