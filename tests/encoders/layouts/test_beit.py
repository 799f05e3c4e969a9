"""Tables of relative positions for other grids; the layouts themselves are tested with BEiT's and SimMIM's files."""

import numpy as np
import pytest
import torch
from support.official_beit import positions_of, resized_table
from torch import Tensor

from sightline.encoders.modules.positions import geometric_positions, resize_table


@pytest.mark.parametrize(("old", "new"), [(27, 47), (27, 19), (5, 7), (5, 21), (27, 13)])
def test_geometric_positions(old, new):
    found = geometric_positions(old, new)
    np.testing.assert_allclose(found, positions_of(old, new), rtol=0, atol=1e-9)
    steps = np.diff(found)[old // 2 :]
    assert steps[0] == 1
    assert 1.01 <= steps[1] / steps[0] <= 1.5


def test_geometric_positions_reach_over_the_new_grid():
    """Where q between 1.01 and 1.5 allows it."""
    assert geometric_positions(27, 47)[-1] == pytest.approx(23, abs=1e-4)
    assert geometric_positions(5, 21)[-1] == pytest.approx(1 + 1.5, abs=1e-4)


@pytest.mark.parametrize("grid", [(24, 24), (10, 10), (3, 17), (60, 60), (1, 1)])
def test_table_is_that_of_the_official_spline(grid):
    table = torch.randn(27**2 + 3, 4, generator=torch.Generator().manual_seed(2))
    found = resize_table(table, grid)
    assert found.shape == ((2 * grid[0] - 1) * (2 * grid[1] - 1) + 3, 4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), resized_table(table, *grid), rtol=0, atol=1e-6)
    assert torch.equal(found[-3:], table[-3:])


def test_a_side_that_stays_keeps_its_positions():
    """Officially a table of the same size is not touched, and images are square."""
    table = torch.randn(27**2 + 3, 4, generator=torch.Generator().manual_seed(2))
    assert torch.equal(resize_table(table, (14, 14)), table)
    by_row = table[:27].repeat_interleave(27, 0)  # the same in every column
    found = resize_table(torch.cat([by_row, table[-3:]]), (14, 9))[:-3].view(27, 17, 4)
    torch.testing.assert_close(found, table[:27, None].expand(-1, 17, -1), rtol=0, atol=1e-6)


def test_a_cubic_surface_is_kept_exactly():
    """An interpolating cubic spline is a cubic if the samples are."""

    def surface(y: np.ndarray, x: np.ndarray) -> Tensor:
        y, x = y[:, None] / 10, x[None, :] / 10
        return torch.from_numpy(1 + y**3 - 2 * x * y + x**3 * y**2).flatten()

    at = geometric_positions(27, 47)
    table = torch.cat([surface(at, at), torch.zeros(3)]).unsqueeze(1)
    new = np.arange(-23.0, 24)
    inside = np.abs(new) <= at[-1]  # the last one may lie outside by the error of the bisection
    wanted = surface(new, new).view(47, 47)[inside][:, inside]
    found = resize_table(table, (24, 24))[:-3, 0].view(47, 47)[inside][:, inside]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
