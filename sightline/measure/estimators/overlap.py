"""Intersection over union, from one confusion over a data set.

    IoU_c = pixels of class c that are taken for c / (pixels of class c + pixels taken for c − the former)
    mIoU  = mean over the classes that occur in the maps or in the decisions

All pixels of all images are counted before anything is divided: the mean over images of an IoU per image is another
number. Of the confusion matrix only its diagonal and the sums of its rows and columns enter.

C classes, G groups of images.
"""

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.arrays import as_tensor
from sightline.measure.estimators.intervals import jackknife


def count_overlap(decided: NDArray[Any] | Tensor, truth: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """Pixels that are decided right, that are decided, and that there are, of each class: (3, C).

    Pixels without a class, −1 in `truth`, are left out. Decisions in a tensor are counted where it is.

    >>> count_overlap(np.array([0, 1, 1, 1]), np.array([0, 0, 1, -1]), 2).tolist()
    [[1, 1], [1, 2], [2, 1]]
    """
    least = (classes + 1) * classes
    if isinstance(decided, Tensor):
        places = (as_tensor(truth).to(decided) + 1) * classes + decided
        cells = torch.bincount(places.flatten(), minlength=least).numpy(force=True)
    else:
        cells = np.bincount(((truth + 1) * classes + decided).ravel(), minlength=least)
    confusion = cells.reshape(classes + 1, classes)[1:]  # the first row has what is left out
    return np.stack([confusion.diagonal(), confusion.sum(0), confusion.sum(1)])


def iou_of(counts: NDArray[Any]) -> NDArray[np.float64]:
    """(…, 3, C) → (…, C); NaN for a class that neither occurs nor is decided."""
    right, decided, there = np.moveaxis(np.asarray(counts, np.float64), -2, 0)
    union = decided + there - right
    iou: NDArray[np.float64] = np.divide(right, union, out=np.full(union.shape, np.nan), where=union > 0)
    return iou


def mean_iou(decided: NDArray[Any], truth: NDArray[Any], classes: int) -> float:
    """mIoU of decisions on all pixels of a data set; −1 in `truth` leaves a pixel out.

    >>> round(mean_iou(np.array([0, 1, 1, 1]), np.array([0, 0, 1, -1]), 3), 3)
    0.5
    """
    return float(mean_over_classes(iou_of(count_overlap(decided, truth, classes))))


def mean_over_classes(iou: NDArray[np.float64]) -> NDArray[np.float64]:
    """(…, C) → (…): of the classes that have a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of none at all
        mean: NDArray[np.float64] = np.nanmean(iou, -1)
    return mean


def miou_of(groups: NDArray[Any]) -> tuple[float, float, float]:
    """mIoU over all groups of images (G, 3, C), and its 95 % interval, by leaving out one after the other.

    The groups are images that belong together, or equally large lots of them.

    >>> groups = np.array([[[1, 1], [1, 2], [2, 1]], [[2, 1], [2, 1], [2, 1]]])
    >>> [round(number, 2) for number in miou_of(groups)]
    [0.71, 0.0, 1.0]
    """
    value, without = _left_out(groups)
    low, high = np.clip(jackknife(value, without), 0, 1).tolist()  # NaN stays NaN
    return float(value), low, high


def miou_difference(groups: NDArray[Any], others: NDArray[Any]) -> tuple[float, float, float]:
    """mIoU minus that of other decisions on the same groups of images, and its 95 % interval."""
    (value, without), (other, without_other) = _left_out(groups), _left_out(others)
    low, high = jackknife(value - other, without - without_other)
    return float(value - other), float(low), float(high)


def _left_out(counts: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """mIoU over all groups, (), and without each of them, (G,)."""
    counts = np.asarray(counts, np.float64)
    return mean_over_classes(iou_of(counts.sum(0))), mean_over_classes(iou_of(counts.sum(0) - counts))
