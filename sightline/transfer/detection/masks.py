"""Masks at their places in the image, with sub-pixel accuracy, and as run lengths.

A mask of m × m cells is spread over its box [x0, x1] × [y0, y1]. A pixel of the image takes the value under its centre,
bilinearly between the centres of the cells; this is linear in the rows and in the columns of the mask M:

    pasted = R M Cᵀ          R (H, m), C (W, m)

Boxes are not rounded to whole pixels first: that alone costs a perfect detector a third of its mask AP on small images.

k masks of m × m cells, an image of H × W pixels.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RunLengths = dict[str, Any]  # of COCO: {"size": [H, W], "counts": bytes}
TOGETHER = 16  # masks that are pasted at once: their pixels are numbers of four bytes before they are bits


def paste(probabilities: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:  # (k, m, m), (k, 4) -> (k, H, W)
    """Which pixels of an image each mask covers: those inside its box where it is at least ½ under their centres.

    >>> half = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    >>> paste(half, torch.tensor([[1.0, 0.0, 5.0, 2.0]]), (3, 6))[0].int().tolist()
    [[0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    """
    height, width = size
    pasted = torch.zeros(len(boxes), height, width, dtype=torch.bool, device=boxes.device)
    for start in range(0, len(boxes), TOGETHER):
        some = slice(start, start + TOGETHER)
        x0, y0, x1, y1 = boxes[some].float().unbind(1)
        cells = probabilities.shape[-1]
        rows, columns = _weights(y0, y1, height, cells), _weights(x0, x1, width, cells)
        pasted[some] = rows @ probabilities[some].float() @ columns.mT >= 0.5
    return pasted


def _weights(low: Tensor, high: Tensor, pixels: int, cells: int) -> Tensor:  # (k,), (k,) -> (k, pixels, cells)
    """What each cell counts for each pixel along one axis: nothing outside of the box, up to its edges inside."""
    centre = torch.arange(pixels, device=low.device) + 0.5
    place = (centre - low[:, None]) / (high - low).clamp(min=1e-6)[:, None]  # 0 … 1 within the box
    inside = (place >= 0) & (place < 1)
    at = (place * cells - 0.5).clamp(0, cells - 1)  # beyond the centre of the last cell its value holds on
    weight = 1 - (at[..., None] - torch.arange(cells, device=low.device)).abs()
    return weight.clamp_(min=0) * inside[..., None]


def run_lengths(masks: NDArray[np.bool_]) -> list[RunLengths]:  # (k, H, W)
    """Masks as COCO keeps them.

    >>> run_lengths(np.eye(3, dtype=bool)[None])
    [{'size': [3, 3], 'counts': b'013000'}]
    """
    from faster_coco_eval.core import mask

    if not len(masks):
        return []
    lengths: list[RunLengths] = mask.encode(np.asfortranarray(masks.transpose(1, 2, 0).astype(np.uint8)))
    return lengths


def unpacked(packed: Sequence[RunLengths], size: tuple[int, int]) -> NDArray[np.bool_]:  # (k, H, W)
    """The masks of run lengths, for an image of this size."""
    from faster_coco_eval.core import mask

    if not packed:
        return np.zeros((0, *size), bool)
    pixels: NDArray[np.bool_] = np.ascontiguousarray(mask.decode(list(packed)).transpose(2, 0, 1)).astype(bool)
    return pixels
