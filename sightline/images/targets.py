"""What is to be found in an image beside its label: boxes, masks and segmentation maps, and how views move them.

H × W pixels, k objects, a view of h × w pixels.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VOID = -2  # pixels of a segmentation map that are left out: borders, or what was not labelled

Array = TypeVar("Array", NDArray[Any], Tensor)


class Targets(NamedTuple, Generic[Array]):
    """The objects of an image, and the class of each of its pixels; what a source does not know is None."""

    labels: Array  # int64 (k,), classes of the objects
    boxes: Array  # float32 (k, 4), x0 y0 x1 y1 in pixels: x1 − x0 is the width
    masks: Array | None = None  # bool (k, H, W)
    segmentation: Array | None = None  # int64 (H, W), −1: of no class, the background; VOID: nobody knows
    crowd: Array | None = None  # bool (k,), regions of many objects, where nothing is to be found and nothing is wrong
    areas: Array | None = None  # float64 (k,), as annotated; None: pixels of the mask, or the area of the box


def move(
    targets: Targets[NDArray[Any]],
    box: NDArray[np.int64],
    flip: bool,
    size: int | tuple[int, int],
    image: tuple[int, int] | None = None,
) -> Targets[NDArray[Any]]:
    """The targets in a view: cropped to `box` (top, left, height, width), resized to `size`, mirrored.

    `size` is that of both sides, or height and width. Boxes are clipped; an object is dropped when nothing is left of
    its box, or no pixel of its mask. Masks and maps are resized with nearest neighbour: a pixel of the view shows what
    lies under its centre. Where the crop may reach beyond the image, `image` says how large that is; there is nothing
    beyond it, and a map is void there.

    >>> one = Targets(np.array([7, 8]), np.array([[0, 0, 4, 4], [6, 6, 8, 8]], np.float32))
    >>> moved = move(one, np.array([2, 2, 4, 4]), True, 8)
    >>> moved.labels, moved.boxes
    (array([7]), array([[4., 0., 8., 4.]], dtype=float32))
    """
    top, left, height, width = box.tolist()
    lengths = (top + height, left + width) if image is None else image
    shape = (size, size) if isinstance(size, int) else size
    (seen_rows, down), (seen_columns, across) = (
        filled(*axis) for axis in zip((top, left), (height, width), lengths, shape, strict=True)
    )
    scale = np.array([across / seen_columns, down / seen_rows] * 2)
    boxes = ((targets.boxes.astype(np.float64) - [left, top, left, top]) * scale).clip(0, [across, down] * 2)
    if flip:
        boxes[:, [0, 2]] = shape[1] - boxes[:, [2, 0]]
    place = top + _nearest(seen_rows, down), left + _nearest(seen_columns, across)
    kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    masks = None
    if targets.masks is not None:
        masks = _view(targets.masks, place, flip, shape, False)
        kept &= masks.any((1, 2))
        masks = masks[kept]
    segmentation = None if targets.segmentation is None else _view(targets.segmentation, place, flip, shape, VOID)
    crowd = None if targets.crowd is None else targets.crowd[kept]
    return Targets(targets.labels[kept], boxes[kept].astype(np.float32), masks, segmentation, crowd)


def filled(start: int, extent: int, length: int, size: int) -> tuple[int, int]:
    """How many pixels of an image of this length a crop shows along one axis, and how many of the view they fill.

    >>> filled(2, 10, 20, 8), filled(0, 10, 6, 8)
    ((10, 8), (6, 5))
    """
    seen = min(start + extent, length) - start
    return seen, size if seen == extent else max(1, round(seen * size / extent))


def tensors(targets: Targets[NDArray[Any]], device: torch.device | str = "cpu") -> Targets[Tensor]:
    return Targets(*(None if part is None else torch.from_numpy(part).to(device) for part in targets))  # type: ignore[arg-type]


def arrays(targets: Targets[Tensor]) -> Targets[NDArray[Any]]:
    return Targets(*(None if part is None else part.numpy(force=True) for part in targets))  # type: ignore[arg-type]


def _view(
    pixels: NDArray[Any],
    place: tuple[NDArray[np.int64], NDArray[np.int64]],
    flip: bool,
    shape: tuple[int, int],
    beyond: int,
) -> NDArray[Any]:  # (…, H, W) -> (…, h, w)
    """The pixels in these rows and columns, from the upper left corner of the view on, and `beyond` elsewhere."""
    rows, columns = place
    view = pixels[..., rows[:, None], columns]
    if view.shape[-2:] != shape:
        whole = np.full((*view.shape[:-2], *shape), beyond, view.dtype)
        whole[..., : len(rows), : len(columns)] = view
        view = whole
    return np.ascontiguousarray(view[..., ::-1]) if flip else view


def _nearest(length: int, size: int) -> NDArray[np.int64]:
    """For each of `size` pixels, the one of `length` under its centre: ⌊(i + ½) · length / size⌋, without rounding."""
    rows: NDArray[np.int64] = (2 * np.arange(size) + 1) * length // (2 * size)
    return rows
