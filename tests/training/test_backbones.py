"""Backbones that a training builds: sizes, seeds, beginnings, what cannot be."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.modules.vit import features, grid_of, is_vit, patch_of, sincos, xavier
from sightline.images.preprocess import IMAGENET_MEAN, IMAGENET_STD
from sightline.training.backbones import Backbone, build, misfit

TINY = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4)


def images(size: tuple[int, int] = (16, 16), n: int = 3) -> Tensor:
    return torch.randn(n, 3, *size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize(
    "backbone",
    [
        Backbone("resnet18", size=32, stem="small", width=8),
        Backbone("resnet18", size=64),
        Backbone("convnextv2_atto", size=32, patch=1),
        Backbone("convnextv2_atto", size=64),
    ],
)
def test_features_of_convolutions(backbone: Backbone) -> None:
    model: Any = build(backbone).module.eval()
    x = images((backbone.size, backbone.size), 2)
    output = model.forward_features(x)
    stride = 8 if backbone.stem or backbone.patch else 32
    assert output.shape[-2:] == (backbone.size // stride,) * 2
    found = features(model, x)
    assert found.shape == (2, model.num_features)
    torch.testing.assert_close(found, model(x))
    with pytest.raises(InputError, match="Patches can be left out of a ViT only"):
        features(model, x, torch.zeros(2, 1, dtype=torch.long))


@pytest.mark.parametrize("name", ["resnet18", "convnextv2_atto"])
def test_channels_that_come_last_in_memory_leave_gradients_as_they_are(name: str) -> None:
    encoder = build(Backbone(name, size=32, width=8))
    model: Any = encoder.module.double()
    assert encoder.architecture is not None
    plain: Any = sl.load_encoder(encoder.architecture).module.double().train()
    convolutions = [value for value in model.parameters() if value.dim() == 4 and min(value.shape[1:]) > 1]
    assert convolutions
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in convolutions)
    x = images((32, 32)).double()
    for module in (plain, model):
        module.forward_features(x).square().mean().backward()
    for (word, one), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-8, atol=1e-12, msg=word)


@torch.no_grad()
def test_a_small_stem_has_neither_stride_nor_pooling() -> None:
    small: Any = build(Backbone("resnet18", size=32, stem="small")).module.eval()
    assert (small.conv1.kernel_size, small.conv1.stride, small.conv1.padding) == ((3, 3), (1, 1), (1, 1))
    assert small.act1(small.bn1(small.conv1(images((32, 32))))).shape == (3, 64, 32, 32)
    with pytest.raises(InputError, match="stem=small is for ResNets"):
        build(Backbone("vit", size=16, patch=4, width=16, heads=2, depth=1, stem="small"))
    with pytest.raises(InputError, match="stem=tiny cannot be used"):
        build(Backbone("resnet18", size=32, stem="tiny"))


def test_a_narrow_vit_can_begin_with_xavier_weights_and_sincos_positions() -> None:
    settings = Backbone("vit", size=32, width=96, depth=2, heads=2, patch=8)
    vits = [build(replace(settings, init=init), seed=3).module for init in ("", "xavier")]
    for vit in vits:
        assert is_vit(vit)
        assert vit.pos_embed is not None
        assert vit.pos_embed.requires_grad
    timms, ours = (dict(vit.named_parameters()) for vit in vits)
    for name, fan_in, fan_out in (
        ("blocks.1.attn.qkv.weight", 96, 288),
        ("blocks.1.mlp.fc2.weight", 384, 96),
        ("patch_embed.proj.weight", 192, 96),
    ):
        expected = math.sqrt(2 / (fan_in + fan_out))
        assert ours[name].std().item() == pytest.approx(expected, rel=0.03)
        assert ours[name].abs().max() <= math.sqrt(3) * expected
    assert timms["blocks.1.attn.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert torch.equal(ours["pos_embed"].detach(), sincos((4, 4), 96, prefix=1))
    assert torch.equal(ours["cls_token"], timms["cls_token"])
    again = build(replace(settings, init="xavier"), seed=3).module
    assert all(torch.equal(value, ours[name]) for name, value in again.named_parameters())


def test_init_is_for_vits() -> None:
    with pytest.raises(InputError, match="no init 'xaver'; choose 'xavier'"):
        Backbone("vit", init="xaver")
    with pytest.raises(InputError, match="init=xavier is for a ViT, not for resnet18"):
        build(Backbone("resnet18", size=32, init="xavier"))
    with pytest.raises(InputError, match="init=xavier is for a plain ViT, not for deit_tiny_distilled_patch16_224"):
        build(Backbone("deit_tiny_distilled_patch16_224", init="xavier"))


def test_xavier() -> None:
    layer = torch.nn.Linear(300, 500)
    xavier(layer)
    assert layer.weight.abs().max() <= math.sqrt(6 / 800)
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 800), rel=0.02)
    assert not layer.bias.any()
    xavier(torch.nn.Linear(3, 3, bias=False))


def test_images_that_are_too_small_for_a_backbone_are_told() -> None:
    with pytest.raises(
        InputError, match=r"Images of 24 pixels .* since the total stride of ConvNeXt is 32 \(8 with patch=1\); choose"
    ):
        build(Backbone("convnextv2_atto", size=24))
    module = build(Backbone("convnextv2_atto", size=24, patch=1)).module
    assert [misfit(module, size) for size in (8, 21)] == ["", ""]
    assert misfit(module, 7) == "the total stride of ConvNeXt is 8"
    assert misfit(build(Backbone("resnet18", size=32)).module, 14) == ""  # padded convolutions
    assert misfit(build(TINY).module, 4) == ""
    swin = build(Backbone("swin_tiny_patch4_window7_224", size=64, width=24)).module
    assert misfit(swin, 48) == "SwinTransformer says: Input height (48) doesn't match model (64)"


@torch.no_grad()
@pytest.mark.parametrize(
    ("backbone", "channels"),
    [
        (Backbone("resnet18", size=32, stem="small", width=8), [8, 16, 32, 64]),
        (Backbone("resnet26", size=32, stem="small", width=8), [32, 64, 128, 256]),  # bottlenecks: four times as many
        (Backbone("convnextv2_atto", size=32, patch=2, width=8), [8, 16, 32, 64]),
    ],
)
def test_the_width_of_a_cnn_is_that_of_its_first_stage(backbone: Backbone, channels: list[int]) -> None:
    encoder = build(backbone)
    assert encoder.architecture is not None
    again = sl.load_encoder(encoder.architecture)
    with again.evaluating(), sl.capture(again, ["block.*"]) as seen:
        again(torch.randn(2, 3, 32, 32))
    assert list(dict.fromkeys(map_.shape[1] for map_ in seen.values())) == channels


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"attention_window": 4}, "attention_window is 4; it must be odd"),
        ({"size": 50, "patch": 8}, "size 50 cannot be cut into patches of 8"),
        ({"width": 50, "heads": 4}, "width of 50 cannot be split into 4 heads"),
        ({"backbone": "resnet18", "depth": 3, "heads": 2}, "depth and heads can be set for a ViT only"),
        ({"backbone": "resnet18", "attention_window": 3}, "needs self-attention, which resnet18 does not have"),
        ({"backbone": "resnet19"}, "timm has no model 'resnet19'"),
    ],
)
def test_backbones_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build(Backbone(**settings))


@pytest.mark.parametrize(
    "backbone",
    [
        TINY,
        Backbone("resnet18", size=32, stem="small", width=8),
        Backbone("vit", size=16, width=16, depth=1, heads=2, patch=4, drop_path=0.2),
    ],
)
def test_building_follows_from_the_seed(backbone: Backbone) -> None:
    torch.manual_seed(5)
    one = build(backbone, seed=1)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))  # the generator is left alone
    two, other = build(backbone, seed=1), build(backbone, seed=2)
    assert one.weights == two.weights != other.weights
    assert one.module.training


@torch.no_grad()
@pytest.mark.parametrize("backbone", [TINY, Backbone("resnet18", size=32, stem="small")])
@pytest.mark.parametrize("classes", [0, 5])
def test_a_reference_builds_the_same(backbone: Backbone, classes: int) -> None:
    encoder = build(backbone, classes=classes, seed=4)
    assert encoder.architecture is not None
    again = sl.load_encoder(encoder.architecture)
    assert again.weights == encoder.weights
    assert encoder.preprocess == replace(again.preprocess, mean=IMAGENET_MEAN, std=IMAGENET_STD)  # as in the papers
    assert again.preprocess.size == (backbone.size, backbone.size)
    x = images((backbone.size, backbone.size))
    encoder.module.to(memory_format=torch.contiguous_format)  # CNNs are built for training: other sums, other rounding
    assert torch.equal(again.module.eval()(x), encoder.module.eval()(x))
    assert encoder.module.num_classes == classes


def test_measures_of_a_vit() -> None:
    encoder = build(TINY)
    vit: Any = encoder.module
    assert is_vit(vit)
    assert not is_vit(build(Backbone("resnet18", size=32)).module)
    assert (encoder.depth, encoder.heads, encoder.patch, vit.embed_dim) == (2, 2, 4, 16)
    assert patch_of(vit) == 4
    assert grid_of(vit, images((8, 20))) == (2, 5)
