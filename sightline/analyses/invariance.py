"""Augmentation invariance: how alike does a layer see two augmented copies of the same images?

    CKA(X, Y′)                       X the activations of a layer on one copy of the images, Y′ those of any layer of
                                     the same encoder on another copy, augmented independently
    invariance = CKA(X, X′)          of a layer with itself, the diagonal

with the unbiased minibatch CKA of measure/estimators/cka.py, or that of all images at once (estimators/full_batch.py):
1 if augmentation does not change which images are alike.

Source: Grigg et al. 2021, Fig. 3 (middle) and Fig. 5; policies of SimCLR, MoCo-v3, DINO and of supervised training.

Shapes: n images of a batch, S layers (encoder, site), s of one encoder, C the sum of their s², P policies, T token
views, G groups of batches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.groups import Alignment, Kept, Same
from sightline.core.results import ABSENT, ENDS
from sightline.images.pipeline import Batch
from sightline.images.views import policies_of
from sightline.measure.estimators.cka import GROUPS, TOKENS, centre, products, ratio
from sightline.measure.estimators.cka import cka as cka
from sightline.measure.estimators.full_batch import Pairs
from sightline.measure.gram_sums import GramSums, Values, check_tokens, full_bytes, narrow, widths_of
from sightline.measure.layers import Layers
from sightline.measure.plan import Cost, Key, Plan
from sightline.report.figures import Figure, KeyNumber, depth_table, heatmap, interval_of, key_number, over_depth

TOPIC = "robust"
TITLE = "Augmentation invariance"
QUESTION = "Does a layer see two augmented copies of the same images alike?"
FORMULA = """\
invariance = CKA(K, L) = Σ_b HSIC₁(K_b, L_b) / √( Σ_b HSIC₁(K_b, K_b) · Σ_b HSIC₁(L_b, L_b) )
K = X Xᵀ, L = X′ X′ᵀ for the activations X, X′ of one layer on two augmented copies of a minibatch b of images
layer × layer: K of any layer on the first copy, L of any layer of the same encoder on the second"""
HOW_TO_READ = """\
Each image is augmented twice, independently, as a training would augment it. 1 means that a layer sees the images of
one copy as alike and as different as those of the other: what the augmentation changes does not reach it. 0 means that
the two copies have nothing in common. Encoders trained to match two views become more invariant towards their last
blocks, and most of all to the policy that they were trained with; those trained to reconstruct or to classify need not.
Policies differ in strength, so compare encoders within a panel, and between panels the rise over depth. Dashes: pairs
of different images; bands: 95 % bootstrap over batches. The maps of all layers show where invariance begins: a bright
corner at the end, with everything else dark, says that only the last layers (or the head) have become blind to the
augmentation, and that earlier layers do not yet hold what they have in common."""
SOURCE = (
    'Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn Similar Visual Representations?", Fig. 3, 5; '
    'Nguyen, Raghu, Kornblith 2021, "Do Wide and Deep Networks Learn the Same Things?" (minibatch CKA)'
)
SITES = ("block.*", "decoder.block.*")
PROJECTION = ("head.*",)
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = False
INVARIANT_TO = frozenset({"rotation", "scale", "translation"})


@dataclass(frozen=True)
class InvarianceConfig:
    """`policies`: of augment/policies.py, also with settings: `"simclr?blur=0&crop=[0.5, 1]"`; the others as in CKA."""

    policies: tuple[str, ...] = ("simclr", "moco_v3", "dino", "supervised")
    tokens: tuple[str, ...] = TOKENS
    unbiased: bool = True
    full_batch: bool = False
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_tokens(self.tokens, self.bootstrap)
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise InputError(f"Invariance needs one policy or several different ones, not {self.policies}")
        for policy in self.policies:
            policies_of(policy, 224)


def views(config: InvarianceConfig, split: str) -> tuple[str, ...]:
    return tuple(f"augment:{policy}:{copy}" for policy in config.policies for copy in range(2))


class InvarianceAnalysis(GramSums):
    """Sums HSIC of each layer with each of its encoder on the other copy; fewer than 4 images cannot enter HSIC₁."""

    cross: Tensor  # (T, G, P, C)
    own: Tensor  # (T, G, P, 2, S): of each layer with itself on each copy
    null: Tensor  # (T, P, C)
    dropped: Tensor

    def __init__(self, config: InvarianceConfig, plan: Plan) -> None:
        super().__init__("invariance", config, plan)
        self.layers = Layers(plan.sites, plan.stages)
        self.unbiased = config.unbiased or config.full_batch  # of minibatches, which give a full batch its interval
        t, p, s = len(self.config.tokens), len(config.policies), len(self.layers)
        c = sum(len(sites) ** 2 for sites in plan.sites.values())
        self.add_sums(
            cross=(t, GROUPS, p, c), own=(t, GROUPS, p, 2, s), null=(t, p, c), flaws=(t, s, p, 2, 3), dropped=()
        )
        for name, (widths, pairs) in _sets(self.config, plan).items():
            self.add_full(name, widths, pairs)

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        """Add the HSIC of the two copies of this batch; batches count by the images they hold."""
        n, group = len(batch.ids), self.group_of(batch)
        if group is None:
            self.dropped += n
            return
        copies = views(self.config, batch.split)
        matrices_of = [reductions[Key(encoder, site, copy)] for encoder, site in self.layers for copy in copies]
        for t, matrices in self.matrices(matrices_of, n):  # (S · P · 2, n, n)
            centred = centre(matrices, self.unbiased).view(*self.flaws.shape[1:4], n, n).transpose(0, 1)
            self.own[t, group] += n * products(centred[..., None, :, :], self.unbiased)[..., 0, 0].transpose(1, 2)
            for layers, places in self._encoders():
                first, second = centred[:, layers].unbind(2)  # (P, s, n, n)
                self.cross[t, group][:, places] += n * products(first, self.unbiased, others=second).flatten(1)
                null = products(first, self.unbiased, shuffled=True, others=second)
                self.null[t][:, places] += n * null.flatten(1)
        for name, (view, policy, own) in self._full_sets().items():
            mine = [matrices_of[len(copies) * k + 2 * policy + copy] for copy in range(2) for k in own]
            self.full(name).add(self.features(mine, view, n))

    def compute(self) -> xr.Dataset:
        both = self.reasons(self.own.sum(1).permute(0, 3, 1, 2).numpy(force=True))  # (T, S, P, 2)
        reason = np.where(both[..., 0] == "", both[..., 1], both[..., 0])
        values = self._cka(reason == "")
        dims, coords = ("policy", "tokens", "encoder", "site"), self.layers.coords()
        pairs = (*dims[:3], "site_a", "site_b")
        same = {f"invariance{end}": np.diagonal(values[f"cka{end}"], axis1=3, axis2=4) for end in (*ENDS, "_null")}
        result = xr.Dataset(
            {
                **{name: (dims, value) for name, value in same.items()},
                **{name: (pairs, value) for name, value in values.items()},
                "reason": (dims, self.layers.spread(reason.transpose(1, 2, 0), ABSENT).transpose(2, 3, 0, 1)),
            },
            coords={
                "policy": list(self.config.policies),
                "tokens": list(self.config.tokens),
                **coords,
                **{f"site_{end}": coords["site"] for end in "ab"},
            },
            attrs={**self.estimator, "batch": self.plan.batch, "dropped_images": int(self.dropped)},
        )
        return self._kept().beside(result)

    def _kept(self) -> Kept:
        kept, there, sites = self.kept_batches(), self.images.numpy(force=True) > 0, self.layers.sites
        cross, own = (state.numpy(force=True)[:, there] for state in (self.cross, self.own))
        axes = ("tokens", "batches", "policy", "encoder")
        full = np.full((*cross.shape[:3], len(self.layers.of), len(sites), len(sites)), np.nan, np.float32)
        for number, (encoder, (layers, places)) in enumerate(zip(self.layers.of, self._encoders(), strict=True)):
            where, s = [sites.index(site) for site in self.layers.of[encoder]], layers.stop - layers.start
            full[..., number, np.array(where)[:, None], where] = cross[..., places].reshape(*cross.shape[:3], s, s)
        each = self.layers.spread(np.moveaxis(own, -1, 0))  # (encoders, sites, T, G, P, 2)
        copies = {f"copy_{end}": (("encoder", f"site_{end}", *axes[:3]), each[..., n]) for n, end in enumerate("ab")}
        kept.add("cka", Alignment("cross", *copies), cross=((*axes, "site_a", "site_b"), full), **copies)
        kept.add("invariance", Same("cka", "site", ("site_a", "site_b")))
        return kept

    def _cka(self, known: npt.NDArray[np.bool_]) -> Values:
        """CKA with its interval and its null, each (P, T, encoders, sites, sites); `known` (T, S, P) have a value."""
        cross, own, null, images = (state.numpy(force=True) for state in (self.cross, self.own, self.null, self.images))
        sites = self.layers.sites
        shape = (len(self.config.policies), len(self.config.tokens), len(self.layers.encoders), len(sites), len(sites))
        full = {f"cka{end}": np.full(shape, np.nan) for end in (*ENDS, "_null")}
        for number, (layers, places) in enumerate(self._encoders()):
            s = layers.stop - layers.start
            hsic, chance = (part[..., places].reshape(*part.shape[:-1], s, s) for part in (cross, null))
            rows, columns = np.moveaxis(own[..., layers], 3, 0)
            norms = rows.sum(1), columns.sum(1)
            numbers: Values = self.cka("cka", hsic, images, (rows, columns)) | {"cka_null": ratio(chance, norms)}
            if self.full_batch:
                pairs = np.moveaxis(known[:, layers], 1, 2)
                numbers = self._at_once(number, numbers, pairs[..., None] & pairs[..., None, :])
            where = [sites.index(site) for site in self.layers.of[self.layers.encoders[number]]]
            for name, value in numbers.items():
                full[name][:, :, number, np.array(where)[:, None], where] = value.swapaxes(0, 1)
        return full

    def _at_once(self, encoder: int, batched: Values, known: npt.NDArray[np.bool_]) -> Values:
        """Full-batch CKA of the layers of an encoder on one copy with those on the other, (T, P, s, s)."""
        t, p, s, _ = known.shape
        values = self.full_cka([_set(view, policy, encoder) for view in self.config.tokens for policy in range(p)])
        across = {end: value[:, :s, s:].reshape(t, p, s, s) for end, value in values.items()}
        return self.with_interval("cka", {end: np.where(known, v, np.nan) for end, v in across.items()}, batched)

    def _encoders(self) -> Iterator[tuple[slice, slice]]:
        """Of each encoder its layers among all S, and its pairs among all C."""
        layer = place = 0
        for sites in self.layers.of.values():
            s = len(sites)
            yield slice(layer, layer + s), slice(place, place + s**2)
            layer, place = layer + s, place + s**2

    def _full_sets(self) -> dict[str, tuple[str, int, range]]:
        """By the name of their sums: token view, policy and layers of each full batch."""
        return {
            _set(view, policy, number): (view, policy, range(layers.start, layers.stop))
            for view in (self.config.tokens if self.full_batch else ())
            for policy in range(len(self.config.policies))
            for number, (layers, _) in enumerate(self._encoders())
        }


def _set(view: str, policy: int, encoder: int) -> str:
    """Name of the sums of a full batch."""
    return f"{view}_{policy}_{encoder}"


def _sets(config: InvarianceConfig, plan: Plan) -> dict[str, tuple[list[int], Pairs]]:
    """Widths and pairs of each full batch: the layers of an encoder on one copy, then the same on the other."""
    sets: dict[str, tuple[list[int], Pairs]] = {}
    for view, widths in widths_of(plan, config.tokens).items() if config.full_batch else ():
        first = 0
        for number, sites in enumerate(plan.sites.values()):
            s = len(sites)
            pairs = [(a, a, a + 1) for a in range(2 * s)] + [(a, s, 2 * s) for a in range(s)]
            both = 2 * widths[first : first + s]
            sets |= {_set(view, policy, number): (both, pairs) for policy in range(len(config.policies))}
            first += s
    return sets


def cost(config: InvarianceConfig, plan: Plan) -> Cost:
    layers, pairs = len(Layers(plan.sites)), sum(len(sites) ** 2 for sites in plan.sites.values())
    each = (GROUPS + 1) * (pairs + 2 * layers) + 2 * layers * plan.batch**2
    full = sum(full_bytes(narrow(widths), pairs) for widths, pairs in _sets(config, plan).values())
    return Cost(memory=8 * len(config.policies) * len(config.tokens) * each + full, disk=0)


def figures(result: xr.Dataset) -> list[Figure]:
    tokens = str(result.tokens.values[0])
    text = (
        f"CKA of each block on two augmented copies of the images (tokens: {tokens}), a panel for each policy; dashes: "
        "pairs of different images."
    )
    depth = over_depth(
        result.sel(tokens=tokens),
        "invariance",
        title="Augmentation invariance over depth",
        caption=text,
        value_title="CKA of two copies",
        types=("block", "head"),
        facet="policy",
    )
    return [*depth, *([_layers_by_layers(result)] if depth and "cka" in result else [])]


def _layers_by_layers(result: xr.Dataset) -> Figure:
    """All layers of an encoder on one copy against all on the other, in order of computation."""
    view = result.isel(tokens=0)
    columns = {"cka": "value", "cka_low": "low", "cka_high": "high", "cka_null": "null"}
    cells = view[list(columns)].to_dataframe().reset_index().rename(columns=columns)
    parts = []
    for encoder in map(str, view.encoder.values):
        reason = view.reason.sel(encoder=encoder)
        sites = [str(site) for site in view.site.values if (reason.sel(site=site) != ABSENT).all()]
        mine = cells[(cells.encoder == encoder) & cells.site_a.isin(sites) & cells.site_b.isin(sites)]
        why = reason.to_series()
        parts.append(
            mine.assign(
                row=mine.site_a.map(sites.index),
                column=mine.site_b.map(sites.index),
                pair=encoder + ", " + mine.policy,
                reason=[why[p, a] or why[p, b] for p, a, b in zip(mine.policy, mine.site_a, mine.site_b, strict=True)],
            )
        )
    table = pd.concat(parts, ignore_index=True)
    table = table[["pair", "encoder", "policy", "row", "column", "site_a", "site_b", *columns.values(), "reason"]]
    chart = heatmap(
        table,
        row_title="layer, first copy",
        column_title="layer, second copy",
        value_title="CKA",
        facet="pair",
        details={"site_a": "layer on the first copy", "site_b": "layer on the second copy"},
    )
    text = (
        f"CKA of every layer of an encoder on one augmented copy with every layer on the other (tokens: "
        f"{result.tokens.values[0]}), in order of computation, a head last; the diagonal is the curve above."
    )
    return Figure("layers", "Two augmented copies, all layers", text, chart, table)


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    table, _ = depth_table(result.isel(policy=[0], tokens=0), "invariance")
    last = table[table.site.str.startswith("block.")].groupby("series", sort=False).tail(1)
    return [
        (str(row.series), f"{row.value:.2f}", f"{row.policy} copies at {row.site}{interval_of(row)}")
        for row in last.itertuples()
    ]


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    first = result.isel(policy=0, tokens=0)
    about = f"CKA of two {first.policy.item()} copies of each image at the last block"
    return key_number(first, "invariance", at="last", title="invariance", about=about)
