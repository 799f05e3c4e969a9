"""What objectives with a teacher share: Sinkhorn's balance and the spread of embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.joint_embedding import plain_sinkhorn, random

from sightline.training.momentum import sinkhorn, spread


def test_sinkhorn_is_the_papers_and_survives_a_prototype_that_nobody_wants() -> None:
    p = F.softmax(random(6, 5) * 4, 1)
    np.testing.assert_allclose(sinkhorn(p).numpy(), plain_sinkhorn(p.double().numpy()), atol=1e-6)
    unwanted = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]])
    assert torch.allclose(sinkhorn(unwanted).sum(1), torch.ones(2))


def test_spread_is_one_for_all_directions_and_zero_for_one() -> None:
    both = torch.cat([torch.eye(4), -torch.eye(4)]) * 3
    assert spread(both).item() == pytest.approx(1.0)  # each axis: √(2/8), times √4
    assert spread(torch.ones(5, 4)).item() == pytest.approx(0.0, abs=1e-6)
    assert spread(torch.ones(1, 4)).item() == 0.0
