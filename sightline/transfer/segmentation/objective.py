"""What a segmenter learns: the cross-entropy of every pixel of a view, on the maps of an encoder.

Scores are enlarged to the view first. Pixels that are left out count 0, but they count: the sum is divided by all
pixels, as mmsegmentation does it, so that processes with different shares of such pixels make the step of one.

B images, views of S × S pixels, K classes: the background and those of the images.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.images.targets import VOID, Targets
from sightline.training.objective import Views
from sightline.transfer.detection.features import FeatureMaps, Standard
from sightline.transfer.on_encoder import OnEncoder
from sightline.transfer.segmentation.heads import Auxiliary, LinearHead, Scales, UperNet, enlarge


class SegmentationObjective(OnEncoder):
    """A head on an encoder; see training/objective.py."""

    def __init__(
        self,
        features: FeatureMaps,
        standard: Standard,
        head: LinearHead | UperNet,
        *,
        scales: Scales | None = None,
        auxiliary: Auxiliary | None = None,
        auxiliary_weight: float = 0.0,
        frozen: bool = True,
        layers: Mapping[str, int] | None = None,
        layer_decay: float = 1.0,
    ) -> None:
        super().__init__(features, standard, frozen, layers, layer_decay)
        self.head, self.scales = head, scales
        self.auxiliary, self.auxiliary_weight = auxiliary, auxiliary_weight

    def maps(self, images: Tensor) -> list[Tensor]:  # (B, 3, S, S)
        """What the head sees of images."""
        maps = self.standardised(images)
        return maps if self.scales is None else self.scales(maps)

    def scores(self, images: Tensor) -> Tensor:  # (B, 3, S, S) -> (B, K, h, w)
        """Of the classes, on the grid of the head."""
        scores: Tensor = self.head(self.maps(images))
        return scores.float()

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the share of labelled pixels that are right."""
        maps = self.maps(views.pixels[0])
        truth = torch.stack([_channels(one) for one in views.targets[0]])
        scores = enlarge(self.head(maps).float(), truth.shape[1:])
        loss = _loss(scores, truth)
        if self.auxiliary is not None:
            helping = enlarge(self.auxiliary(maps).float(), truth.shape[1:])
            loss = loss + self.auxiliary_weight * _loss(helping, truth)
        known = truth >= 0
        right = (scores.detach().argmax(1) == truth)[known].float().mean() if known.any() else scores.new_zeros(())
        return loss, {"pixel_accuracy": right}


def _channels(targets: Targets[Tensor]) -> Tensor:
    """0: background, 1 … : the classes, −1: left out."""
    assert targets.segmentation is not None
    return torch.where(targets.segmentation == VOID, -1, targets.segmentation + 1)


def _loss(scores: Tensor, truth: Tensor) -> Tensor:
    return F.cross_entropy(scores, truth, ignore_index=-1, reduction="sum") / truth.numel()
