"""Learning from labels that are smoothed and mixed: what a step sees, and its loss."""

from typing import NamedTuple

from torch import Tensor

from sightline.core import processes
from sightline.core.errors import InputError
from sightline.images.augment.mixup import draw_mix, mix_pixels, mixed_targets
from sightline.training import collectives
from sightline.training.objective import Views


class Mixing(NamedTuple):
    """How images and labels are mixed: α of both beta distributions (0: without), and the smoothing ε."""

    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0

    def check(self) -> None:
        """Values that cannot be are an InputError."""
        for key, value in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if not value >= 0:
                raise InputError(f"{key} is {value}, but it cannot be negative")
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing is {self.label_smoothing}; it must be in [0, 1)")

    @property
    def pairs(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def of(self, views: Views, classes: int) -> tuple[Tensor, Tensor]:
        """The images (B, 3, h, w) of a step as they are mixed in it, and their targets (B, K)."""
        pixels = views.pixels[0]
        mix = draw_mix(self.mixup, self.cutmix, (pixels.shape[2], pixels.shape[3]), views.seed, views.progress.step)
        targets = mixed_targets(views.labels, classes, self.label_smoothing, mix)
        return (pixels if mix is None else mix_pixels(pixels, mix)), targets


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # (B, K), (B, K)
    """Mean cross-entropy over the labelled images of all processes, and how often the larger target is hit.

    >>> import torch
    >>> loss, scalars = soft_cross_entropy(torch.zeros(2, 4), torch.eye(4)[:2])
    >>> round(loss.item(), 4), scalars["accuracy"].item()  # log 4; the first one is told
    (1.3863, 0.5)
    """
    mass = collectives.mean(targets.sum()).clamp(min=1e-6)  # per process: B, if all have labels
    loss = -(targets * logits.log_softmax(1)).sum() / mass
    known = targets.sum(1) > 0
    right = ((logits.argmax(1) == targets.argmax(1)) & known).sum()
    n = collectives.mean(known.sum().float()).clamp(min=1 / processes.world())
    return loss, {"accuracy": (right / n).detach()}
