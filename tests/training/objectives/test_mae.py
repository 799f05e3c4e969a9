"""MAE: the loss against plain float64 loops, who sees which pixels, the order of tokens, and how it starts."""

import math
from typing import Any

import pytest
import torch
from support.reconstruction import BATCH, make, make_views, naive_mae, naive_window, other_pixels

from sightline.encoders.modules.masking import enlarge
from sightline.encoders.modules.vit import embed, encode, sincos
from sightline.training.backbones import Backbone


@pytest.mark.parametrize("norm", [True, False])
def test_mae_loss(norm: bool) -> None:
    objective, views = make("mae", norm_pix=norm), make_views()
    images = views.pixels[0]
    latent, mask, ids_restore = objective.forward_encoder(images, views.random(16))
    assert latent.shape == (BATCH, 1 + 4, 16)
    assert (mask.sum(1) == 12).all()
    expected = naive_mae(images, objective.forward_decoder(latent, ids_restore), mask, 4, norm)
    assert objective(views)[0].item() == pytest.approx(expected, rel=1e-5)


def test_maes_encoder_never_sees_hidden_patches() -> None:
    objective, views = make("mae"), make_views()
    images, noise = views.pixels[0], views.random(16)
    latent, mask, ids_restore = objective.forward_encoder(images, noise)
    changed = other_pixels(images, enlarge(mask, (4, 4), 4))
    assert torch.equal(objective.forward_encoder(changed, noise)[0], latent)
    seen = other_pixels(images, enlarge(~mask, (4, 4), 4))
    assert not torch.equal(objective.forward_encoder(seen, noise)[0], latent)
    pred = objective.forward_decoder(latent, ids_restore)
    assert not torch.equal(objective.forward_loss(changed, pred, mask), objective.forward_loss(images, pred, mask))


def test_the_loss_of_mae_ignores_visible_patches() -> None:
    objective, views = make("mae"), make_views()
    latent, mask, ids_restore = objective.forward_encoder(views.pixels[0], views.random(16))
    pred = objective.forward_decoder(latent, ids_restore)
    changed = other_pixels(views.pixels[0], enlarge(~mask, (4, 4), 4))
    assert torch.equal(objective.forward_loss(changed, pred, mask), objective.forward_loss(views.pixels[0], pred, mask))


def test_the_order_of_the_kept_patches_does_not_matter_to_mae() -> None:
    objective, views = make("mae"), make_views()
    images, noise = views.pixels[0], views.random(16)
    latent, mask, ids_restore = objective.forward_encoder(images, noise)
    keep = noise.argsort(1)[:, :4]
    turned = torch.where(torch.isin(torch.arange(16), keep[0]), 0.5 - noise[:1] / 2, noise[:1] / 2 + 0.5)
    latent2, mask2, restore2 = objective.forward_encoder(images[:1], turned)
    assert torch.equal(mask2, mask[:1])
    assert not torch.equal(restore2, ids_restore[:1])
    torch.testing.assert_close(
        objective.forward_decoder(latent2, restore2), objective.forward_decoder(latent, ids_restore)[:1]
    )


def test_the_decoder_takes_all_tokens_in_image_order() -> None:
    objective, views = make("mae"), make_views()
    vit: Any = objective.backbone
    tokens = encode(vit, embed(vit, views.pixels[0]), (4, 4))
    order = views.random(16).argsort(1)
    shuffled = torch.cat([tokens[:, :1], torch.stack([t[1:][o] for t, o in zip(tokens, order, strict=True)])], 1)
    torch.testing.assert_close(objective.decoder(tokens), objective.decoder(shuffled, order.argsort(1)))


def test_mae_starts_as_its_authors_do() -> None:
    objective = make("mae", Backbone("vit", size=32, width=64, depth=2, heads=2, patch=4))
    vit: Any = objective.backbone
    assert torch.equal(vit.pos_embed, sincos((8, 8), 64, prefix=1))
    assert not vit.pos_embed.requires_grad
    assert torch.equal(objective.decoder.pos_embed, sincos((8, 8), 8, prefix=1))
    for weight, fan in [
        (vit.blocks[0].attn.qkv.weight, 64 + 192),
        (vit.patch_embed.proj.weight, 64 + 48),
        (objective.decoder.pred.weight, 8 + 48),
    ]:
        bound = math.sqrt(6 / fan)  # of Xavier's uniform distribution
        assert 0.98 * bound < weight.abs().max() <= bound * (1 + 1e-6)
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert vit.cls_token.std().item() == pytest.approx(0.02, rel=0.4)


def test_an_attention_window_restricts_maes_encoder_to_visible_neighbours() -> None:
    windowed = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4, attention_window=3)
    objective, views = make("mae", windowed, mask_ratio=0.5), make_views()
    images, noise = views.pixels[0], views.random(16)
    latent, _, _ = objective.forward_encoder(images, noise)
    assert not torch.allclose(latent, make("mae", mask_ratio=0.5).forward_encoder(images, noise)[0], atol=1e-3)
    keep = noise.argsort(1)[:, :8]
    tokens = embed(objective.backbone, images)
    visible = torch.stack([torch.cat([t[:1], t[1:][ids]]) for t, ids in zip(tokens, keep, strict=True)])
    expected = naive_window(objective.backbone, visible, torch.stack([keep // 4, keep % 4], -1), 3)
    torch.testing.assert_close(latent, expected, rtol=1e-4, atol=1e-5)
