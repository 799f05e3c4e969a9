"""What objectives with a teacher share: the moving average of weights, Sinkhorn's balance, the spread of embeddings."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.joint_embedding import plain_sinkhorn, random
from torch import nn

from sightline.training.momentum import embedding_std, follow, sinkhorn


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    made(torch.randn(8, 3))
    return made


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.99])
def test_the_average_is_that_of_a_loop(momentum: float, buffers: bool) -> None:
    average, leader = model(0), model(1)
    leader(torch.randn(8, 3))  # counts one batch more
    before = copy.deepcopy(average.state_dict())
    follow(average, leader, momentum, buffers)
    parameters = dict(average.named_parameters())
    for name, value in average.state_dict().items():
        theirs = leader.state_dict()[name]
        if name in parameters or (buffers and value.is_floating_point()):
            expected = momentum * before[name].double() + (1 - momentum) * theirs.double()
            torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-7)
        else:
            assert torch.equal(value, theirs if buffers else before[name])
    if momentum == 0:
        assert torch.equal(average[0].weight, leader[0].weight)


def test_shared_weights_follow_once() -> None:
    average, leader = model(0), model(1)
    for made in (average, leader):
        made[2].weight = made[0].weight
    before = average[0].weight.clone()
    follow(average, leader, 0.75, buffers=True)
    torch.testing.assert_close(average[0].weight, 0.75 * before + 0.25 * leader[0].weight)


def test_sinkhorn_is_the_papers_and_survives_a_prototype_that_nobody_wants() -> None:
    p = F.softmax(random(6, 5) * 4, 1)
    np.testing.assert_allclose(sinkhorn(p).numpy(), plain_sinkhorn(p.double().numpy()), atol=1e-6)
    unwanted = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]])
    assert torch.allclose(sinkhorn(unwanted).sum(1), torch.ones(2))


def test_spread_is_one_for_all_directions_and_zero_for_one() -> None:
    both = torch.cat([torch.eye(4), -torch.eye(4)]) * 3
    assert embedding_std(both).item() == pytest.approx(1.0)  # each axis: √(2/8), times √4
    assert embedding_std(torch.ones(5, 4)).item() == pytest.approx(0.0, abs=1e-6)
    assert embedding_std(torch.ones(1, 4)).item() == 0.0
