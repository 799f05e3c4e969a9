"""BEiT: hide blocks of patches and predict the visual tokens that a tokenizer gives them.

With t_i the token of patch i of the whole image, M the hidden patches, and x̃ the image in which a mask token stands in
the place of their embeddings,

    L = 1/|M| Σ_{i ∈ M} −log softmax(W h_i(x̃) + b)[t_i],        h the output of the final norm

The tokenizer (`sightline.tokenizer`) is trained before, on the same images, and then frozen.

Blocks are drawn as by the authors' code: an area between `min_block` and what is still to be hidden, a log-uniform
aspect, a place; drawn again if it does not fit. There the number of hidden patches varies below the ratio, since the
last block must not exceed it; here that block is cut row by row, so that every image hides exactly ⌈ratio · N⌉ patches
and each counts alike, in however many processes. The authors' encoder is `backbone=beit`: relative positions that all
blocks share, layer scale, no absolute positions.

Source: Bao et al. 2022, "BEiT: BERT Pre-Training of Image Transformers".

B images, N patches on a grid of rows × columns, T = prefix tokens + patches, D width, K visual tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.encoders.modules.masking import hidden
from sightline.encoders.modules.vit import embed, encode, grid_of, is_vit, patch_of
from sightline.images.augment import policies
from sightline.images.augment.policy import Policy
from sightline.training import objective
from sightline.training.backbones import Backbone, freeze_head
from sightline.training.objective import First, Views
from sightline.training.objectives.beit.tokenizer import Tokenizer

TITLE = "BEiT"
KIND = "reconstructive"
ROUNDS = 32  # blocks that are tried; some ten are enough for all images of a batch


@dataclass(frozen=True)
class BeitConfig:
    """Share of hidden patches and their blocks, the share of the image that the view covers, and the tokenizer."""

    mask_ratio: float = 0.4
    min_block: int = 16  # patches on a grid of 14 × 14, in proportion on others
    min_aspect: float = 0.3  # of blocks, and its inverse the largest
    crop: tuple[float, float] = (0.2, 1.0)
    codes: int = 512
    tokenizer_width: int = 64
    tokenizer_epochs: float = 5
    tokenizer_lr: float = 4e-3

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise InputError(f"mask_ratio must be between 0 and 1, not {self.mask_ratio}")
        if self.min_block < 1:
            raise InputError(f"min_block is {self.min_block}, but a block has at least one patch")
        if not 0 < self.min_aspect <= 1:
            raise InputError(f"min_aspect must be in (0, 1], not {self.min_aspect}; wide blocks are drawn as well")
        if not (self.tokenizer_epochs > 0 and self.tokenizer_lr > 0):
            raise InputError(
                "BEiT's tokenizer must be trained: tokenizer_epochs and tokenizer_lr are above 0, "
                f"not {self.tokenizer_epochs} and {self.tokenizer_lr}"
            )


def views(config: BeitConfig, backbone: Backbone) -> tuple[Policy, ...]:
    return policies.reconstruction(backbone.size, config.crop)


def first(config: BeitConfig, backbone: Backbone) -> First:
    """The tokenizer, whose grid is that of the patches."""
    if backbone.patch_side == 1:
        raise InputError(f"BEiT hides patches of a ViT, but {backbone.backbone} is not one; choose a ViT")
    tokenizer = Tokenizer(backbone.patch_side, config.codes, config.tokenizer_width)
    return First("tokenizer", tokenizer, views(config, backbone), config.tokenizer_epochs, config.tokenizer_lr)


class BeitObjective(objective.Objective):
    """Backbone, mask token, a linear head that predicts tokens, and the frozen tokenizer that knows them."""

    def __init__(self, backbone: nn.Module, config: BeitConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        if not is_vit(backbone):
            raise InputError(f"BEiT hides patches of a ViT, but {type(backbone).__name__} is not one; choose a ViT")
        if patch_of(backbone) != tokenizer.patch:
            raise InputError(
                f"The tokenizer has patches of {tokenizer.patch} pixels and the backbone of {patch_of(backbone)}; "
                "they must be the same"
            )
        self.backbone = backbone
        self.config = config
        self.tokenizer = tokenizer.requires_grad_(False).eval()
        self.mask_token = nn.Parameter(torch.empty(1, 1, backbone.embed_dim))
        self.head = nn.Linear(backbone.embed_dim, tokenizer.codes)
        for weight in (self.mask_token, self.head.weight):
            nn.init.trunc_normal_(weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        freeze_head(backbone)

    @property
    def encoder(self) -> nn.Module:
        return self.backbone

    def train(self, mode: bool = True) -> BeitObjective:
        """Train all but the tokenizer."""
        super().train(mode)
        self.tokenizer.eval()
        return self

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the tokens of hidden patches; `accuracy` is the share that is predicted."""
        images = views.pixels[0]
        mask = self.block_mask(images, views)
        logits = self.forward_encoder(images, mask)
        with torch.no_grad():
            tokens = self.tokenizer.encode(images)[mask]
        accuracy = (logits.argmax(-1) == tokens).float().mean()
        return F.cross_entropy(logits.float(), tokens), {"accuracy": accuracy}

    def block_mask(self, images: Tensor, views: Views) -> Tensor:  # (B, N)
        """Hide the same number of patches in each image, in blocks."""
        grid = grid_of(self.backbone, images)
        patches = math.prod(grid)
        count = math.ceil(self.config.mask_ratio * patches)
        smallest = max(1, round(self.config.min_block * patches / 14**2))
        noise = views.random(4 * ROUNDS).view(-1, ROUNDS, 4)
        return blockwise_masking(noise, grid, count, smallest, self.config.min_aspect)

    def forward_encoder(self, images: Tensor, mask: Tensor) -> Tensor:  # (B, 3, h, w), (B, N) -> (B · hidden, K)
        """Scores of the tokens of the hidden patches of the masked images."""
        tokens = embed(self.backbone, images, mask, self.mask_token)
        tokens = encode(self.backbone, tokens, grid_of(self.backbone, images))  # (B, T, D)
        logits: Tensor = self.head(hidden(tokens[:, self.backbone.num_prefix_tokens :], mask))
        return logits


def blockwise_masking(
    noise: Tensor, grid: tuple[int, int], count: int, smallest: int, aspect: float
) -> Tensor:  # (B, rounds, 4) -> (B, N)
    """Hide blocks of at least `smallest` patches and an aspect between `aspect` and 1 / `aspect`, `count` in all.

    The noise of a round is that of the area, the aspect, the row and the column of a block.

    >>> noise = torch.tensor([[[0.0, 0.5, 0.0, 0.5], [0.0, 0.5, 0.99, 0.99]]])
    >>> blockwise_masking(noise, (4, 6), count=6, smallest=4, aspect=0.3).view(4, 6).int()
    tensor([[0, 0, 1, 1, 0, 0],
            [0, 0, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1],
            [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    """
    rows, columns = grid
    row, column = (torch.arange(n, device=noise.device) for n in grid)
    mask = torch.zeros(len(noise), rows * columns, dtype=torch.bool, device=noise.device)
    missing = torch.full((len(noise), 1), count, device=noise.device)
    for u in noise.unbind(1):
        area, ratio, top, left = u.unsqueeze(2).unbind(1)  # (B, 1) each
        area = smallest + area * (missing - smallest).clamp(min=0)
        ratio = torch.exp((1 - 2 * ratio) * math.log(aspect))
        height, width = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (height < rows) & (width < columns)
        top, left = (top * (rows - height + 1)).floor(), (left * (columns - width + 1)).floor()
        tall = (row >= top) & (row < top + height) & fits  # (B, rows)
        wide = (column >= left) & (column < left + width)  # (B, columns)
        new = (tall.unsqueeze(2) & wide.unsqueeze(1)).flatten(1) & ~mask
        new &= new.cumsum(1) <= missing
        mask |= new
        missing = missing - new.sum(1, keepdim=True)
        if not missing.any():
            return mask
    rest = ~mask  # if no block ever fits
    return mask | rest & (rest.cumsum(1) <= missing)
