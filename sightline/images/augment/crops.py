"""Crops and flips of a view: where they lie, and how they are resized."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from sightline.core.keyed_random import Keys, fold, uniform
from sightline.images.augment.batched import CROP, FLIP, between, chosen, in_pieces, products, shape_of
from sightline.images.augment.policy import RADII, Policy, Range
from sightline.images.targets import filled

Boxes = NDArray[np.int64]  # (B, 4): top, left, height, width

GREY = 128  # beyond the image
TRIES = 10  # for a crop that lies within the image, before the largest centred one is taken


# Crop and flip


def boxes(heights: NDArray[Any], widths: NDArray[Any], policy: Policy, keys: Keys) -> Boxes:
    """Top, left, height and width of the crops of images of these heights and widths, as RandomResizedCrop draws them.

    >>> policy = Policy(32, crop=(0.25, 0.25), ratio=(3, 3))
    >>> boxes(np.array([48, 48]), np.array([64, 64]), policy, np.arange(2, dtype=np.uint64))
    array([[ 8, 12, 16, 48],
           [ 7,  3, 16, 48]])
    """
    heights, widths = np.asarray(heights, np.int64), np.asarray(widths, np.int64)
    if policy.fit is not None:
        return _fitted(heights, widths, policy.fit, keys)
    if policy.crop is None:
        return np.stack([np.zeros_like(heights), np.zeros_like(widths), heights, widths], axis=1)
    u = uniform(fold(keys, CROP), 2 * TRIES + 2)
    area = (heights * widths)[:, None] * between(policy.crop, u[:, :TRIES])  # (B, TRIES)
    shape = np.exp(between((math.log(policy.ratio[0]), math.log(policy.ratio[1])), u[:, TRIES : 2 * TRIES]))
    height, width = np.rint(np.sqrt(area / shape)), np.rint(np.sqrt(area * shape))
    fits = (height > 0) & (height <= heights[:, None]) & (width > 0) & (width <= widths[:, None])
    first = np.arange(len(fits)), fits.argmax(axis=1)
    fitting = fits.any(axis=1)
    # Where no try fits: the largest centred crop whose shape is allowed.
    ratio, low, high = widths / heights, min(policy.ratio), max(policy.ratio)
    h = np.where(fitting, height[first], np.where(ratio < low, np.rint(widths / low), heights)).astype(np.int64)
    w = np.where(fitting, width[first], np.where(ratio > high, np.rint(heights * high), widths)).astype(np.int64)
    top = np.where(fitting, np.floor(u[:, -2] * (heights - h + 1)), (heights - h) // 2).astype(np.int64)
    left = np.where(fitting, np.floor(u[:, -1] * (widths - w + 1)), (widths - w) // 2).astype(np.int64)
    return np.stack([top, left, h, w], axis=1)


def _fitted(heights: NDArray[np.int64], widths: NDArray[np.int64], fit: Range, keys: Keys) -> Boxes:
    """Squares that show the longer side at a random scale; they reach beyond the image where that is smaller.

    >>> _fitted(np.array([48, 48]), np.array([64, 64]), (1.0, 1.0), np.arange(2, dtype=np.uint64)).tolist()
    [[0, 0, 64, 64], [0, 0, 64, 64]]
    """
    u = uniform(fold(keys, CROP), 3)
    side = np.maximum(1, np.rint(np.maximum(heights, widths) / between(fit, u[:, 0]))).astype(np.int64)
    top, left = (
        np.floor(u[:, 1 + axis] * (np.maximum(0, length - side) + 1)).astype(np.int64)
        for axis, length in enumerate((heights, widths))
    )
    return np.stack([top, left, side, side], axis=1)


def flips(policy: Policy, keys: Keys) -> NDArray[np.bool_]:
    """Which images are mirrored, (B,)."""
    return chosen(policy.flip, keys, FLIP)


def crop(pixels: Tensor, boxes: Boxes, flips: NDArray[np.bool_], policy: Policy) -> Tensor:
    """Crops of images of one size, resized with antialiasing and mirrored, as float32 in [0, 1].

    >>> ramp = torch.arange(4.0).expand(1, 3, 4, 4) / 4
    >>> crop(ramp, np.array([[0, 0, 4, 4]]), np.array([True]), Policy(2, interpolation="bilinear"))[0, 0]
    tensor([[0.5714, 0.1786],
            [0.5714, 0.1786]])
    """
    n, height, width = shape_of(pixels, boxes)
    scale = 1.0 if pixels.is_floating_point() else 1 / 255
    result = torch.empty(n, 3, policy.size, policy.size, device=pixels.device)
    top, left, h, w = torch.from_numpy(boxes).to(pixels.device).unbind(1)
    mirrored = torch.from_numpy(flips).to(pixels.device)

    def work(part: slice) -> None:
        rows = resize_matrix(top[part], h[part], height, policy).mul_(scale)
        columns = resize_matrix(left[part], w[part], width, policy, mirrored[part])
        # Cubic weights overshoot, and sums of weights round.
        torch.clamp(products(rows, pixels[part].float(), columns), 0, 1, out=result[part])

    in_pieces(work, n, 3 * height * width, pixels.device)
    return result


def crop_one(image: NDArray[np.uint8], box: NDArray[np.int64], flip: bool, policy: Policy) -> NDArray[np.uint8]:
    """The same of one image (H, W, 3) of any size, as uint8 (3, S, S): what a worker process does to large images."""
    top, left, height, width = box.tolist()
    part = torch.tensor(image[top : top + height, left : left + width]).permute(2, 0, 1)[None]  # (1, 3, h, w), a copy
    # On bytes whose channels come last this is several times faster than Pillow.
    fills = [
        filled(start, extent, length, policy.size)[1]
        for start, extent, length in zip((top, left), (height, width), image.shape[:2], strict=True)
    ]
    resized = F.interpolate(part, tuple(fills), mode=policy.interpolation, antialias=True)[0]
    if fills != [policy.size, policy.size]:
        beyond = (0, policy.size - fills[1], 0, policy.size - fills[0])
        resized = F.pad(resized, beyond, value=GREY)
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
