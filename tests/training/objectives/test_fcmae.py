"""MAE of a ConvNeXt-V2 (FCMAE): its sparse encoder against masked dense convolutions, its loss and its decoder."""

import copy
import functools
import math
from typing import Any

import pytest
import torch
from support.reconstruction import CONVNEXT, SMALL_DECODER, make, make_views, naive_mae, other_pixels, scramble
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor

from sightline.encoders.modules.masking import enlarge, random_masking
from sightline.training.backbones import Backbone, build
from sightline.training.objectives.mae.fcmae import encode_visible, place, stack, stride_of


@pytest.fixture(scope="module")
def fcmae() -> Any:
    objective = make("mae", CONVNEXT, mask_ratio=0.6, **{**SMALL_DECODER, "decoder_width": 16})
    scramble(objective)
    return objective


def dense_twin(convnext: Any, images: Tensor, mask: Tensor) -> Tensor:  # (B, D, rows, columns)
    """Plain masked dense convolutions: activations are multiplied by the mask of visible sites wherever it matters."""

    def masked(x: Tensor) -> Tensor:
        return x * enlarge(~mask, (4, 4), x.shape[-1] // 4).unsqueeze(1)

    twin = copy.deepcopy(convnext)
    hooks: list[Any] = [twin.stem, *(stage.downsample for stage in twin.stages)]
    hooks += [block.conv_dw for stage in twin.stages for block in stage.blocks]
    hooks += [block.mlp for stage in twin.stages for block in stage.blocks]
    for module in hooks:
        module.register_forward_hook(lambda module, given, result: masked(result))
    for module in twin.modules():
        if isinstance(module, GlobalResponseNorm):
            module.register_forward_pre_hook(lambda module, given: masked(given[0]))
    return twin.stages(twin.stem(images))


def test_fcmaes_encoder_equals_masked_dense_convolutions(fcmae: Any) -> None:
    views = make_views(3, size=32)
    ids_keep, _, mask = random_masking(views.random(16), 6)
    assert stride_of(fcmae.backbone) == 8
    dense = dense_twin(fcmae.backbone, views.pixels[0], mask).flatten(2).transpose(1, 2)  # (B, N, D)
    expected = torch.stack([tokens[ids] for tokens, ids in zip(dense, ids_keep, strict=True)])
    torch.testing.assert_close(
        encode_visible(fcmae.backbone, views.pixels[0], ids_keep), expected, rtol=1e-4, atol=1e-4
    )


def test_norms_over_the_visible_sites_of_all_images() -> None:
    """As FCMAE's authors have it: what one image sees depends on the others. The norms are written out."""
    objective = make("mae", CONVNEXT, mask_ratio=0.6, grn_over_batch=True, **{**SMALL_DECODER, "decoder_width": 16})
    scramble(objective)
    views = make_views(3, size=32)
    images, noise = views.pixels[0], views.random(16)
    latent, mask, _ = objective.forward_encoder(images, noise)
    twin = copy.deepcopy(objective.backbone)
    for module in twin.modules():
        if isinstance(module, GlobalResponseNorm):
            module.forward = functools.partial(norm_over_batch, module)
    dense = dense_twin(twin, images, mask).flatten(2).transpose(1, 2)
    expected = torch.stack([tokens[ids] for tokens, ids in zip(dense, noise.argsort(1)[:, :6], strict=True)])
    torch.testing.assert_close(latent, expected, rtol=1e-4, atol=1e-4)


def norm_over_batch(grn: Any, x: Tensor) -> Tensor:
    channel = grn.channel_dim % 4
    energy = x.square().sum([axis for axis in range(4) if axis != channel], keepdim=True).sqrt()
    response = x * energy / (energy.mean(channel, keepdim=True) + 1e-6)
    return grn.weight.view(grn.wb_shape) * response + grn.bias.view(grn.wb_shape) + x


def test_with_all_units_visible_fcmaes_encoder_is_the_backbone(fcmae: Any) -> None:
    images = make_views(2, size=32).pixels[0]
    everything = torch.arange(16).flip(0).expand(2, -1)
    expected = fcmae.backbone.forward_features(images).flatten(2).transpose(1, 2).flip(1)
    torch.testing.assert_close(encode_visible(fcmae.backbone, images, everything), expected, rtol=1e-4, atol=1e-4)


def test_the_decoder_of_a_convnext_has_no_heads() -> None:
    """A width that no number of heads divides is as good as any other."""
    objective = make("mae", CONVNEXT, decoder_width=10, decoder_heads=4)
    assert objective.decoder.embed.out_features == 10
    assert math.isfinite(objective(make_views(size=32))[0].item())


@pytest.mark.parametrize("name", ["convnextv2_tiny", "convnext_atto"])
def test_fcmae_runs_through_every_kind_of_block(name: str) -> None:
    """Pointwise layers as linear ones on the last axis; layer scale instead of GRN."""
    convnext: Any = build(Backbone(name, size=64)).module.eval()
    scramble(convnext)
    images = torch.randn(1, 3, 64, 64)
    expected = convnext.forward_features(images).flatten(2).transpose(1, 2)
    found = encode_visible(convnext, images, torch.arange(4).expand(1, -1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_fcmaes_encoder_never_sees_hidden_units_nor_other_images(fcmae: Any) -> None:
    views = make_views(3, size=32)
    images, noise = views.pixels[0], views.random(16)
    latent, mask, _ = fcmae.forward_encoder(images, noise)
    changed = other_pixels(images, enlarge(mask, (4, 4), 8))
    assert torch.equal(fcmae.forward_encoder(changed, noise)[0], latent)
    changed = torch.cat([images[:1], torch.randn(2, 3, 32, 32)])
    torch.testing.assert_close(fcmae.forward_encoder(changed, noise)[0][0], latent[0])  # GRN is per image
    neighbour = images.clone()
    visible = int((~mask[0]).nonzero()[0])
    neighbour[0, :, visible // 4 * 8, visible % 4 * 8] += 1
    assert not torch.equal(fcmae.forward_encoder(neighbour, noise)[0][0], latent[0])


def test_fcmae_loss(fcmae: Any) -> None:
    views = make_views(3, size=32)
    latent, mask, ids_restore = fcmae.forward_encoder(views.pixels[0], views.random(16))
    assert (mask.sum(1) == 10).all()
    expected = naive_mae(views.pixels[0], fcmae.forward_decoder(latent, ids_restore), mask, 8, True)
    assert fcmae(views)[0].item() == pytest.approx(expected, rel=1e-5)


def test_fcmaes_decoder_sees_the_units_in_their_places(fcmae: Any) -> None:
    """A 7 × 7 convolution over a 4 × 4 grid, by hand."""
    tokens = torch.randn(1, 16, 320)
    order = torch.randperm(16)
    torch.testing.assert_close(fcmae.decoder(tokens), fcmae.decoder(tokens[:, order], order.argsort()[None]))
    decoder = fcmae.decoder
    grid = decoder.embed(tokens).reshape(1, 4, 4, 16).permute(0, 3, 1, 2)
    expected = decoder.pred(decoder.block(grid).permute(0, 2, 3, 1)).reshape(1, 16, 192)
    torch.testing.assert_close(decoder(tokens), expected)


def test_place_undoes_stack() -> None:
    x = torch.randn(2, 5, 6, 9)
    ids_keep, _, mask = random_masking(torch.rand(2, 6), 4)
    expected = x * enlarge(~mask, (2, 3), 3).unsqueeze(1)
    assert torch.equal(place(stack(x, ids_keep, (2, 3)), ids_keep, (2, 3)), expected)
