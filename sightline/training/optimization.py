"""How weights are moved: optimisers, the schedules of learning rate and weight decay, and what is not decayed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sightline.core.errors import InputError, nearest
from sightline.core.lars import LARS
from sightline.core.schedules import Progress, cosine, linear

OPTIMIZERS = ("adamw", "lars", "sgd")
SCHEDULES = ("cosine", "cosine_from_start", "linear", "multistep", "constant")
# Parameters of two or more axes that are not decayed either, by the words of timm, torchvision and Hugging Face.
TOKENS = {
    "cls_token",
    "class_token",
    "dist_token",
    "distillation_token",
    "reg_token",
    "register_tokens",
    "mask_token",
    "pos_embed",
    "pos_embedding",
    "position_embedding",
    "position_embeddings",
    "prototypes",
}


@dataclass(frozen=True)
class Optimization:
    """Settings of the optimiser and its schedules.

    >>> Optimization(base_lr=1.5e-4, batch=4096).peak_lr
    0.0024
    >>> Optimization(base_lr=1e-4, base_batch=512, batch=1024).peak_lr
    0.0002
    """

    batch: int = 256  # images per step, over all processes and accumulated forwards
    epochs: float = 100
    optimizer: str = "adamw"
    base_lr: float = 1.5e-4  # the learning rate is base_lr · batch / base_batch …
    base_batch: int = 256  # images that base_lr counts for: 256 in most papers, 512 in DeiT and SimMIM
    lr: float = 0.0  # … unless it is given itself
    min_lr: float = 0.0
    warmup_epochs: float = 0.0  # linear, from warmup_lr
    warmup_lr: float = 0.0
    schedule: str = "cosine"  # which begins after the warm-up; cosine_from_start: with the first step
    stretch: float = 1.0  # cosines and lines are laid out for so many times the training, which ends before they do
    milestones: tuple[float, ...] = (0.875,)  # of `multistep`: shares of the training after which lr · 0.1
    weight_decay: float = 0.05
    weight_decay_end: float = -1.0  # a cosine from weight_decay to here; −1: constant
    betas: tuple[float, float] = (0.9, 0.95)  # of adamw
    sgd_momentum: float = 0.9  # of sgd and lars
    clip: float = 0.0  # largest norm of the gradient; 0: any
    accumulate: int = 1  # forwards and backwards per step; each contrasts its own part of the batch only

    def __post_init__(self) -> None:
        for key, value, choices in (("optimizer", self.optimizer, OPTIMIZERS), ("schedule", self.schedule, SCHEDULES)):
            if value not in choices:
                raise InputError(f"There is no {key} {value!r}{nearest(value, choices)}")
        for key in ("batch", "base_batch", "accumulate"):
            if getattr(self, key) < 1:
                raise InputError(f"{key} is {getattr(self, key)}, but at least 1 is needed")
        if not 0 < self.epochs < math.inf:
            raise InputError(f"epochs is {self.epochs}, but a finite number above 0 is needed")
        if not 1 <= self.stretch < math.inf:
            raise InputError(
                f"stretch is {self.stretch}, but a schedule is at least as long as the training: 1 or more"
            )
        for key in ("base_lr", "lr", "min_lr", "warmup_epochs", "warmup_lr", "weight_decay", "clip"):
            if not getattr(self, key) >= 0:
                raise InputError(f"{key} is {getattr(self, key)}, but it cannot be negative")

    @property
    def peak_lr(self) -> float:
        """The learning rate after warm-up: the linear scaling rule of large batches (Goyal et al. 2017)."""
        return self.lr or self.base_lr * self.batch / self.base_batch


def make_optimizer(
    module: nn.Module, settings: Optimization, scales: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """The optimiser with groups of parameters: those that are decayed, then biases, norms and tokens, which are not.

    `scales` multiplies the learning rate of the parameters that it names; those of one scale are two groups.
    """
    scales = scales or {}
    parts: dict[float, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            alone = parameter.ndim <= 1 or not TOKENS.isdisjoint(name.split("."))
            parts.setdefault(scales.get(name, 1.0), ([], []))[alone].append(parameter)
    groups = [
        {"params": some, "scale": scale, "decays": decays, "weight_decay": settings.weight_decay * decays}
        for scale, both in sorted(parts.items())
        for some, decays in zip(both, (True, False), strict=True)
    ]
    lr = settings.peak_lr
    match settings.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=settings.betas, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=settings.sgd_momentum, fused=True)
    return LARS(groups, lr=lr, momentum=settings.sgd_momentum)


def schedule(settings: Optimization, progress: Progress) -> tuple[float, float]:
    """Learning rate and weight decay of the next step.

    >>> settings = Optimization(lr=1.0, epochs=10, warmup_epochs=2)
    >>> [round(schedule(settings, Progress(step, 100, 10))[0], 3) for step in (0, 10, 20, 60, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    warmup = settings.warmup_epochs * progress.per_epoch
    peak = settings.peak_lr
    first, low = min(settings.warmup_lr, peak), min(settings.min_lr, peak)
    after = (progress.step - warmup) / max(1.0, settings.stretch * progress.steps - warmup)
    if settings.schedule == "linear":  # from the first step on; the warm-up is a share of it, as in mmsegmentation
        peak = linear(peak, low, progress.fraction / settings.stretch)
    if progress.step < warmup:
        lr = first + (peak - first) * progress.step / warmup
    elif settings.schedule == "cosine":
        lr = cosine(peak, low, after)
    elif settings.schedule == "cosine_from_start":  # as timm's scheduler without `warmup_prefix`
        lr = cosine(peak, low, progress.fraction / settings.stretch)
    elif settings.schedule == "multistep":
        lr = peak * 0.1 ** sum(progress.fraction >= share for share in settings.milestones)
    else:
        lr = peak
    end = settings.weight_decay_end
    share = progress.fraction / settings.stretch
    decay = settings.weight_decay if end < 0 else cosine(settings.weight_decay, end, share)
    return lr, decay


def set_schedule(groups: Iterable[dict[str, Any]], lr: float, weight_decay: float) -> None:
    """Give the optimiser its numbers for the next step: each group has its scale, and may be decayed or not."""
    for group in groups:
        group["lr"] = lr * group["scale"]
        if group["decays"]:
            group["weight_decay"] = weight_decay
