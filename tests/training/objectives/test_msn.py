"""MSN: the three parts of its loss against loops in float64, masks and positions of its anchors, its momentum."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.joint_embedding import (
    PER_EPOCH,
    STEPS,
    batch,
    make,
    official_vit,
    pairs,
    plain_features,
    plain_sinkhorn,
    random,
    unit,
)
from torch import Tensor

from sightline.core.schedules import Progress
from sightline.encoders.modules.vit import features
from sightline.training.objectives import msn


@pytest.mark.parametrize("settings", [{"sinkhorn": False}, {"me_max": 0.3}, {"entropy": 0.7, "sharpening": 0.5}])
def test_msn_has_the_three_parts_of_the_paper(settings: dict[str, Any]) -> None:
    objective = make("msn", **settings)
    config = objective.config
    anchors, targets = random(12, 12), random(4, 12, seed=1)  # three views of four images, view by view
    loss, scalars = objective.forward_loss(anchors, targets)

    def soft_neighbours(z: Tensor) -> np.ndarray:
        scores = np.exp(unit(z) @ unit(objective.prototypes).T / config.temperature)
        return scores / scores.sum(1, keepdims=True)

    p, wanted = soft_neighbours(anchors), soft_neighbours(targets) ** (1 / config.sharpening)
    wanted /= wanted.sum(1, keepdims=True)
    if config.sinkhorn:
        wanted = plain_sinkhorn(wanted)
    cross_entropy = np.mean([-(wanted[i % 4] * np.log(p[i])).sum() for i in range(12)])
    average = p.mean(0)
    me_max = math.log(20) + (average * np.log(average)).sum()
    entropy = -(p * np.log(p)).sum(1).mean()
    expected = cross_entropy + config.me_max * me_max + config.entropy * entropy
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert scalars["cross_entropy"].item() == pytest.approx(cross_entropy, rel=1e-5)
    assert scalars["me_max"].item() == pytest.approx(me_max, rel=1e-4)


def test_sharp_targets_and_distant_anchors_stay_finite() -> None:
    objective = make("msn", temperature=0.001, sharpening=0.1)
    loss, _ = objective.forward_loss(random(8, 12), random(4, 12, seed=1))
    loss.backward()
    assert loss.isfinite()
    assert objective.prototypes.grad.isfinite().all()
    uneven = torch.tensor([[-200.0, 0.0, 1.0]], requires_grad=True)
    msn.mean_entropy(uneven.softmax(1)).backward()
    assert uneven.grad.isfinite().all()


@pytest.mark.parametrize("focal_size", [8, 12])
def test_msns_small_anchors_have_the_official_positions(focal_size: int) -> None:
    """By the scale √(n/N), without antialiasing."""
    backbone, state = official_vit()
    objective = make("msn", backbone, rand_views=0, focal_size=focal_size)
    objective.backbone.load_state_dict(state)
    seen = batch("msn", objective, backbone)
    found = objective.forward_anchors(seen)[0]
    plain = torch.cat([plain_features(state, x, more=0.0) for x in seen.pixels[1:]])
    torch.testing.assert_close(found, objective.head(plain.float()), rtol=1e-5, atol=1e-5)


def test_msn_masks_each_full_anchor_in_its_own_way_and_no_small_one() -> None:
    objective = make("msn", mask_ratio=0.7)
    seen = batch("msn", objective)
    assert [x.shape[-1] for x in seen.pixels] == [16, 16, 16, 8, 8]
    keep = [torch.from_numpy(seen.random(16, view).numpy().argsort(1)[:, :4].copy()) for view in (1, 2)]
    assert not torch.equal(keep[0], keep[1])
    masked = [features(objective.backbone, seen.pixels[1 + i], keep[i]) for i in range(2)]
    small = [features(objective.backbone, x) for x in seen.pixels[3:]]
    expected = torch.cat([objective.head(torch.cat(masked)), objective.head(torch.cat(small))])
    assert torch.allclose(objective.forward_anchors(seen)[0], expected, atol=1e-5)
    target = objective.target_head(features(objective.target_backbone, seen.pixels[0]))
    assert torch.allclose(objective.forward_targets(seen), target, atol=1e-5)


@pytest.mark.parametrize("settings", [{"rand_views": 1, "focal_views": 0}, {"rand_views": 0, "focal_views": 1}])
def test_msn_does_with_one_kind_of_anchor(settings: dict[str, int]) -> None:
    objective = make("msn", **settings)
    loss, _ = objective(batch("msn", objective))
    loss.backward()
    assert objective.prototypes.grad.any()


def test_the_momentum_of_msn_may_rise_linearly() -> None:
    """As in the official code: 0.996 + 0.004 · i / (1.25 · steps) in step i, counted from 0."""
    objective = make("msn", momentum=0.996, momentum_end=0.9992, momentum_schedule="linear")
    for k, q in pairs("msn", objective):
        k.data.fill_(1.0)
        q.data.fill_(0.0)
    value = 1.0
    for step in range(STEPS):
        objective.after_step(Progress(step + 1, STEPS, PER_EPOCH))
        value *= 0.996 + 0.004 * step / (1.25 * STEPS)
        assert all(torch.allclose(k, torch.tensor(value), atol=1e-6) for k, _ in pairs("msn", objective))
