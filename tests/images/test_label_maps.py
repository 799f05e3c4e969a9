"""Maps and grids: which pixels an encoder sees, shares of classes in patches, and interpolation to pixels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sightline.images.label_maps import channels, nearest_to, seen, seen_part, shares, upsampling
from sightline.images.preprocess import Preprocess, Window
from sightline.images.targets import VOID


def test_shares_are_counts_of_the_pixels_of_each_patch() -> None:
    random = np.random.default_rng(0)
    maps = [random.integers(-2, 3, (12, 8)) for _ in range(2)]
    found = shares(maps, Preprocess((12, 8)), (3, 2), 3)
    assert found.shape == (2, 6, 4)
    for n, p, c in np.ndindex(found.shape):
        row, column = divmod(p, 2)
        patch = maps[n][4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert found[n, p, c] == (patch == c - 1).mean(), (n, p, c)
    np.testing.assert_allclose(found.sum(2).mean(1), [(one != VOID).mean() for one in maps], rtol=1e-6)


@given(st.integers(5, 40), st.integers(5, 40), st.integers(2, 20), st.booleans())
@settings(max_examples=50, deadline=None)
def test_the_window_of_a_map_is_that_of_the_image(height: int, width: int, size: int, resized: bool) -> None:
    """An image whose pixels say where they are, cropped with nearest neighbour, shows what lies under each centre."""
    preprocess = Preprocess((size, size), resize=2 * size if resized else None, interpolation="nearest")
    places = np.arange(height * width).reshape(height, width)
    image = np.stack([places % 256, places // 256, places * 0], 2).astype(np.uint8)
    shown = preprocess.crop(image).astype(np.int64)
    under = nearest_to(places, preprocess, (size, size)) - 1
    rows, columns = preprocess.windows(height, width)
    # PIL computes centres in floating point, and may round those that lie on the border of two pixels either way.
    doubtful = [((2 * w.first + 2 * np.arange(size) + 1) * w.length) % (2 * w.resized) == 0 for w in (rows, columns)]
    sure = ~(doubtful[0][:, None] | doubtful[1])
    np.testing.assert_array_equal((shown[0] + 256 * shown[1])[sure], under[sure])
    assert {*np.unique(under).tolist()} <= {*np.unique(places[:, :]).tolist()}


@given(st.integers(4, 30), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_interpolation_is_that_of_torch(pixels: int, cells: int) -> None:
    matrix = torch.from_numpy(upsampling(Window(pixels, 3 * cells, 0, 3 * cells), cells))
    values = torch.randn(1, 1, cells, 1)
    if pixels >= cells:
        expected = F.interpolate(values, (pixels, 1), mode="bilinear", align_corners=False)[0, 0]
        torch.testing.assert_close(matrix @ values[0, 0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matrix.sum(1), torch.ones(pixels))


def test_a_crop_keeps_the_pixels_within_it() -> None:
    preprocess = Preprocess((4, 4), resize=8)
    one = np.arange(16 * 16).reshape(16, 16)
    part = seen_part(one, preprocess)
    np.testing.assert_array_equal(part, one[4:12, 4:12] + 1)
    assert seen(Window(16, 8, 2, 4)).tolist() == list(range(4, 12))


@pytest.mark.parametrize(("value", "channel"), [(VOID, -1), (-1, 0), (3, 4)])
def test_channels(value: int, channel: int) -> None:
    assert channels(np.array([[value]])).tolist() == [[channel]]
