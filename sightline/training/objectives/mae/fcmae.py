"""FCMAE: a ConvNeXt-V2 that sees only the visible parts of an image, and its decoder.

Images are hidden in units of the total stride, so that at every stage a unit is a square of sites, all visible or all
hidden. The visible units of an image are stacked into one tall image. There each layer of the ConvNeXt whose stride is
its kernel, each norm, each pointwise layer and each global response norm (GRN) computes what a sparse convolution
would, at the cost of the visible sites alone. Only the depthwise convolution looks at neighbours: for it the units
return to their places, between zeros.

Source: Woo et al. 2023, "ConvNeXt V2: Co-designing and Scaling ConvNets with Masked Autoencoders". There GRN takes its
norms over the visible sites of the whole batch (of a process); here over those of an image, as in the trained network,
unless `grn_over_batch` is set.

B images, N units on a grid of rows × columns, kept of them visible, s × s sites each, C channels, D width, P pixels.
"""

import math
from typing import Any, TypeGuard

import torch
from timm.models.convnext import ConvNeXt, ConvNeXtBlock
from torch import Tensor, nn

from sightline.encoders.modules.masking import restore


def is_convnext(module: nn.Module) -> TypeGuard[ConvNeXt]:
    """Whether it can be masked: each layer but the depthwise ones has the stride of its kernel."""
    return isinstance(module, ConvNeXt) and module.stem[0].kernel_size == module.stem[0].stride


def stride_of(convnext: ConvNeXt) -> int:
    """Total stride: side of a mask unit in pixels."""
    last: Any = convnext.feature_info[-1]
    return int(last["reduction"])


def stack(
    x: Tensor, ids_keep: Tensor, grid: tuple[int, int]
) -> Tensor:  # (B, C, rows·s, columns·s) -> (B, C, kept·s, s)
    """Visible units below each other.

    >>> stack(torch.arange(4.0).view(1, 1, 2, 2), torch.tensor([[3, 1]]), (2, 2))
    tensor([[[[3.],
              [1.]]]])
    """
    (B, C, height, _), (rows, columns) = x.shape, grid
    s = height // rows
    units = x.reshape(B, C, rows, s, columns, s).transpose(3, 4).reshape(B, C, rows * columns, s * s)
    return units.gather(2, ids_keep[:, None, :, None].expand(-1, C, -1, s * s)).reshape(B, C, -1, s)


def place(
    x: Tensor, ids_keep: Tensor, grid: tuple[int, int]
) -> Tensor:  # (B, C, kept·s, s) -> (B, C, rows·s, columns·s)
    """Visible units in their places, zeros elsewhere: undoes `stack`.

    >>> place(torch.tensor([3.0, 1.0]).view(1, 1, 2, 1), torch.tensor([[3, 1]]), (2, 2))
    tensor([[[[0., 1.],
              [0., 3.]]]])
    """
    (B, C, _, s), (rows, columns) = x.shape, grid
    index = ids_keep[:, None, :, None].expand(-1, C, -1, s * s)
    units = x.new_zeros(B, C, rows * columns, s * s).scatter(2, index, x.reshape(B, C, -1, s * s))
    return units.reshape(B, C, rows, columns, s, s).transpose(3, 4).reshape(B, C, rows * s, columns * s)


def encode_visible(
    convnext: ConvNeXt, images: Tensor, ids_keep: Tensor, grn_over_batch: bool = False
) -> Tensor:  # (B, 3, h, w) -> (B, kept, D)
    """Features of the visible units (B, kept) at the last stage, in their order."""
    stride = stride_of(convnext)
    grid = images.shape[-2] // stride, images.shape[-1] // stride
    x = convnext.stem(stack(images, ids_keep, grid))
    stages: Any = convnext.stages
    for stage in stages:
        x = stage.downsample(x)
        for block in stage.blocks:
            x = _block(block, x, ids_keep, grid, grn_over_batch)
    tokens: Tensor = convnext.norm_pre(x).flatten(2).transpose(1, 2)
    return tokens


def _block(
    block: Any, x: Tensor, ids_keep: Tensor, grid: tuple[int, int], grn_over_batch: bool
) -> Tensor:  # (B, C, kept·s, s)
    """A block of timm's, with the units in their places for its depthwise convolution."""
    y = stack(block.conv_dw(place(x, ids_keep, grid)), ids_keep, grid)
    if grn_over_batch:  # all images below each other are one, (1, C, B·kept·s, s)
        y = y.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    if block.use_conv_mlp:
        y = block.mlp(block.norm(y))
    else:
        y = block.mlp(block.norm(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    if grn_over_batch:
        y = y.squeeze(0).unflatten(1, (len(x), -1)).transpose(0, 1)
    if block.gamma is not None:
        y = y * block.gamma.view(1, -1, 1, 1)
    result: Tensor = x + block.drop_path(y)
    return result


class FcmaeDecoder(nn.Module):
    """One ConvNeXt-V2 block over all units, that ends in the pixels of each unit."""

    def __init__(self, convnext: ConvNeXt, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(convnext.num_features, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.block = ConvNeXtBlock(width, use_grn=True, ls_init_value=None)
        self.pred = nn.Linear(width, stride_of(convnext) ** 2 * 3)
        nn.init.normal_(self.mask_token, std=0.02)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(part.weight, std=0.02)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, tokens: Tensor, ids_restore: Tensor | None = None) -> Tensor:  # (B, kept, D) -> (B, N, P)
        """Pixels of every unit; without `ids_restore` the tokens are those of all units in image order."""
        x = self.embed(tokens)
        if ids_restore is not None:
            x = restore(x, self.mask_token, ids_restore)
        side = math.isqrt(x.shape[1])  # views are square
        x = self.block(x.transpose(1, 2).reshape(len(x), -1, side, side))
        pixels: Tensor = self.pred(x.flatten(2).transpose(1, 2))
        return pixels
