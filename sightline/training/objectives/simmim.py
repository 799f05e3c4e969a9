"""SimMIM: replace patches by a mask token, encode all, and reconstruct the hidden pixels with a single linear layer.

    L = Σ |x − x̂| · m / (Σ m + 10⁻⁵) / 3        x normalised pixels, m the mask of pixels

With `norm_target` = k the target is x less the mean of the k × k pixels around it, divided by their standard deviation
(of each channel by itself, as far as they lie in the image), as the authors' later code has it for Swin V2.

Whole units of `mask_unit` pixels are hidden. The authors' ViT is `backbone=beit`: relative positions that all blocks
share, layer scale, no absolute positions.

Source: Xie et al. 2022, "SimMIM: A Simple Framework for Masked Image Modeling".

B images, N patches of p × p pixels, U mask units, T = prefix tokens + patches, D width.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sightline.core.errors import InputError, counted
from sightline.encoders.modules.masking import enlarge, hidden, patchify, random_masking
from sightline.encoders.modules.vit import embed, encode, grid_of, is_vit, patch_of
from sightline.images.augment.policy import Policy
from sightline.training import objective
from sightline.training.backbones import Backbone, freeze_head
from sightline.training.objective import Views

TITLE = "SimMIM"
KIND = "reconstructive"


@dataclass(frozen=True)
class SimmimConfig:
    """Share of hidden units, their side in pixels, the target, and the share of the image that the view covers."""

    mask_ratio: float = 0.6
    mask_unit: int = 32
    norm_target: int = 0  # odd: side in pixels of the neighbourhood that a pixel is compared with; 0: plain pixels
    crop: tuple[float, float] = (0.67, 1.0)

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise InputError(f"mask_ratio must be between 0 and 1, not {self.mask_ratio}")
        if self.mask_unit < 1:
            raise InputError(f"mask_unit is {self.mask_unit}, but a unit has at least one pixel")
        if self.norm_target and (self.norm_target < 3 or self.norm_target % 2 == 0):
            raise InputError(f"norm_target is {self.norm_target}; it must be odd and at least 3, or 0 for plain pixels")


def views(config: SimmimConfig, backbone: Backbone) -> tuple[Policy, ...]:
    return (Policy(backbone.size, config.crop, interpolation="bilinear"),)


class SimmimObjective(objective.Objective):
    """Backbone, mask token, and a linear head that predicts the pixels of each hidden patch."""

    def __init__(self, backbone: nn.Module, config: SimmimConfig) -> None:
        super().__init__()
        if not is_vit(backbone):
            raise InputError(f"SimMIM replaces tokens of a ViT, but {type(backbone).__name__} is not one; choose a ViT")
        self.backbone = backbone
        self.config = config
        patch = patch_of(backbone)
        check_units(config, patch, backbone.patch_embed.img_size)
        self.mask_token = nn.Parameter(torch.empty(1, 1, backbone.embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        self.head = nn.Linear(backbone.embed_dim, 3 * patch**2)
        freeze_head(backbone)

    @property
    def encoder(self) -> nn.Module:
        return self.backbone

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean absolute error of the hidden pixels."""
        images = views.pixels[0]
        unit = self.config.mask_unit
        units = images.shape[-2] // unit, images.shape[-1] // unit
        mask = enlarge(self.random_mask(views.random(math.prod(units))), units, unit // patch_of(self.backbone))
        pred = self.forward_encoder(images, mask.flatten(1))
        return self.forward_loss(images, pred, mask.flatten(1)), {}

    def random_mask(self, noise: Tensor) -> Tensor:  # (B, U)
        """Hide the same number of units in each image."""
        units = noise.shape[1]
        return random_masking(noise, units - math.ceil(self.config.mask_ratio * units))[2]

    def forward_encoder(self, images: Tensor, mask: Tensor) -> Tensor:  # (B, 3, h, w), (B, N) -> (hidden, p·p·3)
        """Pixels of the hidden patches, as the head sees them in the tokens of the masked images."""
        tokens = embed(self.backbone, images, mask, self.mask_token)
        tokens = encode(self.backbone, tokens, grid_of(self.backbone, images))  # (B, T, D)
        pred: Tensor = self.head(hidden(tokens[:, self.backbone.num_prefix_tokens :], mask))
        return pred

    def forward_loss(self, images: Tensor, pred: Tensor, mask: Tensor) -> Tensor:
        """Absolute error per channel of hidden pixels."""
        target = norm_target(images, self.config.norm_target) if self.config.norm_target else images
        target = hidden(patchify(target, patch_of(self.backbone)), mask)  # (hidden, p·p·3)
        return F.l1_loss(pred.float(), target, reduction="sum") / (target.numel() / 3 + 1e-5) / 3


def norm_target(images: Tensor, side: int) -> Tensor:  # (B, 3, h, w) -> (B, 3, h, w)
    """Pixels less the mean of the side × side pixels around them, divided by √(their variance + 10⁻⁶).

    >>> norm_target(torch.tensor([[[[0.0, 3.0, 0.0]]]]), side=3).round(decimals=3)
    tensor([[[[-0.7070,  1.1550, -0.7070]]]])
    """
    # The mean over a window is a product with a band from each side: its cost does not grow with the window. Means of
    # squares cancel, so float64.
    pixels = images.to(torch.float64, copy=True)
    places = (torch.arange(length, device=images.device) for length in images.shape[-2:])
    near = [(at[:, None] - at).abs() <= side // 2 for at in places]
    counts = [band.sum(1, keepdim=True).double() for band in near]
    rows, columns = (band / count for band, count in zip(near, counts, strict=True))
    n = counts[0] * counts[1].T  # pixels of each window that lie in the image
    mean, variance = (rows @ x @ columns.T for x in (pixels, pixels.square()))
    variance.sub_(mean.square()).clamp_(min=0).mul_(n / (n - 1))
    return pixels.sub_(mean).mul_(variance.add_(1e-6).rsqrt_()).to(images.dtype)


def check_units(config: SimmimConfig, patch: int, size: tuple[int, int]) -> None:
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
            f"A mask_ratio of {config.mask_ratio} hides all of {counted(units, 'unit')} of {config.mask_unit} pixels; "
            "choose a smaller mask_unit or a smaller mask_ratio"
        )
