"""Inversion of features on disk: fit pictures to features of images and of their mirror images, choose, score.

n images, D width, P = 3 · size² numbers of a picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.arrays import as_tensor
from sightline.core.keyed_random import mix
from sightline.core.results import ENDS
from sightline.measure.estimators.inversion import MEASURES, Inverse, Recovered, fit_inverse
from sightline.measure.estimators.ridge import BLOCK_NUMBERS
from sightline.measure.pooled import Matrix

NAMES = tuple(f"{measure}{end}" for measure in MEASURES for end in (*ENDS, "_null", "_ceiling"))


class ImagePairs(NamedTuple):
    """Images that fit, choose or are scored: features of them and of their mirror images, (n, D) each, and pictures."""

    plain: Matrix
    mirror: Matrix
    pictures: Matrix  # (n, P)

    def some(self, chosen: npt.NDArray[np.int64]) -> ImagePairs:
        """These of its images."""
        return ImagePairs(*(matrix.some(chosen) for matrix in self))

    def blocks(self, size: int, device: torch.device | str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Which images, features (2, m, D) of both orientations, pictures (m, 3, h, w); float64, on the device."""
        step = max(64, BLOCK_NUMBERS // (self.plain.shape[1] + self.pictures.shape[1]))
        for start in range(0, len(self.plain), step):
            part = slice(start, start + step)
            features, pictures = (
                as_tensor(values).to(device, torch.float64)
                for values in (np.stack([self.plain[part], self.mirror[part]]), self.pictures[part])
            )
            yield part, features, pictures.view(-1, 3, size, size)


class Inverted(NamedTuple):
    """What one layer gives back."""

    numbers: dict[str, float]  # by `NAMES`
    fit: Inverse  # of the pictures, and of those of other images
    images: npt.NDArray[np.float64]  # (n, 5), what the numbers are made of, see `Recovered.images`


def invert(
    train: ImagePairs,
    chooses: ImagePairs,
    test: ImagePairs,
    keys: tuple[npt.NDArray[Any], ...],
    size: int,
    device: torch.device | str = "cpu",
) -> Inverted:
    """Fit, choose the penalty, and score; `keys` of the training images and of those that choose draw the null.

    Features and pictures are read in blocks, and everything is computed on the device.

    >>> random = np.random.default_rng(0)
    >>> y = random.random((60, 3, 2, 2))
    >>> def part(a, b):
    ...     rows = np.arange(b - a)
    ...     return ImagePairs(*(Matrix(x[a:b].reshape(b - a, -1), rows) for x in (y, y[..., ::-1], y)))
    >>> keys = np.arange(30, dtype=np.uint64), np.arange(10, dtype=np.uint64)
    >>> found = invert(part(0, 30), part(30, 40), part(40, 60), keys, 2)
    >>> [round(found.numbers[name], 3) for name in ("r2", "nearer", "odd")]
    [1.0, 1.0, 1.0]
    """

    def rows(part: ImagePairs, own: npt.NDArray[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        other, turned = _others(own)
        for where, features, pictures in part.blocks(size, device):
            wrong = as_tensor(part.pictures.some(other[where])[:]).to(pictures).view(pictures.shape)
            turn = torch.from_numpy(turned[where]).to(device)[:, None, None, None]
            targets = torch.stack([pictures, torch.where(turn, wrong.flip(-1), wrong)], 1)
            yield features.flatten(0, 1), torch.cat([targets, targets.flip(-1)]).flatten(1)

    fit = fit_inverse(lambda: rows(train, keys[0]), lambda: rows(chooses, keys[1]), sets=2)
    total = torch.stack([pictures.sum(0) for _, _, pictures in test.blocks(size, device)]).sum(0)
    mean = (total + total.flip(-1)) / (2 * len(test.plain))
    true, null, ceiling = Recovered(mean), Recovered(mean), Recovered(mean)
    for _, features, pictures in test.blocks(size, device):
        made = fit(features.flatten(0, 1)).view(2, len(pictures), 2, 3, size, size)
        true.add(pictures, made[:, :, 0])
        null.add(pictures, made[:, :, 1])
        ceiling.add(pictures, torch.stack([pictures, pictures.flip(-1)]))
    best, chance, most = true.numbers(), null.numbers(), ceiling.numbers()
    numbers: dict[str, float] = {}
    for measure in MEASURES:
        both = (*best[measure], chance[measure][0], most[measure][0])
        numbers |= {f"{measure}{end}": value for end, value in zip((*ENDS, "_null", "_ceiling"), both, strict=True)}
    return Inverted(numbers, fit, true.images())


def _others(keys: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Another image for each, all of them once, and whether it is turned; by keys, whatever the order of the images."""
    order = np.argsort(mix(keys, 0x1AB), kind="stable")
    other = np.empty(len(keys), np.int64)
    other[order] = np.roll(order, 1)
    return other, mix(keys, 0x1AC) % np.uint64(2) == 1
