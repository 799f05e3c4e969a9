"""Names, token views, capture and attention maps, on modules small enough to know the answer.

B images, N tokens, D width, H heads.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.encoders.attention import AttentionProduct
from sightline.encoders.loading import load_encoder
from sightline.encoders.sites import Anatomy, Tap, Tokens, select, token_view
from sightline.encoders.watching import capture, watch

VIT = "timm:vit_tiny_patch16_224@random?img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5"


def images(size=32):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["block.*"], ["block.0", "block.1"]),
        (["block.?"], ["block.0", "block.1"]),
        (["block.*.qkv"], ["block.0.qkv", "block.1.qkv"]),
        (["norm", "embed"], ["embed", "norm"]),  # order of computation, not of asking
        (["*"], ["embed", "norm"]),
        (["block.1.attn*"], ["block.1.attn_map", "block.1.attn"]),
        (
            ["block.0.**", "block.0.qkv"],
            ["norm1", "qkv", "q", "k", "v", "attn_map", "heads", "attn", "mid", "norm2", "fc1", "mlp"],
        ),
        (["block[0]"], []),
    ],
)
def test_select(patterns, expected):
    names = load_encoder(VIT).sites
    if patterns[0] == "block.0.**":
        expected = [f"block.0.{name}" for name in expected]
    assert select(names, patterns) == expected


@pytest.mark.parametrize(
    ("site", "hint"),
    [("blok.1", "'block.1'"), ("block.1.qvk", "'block.1.qkv'"), ("block.7", "'block.1'"), ("xyz", "embed")],
)
def test_unknown_sites_fail_before_the_pass_and_name_the_nearest(site, hint):
    with pytest.raises(InputError, match=site) as error, capture(load_encoder(VIT), [site]):
        pytest.fail("entered")
    assert hint in str(error.value)


def test_a_pattern_that_matches_nothing_is_an_error_even_beside_one_that_does():
    with pytest.raises(InputError, match=r"stage\.\*"), capture(load_encoder(VIT), ["block.*", "stage.*"]):
        pytest.fail("entered")


# ---------------------------------------------------------------------------------------------------------------
# Token views


def test_token_views():
    x = torch.arange(2 * 7 * 3.0).view(2, 7, 3)
    tokens = Tokens(prefix=3, cls=1, grid=(2, 2))
    assert tokens.count == 7
    assert torch.equal(token_view(x, "all", tokens), x)
    assert torch.equal(token_view(x, "patches", tokens), x[:, 3:])
    assert torch.equal(token_view(x, "cls", tokens), x[:, 1])
    assert torch.equal(token_view(x, "mean", tokens), x[:, 3:].sum(1) / 4)
    assert torch.equal(token_view(x, "gap", tokens), x.sum(1) / 7)
    assert token_view(x, "cls", Tokens(3, None, (2, 2))) is None


def test_token_views_of_maps_heads_and_pooled_vectors():
    x = torch.randn(2, 5, 2, 3)  # (B, C, h, w)
    assert torch.equal(token_view(x, "patches", None)[:, 4], x[:, :, 1, 1])
    torch.testing.assert_close(token_view(x, "mean", None), x.mean((2, 3)))
    assert token_view(x, "cls", None) is None
    heads = torch.randn(2, 4, 7, 3)  # (B, H, N, D/H)
    assert torch.equal(token_view(heads, "cls", Tokens(1, 0, (2, 3))), heads[:, :, 0].flatten(1))
    pooled = torch.randn(2, 5)
    assert torch.equal(token_view(pooled, "all", Tokens(1, 0, (2, 3)))[:, 0], pooled)
    assert token_view(pooled, "cls", Tokens(1, 0, (2, 3))) is None


def test_unknown_token_view():
    with pytest.raises(InputError, match="did you mean 'patches'"):
        token_view(torch.zeros(1, 5, 2), "patch", Tokens(1, 0, (2, 2)))


# ---------------------------------------------------------------------------------------------------------------
# Capture


class Odd(nn.Module):
    """Gives a dictionary, from parts that give a tuple and a text."""

    def __init__(self):
        super().__init__()
        self.pair, self.text, self.unused = Pair(), Text(), nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x):
        return {"first": self.pair(x)[0], "text": self.text(x)}


class Pair(nn.Module):
    def forward(self, x):
        return x + 1, x - 1


class Text(nn.Module):
    def forward(self, x):
        return "text"


def test_unknown_modules_have_their_own_names():
    encoder = load_encoder(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 2, 3))))
    assert list(encoder.sites) == ["0", "1", "1.0", "1.1"]
    assert (encoder.family, encoder.tokens, encoder.depth) == ("module", None, 0)
    with capture(encoder, ["1.*"]) as acts:
        output = encoder(images())
    assert list(acts) == ["1.0", "1.1"]
    assert torch.equal(acts["1.1"], output)
    assert not acts["1.1"].requires_grad


def test_containers_have_no_site_and_odd_outputs_are_handled():
    encoder = load_encoder(Odd())
    assert list(encoder.sites) == ["pair", "text", "unused.0"]
    with capture(encoder, ["pair"]) as acts:
        encoder(torch.zeros(2))
    assert torch.equal(acts["pair"], torch.ones(2))
    with pytest.raises(InputError, match="'text' gives no tensor but str"), capture(encoder, ["text"]):
        encoder(torch.zeros(2))


def test_a_single_pattern_is_a_list_of_one():
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with capture(load_encoder(module), "1") as acts:
        module(torch.ones(1, 3))
    assert list(acts) == ["1"]


def test_captured_activations_belong_to_the_user():
    encoder = load_encoder(VIT)
    with torch.no_grad(), capture(encoder, ["block.0"]) as acts:
        encoder(images())
        first = acts["block.0"]
        encoder(images() + 1)
    assert not torch.equal(first, acts["block.0"])


def test_nested_captures_do_not_disturb_each_other():
    encoder = load_encoder(VIT)
    with torch.no_grad(), capture(encoder, ["block.*.attn_map", "block.0.qkv"]) as outer:
        with capture(encoder, ["block.1.attn_map", "block.1.q"]) as inner:
            encoder(images())
        first = outer["block.1.attn_map"]
        assert torch.equal(first, inner["block.1.attn_map"])
        encoder(images() * 2)
    assert not torch.equal(outer["block.1.attn_map"], inner["block.1.attn_map"])
    assert torch._C._len_torch_function_stack() == 0


def test_looking_goes_on_after_an_exception_that_was_caught():
    encoder = load_encoder(VIT)
    inner = encoder.module.blocks[0].attn.proj
    with torch.no_grad(), capture(encoder, ["block.0.attn_map"]) as acts:
        handle = inner.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            encoder(images())
        handle.remove()
        acts.clear()
        encoder(images())
    assert acts["block.0.attn_map"].shape == (2, 4, 17, 17)


def test_an_exception_while_seeing_leaves_no_hook():
    encoder = load_encoder(VIT)

    def see(site, activation):
        raise KeyError(site)

    with pytest.raises(KeyError), watch(encoder.sites, ["block.0.attn_map", "block.1"], see):
        encoder(images())
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in encoder.module.modules())
    assert torch._C._len_torch_function_stack() == 0


# ---------------------------------------------------------------------------------------------------------------
# Attention maps


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
