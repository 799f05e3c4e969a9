"""Schedules: how far a training is, and the curves along which its settings move."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
