"""Gram matrices of activations as a stream: what the analyses by CKA share.

Shapes: n images of a batch, S layers or other rows, T token views, G groups of batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.core.results import ENDS
from sightline.encoders.sites import Tokens, token_view
from sightline.images.sets import FEWEST
from sightline.measure.contract import Analysis
from sightline.measure.estimators.cka import GROUPS, TOKENS, bootstrap, gram, ratio

if TYPE_CHECKING:
    import numpy.typing as npt

    from sightline.images.pipeline import Batch
    from sightline.measure.plan import Key, Plan

__all__ = ["GramSums", "check_tokens", "grams"]


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


class GramSums(Analysis):
    """Sums of HSIC over batches in groups; a batch of fewer than 4 images cannot enter HSIC₁.

    An analysis gives the shapes of its own sums, adds to them in `update`, and keeps its pairs and its axes.
    """

    flaws: Tensor  # (T, S, 3), or more axes for S: batches seen, those that were constant, those that were not finite
    images: Tensor  # (G,)

    def __init__(self, name: str, config: Any, plan: Plan) -> None:
        """`config` has `tokens` and `bootstrap`."""
        super().__init__()
        _check_images(name, plan)
        self.config, self.plan = config, plan
        self.add_sums(images=(GROUPS,))

    def add_sums(self, **shapes: tuple[int, ...]) -> None:
        """Sums of these shapes; `flaws` must be among them."""
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def reduce(self, key: Key, activation: Tensor) -> dict[str, Tensor]:
        """Gram matrices of the token views, inside the hook."""
        return grams(activation, self.config.tokens, self.plan.encoders[key.encoder].tokens)

    def group_of(self, batch: Batch) -> int | None:
        """The group of batches that this one belongs to, its images counted; None if it has too few to enter."""
        if len(batch.ids) < FEWEST:
            return None
        group = batch.number % GROUPS
        self.images[group] += len(batch.ids)
        return group

    def matrices(self, found: Sequence[Mapping[str, Tensor]], n: int) -> Iterator[tuple[int, Tensor]]:
        """Each token view by its number, with the Gram matrices (S, n, n) of what was found; flaws are summed."""
        for t, view in enumerate(self.config.tokens):
            matrices, flaws = _stacked(found, view, self.flaws.new_zeros((n, n)))
            self.flaws[t] += flaws.view(self.flaws.shape[1:])
            yield t, matrices

    def cka(
        self, name: str, hsic: npt.NDArray[np.float64], images: npt.NDArray[np.float64]
    ) -> dict[str, npt.NDArray[np.float64]]:
        """CKA from HSIC (T, G, …, S, S) and the images of each group, with its interval."""
        ends = bootstrap(hsic.swapaxes(0, 1)[images > 0], self.config.bootstrap, self.plan.seed)
        return {f"{name}{end}": part for end, part in zip(ENDS, (ratio(hsic.sum(1)), *ends), strict=True)}

    def reasons(self, own: npt.NDArray[np.float64]) -> npt.NDArray[np.str_]:
        """Why rows have no value, "" where they have one, from the HSIC of each with itself, (T, S)."""
        flaws, seen = self.flaws.numpy(force=True).reshape(-1, 3), bool(self.images.any())
        whys = [_reason(of_row, value, seen) for of_row, value in zip(flaws, own.ravel(), strict=True)]
        return np.array(whys, dtype=str).reshape(own.shape)


def check_tokens(tokens: Sequence[str], replicates: int) -> None:
    """Settings that every analysis with CKA has."""
    for view in tokens:
        if view not in TOKENS:
            raise InputError(f"CKA has no token view {view!r}{nearest(view, TOKENS)}")
    if not tokens or replicates < 1:
        raise InputError(f"CKA needs a token view and a bootstrap sample at least, not {len(tokens)} and {replicates}")


def _check_images(name: str, plan: Plan) -> None:
    """Refuse a split that no batch of 4 images can come from."""
    if (most := max(len(plan.images.indices(split)) for split in plan.splits)) < FEWEST:
        raise InputError(
            f"CKA needs at least {FEWEST} images, but the {' and '.join(plan.splits)} split of {plan.images.name} "
            f"has {most}; give more, or leave {name} out (--only knn)"
        )


def _stacked(found: Sequence[Mapping[str, Tensor]], view: str, none: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrices (S, n, n) of a token view, `none` where a layer has no such view, and their flaws (S, 3).

    Flaws: 1 where it was seen, where it was constant, where it was not finite; they sum over batches.
    """
    matrices = torch.stack([layer.get(view, none) for layer in found])
    seen = torch.tensor([view in layer for layer in found], device=matrices.device)
    constant, infinite = matrices.abs().sum((1, 2)) == 0, ~matrices.isfinite().all(-1).all(-1)
    return matrices, torch.stack([seen, seen & constant, infinite], 1)


def _reason(flaws: npt.NDArray[np.float64], own: float, images: bool) -> str:
    """Why a layer has no value, from its summed flaws, its own HSIC, and whether any batch had images."""
    seen, constant, infinite = flaws
    if not images:
        return f"no batch had {FEWEST} images that could be read"
    if seen == 0:
        return "this site has no such token view"
    if infinite:
        return f"the activations are not finite (NaN or infinity) in {infinite:.0f} of {seen:.0f} batches"
    if constant == seen:
        return "the activations are the same for all images"
    return "" if own > 0 else "all pairs of images are equally alike, so there is nothing to compare"
