"""MAE: hide most patches, encode the others, and reconstruct the pixels of the hidden ones with a decoder.

    L = 1/|M| Σ_{i ∈ M} ‖pred_i − t_i‖² / P        M hidden patches, t_i the P = p·p·3 pixels of patch i, which have
                                                   mean 0 and variance 1 in each patch when `norm_pix`

A ViT encodes the visible patches alone; a ConvNeXt-V2 convolves over them alone (FCMAE, see `sightline.fcmae`).

Sources: He et al. 2022, "Masked Autoencoders Are Scalable Vision Learners"; Woo et al. 2023, "ConvNeXt V2: Co-designing
and Scaling ConvNets with Masked Autoencoders".

B images, N patches, kept of them visible, T = prefix tokens + patches, D width, E width of the decoder, P pixels.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from sightline.core.errors import InputError, counted
from sightline.encoders.modules.mae_decoder import Decoder
from sightline.encoders.modules.masking import hidden, norm_pix, patchify, random_masking
from sightline.encoders.modules.vit import embed, encode, fix_positions, grid_of, initialise, is_vit, patch_of
from sightline.images.augment import policies
from sightline.images.augment.policy import Policy
from sightline.training import objective
from sightline.training.backbones import Backbone, freeze_head
from sightline.training.objective import Views
from sightline.training.objectives.mae import fcmae
from sightline.training.objectives.mae.fcmae import encode_visible, is_convnext, stride_of

TITLE = "MAE"
KIND = "reconstructive"


@dataclass(frozen=True)
class MaeConfig:
    """Share of hidden patches, target, decoder, and the share of the image that the view covers."""

    mask_ratio: float = 0.75  # FCMAE's authors use 0.6
    norm_pix: bool = True
    decoder_width: int = 512
    decoder_depth: int = 8  # of a ViT; FCMAE's decoder is one block
    decoder_heads: int = 16  # of a ViT
    grn_over_batch: bool = False  # of a ConvNeXt-V2: norms over the visible sites of all images, as FCMAE's authors do
    crop: tuple[float, float] = (0.2, 1.0)

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise InputError(f"mask_ratio must be between 0 and 1, not {self.mask_ratio}")
        if self.decoder_depth < 1:
            raise InputError(f"decoder_depth is {self.decoder_depth}, but the decoder needs at least one block")
        if self.decoder_width < 1:
            raise InputError(f"decoder_width is {self.decoder_width}, but the decoder needs at least 1")


def views(config: MaeConfig, backbone: Backbone) -> tuple[Policy, ...]:
    return policies.reconstruction(backbone.size, config.crop)


class MaeObjective(objective.Objective):
    """Encoder of the visible patches, decoder of all."""

    def __init__(self, backbone: nn.Module, config: MaeConfig) -> None:
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
            self.decoder = fcmae.FcmaeDecoder(backbone, config.decoder_width)
        else:
            raise InputError(
                f"MAE leaves out parts of images, which {type(backbone).__name__} cannot; "
                "choose a ViT or a ConvNeXt-V2, or another objective"
            )
        freeze_head(backbone)

    @property
    def encoder(self) -> nn.Module:
        return self.backbone

    def saved_decoder(self) -> nn.Module:
        """The decoder of all patches."""
        return self.decoder

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
            latent = encode_visible(self.backbone, images, ids_keep, self.config.grn_over_batch)
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
