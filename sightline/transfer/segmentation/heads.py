"""Heads for segmentation: maps of an encoder → scores of classes on a grid.

`linear` is the head of DINOv2's protocol: a 1 × 1 convolution on standardised features, after dropout of channels.
Their BatchNorm is the standardisation (detection/features.py), whose statistics are those of the training images.

`upernet` is that of BEiT, MAE and SimMIM: four blocks of a ViT become maps of 4, 2, 1 and ½ times its grid,

    × 4   transposed convolution 2 × 2 · BatchNorm · GELU · transposed convolution 2 × 2
    × 2   transposed convolution 2 × 2
    × ½   maxima over 2 × 2 cells

(the stages of a CNN are such maps already), and UperNet puts them together: pyramid pooling of the coarsest one, then
from the top down. An auxiliary head on the third map helps to train it, and is not used afterwards.

Source: Oquab et al. 2023, "DINOv2"; Xiao et al. 2018, "Unified Perceptual Parsing for Scene Understanding"; Bao et al.
2022, "BEiT", and their code, whose layers these are.

B images, D channels of a block, C channels of the head, K classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

POOLED = (1, 2, 3, 6)  # cells of the sides of pyramid pooling
SCALES = 4


class LinearHead(nn.Module):
    """One linear layer for all cells."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(width, classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)  # type: ignore[arg-type]

    def forward(self, maps: Sequence[Tensor]) -> Tensor:  # one (B, D, h, w) -> (B, K, h, w)
        (whole,) = maps
        scores: Tensor = self.classifier(self.dropout(whole))
        return scores


class Scales(nn.Module):
    """Four blocks of a ViT, side by side in one map, as maps of 4, 2, 1 and ½ times its grid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.up = nn.ModuleList(
            [
                nn.Sequential(
                    nn.ConvTranspose2d(width, width, 2, 2),
                    nn.BatchNorm2d(width),
                    nn.GELU(),
                    nn.ConvTranspose2d(width, width, 2, 2),
                ),
                nn.ConvTranspose2d(width, width, 2, 2),
                nn.Identity(),
                nn.MaxPool2d(2, 2, ceil_mode=True),  # an odd last row or column is a cell, too
            ]
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:  # one (B, 4D, h, w) -> (B, D, …) each
        """Fine to coarse."""
        (whole,) = maps
        return [up(part) for up, part in zip(self.up, torch.split(whole, self.width, 1), strict=True)]


class UperNet(nn.Module):
    """Maps of four resolutions, fine to coarse → scores at the finest."""

    def __init__(self, widths: Sequence[int], channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.pooled = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(cells), _layer(widths[-1], channels, 1)) for cells in POOLED
        )
        self.top = _layer(widths[-1] + len(POOLED) * channels, channels, 3)
        self.lateral = nn.ModuleList(_layer(width, channels, 1) for width in widths[:-1])
        self.smooth = nn.ModuleList(_layer(channels, channels, 3) for _ in widths[:-1])
        self.fuse = _layer(len(widths) * channels, channels, 3)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """From the top down, then all together."""
        coarsest = maps[-1]
        pyramid = [enlarge(pool(coarsest), coarsest.shape[2:]) for pool in self.pooled]
        levels = [self.top(torch.cat([coarsest, *pyramid], 1))]
        for lateral, one in zip(reversed(self.lateral), reversed(maps[:-1]), strict=True):
            finer = lateral(one)
            levels.insert(0, finer + enlarge(levels[0], finer.shape[2:]))
        smooth = [*(layer(level) for layer, level in zip(self.smooth, levels, strict=False)), levels[-1]]
        whole = torch.cat([enlarge(level, smooth[0].shape[2:]) for level in smooth], 1)
        scores: Tensor = self.classifier(self.dropout(self.fuse(whole)))
        return scores


class Auxiliary(nn.Module):
    """A fully convolutional head on the third of the maps."""

    def __init__(self, width: int, channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.layer = _layer(width, channels, 3)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Scores at the resolution of that map."""
        scores: Tensor = self.classifier(self.dropout(self.layer(maps[2])))
        return scores


def enlarge(x: Tensor, size: Sequence[int]) -> Tensor:
    """Bilinear, between the centres of cells."""
    return F.interpolate(x, tuple(size), mode="bilinear", align_corners=False)


def _layer(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())
