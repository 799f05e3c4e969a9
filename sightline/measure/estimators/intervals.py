"""Shares of right answers, means and ratios, with their intervals."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sightline.core.results import NORMAL_95


def accuracy_of(decided: npt.NDArray[Any], truth: npt.NDArray[Any]) -> tuple[float, float, float]:
    """Share of decisions that are right, and its interval."""
    right = int((decided == truth).sum())
    return (right / len(truth), *wilson(right, len(truth)))


def difference_of(right: npt.NDArray[np.bool_], other: npt.NDArray[np.bool_]) -> tuple[float, float, float]:
    """Accuracy of decisions minus that of others on the same images, and its 95 % interval (Agresti and Min 2005).

    With b images that only the first gets right and c that only the second does, the interval is that of paired shares
    after half an image is added to each of the four cells, so that it has a width even where no image differs:

        (b − c) / m ± 1.96 √(b + c + 1 − (b − c)² / m) / m,     m = n + 2

    What is compared with itself, the same array, is known to differ by 0.

    >>> [round(number, 2) for number in difference_of(np.array([True] * 4), np.array([True, True, True, False]))]
    [0.25, -0.28, 0.61]
    """
    if right is other:
        return 0.0, 0.0, 0.0
    b, c, m = int((right & ~other).sum()), int((other & ~right).sum()), len(right) + 2
    half = NORMAL_95 * math.sqrt(b + c + 1 - (b - c) ** 2 / m) / m
    return (b - c) / len(right), max(-1.0, (b - c) / m - half), min(1.0, (b - c) / m + half)


def wilson(right: float, n: int) -> tuple[float, float]:
    """95 % interval of a share, which stays within [0, 1] and has a width even at 0 and 1 (Wilson 1927).

    >>> [round(bound, 4) for bound in wilson(9, 10)]
    [0.5958, 0.9821]
    """
    z, p = NORMAL_95, right / n
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return max(0.0, (centre - half) / (1 + z**2 / n)), min(1.0, (centre + half) / (1 + z**2 / n))


def ratio_of(parts: npt.NDArray[Any], wholes: npt.NDArray[Any]) -> tuple[float, float, float]:
    """Σ parts / Σ wholes over images, each (n,), and its 95 % interval by the delta method; NaN where Σ wholes is 0.

    >>> [round(number, 3) for number in ratio_of(np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 7.0]))]
    [0.538, 0.485, 0.592]
    """
    n, whole = len(wholes), float(np.sum(wholes))
    if n < 2 or whole == 0:
        return math.nan, math.nan, math.nan
    ratio = float(np.sum(parts)) / whole
    half = NORMAL_95 * float(np.std(parts - ratio * wholes, ddof=1)) * math.sqrt(n) / abs(whole)
    return ratio, ratio - half, ratio + half


def jackknife(
    value: npt.NDArray[np.float64], without: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:  # (…), (g, …) -> (…), (…)
    """95 % interval of a number from what it is without each of g equally large groups of images: value ± t · s,

        s² = (g − 1)/g Σᵢ (value without group i − their mean)²,     Student's t with g − 1 degrees of freedom

    >>> values = np.array([1.0, 2.0, 6.0])  # of a mean it is the interval of Student's t
    >>> low, high = jackknife(values.mean(), (values.sum() - values) / 2)
    >>> round(float(low), 3), round(float(high), 3)
    (-3.572, 9.572)
    """
    from scipy.stats import t

    g = len(without)
    if g < 2:
        return np.full_like(value, np.nan), np.full_like(value, np.nan)
    spread = np.sqrt((g - 1) / g * ((without - without.mean(0)) ** 2).sum(0))
    half = t.ppf(0.975, g - 1) * spread
    return value - half, value + half
