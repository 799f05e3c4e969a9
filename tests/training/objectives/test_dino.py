"""DINO: loss against loops in float64, head, temperature, centre and teacher, and the official loop step by step."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.joint_embedding import (
    PER_EPOCH,
    STEPS,
    VIT,
    batch,
    make,
    official_vit,
    optimizer_of,
    pairs,
    plain_features,
    plain_sinkhorn,
    random,
    train_step,
)
from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.encoders.modules.positions import by_scale
from sightline.encoders.modules.vit import features
from sightline.training.backbones import Backbone
from sightline.training.objectives import dino


@pytest.mark.parametrize("crops", [2, 5])
def test_dino_averages_over_pairs_of_different_crops(crops: int) -> None:
    student, outputs = random(crops, 4, 9) * 3, random(2, 4, 9, seed=1) * 3
    teacher = F.softmax(outputs, -1)
    s, p = student.double(), F.softmax(outputs.double(), -1)
    terms = [
        np.mean([-sum(p[g, i] * torch.log(F.softmax(s[v, i], 0))) for i in range(4)])
        for g in range(2)
        for v in range(crops)
        if v != g
    ]
    assert len(terms) == 2 * (crops - 1)
    assert dino.cross_entropy(student, teacher).item() == pytest.approx(float(np.mean(terms)), rel=1e-5)


def test_dino_balances_the_centred_teacher_over_its_outputs() -> None:
    objective = make("dino", sinkhorn=True)
    objective.center += random(20, seed=2) / 10
    outputs, temperature = random(8, 20) / 10, dino.teacher_temperature(objective.config, 3)
    scores = np.exp((outputs - objective.center).double().numpy() / temperature)
    expected = plain_sinkhorn(scores / scores.sum(1, keepdims=True)).reshape(2, 4, 20)
    found = objective.sharpen(outputs, 3)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
    shares = found.sum((0, 1)) / 8
    unbalanced = make("dino")
    unbalanced.center.copy_(objective.center)
    before = unbalanced.sharpen(outputs, 3).sum((0, 1)) / 8
    assert (shares - 1 / 20).abs().max() < 0.2 * (before - 1 / 20).abs().max()


def test_dino_sees_global_crops_with_the_teacher_and_all_with_the_student() -> None:
    objective = make("dino")
    nn.init.normal_(objective.center, std=0.1)
    seen = batch("dino", objective, step=2)  # the second of three epochs of warm-up
    assert [x.shape[-1] for x in seen.pixels] == [16, 16, 8, 8, 8]
    loss, scalars = objective(seen)

    def outputs(backbone: nn.Module, head: Any, x: Tensor) -> Tensor:
        weight = head.last_layer.parametrizations.weight.original1
        z = F.normalize(head.mlp(features(backbone, x, resize=by_scale)), dim=1)
        return (z @ F.normalize(weight, dim=1).T).double()

    p = [
        F.softmax((outputs(objective.teacher_backbone, objective.teacher_head, x) - objective.center) / 0.055, 1)
        for x in seen.pixels[:2]
    ]
    s = [torch.log_softmax(outputs(objective.backbone, objective.head, x) / 0.1, 1) for x in seen.pixels]
    terms = [-(p[g] * s[v]).sum(1).mean() for g in range(2) for v in range(5) if v != g]
    assert loss.item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)
    entropy = -(torch.cat(p) * torch.cat(p).log()).sum(1).mean()
    assert scalars["entropy"].item() == pytest.approx(entropy.item(), rel=1e-5)


def test_dino_head_with_batch_normalisation_has_statistics_over_all_crops() -> None:
    objective = make("dino", batch_norm=True)
    seen = batch("dino", objective)
    rows = torch.cat([features(objective.backbone, x, resize=by_scale) for x in seen.pixels]).detach().double()
    weights = dict(objective.head.double().named_parameters())
    x = rows
    for linear in (0, 3):
        x = x @ weights[f"mlp.{linear}.weight"].T + weights[f"mlp.{linear}.bias"]
        x = (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-5)
        x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))  # the scale is 1 and the shift 0 in the beginning
    x = F.normalize(x @ weights["mlp.6.weight"].T + weights["mlp.6.bias"], dim=1)
    expected = x @ F.normalize(weights["last_layer.parametrizations.weight.original1"], dim=1).T
    objective.head.float()
    torch.testing.assert_close(objective.forward_student(seen).flatten(0, 1).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("local_size", [8, 12])
def test_dinos_loss_of_small_crops_is_the_official_one(local_size: int) -> None:
    """Bicubic positions without antialiasing, by DINO's own scale; all in float64 with loops."""
    backbone, state = official_vit()
    objective = make("dino", backbone, local_size=local_size)
    objective.backbone.load_state_dict(state)
    objective.teacher_backbone.load_state_dict(state)
    seen = batch("dino", objective, backbone)
    with torch.no_grad():
        s = [objective.head.double()(plain_features(state, x, more=0.1)) / 0.1 for x in seen.pixels]
        t = [objective.teacher_head.double()(plain_features(state, x, more=0.1)) for x in seen.pixels[:2]]
    terms = [
        -(t[g][i] / 0.04).softmax(0) @ s[v][i].log_softmax(0)
        for g in range(2)
        for v in range(5)
        if v != g
        for i in range(8)
    ]
    objective.float()
    assert objective(seen)[0].item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-6)


def test_dino_without_multi_crop_has_two_views() -> None:
    objective = make("dino", multi_crop=False)
    assert len(dino.views(objective.config, VIT)) == 2
    loss, _ = objective(batch("dino", objective))
    loss.backward()
    assert objective.forward_student(batch("dino", objective)).shape == (2, 8, 20)


def test_dino_temperature_follows_the_warm_up() -> None:
    config = dino.DinoConfig(warmup_temperature=0.02, teacher_temperature=0.08, warmup_temperature_epochs=4)
    expected = np.concatenate([np.linspace(0.02, 0.08, 4), [0.08, 0.08]])
    np.testing.assert_allclose([dino.teacher_temperature(config, epoch) for epoch in range(6)], expected, atol=1e-12)
    assert dino.teacher_temperature(dino.DinoConfig(warmup_temperature_epochs=0), 0) == 0.07
    assert dino.teacher_temperature(dino.DinoConfig(warmup_temperature_epochs=1), 0) == 0.04


def test_dino_last_layer_rests_in_the_first_epoch() -> None:
    objective = make("dino", norm_last_layer=False)
    optimizer = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], 0.01, weight_decay=0.1)
    length, direction = objective.head.last_layer.parameters()
    before = length.clone(), direction.clone()
    for step in range(PER_EPOCH):
        train_step(objective, optimizer, batch("dino", objective, step=step))
    assert torch.equal(length, before[0])
    assert torch.equal(direction, before[1])
    train_step(objective, optimizer, batch("dino", objective, step=PER_EPOCH))
    assert not torch.equal(length, before[0])
    assert not torch.equal(direction, before[1])


def test_dino_weights_of_the_last_layer_have_length_one() -> None:
    objective = make("dino", freeze_last_layer=0)
    optimizer = optimizer_of(objective)
    for step in range(2):
        train_step(objective, optimizer, batch("dino", objective, step=step))
    for head in (objective.head, objective.teacher_head):
        assert torch.allclose(head.last_layer.weight.norm(dim=1), torch.ones(20), atol=1e-6)


def test_dino_teacher_leaves_out_no_layers() -> None:
    objective = make("dino", Backbone("vit", size=16, width=16, depth=4, heads=2, patch=4, drop_path=0.5))
    seen = batch("dino", objective)
    assert torch.equal(objective.forward_teacher(seen), objective.forward_teacher(seen))
    assert not torch.equal(objective.forward_student(seen), objective.forward_student(seen))


def test_dino_is_the_official_loop_that_updates_centre_and_teacher_last() -> None:
    objective, official = make("dino", momentum=0.9), make("dino", momentum=0.9)
    optimizer, other = optimizer_of(objective), optimizer_of(official)
    center = torch.zeros(20)
    for step in range(4):
        seen = batch("dino", objective, step=step)
        with torch.no_grad():
            t = torch.cat([official.teacher_head(features(official.teacher_backbone, x)) for x in seen.pixels[:2]])
        s = [official.head(features(official.backbone, x, resize=by_scale)) / 0.1 for x in seen.pixels]
        temperature = [0.04, 0.055, 0.07][step // PER_EPOCH]
        p = F.softmax((t - center) / temperature, 1).chunk(2)
        terms = [-(p[g] * torch.log_softmax(s[v], 1)).sum(1).mean() for g in range(2) for v in range(5) if v != g]
        loss = torch.stack(terms).mean()
        center = 0.9 * center + 0.1 * t.mean(0)
        other.zero_grad()
        loss.backward()
        if step < PER_EPOCH:
            official.head.last_layer.zero_grad(set_to_none=True)
        other.step()
        m = 1 - 0.5 * (1 - 0.9) * (1 + math.cos(math.pi * step / STEPS))
        with torch.no_grad():
            for k, q in pairs("dino", official):
                k.copy_(m * k + (1 - m) * q)
        assert train_step(objective, optimizer, seen) == pytest.approx(loss.item(), rel=1e-4)
        assert torch.allclose(objective.center, center, atol=1e-6)


def test_dino_centre_moves_once_per_step_however_many_batches_are_accumulated() -> None:
    whole, parts = make("dino"), make("dino")
    optimizers = optimizer_of(whole), optimizer_of(parts)
    for step in range(2):
        train_step(whole, optimizers[0], batch("dino", whole, step=step))
        halves = [batch("dino", parts, step=step, images=images) for images in (slice(0, 4), slice(4, 8))]
        train_step(parts, optimizers[1], *halves)
    assert whole.center.abs().max() > 1e-3
    assert torch.allclose(whole.center, parts.center, atol=1e-6)


@pytest.mark.parametrize(
    ("backbone", "size"),
    [
        (Backbone("vit"), 96),
        (Backbone("vit_small_patch14_dinov2", size=518), 224),
        (Backbone("vit", size=64, patch=8), 24),
        (Backbone("resnet18", size=32), 14),
    ],
)
def test_small_crops_are_whole_patches(backbone: Backbone, size: int) -> None:
    assert dino.local_size(backbone) == size


CONVNEXT = Backbone("convnextv2_atto", size=48, width=8)
OF_CONVNEXT = r"the total stride of ConvNeXt is 32 \(8 with patch=1\); choose another local_size, or multi_crop=false"


@pytest.mark.parametrize(
    ("backbone", "settings", "word"),
    [
        (VIT, {"local_size": 10}, "10 pixels cannot be cut into patches of 4"),
        (CONVNEXT, {}, f"Small crops of 21 pixels cannot be used, since {OF_CONVNEXT}"),
        (CONVNEXT, {"local_size": 31}, f"Small crops of 31 pixels cannot be used, since {OF_CONVNEXT}"),
        (replace(CONVNEXT, patch=1), {"local_size": 7}, "7 pixels .* total stride of ConvNeXt is 8; choose"),
        (Backbone("deit_tiny_distilled_patch16_224", size=64, depth=1), {"local_size": 32}, "32 pixels .* says: Input"),
    ],
)
def test_small_crops_that_the_backbone_cannot_take_are_told(
    backbone: Backbone, settings: dict[str, Any], word: str
) -> None:
    objective = make("dino", backbone, **settings)
    with pytest.raises(InputError, match=word):
        objective.check_views(dino.views(objective.config, backbone))


@pytest.mark.parametrize(
    ("backbone", "settings"),
    [
        (VIT, {"local_size": 12}),
        (VIT, {"local_size": 10, "multi_crop": False}),
        (CONVNEXT, {"local_size": 32}),
        (CONVNEXT, {"multi_crop": False}),
        (CONVNEXT, {"local_crops": 0}),
        (replace(CONVNEXT, patch=1), {}),
        (Backbone("resnet18", size=32, width=8), {}),  # padded convolutions: 14 pixels under a total stride of 32
    ],
)
def test_small_crops_that_pass_the_check_can_be_trained(backbone: Backbone, settings: dict[str, Any]) -> None:
    objective = make("dino", backbone, **settings)
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    state = torch.get_rng_state()
    objective.check_views(dino.views(objective.config, backbone))
    assert torch.equal(torch.get_rng_state(), state)  # the check leaves nothing behind
    assert all(torch.equal(value, before[name]) for name, value in objective.state_dict().items())
    assert all(part.training for part in objective.modules())
    loss, _ = objective(batch("dino", objective, backbone))
    assert loss.isfinite()
