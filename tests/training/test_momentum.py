"""The moving average of weights, against a loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sightline.training.momentum import follow


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
        made[2].weight = made[0].weight  # type: ignore[index]
    before = average[0].weight.clone()  # type: ignore[index]
    follow(average, leader, 0.75, buffers=True)
    torch.testing.assert_close(average[0].weight, 0.75 * before + 0.25 * leader[0].weight)  # type: ignore[index]
