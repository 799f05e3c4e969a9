"""What fine-tuning minimises: the cross-entropy of a classifier with smoothed and mixed targets.

The learning rate of layer l of 0 … L + 1 is that of the head times layer_decay^(L + 1 − l) (Bao et al. 2022).

B images, K classes.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sightline.core.schedules import Progress
from sightline.training import objective
from sightline.training.momentum import follow
from sightline.training.objective import Views
from sightline.training.soft_labels import Mixing, soft_cross_entropy


class ClassificationObjective(objective.Objective):
    """A classifier that is trained, and the average of its weights if that is wanted; see training/objective.py."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, int],
        classes: int,
        *,
        layer_decay: float = 1.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        label_smoothing: float = 0.0,
        ema: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.layers, self.layer_decay, self.classes = layers, layer_decay, classes
        self.mixing, self.ema = Mixing(mixup, cutmix, label_smoothing), ema
        for name, parameter in model.named_parameters():
            if name.endswith("mask_token"):  # it gets no gradient, and several processes would wait for it
                parameter.requires_grad_(False)
        self.average = copy.deepcopy(model).requires_grad_(False) if ema else None

    @property
    def encoder(self) -> nn.Module:
        """The classifier, with averaged weights where there are any."""
        return self.model if self.average is None else self.average

    @property
    def pairs(self) -> bool:
        return self.mixing.pairs

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the mixed images with their targets."""
        pixels, targets = self.mixing.of(views, self.classes)
        return soft_cross_entropy(logits_of(self.model(pixels)).float(), targets)

    def after_step(self, progress: Progress) -> None:
        if self.average is not None:
            follow(self.average, self.model, self.ema, buffers=True)

    def lr_scales(self) -> dict[str, float]:
        """layer_decay^(L + 1 − layer) by the name of the parameter."""
        return decayed(self.layers, self.layer_decay, "model.")


def decayed(layers: Mapping[str, int], decay: float, prefix: str) -> dict[str, float]:
    """By what learning rates are multiplied: 1 in the last layer, and `decay` times as much in each one before it.

    >>> decayed({"embed": 0, "block": 1, "norm": 2}, 0.5, "model.")
    {'model.embed': 0.25, 'model.block': 0.5, 'model.norm': 1.0}
    """
    top = max(layers.values(), default=0)
    return {f"{prefix}{name}": decay ** (top - layer) for name, layer in layers.items()}


def logits_of(output: Any) -> Tensor:
    """Scores of classes (B, K) from what a model says; those of Hugging Face say more."""
    scores: Tensor = getattr(output, "logits", output)
    return scores
