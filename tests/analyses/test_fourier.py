"""Fourier: the half-diagonal against numpy's whole transform, pictures with a known spectrum, and the stream."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.passes import activations, measured
from support.plans import make_plan
from support.references import SMALL
from torch import nn

from sightline import load_encoder
from sightline.analyses import fourier
from sightline.analyses.fourier import relative_log_amplitude
from sightline.core.errors import InputError
from sightline.measure.contract import NoSettings, result_of


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def whole_transform(tokens: np.ndarray, g: int, prefix: int) -> np.ndarray:
    """All g × g frequencies of every image and channel; its diagonal up to π, relative to its first entry."""
    patches = tokens[:, prefix:].astype(np.float64).reshape(len(tokens), g, g, -1)
    logs = np.log(np.abs(np.fft.fft2(patches, axes=(1, 2))) + 1e-6).mean((0, 3))
    diagonal = np.diagonal(logs)[: g // 2 + 1]
    return diagonal - diagonal[0]


@pytest.mark.parametrize("g", [2, 3, 7, 8, 14, 15])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_equals_the_diagonal_of_the_whole_transform(g: int, prefix: int) -> None:
    tokens = random((3, prefix + g * g, 5)) + 2.0
    frequencies, amplitudes = relative_log_amplitude(tokens, (g, g), prefix=prefix)
    np.testing.assert_allclose(amplitudes, whole_transform(tokens, g, prefix), atol=1e-10)
    np.testing.assert_allclose(frequencies, [2 * k / g for k in range(g // 2 + 1)])
    assert amplitudes[0] == 0


def test_nyquist_is_there_for_even_grids() -> None:
    """The authors' code calls (g − 2)/g · π the highest frequency of an even grid, 6/7 π of 14 × 14."""
    assert relative_log_amplitude(random((1, 196, 2)), (14, 14))[0][[-2, -1]] == pytest.approx([6 / 7, 1.0])
    assert relative_log_amplitude(random((1, 49, 2)), (7, 7))[0][-1] == pytest.approx(6 / 7)


def test_pictures_with_a_known_spectrum() -> None:
    rows, columns = np.indices((6, 6))
    point = np.zeros((6, 6))
    point[2, 3] = 5.0
    assert relative_log_amplitude(point.reshape(1, 36, 1), (6, 6))[1] == pytest.approx([0, 0, 0, 0], abs=1e-9)
    wave = 3.0 + 2.0 * np.cos(2 * np.pi * 2 * (rows + columns) / 6)  # k = 2: half of its amplitude on each side
    expected = np.log([1.0, 1e-6 / (36 * 3), 1 / 3, 1e-6 / (36 * 3)])
    assert relative_log_amplitude(wave.reshape(1, 36, 1), (6, 6))[1] == pytest.approx(expected, abs=1e-5)
    along_rows = 3.0 + 2.0 * np.cos(2 * np.pi * 2 * rows / 6)  # not on the diagonal
    assert (relative_log_amplitude(along_rows.reshape(1, 36, 1), (6, 6))[1][1:] < -15).all()


@pytest.mark.parametrize("grid", [(4, 6), (6, 4), (5, 9), (2, 7)])
def test_other_grids_use_the_frequencies_of_the_shorter_side(grid: tuple[int, int]) -> None:
    tokens, side = random((2, grid[0] * grid[1], 3)), min(grid)
    frequencies, amplitudes = relative_log_amplitude(tokens, grid)
    expected = []
    for k in range(side // 2 + 1):
        sums = np.zeros((2, 3), complex)
        for r in range(grid[0]):
            for c in range(grid[1]):
                sums += tokens[:, r * grid[1] + c] * np.exp(-2j * np.pi * k * (r + c) / side)
        expected.append(np.log(np.abs(sums) + 1e-6).mean())
    assert frequencies.tolist() == [2 * k / side for k in range(side // 2 + 1)]
    np.testing.assert_allclose(amplitudes, np.array(expected) - expected[0], atol=1e-10)
    turned = tokens.reshape(2, *grid, 3).swapaxes(1, 2).reshape(2, -1, 3)
    np.testing.assert_allclose(relative_log_amplitude(turned, grid[::-1])[1], amplitudes, atol=1e-10)
    constant = np.full((1, grid[0] * grid[1], 1), 4.0)  # no leak of frequency 0 into the others
    assert (relative_log_amplitude(constant, grid)[1][1:] < -15).all()


def test_tensors_and_arrays_give_the_same() -> None:
    tokens = random((2, 17, 4)).astype(np.float32)
    array = relative_log_amplitude(tokens, (4, 4), prefix=1)
    tensor = relative_log_amplitude(torch.from_numpy(tokens), (4, 4), prefix=1)
    assert all(isinstance(part, np.ndarray) for part in array)
    assert all(isinstance(part, torch.Tensor) and part.dtype == torch.float64 for part in tensor)
    np.testing.assert_array_equal(tensor[1], array[1])
    rounded = torch.from_numpy(tokens).bfloat16()
    same = relative_log_amplitude(rounded.double(), (4, 4), prefix=1)
    np.testing.assert_array_equal(relative_log_amplitude(rounded, (4, 4), prefix=1)[1], same[1])


@given(seed=st.integers(0, 1000), scale=st.floats(1e-2, 1e6), g=st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_invariances(seed: int, scale: float, g: int) -> None:
    tokens = random((3, g * g, 4), seed)
    before = relative_log_amplitude(tokens, (g, g))[1]
    # The mean of 10⁻⁶ / |F| over the channels is what is left of the scale.
    assert relative_log_amplitude(scale * tokens, (g, g))[1] == pytest.approx(before, abs=0.02)
    shuffled = np.random.default_rng(seed).permutation(4)
    assert relative_log_amplitude(tokens[::-1, :, shuffled], (g, g))[1] == pytest.approx(before, abs=1e-9)
    moved = np.roll(tokens.reshape(3, g, g, 4), (1, 2), (1, 2)).reshape(3, g * g, 4)
    assert relative_log_amplitude(moved, (g, g))[1] == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize(("shape", "prefix"), [((2, 17, 3), 0), ((2, 16), 0), ((1, 15, 2), -1)])
def test_bad_input(shape: tuple[int, ...], prefix: int) -> None:
    with pytest.raises(InputError, match="give the grid"):
        relative_log_amplitude(random(shape), (4, 4), prefix)


# The pass


def tokens_of(activation: torch.Tensor) -> torch.Tensor:
    return activation.flatten(2).mT if activation.ndim == 4 else activation


@pytest.fixture(scope="module")
def result(encoders: Any, images: Any) -> Any:
    return measured("fourier", encoders, images)


@pytest.mark.parametrize(
    ("name", "site", "grid", "prefix"),
    [
        ("vit", "embed", (4, 4), 1),
        ("vit", "block.1", (4, 4), 1),
        ("registers", "block.1", (4, 4), 2),
        ("wide", "block.0", (4, 6), 1),
        ("mae", "block.1", (4, 4), 1),
        ("mae", "decoder.block.0", (4, 4), 1),
        ("cnn", "embed", (8, 8), 0),
        ("cnn", "block.3", (4, 4), 0),
        ("next", "block.0", (16, 16), 0),
    ],
)
def test_the_pass_equals_the_whole_array(
    encoders: Any, images: Any, result: Any, name: str, site: str, grid: tuple[int, int], prefix: int
) -> None:
    tokens = tokens_of(activations(encoders[name], images, [site])[site])
    frequencies, amplitudes = relative_log_amplitude(tokens, grid, prefix)
    own = result.sel(encoder=name, site=site)
    count = len(frequencies)
    np.testing.assert_allclose(own.amplitude[:count], amplitudes, atol=5e-6)
    np.testing.assert_allclose(own.frequency[:count], frequencies)
    assert np.isnan(own.amplitude[count:]).all()
    assert np.isnan(own.frequency[count:]).all()
    assert own.reason == ""
    assert float(own.high_frequency) == float(own.amplitude[count - 1])
    assert float(own.official) == float(own.amplitude[count - 1 - (min(grid) % 2 == 0)])
    images_apart = np.array([relative_log_amplitude(one[None], grid, prefix)[1][-1].item() for one in tokens])
    half = 1.96 * images_apart.std(ddof=1) / np.sqrt(len(tokens))
    assert float(own.high_frequency_high - own.high_frequency_low) == pytest.approx(2 * half, rel=1e-2)


def test_what_has_no_frequencies_says_so(result: Any, images: Any) -> None:
    own = result.sel(encoder="cnn")
    assert own.reason.sel(site="block.7") == "a map of 1 × 1 has no frequencies"
    assert np.isnan(own.amplitude.sel(site="block.7")).all()
    assert np.isnan(own.high_frequency.sel(site="block.7"))
    assert result.reason.sel(encoder="vit", site="block.7") == "this encoder has no such site"
    pooled = measured("fourier", [SMALL + "&num_classes=5"], images, sites=["block.1", "head.0"])
    assert pooled.reason.values.tolist() == [["", "the places of its tokens on the image are not known"]]
    assert (np.isfinite(result.high_frequency) == (result.reason == "")).all()


def test_user_sites_may_be_heads(images: Any) -> None:
    encoder = load_encoder(SMALL)
    result = measured("fourier", {"a": encoder}, images, sites=["block.1.heads"])
    tokens = (
        activations(encoder, images, "block.1.heads")["block.1.heads"].transpose(1, 2).flatten(2)
    )  # of (B, H, N, d)
    # The pass forms the product with v in blocks of its own, which differ from the kernel in the last digits.
    np.testing.assert_allclose(result.amplitude[0, 0], relative_log_amplitude(tokens, (4, 4), 1)[1], atol=1e-4)


class Odd(nn.Module):
    """Layers that are the same everywhere, zero, and not finite; and one that is overwritten afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 8, 8)
        self.flat, self.zero, self.broken = nn.Identity(), nn.Identity(), nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.flat((0.1 + x.mean((2, 3), keepdim=True)).expand_as(x))
        self.zero(torch.zeros_like(x))
        self.broken(x / 0)
        return self.relu(x).mean((2, 3))


def test_flaws_have_a_reason(images: Any) -> None:
    torch.manual_seed(0)
    encoder = load_encoder(Odd(), name="odd", preprocess=load_encoder(SMALL).preprocess)
    result = measured("fourier", {"odd": encoder}, images).sel(encoder="odd")
    for site in ("flat", "zero"):
        assert "the same at all positions" in str(result.reason.sel(site=site).item())
        assert np.isnan(result.amplitude.sel(site=site)).all()
    assert "not finite" in str(result.reason.sel(site="broken").item())
    tokens = tokens_of(activations(encoder, images, ["first"])["first"])
    np.testing.assert_allclose(result.amplitude.sel(site="first"), relative_log_amplitude(tokens, (4, 4))[1], atol=2e-5)


def test_no_number_without_a_readable_image_and_no_wrong_reason(tmp_path: Path) -> None:
    result = result_of(fourier.FourierAnalysis(NoSettings(), make_plan(tmp_path))).sel(site="block.0")
    assert (result.reason == "no image could be read").all()
    assert result.amplitude.isnull().all()


@pytest.mark.bf16
def test_bf16_rounds_the_model_not_the_measurement(images: Any) -> None:
    encoder = load_encoder(SMALL)
    result = measured("fourier", {"a": encoder}, images, sites=["block.1.fc1"], precision="bf16", batch=20)
    with torch.autocast("cpu", torch.bfloat16):
        tokens = activations(encoder, images, ["block.1.fc1"])["block.1.fc1"]
    np.testing.assert_allclose(result.amplitude[0, 0], relative_log_amplitude(tokens, (4, 4), 1)[1], atol=2e-5)


def test_figures_have_the_numbers(result: Any) -> None:
    depth, spectra = fourier.figures(result)
    decoder = depth.table.site.str.startswith("decoder.")
    assert depth.table[decoder].depth.min() > 1 >= depth.table[~decoder].depth.max()
    row = depth.table.query("series == 'mae' and site == 'decoder.block.0'").iloc[0]
    assert row.value == float(result.high_frequency.sel(encoder="mae", site="decoder.block.0"))
    last = "series == 'cnn' and site == 'block.5'"  # of eight blocks, the last two without frequencies
    assert depth.table.query(last).depth.tolist() == [pytest.approx(5 / 7)]
    assert spectra.table.query(last.replace("series", "encoder")).depth.tolist() == [pytest.approx(6 / 8)] * 2
    lines = spectra.table.query("encoder == 'vit'")
    assert lines.groupby("site", sort=False).depth.first().to_dict() == {"embed": 0.0, "block.0": 0.5, "block.1": 1.0}
    assert lines.query("site == 'block.1'").frequency.tolist() == [0.0, 0.5, 1.0]
    labels = [label for label, *_ in fourier.headlines(result)]
    assert labels == list(result.encoder.values)
