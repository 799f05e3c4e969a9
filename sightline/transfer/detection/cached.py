"""Images as a detector sees them, whole and in their proportions; and the maps of a frozen encoder, computed once.

An encoder that is not trained gives the same maps for an image in every epoch. Those of the images and of their mirror
images are kept in memory, standardised and in float16, where they fit; otherwise they are computed at each step.

n images of size × size pixels, maps of D channels and h × w cells.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.keyed_random import fold
from sightline.core.progress import bar
from sightline.images.augment.crops import boxes, crop_one, flips
from sightline.images.augment.policy import Policy
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images, Source, TargetSource
from sightline.images.targets import Targets, filled, move, tensors
from sightline.images.workers import parallel
from sightline.training.feed import Feed
from sightline.training.objective import Views
from sightline.transfer.detection.features import FeatureMaps, Standard
from sightline.transfer.detection.masks import run_lengths, unpacked

TOGETHER = 32  # images that are read and sent through an encoder at once


class Fitted(NamedTuple):
    """Some images, each as large as it fits into the upper left corner of a square."""

    pixels: Tensor  # uint8 (n, 3, size, size)
    rows: list[int]  # of the images among those that were asked for
    sizes: list[tuple[int, int]]  # of the images themselves
    fills: list[tuple[int, int]]  # rows and columns of the square that each fills
    errors: list[tuple[int, str]]  # row of each image that cannot be read, and why
    targets: list[Targets[NDArray[Any]]]  # in the square, if they are wanted


def whole_image(size: int, interpolation: str) -> Policy:
    """The view of an image that is evaluated."""
    return Policy(size, None, fit=(1.0, 1.0), flip=0.0, interpolation=interpolation)


def fitted(
    images: Images,
    positions: NDArray[np.int64],
    policy: Policy,
    *,
    targets: bool = False,
    workers: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> Generator[Fitted, None, None]:
    """The images at these positions, some at a time; of several processes each sees its share of them."""
    cuts = np.array_split(np.arange(len(positions)), max(1, -(-len(positions) // TOGETHER)))
    jobs = [cut for cut in cuts[share[0] :: share[1]] if len(cut)]
    reader = _Reader(images.source, positions, jobs, policy, images.target_source() if targets else None)
    yield from parallel(reader, range(len(jobs)), images, workers, TOGETHER * 3 * policy.size**2)


class _Reader:
    """Decodes images and fits them; what a worker process runs."""

    def __init__(
        self,
        source: Source,
        positions: NDArray[np.int64],
        jobs: Sequence[NDArray[np.int64]],
        policy: Policy,
        targets: TargetSource | None,
    ) -> None:
        self.source, self.positions, self.jobs, self.policy, self.targets = source, positions, jobs, policy, targets
        self.shared_memory = False

    def __getitem__(self, number: int) -> Fitted:
        job = self.jobs[number]
        items = self.source.read(self.positions[job].tolist())
        good = [(int(row), item.image) for row, item in zip(job, items, strict=True) if item.image is not None]
        errors = [(int(r), i.error or "unknown reason") for r, i in zip(job, items, strict=True) if i.image is None]
        rows = [row for row, _ in good]
        sizes = [(image.shape[0], image.shape[1]) for _, image in good]
        lengths: NDArray[np.int64] = np.array(sizes, np.int64).reshape(-1, 2)
        where = boxes(lengths[:, 0], lengths[:, 1], self.policy, np.zeros(len(rows), np.uint64))
        size = self.policy.size
        pixels = [crop_one(image, box, False, self.policy) for (_, image), box in zip(good, where, strict=True)]
        sides = zip(where[:, 2].tolist(), sizes, strict=True)
        fills = [(filled(0, side, h, size)[1], filled(0, side, w, size)[1]) for side, (h, w) in sides]
        known = [] if self.targets is None else self.targets.targets(self.positions[rows].tolist())
        moved = [move(one, box, False, size, s) for one, box, s in zip(known, where, sizes, strict=False)]
        stacked = np.stack(pixels) if pixels else np.zeros((0, 3, size, size), np.uint8)
        return Fitted(torch.from_numpy(stacked), rows, sizes, fills, errors, moved)


def cache_bytes(features: FeatureMaps, n: int, mirrored: bool) -> int:
    """What the maps of n images, and of their mirror images, take in memory."""
    return n * (1 + mirrored) * sum(2 * int(np.prod(shape)) for shape in features.shapes)


class CachedFeed(Feed):
    """The maps of the training images and their targets, step after step: `views.pixels` are maps."""

    def __init__(
        self,
        features: FeatureMaps,
        standard: Standard,
        preprocess: Preprocess,
        images: Images,
        policy: Policy,
        *,
        show_progress: bool = True,
        **more: Any,
    ) -> None:
        self.features, self.standard, self.preprocess, self.shown = features, standard, preprocess, show_progress
        super().__init__(images, (policy,), targets=True, mean=preprocess.mean, std=preprocess.std, **more)

    def _decode(self) -> Tensor | None:
        """Fill the cache; images that cannot be read are left out."""
        (policy,) = self.policies
        copies = 1 + bool(policy.flip)
        n = len(self.positions)
        self.maps = [torch.empty(n, copies, *shape, dtype=torch.float16) for shape in self.features.shapes]
        self.kept: list[Targets[NDArray[Any]] | None] = [None] * n
        with bar("Maps of the training images", n, shown=self.shown) as step:
            for part in fitted(self.images, self.positions, policy, targets=True, workers=self.workers):
                self._note([(int(self.positions[row]), why) for row, why in part.errors])
                for copy in range(copies):
                    pixels = part.pixels.flip(-1) if copy else part.pixels
                    made = self.standard(self.features.look(self.preprocess.normalize(pixels.to(self.device))))
                    for store, x in zip(self.maps, made, strict=True):
                        store[part.rows, copy] = x.half().cpu()
                for row, one in zip(part.rows, part.targets, strict=True):
                    self.kept[row] = one._replace(
                        masks=None if one.masks is None else run_lengths(one.masks),  # type: ignore[arg-type]
                        segmentation=None,
                    )
                step(len(part.rows) + len(part.errors))
        readable = [row for row, one in enumerate(self.kept) if one is not None]
        if len(readable) < n:
            self.positions, self.maps = self.positions[readable], [store[readable] for store in self.maps]
            self.kept = [self.kept[row] for row in readable]
        return None

    def views(self, start: int = 0) -> Generator[list[Views], None, None]:
        """For each step from `start` on, the maps of its forwards in this process."""
        for step in range(start, self.steps):
            yield [self._cached_views(step, part) for part in range(self.accumulate)]

    def _cached_views(self, step: int, part: int) -> Views:
        chosen, keys = self._mine(step, part)
        (policy,) = self.policies
        mirrored = flips(policy, fold(keys, 2, 0))
        maps = [store[chosen, mirrored.astype(np.int64)].to(self.device) for store in self.maps]
        targets = [
            tensors(_mirrored(self._targets(row), policy.size) if flip else self._targets(row), self.device)
            for row, flip in zip(chosen.tolist(), mirrored.tolist(), strict=True)
        ]
        labels = self.labels[chosen].to(self.device)
        return Views(maps, labels, keys, self.progress(step), self.order.seed, [targets])

    def _targets(self, row: int) -> Targets[NDArray[Any]]:
        one: Any = self.kept[row]
        size = self.policies[0].size
        targets: Targets[NDArray[Any]] = one._replace(
            masks=None if one.masks is None else unpacked(one.masks, (size, size))
        )
        return targets


def _mirrored(targets: Targets[NDArray[Any]], size: int) -> Targets[NDArray[Any]]:
    """Targets in the mirror image of a square."""
    boxes = targets.boxes.copy()
    boxes[:, [0, 2]] = size - boxes[:, [2, 0]]
    masks = None if targets.masks is None else np.ascontiguousarray(targets.masks[..., ::-1])
    return targets._replace(boxes=boxes, masks=masks)
