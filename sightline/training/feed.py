"""Images on their way into training: which ones a step sees, and how their views are made.

Small images of one size are decoded once and stay in memory; their crops are batched tensor operations. Others are
decoded and cropped in worker processes. Colours, blur and the like are batched tensor operations in both cases.

Everything follows from the number of a step: a resumed training, or one in several processes, sees the same views.

B images of one process in one forward, V views.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.errors import InputError, counted
from sightline.core.keyed_random import Keys, fold, id_keys, mix
from sightline.core.processes import rank, world
from sightline.core.schedules import Progress
from sightline.images.augment.colours import distort
from sightline.images.augment.crops import boxes, crop, crop_one, flips
from sightline.images.augment.erasure import finish
from sightline.images.augment.policy import Policy
from sightline.images.preprocess import IMAGENET_MEAN, IMAGENET_STD
from sightline.images.sets import Images, Source, TargetSource
from sightline.images.targets import Targets, move, tensors
from sightline.images.workers import parallel
from sightline.training.objective import Views

RESIDENT = 2 * 10**9  # bytes of decoded images that each process keeps, however many processes there are: views of kept
# images are not rounded to bytes, and the number of processes must not change a training
DECODED_TOGETHER = 256


@dataclass(frozen=True, eq=False)
class Order:
    """Which images each step sees: every epoch all of them in a new order, without the last incomplete batch."""

    keys: Keys  # of all images that may be seen, in the order of the split
    batch: int  # over all processes
    seed: int

    @property
    def per_epoch(self) -> int:
        return len(self.keys) // self.batch

    def at(self, step: int) -> tuple[NDArray[np.int64], Keys]:
        """Numbers of the images of a step, and their keys in that epoch."""
        epoch, place = divmod(step, self.per_epoch)
        chosen = self._epoch(epoch)[place * self.batch : (place + 1) * self.batch]
        return chosen, mix(self.keys[chosen], self.seed, epoch)

    @lru_cache(maxsize=1)  # noqa: B019 — an order lives as long as its training
    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        return np.argsort(mix(self.keys, self.seed, epoch, 1), kind="stable")


def check_batch(images: Images, n: int, batch: int, accumulate: int, fewest: int = 1) -> int:
    """How many of n images each forward of each process has in a batch, or why there is no such batch.

    `fewest` is how many a forward needs over all processes, which share what is normalised or compared.
    """
    shares = world() * accumulate
    share, rest = divmod(batch, shares)
    least = shares * -(-fewest // world())  # the smallest batch that is possible
    if rest:
        raise InputError(
            f"A batch of {counted(batch, 'image')} cannot be divided among {counted(world(), 'process')} with "
            f"{counted(accumulate, 'forward')} each; choose a multiple"
        )
    fewer_forwards = ", or lower accumulate" if accumulate > 1 else ""
    if batch < least:
        raise InputError(
            f"A batch of {counted(batch, 'image')} in {counted(accumulate, 'forward')} leaves "
            f"{counted(batch // accumulate, 'image')} to each, but this objective compares images or normalises over "
            f"them and needs {fewest} or more; raise it with --batch {least}{fewer_forwards}"
        )
    if n < batch:
        lower = max(least, n // 2 // shares * shares)
        raise InputError(
            f"{images.name} has {counted(n, 'image')} to train on, fewer than one batch of {batch}; "
            + (f"lower it with --batch {lower}" if lower <= n else f"give {least} or more{fewer_forwards}")
        )
    return share


class Feed:
    """The views of the training images, step after step."""

    def __init__(
        self,
        images: Images,
        policies: Sequence[Policy],
        *,
        batch: int,
        epochs: float,
        seed: int = 0,
        accumulate: int = 1,
        split: str = "train",
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        device: torch.device | str = "cpu",
        workers: int | None = None,
        pairs: bool = False,
        fewest: int = 1,
        targets: bool = False,
    ) -> None:
        """`pairs` says that the images of a forward will be mixed two by two, `targets` that theirs are wanted.

        `fewest` is how many a forward needs, over all processes.
        Images with targets are not kept in memory, which their masks would fill.
        """
        share = check_batch(images, len(images.indices(split)), batch, accumulate, fewest)
        if pairs and share % 2:
            raise InputError(
                f"mixup and CutMix pair the images of a batch, but {counted(batch, 'image')} in "
                f"{counted(world(), 'process')} with {counted(accumulate, 'forward')} each are odd shares; choose "
                "another batch"
            )
        self.images, self.policies, self.workers = images, tuple(policies), workers
        self.targets = images.target_source() if targets else None
        if targets and any(policy.randaugment[0] for policy in policies):
            raise InputError(
                "RandAugment turns and shears images, but not their boxes and masks; set its magnitude to 0"
            )
        self.positions, self.device = images.indices(split), torch.device(device)
        self.batch, self.accumulate = batch, accumulate
        self.skipped: dict[str, str] = {}  # ids of images that could not be decoded, and why
        self.resident = self._decode()
        check_batch(images, len(self.positions), batch, accumulate, fewest)  # of those that can be read
        self.order = Order(id_keys(images.ids[self.positions]), batch, seed)
        self.steps = max(1, round(epochs * self.order.per_epoch))
        self.labels = torch.from_numpy(images.labels[self.positions])
        self.mean, self.std = tuple(mean), tuple(std)
        self._mean, self._std = (torch.tensor(values, device=self.device).view(1, 3, 1, 1) for values in (mean, std))

    def over(self, policies: Sequence[Policy], epochs: float) -> Feed:
        """The same images in the same order by other policies, for another number of epochs."""
        other = copy.copy(self)
        other.policies, other.steps = tuple(policies), max(1, round(epochs * self.order.per_epoch))
        return other

    def progress(self, step: int) -> Progress:
        """How far the training is after so many steps."""
        return Progress(step, self.steps, self.order.per_epoch)

    def views(self, start: int = 0) -> Generator[list[Views], None, None]:
        """For each step from `start` on, the views of its forwards in this process."""
        if self.resident is not None:
            for step in range(start, self.steps):
                yield [self._resident_views(self.resident, step, part) for part in range(self.accumulate)]
            return
        reader = _Crops(self.images.source, self.positions, self.policies, self.order, self.accumulate, self.targets)
        size = self.batch // world() * sum(3 * policy.size**2 for policy in self.policies)
        for step, crops in zip(
            range(start, self.steps),
            parallel(reader, range(start, self.steps), self.images, self.workers, size),
            strict=True,
        ):
            self._note(crops.errors)
            if not crops.pixels:
                raise InputError(
                    f"None of {counted(len(crops.errors), 'image')} of a batch can be read, the first because: "
                    f"{crops.errors[0][1]}"
                )
            yield [self._cropped_views(crops, step, part) for part in range(self.accumulate)]

    def _mine(self, step: int, part: int) -> tuple[NDArray[np.int64], Keys]:
        """This process's share of one forward of a step."""
        chosen, keys = self.order.at(step)
        where = _share(len(chosen), rank(), world(), part, self.accumulate)
        return chosen[where], keys[where]

    def _resident_views(self, pixels: Tensor, step: int, part: int) -> Views:
        chosen, keys = self._mine(step, part)
        raw = pixels[torch.from_numpy(chosen)].to(self.device)  # uint8 (B, 3, H, W)
        height, width = (np.full(len(chosen), n) for n in raw.shape[-2:])
        views = []
        for number, policy in enumerate(self.policies):
            own = fold(keys, 2, number)
            floats = crop(raw, boxes(height, width, policy, own), flips(policy, own), policy)
            views.append(self._finish(floats, policy, own))
        return Views(views, self.labels[chosen].to(self.device), keys, self.progress(step), self.order.seed)

    def _cropped_views(self, crops: _Cropped, step: int, part: int) -> Views:
        _, keys = self._mine(step, part)
        where = _share(len(crops.shown), 0, 1, part, self.accumulate)
        views = [
            self._finish(torch.as_tensor(pixels)[where].to(self.device).float() / 255, policy, fold(keys, 2, number))
            for number, (policy, pixels) in enumerate(zip(self.policies, crops.pixels, strict=True))
        ]
        labels = self.labels[crops.shown[where]].to(self.device)
        targets = [[tensors(one, self.device) for one in of[where]] for of in crops.targets]
        return Views(views, labels, keys, self.progress(step), self.order.seed, targets)

    def _finish(self, floats: Tensor, policy: Policy, keys: Keys) -> Tensor:
        view = finish(distort(floats, policy, keys), policy, keys, self.mean, self.std)
        return view.sub_(self._mean).div_(self._std)

    def _note(self, errors: Sequence[tuple[int, str]]) -> None:
        for position, reason in errors:
            if self.images.strict:
                raise InputError(f"{self.images.name}: {self.images.ids[position]} cannot be read: {reason}")
            self.skipped.setdefault(str(self.images.ids[position]), reason)

    def _decode(self) -> Tensor | None:
        """All images (n, 3, H, W) if they have one size and fit into memory; unreadable ones are left out."""
        if self.targets is not None or any(policy.fit is not None for policy in self.policies):
            return None
        probe = [item.image for item in self.images.source.read(self.positions[:4].tolist())]
        shapes = {image.shape for image in probe if image is not None}
        if len(shapes) != 1 or len(self.positions) * int(np.prod(next(iter(shapes)))) > RESIDENT:
            return None
        height, width, _ = shapes.pop()
        store = torch.empty((len(self.positions), 3, height, width), dtype=torch.uint8)
        jobs = np.array_split(np.arange(len(self.positions)), -(-len(self.positions) // DECODED_TOGETHER))
        reader = _Whole(self.images.source, [self.positions[job] for job in jobs], (height, width))
        bad: list[int] = []
        largest = DECODED_TOGETHER * 3 * height * width
        for job, read in zip(jobs, parallel(reader, range(len(jobs)), self.images, self.workers, largest), strict=True):
            if read is None:
                return None  # another size after all
            store[torch.from_numpy(job)] = torch.as_tensor(read.pixels[0])
            bad += [position for position, _ in read.errors]
            self._note(read.errors)
        if bad:
            kept = ~np.isin(self.positions, bad)
            self.positions, store = self.positions[kept], store[torch.from_numpy(kept)]
        return store


def _share(n: int, rank: int, world: int, part: int, parts: int) -> slice:
    """Where a process's part of a batch lies; cut by parts first, so that the processes contrast the same images."""
    size = n // (world * parts)
    start = (part * world + rank) * size
    return slice(start, start + size)


class _Cropped(NamedTuple):
    pixels: list[Tensor | NDArray[np.uint8]]  # one (B, 3, h, w) per policy
    errors: list[tuple[int, str]]  # position of each unreadable image, and why
    shown: NDArray[np.int64]  # numbers of the images that are seen
    targets: Sequence[Sequence[Targets[NDArray[Any]]]] = ()  # of B images per policy


class _Whole:
    """Decodes images of one size; what a worker process runs."""

    def __init__(self, source: Source, jobs: Sequence[NDArray[np.int64]], size: tuple[int, int]) -> None:
        self.source, self.jobs, self.size, self.shared_memory = source, jobs, size, False

    def __getitem__(self, number: int) -> _Cropped | None:
        job = self.jobs[number]
        result = np.zeros((len(job), 3, *self.size), np.uint8)
        errors = []
        for row, position, item in zip(result, job.tolist(), self.source.read(job.tolist()), strict=True):
            if item.image is None:
                errors.append((position, item.error or "unknown reason"))
            elif item.image.shape[:2] != self.size:
                return None
            else:
                row[...] = item.image.transpose(2, 0, 1)
        return _Cropped([torch.from_numpy(result) if self.shared_memory else result], errors, job)


class _Crops:
    """Decodes the images of a step and takes their crops; what a worker process runs."""

    def __init__(
        self,
        source: Source,
        positions: NDArray[np.int64],
        policies: Sequence[Policy],
        order: Order,
        parts: int,
        targets: TargetSource | None = None,
    ) -> None:
        self.targets = targets  # the source once more, if its targets are wanted
        self.source, self.positions, self.policies, self.order = source, positions, policies, order
        self.parts, self.shared_memory = parts, False
        self.rank, self.world = rank(), world()  # worker processes do not know

    def __getitem__(self, step: int) -> _Cropped:
        chosen, keys = self.order.at(step)
        shares = [_share(len(chosen), self.rank, self.world, part, self.parts) for part in range(self.parts)]
        mine = np.concatenate([np.arange(len(chosen))[share] for share in shares])
        chosen, keys = chosen[mine], keys[mine]
        job = self.positions[chosen]
        ascending = np.argsort(job)  # neighbours in a file are read together
        items = dict(zip(ascending.tolist(), self.source.read(job[ascending].tolist()), strict=True))
        errors = [(int(job[i]), items[i].error or "unknown reason") for i in range(len(job)) if items[i].image is None]
        good = [i for i in range(len(job)) if items[i].image is not None]
        if not good:
            return _Cropped([], errors, chosen[:0])
        # Every process needs a whole batch: in the place of an unreadable image stands the next readable one.
        standing = [min(good, key=lambda g, i=i: (g - i) % len(job)) for i in range(len(job))]  # type: ignore[misc]
        images = [image for i in standing if (image := items[i].image) is not None]
        height, width = (np.array([image.shape[axis] for image in images]) for axis in (0, 1))
        known = [] if self.targets is None else self.targets.targets(job[standing].tolist())
        pixels: list[Tensor | NDArray[np.uint8]] = []
        targets = []
        for number, policy in enumerate(self.policies):
            own = fold(keys, 2, number)
            where, mirrored = boxes(height, width, policy, own), flips(policy, own)
            crops = np.stack([crop_one(*one, policy) for one in zip(images, where, mirrored.tolist(), strict=True)])
            pixels.append(torch.from_numpy(crops) if self.shared_memory else crops)
            if known:
                seen = zip(known, where, mirrored.tolist(), images, strict=True)
                targets.append([move(one, box, flip, policy.size, image.shape[:2]) for one, box, flip, image in seen])
        return _Cropped(pixels, errors, chosen[standing], targets)
