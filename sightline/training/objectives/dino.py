"""DINO: the student's distribution for any crop of an image must match the teacher's for another, larger one.

With s and t the K outputs of student and teacher, c the centre and V crops, of which the teacher sees the first two,

    P = softmax((t − c) / T_t)
    loss = 1 / 2(V − 1)  Σ_{g = 1, 2} Σ_{v ≠ g}  −P_g · log softmax(s_v / T_s),  mean over images

and after each step c ← 0.9 c + 0.1 mean(t) and θ_t ← m θ_t + (1 − m) θ_s, with m rising along half a cosine to 1.
With `sinkhorn` P is also balanced over the outputs, which DINOv2 does instead of centring (Oquab et al. 2023); the
centre is then but a better start, since the limit of the balancing does not depend on it. Small crops get their
positions as in the official code (`positions.by_scale`).

Source: Caron et al. 2021, "Emerging Properties in Self-Supervised Vision Transformers".

Shapes: B images of this process, V crops, D width, K outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from sightline.core.errors import InputError
from sightline.core.schedules import Progress, cosine
from sightline.encoders.modules.positions import by_scale
from sightline.encoders.modules.projection import Trained, mlp_layers, unit_layer
from sightline.encoders.modules.vit import features, is_vit, patch_of
from sightline.images.augment import policies
from sightline.images.augment.policy import Policy
from sightline.training import objective
from sightline.training.backbones import Backbone, misfit
from sightline.training.collectives import mean
from sightline.training.momentum import embedding_std, follow, momentum_copy, sinkhorn
from sightline.training.objective import Views

TITLE = "DINO"
KIND = "joint-embedding"


@dataclass(frozen=True)
class DinoConfig:
    """Temperatures, momenta, the head and the crops."""

    student_temperature: float = 0.1
    teacher_temperature: float = 0.07
    warmup_temperature: float = 0.04  # the teacher's in the first epoch
    warmup_temperature_epochs: int = 30
    momentum: float = 0.996
    center_momentum: float = 0.9
    sinkhorn: bool = False  # balance the centred teacher over its outputs
    hidden: int = 2048
    bottleneck: int = 256
    out: int = 65536
    batch_norm: bool = False  # in the head
    norm_last_layer: bool = True
    freeze_last_layer: int = 1  # epochs
    multi_crop: bool = True
    local_crops: int = 8
    local_size: int = 0  # pixels; 0: 96/224 of the image, rounded to whole patches
    global_scale: tuple[float, float] = (0.4, 1.0)  # share of the image that a crop covers
    local_scale: tuple[float, float] = (0.05, 0.4)
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)  # brightness, contrast, saturation, hue

    def __post_init__(self) -> None:
        for name in ("student_temperature", "teacher_temperature", "warmup_temperature"):
            if not getattr(self, name) > 0:
                raise InputError(f"DINO needs a {name} above 0, not {getattr(self, name)}")
        for name in ("momentum", "center_momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"DINO needs a {name} in [0, 1], not {getattr(self, name)}")
        for name in ("hidden", "bottleneck", "out"):
            if getattr(self, name) < 1:
                raise InputError(f"DINO's head needs {name} of at least 1, not {getattr(self, name)}")
        for name in ("warmup_temperature_epochs", "freeze_last_layer", "local_crops", "local_size"):
            if getattr(self, name) < 0:
                raise InputError(f"DINO needs {name} of at least 0, not {getattr(self, name)}")


def views(config: DinoConfig, backbone: Backbone) -> tuple[Policy, ...]:
    """Two global crops, and local ones if `multi_crop`."""
    views = policies.dino(
        backbone.size,
        config.local_size or local_size(backbone),
        config.local_crops if config.multi_crop else 0,
        crop=config.global_scale,
        local_crop=config.local_scale,
    )
    return tuple(replace(view, jitter=config.jitter) for view in views)


def local_size(backbone: Backbone) -> int:
    """Pixels of a small crop: the whole number of patches that comes next to 96/224 of the image.

    >>> [local_size(Backbone("vit", size=size, patch=patch)) for size, patch in [(224, 16), (48, 8), (32, 4)]]
    [96, 24, 12]
    """
    patch = backbone.patch_side
    return patch * max(1, round(backbone.size * 96 / 224 / patch))


def check_size(size: int, backbone: nn.Module) -> None:
    """Small crops must consist of whole patches, or be large enough for the strides of a CNN."""
    if is_vit(backbone):
        if size % (patch := patch_of(backbone)):
            raise InputError(f"Small crops of {size} pixels cannot be cut into patches of {patch}; choose a multiple")
    elif why := misfit(backbone, size):
        raise InputError(
            f"Small crops of {size} pixels cannot be used, since {why}; choose another local_size, or "
            "multi_crop=false to go without them"
        )


class Head(nn.Module):
    """Three linear layers to a bottleneck of length one, then K outputs by weights of length one.

    lightly's DINOProjectionHead has the same layers, but a weight normalisation that is deprecated, and that cannot be
    copied after a forward pass.
    """

    def __init__(self, width: int, config: DinoConfig) -> None:
        super().__init__()
        hidden, bottleneck = config.hidden, config.bottleneck

        def layer(inputs: int) -> list[nn.Module]:
            return [nn.Linear(inputs, hidden), *([nn.BatchNorm1d(hidden)] if config.batch_norm else []), nn.GELU()]

        self.mlp = nn.Sequential(*layer(width), *layer(hidden), nn.Linear(hidden, bottleneck))
        for part in self.mlp:
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=0.02)
                nn.init.zeros_(part.bias)
        self.last_layer = weight_norm(nn.Linear(bottleneck, config.out, bias=False))
        length: Any = self.last_layer.parametrizations.weight.original0
        nn.init.ones_(length).requires_grad_(not config.norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:  # (B, D) -> (B, K)
        """Outputs before any softmax."""
        outputs: Tensor = self.last_layer(F.normalize(self.mlp(x), dim=1))
        return outputs


class DinoObjective(objective.Objective):
    """Student and teacher, each a backbone with a head."""

    center: Tensor  # (K,)

    def __init__(self, backbone: nn.Module, config: DinoConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        width: Any = backbone.num_features
        self.head = Head(width, config)
        self.teacher_backbone = momentum_copy(backbone)
        self.teacher_head = momentum_copy(self.head)
        self.register_buffer("center", torch.zeros(config.out))
        self.seen: list[Tensor] = []  # means of the teacher's outputs in this step; empty between steps

    @property
    def encoder(self) -> nn.Module:
        """The teacher's backbone."""
        return self.teacher_backbone

    @property
    def fewest(self) -> int:
        """Two where the head normalises over images, or the teacher is balanced over them."""
        return 2 if self.config.batch_norm or self.config.sinkhorn else 1

    def head_of(self, encoder: nn.Module) -> tuple[Trained, ...]:
        """The head of the teacher or, of a hybrid, which keeps the trained backbone, that of the student."""
        head = self.teacher_head if encoder is self.teacher_backbone else self.head
        projector = mlp_layers(head.mlp.state_dict(), "projector", "gelu")
        return (*projector, unit_layer(head.last_layer.weight))

    def check_views(self, views: Sequence[Policy]) -> None:
        """Small crops, of a size that is given or the default, must fit the backbone."""
        for size in dict.fromkeys(view.size for view in views[2:]):
            check_size(size, self.backbone)

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy between the teacher's distributions of the global crops and the student's of all others."""
        outputs = self.forward_teacher(views)
        student = self.forward_student(views)
        teacher = self.sharpen(outputs, views.progress.epoch)
        loss = cross_entropy(student / self.config.student_temperature, teacher)
        return loss, {"entropy": torch.special.entr(teacher).sum(-1).mean(), "std": embedding_std(outputs)}

    @torch.no_grad()
    def forward_teacher(self, views: Views) -> Tensor:
        """Outputs (2B, K) of the global crops."""
        outputs: Tensor = self.teacher_head(features(self.teacher_backbone, torch.cat(views.pixels[:2]))).float()
        self.seen.append(outputs.mean(0))
        return outputs

    def forward_student(self, views: Views) -> Tensor:
        """Outputs (V, B, K) of all crops; those of one size go through the backbone as one batch."""
        sizes = [crops for crops in (views.pixels[:2], views.pixels[2:]) if crops]
        embedded = torch.cat([features(self.backbone, torch.cat(crops), resize=by_scale) for crops in sizes])
        outputs: Tensor = self.head(embedded).float()
        return outputs.view(len(views.pixels), -1, outputs.shape[1])

    def sharpen(self, outputs: Tensor, epoch: int) -> Tensor:  # (2B, K) -> (2, B, K)
        """The teacher's distributions: centred, sharpened by its temperature, and balanced if wanted."""
        temperature = teacher_temperature(self.config, epoch)
        targets = F.softmax((outputs - self.center) / temperature, dim=1)
        if self.config.sinkhorn:
            targets = sinkhorn(targets)
        return targets.view(2, -1, outputs.shape[1])

    def before_step(self, progress: Progress) -> None:
        """Leave the last layer as it is in the first epochs."""
        if progress.epoch < self.config.freeze_last_layer:
            for parameter in self.head.last_layer.parameters():
                parameter.grad = None

    @torch.no_grad()
    def after_step(self, progress: Progress) -> None:
        # Once per step, however many batches were accumulated for it; as in the official code, the loss of a step sees
        # the centre of the steps before.
        self.center.lerp_(mean(torch.stack(self.seen).mean(0)), 1 - self.config.center_momentum)
        self.seen.clear()
        momentum = cosine(self.config.momentum, 1.0, (progress.step - 1) / progress.steps)  # of the step just made
        follow(self.teacher_backbone, self.backbone, momentum)
        follow(self.teacher_head, self.head, momentum)


def teacher_temperature(config: DinoConfig, epoch: int) -> float:
    """Rises from `warmup_temperature` in the first to `teacher_temperature` in the last epoch of the warm-up.

    >>> [round(teacher_temperature(DinoConfig(warmup_temperature_epochs=4), epoch), 3) for epoch in range(5)]
    [0.04, 0.05, 0.06, 0.07, 0.07]
    """
    if epoch >= config.warmup_temperature_epochs:
        return config.teacher_temperature
    done = epoch / max(1, config.warmup_temperature_epochs - 1)
    return config.warmup_temperature + done * (config.teacher_temperature - config.warmup_temperature)


def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:  # logits (V, B, K), probabilities (2, B, K) -> ()
    """Mean of −P_g · log softmax(s_v) over images and the pairs of a global crop g with another crop v ≠ g."""
    # −P · log softmax(s) = log Σ exp s − P · s since P sums to one. So no log-probabilities of all crops are kept, and
    # all pairs take one matrix product.
    with torch.autocast(student.device.type, enabled=False):
        alike = torch.einsum("gbk,vbk->gv", teacher, student) / student.shape[1]
    entropies = torch.logsumexp(student, -1).mean(1) - alike  # (2, V)
    return (entropies.sum() - entropies.diagonal().sum()) / (entropies.numel() - len(entropies))
