"""Segmentation maps and the patch grid of an encoder: which pixels lie in which patch, and how to get back to pixels.

An encoder sees a window of the image, resized; its features lie on a grid of h × w patches over that window. Maps keep
their own resolution: classes of patches are counted on it, and scores of patches are brought to it, with bilinear
interpolation between the centres of patches (`align_corners=False`), to be compared with every pixel that was seen.

H × W pixels of a map, C classes, P = h · w patches, k × k samples of a patch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.images.preprocess import Preprocess, Window
from sightline.images.targets import VOID

BACKGROUND = "background"  # the first channel: pixels of no class
FINEST = 16  # samples along the side of a patch


def channels(segmentation: NDArray[np.int64]) -> NDArray[np.int64]:
    """0: background, 1 … C: the classes, −1: left out.

    >>> channels(np.array([VOID, -1, 0, 5]))
    array([-1,  0,  1,  6])
    """
    channel: NDArray[np.int64] = np.where(segmentation == VOID, -1, segmentation + 1)
    return channel


def seen(window: Window) -> NDArray[np.int64]:
    """Pixels of a map whose centres lie in the window, in order.

    >>> from sightline.images.preprocess import Window
    >>> seen(Window(8, 4, 1, 2)).tolist(), seen(Window(4, 4, 0, 4)).tolist()
    ([2, 3, 4, 5], [0, 1, 2, 3])
    """
    twice = (2 * np.arange(window.length) + 1) * window.resized  # the centre, in units of 1 / (2 · length)
    first = 2 * window.first * window.length
    pixels: NDArray[np.int64] = np.flatnonzero((twice >= first) & (twice < first + 2 * window.size * window.length))
    return pixels


def seen_part(segmentation: NDArray[np.int64], preprocess: Preprocess) -> NDArray[np.int64]:
    """The channels of the pixels that an encoder sees, in their own resolution."""
    rows, columns = preprocess.windows(*segmentation.shape)
    return channels(segmentation[np.ix_(seen(rows), seen(columns))])


def nearest_to(segmentation: NDArray[np.int64], preprocess: Preprocess, shape: tuple[int, int]) -> NDArray[np.int64]:
    """The channel under the centre of each of `shape` cells that the window is cut into."""
    rows, columns = (
        _under(window, cells) for window, cells in zip(preprocess.windows(*segmentation.shape), shape, strict=True)
    )
    return channels(segmentation[np.ix_(rows, columns)])


def _under(window: Window, cells: int) -> NDArray[np.int64]:
    """⌊(first + (i + ½) · size / cells) · length / resized⌋, without rounding."""
    where = 2 * cells * window.first + (2 * np.arange(cells) + 1) * window.size
    pixels: NDArray[np.int64] = (where * window.length // (2 * cells * window.resized)).clip(max=window.length - 1)
    return pixels


def shares(
    maps: list[NDArray[np.int64]], preprocess: Preprocess, grid: tuple[int, int], classes: int
) -> NDArray[np.float32]:
    """Share of each channel in each patch, (n, P, classes + 1); pixels that are left out are in no share.

    Exact where the sides of patches are whole numbers of pixels, 16 at most; else from samples that lie as close.

    >>> from sightline.images.preprocess import Preprocess
    >>> shares([np.array([[-1, 0], [0, VOID]])], Preprocess((2, 2)), (1, 1), 1).tolist()
    [[[0.25, 0.5]]]
    """
    sides = [
        -(-len(seen(window)) // cells)
        for one in maps
        for window, cells in zip(preprocess.windows(*one.shape), grid, strict=True)
    ]
    side = min(max(1, *sides), FINEST)
    samples = np.stack([nearest_to(one, preprocess, (grid[0] * side, grid[1] * side)) for one in maps])
    cells = samples.reshape(len(maps), grid[0], side, grid[1], side).swapaxes(2, 3).reshape(-1, side * side)
    places = np.arange(len(cells))[:, None] * (classes + 2) + cells + 1  # what is left out comes first
    counted = np.bincount(places.ravel(), minlength=len(cells) * (classes + 2)).reshape(len(cells), classes + 2)
    share: NDArray[np.float32] = (counted[:, 1:] / np.float32(side * side)).astype(np.float32)
    return share.reshape(len(maps), grid[0] * grid[1], classes + 1)


def corners(window: Window, cells: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """For each pixel that is seen, the two cells that it lies between, and the weight of the second one."""
    where = ((seen(window) + 0.5) * window.resized / window.length - window.first) * cells / window.size - 0.5
    where = where.clip(0, cells - 1)
    low = np.floor(where).astype(np.int64)
    return low, np.minimum(low + 1, cells - 1), (where - low).astype(np.float32)


def upsampling(window: Window, cells: int) -> NDArray[np.float32]:
    """The matrix (pixels seen, cells) of linear interpolation along one axis.

    >>> from sightline.images.preprocess import Window
    >>> upsampling(Window(4, 4, 0, 4), 2).tolist()
    [[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [0.0, 1.0]]
    """
    low, high, weight = corners(window, cells)
    matrix = np.zeros((len(low), cells), np.float32)
    pixels: Any = np.arange(len(low))
    np.add.at(matrix, (pixels, low), 1 - weight)
    np.add.at(matrix, (pixels, high), weight)
    return matrix
