"""Augmentation invariance: how alike does a layer see two augmented copies of the same images?

    invariance = CKA(X, X′),   X, X′ the activations of one layer on two copies, augmented independently

with the unbiased minibatch CKA of measure/estimators/cka.py: 1 if augmentation does not change which images are alike.

Source: Grigg et al. 2021, Fig. 3 (middle); policies of SimCLR, MoCo-v3, DINO and of supervised training.

Shapes: n images of a batch, S layers (encoder, site), P policies, T token views, G groups of batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.results import ABSENT
from sightline.images.views import policies_of
from sightline.measure.estimators.cka import GROUPS, TOKENS, centre, products, ratio
from sightline.measure.estimators.cka import cka as cka
from sightline.measure.gram_sums import GramSums, check_tokens
from sightline.measure.layers import Layers
from sightline.measure.plan import Cost, Key, Plan
from sightline.report.figures import Figure, depth_table, interval_of, over_depth

if TYPE_CHECKING:
    import numpy.typing as npt

    from sightline.images.pipeline import Batch


TITLE = "Augmentation invariance"
QUESTION = "Does a layer see two augmented copies of the same images alike?"
FORMULA = """\
invariance = CKA(K, L) = Σ_b HSIC₁(K_b, L_b) / √( Σ_b HSIC₁(K_b, K_b) · Σ_b HSIC₁(L_b, L_b) )
K = X Xᵀ, L = X′ X′ᵀ for the activations X, X′ of one layer on two augmented copies of a minibatch b of images"""
HOW_TO_READ = """\
Each image is augmented twice, with random numbers of its own for each copy, as a training would augment it. 1 means
that a layer sees the images of one copy as alike and as different as those of the other: what the augmentation changes
is lost on it. 0 means that the two copies have nothing in common. Encoders trained to match two views become more
invariant towards their last blocks, and most of all to the policy that they were trained with; those trained to
reconstruct or to classify need not. Policies differ in strength, so compare encoders within a panel, and the rise along
the depth between panels. Dashes: pairs of different images; bands: 95 % bootstrap over batches."""
SOURCE = (
    'Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn Similar Visual Representations?", Fig. 3; '
    'Nguyen, Raghu, Kornblith 2021, "Do Wide and Deep Networks Learn the Same Things?" (minibatch CKA)'
)
SITES = ("block.*", "decoder.block.*")
PROJECTION = ("head.*",)
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = False
INVARIANT_TO = frozenset({"rotation", "scale", "translation"})


@dataclass(frozen=True)
class Config:
    """`policies`: of augment/policies.py, also with settings: `"simclr?blur=0&crop=[0.5, 1]"`; `tokens` as in CKA."""

    policies: tuple[str, ...] = ("simclr", "moco_v3", "dino", "supervised")
    tokens: tuple[str, ...] = TOKENS
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_tokens(self.tokens, self.bootstrap)
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise InputError(f"Invariance needs one policy or several different ones, not {self.policies}")
        for policy in self.policies:
            policies_of(policy, 224)


def views(config: Config, split: str) -> tuple[str, ...]:
    """Two copies of the images for each policy."""
    return tuple(f"augment:{policy}:{copy}" for policy in config.policies for copy in range(2))


class Analysis(GramSums):
    """Sums HSIC of each layer with itself on the other copy; a batch of fewer than 4 images cannot enter HSIC₁."""

    hsic: Tensor  # (T, G, S, P, 2, 2)
    null: Tensor  # (T, S, P, 2, 2)
    dropped: Tensor

    def __init__(self, config: Config, plan: Plan) -> None:
        super().__init__("invariance", config, plan)
        self.layers = Layers(plan.sites)
        t, each = len(config.tokens), (len(self.layers), len(config.policies), 2)
        self.add_sums(hsic=(t, GROUPS, *each, 2), null=(t, *each, 2), flaws=(t, *each, 3), dropped=())

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        """Add the HSIC of the two copies of this batch; batches count by the images they hold."""
        n, group = len(batch.ids), self.group_of(batch)
        if group is None:
            self.dropped += n
            return
        copies = views(self.config, batch.split)
        found = [reductions[Key(encoder, site, copy)] for encoder, site in self.layers for copy in copies]
        for t, matrices in self.matrices(found, n):  # (S · P · 2, n, n)
            pairs = centre(matrices).view(*self.null.shape[1:4], n, n)  # (S, P, 2, n, n)
            self.hsic[t, group] += n * products(pairs)
            self.null[t] += n * products(pairs, shuffled=True)

    def compute(self) -> xr.Dataset:
        """Invariance of all layers to all policies, with interval, null and reasons."""
        hsic, null, images = (state.numpy(force=True) for state in (self.hsic, self.null, self.images))
        total = hsic.sum(1)
        values = self.cka("invariance", hsic, images) | {"invariance_null": ratio(null, norm=total)}
        both = self.reasons(np.diagonal(total, axis1=-2, axis2=-1))  # (T, S, P, 2)
        reason = np.where(both[..., 0] == "", both[..., 1], both[..., 0])
        dims = ("policy", "tokens", "encoder", "site")
        return xr.Dataset(
            {
                **{name: (dims, self._over_layers(value[..., 0, 1])) for name, value in values.items()},
                "reason": (dims, self._over_layers(reason, ABSENT)),
            },
            coords={"policy": list(self.config.policies), "tokens": list(self.config.tokens), **self.layers.coords()},
            attrs={
                "estimator": "unbiased minibatch",
                "batch": self.plan.batch,
                "interval": "95 % bootstrap over batches",
                "dropped_images": int(self.dropped),
            },
        )

    def _over_layers(self, values: npt.NDArray[Any], fill: Any = np.nan) -> npt.NDArray[Any]:
        """(T, S, P) over layers → (P, T, encoders, sites)."""
        return self.layers.spread(values.transpose(1, 2, 0), fill).transpose(2, 3, 0, 1)


def cost(config: Config, plan: Plan) -> Cost:
    """Memory for the sums and for the Gram matrices of all copies of a batch; nothing on disk."""
    layers = len(Layers(plan.sites)) * len(config.policies) * len(config.tokens)
    return Cost(memory=8 * layers * (4 * (GROUPS + 1) + 2 * plan.batch**2), disk=0)


def figures(result: xr.Dataset) -> list[Figure]:
    """Invariance over depth: a panel for each policy, a colour for each encoder."""
    tokens = str(result.tokens.values[0])
    text = (
        f"CKA of each block on two augmented copies of the images (tokens: {tokens}), a panel for each policy; dashes: "
        "pairs of different images."
    )
    return over_depth(
        result.sel(tokens=tokens),
        "invariance",
        title="Augmentation invariance over depth",
        caption=text,
        value_title="CKA of two copies",
        types=("block", "head"),
        facet="policy",
    )


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    """The last block of each encoder (not of a decoder) under the first policy: (label, number, detail)."""
    table, _ = depth_table(result.isel(policy=[0], tokens=0), "invariance")
    last = table[table.site.str.startswith("block.")].groupby("series", sort=False).tail(1)
    return [
        (str(row.series), f"{row.value:.2f}", f"{row.policy} copies at {row.site}{interval_of(row)}")
        for row in last.itertuples()
    ]
