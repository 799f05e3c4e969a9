"""Centred kernel alignment: how alike are two layers, whatever the rotation and scale of their features?

    CKA = Σ_b HSIC₁(K_b, L_b) / √(Σ_b HSIC₁(K_b, K_b) · Σ_b HSIC₁(L_b, L_b))     over minibatches b

of all pairs of layers of all encoders, and of each layer with the classes (L = Y Yᵀ, Y the one-hot labels). The parts
are in measure/estimators/cka.py. With `full_batch` all images are one batch (measure/estimators/full_batch.py).

Source: Nguyen, Raghu & Kornblith 2021 (minibatch CKA), as used by Shekhar et al. 2023, Appendix B.1; class CKA, row
maximum, odd and even layers: Grigg et al. 2021.

Shapes: n images of a batch, m of them labelled, S layers (encoder, site), T token views, G groups of batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.analyses.cka.charts import figures as figures
from sightline.analyses.cka.charts import headlines as headlines
from sightline.analyses.cka.charts import key_numbers as key_numbers
from sightline.analyses.cka.charts import likeness as likeness
from sightline.analyses.cka.charts import study_figure as study_figure
from sightline.analyses.cka.matching import block_distances, depths_of
from sightline.analyses.cka.matching import summaries as summaries
from sightline.core.groups import Alignment, Best, Binned, Kept, Pairs, Picked
from sightline.core.results import ABSENT, sites_of
from sightline.images.pipeline import Batch
from sightline.images.sets import FEWEST
from sightline.measure.estimators.cka import GROUPS, TOKENS, centre, own_of, products, ratio
from sightline.measure.estimators.cka import cka as cka
from sightline.measure.estimators.cka import study as study
from sightline.measure.gram_sums import WIDEST, GramSums, Values, check_tokens, full_bytes, narrow, too_wide, widths_of
from sightline.measure.layers import Layers
from sightline.measure.plan import Cost, Key, Plan

TOPIC = "alike"
TITLE = "CKA"
QUESTION = "How alike are the representations of two layers, within one encoder or across encoders?"
FORMULA = """\
CKA(K, L) = Σ_b HSIC₁(K_b, L_b) / √( Σ_b HSIC₁(K_b, K_b) · Σ_b HSIC₁(L_b, L_b) )
HSIC₁(K, L) = [ tr(K̃L̃) + 1ᵀK̃1 · 1ᵀL̃1 / ((n−1)(n−2)) − 2/(n−2) · 1ᵀK̃L̃1 ] / (n(n−3))
K = X Xᵀ for the activations X (n images × features) of a minibatch b; K̃ is K with a zero diagonal
class CKA: L = Y Yᵀ for the one-hot labels Y, which is 1 for two images of one class and 0 for others"""
HOW_TO_READ = """\
1 means that two layers see the same images as alike and the same images as different, up to rotation and scale of their
features; 0 means that they have nothing in common. The estimate is unbiased, so unrelated layers come out slightly
below or above 0: the shuffled-pair null, where each image is paired with another one, shows how far. The interval is a
95 % bootstrap over batches. A bright diagonal says that two encoders build their features in the same order; a bright
block away from it, that one of them reaches the same representation earlier or later. Class CKA compares a layer with
the labels: 1 would mean that images of one class coincide and all classes are equally far apart. Empty cells have a
reason: hover to see it."""

SOURCE = (
    'Nguyen, Raghu, Kornblith 2021, "Do Wide and Deep Networks Learn the Same Things?" (minibatch CKA); '
    "Székely, Rizzo 2014 (U-centring); "
    'Shekhar et al. 2023, "Objectives Matter", Appendix B.1, Fig. 6 and 11 (batch size, distance in depth); '
    'Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn Similar Visual Representations?" '
    "(class CKA, diagonal and row maximum, odd and even layers of a ResNet)"
)
SITES = ("block.*", "block.*.norm1", "block.*.qkv", "block.*.fc1", "block.*.residual", "decoder.block.*")
PROJECTION = ("head.*",)
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = True
INVARIANT_TO = frozenset({"rotation", "scale", "translation"})


PAIR = ("tokens", "encoder_a", "encoder_b", "site_a", "site_b")


@dataclass(frozen=True)
class CkaConfig:
    """`tokens`: token views to compare; `unbiased=False` takes the biased HSIC, which is too high for few images.

    `full_batch` takes all images at once, of layers of at most 8192 features.
    """

    tokens: tuple[str, ...] = TOKENS
    unbiased: bool = True
    full_batch: bool = False
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_tokens(self.tokens, self.bootstrap)


class CkaAnalysis(GramSums):
    """Sums HSIC of all pairs of layers over batches; a batch of fewer than 4 images cannot enter HSIC₁."""

    hsic: Tensor  # (T, G, S, S)
    null: Tensor  # (T, S, S)
    classes: Tensor  # (T, G, S, 2, 2): of each layer and the labels, on labelled images
    class_null: Tensor  # (T, S, 2, 2)
    labelled: Tensor  # (G,)
    dropped: Tensor

    def __init__(self, config: CkaConfig, plan: Plan) -> None:
        super().__init__("cka", config, plan)
        self.layers = Layers(plan.sites, plan.stages)
        self.depths = depths_of([plan.encoders[name] for name in self.layers.encoders])
        t, s = len(self.config.tokens), len(self.layers)
        self.unbiased = config.unbiased or config.full_batch  # of minibatches, which give a full batch its interval
        self.add_sums(
            hsic=(t, GROUPS, s, s),
            null=(t, s, s),
            classes=(t, GROUPS, s, 2, 2),
            class_null=(t, s, 2, 2),
            flaws=(t, s, 3),
            labelled=(GROUPS,),
            dropped=(),
        )
        for view, widths in self.widths.items():
            if view in self.config.tokens:
                self.add_full(view, [*widths, len(plan.images.classes)])  # the labels are one more layer

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        """Add the HSIC of all pairs of layers on this batch; batches count by the images they hold."""
        n, group = len(batch.ids), self.group_of(batch)
        if group is None:
            self.dropped += n
            return
        labelled = (batch.labels >= 0).nonzero()[:, 0]
        labels, labelled = batch.labels[labelled].to(self.hsic.device), labelled.to(self.hsic.device)
        m = len(labelled) if len(labelled) >= FEWEST else 0
        classes = (labels[:, None] == labels).double()[None]  # the Gram matrix of the one-hot labels, (1, m, m)
        self.labelled[group] += m
        layers = [reductions[Key(encoder, site, "plain")] for encoder, site in self.layers]
        for t, matrices in self.matrices(layers, n):  # (S, n, n)
            hsic, null = self._products(torch.cat([matrices, classes]) if m == n else matrices)
            self.hsic[t, group] += n * hsic[: len(layers), : len(layers)]
            self.null[t] += n * null[: len(layers), : len(layers)]
            if 0 < m < n:
                hsic, null = self._products(torch.cat([matrices[:, labelled[:, None], labelled], classes]))
            if m:
                self.classes[t, group] += m * _with_last(hsic)
                self.class_null[t] += m * _with_last(null)
        if self.full_batch:
            for view in self.config.tokens:
                sums = self.full(view)
                one_hot = (batch.labels[:, None] == torch.arange(sums.widths[-1])).to(self.hsic)
                sums.add([*self.features(layers, view, n), one_hot])

    def _products(self, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """HSIC of all pairs of Gram matrices, and of those with shuffled images."""
        centred = centre(matrices, self.unbiased)
        return products(centred, self.unbiased), products(centred, self.unbiased, shuffled=True)

    def compute(self) -> xr.Dataset:
        hsic, null, classes, class_null, images, labelled = (
            state.numpy(force=True)
            for state in (self.hsic, self.null, self.classes, self.class_null, self.images, self.labelled)
        )
        total, of_class = hsic.sum(1), classes.sum(1)
        full: Values = self.cka("cka", hsic, images) | {"cka_null": ratio(null, own_of(total))}
        both = self.cka("class_cka", classes, labelled) | {"class_cka_null": ratio(class_null, own_of(of_class))}
        each: Values = {name: values[..., 0, 1] for name, values in both.items()}  # a layer with the labels
        reason = self.reasons(np.diagonal(total, axis1=1, axis2=2))
        if self.full_batch:
            full, each = self._at_once(full, each, reason == "")
        unlabelled = np.where(np.isnan(each["class_cka"]), self._why_no_class(of_class, labelled), "")
        reasons = {"reason": reason, "class_reason": np.where(reason == "", unlabelled, reason)}
        dims, pair = ("tokens", "encoder", "site"), PAIR
        result = xr.Dataset(
            {
                **{name: (pair, self.layers.spread_pairs(values)) for name, values in full.items()},
                **{name: (dims, self.layers.spread_rows(values)) for name, values in each.items()},
                **{name: (dims, self.layers.spread_rows(values, ABSENT)) for name, values in reasons.items()},
            },
            coords={"tokens": list(self.config.tokens), **self.layers.pair_coords()},
            attrs={
                **self.estimator,
                "batch": self.plan.batch,
                "dropped_images": int(self.dropped),
                "labelled_images": int(self.labelled.sum()),
            },
        )
        result = result.merge(summaries(result, depths=self.depths))
        return self._kept(result).beside(result)

    def _kept(self, result: xr.Dataset) -> Kept:
        """HSIC by groups of batches, of each pair of layers once, for contrasts."""
        kept, there = self.kept_batches(), self.images.numpy(force=True) > 0
        hsic = self.hsic.numpy(force=True)[:, there]
        # CKA does not see the scale of a layer, but float32 would: powers of two bring HSIC with itself to about 1.
        scale = np.frexp(np.diagonal(hsic.sum(1), axis1=1, axis2=2))[1][:, None] // 2  # (T, 1, S)
        hsic = np.ldexp(hsic, -(scale[..., :, None] + scale[..., None, :]))
        hsic = hsic[..., *np.tril_indices(len(self.layers))].astype(np.float32)
        classes = self.classes.numpy(force=True)[:, there].transpose(2, 1, 0, 3, 4)  # (S, G, T, 2, 2)
        layers, over = self.layers.spread(np.arange(len(self.layers)), -1), ("encoder", "site", "batches", "tokens")
        kept.add(
            "cka",
            Pairs("hsic", "layer"),
            hsic=(("tokens", "batches", "pair"), hsic),
            layer=(("encoder", "site"), layers),
        )
        kept.add("diagonal", Picked("cka", "site_b", "diagonal_site"))
        kept.add("row_max", Best("cka"))
        kept.add("row_depth", Best("cka", depth=True))
        distances = block_distances(np.array(self.layers.sites), sites_of(result), self.depths).astype(np.int16)
        kept.add("distance_cka", Binned("cka", "distance", "distances"), distances=(PAIR[1:], distances))
        parts = {"class_cross": (0, 1), "class_own": (0, 0), "class_labels": (1, 1)}
        by_layer = {name: (over, self.layers.spread(classes[..., a, b])) for name, (a, b) in parts.items()}
        kept.add("class_cka", Alignment(*parts), **by_layer)
        return kept

    def _at_once(self, full: Values, each: Values, known: npt.NDArray[np.bool_]) -> tuple[Values, Values]:
        """Full-batch CKA of all pairs (T, S, S) and with the labels (T, S), in place of the minibatch ones."""
        values, s = self.full_cka(self.config.tokens), len(self.layers)
        pairs = known[:, :, None] & known[:, None]
        labelled = known & bool(self.labelled.sum() == self.images.sum())
        layers = {end: np.where(pairs, value[:, :s, :s], np.nan) for end, value in values.items()}
        classes = {end: np.where(labelled, value[:, :s, s], np.nan) for end, value in values.items()}
        return self.with_interval("cka", layers, full), self.with_interval("class_cka", classes, each)

    def _why_no_class(self, of_class: npt.NDArray[np.float64], labelled: npt.NDArray[np.float64]) -> str:
        if not labelled.any():
            return f"no batch had {FEWEST} images with a label"
        if self.full_batch and (without := int(self.images.sum() - labelled.sum())):
            return f"a full batch needs the labels of all images, and {without} of them have none"
        if self.full_batch and (classes := len(self.plan.images.classes)) > WIDEST:
            return too_wide(classes)
        if not of_class[..., 1, 1].any():
            return (
                "the images of each batch are of one class, or all but one of them are, or each is of a class of its "
                "own; give several images of each of several classes, or a larger batch (--batch)"
            )
        return "all pairs of labelled images are equally alike, so there is nothing to compare"


def _with_last(hsic: Tensor) -> Tensor:
    """Of HSIC (S + 1, S + 1) the pairs of each layer and the last one, the labels: (S, 2, 2)."""
    diagonal, cross = hsic.diagonal()[:-1], hsic[:-1, -1]
    return torch.stack([diagonal, cross, cross, hsic[-1, -1].expand_as(diagonal)], -1).view(-1, 2, 2)


def cost(config: CkaConfig, plan: Plan) -> Cost:
    layers = sum(len(sites) for sites in plan.sites.values())
    memory = 8 * len(config.tokens) * (GROUPS + 1) * (layers**2 + 4 * layers)
    for widths in widths_of(plan, config.tokens).values() if config.full_batch else ():
        memory += full_bytes(narrow([*widths, len(plan.images.classes)]))
    return Cost(memory=memory, disk=0)
