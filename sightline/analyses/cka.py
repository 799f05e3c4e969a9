"""Centred kernel alignment: how alike are two layers, whatever the rotation and scale of their features?

    HSIC₁(K, L) = ⟨K̃, L̃⟩ / (n (n − 3)),   K̃ the U-centred Gram matrix K = X Xᵀ of n images, zero diagonal
    CKA = Σ_b HSIC₁(K_b, L_b) / √(Σ_b HSIC₁(K_b, K_b) · Σ_b HSIC₁(L_b, L_b))     over minibatches b

⟨K̃, L̃⟩ with U-centred matrices (Székely & Rizzo 2014) equals the textbook tr(K̃L̃) + 1ᵀK̃1·1ᵀL̃1/((n−1)(n−2)) −
2/(n−2)·1ᵀK̃L̃1 (Song et al. 2012) term by term, but does not cancel, and ⟨K̃, K̃⟩ ≥ 0 by construction. With all Gram
matrices of a batch as rows of one matrix, all pairs of layers of all encoders are one matrix product.

Source: Nguyen, Raghu & Kornblith 2021 (minibatch CKA), as used by Shekhar et al. 2023, Appendix B.1.

Shapes: n images of a batch, p features, S layers (encoder, site), T token views, G groups of batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
import torchmetrics
import xarray as xr
from torch import Tensor

from sightline.errors import InputError, nearest
from sightline.figures import Figure, curve_over_depth, depth_of, heatmap
from sightline.images import FEWEST, batch_count
from sightline.plan import Cost, Key, Plan
from sightline.run import ABSENT
from sightline.sites import Tokens, block_number, layer_type, token_view, union_of_sites

if TYPE_CHECKING:
    import numpy.typing as npt

    from sightline.images import Batch

TITLE = "CKA"
QUESTION = "How alike are the representations of two layers, within one encoder or across encoders?"
FORMULA = """\
CKA(K, L) = Σ_b HSIC₁(K_b, L_b) / √( Σ_b HSIC₁(K_b, K_b) · Σ_b HSIC₁(L_b, L_b) )
HSIC₁(K, L) = [ tr(K̃L̃) + 1ᵀK̃1 · 1ᵀL̃1 / ((n−1)(n−2)) − 2/(n−2) · 1ᵀK̃L̃1 ] / (n(n−3))
K = X Xᵀ for the activations X (n images × features) of a minibatch b; K̃ is K with a zero diagonal"""
HOW_TO_READ = """\
1 means that two layers see the same images as alike and as different, up to rotation and scale of their features; 0
means that they have nothing in common. The estimate is unbiased, so unrelated layers come out slightly below or above
0: the shuffled-pair null, where each image is paired with another one, shows how far. The interval is a 95 % bootstrap
over batches. A bright diagonal says that two encoders build their features in the same order; a bright block away from
it, that one of them reaches the same representation earlier or later. Empty cells have a reason: hover to see it."""

SITES = ("block.*", "block.*.norm1", "block.*.qkv", "block.*.fc1", "block.*.residual")
SPLITS = ("test",)
VIEWS = ("plain",)
INVARIANT_TO = frozenset({"rotation", "scale", "translation"})

TOKENS = ("all", "cls", "mean", "patches")
GROUPS = 32  # batches are summed in this many groups, so that memory does not grow; up to 32 batches each is its own
CHUNK = 16384  # columns of the activations that are multiplied at a time; 32 rows of them stay in the cache


@dataclass(frozen=True)
class Config:
    """`tokens`: token views to compare; `unbiased=False` takes the biased HSIC (inflated for few images, TRAPS 3)."""

    tokens: tuple[str, ...] = TOKENS
    unbiased: bool = True
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        for view in self.tokens:
            if view not in TOKENS:
                raise InputError(f"CKA has no token view {view!r}{nearest(view, TOKENS)}")
        if not self.tokens or self.bootstrap < 1:
            raise InputError(
                f"CKA needs a token view and a bootstrap sample at least, not {len(self.tokens)} and {self.bootstrap}"
            )


# ---------------------------------------------------------------------------------------------------------------
# The pure function


def cka(
    x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike, batch: int | None = 32, *, unbiased: bool = True
) -> float:
    """CKA of two whole arrays of activations (images first), in float64.

    Unbiased: minibatches of `batch` images (all at once with `batch=None`), the last ones shared out evenly.
    `unbiased=False` is the biased full-batch form ‖YᵀX‖²_F / (‖XᵀX‖_F ‖YᵀY‖_F) on centred columns.

    >>> x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    >>> round(cka(x, 3 * x.flip(1) + 100), 6)
    1.0
    >>> noise = torch.randn(256, 500, generator=torch.Generator().manual_seed(1))
    >>> abs(cka(x, noise, unbiased=True)) < 0.1 < cka(x, noise, unbiased=False)
    True
    """
    a, b = (torch.as_tensor(v if isinstance(v, Tensor) else np.asarray(v)) for v in (x, y))
    if a.ndim < 2 or b.ndim < 2 or len(a) != len(b) or len(a) < FEWEST:
        raise InputError(
            f"CKA needs features (images, …) of the same images twice, at least {FEWEST} of them; "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if batch is not None and batch < FEWEST:
        raise InputError(f"The batch size is {batch}, but the unbiased CKA needs at least {FEWEST} images in a batch")
    a, b = a.flatten(1).double(), b.flatten(1).double()
    parts = 1 if batch is None or not unbiased else batch_count(len(a), batch)
    hsic = torch.zeros(2, 2, dtype=torch.float64)
    for rows in torch.arange(len(a)).tensor_split(parts):
        centred = centre(torch.stack([gram(a[rows]), gram(b[rows])]), unbiased)
        hsic += len(rows) * products(centred, unbiased)
    return float(ratio(hsic.numpy(force=True))[0, 1])


# ---------------------------------------------------------------------------------------------------------------
# The parts, shared by the pure function and the streaming one


def gram(x: Tensor) -> Tensor:
    """Gram matrix for CKA, (n, p) → float64 (n, n); exactly zero if all rows are the same.

    CKA does not see the mean of the features, but float32 does: its error grows with mean² / variance. So where the
    mean dominates, in a sample or in the end, it is taken off all rows, chunk by chunk while in the cache.
    """
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    # The look at the sample waits for the device, which is worth it only where products are slower than that.
    if x.device.type == "cpu" and not _mean_dominates(_products(x[:, :CHUNK])):
        total = _products(x)
        if not _mean_dominates(total):
            return total
    total = _products(x, shift=True)
    # What is left of constant features is rounding: about eps of each feature.
    rounding = len(x) * x[0].double().square().sum() * (8 * torch.finfo(x.dtype).eps) ** 2
    return torch.where(total.trace() <= rounding, 0.0, total)


def _products(x: Tensor, shift: bool = False) -> Tensor:
    """X Xᵀ, or that of the rows minus the mean of (at most 32 of) them; summed over chunks of columns in float64."""
    total = x.new_zeros((len(x), len(x)), dtype=torch.float64)
    few = x[:: -(-len(x) // 32)]  # a longer sum would round constant features to something else
    share = few.new_full((len(few),), 1 / len(few))
    for start in range(0, x.shape[1], CHUNK):
        part = x[:, start : start + CHUNK]
        if shift:  # not by one of the rows, which might be an outlier; a product is faster than a mean over rows
            part = part - few[:, start : start + CHUNK].T @ share
        total += part @ part.T
    return total


def _mean_dominates(gram: Tensor) -> bool:
    """Whether less than a quarter of the squares is variance, or they are not finite: Σ‖x − x̄‖² < ¼ Σ‖x‖²."""
    return not gram.trace() - gram.mean() * len(gram) >= 0.25 * gram.trace()


def grams(activation: Tensor, views: Sequence[str], tokens: Tokens | None) -> dict[str, Tensor]:
    """Gram matrices of the token views that exist; all tokens are the patches plus the prefix tokens."""
    if activation.ndim == 4 and tokens is None:  # a map: its positions are the patches
        whole = gram(_flat(activation))
        found = {"all": whole, "patches": whole}
        if "mean" in views:
            found["mean"] = gram(activation.mean((2, 3), dtype=torch.float32))
        return found
    found = {
        view: gram(_flat(part))
        for view in views
        if view != "all" and (part := token_view(activation, view, tokens)) is not None
    }
    if "all" in views:
        if "patches" in found and activation.ndim == 3 and tokens is not None:
            prefix = activation[:, : tokens.prefix]
            found["all"] = found["patches"] + gram(_flat(prefix)) if tokens.prefix else found["patches"]
        else:
            found["all"] = gram(_flat(activation))
    return found


def _flat(activation: Tensor) -> Tensor:
    """(n, …) → (n, p) in the order of memory: CKA does not see the order of features, and nothing is copied."""
    strides = activation.stride()
    order = sorted(range(1, activation.ndim), key=lambda dim: -strides[dim])
    return activation.permute(0, *order).flatten(1)


def centre(grams: Tensor, unbiased: bool = True) -> Tensor:
    """U-centre (unbiased) or double-centre (biased) Gram matrices: (S, n, n) → (S, n, n)."""
    n = grams.shape[-1]
    if not unbiased:
        rows = grams.mean(-1, keepdim=True)
        return grams - rows - rows.mT + rows.mean(-2, keepdim=True)
    grams = grams - torch.diag_embed(grams.diagonal(dim1=-2, dim2=-1))
    rows = grams.sum(-1, keepdim=True) / (n - 2)
    centred = grams - rows - rows.mT + rows.sum(-2, keepdim=True) / (n - 1)
    centred = centred - torch.diag_embed(centred.diagonal(dim1=-2, dim2=-1))
    # Where all images but one are the same, nothing but rounding is left, and its ratio would look like a value.
    whole, left = (torch.linalg.vector_norm(part, dim=(-2, -1), keepdim=True) for part in (grams, centred))
    return centred.mul_(left > 1e-12 * whole)


def products(centred: Tensor, unbiased: bool = True, shuffled: bool = False) -> Tensor:
    """HSIC of all pairs: (S, n, n) → (S, S). `shuffled` pairs every image with the next one instead of itself."""
    n = centred.shape[-1]
    other = centred.roll((1, 1), (-2, -1)) if shuffled else centred
    scale = n * (n - 3) if unbiased else (n - 1) ** 2
    return centred.flatten(1) @ other.flatten(1).T / scale


def ratio(hsic: npt.NDArray[np.float64], norm: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.float64]:
    """CKA from summed HSIC (…, S, S); NaN where a layer's own HSIC is zero. `norm`: take the diagonal from there."""
    own = np.diagonal(hsic if norm is None else norm, axis1=-2, axis2=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(own)
        value = hsic / (root[..., :, None] * root[..., None, :])
    return np.where(np.isfinite(value), value, np.nan)


# ---------------------------------------------------------------------------------------------------------------
# The streaming analysis


class Analysis(torchmetrics.Metric):
    """Sums HSIC of all pairs of layers over batches; a batch of fewer than 4 images cannot enter HSIC₁."""

    full_state_update = False
    hsic: Tensor  # (T, G, S, S)
    null: Tensor  # (T, S, S)
    flaws: Tensor  # (T, S, 3): batches seen, batches that were constant, batches that were not finite
    images: Tensor  # (G,)
    dropped: Tensor

    def __init__(self, config: Config, plan: Plan) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        if (most := max(len(plan.images.indices(split)) for split in plan.splits)) < FEWEST:
            raise InputError(
                f"CKA needs at least {FEWEST} images, but the {' and '.join(plan.splits)} split of {plan.images.name} "
                f"has {most}; give more, or leave cka out (--only knn)"
            )
        self.layers = [(encoder, site) for encoder, sites in plan.sites.items() for site in sites]
        t, s = len(config.tokens), len(self.layers)
        shapes = {"hsic": (t, GROUPS, s, s), "null": (t, s, s), "flaws": (t, s, 3), "images": (GROUPS,), "dropped": ()}
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def reduce(self, key: Key, activation: Tensor) -> dict[str, Tensor]:
        """Gram matrices of the token views, inside the hook."""
        return grams(activation, self.config.tokens, self.plan.encoders[key.encoder].tokens)

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        """Add the HSIC of all pairs of layers on this batch; batches count by the images they hold."""
        n, group = len(batch.ids), batch.number % GROUPS
        if n < FEWEST:
            self.dropped += n
            return
        self.images[group] += n
        found = [reductions[Key(encoder, site, "plain")] for encoder, site in self.layers]
        none = self.hsic.new_zeros((n, n))
        for t, view in enumerate(self.config.tokens):
            stacked = torch.stack([layer.get(view, none) for layer in found])  # (S, n, n)
            seen = torch.tensor([view in layer for layer in found], device=stacked.device)
            constant, infinite = stacked.abs().sum((1, 2)) == 0, ~stacked.isfinite().all(-1).all(-1)
            self.flaws[t] += torch.stack([seen, seen & constant, infinite], 1)
            centred = centre(stacked, self.config.unbiased)
            self.hsic[t, group] += n * products(centred, self.config.unbiased)
            self.null[t] += n * products(centred, self.config.unbiased, shuffled=True)

    def compute(self) -> xr.Dataset:
        """CKA of all sites × all sites × all pairs of encoders, with interval, null and reasons."""
        views, encoders, sites = list(self.config.tokens), list(self.plan.sites), union_of_sites(self.plan.sites)
        hsic, null, flaws = (state.numpy(force=True) for state in (self.hsic, self.null, self.flaws))
        total = hsic.sum(1)
        low, high = self._interval(hsic)
        place = np.array([(encoders.index(e), sites.index(s)) for e, s in self.layers]).T
        dims = ("tokens", "encoder_a", "encoder_b", "site_a", "site_b")
        full = {"cka": ratio(total), "cka_low": low, "cka_high": high, "cka_null": ratio(null, norm=total)}
        data = {name: (dims, _spread(values, place, len(encoders), len(sites))) for name, values in full.items()}
        reason = np.full((len(views), len(encoders), len(sites)), ABSENT, dtype=object)
        own = np.diagonal(total, axis1=1, axis2=2)  # (T, S)
        reason[:, place[0], place[1]] = [
            [self._reason(counts, hsic) for counts, hsic in zip(*view, strict=True)]
            for view in zip(flaws, own, strict=True)
        ]
        return xr.Dataset(
            {**data, "reason": (("tokens", "encoder", "site"), reason.astype(str))},
            coords={
                "tokens": views,
                **{f"encoder{end}": encoders for end in ("_a", "_b", "")},
                **{f"site{end}": sites for end in ("_a", "_b", "")},
                "layer_type": ("site", [layer_type(site) for site in sites]),
                "block": ("site", [block_number(site) for site in sites]),
            },
            attrs={
                "estimator": "unbiased minibatch" if self.config.unbiased else "biased minibatch",
                "batch": self.plan.batch,
                "interval": "95 % bootstrap over batches",
                "dropped_images": int(self.dropped),
            },
        )

    def _reason(self, counts: npt.NDArray[np.float64], own: float) -> str:
        seen, constant, infinite = counts
        if not self.images.any():
            return f"no batch had {FEWEST} images that could be read"
        if seen == 0:
            return "this site has no such token view"
        if infinite:
            return f"the activations are not finite (NaN or infinity) in {infinite:.0f} of {seen:.0f} batches"
        if constant == seen:
            return "the activations are the same for all images"
        return "" if own > 0 else "all pairs of images are equally alike, so that there is nothing to compare"

    def _interval(self, hsic: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Percentile bootstrap over groups of batches: resample the groups, sum again, take the ratio again."""
        used = np.flatnonzero(self.images.numpy(force=True))
        low, high = (np.full((len(hsic), *hsic.shape[2:]), np.nan) for _ in range(2))
        if len(used) < 2:
            return low, high
        random = np.random.Generator(np.random.Philox(self.plan.seed))
        draws = random.multinomial(len(used), np.full(len(used), 1 / len(used)), size=self.config.bootstrap)
        for t, groups in enumerate(hsic[:, used]):  # (G, S, S)
            own = draws @ np.diagonal(groups, axis1=1, axis2=2)  # (R, S)
            for row in range(groups.shape[1]):  # row by row, because all replicates at once would not fit
                with np.errstate(divide="ignore", invalid="ignore"):
                    values = draws @ groups[:, row] / np.sqrt(own * own[:, row, None])
                known = np.isfinite(values).all(0)
                if known.any():
                    low[t, row, known], high[t, row, known] = np.percentile(values[:, known], [2.5, 97.5], axis=0)
        return low, high


def _spread(
    values: npt.NDArray[np.float64], place: npt.NDArray[np.int64], encoders: int, sites: int
) -> npt.NDArray[np.float64]:
    """(T, S, S) over layers → (T, encoders, encoders, sites, sites), NaN where an encoder has no such site."""
    full = np.full((len(values), encoders, encoders, sites, sites), np.nan)
    e, s = place
    full[:, e[:, None], e[None, :], s[:, None], s[None, :]] = values
    return full


def cost(config: Config, plan: Plan) -> Cost:
    """Memory for the sums; nothing on disk."""
    layers = sum(len(sites) for sites in plan.sites.values())
    return Cost(memory=8 * len(config.tokens) * (GROUPS + 1) * layers**2, disk=0)


# ---------------------------------------------------------------------------------------------------------------
# Figures


def figures(result: xr.Dataset) -> list[Figure]:
    """Every pair of encoders at once, similarity at the same depth, and how fast it falls with distance in depth."""
    cells = _block_cells(result)
    if cells.empty:
        return []
    names = [str(n) for n in result.encoder_a.values]
    found = [
        Figure(
            "pairs",
            "All pairs of encoders",
            f"CKA of block outputs (tokens: {result.tokens.values[0]}). Grey, hatched: no value; the tooltip says why.",
            heatmap(cells, row_title="block of A", column_title="block of B", value_title="CKA", facet="pair", step=10,
                    details={"encoder_a": "A", "encoder_b": "B"}),
            cells,
        )
    ]  # fmt: skip
    same = _at_same_depth(cells)
    if len(same):
        chart = curve_over_depth(
            same, value_title="CKA", depth_title=same.attrs["depth"], series_title="compared with", series=names,
            facet="encoder_a", details={"encoder_a": "A", "site": "block of A", "site_b": "block of B"},
        )  # fmt: skip
        text = (
            "CKA of each block with the block of the other encoder at the same depth; dashes: shuffled pairs of images."
        )
        found.append(Figure("depth", "Similarity at the same depth", text, chart, same))
    near = _by_distance(cells)
    if len(near):
        chart = curve_over_depth(
            near, value_title="mean CKA", depth_title="distance in relative depth", series_title="encoder",
            series=names, details={"pairs": "pairs of blocks"},
        )  # fmt: skip
        text = "Within one encoder: mean CKA of two blocks against their distance; a slow fall: depth changes little."
        found.append(Figure("distance", "Similarity against distance in depth", text, chart, near))
    return found


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    """Closest blocks of each pair of encoders: (label, number, detail)."""
    cells = _block_cells(result)
    across = cells[(cells.encoder_a != cells.encoder_b) & cells.value.notna()] if len(cells) else cells
    best = across.loc[across.groupby(["encoder_a", "encoder_b"]).value.idxmax()] if len(across) else across
    return [
        (
            f"{c.encoder_a} × {c.encoder_b}",
            f"{c.value:.2f}",
            f"closest: block.{c.row} and block.{c.column}, 95 % {c.low:.2f} – {c.high:.2f}",
        )
        for c in best.sort_values("value", ascending=False).itertuples()
    ][:6]


def _block_cells(result: xr.Dataset) -> pd.DataFrame:
    """One row for each pair of block outputs of each unordered pair of encoders, first token view."""
    view = result.isel(tokens=0)
    kind, number = view.layer_type.values.astype(str), view.block.values
    blocks = np.flatnonzero((kind == "block") & (number >= 0))
    names = [str(n) for n in view.encoder_a.values]
    reason, values = view.reason.values[:, blocks], view.cka.values[:, :, blocks][:, :, :, blocks]
    has = ((reason != "") & (reason != ABSENT)) | np.isfinite(values).any((1, 3))  # (encoder, block)
    own = [np.flatnonzero(row) for row in has]
    parts = {n: view[n].values[:, :, blocks][:, :, :, blocks] for n in ("cka", "cka_low", "cka_high", "cka_null")}
    rows = [
        (f"{names[a]} × {names[b]}", names[a], names[b], int(number[blocks[i]]), int(number[blocks[j]]),
         *(part[a, b, i, j] for part in parts.values()), str(reason[a, i] or reason[b, j]))
        for a, b in itertools.combinations_with_replacement(range(len(names)), 2)
        for i in own[a]
        for j in own[b]
    ]  # fmt: skip
    return pd.DataFrame(
        rows, columns=["pair", "encoder_a", "encoder_b", "row", "column", "value", "low", "high", "null", "reason"]
    )


def _at_same_depth(cells: pd.DataFrame) -> pd.DataFrame:
    """For every ordered pair of encoders: each block of A with the block of B at the same (relative) depth."""
    across = cells[cells.encoder_a != cells.encoder_b]
    turned = across.rename(
        columns={"encoder_a": "encoder_b", "encoder_b": "encoder_a", "row": "column", "column": "row"}
    )
    across = pd.concat([across, turned])
    depth, title = depth_of({str(n): sorted(set(own.row)) for n, own in across.groupby("encoder_a")})
    across["depth"] = [depth[a][i] for a, i in zip(across.encoder_a, across.row, strict=True)]
    off = [abs(d - depth[b][j]) for d, b, j in zip(across.depth, across.encoder_b, across.column, strict=True)]
    across = across.assign(off=off).sort_values("off", kind="stable").drop_duplicates(["encoder_a", "encoder_b", "row"])
    across = across.assign(
        series=across.encoder_b, site="block." + across.row.astype(str), site_b="block." + across.column.astype(str)
    )
    order = {str(n): i for i, n in enumerate(cells.encoder_a.unique())}  # the user's order, not the alphabet's
    across = across.sort_values(
        ["encoder_a", "encoder_b", "depth"], key=lambda c: c if c.name == "depth" else c.map(order)
    )
    table = across[
        ["encoder_a", "series", "depth", "site", "site_b", "value", "low", "high", "null", "reason"]
    ].reset_index(drop=True)
    table.attrs["depth"] = f"{title} of A"
    return table


def _by_distance(cells: pd.DataFrame) -> pd.DataFrame:
    """Mean CKA of two blocks of the same encoder against |i − j| / (depth − 1)."""
    within = cells[(cells.encoder_a == cells.encoder_b) & (cells.row < cells.column)]
    last = within.groupby("encoder_a").column.transform("max")
    depth = ((within.column - within.row) / last.clip(lower=1)).rename("depth")
    table = (
        within.groupby([within.encoder_a.rename("series"), depth], sort=False)
        .value.agg(["mean", "count"])
        .reset_index()
    )
    return (
        table.rename(columns={"mean": "value", "count": "pairs"})
        .sort_values(["series", "depth"])
        .reset_index(drop=True)
    )
