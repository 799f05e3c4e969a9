"""Accuracies: shares of right answers with their intervals, the labels they need, their figure over depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.errors import InputError, counted

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd
    import xarray as xr

    from sightline.figures import Figure
    from sightline.images import Images

__all__ = [
    "ENDS",
    "NOTHING",
    "accuracy_of",
    "accuracy_table",
    "check_labels",
    "difference_of",
    "figure_over_depth",
    "wilson",
]

ENDS = ("", "_low", "_high")  # a value and its interval, as the names of variables end
NOTHING = (math.nan, math.nan, math.nan)


def check_labels(images: Images, splits: Sequence[str], title: str, name: str) -> None:
    """A classifier without classes would be a number without meaning: say so before the pass."""
    found = {split: set(images.labels_of(split).tolist()) - {-1} for split in splits}
    for split, classes in found.items():
        if len(classes) < (2 if split == "train" else 1):
            raise InputError(
                f"{title} needs labels of at least two classes, but the {split} split of {images.name} has "
                f"{counted(len(classes), 'labelled class') if classes else 'no labelled classes'}; "
                f"give images with class folders or labels, or leave {name} out (--only cka)"
            )
    for split, classes in found.items():
        if not classes & found["train"]:
            raise InputError(
                f"{title} cannot be right on {images.name}: no class of the {split} split is in the train split; "
                f"give more images of each class, or leave {name} out (--only cka)"
            )


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
    half = 1.959963984540054 * math.sqrt(b + c + 1 - (b - c) ** 2 / m) / m
    return (b - c) / len(right), max(-1.0, (b - c) / m - half), min(1.0, (b - c) / m + half)


def wilson(right: float, n: int) -> tuple[float, float]:
    """95 % interval of a share, which stays within [0, 1] and has a width even at 0 and 1 (Wilson 1927).

    >>> [round(bound, 4) for bound in wilson(9, 10)]
    [0.5958, 0.9821]
    """
    z, p = 1.959963984540054, right / n
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return max(0.0, (centre - half) / (1 + z**2 / n)), min(1.0, (centre + half) / (1 + z**2 / n))


def accuracy_table(result: xr.Dataset) -> pd.DataFrame:
    """One row for each accuracy that is known, with its interval."""
    names = [f"accuracy{end}" for end in ENDS]
    return result[names].to_dataframe().reset_index().dropna(subset="accuracy")


def figure_over_depth(
    result: xr.Dataset, title: str, caption: str, reference: str, lowest: float = 0.0
) -> list[Figure]:
    """Accuracy over the blocks: a panel for each feature, a colour for each encoder, chance as a line."""
    from sightline.figures import Figure, curve_over_depth, with_depth

    table = accuracy_table(result.sel(site=result.layer_type.isin(["block", "head"])))
    if table.empty:  # only other sites were chosen: the table of the report has them
        return []
    points, depth_title = with_depth(table)
    names = {"encoder": "series", "accuracy": "value", "accuracy_low": "low", "accuracy_high": "high"}
    points = points.rename(columns=names)
    chart = curve_over_depth(
        points,
        value_title=title,
        depth_title=depth_title,
        series_title="encoder",
        series=[str(name) for name in result.encoder.values],
        facet="feature",
        reference=(float(result.attrs["chance"]), reference),
        percent=True,
        domain=(min(lowest, math.floor(10 * points.low.min()) / 10), min(1.0, math.ceil(10 * points.high.max()) / 10)),
    )
    return [Figure("depth", f"{title} over depth", caption, chart, table)]
