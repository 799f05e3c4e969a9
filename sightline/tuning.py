"""What fine-tuning minimises: the cross-entropy of a classifier with smoothed and mixed targets, end to end.

    L = −Σ_b Σ_k y_bk · log softmax(f(x_b))_k / Σ_b Σ_k y_bk           x and y mixed as in mixing.py

The learning rate of layer l of 0 … L + 1 is that of the head times layer_decay^(L + 1 − l) (Bao et al. 2022).

B images, K classes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sightline import distributed
from sightline.mixing import draw_mix, mix_pixels, mixed_targets
from sightline.objective import Progress, Views

__all__ = ["Objective", "logits_of", "update_average"]


class Objective(nn.Module):
    """A classifier that is trained, and the average of its weights if that is wanted; see objective.py."""

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
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.layers, self.layer_decay, self.classes = layers, layer_decay, classes
        self.mixup, self.cutmix, self.label_smoothing = mixup, cutmix, label_smoothing
        self.ema, self.seed = ema, seed
        for name, parameter in model.named_parameters():
            if name.endswith("mask_token"):  # it gets no gradient, and several processes would wait for it
                parameter.requires_grad_(False)
        self.average = copy.deepcopy(model).requires_grad_(False) if ema else None

    @property
    def encoder(self) -> nn.Module:
        """The classifier, with averaged weights where there are any."""
        return self.model if self.average is None else self.average

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy over the labelled images of all processes, and how often the larger target is hit."""
        pixels = views.pixels[0]
        mix = draw_mix(self.mixup, self.cutmix, (pixels.shape[2], pixels.shape[3]), self.seed, views.progress.step)
        targets = mixed_targets(views.labels, self.classes, self.label_smoothing, mix)  # (B, K)
        logits = logits_of(self.model(pixels if mix is None else mix_pixels(pixels, mix))).float()  # (B, K)
        mass = distributed.mean(targets.sum()).clamp(min=1e-6)  # per process: B, if all have labels
        loss = -(targets * logits.log_softmax(1)).sum() / mass
        known = targets.sum(1) > 0
        right = ((logits.argmax(1) == targets.argmax(1)) & known).sum()
        n = distributed.mean(known.sum().float()).clamp(min=1 / distributed.world())
        return loss, {"accuracy": (right / n).detach()}

    def after_step(self, progress: Progress) -> None:
        """The average follows."""
        if self.average is not None:
            update_average(self.average, self.model, self.ema)

    def lr_scales(self) -> dict[str, float]:
        """layer_decay^(L + 1 − layer) by the name of the parameter."""
        top = max(self.layers.values(), default=0)
        return {f"model.{name}": self.layer_decay ** (top - layer) for name, layer in self.layers.items()}


def logits_of(output: Any) -> Tensor:
    """Scores of classes (B, K) from what a model says; those of Hugging Face say more."""
    scores: Tensor = getattr(output, "logits", output)
    return scores


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, momentum: float) -> None:
    """average ← momentum · average + (1 − momentum) · model, for weights and for the statistics of norms.

    >>> average, model = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(average.weight, 1.0), nn.init.constant_(model.weight, 2.0)
    >>> update_average(average, model, 0.75)
    >>> average.weight.item()
    1.25
    """
    pairs = list(zip(average.state_dict().values(), model.state_dict().values(), strict=True))
    ours, theirs = zip(*((a, b) for a, b in pairs if a.is_floating_point()), strict=True)
    torch._foreach_lerp_(ours, theirs, 1 - momentum)
    for counter, theirs_ in ((a, b) for a, b in pairs if not a.is_floating_point()):
        counter.copy_(theirs_)
