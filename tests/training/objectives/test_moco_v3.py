"""MoCo-v3: loss, heads and initialisation of the official code, and its loop step by step."""

import copy
import math

import pytest
import torch
from support.joint_embedding import (
    FOLLOWERS,
    PER_EPOCH,
    RESNET,
    STEPS,
    VIT,
    batch,
    make,
    optimizer_of,
    pairs,
    random,
    same,
    train_step,
    unit,
)
from torch import nn

from sightline.core.schedules import Progress
from sightline.encoders.modules.vit import features, sincos
from sightline.training.backbones import Backbone
from sightline.training.objectives import moco_v3


@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_info_nce_is_2t_times_the_cross_entropy_of_the_diagonal(temperature: float) -> None:
    q, k = random(7, 5), random(7, 5, seed=1)
    a, b, expected = unit(q), unit(k), 0.0
    for i in range(7):
        scores = [math.exp(a[i] @ b[j] / temperature) for j in range(7)]
        expected -= 2 * temperature * math.log(scores[i] / sum(scores)) / 7
    assert moco_v3.info_nce(q, k, temperature).item() == pytest.approx(expected, rel=1e-5)


def test_moco_heads_are_the_official_ones() -> None:
    def layers(head: nn.Module) -> list[str]:
        return [
            f"{type(x).__name__}{'' if getattr(x, 'affine', True) else ' plain'}"
            for x in head.modules()
            if not [*x.children()]
        ]

    hidden = ["Linear", "BatchNorm1d", "ReLU"]
    vit, resnet = make("moco_v3"), make("moco_v3", RESNET)
    assert layers(vit.projector) == [*hidden, *hidden, "Linear", "BatchNorm1d plain"]
    assert layers(vit.predictor) == [*hidden, "Linear", "BatchNorm1d plain"]
    assert layers(resnet.projector) == [*hidden, "Linear", "BatchNorm1d plain"]
    assert layers(resnet.predictor) == [*hidden, "Linear"]
    assert all(
        x.bias is None for head in (vit.projector, vit.predictor) for x in head.modules() if type(x) is nn.Linear
    )


@pytest.mark.parametrize("backbone", [VIT, RESNET])
def test_moco_normalises_each_view_by_itself(backbone: Backbone) -> None:
    objective = make("moco_v3", backbone)
    seen = batch("moco_v3", objective, backbone)
    loss, _ = objective(seen)
    q1, q2 = (objective.predictor(objective.projector(features(objective.backbone, x))) for x in seen.pixels)
    k1, k2 = (objective.momentum_projector(features(objective.momentum_backbone, x)) for x in seen.pixels)
    expected = moco_v3.info_nce(q1, k2, 0.2) + moco_v3.info_nce(q2, k1, 0.2)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_moco_starts_from_its_own_weights() -> None:
    objective = make("moco_v3", Backbone("vit", size=16, width=64, depth=1, heads=2, patch=4))
    vit = objective.backbone
    for weight, fans in [
        (vit.patch_embed.proj.weight, 3 * 16 + 64),
        (vit.blocks[0].attn.qkv.weight, 64 + 64),  # three matrices, not one
        (vit.blocks[0].mlp.fc1.weight, 64 + 256),
    ]:
        bound = math.sqrt(6 / fans)
        assert 0.97 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not vit.patch_embed.proj.bias.any()
    assert 0 < vit.cls_token.abs().max() < 1e-5
    assert torch.equal(vit.pos_embed, sincos((4, 4), 64, 1, column_first=False))
    assert same(objective.momentum_backbone, vit)


@pytest.mark.parametrize("frozen", [True, False])
def test_moco_patch_projection_and_positions_are_not_trained(frozen: bool) -> None:
    objective = make("moco_v3", stop_grad_patch=frozen)
    before = copy.deepcopy(objective.backbone)
    train_step(objective, optimizer_of(objective), batch("moco_v3", objective))
    assert (objective.backbone.patch_embed.proj.weight.grad is None) == frozen
    assert torch.equal(objective.backbone.patch_embed.proj.weight, before.patch_embed.proj.weight) == frozen
    assert torch.equal(objective.backbone.pos_embed, before.pos_embed)


def test_moco_without_momentum_takes_its_own_projections_as_keys() -> None:
    objective = make("moco_v3", momentum=0.0)
    assert not [name for name in objective.state_dict() if "momentum" in name]
    seen = batch("moco_v3", objective)
    twin = make("moco_v3")  # the same weights: its momentum encoder has not moved yet
    twin.load_state_dict(objective.state_dict(), strict=False)
    for name, leader in FOLLOWERS["moco_v3"].items():
        getattr(twin, name).load_state_dict(getattr(twin, leader).state_dict())
    (loss, _), (other, _) = objective(seen), twin(seen)
    loss.backward()
    other.backward()
    assert loss.item() == pytest.approx(other.item(), rel=1e-6)
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    for name, p in objective.named_parameters():
        if p.grad is not None:
            assert torch.allclose(p.grad, gradients[name], atol=1e-6), name
    objective.after_step(Progress(1, STEPS, PER_EPOCH))


def test_moco_is_the_official_loop_that_updates_before_the_keys() -> None:
    objective, official = make("moco_v3", momentum=0.9), make("moco_v3", momentum=0.9)
    optimizer, other = optimizer_of(objective), optimizer_of(official)
    for step in range(3):
        seen = batch("moco_v3", objective, step=step)
        x1, x2 = seen.pixels
        q1, q2 = (official.predictor(official.projector(features(official.backbone, x))) for x in (x1, x2))
        m = 1 - 0.5 * (1 + math.cos(math.pi * step / STEPS)) * (1 - 0.9)
        with torch.no_grad():
            for k, q in pairs("moco_v3", official):
                k.copy_(m * k + (1 - m) * q)
            k1, k2 = (official.momentum_projector(features(official.momentum_backbone, x)) for x in (x1, x2))
        loss = moco_v3.info_nce(q1, k2, 0.2) + moco_v3.info_nce(q2, k1, 0.2)
        other.zero_grad()
        loss.backward()
        other.step()
        assert train_step(objective, optimizer, seen) == pytest.approx(loss.item(), rel=1e-4)
