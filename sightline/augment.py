"""Augmentation of whole batches as tensor operations, with the distributions of torchvision's per-image transforms.

A resize of a crop, a mirror image and a Gaussian blur are linear in the rows and in the columns of an image X:

    X ↦ R X Cᵀ          R (S, H), C (S, W)

so each is two batched matrix products, with matrices of their own for every image. Colours are changed in place, all
images that get the same operations in the same order at once; an image that an operation skips is not touched by it.

Every random number is a hash of the image's key (see draws.py): a view depends on its image, policy and key alone.

B images, S the size of a view, H and W of an image, K filter taps, R radius of a blur.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from sightline.draws import Keys, fold, uniform
from sightline.errors import InputError, nearest

__all__ = [
    "POLICIES",
    "Policy",
    "augment",
    "boxes",
    "crop",
    "crop_one",
    "dino",
    "distort",
    "flips",
    "moco_v3",
    "policies",
    "reconstruction",
    "sigma_at",
    "simclr",
    "supervised",
]

Range = tuple[float, float]
Rows = NDArray[np.int64]  # numbers of images
Boxes = NDArray[np.int64]  # (B, 4): top, left, height, width

TRIES = 10  # for a crop that lies within the image, before the largest centred one is taken
CACHED = 2**19  # numbers of a piece of work that stays in a core's cache, 2 MB
LUMA = (0.2989, 0.587, 0.114)
SOLARIZE_FROM = 128 / 255 - 1e-6  # a pixel of 128 that came out of a product may lie below 128/255 by a rounding
RADII = {"bilinear": 1, "bicubic": 2}  # of the filters, in pixels

_CROP, _FLIP, _JITTERED, _JITTER, _GRAY, _BLUR, _SIGMA, _SOLARIZE = range(8)  # what numbers are drawn for


@dataclass(frozen=True)
class Policy:
    """How one view of an image is made: crop, flip, colours, grey, blur, solarisation, in this order.

    Probabilities are per image. `crop` is the range of the share of the area that a crop covers (None: the whole
    image, resized), as in torchvision's RandomResizedCrop; `jitter` is (brightness, contrast, saturation, hue) as in
    ColorJitter. RandAugment and erasing come last (finishing.py).
    """

    size: int
    crop: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bicubic"  # or "bilinear"; both antialiased
    flip: float = 0.5
    jitter: tuple[float, float, float, float] | None = None
    jitter_probability: float = 0.8
    gray: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize: float = 0.0  # of pixels of at least 128/255
    randaugment: tuple[float, float] = (0.0, 0.0)  # magnitude and its standard deviation; magnitude 0: without
    erase: float = 0.0  # a rectangle becomes noise

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"The size of a view is {self.size}, but at least 1 pixel is needed")
        for name in ("flip", "jitter_probability", "gray", "blur", "solarize", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is a probability, so it must lie in [0, 1], not at {getattr(self, name)}")
        if self.interpolation not in RADII:
            raise InputError(f"There is no interpolation {self.interpolation!r}{nearest(self.interpolation, RADII)}")
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise InputError(f"crop is a range of shares of the area, 0 < low ≤ high ≤ 1, not {self.crop}")
        for name in ("ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high < math.inf:
                raise InputError(f"{name} is a range, 0 < low ≤ high, not {(low, high)}")
        if not min(self.randaugment) >= 0:
            raise InputError(f"randaugment is a magnitude and its deviation, both at least 0, not {self.randaugment}")
        if self.jitter is not None and not (min(self.jitter) >= 0 and self.jitter[3] <= 0.5):
            raise InputError(f"jitter is four strengths of at least 0, that of the hue at most 0.5, not {self.jitter}")


def augment(pixels: Tensor, policy: Policy, keys: Keys) -> Tensor:
    """One view of each image: (B, 3, H, W) to float32 (B, 3, S, S) in [0, 1].

    >>> pixels = torch.full((2, 3, 8, 8), 255, dtype=torch.uint8)
    >>> augment(pixels, Policy(4), np.arange(2, dtype=np.uint64)).mean().item()
    1.0
    """
    n, height, width = _shape(pixels, keys)
    where, mirrored = boxes(np.full(n, height), np.full(n, width), policy, keys), flips(policy, keys)

    def take(rows: Rows) -> Tensor:
        return crop(_rows(pixels, rows), where[rows], mirrored[rows], policy)

    result = torch.empty(n, 3, policy.size, policy.size, device=pixels.device)
    return _distort_into(result, take, max(policy.size**2, height * width), policy, keys)


# ---------------------------------------------------------------------------------------------------------------
# Crop and flip


def boxes(heights: NDArray[Any], widths: NDArray[Any], policy: Policy, keys: Keys) -> Boxes:
    """Top, left, height and width of the crops of images of these heights and widths, as RandomResizedCrop draws them.

    >>> policy = Policy(32, crop=(0.25, 0.25), ratio=(3, 3))
    >>> boxes(np.array([48, 48]), np.array([64, 64]), policy, np.arange(2, dtype=np.uint64))
    array([[ 8, 12, 16, 48],
           [ 7,  3, 16, 48]])
    """
    heights, widths = np.asarray(heights, np.int64), np.asarray(widths, np.int64)
    if policy.crop is None:
        return np.stack([np.zeros_like(heights), np.zeros_like(widths), heights, widths], axis=1)
    u = uniform(fold(keys, _CROP), 2 * TRIES + 2)
    area = (heights * widths)[:, None] * _between(policy.crop, u[:, :TRIES])  # (B, TRIES)
    shape = np.exp(_between((math.log(policy.ratio[0]), math.log(policy.ratio[1])), u[:, TRIES : 2 * TRIES]))
    height, width = np.rint(np.sqrt(area / shape)), np.rint(np.sqrt(area * shape))
    fits = (height > 0) & (height <= heights[:, None]) & (width > 0) & (width <= widths[:, None])
    first = np.arange(len(fits)), fits.argmax(axis=1)
    found = fits.any(axis=1)
    # Where no try fits: the largest centred crop whose shape is allowed.
    ratio, low, high = widths / heights, min(policy.ratio), max(policy.ratio)
    h = np.where(found, height[first], np.where(ratio < low, np.rint(widths / low), heights)).astype(np.int64)
    w = np.where(found, width[first], np.where(ratio > high, np.rint(heights * high), widths)).astype(np.int64)
    top = np.where(found, np.floor(u[:, -2] * (heights - h + 1)), (heights - h) // 2).astype(np.int64)
    left = np.where(found, np.floor(u[:, -1] * (widths - w + 1)), (widths - w) // 2).astype(np.int64)
    return np.stack([top, left, h, w], axis=1)


def flips(policy: Policy, keys: Keys) -> NDArray[np.bool_]:
    """Which images are mirrored, (B,)."""
    return _chosen(policy.flip, keys, _FLIP)


def crop(pixels: Tensor, boxes: Boxes, flips: NDArray[np.bool_], policy: Policy) -> Tensor:
    """Crops of images of one size, resized with antialiasing and mirrored, as float32 in [0, 1].

    >>> ramp = torch.arange(4.0).expand(1, 3, 4, 4) / 4
    >>> crop(ramp, np.array([[0, 0, 4, 4]]), np.array([True]), Policy(2, interpolation="bilinear"))[0, 0]
    tensor([[0.5714, 0.1786],
            [0.5714, 0.1786]])
    """
    n, height, width = _shape(pixels, boxes)
    scale = 1.0 if pixels.is_floating_point() else 1 / 255
    result = torch.empty(n, 3, policy.size, policy.size, device=pixels.device)
    top, left, h, w = torch.from_numpy(boxes).to(pixels.device).unbind(1)
    mirrored = torch.from_numpy(flips).to(pixels.device)

    def work(part: slice) -> None:
        rows = resize_matrix(top[part], h[part], height, policy).mul_(scale)
        columns = resize_matrix(left[part], w[part], width, policy, mirrored[part])
        # Cubic weights overshoot, and sums of weights round.
        torch.clamp(_products(rows, pixels[part].float(), columns), 0, 1, out=result[part])

    _in_pieces(work, n, 3 * height * width, pixels.device)
    return result


def crop_one(image: NDArray[np.uint8], box: NDArray[np.int64], flip: bool, policy: Policy) -> NDArray[np.uint8]:
    """The same of one image (H, W, 3) of any size, as uint8 (3, S, S): what a worker process does to large images."""
    top, left, height, width = box.tolist()
    part = torch.tensor(image[top : top + height, left : left + width]).permute(2, 0, 1)[None]  # (1, 3, h, w), a copy
    # On bytes whose channels come last this is several times faster than Pillow.
    resized = F.interpolate(part, (policy.size, policy.size), mode=policy.interpolation, antialias=True)[0]
    result: NDArray[np.uint8] = np.ascontiguousarray((resized.flip(2) if flip else resized).numpy())
    return result


def resize_matrix(start: Tensor, length: Tensor, total: int, policy: Policy, mirrored: Tensor | None = None) -> Tensor:
    """Matrices (B, S, total) that resize `length` pixels from `start` on, of `total`, to S: an antialiasing filter.

    Weight of pixel j for output i ∝ f((j + ½ − (i + ½)·s) / max(s, 1)) with s = length/S, f a triangle or the cubic
    of Keys (1981) with a = −½; the weights of an output sum to 1.
    """
    radius, size, device = RADII[policy.interpolation], policy.size, start.device
    scale = (length / size)[:, None, None]  # (B, 1, 1)
    stretch = scale.clamp(min=1)
    output = torch.arange(size, device=device) + 0.5
    if mirrored is not None:
        output = torch.where(mirrored[:, None], size - output, output)
    centre = output[..., None] * scale  # (B, S, 1)
    taps = math.ceil(2 * radius * max(total / size, 1)) + 1
    pixel = (centre - radius * stretch + 0.5).floor_() + torch.arange(taps, device=device)  # (B, S, K)
    weight = _filter(((pixel + 0.5 - centre) / stretch).abs_(), radius)
    weight.mul_((pixel >= 0) & (pixel < length[:, None, None]))
    weight.div_(weight.sum(2, keepdim=True))
    place = pixel.add_(start[:, None, None]).clamp_(0, total - 1).long()
    return weight.new_zeros(len(start), size, total).scatter_add_(2, place, weight)


def _filter(x: Tensor, radius: int) -> Tensor:
    """Triangle or cubic at distances x ≥ 0; the cubic's two pieces vanish at the ends of their intervals."""
    if radius == 1:
        return (1 - x).clamp_(min=0)
    near, far = x.clamp(max=1), x.clamp(1, 2)
    return ((1.5 * near - 2.5) * near.square() + 1) + (((2.5 - 0.5 * far) * far - 4) * far + 2)


# ---------------------------------------------------------------------------------------------------------------
# Colours, grey, blur, solarisation


def distort(pixels: Tensor, policy: Policy, keys: Keys) -> Tensor:
    """Colours, grey, blur and solarisation of float images in [0, 1]; (B, 3, H, W) to the same.

    >>> distort(torch.full((1, 3, 2, 2), 0.75), Policy(2, solarize=1.0), np.zeros(1, np.uint64)).unique()
    tensor([0.2500])
    """
    _, height, width = _shape(pixels, keys)
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

    def of(self, rows: Rows) -> Decisions:
        """Those for some of the images."""
        return self._replace(**{name: values[rows] for name, values in self._asdict().items()})


def decide(policy: Policy, keys: Keys) -> Decisions:
    """Draw what is done to each image, as ColorJitter, RandomGrayscale, GaussianBlur and RandomSolarize draw it."""
    u = uniform(fold(keys, _JITTER), 8)
    strengths = np.array(policy.jitter or (0.0,) * 4)
    low, high = np.maximum(1 - strengths, 0), 1 + strengths
    low[3], high[3] = -strengths[3], strengths[3]
    orders = np.argsort(u[:, 4:], axis=1)
    jittered = _chosen(policy.jitter_probability, keys, _JITTERED)
    return Decisions(
        orders=np.where(jittered[:, None] & (strengths > 0)[orders], orders, -1),
        factors=low + (high - low) * u[:, :4],
        gray=_chosen(policy.gray, keys, _GRAY),
        blur=_chosen(policy.blur, keys, _BLUR),
        sigma=_between(policy.blur_sigma, uniform(fold(keys, _SIGMA), 1)[:, 0]),
        solarize=_chosen(policy.solarize, keys, _SOLARIZE),
    )


def _distort_into(result: Tensor, take: Callable[[Rows], Tensor], numbers: int, policy: Policy, keys: Keys) -> Tensor:
    """Fill `result` with the distorted images of `take(rows)`, in pieces that stay in the cache meanwhile."""
    decisions = decide(policy, keys)
    # Images with the same operations in the same order become neighbours, to be worked on at once.
    sequence = np.lexsort(decisions.orders.T)

    def work(part: slice) -> None:
        rows = sequence[part]
        x = take(rows)
        _distort_in_place(x, decisions.of(rows), policy)
        result.index_copy_(0, _index(rows, result), x)

    _in_pieces(work, len(keys), 3 * numbers, result.device)
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
    return _products(matrices[0], x, matrices[1]).clamp_(max=1)  # weights sum to 1 but for rounding


@lru_cache(maxsize=8)
def _shifts(length: int, radius: int) -> Tensor:
    """Matrix k adds the pixels k to the left and k to the right, mirrored at the borders: (R + 1, length²)."""
    result = torch.zeros(radius + 1, length, length)
    here = torch.arange(length)
    for k in range(radius + 1):
        for there in (here - k, here + k) if k else (here,):
            mirrored = (length - 1) - ((length - 1) - there.abs()).abs()
            result[k, here, mirrored] += 1
    return result.flatten(1)


def solarize(x: Tensor) -> Tensor:
    """1 − x where x is at least 128/255, else x."""
    # Comparing and selecting would take ten times longer.
    return x - F.threshold(2 * x - 1, 2 * SOLARIZE_FROM - 1, 0)


# ---------------------------------------------------------------------------------------------------------------
# Policies of the papers


def sigma_at(size: int, sigma: Range = (0.1, 2.0)) -> Range:
    """A blur that was chosen for views of 224 pixels, at another size: sigma · size/224, reaching at least ½ pixel.

    >>> sigma_at(224), sigma_at(112), sigma_at(48)
    ((0.1, 2.0), (0.1, 1.0), (0.1, 0.5))

    A sigma below 0.1 pixels changes nothing, and one below ½ next to nothing: the floors keep a blur that can be seen.
    """
    low, high = (value * size / 224 for value in sigma)
    return max(low, min(sigma[0], 0.1)), max(high, min(sigma[1], 0.5))


def simclr(size: int, crop: Range = (0.08, 1.0), blur_sigma: Range | None = None) -> tuple[Policy, ...]:
    """Two views alike, colours of strength 1 (Chen et al. 2020, appendix A).

    >>> simclr(224)[0].jitter, simclr(224)[1].blur_sigma
    ((0.8, 0.8, 0.8, 0.2), (0.1, 2.0))
    """
    sigma = blur_sigma or sigma_at(size)
    view = Policy(size, crop, jitter=(0.8, 0.8, 0.8, 0.2), gray=0.2, blur=0.5, blur_sigma=sigma)
    return view, view


def moco_v3(size: int, crop: Range = (0.08, 1.0), blur_sigma: Range | None = None) -> tuple[Policy, ...]:
    """Two views as in BYOL: one always blurred, one seldom blurred but sometimes solarised (Chen et al. 2021).

    Crops are those of its vision transformers; its ResNets have (0.2, 1).
    """
    return _asymmetric(Policy(size, crop, interpolation="bilinear", blur_sigma=blur_sigma or sigma_at(size)))


def dino(
    size: int,
    local_size: int = 96,
    local_crops: int = 0,
    crop: Range = (0.4, 1.0),
    local_crop: Range = (0.05, 0.4),
    blur_sigma: Range | None = None,
) -> tuple[Policy, ...]:
    """Two global views as in BYOL, then the local ones: small crops, half of them blurred (Caron et al. 2021).

    The paper has 8 local crops of 96 pixels beside global ones of 224.

    >>> [(view.size, view.crop) for view in dino(224, 96, 2)]
    [(224, (0.4, 1.0)), (224, (0.4, 1.0)), (96, (0.05, 0.4)), (96, (0.05, 0.4))]
    """
    views = _asymmetric(Policy(size, crop, blur_sigma=blur_sigma or sigma_at(size)))
    # Sigma, in pixels, is the same for both, as in the paper.
    return views + (replace(views[0], size=local_size, crop=local_crop, blur=0.5),) * local_crops


def reconstruction(size: int, crop: Range = (0.2, 1.0)) -> tuple[Policy, ...]:
    """Crop and flip, which is all that masked image modelling needs (He et al. 2022)."""
    return (Policy(size, crop),)


def supervised(size: int, crop: Range = (0.08, 1.0)) -> tuple[Policy, ...]:
    """Crop and flip, as images have been classified since Inception (Szegedy et al. 2015)."""
    return (Policy(size, crop),)


POLICIES: dict[str, Callable[[int], tuple[Policy, ...]]] = {
    "simclr": simclr,
    "moco_v3": moco_v3,
    "dino": dino,
    "mae": reconstruction,
    "supervised": supervised,
}


def policies(name: str, size: int) -> tuple[Policy, ...]:
    """The policies known by a name, for views of this size; DINO's without local crops.

    >>> [view.solarize for view in policies("moco_v3", 64)]
    [0.0, 0.2]
    """
    if name not in POLICIES:
        raise InputError(f"There is no augmentation {name!r}{nearest(name, POLICIES)}")
    return POLICIES[name](size)


def _asymmetric(base: Policy) -> tuple[Policy, Policy]:
    view = replace(base, jitter=(0.4, 0.4, 0.2, 0.1), gray=0.2, blur=1.0)
    return view, replace(view, blur=0.1, solarize=0.2)


# ---------------------------------------------------------------------------------------------------------------


def _products(rows: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """rows · x · columnsᵀ of every channel: (B, S, H), (B, 3, H, W), (B, S, W) to (B, 3, S, S)."""
    n, channels, height, _ = x.shape
    y = torch.bmm(x.flatten(1, 2), columns.mT).view(n, channels, height, -1)
    return rows[:, None] @ y


def _between(limits: Range, u: NDArray[np.float64]) -> NDArray[np.float64]:
    return limits[0] + (limits[1] - limits[0]) * u


def _chosen(probability: float, keys: Keys, purpose: int) -> NDArray[np.bool_]:
    return uniform(fold(keys, purpose), 1)[:, 0] < probability


def _index(rows: Rows, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def _rows(x: Tensor, rows: Rows) -> Tensor:
    return x.index_select(0, _index(rows, x))  # x[rows] takes up to 20 times longer


def _in_pieces(work: Callable[[slice], None], n: int, numbers: int, device: torch.device) -> None:
    """Work on slices of n images of so many numbers each, small enough for the cache, each thread on its own.

    Threads that share each of the many short operations would wait for each other most of the time, and nearly always
    when something else runs on the machine.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    cached = CACHED if device.type == "cpu" else n * numbers  # a GPU wants few large operations
    pieces = threads * math.ceil(n * numbers / max(1, threads * cached))
    step = math.ceil(n / pieces) if n else 1
    parts = [slice(i, i + step) for i in range(0, n, step)]
    if min(threads, len(parts)) < 2:
        for part in parts:
            work(part)
        return

    inference = torch.is_inference_mode_enabled()  # a property of the thread

    def piece(part: slice) -> None:
        with torch.inference_mode(inference):
            work(part)

    # So is the number of threads of an operation; only threads to come begin with what was set last.
    try:
        with ThreadPoolExecutor(min(threads, len(parts)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(piece, parts):
                pass
    finally:
        torch.set_num_threads(threads)


def _shape(pixels: Tensor, per_image: NDArray[Any]) -> tuple[int, int, int]:
    if pixels.ndim != 4 or pixels.shape[1] != 3:
        raise InputError(f"Images to augment have the shape (B, 3, H, W), not {tuple(pixels.shape)}")
    if len(per_image) != len(pixels):
        raise InputError(f"There are {len(pixels)} images to augment but {len(per_image)} keys or boxes; one for each")
    return len(pixels), pixels.shape[2], pixels.shape[3]
