"""Colours of a view: jitter, grey, blur, solarisation; whole batches at once, each image by its own random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from sightline.core.keyed_random import Keys, fold, uniform
from sightline.images.augment.batched import (
    BLUR,
    GRAY,
    JITTER,
    JITTERED,
    SIGMA,
    SOLARIZE,
    ImageNumbers,
    between,
    chosen,
    in_pieces,
    products,
    shape_of,
)
from sightline.images.augment.crops import boxes, crop, flips
from sightline.images.augment.policy import Policy

LUMA = (0.2989, 0.587, 0.114)
SOLARIZE_FROM = 128 / 255 - 1e-6  # a pixel of 128 that came out of a product may lie below 128/255 by a rounding


def augment(pixels: Tensor, policy: Policy, keys: Keys) -> Tensor:
    """One view of each image: (B, 3, H, W) to float32 (B, 3, S, S) in [0, 1].

    >>> pixels = torch.full((2, 3, 8, 8), 255, dtype=torch.uint8)
    >>> augment(pixels, Policy(4), np.arange(2, dtype=np.uint64)).mean().item()
    1.0
    """
    n, height, width = shape_of(pixels, keys)
    where, mirrored = boxes(np.full(n, height), np.full(n, width), policy, keys), flips(policy, keys)

    def take(rows: ImageNumbers) -> Tensor:
        return crop(_rows(pixels, rows), where[rows], mirrored[rows], policy)

    result = torch.empty(n, 3, policy.size, policy.size, device=pixels.device)
    return _distort_into(result, take, max(policy.size**2, height * width), policy, keys)


# Colours, grey, blur, solarisation


def distort(pixels: Tensor, policy: Policy, keys: Keys) -> Tensor:
    """Colours, grey, blur and solarisation of float images in [0, 1]; (B, 3, H, W) to the same.

    >>> distort(torch.full((1, 3, 2, 2), 0.75), Policy(2, solarize=1.0), np.zeros(1, np.uint64)).unique()
    tensor([0.2500])
    """
    _, height, width = shape_of(pixels, keys)
    result = torch.empty_like(pixels)
    return _distort_into(result, lambda rows: _rows(pixels, rows), height * width, policy, keys)


class Decisions(NamedTuple):
    """What is done to each image."""

    orders: NDArray[np.int64]  # (B, 4) operations on colours in their order, −1 for none
    factors: NDArray[np.float64]  # (B, 4) one for each operation
    gray: NDArray[np.bool_]  # (B,)
    blur: NDArray[np.bool_]  # (B,)
    sigma: NDArray[np.float64]  # (B,)
    solarize: NDArray[np.bool_]  # (B,)

    def of(self, rows: ImageNumbers) -> Decisions:
        """Those for some of the images."""
        return self._replace(**{name: values[rows] for name, values in self._asdict().items()})


def decide(policy: Policy, keys: Keys) -> Decisions:
    """Draw what is done to each image, as ColorJitter, RandomGrayscale, GaussianBlur and RandomSolarize draw it."""
    u = uniform(fold(keys, JITTER), 8)
    strengths = np.array(policy.jitter or (0.0,) * 4)
    low, high = np.maximum(1 - strengths, 0), 1 + strengths
    low[3], high[3] = -strengths[3], strengths[3]
    orders = np.argsort(u[:, 4:], axis=1)
    jittered = chosen(policy.jitter_probability, keys, JITTERED)
    return Decisions(
        orders=np.where(jittered[:, None] & (strengths > 0)[orders], orders, -1),
        factors=low + (high - low) * u[:, :4],
        gray=chosen(policy.gray, keys, GRAY),
        blur=chosen(policy.blur, keys, BLUR),
        sigma=between(policy.blur_sigma, uniform(fold(keys, SIGMA), 1)[:, 0]),
        solarize=chosen(policy.solarize, keys, SOLARIZE),
    )


def _distort_into(
    result: Tensor, take: Callable[[ImageNumbers], Tensor], numbers: int, policy: Policy, keys: Keys
) -> Tensor:
    """Fill `result` with the distorted images of `take(rows)`, in pieces that stay in the cache meanwhile."""
    decisions = decide(policy, keys)
    # Images with the same operations in the same order become neighbours, to be worked on at once.
    sequence = np.lexsort(decisions.orders.T)

    def work(part: slice) -> None:
        rows = sequence[part]
        x = take(rows)
        _distort_in_place(x, decisions.of(rows), policy)
        result.index_copy_(0, _index(rows, result), x)

    in_pieces(work, len(keys), 3 * numbers, result.device)
    return result


def _distort_in_place(x: Tensor, decisions: Decisions, policy: Policy) -> None:
    orders, factors = decisions.orders, torch.from_numpy(decisions.factors).to(x)[..., None, None, None]
    bounds = [0, *(1 + np.flatnonzero((orders[1:] != orders[:-1]).any(axis=1))), len(x)]
    for start, end in pairwise(bounds):
        for number in orders[start]:
            if number >= 0:
                OPERATIONS[number](x[start:end], factors[start:end, number])
    if len(rows := np.flatnonzero(decisions.gray)):
        x.index_copy_(0, _index(rows, x), luma(_rows(x, rows))[:, None].expand(-1, 3, -1, -1))
    if len(rows := np.flatnonzero(decisions.blur)):
        sigma = torch.from_numpy(decisions.sigma[rows]).to(x)
        x.index_copy_(0, _index(rows, x), blur(_rows(x, rows), sigma, policy.blur_sigma[1]))
    if len(rows := np.flatnonzero(decisions.solarize)):
        x.index_copy_(0, _index(rows, x), solarize(_rows(x, rows)))


def brightness(x: Tensor, factor: Tensor) -> None:
    """In place x ← factor · x, at most 1; factor (B, 1, 1, 1)."""
    x.mul_(factor).clamp_(max=1)


def contrast(x: Tensor, factor: Tensor) -> None:
    """In place x ← factor · x + (1 − factor) · mean grey of the image, within [0, 1]."""
    mean = x.mean((2, 3), keepdim=True).mul_(x.new_tensor(LUMA)[:, None, None]).sum(1, keepdim=True)  # (B, 1, 1, 1)
    x.mul_(factor).add_(mean.mul_(1 - factor)).clamp_(0, 1)


def saturation(x: Tensor, factor: Tensor) -> None:
    """In place x ← factor · x + (1 − factor) · grey, within [0, 1]."""
    x.lerp_(luma(x)[:, None], 1 - factor).clamp_(0, 1)


def hue(x: Tensor, turn: Tensor) -> None:
    """In place: turn the hue of HSV by a share `turn` of the colour circle, in [−½, ½].

    With V and m the largest and smallest channel and C = V − m, the hue in turns, from −½ to ½, is

        h = sign(g − b) · (C + g + b − r − m) / 6C          (on each of the six edges of the colour hexagon)

    and, for a hue h in [0, 1), the channels are trapezoids of it:

        r = m − C + 6C·t(½)    g = m + 2C − 6C·t(⅓)    b = m + 2C − 6C·t(⅔)    t(a) = |h − a| within [⅙, ⅓]
    """
    r, g, b = x.unbind(1)  # (B, H, W) each, views
    low = x.amin(1)
    chroma = x.amax(1).sub_(low)
    h = torch.sub(g, r).add_(b).sub_(low).add_(chroma)
    sixfold = chroma.mul_(6)
    h.div_(sixfold.clamp(min=1e-12)).copysign_(g - b)  # grey has no hue, and 0/1e-12 is as good as any
    h.add_(turn[:, 0])
    h.sub_(h.floor())
    torch.sub(h[:, None], x.new_tensor([1 / 2, 1 / 3, 2 / 3])[:, None, None], out=x).abs_().clamp_(1 / 6, 1 / 3)
    torch.addcmul(low.sub(sixfold, alpha=1 / 6), sixfold, r, out=r)
    torch.addcmul(low.add(sixfold, alpha=1 / 3)[:, None], sixfold[:, None], x[:, 1:], value=-1, out=x[:, 1:])
    x.clamp_(0, 1)


OPERATIONS: tuple[Callable[[Tensor, Tensor], None], ...] = (brightness, contrast, saturation, hue)


def luma(x: Tensor) -> Tensor:
    """Grey of ITU-R 601: (B, 3, H, W) to (B, H, W)."""
    r, g, b = x.unbind(1)
    return r.mul(LUMA[0]).add_(g, alpha=LUMA[1]).add_(b, alpha=LUMA[2])


def blur(x: Tensor, sigma: Tensor, largest: float) -> Tensor:
    """Gaussian blur with a sigma (B,) for each image, mirrored at the borders (the border pixel itself once).

    The kernel has 2R + 1 taps, R = ⌈4 · largest sigma⌉, but R < H, W.
    """
    matrices = []
    for length in x.shape[2:]:
        radius = min(math.ceil(4 * largest), length - 1)
        distance = torch.arange(radius + 1, device=x.device)
        weight = torch.exp(-0.5 * (distance / sigma[:, None]).square())  # (B, R + 1)
        weight = weight / (2 * weight.sum(1, keepdim=True) - 1)
        matrices.append((weight @ _shifts(length, radius).to(x.device)).view(-1, length, length))
    return products(matrices[0], x, matrices[1]).clamp_(max=1)  # weights sum to 1 but for rounding


@lru_cache(maxsize=8)
def _shifts(length: int, radius: int) -> Tensor:
    """Matrix k adds the pixels k to the left and k to the right, mirrored at the borders: (R + 1, length²)."""
    result = torch.zeros(radius + 1, length, length, device="cpu")
    here = torch.arange(length, device="cpu")
    for k in range(radius + 1):
        for there in (here - k, here + k) if k else (here,):
            mirrored = (length - 1) - ((length - 1) - there.abs()).abs()
            result[k, here, mirrored] += 1
    return result.flatten(1)


def solarize(x: Tensor) -> Tensor:
    """1 − x where x is at least 128/255, else x."""
    # Comparing and selecting would take ten times longer.
    return x - F.threshold(2 * x - 1, 2 * SOLARIZE_FROM - 1, 0)


def _index(rows: ImageNumbers, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def _rows(x: Tensor, rows: ImageNumbers) -> Tensor:
    return x.index_select(0, _index(rows, x))  # x[rows] takes up to 20 times longer
