"""Attention maps as layers compute them: scale, mask, bias, shared keys, what is refused."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.encoders.attention import AttentionProduct, without_fused_attention
from sightline.encoders.loading import load_encoder
from sightline.encoders.sites import Anatomy, Tap, Tokens
from sightline.encoders.watching import capture, watch

VIT = "timm:vit_tiny_patch16_224@random?img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5"


def images(size=32):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """Attention with whatever the call to scaled_dot_product_attention allows; q, k, v are given."""

    def __init__(self, options, transform=None):
        super().__init__()
        self.options, self.transform = options, transform

    def forward(self, q, k, v):
        output = F.scaled_dot_product_attention(q, k, v, **self.options)
        return output if self.transform is None else self.transform(output)


def see_map(layer, q, k, v):
    seen = {}
    taps = {point: Tap(layer, point) for point in ("q", "k", "v", "attn_map", "heads")}
    with watch(taps, list(taps), lambda site, x: seen.update({site: x.map() if site == "attn_map" else x.clone()})):
        output = layer(q, k, v)
    torch.testing.assert_close(seen["attn_map"] @ seen["v"], output, rtol=1e-5, atol=1e-5)
    assert torch.equal(seen["heads"], output)
    return seen["attn_map"]


def softmax(scores):
    """By the definition, in float64."""
    weights = scores.double().exp()
    return (weights / weights.sum(-1, keepdim=True)).float()


def qkv(heads=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 6, 8, generator=generator) for n in (4, heads, heads)]


def test_maps_follow_scale_mask_and_bias():
    q, k, v = qkv()
    scores = q @ k.mT
    bias = torch.randn(4, 6, 6)
    allowed = torch.rand(6, 6) > 0.4
    allowed.fill_diagonal_(True)
    expected = {
        "plain": (Layer({}), scores / math.sqrt(8)),
        "scale": (Layer({"scale": 0.3}), scores * 0.3),
        "bias": (Layer({"attn_mask": bias}), scores / math.sqrt(8) + bias),
        "mask": (Layer({"attn_mask": allowed}), (scores / math.sqrt(8)).masked_fill(~allowed, -math.inf)),
        "causal": (
            Layer({"is_causal": True}),
            (scores / math.sqrt(8)).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf),
        ),
    }
    for layer, wanted in expected.values():
        torch.testing.assert_close(see_map(layer, q, k, v), softmax(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (4, 6, 6), (2, 4, 6, 6), (2, 1, 1, 6)])
def test_a_product_can_be_cut(shape):
    """Some of the images, without prefix tokens: softmax over patch keys is the map without them, renormalised."""
    q, k, _ = qkv()
    product = AttentionProduct(q, k, torch.randn(shape), 0.4)
    whole = product.map()
    torch.testing.assert_close(product[1:].map(), whole[1:])
    cut = whole[:, :, 2:, 2:]
    torch.testing.assert_close(product.scores(prefix=2).softmax(-1), cut / cut.sum(-1, keepdim=True))


def test_heads_that_share_keys():
    q, k, v = qkv(heads=2)
    wide = k.repeat_interleave(2, 1)
    found = see_map(Layer({"enable_gqa": True}), q, k, v)
    torch.testing.assert_close(found, softmax(q @ wide.mT / math.sqrt(8)), rtol=1e-5, atol=1e-6)


def test_dropout_is_refused():
    with pytest.raises(InputError, match=r"call \.eval\(\) first"):
        see_map(Layer({"dropout_p": 0.1}), *qkv())


class Manual(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v


def test_attention_by_hand_is_refused():
    with pytest.raises(InputError, match="Manual does not compute its attention with scaled_dot_product_attention"):
        see_map(Manual(), *qkv())


@pytest.mark.bf16
def test_bf16():
    encoder = load_encoder(VIT)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), capture(encoder, ["block.*.attn_map"]) as acts:
        encoder(images())
    for attention in acts.values():
        assert attention.dtype == torch.float32  # rows of bf16 would not sum to one
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 17))


def test_anatomy_of_a_family_of_ones_own():
    """What a family hands over is enough to look: no registration anywhere."""
    layer = Layer({})
    known = Anatomy("mine", 1, {"block.0.attn_map": Tap(layer, "attn_map")}, Tokens(1, 0, (1, 5)), 4, 8)
    seen = []
    with watch(known.taps, ["block.0.attn_map"], lambda _, x: seen.append(x.shape)):
        layer(*qkv())
    assert seen == [(2, 4, 6, 6)]


@pytest.mark.parametrize(
    "reference",
    [
        VIT,
        f"{VIT}&attention_window=3",
        "timm:beit_base_patch16_224@random?size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5",
        "timm:swin_tiny_patch4_window7_224@random?size=56&embed_dim=16&depths=(1,1,1,1)&num_heads=(1,2,2,2)",
    ],
)
def test_without_the_fused_kernel_gradients_are_the_same(reference):
    module = load_encoder(reference).module.double()
    x = images(56 if "swin" in reference else 32).double()
    found = []
    for change in (lambda module: None, without_fused_attention):
        change(module)
        module.zero_grad()
        module(x).square().sum().backward()
        found.append({name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None})
    assert not any(getattr(layer, "fused_attn", False) for layer in module.modules())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-8, atol=1e-9, msg=name)
