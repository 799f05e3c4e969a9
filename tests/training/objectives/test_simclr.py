"""SimCLR: the loss against a loop in float64, and what its forward computes."""

import math

import pytest
import torch
from support.joint_embedding import RESNET, VIT, batch, make, random, unit
from torch import nn

from sightline.encoders.modules.vit import features
from sightline.training.momentum import embedding_std
from sightline.training.objectives import simclr


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_nt_xent_is_the_mean_over_all_views_without_themselves(temperature: float) -> None:
    z = random(10, 6)
    z[5:] += 2 * z[:5]
    loss, accuracy = simclr.nt_xent(z, temperature)
    u, expected, found = unit(z), 0.0, 0
    for i in range(10):
        partner = (i + 5) % 10
        others = {j: u[i] @ u[j] / temperature for j in range(10) if j != i}
        expected -= math.log(math.exp(others[partner]) / sum(math.exp(x) for x in others.values())) / 10
        found += max(others, key=others.__getitem__) == partner
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert 0.3 < accuracy.item() == pytest.approx(found / 10)


def test_simclr_projects_both_views_as_one_batch() -> None:
    for backbone in (VIT, RESNET):
        objective = make("simclr", backbone, layers=3)
        assert sum(isinstance(layer, nn.Linear) for layer in objective.projector.modules()) == 3
        seen = batch("simclr", objective, backbone)
        loss, scalars = objective(seen)
        h = features(objective.backbone, torch.cat(seen.pixels))
        z = objective.projector(h)
        assert loss.item() == pytest.approx(simclr.nt_xent(z, 0.1)[0].item(), rel=1e-5)
        assert scalars["std"].item() == pytest.approx(embedding_std(h).item(), rel=1e-5)
