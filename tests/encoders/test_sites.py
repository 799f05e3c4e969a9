"""Names and token views, on modules small enough to know the answer.

B images, N tokens, D width, H heads.
"""

import pytest
import torch
from torch import nn

from sightline.core.errors import InputError
from sightline.encoders.loading import load_encoder
from sightline.encoders.sites import Tokens, select, token_view
from sightline.encoders.watching import capture

VIT = "timm:vit_tiny_patch16_224@random?img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5"


def images(size=32):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


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
    with pytest.raises(InputError, match="'text' gives a str, not a tensor"), capture(encoder, ["text"]):
        encoder(torch.zeros(2))


def test_a_single_pattern_is_a_list_of_one():
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with capture(load_encoder(module), "1") as acts:
        module(torch.ones(1, 3))
    assert list(acts) == ["1"]
