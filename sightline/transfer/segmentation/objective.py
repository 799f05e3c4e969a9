"""What a segmenter learns: the cross-entropy of every pixel of a view, on the maps of an encoder.

Scores are enlarged to the view first. Pixels that are left out count 0, but they count: the sum is divided by all
pixels, as mmsegmentation does it, so that processes with different shares of such pixels make the step of one.

B images, views of S × S pixels, K classes: the background and those of the images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.images.targets import VOID, Targets
from sightline.training import objective
from sightline.training.objective import Views
from sightline.transfer.classification import decayed
from sightline.transfer.detection.features import Features, Standard
from sightline.transfer.segmentation.heads import Auxiliary, LinearHead, Scales, UperNet, enlarge

__all__ = ["Objective"]


class Objective(objective.Objective):
    """A head on an encoder; see training/objective.py."""

    def __init__(
        self,
        features: Features,
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
        super().__init__()
        self.standard, self.head, self.scales, self.auxiliary = standard, head, scales, auxiliary
        self.auxiliary_weight, self.frozen = auxiliary_weight, frozen
        self.layers, self.layer_decay = layers or {}, layer_decay
        # A frozen encoder is no part of what is trained and saved.
        self._features = (features,)
        if not frozen:
            self.features = features

    @property
    def encoder(self) -> nn.Module:
        """The encoder that is trained along."""
        return self._features[0].module

    def to(self, *words: Any, **more: Any) -> Objective:
        """A frozen encoder goes along."""
        self._features[0].to(*words, **more)
        return super().to(*words, **more)

    def maps(self, images: Tensor) -> list[Tensor]:  # (B, 3, S, S)
        """What the head sees of images; a frozen encoder is in evaluation mode."""
        features = self._features[0]
        found: list[Tensor] = self.standard(features.look(images) if self.frozen else features(images))
        return found if self.scales is None else self.scales(found)

    def scores(self, images: Tensor) -> Tensor:  # (B, 3, S, S) -> (B, K, h, w)
        """Of the classes, on the grid of the head."""
        found: Tensor = self.head(self.maps(images))
        return found.float()

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

    def lr_scales(self) -> dict[str, float]:
        """layer_decay^(L + 1 − layer) by the name of the parameter."""
        return decayed(self.layers, self.layer_decay, "features.module.")


def _channels(targets: Targets[Tensor]) -> Tensor:
    """0: background, 1 … : the classes, −1: left out."""
    assert targets.segmentation is not None
    return torch.where(targets.segmentation == VOID, -1, targets.segmentation + 1)


def _loss(scores: Tensor, truth: Tensor) -> Tensor:
    return F.cross_entropy(scores, truth, ignore_index=-1, reduction="sum") / truth.numel()
