"""What the maps of a pyramid show in boxes (RoIAlign, He et al. 2017).

A box is cut into size × size cells, and a cell is the mean of 2 × 2 places, each read between the four cells of the map
around it. So every value is a sum of 16 values of the map with known weights. torchvision sums channel by channel; on a
CPU it is faster to sum whole rows of channels, as `embedding_bag` does, there and back.

R regions of B images, C channels, n × n cells of a region.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import roi_align
from torchvision.ops.poolers import LevelMapper

from sightline.transfer.detection.pyramid import COARSEST

SAMPLES = 2  # places along each side of a pooled cell at which a map is read


class RegionPool(nn.Module):
    """What the maps show in boxes, size × size cells, of the map whose stride suits a box (Lin et al. 2017, eq. 1)."""

    def __init__(self, strides: Sequence[int], size: int) -> None:
        super().__init__()
        self.strides, self.size = [stride for stride in strides if stride != COARSEST], size
        first, last = (stride.bit_length() - 1 for stride in (self.strides[0], self.strides[-1]))
        self.level_of = LevelMapper(first, last)  # 224 pixels belong to stride 16

    def forward(
        self, maps: Mapping[str, Tensor], boxes: list[Tensor], sizes: Sequence[tuple[int, int]]
    ) -> Tensor:  # (R, C, size, size)
        """Regions of all images, one after the other."""
        levels = self.level_of(boxes)
        where = [torch.nonzero(levels == level)[:, 0] for level in range(len(self.strides))]
        rois = torch.cat([F.pad(b, (1, 0), value=image) for image, b in enumerate(boxes)])
        wanted = [maps[str(stride)] for stride in self.strides]
        pool = self._summed if rois.device.type == "cpu" else self._aligned
        return pool(wanted, rois, where)

    def _aligned(self, maps: Sequence[Tensor], rois: Tensor, where: Sequence[Tensor]) -> Tensor:
        """By torchvision's kernel, map by map."""
        pooled = maps[0].new_zeros(len(rois), maps[0].shape[1], self.size, self.size)
        for x, stride, own in zip(maps, self.strides, where, strict=True):
            pooled[own] = roi_align(x, rois[own], self.size, 1 / stride, SAMPLES, aligned=True).to(pooled.dtype)
        return pooled

    def _summed(self, maps: Sequence[Tensor], rois: Tensor, where: Sequence[Tensor]) -> Tensor:
        """By weighted sums of the cells of all maps, as rows of one table."""
        n, corners = self.size, 2 * SAMPLES
        cells = torch.empty(len(rois), n, n, corners, corners, dtype=torch.int32)
        weights = torch.empty(len(rois), n, n, corners, corners, dtype=maps[0].dtype)
        start = 0
        for x, stride, own in zip(maps, self.strides, where, strict=True):
            height, width = x.shape[-2:]
            image, left, top, right, bottom = (rois[own] / rois.new_tensor([1, *[stride] * 4])).unbind(1)
            column, across = _places(left, right, width, n)
            row, down = _places(top, bottom, height, n)
            row = start + (image.int()[:, None, None] * height + row) * width
            cells[own] = row[:, :, None, :, None] + column[:, None, :, None, :]
            weights[own] = down[:, :, None, :, None] * across[:, None, :, None, :]
            start += len(x) * height * width
        table = torch.cat([x.permute(0, 2, 3, 1).flatten(0, 2) for x in maps])
        summed = F.embedding_bag(
            cells.view(-1, corners**2), table, mode="sum", per_sample_weights=weights.view(-1, corners**2)
        )
        return summed.view(len(rois), n, n, table.shape[1]).permute(0, 3, 1, 2)


def _places(low: Tensor, high: Tensor, size: int, n: int) -> tuple[Tensor, Tensor]:  # (R,) -> 2 × (R, n, 4)
    """Along one side of regions: the cells that each of the n parts is read from, and how much of each.

    >>> _places(torch.tensor([1.0]), torch.tensor([3.0]), 8, 1)  # read at 1.5 and 2.5, the centres of two cells
    (tensor([[[1, 2, 2, 3]]], dtype=torch.int32), tensor([[[0.5000, 0.0000, 0.5000, 0.0000]]]))
    """
    share = (torch.arange(SAMPLES * n, dtype=low.dtype) + 0.5) / (SAMPLES * n)
    place = low[:, None] + (high - low)[:, None] * share - 0.5  # in cells, from the centre of the first
    inside = (place >= -1) & (place <= size)  # nothing is read further outside
    place = place.clamp(0, size - 1)
    first = place.floor()
    rest = place - first
    cells = torch.stack([first, (first + 1).clamp(max=size - 1)], -1).int()
    weights = torch.stack([1 - rest, rest], -1) * inside[..., None] / SAMPLES
    return cells.view(len(low), n, 2 * SAMPLES), weights.view(len(low), n, 2 * SAMPLES)
