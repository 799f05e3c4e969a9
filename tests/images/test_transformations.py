"""Transformations by name: where pixels go, what stays, and what cannot be made."""

import math

import pytest
import torch

from sightline.core.errors import InputError
from sightline.images.transformations import TRANSFORMATIONS, transform
from sightline.images.views import make_view

PIXELS = torch.randint(0, 256, (3, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
WIDE = torch.randint(0, 256, (2, 3, 16, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("pixels", [PIXELS, WIDE], ids=["square", "wide"])
def test_shape_range_and_dtype(name: str, pixels: torch.Tensor) -> None:
    """A view like any other: the same for bytes and floats, image by image, and no image is changed in place."""
    before = pixels.clone()
    made = make_view(name, pixels)
    assert made.shape == pixels.shape
    floats = made / 255 if made.dtype == torch.uint8 else made
    assert 0 <= float(floats.min()) <= float(floats.max()) <= 1
    torch.testing.assert_close(make_view(name, pixels / 255), floats, rtol=0, atol=1e-6)
    torch.testing.assert_close(make_view(name, pixels[1:2]), made[1:2], rtol=0, atol=1e-6)
    assert torch.equal(pixels, before)
    assert (floats - pixels / 255).abs().mean() > 0.001


def test_where_pixels_go() -> None:
    assert torch.equal(transform("mirror", PIXELS)[..., 0], PIXELS[..., -1])
    assert torch.equal(transform("upside_down", PIXELS)[..., 0, :], PIXELS[..., -1, :])
    turned = transform("rotation", PIXELS)  # to the left: the upper right corner becomes the upper left one
    assert torch.equal(turned[..., 0, 0], PIXELS[..., 0, -1])
    assert torch.equal(transform("rotation:180", WIDE), WIDE.flip(-1, -2))
    assert torch.equal(transform("rotation:-90", PIXELS), transform("rotation:270", PIXELS))
    moved = transform("shift:0.25,-0.1", PIXELS)  # 5 pixels to the right, 2 up
    torch.testing.assert_close(moved[..., :-2, 5:], PIXELS[..., 2:, :-5] / 255, rtol=0, atol=1e-5)
    torch.testing.assert_close(moved[..., :-2, :5], PIXELS[..., 2:, :5].flip(-1) / 255, rtol=0, atol=1e-5)


def test_any_angle_turns_about_the_centre_without_a_change_of_shape() -> None:
    """A bright dot, wherever it is, is found where the rotation takes it."""
    y, x = 5, 21  # of 16 × 30, so 6.5 right of the centre and 2.5 above it
    dot = torch.zeros(1, 3, 16, 30)
    dot[..., y, x] = 1
    for degrees in (30.0, 45.0, 90.0, -20.0):
        made = transform(f"rotation:{degrees}", dot)[0, 0]
        made = made * torch.nn.functional.pad(torch.ones(16, 22), (4, 4))  # beyond, its mirror images come in
        rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(30.0), indexing="ij")
        right, up = x - 14.5, 7.5 - y
        turn = math.radians(degrees)
        wanted = right * math.cos(turn) - up * math.sin(turn), right * math.sin(turn) + up * math.cos(turn)
        found = float((made * (columns - 14.5)).sum() / made.sum()), float((made * (7.5 - rows)).sum() / made.sum())
        assert found == pytest.approx(wanted, abs=0.3)
    square = transform("rotation:89.999", PIXELS)
    torch.testing.assert_close(square, transform("rotation:90", PIXELS) / 255, rtol=0, atol=5e-3)


def test_grey_and_blur() -> None:
    grey = transform("grey", PIXELS)
    luma = (PIXELS * torch.tensor([0.2989, 0.587, 0.114])[:, None, None]).sum(1) / 255
    for channel in grey.unbind(1):
        torch.testing.assert_close(channel, luma, rtol=0, atol=1e-6)
    dot = torch.zeros(1, 3, 41, 41)
    dot[..., 20, 20] = 1
    blurred = transform(f"blur:{2 / 41}", dot)[0, 0]  # a sigma of two pixels
    distance = torch.arange(41.0) - 20
    assert float((blurred.sum(0) * distance.square()).sum()) == pytest.approx(4, rel=1e-2)
    assert float(blurred.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_scale_keeps_the_centre(factor: float) -> None:
    """A centred square of 8 pixels becomes one of 16, or of 4."""
    square = torch.zeros(1, 3, 32, 32)
    square[..., 12:20, 12:20] = 1
    made = transform(f"scale:{factor}", square)[0, 0]
    middle = made if factor > 1 else made[8:24, 8:24]  # beyond, its mirror images come in
    assert float(middle.sum()) == pytest.approx((8 * factor) ** 2, rel=0.05)
    torch.testing.assert_close(made, made.flip(0), rtol=0, atol=1e-5)
    torch.testing.assert_close(made, made.flip(1), rtol=0, atol=1e-5)
    same = transform("scale:1", PIXELS)
    torch.testing.assert_close(same, PIXELS / 255, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gray", "did you mean 'grey'"),
        ("mirror:1", "mirror, without an amount"),
        ("rotation:left", "rotation:DEGREES"),
        ("rotation:", "rotation:DEGREES"),
        ("rotation:nan", "rotation:DEGREES"),
        ("shift:0.1,0.2,0.3", "shift:RIGHT,DOWN"),
        ("scale:0.1", "a factor from 0.5 to 4"),
        ("blur:2", "from 0.001 to 0.5"),
    ],
)
def test_what_cannot_be_made_is_said_in_words(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        transform(name, PIXELS)
