"""The pyramids against plain layers, written out as they are published, with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.transfer.detection.pyramid import STRIDES, SimplePyramid, StagePyramid, check_strides

pytestmark = pytest.mark.unit


def norm(x: Tensor, layer: nn.Module) -> Tensor:
    """Over the channels of each cell, by hand."""
    centred = x - x.mean(1, keepdim=True)
    scale = centred.pow(2).mean(1, keepdim=True).add(1e-6).sqrt()
    return centred / scale * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)


def up(x: Tensor, layer: nn.Module) -> Tensor:
    """A transposed convolution of 2 × 2 with stride 2: each cell becomes four, none of which overlap."""
    b, _, h, w = x.shape
    cells = torch.einsum("bdhw,dckl->bchkwl", x, layer.weight)
    return cells.reshape(b, -1, 2 * h, 2 * w) + layer.bias.view(1, -1, 1, 1)


def published(pyramid: SimplePyramid, x: Tensor) -> dict[str, Tensor]:
    """p2 to p6 of ViTDet, layer by layer."""
    found = {}
    for stride in (4, 8, 16, 32):
        branch: Any = pyramid.branches[str(stride)]
        layers = list(branch)
        y = x
        if stride == 4:
            y = up(F.gelu(norm(up(y, layers[0]), layers[1])), layers[3])
        elif stride == 8:
            y = up(y, layers[0])
        elif stride == 32:
            y = y.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).amax((3, 5))
        lateral, first, last, second = layers[-4:]
        y = norm(torch.einsum("bdhw,cd->bchw", y, lateral.weight[:, :, 0, 0]), first)
        patches = F.unfold(y, 3, padding=1).unflatten(1, (-1, 9))
        y = torch.einsum("bdkn,cdk->bcn", patches, last.weight.flatten(2)).unflatten(2, y.shape[2:])
        found[str(stride)] = norm(y, second)
    return found | {"64": found["32"][:, :, ::2, ::2]}


@pytest.mark.parametrize("width", [96, 768])
def test_the_simple_pyramid_is_the_published_one(width: int) -> None:
    torch.manual_seed(0)
    pyramid = SimplePyramid(width, 32)
    for parameter in pyramid.parameters():  # norms that begin with ones and zeros would hide a mistake
        nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0, 0.2 if parameter.ndim == 1 else 0.05)
    x = torch.randn(2, width, 6, 4)
    made, expected = pyramid([x]), published(pyramid, x)
    assert list(made) == [str(stride) for stride in STRIDES]
    for name, value in made.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


def test_its_weights_are_those_of_the_paper() -> None:
    """768 channels and 256 in the pyramid: the layers of detectron2's ViT-B, counted by hand."""
    tail = {4: 192, 8: 384, 16: 768, 32: 768}
    after = sum(256 * width + 9 * 256 * 256 + 4 * 256 for width in tail.values())
    before = (768 * 384 * 4 + 384 + 2 * 384 + 384 * 192 * 4 + 192) + (768 * 384 * 4 + 384)
    assert sum(p.numel() for p in SimplePyramid(768, 256).parameters()) == before + after


def test_odd_grids_and_fewer_strides() -> None:
    made = SimplePyramid(8, 4, (8, 16, 32))([torch.randn(1, 8, 5, 7)])
    assert {name: tuple(value.shape[2:]) for name, value in made.items()} == {"8": (10, 14), "16": (5, 7), "32": (3, 4)}


def test_stages_are_summed_from_the_top_down() -> None:
    torch.manual_seed(0)
    widths = (4, 8, 12, 16)
    pyramid = StagePyramid(widths, 6, (4, 8, 16, 32, 64))
    stages = [torch.randn(2, width, 16 >> i, 16 >> i) for i, width in enumerate(widths)]
    made = pyramid(stages)
    above = None
    for i in reversed(range(4)):
        conv, layer_norm = pyramid.stages.inner_blocks[i]
        y = norm(conv(stages[i]), layer_norm)
        above = y if above is None else y + above.repeat_interleave(2, 2).repeat_interleave(2, 3)
        conv, layer_norm = pyramid.stages.layer_blocks[i]
        torch.testing.assert_close(made[str(4 << i)], norm(conv(above), layer_norm), rtol=1e-5, atol=1e-5)
    assert made["64"].shape == (2, 6, 1, 1)


def test_every_weight_of_a_smaller_pyramid_of_stages_learns() -> None:
    pyramid = StagePyramid((4, 8, 12, 16), 6, (4, 8, 16))
    made = pyramid([torch.randn(1, width, 16 >> i, 16 >> i) for i, width in enumerate((4, 8, 12, 16))])
    assert list(made) == ["4", "8", "16"]
    sum(value.square().sum() for value in made.values()).backward()
    assert all(parameter.grad is not None for parameter in pyramid.parameters())


@pytest.mark.parametrize("strides", [(), (64,), (4, 16), (8, 4), (2, 4)])
def test_strides_that_are_no_pyramid(strides: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="neighbours among 4, 8, 16, 32, 64"):
        check_strides(strides)
