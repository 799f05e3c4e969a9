"""What is to be found in an image beside its label: boxes, masks and segmentation maps, and how views move them.

H × W pixels, k objects, a view of S × S pixels.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["VOID", "Targets", "move", "tensors"]


VOID = -2  # pixels of a segmentation map that are left out: borders, or what was not labelled

Array = TypeVar("Array", NDArray[Any], Tensor)


class Targets(NamedTuple, Generic[Array]):
    """The objects of an image, and the class of each of its pixels; what a source does not know is None."""

    labels: Array  # int64 (k,), classes of the objects
    boxes: Array  # float32 (k, 4), x0 y0 x1 y1 in pixels: x1 − x0 is the width
    masks: Array | None = None  # bool (k, H, W)
    segmentation: Array | None = None  # int64 (H, W), −1: of no class, the background; VOID: nobody knows


def move(targets: Targets[NDArray[Any]], box: NDArray[np.int64], flip: bool, size: int) -> Targets[NDArray[Any]]:
    """The targets in a view: cropped to `box` (top, left, height, width), resized to size × size, mirrored.

    Boxes are clipped; an object is dropped when nothing is left of its box, or no pixel of its mask. Masks and maps
    are resized with nearest neighbour: a pixel of the view shows what lies under its centre.

    >>> one = Targets(np.array([7, 8]), np.array([[0, 0, 4, 4], [6, 6, 8, 8]], np.float32))
    >>> move(one, np.array([2, 2, 4, 4]), True, 8)
    Targets(labels=array([7]), boxes=array([[4., 0., 8., 4.]], dtype=float32), masks=None, segmentation=None)
    """
    top, left, height, width = box.tolist()
    scale = np.array([size / width, size / height] * 2)
    boxes = ((targets.boxes.astype(np.float64) - [left, top, left, top]) * scale).clip(0, size)
    if flip:
        boxes[:, [0, 2]] = size - boxes[:, [2, 0]]
    rows, columns = top + _nearest(height, size), left + _nearest(width, size)
    if flip:
        columns = columns[::-1]
    kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    masks = None
    if targets.masks is not None:
        masks = targets.masks[:, rows[:, None], columns]
        kept &= masks.any((1, 2))
        masks = masks[kept]
    segmentation = None if targets.segmentation is None else targets.segmentation[rows[:, None], columns]
    return Targets(targets.labels[kept], boxes[kept].astype(np.float32), masks, segmentation)


def tensors(targets: Targets[NDArray[Any]], device: torch.device) -> Targets[Tensor]:
    """The same for a model."""
    return Targets(*(None if part is None else torch.from_numpy(part).to(device) for part in targets))  # type: ignore[arg-type]


def _nearest(length: int, size: int) -> NDArray[np.int64]:
    """For each of `size` pixels, the one of `length` under its centre: ⌊(i + ½) · length / size⌋, without rounding."""
    found: NDArray[np.int64] = (2 * np.arange(size) + 1) * length // (2 * size)
    return found
