"""Supervised, MAE (also as FCMAE) and SimMIM: losses against plain float64 loops, and who sees which pixels."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.core.schedules import Progress
from sightline.encoders.modules.masking import enlarge, patchify, random_masking
from sightline.encoders.modules.vit import embed, encode, sincos
from sightline.images.augment.mixup import draw_mix
from sightline.training.backbones import Backbone, build
from sightline.training.objective import Views
from sightline.training.objectives import mae, simmim, supervised
from sightline.training.objectives.mae.fcmae import encode_visible, place, stack, stride_of

VIT = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4)
CONVNEXT = Backbone("convnextv2_atto", size=32, patch=1)  # total stride 8
SMALL_DECODER: dict[str, Any] = {"decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}
BATCH = 6


def make_views(n: int = BATCH, size: int = 16, classes: int = 3, start: int = 0) -> Views:
    """Some of the same endless batch: image i has the same pixels, label and key whatever the batch."""
    noise = [torch.randn(3, size, size, generator=torch.Generator().manual_seed(start + i)) for i in range(n)]
    pixels = torch.stack(noise) / 2 + torch.linspace(-4, 4, size)  # brighter to the right: something to be learnt
    labels = torch.tensor([(start + i) % classes if (start + i) not in (0, 4, 6, 7) else -1 for i in range(n)])
    return Views([pixels], labels, np.arange(start, start + n, dtype=np.uint64), Progress(0, 10, 5))


def make(name: str, backbone: Backbone = VIT, **settings: Any) -> Any:
    torch.manual_seed(0)
    plugin = {"supervised": supervised, "mae": mae, "simmim": simmim}[name]
    defaults: dict[str, dict[str, Any]] = {"supervised": {}, "mae": SMALL_DECODER, "simmim": {"mask_unit": 8}}
    module = build(backbone, classes=3 if name == "supervised" else 0).module
    return plugin.Objective(module, plugin.Config(**{**defaults[name], **settings}))


# ---------------------------------------------------------------------------------------------------------------
# Losses


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_supervised_loss_is_the_mean_cross_entropy_of_labelled_images(smoothing: float) -> None:
    objective, views = make("supervised", label_smoothing=smoothing), make_views()
    loss, scalars = objective(views)
    logits = objective.backbone(views.pixels[0]).detach().double().numpy()
    each, right = [], []
    for row, label in zip(logits, views.labels.tolist(), strict=True):
        if label < 0:
            continue
        log_p = row - math.log(np.exp(row).sum())
        target = np.full(3, smoothing / 3)
        target[label] += 1 - smoothing
        each.append(-(target * log_p).sum())
        right.append(row.argmax() == label)
    assert len(each) == 4
    assert loss.item() == pytest.approx(np.mean(each), rel=1e-5)
    assert scalars["accuracy"].item() == pytest.approx(np.mean(right))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_supervised_training_mixes_images_and_labels(mixup: float, cutmix: float) -> None:
    objective = make("supervised", label_smoothing=0.1, mixup=mixup, cutmix=cutmix)
    assert (objective.pairs, make("supervised").pairs) == (True, False)
    for step in range(4):
        views = make_views()
        views.progress, views.seed = Progress(step, 10, 5), 7
        mix = draw_mix(mixup, cutmix, (16, 16), 7, step)
        assert mix is not None
        x, total, mass = views.pixels[0], 0.0, 0.0
        for i, label in enumerate(views.labels.tolist()):
            other = i ^ 1  # neighbours
            if mix.box is None:
                image = mix.share * x[i] + (1 - mix.share) * x[other]
            else:
                image = x[i].clone()
                image[(slice(None), *mix.box)] = x[other][(slice(None), *mix.box)]
            row = objective.backbone(image[None])[0].detach().double().numpy()
            nats = math.log(np.exp(row).sum()) - row
            for one, weight in ((label, mix.share), (views.labels[other].item(), 1 - mix.share)):
                if one >= 0:
                    total += weight * (0.9 * nats[int(one)] + 0.1 * nats.mean())
                    mass += weight
        assert objective(views)[0].item() == pytest.approx(total / mass, rel=1e-5)


def test_without_any_label_the_supervised_loss_is_zero() -> None:
    views = make_views()
    views.labels.fill_(-1)
    loss, scalars = make("supervised")(views)
    assert loss.item() == 0
    assert scalars["accuracy"].item() == 0


@pytest.mark.parametrize("name", ["resnet18", "convnextv2_atto"])
def test_supervised_logits_of_a_cnn_are_its_own(name: str) -> None:
    objective, views = make("supervised", Backbone(name, size=32), label_smoothing=0.0), make_views(size=32)
    objective.eval()  # batch statistics are not to be updated between the two
    expected = F.cross_entropy(objective.backbone(views.pixels[0]), views.labels, ignore_index=-1)
    assert objective(views)[0].item() == pytest.approx(expected.item(), rel=1e-5)


def naive_mae(images: Tensor, pred: Tensor, mask: Tensor, p: int, norm: bool) -> float:
    """Σ over hidden patches of the mean squared error, by loops."""
    columns, each = images.shape[-1] // p, []
    for b in range(len(images)):
        for n in range(mask.shape[1]):
            if mask[b, n]:
                y, x = n // columns * p, n % columns * p
                pixels = images[b, :, y : y + p, x : x + p].double().numpy()
                t = np.array([pixels[c, i, j] for i in range(p) for j in range(p) for c in range(3)])
                if norm:
                    t = (t - t.mean()) / math.sqrt(t.var(ddof=1) + 1e-6)
                each.append(((pred[b, n].detach().double().numpy() - t) ** 2).mean())
    return float(np.mean(each))


@pytest.mark.parametrize("norm", [True, False])
def test_mae_loss(norm: bool) -> None:
    objective, views = make("mae", norm_pix=norm), make_views()
    images = views.pixels[0]
    latent, mask, ids_restore = objective.forward_encoder(images, views.random(16))
    assert latent.shape == (BATCH, 1 + 4, 16)
    assert (mask.sum(1) == 12).all()
    expected = naive_mae(images, objective.forward_decoder(latent, ids_restore), mask, 4, norm)
    assert objective(views)[0].item() == pytest.approx(expected, rel=1e-5)


def naive_norm_target(images: Tensor, side: int) -> np.ndarray:
    x = images.double().numpy()
    target, reach = np.zeros_like(x), side // 2
    for b, c, row, column in np.ndindex(*x.shape):
        around = x[b, c, max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1]
        target[b, c, row, column] = (x[b, c, row, column] - around.mean()) / math.sqrt(around.var(ddof=1) + 1e-6)
    return target


@pytest.mark.parametrize("side", [3, 7, 41])
@pytest.mark.parametrize("size", [(16, 16), (5, 12)])
def test_simmims_normalised_target(side: int, size: tuple[int, int]) -> None:
    images = 3 + torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(5))
    images[1, 2] = 0.25  # nothing to divide by
    found = simmim.norm_target(images, side)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), naive_norm_target(images, side), rtol=1e-6, atol=1e-6)
    moved = simmim.norm_target(images * torch.tensor([2.0, 0.5, 4.0]).view(3, 1, 1) - 1, side)
    np.testing.assert_allclose(moved[0].numpy(), found[0].numpy(), atol=2e-5)


@pytest.mark.parametrize(("unit", "hidden", "side"), [(4, 10, 0), (8, 3, 0), (4, 10, 5)])
def test_simmim_loss(unit: int, hidden: int, side: int) -> None:
    objective, views = make("simmim", mask_unit=unit, norm_target=side), make_views()
    images, units = views.pixels[0], (16 // unit, 16 // unit)
    mask = objective.random_mask(views.random(math.prod(units)))
    assert (mask.sum(1) == hidden).all()  # ⌈0.6 · 16⌉ and ⌈0.6 · 4⌉
    masked = embed(objective.backbone, images, enlarge(mask, units, unit // 4).flatten(1), objective.mask_token)
    pred = objective.head(encode(objective.backbone, masked, (4, 4))[:, 1:]).detach().double().numpy()
    target = naive_norm_target(images, side) if side else images.double().numpy()
    above = below = 0.0
    for b in range(BATCH):
        for y in range(16):
            for x in range(16):
                if mask[b, (y // unit) * units[1] + x // unit]:
                    patch, inside = (y // 4) * 4 + x // 4, (y % 4) * 4 + x % 4  # channels are fastest
                    above += np.abs(target[b, :, y, x] - pred[b, patch, 3 * inside : 3 * inside + 3]).sum()
                    below += 1
    assert objective(views)[0].item() == pytest.approx(above / (below + 1e-5) / 3, rel=1e-5)


@pytest.mark.parametrize("name", ["mae", "simmim"])
def test_registers_and_no_cls_shift_no_patch(name: str) -> None:
    backbone = replace(VIT, backbone="vit_betwixt_patch16_reg4_gap_256")
    objective, views = make(name, backbone), make_views()
    assert objective.backbone.num_prefix_tokens == 4
    assert objective.backbone.cls_token is None
    images = views.pixels[0]
    if name == "mae":
        latent, mask, ids_restore = objective.forward_encoder(images, views.random(16))
        assert latent.shape == (BATCH, 4 + 4, 16)
        expected = naive_mae(images, objective.forward_decoder(latent, ids_restore), mask, 4, norm=True)
    else:
        mask = enlarge(objective.random_mask(views.random(4)), (2, 2), 2).flatten(1)
        tokens = encode(objective.backbone, embed(objective.backbone, images, mask, objective.mask_token), (4, 4))
        error = (objective.head(tokens[:, 4:]) - patchify(images, 4)).abs()
        expected = error[mask].mean().item()
    assert objective(views)[0].item() == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# Who sees which pixels


def other_pixels(images: Tensor, mask: Tensor) -> Tensor:
    """The same images with noise where the mask (B, h, w) is true."""
    return torch.where(mask.unsqueeze(1), torch.randn(images.shape), images)


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


def test_simmim_predicts_from_visible_pixels_alone() -> None:
    objective, views = make("simmim"), make_views()
    mask = objective.random_mask(views.random(4))
    patches, pixels = enlarge(mask, (2, 2), 2).flatten(1), enlarge(mask, (2, 2), 8)
    pred = objective.forward_encoder(views.pixels[0], patches)
    assert torch.equal(objective.forward_encoder(other_pixels(views.pixels[0], pixels), patches), pred)
    assert not torch.equal(objective.forward_encoder(other_pixels(views.pixels[0], ~pixels), patches), pred)


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


# ---------------------------------------------------------------------------------------------------------------
# FCMAE


def scramble(module: nn.Module) -> None:
    """Biases and GRN that are not zero, so that they can be told from nothing."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1 and "norm.weight" not in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))


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
    return twin.stages(twin.stem(images))  # type: ignore[no-any-return]


def test_fcmaes_encoder_equals_masked_dense_convolutions(fcmae: Any) -> None:
    views = make_views(3, size=32)
    ids_keep, _, mask = random_masking(views.random(16), 6)
    assert stride_of(fcmae.backbone) == 8
    dense = dense_twin(fcmae.backbone, views.pixels[0], mask).flatten(2).transpose(1, 2)  # (B, N, D)
    expected = torch.stack([tokens[ids] for tokens, ids in zip(dense, ids_keep, strict=True)])
    torch.testing.assert_close(
        encode_visible(fcmae.backbone, views.pixels[0], ids_keep), expected, rtol=1e-4, atol=1e-4
    )


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


# ---------------------------------------------------------------------------------------------------------------
# What all have in common

ALL = [("supervised", VIT), ("mae", VIT), ("simmim", VIT), ("mae", CONVNEXT)]


@pytest.mark.parametrize(("name", "backbone"), ALL)
def test_gradients_reach_all_that_is_trained_and_the_loss_falls(name: str, backbone: Backbone) -> None:
    objective, views = make(name, backbone), make_views(4, size=backbone.size)
    trained = {key: p for key, p in objective.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=2e-3)
    losses = []
    for _ in range(11):
        optimizer.zero_grad()
        loss, scalars = objective(views)
        loss.backward()
        assert all(p.grad is not None for p in trained.values())  # DDP waits for each of them
        optimizer.step()
        objective.after_step(views.progress)
        losses.append(loss.item())
        assert all(value.ndim == 0 and not value.requires_grad for value in scalars.values())
    assert all(objective.encoder.get_parameter(key).grad.abs().sum() > 0 for key in some_weights(backbone))
    assert losses[-1] < 0.97 * losses[0]


def some_weights(backbone: Backbone) -> list[str]:
    vit = ["patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "norm.weight", "cls_token"]
    return vit if backbone is VIT else ["stem.0.weight", "stages.3.blocks.1.mlp.fc2.weight"]


@pytest.mark.parametrize(("name", "backbone"), ALL)
@pytest.mark.bf16
def test_bfloat16_changes_the_loss_little(name: str, backbone: Backbone) -> None:
    settings = {"norm_target": 5} if name == "simmim" else {}
    objective, views = make(name, backbone, **settings), make_views(4, size=backbone.size)
    loss, _ = objective(views)
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = objective(views)
    rough.backward()
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(loss.item(), rel=0.02)


@pytest.mark.parametrize(("name", "backbone"), ALL)
def test_the_state_can_be_saved_and_loaded(name: str, backbone: Backbone) -> None:
    objective, views = make(name, backbone), make_views(2, size=backbone.size)
    twin = make(name, backbone)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert not torch.equal(twin(views)[0], objective(views)[0])
    twin.load_state_dict(objective.state_dict())
    assert torch.equal(twin(views)[0], objective(views)[0])


@pytest.mark.parametrize("name", ["supervised", "mae", "simmim"])
def test_each_file_declares_one_view_of_the_size_of_the_backbone(name: str) -> None:
    plugin: Any = {"supervised": supervised, "mae": mae, "simmim": simmim}[name]
    (policy,) = plugin.views(plugin.Config(crop=(0.3, 0.9)), VIT)
    assert (policy.size, policy.crop, policy.flip, policy.jitter) == (16, (0.3, 0.9), 0.5, None)


def test_supervised_views_may_be_strong() -> None:
    (policy,) = supervised.views(supervised.Config(randaugment=(9.0, 0.5), erase=0.25), VIT)
    assert (policy.randaugment, policy.erase) == ((9.0, 0.5), 0.25)


def naive_window(vit: Any, tokens: Tensor, places: Tensor, window: int) -> Tensor:
    """Blocks with softmax over the patches of a window and CLS, image by image; places (B, kept, 2)."""
    result = []
    for x, where in zip(tokens, places, strict=True):
        T, D = x.shape
        near = torch.ones(T, T, dtype=torch.bool)
        for i in range(T - 1):
            for j in range(T - 1):
                near[1 + i, 1 + j] = bool((where[i] - where[j]).abs().max() <= window // 2)
        for block in vit.blocks:
            q, k, v = block.attn.qkv(block.norm1(x)).reshape(T, 3, 2, D // 2).permute(1, 2, 0, 3)
            scores = (q @ k.transpose(1, 2) / math.sqrt(D // 2)).masked_fill(~near, -math.inf)
            x = x + block.attn.proj((scores.softmax(-1) @ v).transpose(0, 1).reshape(T, D))
            x = x + block.mlp(block.norm2(x))
        result.append(vit.norm(x))
    return torch.stack(result)


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


@pytest.mark.parametrize("name", ["supervised", "simmim"])
def test_an_attention_window_counts_in_the_loss(name: str) -> None:
    windowed = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4, attention_window=3)
    objective, views = make(name, windowed), make_views()
    loss = objective(views)[0].item()
    assert loss != make(name)(views)[0].item()
    grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).reshape(1, 16, 2)
    vit = objective.backbone

    def plain(tokens: Tensor) -> Tensor:
        return naive_window(vit, tokens, grid.expand(BATCH, -1, -1), 3)

    if name == "supervised":
        logits = vit.forward_head(plain(embed(vit, views.pixels[0])))
        expected = F.cross_entropy(logits, views.labels, ignore_index=-1, label_smoothing=0.1)
    else:
        mask = objective.random_mask(views.random(4))
        hidden = enlarge(mask, (2, 2), 2).flatten(1)
        tokens = plain(embed(vit, views.pixels[0], hidden, objective.mask_token))[:, 1:]
        expected = objective.forward_loss(views.pixels[0], objective.head(tokens[hidden]), hidden)
    assert loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: mae.Config(mask_ratio=1.0), "mask_ratio must lie between 0 and 1"),
        (lambda: make("mae", decoder_width=10, decoder_heads=4), "A decoder_width of 10 cannot be shared by 4"),
        (lambda: make("mae", decoder_heads=0), "choose a divisor"),
        (lambda: mae.Config(decoder_width=0), "decoder_width is 0, but the decoder needs at least 1"),
        (lambda: mae.Config(decoder_depth=0), "at least one block"),
        (lambda: simmim.Config(mask_ratio=0.0), "mask_ratio must lie between 0 and 1"),
        (lambda: simmim.Config(mask_unit=0), "at least one pixel"),
        (lambda: simmim.Config(norm_target=4), "norm_target is 4; it must be odd and at least 3, or 0"),
        (lambda: simmim.Config(norm_target=-3), "norm_target is -3; it must be odd"),
        (lambda: supervised.Config(label_smoothing=1.0), r"must lie in \[0, 1\)"),
        (lambda: supervised.Config(mixup=-1.0), "mixup is -1.0"),
        (lambda: supervised.views(supervised.Config(erase=2.0), VIT), "erase is a probability"),
        (lambda: make("mae", Backbone("resnet18", size=32)), "choose a ViT or a ConvNeXt-V2"),
        (lambda: make("simmim", Backbone("resnet18", size=32)), "choose a ViT"),
        (lambda: make("simmim", mask_unit=6), "choose from 4, 8, 16"),
        (lambda: make("simmim", mask_unit=16), "hides all of 1 unit of 16 pixels"),
        (lambda: make("mae", mask_ratio=0.95)(make_views()), "hides all of 16 patches of 4 pixels"),
        (lambda: make("mae", CONVNEXT)(make_views(size=20)), "choose a size that is a multiple"),
        (lambda: supervised.Objective(build(VIT).module, supervised.Config()), "give images with labels"),
    ],
)
def test_what_cannot_be_is_said(make_it: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_it()


# ---------------------------------------------------------------------------------------------------------------
# Two processes


SHARED = {"supervised": ("supervised", VIT), "mae": ("mae", VIT), "simmim": ("simmim", VIT), "fcmae": ("mae", CONVNEXT)}


def gradients(name: str, views: Views) -> dict[str, Tensor]:
    objective = make(*SHARED[name])
    loss, scalars = objective(views)
    loss.backward()
    found = {key: p.grad for key, p in objective.named_parameters() if p.grad is not None}
    return {**found, "loss": loss.detach(), **scalars}


def one_of_two(rank: int, folder: Path) -> None:
    """A process that has half of the batch; saves the mean over both of loss, scalars and gradients."""
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for name, (_, backbone) in SHARED.items():
        found = gradients(name, make_views(4, backbone.size, start=4 * rank + 1))
        for value in found.values():
            torch.distributed.all_reduce(value)
            value /= 2
        if rank == 0:
            torch.save(found, folder / name)
    torch.distributed.destroy_process_group()


def test_two_processes_with_half_of_the_batch_each_equal_one(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    for name, (_, backbone) in SHARED.items():
        views = make_views(8, backbone.size, start=1)
        assert (views.labels[:4] >= 0).sum() != (views.labels[4:] >= 0).sum()  # or a wrong mean would be right
        expected = gradients(name, views)
        found = torch.load(tmp_path / name, weights_only=True)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


if __name__ == "__main__":
    one_of_two(int(sys.argv[2]), Path(sys.argv[1]))
