"""Maps of several strides from an encoder: ViTDet's simple feature pyramid, and that of the stages of a CNN.

The simple pyramid has one branch for each stride, all from the same map (B, D, h, w) of 16 pixels per cell:

    stride  4   transposed convolution 2 × 2 to D/2 · norm · GELU · transposed convolution 2 × 2 to D/4
    stride  8   transposed convolution 2 × 2 to D/2
    stride 16   the map itself
    stride 32   maxima over 2 × 2 cells
    each then   convolution 1 × 1 to C · norm · convolution 3 × 3 · norm, both without bias

and stride 64, which proposes regions only, is every second cell of stride 32. Norms are over the channels.

Source: Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection", and its code in detectron2
(modeling/backbone/vit.py), whose layers are these. Lin et al. 2017, "Feature Pyramid Networks", for the stages.

B images, D and C channels, maps of h × w cells.
"""

from collections.abc import Sequence

from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import FeaturePyramidNetwork

from sightline.core.errors import InputError

STRIDES = (4, 8, 16, 32, 64)
COARSEST = 64  # proposes regions, and is not looked at again
PATCH = 16  # pixels of the detector's frame per patch, whatever the patch is
FINEST = 4  # and per cell of the first stage of a CNN


def check_strides(strides: Sequence[int]) -> None:
    """Neighbouring strides, not the coarsest alone.

    >>> check_strides((4, 8, 16)), check_strides(STRIDES)
    (None, None)
    """
    first = STRIDES.index(strides[0]) if strides and strides[0] in STRIDES[:-1] else len(STRIDES)
    if not strides or tuple(strides) != STRIDES[first : first + len(strides)]:
        raise InputError(f"strides is {list(strides)}, but neighbours among 4, 8, 16, 32, 64 are expected")


class SimplePyramid(nn.Module):
    """One map of 16 pixels per cell → maps of these strides."""

    def __init__(self, width: int, channels: int, strides: Sequence[int] = STRIDES) -> None:
        super().__init__()
        check_strides(strides)
        self.strides = tuple(strides)
        self.branches = nn.ModuleDict(
            {str(stride): _branch(width, channels, stride) for stride in strides if stride != COARSEST}
        )

    def forward(self, maps: Sequence[Tensor]) -> dict[str, Tensor]:  # one (B, D, h, w) -> stride: (B, C, …)
        (whole,) = maps
        return _with_coarsest({name: branch(whole) for name, branch in self.branches.items()}, self.strides)


class StagePyramid(nn.Module):
    """Maps of the stages of a CNN, fine to coarse → maps of these strides, from the top down."""

    def __init__(self, widths: Sequence[int], channels: int, strides: Sequence[int] = STRIDES) -> None:
        super().__init__()
        check_strides(strides)
        self.strides = tuple(strides)
        self.names = [str(stride) for stride in STRIDES[: len(widths)]]
        self.stages = FeaturePyramidNetwork(list(widths), channels, norm_layer=LayerNorm2d)
        for number, name in enumerate(self.names):
            if int(name) not in strides:  # the last layer of a map that nobody asks for would get no gradient
                self.stages.layer_blocks[number] = nn.Identity()

    def forward(self, maps: Sequence[Tensor]) -> dict[str, Tensor]:  # (B, D_s, h_s, w_s) -> stride: (B, C, …)
        every = self.stages(dict(zip(self.names, maps, strict=True)))
        return _with_coarsest({name: x for name, x in every.items() if int(name) in self.strides}, self.strides)


def _branch(width: int, channels: int, stride: int) -> nn.Sequential:
    before: list[nn.Module] = []
    match stride:
        case 4:
            half = width // 2
            before = [nn.ConvTranspose2d(width, half, 2, 2), LayerNorm2d(half), nn.GELU()]
            width //= 4
            before.append(nn.ConvTranspose2d(half, width, 2, 2))
        case 8:
            before = [nn.ConvTranspose2d(width, width // 2, 2, 2)]
            width //= 2
        case 32:
            before = [nn.MaxPool2d(2, 2, ceil_mode=True)]  # an odd last row or column is a cell, too
    return nn.Sequential(
        *before,
        nn.Conv2d(width, channels, 1, bias=False),
        LayerNorm2d(channels),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        LayerNorm2d(channels),
    )


def _with_coarsest(maps: dict[str, Tensor], strides: Sequence[int]) -> dict[str, Tensor]:
    if COARSEST in strides:
        maps[str(COARSEST)] = F.max_pool2d(maps["32"], 1, 2)
    return maps
