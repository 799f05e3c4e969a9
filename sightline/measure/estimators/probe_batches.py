"""Rows of features in random order, from memory or from disk.

Features that fit in 1 GiB are read once and shuffled freely in every epoch. Of larger ones, blocks of 32 rows are drawn
at random until the memory is full, and these are shuffled: a disk is fast at blocks, and what was sorted by class is
mixed. The order depends on seed, number of rows, width and size of a batch alone. What does not fill a batch is left
out, of an epoch or of what is in memory, unless there is less than one batch of images.

Shapes: n rows, B of a batch, D width of all matrices together.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.measure.estimators.ridge import Sliceable

ROWS = 4096  # that are read at a time
MEMORY = 2**28  # numbers that are held in memory, 1 GiB
CONSECUTIVE = 32  # consecutive rows of larger features that stay together


def fitting(rows: int, width: int) -> int:
    """How many matrices of this size are held in memory together."""
    return MEMORY // (rows * width)


class JoinedFeatures:
    """Matrices of features of the same images, side by side."""

    def __init__(
        self,
        inputs: tuple[str, ...],
        features: Mapping[str, Sliceable],
        rows: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        for name in inputs:
            if name not in features:
                raise InputError(f"There are no features {name!r}{nearest(name, features)}")
        self.parts = [features[name] for name in inputs]
        self.rows = rows if rows is not None else int(self.parts[0].shape[0])
        self.width = sum(int(part.shape[1]) for part in self.parts)
        for name, part in zip(inputs, self.parts, strict=True):
            if part.shape[0] != self.rows:
                raise InputError(
                    f"Features {name!r} have {part.shape[0]} rows for {self.rows} images; one row for each is expected"
                )

    def read(self, starts: Sequence[int], length: int) -> Tensor:
        """Blocks of `length` rows, one after the other, in float32 on the device."""
        sizes = [min(length, self.rows - start) for start in starts]
        rows, at = np.empty((sum(sizes), self.width), np.float32), 0
        for start, size in zip(starts, sizes, strict=True):
            column = 0
            for part in self.parts:
                rows[at : at + size, column : column + part.shape[1]] = part[start : start + size]
                column += part.shape[1]
            at += size
        return torch.from_numpy(rows).to(self.device)

    def batches(self, labels: Tensor, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (B, D) and labels (B,) of one batch after the other, without end."""
        random = torch.Generator().manual_seed(seed)
        batch = min(batch, self.rows)
        for x, y in self._windows(labels, batch, random):
            order = torch.randperm(len(x), generator=random, device="cpu").to(self.device)  # the same on every device
            for start in range(0, len(x) // batch * batch, batch):
                rows = order[start : start + batch]
                yield x.index_select(0, rows), y[rows]

    def _windows(self, labels: Tensor, batch: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows for every epoch, or as many as fit in memory, in whole batches if a batch is made of blocks."""
        size = max(batch, MEMORY // self.width // batch * batch)
        if self.rows <= size:
            yield from repeat((self.read(range(0, self.rows, ROWS), ROWS), labels))
        count, together = -(-self.rows // CONSECUTIVE), size // CONSECUTIVE + 1  # one more, since one is shorter
        while True:
            starts = [CONSECUTIVE * number for number in torch.randperm(count, generator=random, device="cpu").tolist()]
            for first in range(0, count, together):
                part = starts[first : first + together]
                yield self.read(part, CONSECUTIVE), torch.cat([labels[start : start + CONSECUTIVE] for start in part])
