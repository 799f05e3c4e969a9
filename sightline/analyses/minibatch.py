"""Minibatch CKA: does it depend on the size of the batches, or on the number of images?

    CKA_b(n) = Σ HSIC₁(K, L) / √(Σ HSIC₁(K, K) · Σ HSIC₁(L, L))     over batches of b of the first n images

of all pairs of some layers of an encoder, drawn at random, for all b and n in one pass: the Gram matrix of a large
batch holds those of smaller batches as blocks on its diagonal, and the first n images are a part of all of them.

Source: Shekhar et al. 2023, Appendix B.1, Fig. 6 (ten layers of a ViT-B, b = 2⁵ … 2¹⁰, n = 10³ … 10⁶).

Shapes: n images of a batch, T token views, C numbers of images, B batch sizes, G groups of batches, E encoders, L
layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.groups import Alignment, Axis, Kept
from sightline.core.provenance import fingerprint
from sightline.core.results import ABSENT, ENDS
from sightline.images.pipeline import Batch, batch_count
from sightline.images.sets import FEWEST
from sightline.measure.estimators.cka import GROUPS, bootstrap, centre, products, ratio
from sightline.measure.estimators.cka import study as study
from sightline.measure.gram_sums import GramSums, check_tokens
from sightline.measure.plan import Cost, Key, Plan
from sightline.report.figures import Figure, KeyNumber, curve_over_depth, heatmap, of_encoders

TOPIC = "alike"
TITLE = "Minibatch CKA"
QUESTION = "Does CKA depend on the size of the minibatches, or on the number of images?"
FORMULA = """\
CKA_b(n) = Σ HSIC₁(K, L) / √( Σ HSIC₁(K, K) · Σ HSIC₁(L, L) )     over minibatches of b of the first n images"""
HOW_TO_READ = """\
HSIC₁ is unbiased, so neither the size of the minibatches nor the number of images should change CKA, except by chance:
the lines should be flat. Each line is one of the layers that were drawn, its mean CKA with the others. The map shows
the largest difference, over all pairs of layers, from CKA with the largest batches and all images; where it is dark,
CKA does not depend on the batch size, and that many images are enough. Fewer images mean more spread; the interval is a
bootstrap over the batches of the pass, so the images of a single batch have none."""
SOURCE = (
    'Shekhar et al. 2023, "Objectives Matter", Appendix B.1, Fig. 6; Nguyen, Raghu, Kornblith 2021, "Do Wide and Deep '
    'Networks Learn the Same Things?" (minibatch CKA)'
)
SITES = ("block.*", "block.*.norm1", "block.*.qkv", "block.*.fc1", "block.*.residual", "decoder.block.*")
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = False
INVARIANT_TO = frozenset({"rotation", "scale", "translation"})


@dataclass(frozen=True)
class MinibatchConfig:
    """`layers` of each encoder, drawn at random; `batches` up to that of the pass, `--batch`; `tokens` as in CKA."""

    batches: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    layers: int = 10
    tokens: tuple[str, ...] = ("all",)
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_tokens(self.tokens, self.bootstrap)
        if self.layers < 2 or not self.batches or min(self.batches) < FEWEST:
            raise InputError(
                f"Two layers and batches of {FEWEST} images are needed at least, not {self.layers} and {self.batches}"
            )


def batch_sizes(config: MinibatchConfig, plan: Plan) -> list[int]:
    """The batch sizes that fit into those of the pass, or these alone."""
    return sorted({size for size in config.batches if size <= plan.batch}) or [plan.batch]


def image_counts(plan: Plan) -> list[int]:
    """Where 1, 2, 4, … batches of the pass end, and all images."""
    ends = _ends(plan)
    powers = [2**k for k in range(len(ends).bit_length()) if 2**k < len(ends)]
    return [int(ends[k - 1]) for k in (*powers, len(ends))]


def _ends(plan: Plan) -> npt.NDArray[np.int64]:
    """How many images have been seen after each batch of the pass."""
    return np.cumsum([len(part) for split in sorted(plan.splits) for part in _parts(plan, split)])


def _parts(plan: Plan, split: str) -> list[npt.NDArray[np.int64]]:
    """Rows of a split as the pass shares them out, in its order."""
    rows = np.searchsorted(plan.images.indices(split), plan.images.order(split, plan.seed))
    return np.array_split(rows, max(1, batch_count(len(rows), plan.batch)))


class MinibatchAnalysis(GramSums):
    """Sums HSIC over blocks on the diagonal of the Gram matrices of large batches."""

    hsic: Tensor  # (T, C, B, G, E, L, L): of the images between one number of images and the next

    def __init__(self, config: MinibatchConfig, plan: Plan) -> None:
        super().__init__("minibatch", config, plan)
        self.chosen = {encoder: _drawn(sites, config.layers, plan.seed) for encoder, sites in plan.sites.items()}
        self.sizes, self.counts, self.ends = batch_sizes(config, plan), image_counts(plan), _ends(plan)
        # Where each image comes in the pass: its number of a batch depends on what else is measured.
        self.places: dict[str, npt.NDArray[np.int64]] = {}
        before = 0
        for split in sorted(plan.splits):
            self.places[split] = before + np.argsort(np.concatenate(_parts(plan, split)))
            before += len(self.places[split])
        t, most = len(config.tokens), max(map(len, self.chosen.values()))
        self.of = (len(self.chosen), most)
        self.add_sums(
            hsic=(t, len(self.counts), len(self.sizes), GROUPS, *self.of, most), flaws=(t, math.prod(self.of), 3)
        )

    def reduce(self, key: Key, activation: Tensor) -> dict[str, Tensor]:
        """Gram matrices of the layers that were drawn."""
        return super().reduce(key, activation) if key.site in self.chosen[key.encoder] else {}

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        """Add the HSIC of the blocks of every size; a batch of fewer than 4 images cannot enter."""
        n = len(batch.ids)
        if self.group_of(batch) is None:
            return
        first = int(self.places[batch.split][batch.rows.numpy(force=True)].min())
        c, number = (int(np.searchsorted(ends, first, side="right")) for ends in (self.counts, self.ends))
        layers = [
            reductions[Key(encoder, sites[k], "plain")] if k < len(sites) else {}
            for encoder, sites in self.chosen.items()
            for k in range(self.of[1])
        ]
        for t, matrices in self.matrices(layers, n):  # (E · L, n, n)
            for b, size in enumerate(self.sizes):
                for rows in torch.arange(n, device=matrices.device).tensor_split(batch_count(n, size)):
                    block = matrices[:, rows[:, None], rows].view(*self.of, len(rows), len(rows))
                    # The same images are in a group whatever the size.
                    self.hsic[t, c, b, number % GROUPS] += len(rows) * products(centre(block))

    def compute(self) -> xr.Dataset:
        hsic = self.hsic.numpy(force=True).cumsum(1)  # of the first so many images
        hsic = hsic[:, :, :, np.arange(GROUPS) < len(self.ends)]
        value = ratio(hsic.sum(3))
        low, high = (np.full_like(value, np.nan) for _ in range(2))
        for c, b in np.ndindex(hsic.shape[1:3]):
            groups = hsic[:, c, b].swapaxes(0, 1)  # (G, T, E, L, L)
            seen = groups[np.nan_to_num(groups).any((1, 2, 3, 4))]
            low[:, c, b], high[:, c, b] = bootstrap(seen, self.config.bootstrap, self.plan.seed, device=self.device)
        own = np.diagonal(hsic[:, -1, 0].sum(1), axis1=-2, axis2=-1).reshape(len(hsic), -1)
        there = [[k < len(sites) for k in range(self.of[1])] for sites in self.chosen.values()]
        reason = np.where(there, self.reasons(own).reshape(-1, *self.of), ABSENT)
        dims = ("tokens", "count", "batch", "encoder", "layer_a", "layer_b")
        sites = [[*of, *[""] * (self.of[1] - len(of))] for of in self.chosen.values()]
        result = xr.Dataset(
            {
                **{f"cka{end}": (dims, part) for end, part in zip(ENDS, (value, low, high), strict=True)},
                "difference": (dims[:4], _difference(value)),
                "site": (("encoder", "layer"), np.array(sites, dtype=str)),
                "reason": (("tokens", "encoder", "layer"), reason),
            },
            coords={
                "tokens": list(self.config.tokens),
                "count": self.counts,
                "batch": self.sizes,
                "encoder": list(self.chosen),
                **{n: np.arange(self.of[1]) for n in ("layer", "layer_a", "layer_b")},
            },
            attrs={**self.estimator, "seed": self.plan.seed},
        )
        return self._kept(hsic).beside(result)

    def _kept(self, hsic: npt.NDArray[np.float64]) -> Kept:
        which = [[self.plan.images.digest(split) for split in self.plan.splits], self.plan.batch, self.plan.seed]
        words = "batches of the pass" if len(self.ends) <= GROUPS else "groups of batches of the pass"
        kept = Kept({"batches": Axis(fingerprint(["minibatch", *which])[:16], words)})
        dims, own = ("tokens", "count", "batch", "batches", "encoder"), np.diagonal(hsic, axis1=-2, axis2=-1)
        kept.add(
            "cka",
            Alignment("cross", "own_a", "own_b"),
            cross=((*dims, "layer_a", "layer_b"), hsic),
            own_a=((*dims, "layer_a"), own),
            own_b=((*dims, "layer_b"), own),
        )
        kept.nothing("it is a maximum of differences", "difference")
        return kept


def _drawn(sites: Sequence[str], count: int, seed: int) -> list[str]:
    """Some of the layers at random, in order of computation."""
    random = np.random.Generator(np.random.Philox(seed))
    return [sites[k] for k in sorted(random.permutation(len(sites))[:count].tolist())]


def _difference(value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Largest difference over all pairs of layers from the largest batches and all images: (T, C, B, E)."""
    difference = np.abs(value - value[:, -1:, -1:])
    finite = np.isfinite(difference).any((-2, -1))
    return np.where(finite, np.nan_to_num(difference, nan=-1.0).max((-2, -1)), np.nan)


def cost(config: MinibatchConfig, plan: Plan) -> Cost:
    layers = max(min(len(sites), config.layers) for sites in plan.sites.values())
    cells = len(image_counts(plan)) * len(batch_sizes(config, plan)) * GROUPS * layers**2
    return Cost(memory=8 * len(config.tokens) * len(plan.sites) * (cells + layers * plan.batch**2), disk=0)


# Report


def figures(result: xr.Dataset) -> list[Figure]:
    view = result.isel(tokens=0)
    drawn = []
    over = {
        "batch": ("the batch size", view.isel(count=-1), f"all {int(view['count'][-1])} images"),
        "count": ("the number of images", view.isel(batch=0), f"batches of {int(view.batch[0])} images"),
    }
    for axis, (words, part, held) in over.items():
        table = _means(part, axis)
        if table.empty:
            return []
        chart = curve_over_depth(
            table,
            value_title="mean CKA with the others",
            depth_title=f"log2 of {words}",
            series_title="layer",
            series=list(table.series.unique()),
            facet="encoder",
            details={axis: words},
        )
        text = f"Each line is a layer: its mean CKA with the other layers that were drawn; {held}."
        drawn.append(Figure(axis, f"CKA against {words}", text, chart, table))
    cells = view.difference.to_dataframe().reset_index()[["encoder", "batch", "count", "difference"]]
    cells = cells.rename(columns={"difference": "value", "batch": "row", "count": "column"})
    chart = heatmap(
        cells,
        row_title="batch size",
        column_title="images",
        value_title="largest difference",
        facet="encoder",
        domain=(0, 0.1),
    )
    text = "Largest difference, over all pairs of these layers, from CKA with the largest batches and all images."
    return [*drawn, Figure("difference", "What batch size and number of images change", text, chart, cells)]


def _means(part: xr.Dataset, axis: str) -> pd.DataFrame:
    """Mean CKA of each layer with the others, over batch sizes or numbers of images."""
    others = part.cka.where(part.layer_a != part.layer_b).mean("layer_b").rename(layer_a="layer")
    table = xr.Dataset({"value": others, "site": part.site}).to_dataframe().reset_index().dropna(subset="value")
    table = table.sort_values(["encoder", "layer", axis], kind="stable").rename(columns={"site": "series"})
    encoders = [str(encoder) for encoder in part.encoder.values]
    table = table.iloc[np.argsort(table.encoder.map(encoders.index), kind="stable")]
    return table.assign(depth=np.log2(table[axis]))[["encoder", "series", axis, "depth", "value"]]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    view = result.isel(tokens=0, count=-1)
    sizes = f"batches of {int(view.batch[0])} … {int(view.batch[-1])}" if len(view.batch) > 1 else "one batch size"
    lines = []
    for encoder in view.encoder.values:
        of_encoder = view.sel(encoder=encoder)
        if of_encoder.difference.notnull().any():
            layers = int((of_encoder.site != "").sum())
            detail = f"largest difference of CKA between {sizes}; {layers} layers, {int(view['count'])} images"
            lines.append((str(encoder), f"{float(of_encoder.difference.max()):.3f}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    view = result.isel(tokens=0, count=-1).difference.max("batch").to_dataset(name="difference")
    about = "largest difference of CKA between batch sizes, of all images"
    return of_encoders(view, "difference", title="batch size", about=about, style=".3f", best="lowest", place=3)
