"""Mask R-CNN on the maps of an encoder, put together from torchvision's parts.

The detector lives in a frame of 16 pixels per patch, whatever the patch is (4 per cell of the first stage of a CNN), so
that strides, anchors and the sizes of regions are the published ones for every encoder. Boxes and masks of images are
brought into the frame and back by their owner. Three things of torchvision's are replaced, because they are not exact:

- anchors are rounded to whole pixels and lie half a cell beside the cells' centres: here they are neither,
- regions are pooled half a cell beside their places, at scales that are guessed from the first batch: here at their
  places, at scales that are known,
- masks are pasted into boxes of whole pixels: see masks.py. Masks to learn from are half a pixel of the frame off in
  torchvision; the detector learns that, and takes it back when it says where its masks are (`UNALIGNED`).

Source: He et al. 2017, "Mask R-CNN", with the heads of Li et al. 2022 (ViTDet): two convolutions that propose regions,
four convolutions and one linear layer for boxes, four convolutions for masks, with norms over the channels.

B images, K classes, a frame of H × W pixels, m × m cells of a mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead

from sightline.core.errors import InputError
from sightline.transfer.detection.pyramid import STRIDES, check_strides
from sightline.transfer.detection.regions import RegionPool

UNALIGNED = 0.5  # pixels of the frame by which torchvision's masks to learn from lie beside their boxes
ANCHOR = 8  # side of an anchor in cells: 32 pixels at stride 4, 512 at stride 64
SHAPES = (0.5, 1.0, 2.0)  # height over width


@dataclass(frozen=True)
class Heads:
    """Measures of a detector; the defaults are those of ViTDet."""

    masks: bool = True  # False: boxes alone
    channels: int = 256  # of the pyramid and the convolutions behind it
    strides: tuple[int, ...] = STRIDES
    box_convolutions: int = 4
    box_width: int = 1024  # of the linear layer
    mask_convolutions: int = 4
    mask_size: int = 28  # cells of a mask
    proposals: int = 1000  # regions that are looked at in an image
    regions: int = 512  # of these, learned from
    detections: int = 100  # at most, in an image

    def __post_init__(self) -> None:
        check_strides(self.strides)
        for key in ("channels", "box_width", "proposals", "regions", "detections"):
            if getattr(self, key) < 1:
                raise InputError(f"{key} is {getattr(self, key)}, but at least 1 is needed")
        for key in ("box_convolutions", "mask_convolutions"):
            if getattr(self, key) < 0:
                raise InputError(f"{key} is {getattr(self, key)}, but it cannot be negative")
        if self.mask_size < 2 or self.mask_size % 2:
            raise InputError(f"mask_size is {self.mask_size}, but an even number is needed: masks are pooled at half")


class FoundObjects(NamedTuple):
    """What is found in one image, the surest first, in pixels of the frame."""

    boxes: Tensor  # float32 (k, 4)
    labels: Tensor  # int64 (k,), classes from 0 on
    scores: Tensor  # float32 (k,)
    masks: Tensor | None  # float32 (k, m, m), probabilities over `regions`
    regions: Tensor  # float32 (k, 4): where the masks lie


class Anchors(nn.Module):
    """Boxes around the centre of every cell of each map, of three shapes and an area of 8 × 8 cells.

    >>> Anchors((4,)).of((1, 1), 4)[1].tolist()
    [-14.0, -14.0, 18.0, 18.0]
    """

    def __init__(self, strides: Sequence[int]) -> None:
        super().__init__()
        self.strides = tuple(strides)

    def num_anchors_per_location(self) -> list[int]:
        """As torchvision asks for it."""
        return [len(SHAPES)] * len(self.strides)

    def of(self, grid: tuple[int, int], stride: int) -> Tensor:  # (cells · shapes, 4)
        """The anchors of one map."""
        shape = torch.tensor(SHAPES).sqrt()
        half = torch.stack([1 / shape, shape], 1) * (ANCHOR * stride / 2)  # half width, half height
        y, x = torch.meshgrid(*((torch.arange(n) + 0.5) * stride for n in grid), indexing="ij")
        centre = torch.stack([x, y], -1).reshape(-1, 1, 2)
        return torch.cat([centre - half, centre + half], -1).reshape(-1, 4)

    def forward(self, images: ImageList, maps: Sequence[Tensor]) -> list[Tensor]:
        """The same anchors for each image."""
        rows, columns = zip(*(x.shape[-2:] for x in maps), strict=True)
        levels = zip(rows, columns, self.strides, strict=True)
        every = torch.cat([self.of((h, w), stride) for h, w, stride in levels]).to(maps[0].device)
        return [every] * len(images.image_sizes)


class InFloat32(nn.Module):
    """A layer that tells places and probabilities, for which bfloat16, in which it may compute, is too coarse."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor | list[Tensor]) -> Any:
        """What the layer gives, a tensor or several."""
        return _in_float32(self.layer(x))


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else type(value)(map(_in_float32, value))


class Detector(nn.Module):
    """Pyramid, proposals, boxes and masks: from the maps of an encoder to what there is in the frame."""

    def __init__(self, pyramid: nn.Module, classes: int, heads: Heads) -> None:
        super().__init__()
        self.pyramid, self.heads = pyramid, heads
        anchors = Anchors(heads.strides)
        self.proposals = RegionProposalNetwork(
            anchors,
            InFloat32(RPNHead(heads.channels, len(SHAPES), conv_depth=2)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2 * heads.proposals, "testing": heads.proposals},
            post_nms_top_n={"training": heads.proposals, "testing": heads.proposals},
            nms_thresh=0.7,
        )
        convolutions = [heads.channels] * heads.mask_convolutions
        self.regions = RoIHeads(
            RegionPool(heads.strides, 7),
            FastRCNNConvFCHead(
                (heads.channels, 7, 7),
                [heads.channels] * heads.box_convolutions,
                [heads.box_width],
                norm_layer=LayerNorm2d,
            ),
            InFloat32(FastRCNNPredictor(heads.box_width, classes + 1)),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=heads.regions,
            positive_fraction=0.25,
            bbox_reg_weights=None,
            score_thresh=0.05,
            nms_thresh=0.5,
            detections_per_img=heads.detections,
            mask_roi_pool=RegionPool(heads.strides, heads.mask_size // 2) if heads.masks else None,
            mask_head=MaskRCNNHeads(heads.channels, convolutions, 1, norm_layer=LayerNorm2d) if heads.masks else None,
            mask_predictor=InFloat32(MaskRCNNPredictor(heads.channels, heads.channels, classes + 1))
            if heads.masks
            else None,
        )

    def losses(
        self, maps: Sequence[Tensor], frame: tuple[int, int], targets: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """What is to be made small; `targets` has `boxes` (k, 4), `labels` (k,) from 0 on and `masks` (k, H, W)."""
        shifted = [{**target, "labels": target["labels"] + 1} for target in targets]  # 0 is the background's
        _, losses = self._run(maps, [frame] * len(targets), shifted)
        return losses

    def forward(self, maps: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[FoundObjects]:
        """What is found in each image; `sizes` says how much of the frame it fills, from the upper left corner on."""
        found, _ = self._run(maps, list(sizes), None)
        return [
            FoundObjects(
                one["boxes"],
                one["labels"] - 1,
                one["scores"],
                one["masks"][:, 0] if "masks" in one else None,
                one["boxes"] + UNALIGNED,
            )
            for one in found
        ]

    def _run(
        self, maps: Sequence[Tensor], sizes: list[tuple[int, int]], targets: list[dict[str, Tensor]] | None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        levels = {name: level.float() for name, level in self.pyramid(maps).items()}
        proposals, proposing = self.proposals(ImageList(maps[0], sizes), levels, targets)
        found, deciding = self.regions(levels, proposals, sizes, targets)
        return found, proposing | deciding
