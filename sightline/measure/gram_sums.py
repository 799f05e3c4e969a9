"""Gram matrices of activations as a stream: what the analyses by CKA share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.encoders.sites import Tokens, token_view
from sightline.images.sets import FEWEST
from sightline.measure.estimators.cka import TOKENS, gram

if TYPE_CHECKING:
    import numpy.typing as npt

    from sightline.measure.plan import Plan

__all__ = ["check_images", "check_tokens", "grams", "reason_of", "stacked"]


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


# What analyses that stream have in common


def check_tokens(tokens: Sequence[str], replicates: int) -> None:
    """Settings that every analysis with CKA has."""
    for view in tokens:
        if view not in TOKENS:
            raise InputError(f"CKA has no token view {view!r}{nearest(view, TOKENS)}")
    if not tokens or replicates < 1:
        raise InputError(f"CKA needs a token view and a bootstrap sample at least, not {len(tokens)} and {replicates}")


def check_images(name: str, plan: Plan) -> None:
    """Refuse a split that no batch of 4 images can come from."""
    if (most := max(len(plan.images.indices(split)) for split in plan.splits)) < FEWEST:
        raise InputError(
            f"CKA needs at least {FEWEST} images, but the {' and '.join(plan.splits)} split of {plan.images.name} "
            f"has {most}; give more, or leave {name} out (--only knn)"
        )


def stacked(found: Sequence[Mapping[str, Tensor]], view: str, none: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrices (S, n, n) of a token view, `none` where a layer has no such view, and their flaws (S, 3).

    Flaws: 1 where it was seen, where it was constant, where it was not finite; they sum over batches.
    """
    matrices = torch.stack([layer.get(view, none) for layer in found])
    seen = torch.tensor([view in layer for layer in found], device=matrices.device)
    constant, infinite = matrices.abs().sum((1, 2)) == 0, ~matrices.isfinite().all(-1).all(-1)
    return matrices, torch.stack([seen, seen & constant, infinite], 1)


def reason_of(flaws: npt.NDArray[np.float64], own: float, images: bool) -> str:
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
    return "" if own > 0 else "all pairs of images are equally alike, so that there is nothing to compare"
