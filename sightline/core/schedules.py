"""Schedules: how far a training is, and the curves along which its settings move."""

import math
from dataclasses import dataclass

from sightline.core.errors import InputError


@dataclass(frozen=True)
class Progress:
    """How far a training is: `step` steps are done, of `steps`; an epoch has `per_epoch` of them."""

    step: int
    steps: int
    per_epoch: int

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the next step lies, from 0."""
        return self.step // self.per_epoch

    @property
    def fraction(self) -> float:
        """Share of the training that is done, 0 … 1."""
        return self.step / self.steps


LOG = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def points(keep: str | int, steps: int) -> tuple[int, ...]:
    """Steps after which weights are kept: none for "", `log` or so many, start and end among them.

    >>> points("log", 1000), points(3, 1000), points("", 1000)
    ((0, 10, 20, 50, 100, 200, 500, 1000), (0, 500, 1000), ())
    """
    if keep == "":
        return ()
    if keep != "log" and not (isinstance(keep, int) and keep >= 2):
        raise InputError(f"keep is {keep!r}; give log, or how many points of the training to keep, at least 2")
    shares = LOG if isinstance(keep, str) else [point / (keep - 1) for point in range(keep)]
    return tuple(sorted({round(share * steps) for share in shares}))


def cosine(start: float, end: float, fraction: float) -> float:
    """From start to end along half a cosine.

    >>> cosine(0.99, 1.0, 0.0), cosine(0.99, 1.0, 1.0), round(cosine(0.0, 1.0, 0.5), 12)
    (0.99, 1.0, 0.5)
    """
    return end + (start - end) * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0))) / 2


def warmup_cosine(step: float, steps: float, warmup: float) -> float:
    """Share of a peak that rises linearly from 0 over `warmup` steps, then falls to 0 along half a cosine.

    >>> [round(warmup_cosine(step, 100, 20), 3) for step in (0, 10, 20, 60, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return step / warmup if step < warmup else cosine(1.0, 0.0, (step - warmup) / max(1.0, steps - warmup))


def linear(start: float, end: float, fraction: float) -> float:
    """From start to end along a line.

    >>> linear(0.5, 1.0, 0.0), linear(0.5, 1.0, 1.0), linear(0.5, 1.0, 0.25)
    (0.5, 1.0, 0.625)
    """
    return start + (end - start) * min(max(fraction, 0.0), 1.0)
