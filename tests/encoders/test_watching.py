"""Watching activations: what is captured is the user's, and no hook stays."""

import pytest
import torch

from sightline.encoders.loading import load_encoder
from sightline.encoders.watching import capture, watch

VIT = "timm:vit_tiny_patch16_224@random?img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5"


def images(size=32):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


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
