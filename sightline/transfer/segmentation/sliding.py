"""Decisions on whole images: windows slide over an image, and their scores are averaged, at the labels' resolution.

The shorter side of an image is resized to that of a window; windows overlap by a third, as in the usual protocol (512
and 341 pixels), and the last one ends with the image. Scores of all windows are enlarged to pixels, averaged, and
resized to the labels, whose pixels then each have a decision.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sightline.core.processes import gathered, rank, world
from sightline.encoders.modules.mode import evaluating
from sightline.images.label_maps import channels
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images, TargetSource
from sightline.images.thumbnails import thumbnail_size
from sightline.images.workers import parallel
from sightline.measure.estimators.overlap import count_overlap
from sightline.transfer.segmentation.heads import enlarge
from sightline.transfer.segmentation.objective import SegmentationObjective

OVERLAP = 3  # a window moves on by all but one of so many parts of its size
TOGETHER = 8  # images that are read at once, and windows that are looked at


class Segmented(NamedTuple):
    """What came of one image."""

    counts: NDArray[np.int64]  # (3, K), see measure/estimators/overlap.py
    picture: NDArray[np.int16]  # the decisions on a small picture, if it is wanted; else (0, 0)


def starts(length: int, size: int) -> list[int]:
    """Where windows begin along a side.

    >>> starts(512, 512), starts(683, 512), starts(1024, 512)
    ([0], [0, 171], [0, 341, 512])
    """
    stride = max(1, size * (OVERLAP - 1) // OVERLAP)
    count = max(0, -(-(length - size) // stride)) + 1
    return [min(i * stride, length - size) for i in range(count)]


@dataclass(frozen=True)
class Sliding:
    """A segmenter that looks at images of any size."""

    objective: SegmentationObjective
    preprocess: Preprocess  # its size is that of a window
    classes: int
    device: torch.device
    workers: int | None = None

    @torch.no_grad()
    def over(self, images: Images, split: str, shown: frozenset[str] = frozenset()) -> dict[str, Segmented]:
        """Of all images of a split that can be read, by their ids; the processes of a training share them."""
        where = images.indices(split)
        segmented = {}
        with evaluating(self.objective):
            for position, pixels, truth in self._images(images, where):
                decided = self.decide(torch.from_numpy(pixels), truth.shape).numpy(force=True)
                name = str(images.ids[position])
                picture = _small(decided) if name in shown else np.zeros((0, 0), np.int16)
                segmented[name] = Segmented(count_overlap(decided, channels(truth), self.classes), picture)
        every = {name: one for part in gathered(segmented) for name, one in part.items()}
        return {name: every[name] for name in map(str, images.ids[where]) if name in every}

    def decide(self, pixels: Tensor, size: tuple[int, ...]) -> Tensor:  # uint8 (3, h, w) -> int64 of this size
        """The class of every pixel of an image whose shorter side is that of a window."""
        side = self.preprocess.size[0]
        corners = [(y, x) for y in starts(pixels.shape[1], side) for x in starts(pixels.shape[2], side)]
        total = torch.zeros(self.classes, *pixels.shape[1:], device=self.device)
        times = torch.zeros(pixels.shape[1:], device=self.device)
        for first in range(0, len(corners), TOGETHER):
            some = corners[first : first + TOGETHER]
            windows = torch.stack([pixels[:, y : y + side, x : x + side] for y, x in some])
            scores = self.objective.scores(self.preprocess.normalize(windows.to(self.device)))
            for (y, x), one in zip(some, enlarge(scores, (side, side)), strict=True):
                total[:, y : y + side, x : x + side] += one
                times[y : y + side, x : x + side] += 1
        mean = total / times
        return (mean if mean.shape[1:] == size else enlarge(mean[None], size)[0]).argmax(0)

    def _images(
        self, images: Images, where: NDArray[np.int64]
    ) -> Generator[tuple[int, NDArray[np.uint8], NDArray[np.int64]], None, None]:
        cuts = np.array_split(where, max(1, -(-len(where) // TOGETHER)))[rank() :: world()]
        jobs = [cut for cut in cuts if len(cut)]
        side = self.preprocess.size[0]
        reader = _Reader(images.target_source(), jobs, side, self.preprocess.interpolation)
        for part in parallel(reader, range(len(jobs)), images, self.workers, TOGETHER * 6 * side**2):
            yield from part


class _Reader:
    """Decodes images and resizes their shorter side; what a worker process runs."""

    def __init__(self, source: TargetSource, jobs: list[NDArray[np.int64]], side: int, interpolation: str) -> None:
        self.source, self.jobs, self.side, self.interpolation = source, jobs, side, interpolation
        self.shared_memory = False

    def __getitem__(self, number: int) -> list[tuple[int, NDArray[np.uint8], NDArray[np.int64]]]:
        job = self.jobs[number].tolist()
        items = []
        for position, item, target in zip(job, self.source.read(job), self.source.targets(job), strict=True):
            if item.image is not None and target.segmentation is not None:
                items.append((position, self._resized(item.image), target.segmentation))
        return items

    def _resized(self, image: NDArray[Any]) -> NDArray[np.uint8]:
        height, width = image.shape[:2]
        scale = self.side / min(height, width)
        size = (max(self.side, round(width * scale)), max(self.side, round(height * scale)))
        if size != (width, height):
            how = Image.Resampling[self.interpolation.upper()]
            image = np.asarray(Image.fromarray(image).resize(size, how))
        return np.ascontiguousarray(image.transpose(2, 0, 1))


def _small(decided: NDArray[np.int64]) -> NDArray[np.int16]:
    """Every so many pixels of the decisions: those under the centres of a small picture's."""
    rows, columns = (
        (2 * np.arange(n) + 1) * length // (2 * n)
        for n, length in zip(thumbnail_size(decided.shape), decided.shape, strict=True)
    )
    small: NDArray[np.int16] = decided[np.ix_(rows, columns)].astype(np.int16)
    return small
