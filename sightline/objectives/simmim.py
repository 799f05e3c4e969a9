"""SimMIM: replace patches by a mask token, encode all, and reconstruct the hidden pixels with a single linear layer.

    L = Σ |x − x̂| · m / (Σ m + 10⁻⁵) / 3        x normalised pixels, m the mask of pixels

Whole units of `mask_unit` pixels are hidden. The backbone keeps its own positions (the authors' ViT has relative ones).

Source: Xie et al. 2022, "SimMIM: A Simple Framework for Masked Image Modeling".

B images, N patches of p × p pixels, U mask units, T = prefix tokens + patches, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sightline.augment import Policy
from sightline.backbones import Backbone, embed, encode, grid_of, is_vit, patch_of
from sightline.errors import InputError
from sightline.masking import enlarge, freeze_head, random_masking
from sightline.objective import Progress, Views

__all__ = ["Config", "Objective", "views"]

TITLE = "SimMIM"


@dataclass(frozen=True)
class Config:
    """Share of hidden units, their side in pixels, and the share of the image that the view covers."""

    mask_ratio: float = 0.6
    mask_unit: int = 32
    crop: tuple[float, float] = (0.67, 1.0)

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise InputError(f"mask_ratio must lie between 0 and 1, not at {self.mask_ratio}")
        if self.mask_unit < 1:
            raise InputError(f"mask_unit is {self.mask_unit}, but a unit has at least one pixel")


def views(config: Config, backbone: Backbone) -> tuple[Policy, ...]:
    """One crop, mirrored or not."""
    return (Policy(backbone.size, config.crop, interpolation="bilinear"),)


class Objective(nn.Module):
    """Backbone, mask token, and a linear head that predicts the pixels of each patch."""

    def __init__(self, backbone: nn.Module, config: Config) -> None:
        super().__init__()
        if not is_vit(backbone):
            raise InputError(f"SimMIM replaces tokens of a ViT, which {type(backbone).__name__} has not; choose a ViT")
        self.backbone = backbone
        self.config = config
        patch = patch_of(backbone)
        check_units(config, patch, backbone.patch_embed.img_size)
        self.mask_token = nn.Parameter(torch.empty(1, 1, backbone.embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        # Channels in the order (c, i, j), as the authors' checkpoints have them.
        self.head = nn.Sequential(nn.Conv2d(backbone.embed_dim, 3 * patch**2, 1), nn.PixelShuffle(patch))
        freeze_head(backbone)

    @property
    def encoder(self) -> nn.Module:
        """The backbone."""
        return self.backbone

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean absolute error of the hidden pixels."""
        images = views.pixels[0]
        unit = self.config.mask_unit
        units = images.shape[-2] // unit, images.shape[-1] // unit
        mask = self.random_mask(views.random(math.prod(units)))
        pred = self.forward_encoder(images, enlarge(mask, units, unit // patch_of(self.backbone)).flatten(1))
        return self.forward_loss(images, pred, enlarge(mask, units, unit).unsqueeze(1)), {}

    def random_mask(self, noise: Tensor) -> Tensor:  # (B, U)
        """Hide the same number of units in each image."""
        units = noise.shape[1]
        return random_masking(noise, units - math.ceil(self.config.mask_ratio * units))[2]

    def forward_encoder(self, images: Tensor, mask: Tensor) -> Tensor:  # (B, 3, h, w), (B, N) -> (B, 3, h, w)
        """Images as the head sees them in the tokens of the masked images."""
        grid = grid_of(self.backbone, images)
        tokens = encode(self.backbone, embed(self.backbone, images, mask, self.mask_token), grid)  # (B, T, D)
        patches = tokens[:, self.backbone.num_prefix_tokens :]
        pred: Tensor = self.head(patches.transpose(1, 2).reshape(len(images), -1, *grid))
        return pred

    def forward_loss(self, images: Tensor, pred: Tensor, mask: Tensor) -> Tensor:  # mask (B, 1, h, w)
        """Absolute error per channel of hidden pixels."""
        error = (images - pred.float()).abs() * mask
        return error.sum() / (mask.sum() + 1e-5) / 3

    def after_step(self, progress: Progress) -> None:
        """Nothing follows the optimiser's step."""


def check_units(config: Config, patch: int, size: tuple[int, int]) -> None:
    """Units must consist of whole patches, images of whole units, and some but not all units must be hidden."""
    fitting = [unit for unit in range(patch, min(size) + 1, patch) if all(side % unit == 0 for side in size)]
    if config.mask_unit not in fitting:
        raise InputError(
            f"A mask_unit of {config.mask_unit} pixels does not fit patches of {patch} and images of "
            f"{size[0]} × {size[1]}; choose from {', '.join(map(str, fitting))}"
        )
    units = math.prod(side // config.mask_unit for side in size)
    if math.ceil(config.mask_ratio * units) == units:
        raise InputError(
            f"A mask_ratio of {config.mask_ratio} hides all {units} units of {config.mask_unit} pixels; "
            "choose a smaller mask_unit or a smaller mask_ratio"
        )
