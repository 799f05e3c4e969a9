"""MoCo-v3: the prediction from one view must find the momentum encoder's key of the other view among all keys.

With q the L2-normalised predictions of the encoder and k the L2-normalised keys of the momentum encoder,

    InfoNCE(q, k) = 2T · 1/N Σᵢ −log  exp(qᵢ·kᵢ / T) / Σⱼ exp(qᵢ·kⱼ / T)
    loss = InfoNCE(q₁, k₂) + InfoNCE(q₂, k₁)

The momentum encoder follows the encoder, θₘ ← m θₘ + (1 − m) θ, with m rising along half a cosine to 1. Without it
(momentum 0) the keys are the encoder's own, without gradient: the SimCLR* of comparisons with MoCo-v3.

Source: Chen et al. 2021, "An Empirical Study of Training Self-Supervised Vision Transformers".

Shapes: B images of this process, W processes, D width, d width of the projections.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightly.models.modules.heads import ProjectionHead
from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.core.processes import rank
from sightline.core.schedules import Progress, cosine
from sightline.encoders.modules.projection import Trained, mlp_layers
from sightline.encoders.modules.vit import Vit, features, fix_positions, is_vit, xavier
from sightline.images.augment import policies
from sightline.images.augment.policy import Policy
from sightline.training import objective
from sightline.training.backbones import Backbone
from sightline.training.collectives import gather
from sightline.training.momentum import embedding_std, follow, momentum_copy
from sightline.training.objective import Views

TITLE = "MoCo-v3"
KIND = "joint-embedding"


@dataclass(frozen=True)
class MocoV3Config:
    """Temperature, momentum at the start, the heads, and the share of the image that a view covers."""

    temperature: float = 0.2
    momentum: float = 0.99
    hidden: int = 4096
    out: int = 256
    stop_grad_patch: bool = True  # a ViT keeps its random patch projection
    crop: tuple[float, float] = (0.08, 1.0)
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)  # brightness, contrast, saturation, hue

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InputError(f"MoCo-v3 needs a temperature above 0, not {self.temperature}")
        if not 0 <= self.momentum <= 1:
            raise InputError(f"MoCo-v3 needs a momentum in [0, 1], not {self.momentum}")
        if min(self.hidden, self.out) < 1:
            raise InputError(f"MoCo-v3's heads need widths of at least 1, not hidden={self.hidden}, out={self.out}")


def views(config: MocoV3Config, backbone: Backbone) -> tuple[Policy, ...]:
    """Two views, the second one with less blur and with solarisation."""
    views = policies.moco_v3(backbone.size, crop=config.crop)
    return tuple(replace(view, jitter=config.jitter) for view in views)


class MocoV3Objective(objective.Objective):
    """Encoder with projector and predictor, momentum encoder with projector, trained by InfoNCE both ways."""

    def __init__(self, backbone: nn.Module, config: MocoV3Config) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        if is_vit(backbone):
            initialise(backbone, config.stop_grad_patch)
        width: Any = backbone.num_features
        vit, hidden, out = is_vit(backbone), config.hidden, config.out
        self.projector = mlp([width, hidden, hidden, out] if vit else [width, hidden, out])
        self.predictor = mlp([out, hidden, out], last_norm=vit)
        if config.momentum:
            self.momentum_backbone = momentum_copy(backbone)
            self.momentum_projector = momentum_copy(self.projector)

    @property
    def encoder(self) -> nn.Module:
        """The trained backbone, not the momentum encoder."""
        return self.backbone

    @property
    def fewest(self) -> int:
        """An image is compared with others, and the heads normalise over them."""
        return 2

    def head_of(self, encoder: nn.Module) -> tuple[Trained, ...]:
        """Projector and predictor; the momentum encoder, which has no predictor, is not kept."""
        projector = mlp_layers(self.projector.layers.state_dict(), "projector", "relu")
        return projector + mlp_layers(self.predictor.layers.state_dict(), "predictor", "relu")

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """InfoNCE of both directions."""
        keys = self.forward_keys(views)  # first: it is faster while no activations are kept for a gradient
        h1, h2 = features_of_each(self.backbone, views.pixels)
        z1, z2 = self.projector(h1), self.projector(h2)
        q1, q2 = self.predictor(z1), self.predictor(z2)
        k1, k2 = keys or (z1.detach(), z2.detach())
        temperature = self.config.temperature
        loss = info_nce(q1, k2, temperature) + info_nce(q2, k1, temperature)
        return loss, {"std": embedding_std(h1)}

    @torch.no_grad()
    def forward_keys(self, views: Views) -> Sequence[Tensor]:
        """The momentum encoder's projections of both views; none without momentum, where the encoder's own serve."""
        if not self.config.momentum:
            return ()
        return [self.momentum_projector(h) for h in features_of_each(self.momentum_backbone, views.pixels)]

    def after_step(self, progress: Progress) -> None:
        if not self.config.momentum:
            return
        # The official code updates in the step, before the keys, by the weights that the step before has left and with
        # the momentum of the step. Nothing happens in between: the update can end the step before, and a checkpoint
        # is then complete. What is lost is the update before the first step, when both encoders are the same.
        momentum = cosine(self.config.momentum, 1.0, progress.fraction)
        follow(self.momentum_backbone, self.backbone, momentum)
        follow(self.momentum_projector, self.projector, momentum)


def features_of_each(backbone: nn.Module, pixels: Sequence[Tensor]) -> Sequence[Tensor]:
    """Features (B, D) of each view (B, 3, h, w)."""
    # Batch normalisation has statistics per view in the official code. A ViT has none, and one batch is faster.
    if is_vit(backbone):
        return features(backbone, torch.cat(tuple(pixels))).chunk(len(pixels))
    return [features(backbone, x) for x in pixels]


def info_nce(q: Tensor, k: Tensor, temperature: float) -> Tensor:  # (B, d), (B, d) -> ()
    """2T times the cross-entropy of finding kᵢ for qᵢ among the keys of all processes.

    >>> q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> round(info_nce(q, q, temperature=0.5).item(), 4)  # log(1 + exp(−1 / 0.5))
    0.1269
    """
    with torch.autocast(q.device.type, enabled=False):
        logits = F.normalize(q.float(), dim=1) @ gather(F.normalize(k.float(), dim=1)).T / temperature  # (B, BW)
        own = torch.arange(len(q), device=q.device) + rank() * len(q)
        return 2 * temperature * F.cross_entropy(logits, own)


def mlp(widths: Sequence[int], last_norm: bool = True) -> ProjectionHead:
    """Linear layers without bias, each with batch normalisation and ReLU; the last one without ReLU and affine."""
    # lightly's MoCoProjectionHead would scale and shift the output.
    blocks: list[tuple[int, int, nn.Module | None, nn.Module | None, bool]] = [
        (before, after, nn.BatchNorm1d(after), nn.ReLU(), False) for before, after in pairwise(widths[:-1])
    ]
    norm = nn.BatchNorm1d(widths[-1], affine=False) if last_norm else None
    return ProjectionHead([*blocks, (widths[-2], widths[-1], norm, None, False)])


@torch.no_grad()
def initialise(vit: Vit, stop_grad_patch: bool) -> None:
    """Xavier weights, queries, keys, values and the patch projection each as a matrix of its own; fixed positions."""
    xavier(vit)
    for name, weight in vit.named_parameters():
        if name.endswith("attn.qkv.weight"):
            for matrix in weight.chunk(3):
                nn.init.xavier_uniform_(matrix)
    nn.init.xavier_uniform_(vit.patch_embed.proj.weight.flatten(1))
    if vit.patch_embed.proj.bias is not None:
        nn.init.zeros_(vit.patch_embed.proj.bias)
    if vit.cls_token is not None:
        nn.init.normal_(vit.cls_token, std=1e-6)
    fix_positions(vit, column_first=False)
    vit.patch_embed.proj.requires_grad_(not stop_grad_patch)
