"""MSN: masked and small views of an image must fall to the same prototypes as the whole image does.

With z the L2-normalised projection of an anchor view, z⁺ that of the target view by the target encoder, and Q the K
L2-normalised prototypes,

    p = softmax(Q z / τ),   p⁺ = softmax(Q z⁺ / τT)   (sharpened: softmax(x / τ)^(1/T), normalised)
    loss = mean over anchors of −p⁺ · log p  +  λ (log K − H(mean p))  +  μ mean H(p)

With `sinkhorn` the targets p⁺ are balanced over the prototypes. The target encoder follows the encoder after each step,
θ⁺ ← m θ⁺ + (1 − m) θ, with m rising along half a cosine to 1, or linearly (in the official code to 0.9992).

Source: Assran et al. 2022, "Masked Siamese Networks for Label-Efficient Learning".

Shapes: B images of this process, V anchor views, N patches, D width, d width of the projections, K prototypes.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from lightly.models.modules.heads import MSNProjectionHead
from torch import Tensor, nn

from sightline.core.errors import InputError, nearest
from sightline.core.schedules import Progress, cosine, linear
from sightline.encoders.modules.masking import random_masking
from sightline.encoders.modules.positions import by_size
from sightline.encoders.modules.projection import Trained, mlp_layers, unit_layer
from sightline.encoders.modules.vit import Vit, features, grid_of, is_vit
from sightline.images.augment import policies
from sightline.images.augment.policy import Policy
from sightline.training import objective
from sightline.training.backbones import Backbone
from sightline.training.collectives import mean
from sightline.training.momentum import embedding_std, follow, momentum_copy, sinkhorn
from sightline.training.objective import Views
from sightline.training.objectives.dino import check_size, local_size

TITLE = "MSN"
KIND = "joint-embedding"
MOMENTUM_SCHEDULES = {"cosine": cosine, "linear": linear}


@dataclass(frozen=True)
class MsnConfig:
    """Views and masks, prototypes and temperatures, weights of the parts of the loss, momentum and head."""

    rand_views: int = 1  # masked anchors of full size
    focal_views: int = 10  # small anchors, not masked
    mask_ratio: float = 0.3
    focal_size: int = 0  # pixels; 0: 96/224 of the image, rounded to whole patches
    crop: tuple[float, float] = (0.3, 1.0)
    focal_crop: tuple[float, float] = (0.05, 0.3)
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)  # brightness, contrast, saturation, hue
    prototypes: int = 1024
    temperature: float = 0.1
    sharpening: float = 0.25
    sinkhorn: bool = True
    me_max: float = 1.0
    entropy: float = 0.0
    momentum: float = 0.996
    momentum_end: float = 1.0
    momentum_schedule: str = "cosine"  # or "linear"
    hidden: int = 2048
    out: int = 256

    def __post_init__(self) -> None:
        if min(self.rand_views, self.focal_views) < 0 or self.rand_views + self.focal_views == 0:
            raise InputError(
                f"MSN needs at least one anchor view, not rand_views={self.rand_views}, focal_views={self.focal_views}"
            )
        if not 0 <= self.mask_ratio < 1:
            raise InputError(f"MSN needs a mask_ratio in [0, 1), not {self.mask_ratio}")
        for name in ("temperature", "sharpening"):
            if not getattr(self, name) > 0:
                raise InputError(f"MSN needs a {name} above 0, not {getattr(self, name)}")
        for name in ("momentum", "momentum_end"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"MSN needs a {name} in [0, 1], not {getattr(self, name)}")
        if self.momentum_schedule not in MOMENTUM_SCHEDULES:
            raise InputError(
                f"There is no momentum_schedule {self.momentum_schedule!r}"
                f"{nearest(self.momentum_schedule, MOMENTUM_SCHEDULES)}"
            )
        for name in ("prototypes", "hidden", "out"):
            if getattr(self, name) < 1:
                raise InputError(f"MSN needs {name} of at least 1, not {getattr(self, name)}")


def views(config: MsnConfig, backbone: Backbone) -> tuple[Policy, ...]:
    """The target view, the anchors of full size, and the small ones."""
    strong, _ = policies.simclr(backbone.size, crop=config.crop)
    full = replace(strong, jitter=config.jitter, interpolation="bilinear")
    focal = replace(full, size=config.focal_size or local_size(backbone), crop=config.focal_crop)
    return (*[full] * (1 + config.rand_views), *[focal] * config.focal_views)


class MsnObjective(objective.Objective):
    """Encoder and target encoder, each a ViT with a projection head, and prototypes."""

    backbone: Vit

    def __init__(self, backbone: nn.Module, config: MsnConfig) -> None:
        super().__init__()
        if not is_vit(backbone):
            raise InputError(f"MSN leaves out patches, so it needs a ViT, not {type(backbone).__name__}")
        self.config = config
        self.backbone = backbone
        check_size(config.focal_size, backbone)
        self.head = MSNProjectionHead(backbone.num_features, config.hidden, config.out)
        for layer in self.head.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
        self.prototypes = nn.Parameter(torch.empty(config.prototypes, config.out))
        nn.init.uniform_(self.prototypes, -(config.out**-0.5), config.out**-0.5)
        self.target_backbone = momentum_copy(backbone)
        self.target_head = momentum_copy(self.head)

    @property
    def encoder(self) -> nn.Module:
        """The target encoder's backbone."""
        return self.target_backbone

    @property
    def fewest(self) -> int:
        """The head normalises over images."""
        return 2

    def head_of(self, encoder: nn.Module) -> tuple[Trained, ...]:
        """The head of the target encoder or, of a hybrid, which keeps the trained backbone, of that; the prototypes."""
        head = self.target_head if encoder is self.target_backbone else self.head
        projector = mlp_layers(head.layers.state_dict(), "projector", "gelu")
        return (*projector, unit_layer(F.normalize(self.prototypes, dim=1)))

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the anchors with the targets, and mean-entropy maximisation."""
        targets = self.forward_targets(views)
        anchors, spread_out = self.forward_anchors(views)
        loss, scalars = self.forward_loss(anchors, targets)
        return loss, {**scalars, "std": spread_out}

    @torch.no_grad()
    def forward_targets(self, views: Views) -> Tensor:
        """Projections (B, d) of the target view, not masked, by the target encoder."""
        projections: Tensor = self.target_head(features(self.target_backbone, views.pixels[0]))
        return projections

    def forward_anchors(self, views: Views) -> tuple[Tensor, Tensor]:
        """Projections (VB, d) of the anchor views, and how far their features are from collapse.

        Views of one size are one batch, also for batch normalisation.
        """
        first_focal = 1 + self.config.rand_views
        rand, focal = views.pixels[1:first_focal], views.pixels[first_focal:]
        embedded = []
        if rand:
            N = math.prod(grid_of(self.backbone, rand[0]))
            noise = torch.cat([views.random(N, purpose) for purpose in range(1, first_focal)])  # a mask for each view
            ids_keep, _, _ = random_masking(noise, int(N * (1 - self.config.mask_ratio)))
            embedded.append(features(self.backbone, torch.cat(rand), ids_keep))
        if focal:
            embedded.append(features(self.backbone, torch.cat(focal), resize=by_size))
        return torch.cat([self.head(x) for x in embedded]), embedding_std(torch.cat(embedded))

    def forward_loss(self, anchors: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # (VB, d), (B, d)
        """The three parts of the loss."""
        config = self.config
        # In logarithms, where lightly's MSNLoss takes powers of probabilities that may be 0; its mean entropy is that
        # of one process only.
        with torch.autocast(anchors.device.type, enabled=False):
            prototypes = F.normalize(self.prototypes.float(), dim=1)
            log_p = F.log_softmax(F.normalize(anchors.float(), dim=1) @ prototypes.T / config.temperature, dim=1)
            with torch.no_grad():
                similarity = F.normalize(targets.float(), dim=1) @ prototypes.T / config.temperature
                p_target = F.softmax(similarity / config.sharpening, dim=1)  # (B, K)
                if config.sinkhorn:
                    p_target = sinkhorn(p_target)
            p = log_p.exp()  # (VB, K)
            cross_entropy = -(p_target * log_p.view(-1, *p_target.shape)).sum(-1).mean()
            me_max = math.log(len(prototypes)) - mean_entropy(p)
            loss = cross_entropy + config.me_max * me_max
            if config.entropy:
                loss = loss - config.entropy * (p * log_p).sum(1).mean()
        return loss, {"cross_entropy": cross_entropy.detach(), "me_max": me_max.detach()}

    def after_step(self, progress: Progress) -> None:
        rise, config = MOMENTUM_SCHEDULES[self.config.momentum_schedule], self.config
        momentum = rise(config.momentum, config.momentum_end, (progress.step - 1) / progress.steps)  # of this step
        follow(self.target_backbone, self.backbone, momentum)
        follow(self.target_head, self.head, momentum)


def mean_entropy(p: Tensor) -> Tensor:  # (VB, K) -> ()
    """Entropy of the mean distribution over the anchors of all processes; log K if all prototypes are used alike."""
    average = mean(p.mean(0)).clamp_min(torch.finfo(p.dtype).tiny)  # the entropy has no gradient at 0
    entropy: Tensor = torch.special.entr(average).sum()
    return entropy
