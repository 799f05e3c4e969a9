"""The way of a set of images to the model, batch by batch."""

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.errors import InputError
from sightline.images.decoding import GONE
from sightline.images.preprocess import Preprocess
from sightline.images.sets import FEWEST, Images, Source, TargetSource
from sightline.images.targets import Targets, tensors
from sightline.images.workers import parallel


@dataclass(frozen=True)
class Batch:
    """Images of one split on their way to the encoders."""

    split: str
    number: int  # within the pass over all splits, the same whatever the number of processes
    rows: Tensor  # int64 (B,), row of each image within images.indices(split)
    ids: tuple[str, ...]
    labels: Tensor  # int64 (B,)
    extras: Mapping[str, Tensor]
    pixels: Mapping[Preprocess, Tensor]  # uint8 (B, 3, h, w); encoders of the same geometry share the memory
    skipped: tuple[tuple[str, str], ...]  # id and reason of each image that could not be decoded
    targets: Mapping[Preprocess, tuple[Targets[Tensor], ...]] = field(default_factory=dict)  # of B images, if wanted


def batch_count(n: int, batch: int) -> int:
    """Number of batches of a split of n images: ⌈n/batch⌉, fewer where that would make one of less than 4 images.

    >>> batch_count(100, 32), batch_count(32, 32), batch_count(5, 4)
    (4, 1, 1)
    """
    if batch < FEWEST:
        return -(-n // batch)
    return min(-(-n // batch), max(1, n // FEWEST))


def batches(
    images: Images,
    preprocesses: Collection[Preprocess],
    *,
    splits: Sequence[str],
    batch: int,
    seed: int = 0,
    workers: int | None = None,
    rank: int = 0,
    world: int = 1,
    start: int = 0,
    targets: Collection[str] = (),
) -> Generator[Batch, None, None]:
    """Batches of the splits, one split after the other; rank r sees the batches r, r + world, … from `start` on.

    The sizes of the batches of a split differ by one at most, so that the last one is not short. Decoding, resizing and
    cropping happen in worker processes, which end with the iterator, also when it is left early. The images of the
    splits in `targets` come with their boxes, masks and maps, which move with the pixels.
    """
    if batch < 1:
        raise InputError(f"The batch size is {batch}, but at least 1 is needed")
    cuts = [
        (split, part)
        for split in splits
        for part in np.array_split(images.order(split, seed), max(1, batch_count(len(images.indices(split)), batch)))
        if len(part)
    ]
    mine = [number for number in range(start, len(cuts)) if number % world == rank]
    bare = {p: replace(p, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)) for p in preprocesses}
    geometries = list(dict.fromkeys(bare.values()))
    jobs = [cuts[number][1] for number in mine]
    source = images.target_source() if targets else None
    largest = max((len(job) for job in jobs), default=0) * sum(3 * g.size[0] * g.size[1] for g in geometries)
    reader = _Reader(images.source, jobs, geometries, [source if cuts[n][0] in targets else None for n in mine])
    for number, read in zip(mine, parallel(reader, range(len(jobs)), images, workers, largest), strict=True):
        split, where = cuts[number]
        skipped = tuple((str(images.ids[where[i]]), reason) for i, reason in read.errors)
        if skipped and images.strict:
            raise InputError(f"{images.name}: {skipped[0][0]} cannot be read: {skipped[0][1]}")
        if len(where) > 1 and not read.kept and all(reason == GONE for _, reason in skipped):
            raise InputError(
                f"The images of {images.name} are gone since they were listed, such as {skipped[0][0]}; bring them "
                "back and run the same command again"
            )
        pixels = dict(zip(geometries, map(torch.as_tensor, read.pixels), strict=True))
        moved = dict(zip(geometries, (tuple(map(tensors, of)) for of in read.targets), strict=False))
        kept = where[read.kept]
        yield Batch(
            split=split,
            number=number,
            rows=torch.from_numpy(np.searchsorted(images.indices(split), kept)),
            ids=tuple(images.ids[kept].tolist()),
            labels=torch.from_numpy(images.labels[kept]),
            extras={name: torch.from_numpy(values[kept]) for name, values in images.extras.items()},
            pixels={preprocess: pixels[geometry] for preprocess, geometry in bare.items()},
            skipped=skipped,
            targets={preprocess: moved[geometry] for preprocess, geometry in bare.items() if geometry in moved},
        )


class _Read(NamedTuple):
    kept: list[int]
    errors: list[tuple[int, str]]
    pixels: list[Any]  # one (B, 3, h, w) per geometry
    targets: list[list[Targets[NDArray[Any]]]]  # of B images per geometry, if they are wanted


class _Reader:
    """Decodes whole batches; what a worker process runs."""

    def __init__(
        self,
        source: Source,
        jobs: list[np.ndarray],
        geometries: list[Preprocess],
        targets: Sequence[TargetSource | None],
    ) -> None:
        self.source, self.jobs, self.geometries = source, jobs, geometries
        self.targets = targets  # of each job the source once more, if the targets of its images are wanted
        self.shared_memory = False

    def __getitem__(self, number: int) -> _Read:
        job, source = self.jobs[number], self.targets[number]
        pixels = [np.empty((len(job), 3, *geometry.size), np.uint8) for geometry in self.geometries]
        targets: dict[int, list[Targets[NDArray[Any]]]] = {}
        errors = []
        for i in np.argsort(job).tolist():  # neighbours in a file are read together; one image at a time is in memory
            position = int(job[i])
            (item,) = self.source.read([position])
            if item.image is None:
                errors.append((i, item.error or "unknown reason"))
                continue
            for crops, geometry in zip(pixels, self.geometries, strict=True):
                crops[i] = geometry.crop(item.image)
            targets[i] = []
            if source is not None:
                (annotated,) = source.targets([position])
                targets[i] = [geometry.move(annotated, *item.image.shape[:2]) for geometry in self.geometries]
        kept = sorted(targets)
        pixels = [crops[kept] for crops in pixels] if errors else pixels
        return _Read(
            kept,
            sorted(errors),
            list(map(torch.from_numpy, pixels)) if self.shared_memory else pixels,
            [] if source is None else [[targets[i][g] for i in kept] for g in range(len(self.geometries))],
        )
