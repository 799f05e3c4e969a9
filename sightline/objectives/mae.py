"""MAE: hide most patches, encode the others, and reconstruct the pixels of the hidden ones with a decoder.

    L = 1/|M| Σ_{i ∈ M} ‖pred_i − t_i‖² / P        M hidden patches, t_i the P = p·p·3 pixels of patch i, which have
                                                   mean 0 and variance 1 in each patch when `norm_pix`

A ViT encodes the visible patches alone; a ConvNeXt-V2 convolves over them alone (FCMAE, see `sightline.fcmae`).

Sources: He et al. 2022, "Masked Autoencoders Are Scalable Vision Learners"; Woo et al. 2023, "ConvNeXt V2: Co-designing
and Scaling ConvNets with Masked Autoencoders".

B images, N patches, kept of them visible, T = prefix tokens + patches, D width, E width of the decoder, P pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from sightline import augment, fcmae
from sightline.augment import Policy
from sightline.backbones import (
    Backbone,
    Vit,
    embed,
    encode,
    fix_positions,
    grid_of,
    initialise,
    is_vit,
    patch_of,
    sincos,
    xavier,
)
from sightline.errors import InputError, counted
from sightline.fcmae import encode_visible, is_convnext, stride_of
from sightline.masking import freeze_head, hidden, norm_pix, patchify, random_masking, restore
from sightline.objective import Progress, Views

__all__ = ["Config", "Decoder", "Objective", "views"]

TITLE = "MAE"


@dataclass(frozen=True)
class Config:
    """Share of hidden patches, target, decoder, and the share of the image that the view covers."""

    mask_ratio: float = 0.75  # FCMAE's authors use 0.6
    norm_pix: bool = True
    decoder_width: int = 512
    decoder_depth: int = 8  # of a ViT; FCMAE's decoder is one block
    decoder_heads: int = 16  # of a ViT
    crop: tuple[float, float] = (0.2, 1.0)

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise InputError(f"mask_ratio must lie between 0 and 1, not at {self.mask_ratio}")
        if self.decoder_depth < 1:
            raise InputError(f"decoder_depth is {self.decoder_depth}, but the decoder needs at least one block")
        if self.decoder_width < 1:
            raise InputError(f"decoder_width is {self.decoder_width}, but the decoder needs at least 1")


def views(config: Config, backbone: Backbone) -> tuple[Policy, ...]:
    """One crop, mirrored or not."""
    return augment.reconstruction(backbone.size, config.crop)


class Decoder(nn.Module):
    """Blocks at a width of their own, over the tokens of all patches, that end in the pixels of each patch."""

    def __init__(self, vit: Vit, width: int, depth: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:  # not asked in Config: the decoder of a ConvNeXt has no heads
            raise InputError(f"A decoder_width of {width} cannot be shared by {heads} decoder_heads; choose a divisor")
        self.prefix: int = vit.num_prefix_tokens
        norm: Any = partial(nn.LayerNorm, eps=1e-6)
        self.embed = nn.Linear(vit.embed_dim, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.register_buffer("pos_embed", sincos(vit.patch_embed.grid_size, width, self.prefix))
        self.blocks = nn.Sequential(*(Block(width, heads, qkv_bias=True, norm_layer=norm) for _ in range(depth)))
        self.norm = norm(width)
        self.pred = nn.Linear(width, patch_of(vit) ** 2 * 3)
        nn.init.normal_(self.mask_token, std=0.02)
        xavier(self)

    def describe(self) -> dict[str, int]:
        """What is needed to build it again for its ViT, as decoder.json keeps it."""
        first: Any = self.blocks[0]
        heads = int(first.attn.num_heads)
        return {"format": 1, "width": self.embed.out_features, "depth": len(self.blocks), "heads": heads}

    def forward(
        self, tokens: Tensor, ids_restore: Tensor | None = None
    ) -> Tensor:  # (B, prefix + kept, D) -> (B, N, P)
        """Pixels of every patch; without `ids_restore` the tokens are those of all patches in image order."""
        x = self.embed(tokens)  # (B, prefix + kept, E)
        if ids_restore is not None:
            prefix, visible = x[:, : self.prefix], x[:, self.prefix :]
            x = torch.cat([prefix, restore(visible, self.mask_token, ids_restore)], 1)  # (B, T, E)
        x = self.norm(self.blocks(x + self.pos_embed))
        pixels: Tensor = self.pred(x[:, self.prefix :])
        return pixels


class Objective(nn.Module):
    """Encoder of the visible patches, decoder of all."""

    def __init__(self, backbone: nn.Module, config: Config) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config
        self.decoder: nn.Module
        if is_vit(backbone):
            initialise(backbone)
            if backbone.cls_token is not None:
                nn.init.normal_(backbone.cls_token, std=0.02)
            fix_positions(backbone)
            self.patch = patch_of(backbone)
            self.decoder = Decoder(backbone, config.decoder_width, config.decoder_depth, config.decoder_heads)
        elif is_convnext(backbone):
            self.patch = stride_of(backbone)
            self.decoder = fcmae.Decoder(backbone, config.decoder_width)
        else:
            raise InputError(
                f"MAE leaves out parts of images, which {type(backbone).__name__} cannot; "
                "choose a ViT or a ConvNeXt-V2, or another objective"
            )
        freeze_head(backbone)

    @property
    def encoder(self) -> nn.Module:
        """The backbone."""
        return self.backbone

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean squared error of the pixels of hidden patches."""
        images = views.pixels[0]
        latent, mask, ids_restore = self.forward_encoder(images, views.random(self.patches(images)))
        pred = self.forward_decoder(latent, ids_restore)
        return self.forward_loss(images, pred, mask), {}

    def patches(self, images: Tensor) -> int:
        """Number of patches of an image (units of the total stride of a ConvNeXt), if they can be masked."""
        height, width = images.shape[-2:]
        if height % self.patch or width % self.patch:
            raise InputError(
                f"Images of {height} × {width} pixels cannot be cut into patches of {self.patch}, the stride of this "
                "backbone; choose a size that is a multiple"
            )
        n = (height // self.patch) * (width // self.patch)
        if int(n * (1 - self.config.mask_ratio)) < 1:
            raise InputError(
                f"A mask_ratio of {self.config.mask_ratio} hides all of {counted(n, 'patch')} of {self.patch} pixels; "
                "choose a smaller mask_ratio or smaller patches"
            )
        return n

    def forward_encoder(
        self, images: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, prefix + kept, D), (B, N), (B, N)
        """Tokens of the visible patches, those with the smallest noise (B, N); the mask; ids_restore."""
        ids_keep, ids_restore, mask = random_masking(noise, int(noise.shape[1] * (1 - self.config.mask_ratio)))
        if is_vit(self.backbone):
            latent = encode(self.backbone, embed(self.backbone, images), grid_of(self.backbone, images), ids_keep)
        else:
            assert is_convnext(self.backbone)
            latent = encode_visible(self.backbone, images, ids_keep)
        return latent, mask, ids_restore

    def forward_decoder(self, latent: Tensor, ids_restore: Tensor) -> Tensor:  # (B, N, P)
        """Pixels of every patch."""
        pred: Tensor = self.decoder(latent, ids_restore)
        return pred

    def forward_loss(self, images: Tensor, pred: Tensor, mask: Tensor) -> Tensor:
        """Mean over hidden patches of the mean squared error of their pixels."""
        target = hidden(patchify(images, self.patch), mask)  # (hidden, P)
        if self.config.norm_pix:
            target = norm_pix(target)
        return F.mse_loss(hidden(pred, mask).float(), target)

    def after_step(self, progress: Progress) -> None:
        """Nothing follows the optimiser's step."""
