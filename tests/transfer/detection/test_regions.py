"""What maps show in boxes: at their places, as torchvision's kernel has it."""

import pytest
import torch
from torch import Tensor
from torchvision.ops import roi_align

from sightline.transfer.detection.regions import RegionPool

pytestmark = pytest.mark.unit
STRIDES = (4, 8, 16, 32)


@pytest.mark.parametrize("stride", [4, 8, 16, 32])
def test_a_region_of_a_ramp_has_the_value_at_its_places(stride: int) -> None:
    """Maps whose value is the place of a cell's centre; the box is of the size that belongs to this stride."""
    pool = RegionPool((4, 8, 16, 32, 64), 7)
    cells = 1024 // stride
    at = (torch.arange(cells) + 0.5) * stride
    ramps = torch.stack([at.expand(cells, cells), at[:, None].expand(cells, cells)])[None]
    maps = {str(s): ramps if s == stride else torch.full((1, 2, 1024 // s, 1024 // s), -1e9) for s in (4, 8, 16, 32)}
    side = {4: 60.0, 8: 120.0, 16: 230.0, 32: 460.0}[stride]
    x, y = 301.3, 222.7
    pooled = pool(maps, [torch.tensor([[x, y, x + side, y + side]])], [(1024, 1024)])
    places = (torch.arange(7) + 0.5) / 7 * side
    torch.testing.assert_close(pooled[0, 0], (x + places).expand(7, 7), rtol=0, atol=2e-3)
    torch.testing.assert_close(pooled[0, 1], (y + places)[:, None].expand(7, 7), rtol=0, atol=2e-3)


def test_scales_do_not_depend_on_the_first_batch() -> None:
    """torchvision would guess them from its shapes, and keep what it guessed."""
    torch.manual_seed(0)
    maps = {str(s): torch.randn(1, 3, 128 // s, 128 // s) for s in (4, 8, 16, 32)}
    box = [torch.tensor([[10.0, 20.0, 70.0, 60.0]])]
    pool, other = RegionPool((4, 8, 16, 32), 3), RegionPool((4, 8, 16, 32), 3)
    other({str(s): torch.randn(1, 3, 160 // s, 96 // s) for s in (4, 8, 16, 32)}, box, [(100, 90)])
    assert torch.equal(pool(maps, box, [(128, 128)]), other(maps, box, [(128, 128)]))


def made_maps() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {str(s): torch.randn(2, 5, 256 // s, 192 // s, dtype=torch.float64, requires_grad=True) for s in STRIDES}


def made_boxes() -> list[Tensor]:
    """Of all sizes, inside, across the border, outside, without area; an image without any."""
    torch.manual_seed(1)
    corner, side = torch.rand(60, 2, dtype=torch.float64) * 300 - 80, torch.rand(60, 2, dtype=torch.float64) ** 3 * 700
    odd = torch.tensor([[-90, -90, -60, -70], [300, 10, 340, 500], [20, 20, 20, 20]], dtype=torch.float64)
    return [torch.cat([torch.cat([corner, corner + side], 1), odd]), corner.new_zeros(0, 4)]


@pytest.mark.parametrize("size", [3, 7])
def test_regions_and_their_gradients_are_those_of_torchvision(size: int) -> None:
    """Which pools regions on other devices, and is the reference here."""
    pool, boxes = RegionPool(STRIDES, size), made_boxes()
    ours, theirs = made_maps(), made_maps()
    levels = pool.level_of(boxes)
    assert set(levels.tolist()) == {0, 1, 2, 3}
    pooled = pool(ours, boxes, [(256, 192)] * 2)
    wanted = torch.stack(
        [
            roi_align(theirs[str(STRIDES[int(level)])][:1], [box[None]], size, 1 / STRIDES[int(level)], 2, True)[0]
            for level, box in zip(levels, boxes[0], strict=True)
        ]
    )
    torch.testing.assert_close(pooled, wanted, rtol=0, atol=1e-12)
    direction = torch.randn_like(wanted)
    pooled.backward(direction)
    wanted.backward(direction)
    for name in ours:
        mine, other = ours[name].grad, theirs[name].grad
        assert mine is not None
        assert other is not None
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
        assert other[0].abs().max() > 0
        assert not other[1].any()


def test_other_devices_have_the_kernel_of_torchvision() -> None:
    pool, boxes, maps = RegionPool(STRIDES, 7), made_boxes(), list(made_maps().values())
    levels = pool.level_of(boxes)
    where = [torch.nonzero(levels == level)[:, 0] for level in range(4)]
    rois = torch.nn.functional.pad(boxes[0], (1, 0))
    torch.testing.assert_close(pool._aligned(maps, rois, where), pool._summed(maps, rois, where), rtol=0, atol=1e-12)


def test_no_regions() -> None:
    pooled = RegionPool(STRIDES, 7)(made_maps(), [torch.zeros(0, 4, dtype=torch.float64)] * 2, [(256, 192)] * 2)
    assert pooled.shape == (0, 5, 7, 7)
