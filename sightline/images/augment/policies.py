"""Augmentation of whole batches as tensor operations, with the distributions of torchvision's per-image transforms.

A resize of a crop, a mirror image and a Gaussian blur are linear in the rows and in the columns of an image X:

    X ↦ R X Cᵀ          R (S, H), C (S, W)

so each is two batched matrix products, with matrices of their own for every image. Colours are changed in place, all
images that get the same operations in the same order at once; an image that an operation skips is not touched by it.

Every random number is a hash of the image's key (keyed_random.py): a view depends on its image, policy and key alone.

B images, S the size of a view, H and W of an image, K filter taps, R radius of a blur.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.core.keyed_random import Keys, fold, uniform
from sightline.images.augment.batched import CACHED
from sightline.images.augment.policy import Policy, Range

_CROP, _FLIP, _JITTERED, _JITTER, _GRAY, _BLUR, _SIGMA, _SOLARIZE = range(8)  # what numbers are drawn for


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


def _products(rows: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """rows · x · columnsᵀ of every channel: (B, S, H), (B, 3, H, W), (B, S, W) to (B, 3, S, S)."""
    n, channels, height, _ = x.shape
    y = torch.bmm(x.flatten(1, 2), columns.mT).view(n, channels, height, -1)
    return rows[:, None] @ y


def _between(limits: Range, u: NDArray[np.float64]) -> NDArray[np.float64]:
    return limits[0] + (limits[1] - limits[0]) * u


def _chosen(probability: float, keys: Keys, purpose: int) -> NDArray[np.bool_]:
    return uniform(fold(keys, purpose), 1)[:, 0] < probability


def _in_pieces(work: Callable[[slice], None], n: int, numbers: int, device: torch.device) -> None:
    """Work on slices of n images of so many numbers each, small enough for the cache, each thread on its own.

    Threads that share each of many short operations would wait for each other most of the time.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    cached = CACHED if device.type == "cpu" else n * numbers  # a GPU wants few large operations
    pieces = threads * math.ceil(n * numbers / max(1, threads * cached))
    step = math.ceil(n / pieces) if n else 1
    parts = [slice(i, i + step) for i in range(0, n, step)]
    if threads == 1:
        for part in parts:
            work(part)
        return
    inference = torch.is_inference_mode_enabled()  # a property of the thread

    def one(part: slice) -> None:
        with torch.inference_mode(inference):
            work(part)

    # So is the number of threads of an operation, and it is what was set last for threads to come.
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(one, parts))
    finally:
        torch.set_num_threads(threads)


def _shape(pixels: Tensor, per_image: NDArray[Any]) -> tuple[int, int, int]:
    if pixels.ndim != 4 or pixels.shape[1] != 3:
        raise InputError(f"Images to augment have the shape (B, 3, H, W), not {tuple(pixels.shape)}")
    if len(per_image) != len(pixels):
        raise InputError(f"There are {len(pixels)} images to augment but {len(per_image)} keys or boxes; one for each")
    return len(pixels), pixels.shape[2], pixels.shape[3]
