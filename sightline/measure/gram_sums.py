"""Gram matrices of activations as a stream: what the analyses by CKA share, minibatch or full batch.

Shapes: n images of a batch, S layers or other rows, T token views, G groups of batches.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.filesize import decimal
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.core.groups import Axis, Kept
from sightline.core.provenance import fingerprint
from sightline.core.results import ENDS
from sightline.encoders.sites import Tokens, token_view
from sightline.images.pipeline import Batch
from sightline.images.sets import FEWEST
from sightline.measure.contract import Analysis
from sightline.measure.estimators.cka import GROUPS, TOKENS, Own, bootstrap, gram, own_of, ratio, within_bounds
from sightline.measure.estimators.full_batch import FullBatch, Pairs
from sightline.measure.layers import Layers
from sightline.measure.plan import Key, Plan

Values = Mapping[str, "npt.NDArray[np.float64]"]
WIDEST = 8192  # features of a layer that a full batch can take: it needs the products of all of them


def grams(activation: Tensor, views: Sequence[str], tokens: Tokens | None) -> dict[str, Tensor]:
    """Gram matrices of the token views that exist; all tokens are the patches plus the prefix tokens."""
    if activation.ndim == 4 and tokens is None:  # a map: its positions are the patches
        whole = gram(_flat(activation))
        matrices = {"all": whole, "patches": whole}
        if "mean" in views:
            matrices["mean"] = gram(activation.mean((2, 3), dtype=torch.float32))
        return matrices
    matrices = {
        view: gram(_flat(part))
        for view in views
        if view != "all" and (part := token_view(activation, view, tokens)) is not None
    }
    if "all" in views:
        if "patches" in matrices and activation.ndim == 3 and tokens is not None:
            prefix = activation[:, : tokens.prefix]
            matrices["all"] = matrices["patches"] + gram(_flat(prefix)) if tokens.prefix else matrices["patches"]
        else:
            matrices["all"] = gram(_flat(activation))
    return matrices


def _flat(activation: Tensor) -> Tensor:
    """(n, …) → (n, p) in the order of memory: CKA does not see the order of features, and nothing is copied."""
    strides = activation.stride()
    order = sorted(range(1, activation.ndim), key=lambda dim: -strides[dim])
    return activation.permute(0, *order).flatten(1)


def widths_of(plan: Plan, views: Sequence[str]) -> dict[str, list[int]]:
    """Of each token view the number of features of each layer of the plan, 0 where a layer has no such view."""

    def width(encoder: str, site: str, view: str) -> int:
        blank = torch.empty(1, *plan.shapes[encoder][site], device="meta")
        part = token_view(blank, view, plan.encoders[encoder].tokens)
        return 0 if part is None else part.numel()

    return {view: [width(encoder, site, view) for encoder, site in Layers(plan.sites)] for view in views}


def narrow(widths: Sequence[int]) -> list[int]:
    """What a full batch takes of layers of these widths: nothing of one that is too wide.

    >>> narrow([768, 151296])
    [768, 0]
    """
    return [width if width <= WIDEST else 0 for width in widths]


def full_bytes(widths: Sequence[int], pairs: Pairs | None = None) -> int:
    """Memory for the sums of a full batch of layers of these widths: twice, as every sum has what it is reset to."""
    return 2 * 8 * sum(int(np.prod(shape)) for shape in FullBatch(widths, pairs, {}).shapes().values())


class GramSums(Analysis):
    """Sums of HSIC over batches in groups; a batch of fewer than 4 images cannot enter HSIC₁.

    An analysis gives the shapes of its own sums, adds to them in `update`, and keeps its pairs and its axes. One whose
    settings have `full_batch` asks for the sums of estimators/full_batch.py besides, with `add_full`. The token views
    that no layer is narrow enough for are left out then, and the others come in order of how many layers they suit.
    """

    flaws: Tensor  # (T, S, 3), or more axes for S: batches seen, those that were constant, those that were not finite
    images: Tensor  # (G,)
    numbers: Tensor  # (G,): sum of the numbers of its batches, which tells one pass over the images from another

    def __init__(self, name: str, config: Any, plan: Plan) -> None:
        """`config` has `tokens` and `bootstrap`."""
        super().__init__()
        _check_images(name, plan)
        self.full_batch = getattr(config, "full_batch", False)
        self.widths = widths_of(plan, config.tokens) if self.full_batch else {}  # view → (S,)
        self.config = replace(config, tokens=_suitable(self.widths)) if self.full_batch else config
        self.name, self.plan = name, plan
        self.sets: dict[str, tuple[list[int], Pairs | None]] = {}  # of layers, by the name of their sums
        self.add_sums(images=(GROUPS,), numbers=(GROUPS,))

    def add_sums(self, **shapes: tuple[int, ...]) -> None:
        """Sums of these shapes; `flaws` must be among them."""
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def add_full(self, name: str, widths: Sequence[int], pairs: Pairs | None = None) -> None:
        """Sums for the full batch of some layers; those of too many features count as layers without any."""
        self.sets[name] = narrow(widths), pairs
        _check_memory(self.name, sum(full_bytes(*of) for of in self.sets.values()))
        for part, values in FullBatch(*self.sets[name]).sums.items():
            self.add_state(f"{name}_{part}", values, dist_reduce_fx="cat")  # sums of processes stay apart

    def full(self, name: str) -> FullBatch:
        """The full batch of these layers as it stands."""
        widths, pairs = self.sets[name]
        parts = FullBatch(widths, pairs, {}).shapes()
        return FullBatch(widths, pairs, {part: getattr(self, f"{name}_{part}") for part in parts})

    def reduce(self, key: Key, activation: Tensor) -> dict[str, Tensor]:
        """Gram matrices of the token views, inside the hook; for a full batch the features themselves as well."""
        tokens = self.plan.encoders[key.encoder].tokens
        matrices = grams(activation, self.config.tokens, tokens)
        if self.full_batch:
            parts = {view: token_view(activation, view, tokens) for view in self.config.tokens}
            kept = {view: part for view, part in parts.items() if part is not None and part[0].numel() <= WIDEST}
            matrices |= {_features(view): part.flatten(1).clone() for view, part in kept.items()}
        return matrices

    def features(self, found: Sequence[Mapping[str, Tensor]], view: str, n: int) -> list[Tensor]:
        """Features (n, …) of a token view of what was found; (n, 0) where a layer has no such view, or too wide."""
        none = self.images.new_zeros((n, 0))
        return [layer.get(_features(view), none) for layer in found]

    def group_of(self, batch: Batch) -> int | None:
        """The group of batches that this one belongs to, its images counted; None if it has too few to enter."""
        if len(batch.ids) < FEWEST:
            return None
        group = batch.number % GROUPS
        self.images[group] += len(batch.ids)
        self.numbers[group] += batch.number
        return group

    def kept_batches(self) -> Kept:
        """For what is kept by groups of batches, those that have images; for contrasts."""
        splits = [self.plan.images.digest(split) for split in self.plan.splits]
        which = [splits, self.plan.batch, self.plan.seed, self.numbers.tolist(), self.images.tolist()]
        words = "batches" if self.plan.batches <= GROUPS else "groups of batches"
        return Kept({"batches": Axis(fingerprint(which)[:16], words)})

    def matrices(self, found: Sequence[Mapping[str, Tensor]], n: int) -> Iterator[tuple[int, Tensor]]:
        """Each token view by its number, with the Gram matrices (S, n, n) of what was found; flaws are summed."""
        for t, view in enumerate(self.config.tokens):
            matrices, flaws = _stacked(found, view, self.flaws.new_zeros((n, n)))
            self.flaws[t] += flaws.view(self.flaws.shape[1:])
            yield t, matrices

    def cka(
        self, name: str, hsic: npt.NDArray[np.float64], images: npt.NDArray[np.float64], own: Own | None = None
    ) -> dict[str, npt.NDArray[np.float64]]:
        """CKA with its interval from HSIC (T, G, …, A, B), that of rows and columns with themselves, and the images.

        For a full batch the interval has no bounds before it is moved (`with_interval`).
        """
        there, *rest = (part.swapaxes(0, 1)[images > 0] for part in (hsic, *(own or ())))
        norms = (rest[0], rest[1]) if own else None
        ends = bootstrap(there, self.config.bootstrap, self.plan.seed, norms, self.device, bounds=not self.full_batch)
        rows, columns = own or own_of(hsic)
        value = ratio(hsic.sum(1), (rows.sum(1), columns.sum(1)))
        return {f"{name}{end}": part for end, part in zip(ENDS, (value, *ends), strict=True)}

    def full_cka(self, sets: Sequence[str]) -> Values:
        """Full-batch CKA of these sets of layers, and its null, the mean over all pairings: each (sets, S, S)."""
        sums = [self.full(name).hsic(unbiased=self.config.unbiased) for name in sets]
        hsic, null = (torch.stack(part).numpy(force=True) for part in zip(*sums, strict=True))
        return {"": ratio(hsic), "_null": ratio(null, own_of(hsic))}

    @staticmethod
    def with_interval(name: str, full: Values, batched: Values) -> Values:
        """Full-batch CKA with the interval of the minibatch estimate on the same images, moved to the full-batch value.

        Parts of a full batch are not kept. What depends on the draw of the images is the same for both estimates, but
        for what batches of few images add.
        """
        value, low, high = (batched[f"{name}{end}"] for end in ENDS)
        whole = full[""]
        ends = within_bounds(whole, whole + (low - value), whole + (high - value))
        return {name: whole, f"{name}_low": ends[0], f"{name}_high": ends[1], f"{name}_null": full["_null"]}

    @property
    def estimator(self) -> dict[str, Any]:
        """What a result says about how CKA was estimated."""
        kind = "unbiased" if getattr(self.config, "unbiased", True) else "biased"
        if not self.full_batch:
            return {"estimator": f"{kind} minibatch", "interval": "95 % bootstrap over batches"}
        return {
            "estimator": f"{kind} full batch",
            "interval": "95 % bootstrap over batches of the unbiased minibatch CKA, moved to the full-batch value",
        }

    def reasons(self, own: npt.NDArray[np.float64]) -> npt.NDArray[np.str_]:
        """Why rows have no value, "" where they have one, from the HSIC of each with itself, (T, S)."""
        flaws, seen = self.flaws.numpy(force=True).reshape(-1, 3), bool(self.images.any())
        exact = self.device.type == "cpu"
        whys = [_reason(of_row, value, seen, exact) for of_row, value in zip(flaws, own.ravel(), strict=True)]
        reasons = np.array(whys, dtype=object).reshape(own.shape)
        for t, view in enumerate(self.config.tokens if self.full_batch else ()):
            for s, width in enumerate(self.widths[view]):
                if width > WIDEST:
                    reasons[t, s] = too_wide(width)
        return reasons.astype(str)


def too_wide(width: int) -> str:
    """Why a layer of so many features has no full-batch CKA."""
    return (
        f"its {width} features are more than the {WIDEST} that a full batch can take; give a batch as large as the "
        "images instead (--batch), or choose a token view that is a mean"
    )


def _features(view: str) -> str:
    """Where `reduce` puts the features of a token view."""
    return f"{view} features"


def _suitable(widths: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Token views that a full batch can take of at least one layer, those of most layers first."""
    suits = {view: sum(0 < width <= WIDEST for width in of) for view, of in widths.items()}
    views = tuple(view for view in sorted(suits, key=lambda view: -suits[view]) if suits[view])
    if not views:
        widest = max(width for of in widths.values() for width in of)
        raise InputError(
            f"The full-batch CKA takes layers of at most {WIDEST} features, but these have {widest} in the token views "
            f"{', '.join(widths)}; choose the view mean or cls, or give a batch as large as the images (--batch)"
        )
    return views


def _check_memory(name: str, needed: int) -> None:
    """Refuse what the machine cannot hold, where it tells how much it has."""
    if not hasattr(os, "sysconf"):
        return
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise InputError(
            f"The full-batch CKA of all these layers needs {decimal(needed)} of memory for the products of their "
            f"features, but there are {decimal(there)}; choose fewer --sites, such as 'block.*', or fewer token views "
            f"(--set {name}.tokens='[\"mean\"]')"
        )


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


def _reason(flaws: npt.NDArray[np.float64], own: float, images: bool, exact: bool) -> str:
    """Why a layer has no value, from its summed flaws, its own HSIC, and whether any batch had images.

    `exact`: activations whose squares float32 cannot hold were multiplied in float64.
    """
    seen, constant, infinite = flaws
    if not images:
        return f"no batch had {FEWEST} images that could be read"
    if seen == 0:
        return "this site has no such token view"
    if infinite:
        large = "" if exact else ", or their squares are too large for float32,"
        return f"the activations are not finite (NaN or infinity){large} in {infinite:.0f} of {seen:.0f} batches"
    if constant == seen:
        small = "" if exact else ", or their squares are too small for float32"
        return f"the activations are the same for all images{small}"
    if not math.isfinite(own):
        return "the activations are so large that their products are not finite"
    return "" if own > 0 else "all pairs of images are equally alike, so there is nothing to compare"
