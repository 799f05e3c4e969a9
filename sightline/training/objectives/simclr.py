"""SimCLR: two views of an image must find each other among all views of the batch.

With z the L2-normalised projections of the 2N views of N images, and z⁺ᵢ that of the other view of i's image,

    NT-Xent = 1/2N Σᵢ −log  exp(zᵢ·z⁺ᵢ / T) / Σ_{j ≠ i} exp(zᵢ·zⱼ / T)

Source: Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual Representations"; three layers in the
head: Chen et al. 2020, "Big Self-Supervised Models are Strong Semi-Supervised Learners".

Shapes: B images of this process, W processes, D width, d width of the projections.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from lightly.models.modules.heads import SimCLRProjectionHead
from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.core.processes import rank
from sightline.encoders.modules.projection import Trained, mlp_layers
from sightline.encoders.modules.vit import features
from sightline.images.augment import policies
from sightline.images.augment.policy import Policy
from sightline.training import objective
from sightline.training.backbones import Backbone
from sightline.training.collectives import gather
from sightline.training.momentum import embedding_std
from sightline.training.objective import Views

TITLE = "SimCLR"
KIND = "joint-embedding"


@dataclass(frozen=True)
class SimclrConfig:
    """Temperature, the projection head, the share of the image that a view covers, and its colours and blur."""

    temperature: float = 0.1
    layers: int = 2
    hidden: int = 2048
    out: int = 128
    crop: tuple[float, float] = (0.08, 1.0)
    jitter: tuple[float, float, float, float] = (0.8, 0.8, 0.8, 0.2)  # brightness, contrast, saturation, hue
    blur: float = 0.5  # probability; 0: without

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InputError(f"SimCLR needs a temperature above 0, not {self.temperature}")
        if self.layers < 2:
            raise InputError(f"SimCLR's projection head has 2 or 3 layers, not {self.layers}")
        if min(self.hidden, self.out) < 1:
            raise InputError(f"SimCLR's head needs widths of at least 1, not hidden={self.hidden}, out={self.out}")


def views(config: SimclrConfig, backbone: Backbone) -> tuple[Policy, ...]:
    views = policies.simclr(backbone.size, crop=config.crop)
    return tuple(replace(view, jitter=config.jitter, blur=config.blur) for view in views)


class SimclrObjective(objective.Objective):
    """Encoder and projection head, trained by NT-Xent."""

    def __init__(self, backbone: nn.Module, config: SimclrConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        width: Any = backbone.num_features
        self.projector = SimCLRProjectionHead(width, config.hidden, config.out, config.layers)

    @property
    def encoder(self) -> nn.Module:
        return self.backbone

    @property
    def fewest(self) -> int:
        """An image is compared with others."""
        return 2

    def head_of(self, encoder: nn.Module) -> tuple[Trained, ...]:
        """The projector."""
        return mlp_layers(self.projector.layers.state_dict(), "projector", "relu")

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """NT-Xent of the two views."""
        # One batch of 2B is faster than two of B. Batch normalisation sees both views together, as it does officially.
        h = features(self.backbone, torch.cat(views.pixels))  # (2B, D)
        loss, accuracy = nt_xent(self.projector(h), self.config.temperature)
        return loss, {"accuracy": accuracy, "std": embedding_std(h)}


def nt_xent(z: Tensor, temperature: float) -> tuple[Tensor, Tensor]:  # (2B, d) -> (), ()
    """Loss of projections, first views and then second ones, and the share of them that find their partner.

    >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    >>> [round(x.item(), 4) for x in nt_xent(z, temperature=0.5)]  # log(1 + 2 exp(−1 / 0.5))
    [0.2395, 1.0]
    """
    # One matrix product for all four pairs of views; lightly's NTXentLoss takes four and picks by boolean masks.
    with torch.autocast(z.device.type, enabled=False):
        z = F.normalize(z.float(), dim=1)
        logits = z @ gather(z).T / temperature  # (2B, 2BW)
        rows = torch.arange(len(z), device=z.device)
        own = rows + rank() * len(z)
        logits[rows, own] = -torch.inf
        partner = own.roll(len(z) // 2)
        return F.cross_entropy(logits, partner), (logits.detach().argmax(1) == partner).float().mean()
