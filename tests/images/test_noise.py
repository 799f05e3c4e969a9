"""Noise of a frequency band: where its power lies, how strong it is, on what it depends."""

import numpy as np
import pytest
import torch

from sightline.core.errors import InputError
from sightline.core.keyed_random import fold, uniform
from sightline.images.noise import SIGNS, STRENGTH, band, band_noise, name_of, sign_noise, view
from sightline.images.views import make_view

KEYS = np.arange(64, dtype=np.uint64)


def radius(height: int, width: int) -> np.ndarray:
    return np.hypot(2 * np.fft.fftfreq(height)[:, None], 2 * np.fft.fftfreq(width))


@pytest.mark.parametrize("size", [(32, 32), (48, 31), (25, 40)])
@pytest.mark.parametrize("frequency", [0.1, 0.5, 0.9, 1.2])
def test_power_lies_in_the_band_and_is_flat_there(size: tuple[int, int], frequency: float) -> None:
    noise = band_noise(KEYS, size, frequency).double()
    power = torch.fft.fft2(noise).abs().square().mean((0, 1)).numpy()
    inside = np.abs(radius(*size) - frequency) <= 0.05 + 1e-9
    assert power[~inside].sum() < 1e-10 * power[inside].sum()
    # 64 images of 3 channels: each power is a mean of 192 exponential (or χ²₁) numbers
    assert abs(power[inside] / power[inside].mean() - 1).max() < 0.6
    first = inside[:, 0]  # the column where a real transform keeps half of what was drawn
    if first.sum() > 4:
        assert power[:, 0][first].mean() == pytest.approx(power[inside].mean(), rel=0.2)


def test_every_image_has_the_strength() -> None:
    for strength in (STRENGTH, 0.25):
        noise = band_noise(KEYS, (32, 48), 0.3, strength)
        torch.testing.assert_close(noise.square().mean((1, 2, 3)).sqrt(), torch.full((64,), strength))
        assert noise.mean((2, 3)).abs().max() < 1e-6


def test_noise_is_gaussian_and_channels_and_images_are_independent() -> None:
    noise = band_noise(KEYS, (64, 64), 0.5).double()
    assert ((noise / noise.std()) ** 4).mean() == pytest.approx(3, abs=0.05)
    flat = noise.flatten(2).flatten(0, 1)
    correlation = torch.corrcoef(flat) - torch.eye(len(flat))
    assert correlation.abs().max() < 0.3
    assert correlation.mean().abs() < 0.005


def test_it_depends_on_id_and_seed_alone() -> None:
    pixels = torch.full((4, 3, 32, 32), 100, dtype=torch.uint8)
    ids = ["a", "b", "c", "d"]
    together = view("noise:0.3", pixels, ids, seed=1)
    alone = [view("noise:0.3", pixels[:1], [name], seed=1) for name in ids]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-6)
    assert not torch.allclose(together[0], together[1], atol=1e-3)
    assert not torch.allclose(together, view("noise:0.3", pixels, ids, seed=2), atol=1e-3)
    torch.testing.assert_close(together, view("noise:0.3", pixels.float() / 255, ids, seed=1))
    torch.testing.assert_close(together, make_view("noise:0.3", pixels, ids, seed=1))


def test_the_sum_is_not_clipped() -> None:
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    noisy = view(name_of(0.3, 0.5), white, ["a"])
    assert noisy.max() > 1
    torch.testing.assert_close((noisy - 1).square().mean().sqrt(), torch.tensor(0.5))


def test_the_mean_is_never_in_a_band() -> None:
    assert 0 not in band((64, 64), 0.05)


def centre_square(side: int, size: int) -> np.ndarray:
    """Ones in the middle, where the frequency zero is after a shift by half the size."""
    side = min(max(side, 0), size)
    return np.pad(np.ones((side, side)), (size - side) // 2)


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("frequency", [0.1, 0.3, 0.98])
def test_sign_noise_is_that_of_the_authors(size: int, frequency: float) -> None:
    """±ε masked in the shifted Fourier plane by the difference of two squares of even side, the real part of it."""
    keys = KEYS[:2]
    white = np.where(uniform(fold(keys, SIGNS), 3 * size**2) < 0.5, -0.05, 0.05).reshape(2, 3, size, size)
    outer, inner = (2 * int((frequency + half) * size / 2 + 1e-9) for half in (0.05, -0.05))
    mask = centre_square(outer, size) - centre_square(inner, size)
    shifted = np.roll(np.fft.fft2(white), (size // 2, size // 2), (2, 3))
    expected = np.fft.ifft2(np.roll(shifted * mask, (size // 2, size // 2), (2, 3))).real
    np.testing.assert_allclose(sign_noise(keys, (size, size), frequency, 0.05), expected, atol=1e-6)


def test_sign_noise_is_as_strong_as_its_ring_is_large() -> None:
    for size in ((200, 200), (80, 160)):
        power = [float(sign_noise(KEYS[:4], size, f, 1.0).square().mean()) for f in (0.2, 0.4, 0.8)]
        # A ring from a to b has 4 (b² − a²) of the h · w coefficients, but for its edges.
        expected = [(f + 0.05) ** 2 - (f - 0.05) ** 2 for f in (0.2, 0.4, 0.8)]
        np.testing.assert_allclose(power, expected, rtol=0.12)
        assert power[0] < power[1] < power[2]


def test_sign_noise_in_a_view() -> None:
    pixels = torch.full((4, 3, 32, 32), 100, dtype=torch.uint8)
    name = name_of(0.3, kind="sign")
    noisy = make_view(name, pixels, ["a", "b", "c", "d"], seed=1)
    torch.testing.assert_close(noisy[2:3], make_view(name, pixels[:1], ["c"], seed=1))
    assert not torch.allclose(noisy[0], noisy[1], atol=1e-3)
    with pytest.raises(InputError, match=r"Images of 8 × 8 pixels have no frequency within 0.05π of 0.1π"):
        view(name_of(0.1, kind="sign"), torch.zeros(1, 3, 8, 8), ["a"])


@pytest.mark.parametrize(
    "name",
    ["noise:0.3,sign", "noise:0.3,0.1,sine", "noise:", "noise:x", "noise:0.3,", "noise:-0.1", "noise:0.1,0.2,0.3"],
)
def test_bad_names(name: str) -> None:
    with pytest.raises(InputError, match="not of the form noise:FREQUENCY,STRENGTH"):
        view(name, torch.zeros(1, 3, 8, 8), ["a"])


def test_bands_without_a_frequency() -> None:
    with pytest.raises(InputError, match=r"Images of 8 × 8 pixels have no frequency within 0.05π of 0.1π"):
        band_noise(KEYS[:1], (8, 8), 0.1)


def test_names_come_back() -> None:
    pixels = torch.zeros(1, 3, 32, 32)
    torch.testing.assert_close(view(name_of(0.35), pixels, ["a"]), view(name_of(0.35, STRENGTH), pixels, ["a"]))
    assert view(name_of(0.5, 0.001), pixels, ["a"]).square().mean().sqrt() == pytest.approx(0.001)
    assert view(name_of(0.5, 1e-6), pixels, ["a"]).square().mean().sqrt() == pytest.approx(1e-6)
