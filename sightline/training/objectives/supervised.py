"""Supervised classification: cross-entropy of the backbone's own classifier, the reference of the papers.

    L = −1/n Σ_b log softmax(classifier(f(x_b)))[label_b]        over the n images that have a label

or, with label smoothing, mixup and CutMix, the cross-entropy with soft targets of images/augment/mixup.py.

Source of the augmentation: Touvron et al. 2021, "Training data-efficient image transformers & distillation through
attention", without its repeated augmentation.

B images, K classes.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.encoders.modules.vit import features
from sightline.images.augment import policies
from sightline.images.augment.policy import Policy
from sightline.training import objective
from sightline.training.backbones import Backbone
from sightline.training.objective import Views
from sightline.training.soft_labels import Mixing, soft_cross_entropy

TITLE = "Supervised"
KIND = "supervised"
LABELS = True  # the backbone is built with a classifier for the classes of the images


@dataclass(frozen=True)
class SupervisedConfig:
    """Label smoothing, the share of the image that the view covers, and how images are changed and mixed."""

    label_smoothing: float = 0.1
    crop: tuple[float, float] = (0.08, 1.0)
    randaugment: tuple[float, float] = (0.0, 0.0)  # magnitude and its standard deviation; magnitude 0: without
    erase: float = 0.0  # probability that a rectangle of an image becomes noise
    mixup: float = 0.0  # α of the beta distribution; 0: without
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        self.mixing.check()

    @property
    def mixing(self) -> Mixing:
        """Those of its settings that make soft targets."""
        return Mixing(self.mixup, self.cutmix, self.label_smoothing)


def views(config: SupervisedConfig, backbone: Backbone) -> tuple[Policy, ...]:
    """One crop, by RandAugment and with a part erased where that is wanted."""
    (view,) = policies.supervised(backbone.size, config.crop)
    return (replace(view, randaugment=config.randaugment, erase=config.erase),)


class SupervisedObjective(objective.Objective):
    """Backbone with its classifier."""

    def __init__(self, backbone: nn.Module, config: SupervisedConfig) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config
        classes: Any = backbone.num_classes
        if classes < 2:
            raise InputError(f"Supervised training needs two classes or more, not {classes}; give images with labels")

    @property
    def encoder(self) -> nn.Module:
        return self.backbone

    @property
    def pairs(self) -> bool:
        """Whether images are mixed two by two."""
        return self.config.mixing.pairs

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy and accuracy over the labelled images of all processes."""
        model: Any = self.backbone
        pixels, targets = self.config.mixing.of(views, model.num_classes)
        return soft_cross_entropy(model.get_classifier()(features(model, pixels)).float(), targets)
