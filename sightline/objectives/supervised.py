"""Supervised classification: cross-entropy of the backbone's own classifier, the reference of the papers.

    L = −1/n Σ_b log softmax(classifier(f(x_b)))[label_b]        over the n images that have a label

Source of the augmentation: Touvron et al. 2021, "Training data-efficient image transformers & distillation through
attention", without its mixing of images.

B images, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sightline import augment, distributed
from sightline.augment import Policy
from sightline.backbones import Backbone, features
from sightline.errors import InputError
from sightline.objective import Progress, Views

__all__ = ["LABELS", "Config", "Objective", "views"]

TITLE = "Supervised"
LABELS = True  # the backbone is built with a classifier for the classes of the images


@dataclass(frozen=True)
class Config:
    """Label smoothing, and the share of the image that the view covers."""

    label_smoothing: float = 0.1
    crop: tuple[float, float] = (0.08, 1.0)

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing is {self.label_smoothing}; it must lie in [0, 1)")


def views(config: Config, backbone: Backbone) -> tuple[Policy, ...]:
    """One crop."""
    return augment.supervised(backbone.size, config.crop)


class Objective(nn.Module):
    """Backbone with its classifier."""

    def __init__(self, backbone: nn.Module, config: Config) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config
        classes: Any = backbone.num_classes
        if classes < 2:
            raise InputError(f"Supervised training needs two classes or more, not {classes}; give images with labels")

    @property
    def encoder(self) -> nn.Module:
        """The backbone."""
        return self.backbone

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy and accuracy over the labelled images of all processes."""
        model: Any = self.backbone
        logits = model.get_classifier()(features(model, views.pixels[0])).float()  # (B, K)
        known = views.labels >= 0
        n = distributed.mean(known.sum().to(logits.dtype)).clamp(min=1 / distributed.world())  # per process
        smoothing = self.config.label_smoothing
        loss = F.cross_entropy(logits, views.labels, ignore_index=-1, reduction="sum", label_smoothing=smoothing) / n
        right = (logits.argmax(1) == views.labels) & known
        return loss, {"accuracy": (right.sum() / n).detach()}

    def after_step(self, progress: Progress) -> None:
        """Nothing follows the optimiser's step."""
