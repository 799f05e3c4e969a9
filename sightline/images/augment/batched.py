"""Augmentation of whole batches as tensor operations, with the distributions of torchvision's per-image transforms.

A resize of a crop, a mirror image and a Gaussian blur are linear in the rows and in the columns of an image X:

    X ↦ R X Cᵀ          R (S, H), C (S, W)

so each is two batched matrix products, with matrices of their own for every image. Colours are changed in place, all
images that get the same operations in the same order at once; an image that an operation skips is not touched by it.

Every random number is a hash of the image's key (keyed_random.py): a view depends on its image, policy and key alone.

B images, S the size of a view, H and W of an image, K filter taps, R radius of a blur.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.keyed_random import Keys, fold, uniform
from sightline.images.augment.policy import Range

ImageNumbers = NDArray[np.int64]  # numbers of images
CACHED = 2**19  # numbers of a piece of work that stays in a core's cache, 2 MB
CROP, FLIP, JITTERED, JITTER, GRAY, BLUR, SIGMA, SOLARIZE = range(8)  # what numbers are drawn for


def products(rows: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """rows · x · columnsᵀ of every channel: (B, S, H), (B, 3, H, W), (B, S, W) to (B, 3, S, S)."""
    n, channels, height, _ = x.shape
    y = torch.bmm(x.flatten(1, 2), columns.mT).view(n, channels, height, -1)
    return rows[:, None] @ y


def between(limits: Range, u: NDArray[np.float64]) -> NDArray[np.float64]:
    return limits[0] + (limits[1] - limits[0]) * u


def chosen(probability: float, keys: Keys, purpose: int) -> NDArray[np.bool_]:
    return uniform(fold(keys, purpose), 1)[:, 0] < probability


def in_pieces(work: Callable[[slice], None], n: int, numbers: int, device: torch.device) -> None:
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

    def alone(part: slice) -> None:
        with torch.inference_mode(inference):
            work(part)

    # So is the number of threads of an operation, and it is what was set last for threads to come.
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(alone, parts))
    finally:
        torch.set_num_threads(threads)


def shape_of(pixels: Tensor, per_image: NDArray[Any]) -> tuple[int, int, int]:
    if pixels.ndim != 4 or pixels.shape[1] != 3:
        raise InputError(f"Images to augment have the shape (B, 3, H, W), not {tuple(pixels.shape)}")
    if len(per_image) != len(pixels):
        raise InputError(f"There are {len(pixels)} images to augment but {len(per_image)} keys or boxes; one for each")
    return len(pixels), pixels.shape[2], pixels.shape[3]
