"""CKA of arrays: the textbook, invariances, rounding, what has no value."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cka import random, textbook_cka, textbook_hsic

from sightline.core.errors import InputError
from sightline.measure.estimators.cka import _products, centre, cka, gram, products


@pytest.mark.parametrize("n", [4, 5, 32, 33, 100])
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0, 1e4])
def test_equals_the_textbook(n: int, offset: float) -> None:
    shared = random((n, 6), 0)
    x, y = shared @ random((6, 20), 1) + offset, shared @ random((6, 9), 2) + 0.5 * random((n, 9), 3) - offset
    assert cka(x, y) == pytest.approx(textbook_cka(x, y, 32), abs=1e-10)
    assert cka(x, y, batch=n) == pytest.approx(textbook_cka(x, y, n), abs=1e-10)
    assert cka(x, y, batch=None) == cka(x, y, batch=n)


def test_u_centring_equals_the_three_terms_of_hsic() -> None:
    k, l = (g @ g.T for g in (random((11, 4), 0), random((11, 5), 1)))  # noqa: E741
    ours = products(centre(torch.from_numpy(np.stack([k, l]))))[0, 1]
    assert float(ours) == pytest.approx(textbook_hsic(k, l), rel=1e-12)


def test_biased_is_the_full_batch_formula() -> None:
    x, y = random((50, 7), 0) + 3, random((50, 5), 1)
    a, b = x - x.mean(0), y - y.mean(0)
    expected = np.linalg.norm(b.T @ a) ** 2 / (np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b))
    assert cka(x, y, unbiased=False) == pytest.approx(expected, abs=1e-12)


def test_few_samples_bias_is_gone() -> None:
    """Independent Gaussians, d = 768, n = 32: the biased form says 0.96, the unbiased one about 0."""
    x, y = random((32, 768), 0), random((32, 768), 1)
    assert cka(x, y, unbiased=False) > 0.9
    assert abs(cka(x, y)) < 0.2


def test_unrelated_layers_may_come_out_negative() -> None:
    values = [cka(random((64, 50), 2 * s), random((64, 50), 2 * s + 1)) for s in range(40)]
    assert min(values) < 0  # reported as it is, never clamped
    assert np.mean(values) == pytest.approx(0, abs=0.03)


@given(st.integers(0, 10**6), st.floats(1e-6, 1e6), st.floats(-1e3, 1e3), st.integers(4, 40), st.integers(2, 12))
@settings(max_examples=40, deadline=None)
def test_invariances(seed: int, scale: float, shift: float, n: int, width: int) -> None:
    """Rotation, isotropic scale, translation and the order of arguments do not matter."""
    x, y = random((n, width), seed), random((n, 5), seed + 1)
    rotation = np.linalg.qr(random((width, width), seed + 2))[0]
    value = cka(x, y)
    assert cka(x @ rotation, y) == pytest.approx(value, abs=1e-8)
    assert cka(scale * x, y) == pytest.approx(value, abs=1e-8)
    assert cka(x + shift, y) == pytest.approx(value, abs=1e-6)
    assert cka(y, x) == pytest.approx(value, abs=1e-12)
    assert cka(x, x) == pytest.approx(1, abs=1e-12)


def test_stretching_one_direction_does_matter() -> None:
    x, y = random((64, 8), 0), random((64, 8), 0) + 0.5 * random((64, 8), 1)
    stretched = x * np.array([100, *[1] * 7])
    assert abs(cka(stretched, y) - cka(x, y)) > 0.1


@pytest.mark.parametrize("value", [0.0, 0.1, 1e18, -7e-20])
def test_constant_features_give_nan(value: float) -> None:
    x = torch.full((16, 300), value)
    assert np.isnan(cka(x, torch.randn(16, 4)))
    assert not gram(x).any()


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-20, 1e18, 1e30])
def test_squares_beyond_float32_are_made_in_float64(scale: float, offset: float) -> None:
    x = torch.from_numpy(random((16, 300), 0)).float() + offset
    scaled = gram(x * scale)
    ours, exact = (part.unsqueeze(0) for part in (scaled / scale / scale, gram(x.double())))
    assert torch.linalg.norm(centre(ours) - centre(exact)) < 1e-5 * torch.linalg.norm(centre(exact))
    assert not gram((x[:1] * scale).expand(16, -1)).any()


def test_float32_gram_is_exact_enough_on_offset_features() -> None:
    x, y = (torch.from_numpy(random((32, 40000), s) + 100).float() for s in (0, 1))
    y = y + 0.5 * (x - 100)
    centred = centre(torch.stack([gram(x), gram(y)]))
    h = products(centred)
    ours = float(h[0, 1] / (h[0, 0] * h[1, 1]).sqrt())
    assert ours == pytest.approx(textbook_cka(x.numpy(), y.numpy(), 32), abs=1e-6)


@pytest.mark.parametrize("n", [5, 6, 7, 9, 11])
def test_no_part_is_too_small(n: int) -> None:
    """⌈n / 4⌉ parts of n images would have fewer than 4 of them, which HSIC₁ cannot take."""
    x, y = random((n, 5), 0), random((n, 4), 1)
    parts = [np.arange(n)] if n < 8 else np.array_split(np.arange(n), 2)
    sums = np.zeros((2, 2))
    for rows in parts:
        centred = centre(torch.stack([gram(torch.from_numpy(v[rows])) for v in (x, y)]))
        sums += len(rows) * products(centred).numpy()
    assert cka(x, y, batch=4) == pytest.approx(sums[0, 1] / np.sqrt(sums[0, 0] * sums[1, 1]), abs=1e-12)


@pytest.mark.parametrize("different", [0, 5])
@pytest.mark.parametrize("offset", [0.0, 3.0, -100.0])
def test_all_images_but_one_the_same_give_nan(different: int, offset: float) -> None:
    """Its unbiased HSIC is 0 in exact arithmetic; what rounding leaves of it must not be divided by itself."""
    x = torch.full((32, 1000), offset)
    x[different] += torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert np.isnan(cka(x, x))
    assert np.isnan(cka(x, random((32, 10), 1)))
    assert not centre(gram(x)[None]).any()  # as the pass does it, with float32 products


@pytest.mark.parametrize("n", [4, 31, 32, 33, 399])
def test_gram_of_constant_features_is_exactly_zero(n: int) -> None:
    features = torch.from_numpy(random((1, 3000), 0)).float() * 3 + 5
    assert not gram(features.expand(n, -1).contiguous()).any()


@pytest.mark.parametrize("offset", [0.0, 30.0, 200.0])
@pytest.mark.parametrize("outlier", [0, 7])
def test_float32_gram_is_exact_enough_beside_an_outlier(offset: float, outlier: int) -> None:
    """Whichever image is the odd one, also the first of the batch."""
    x, y = (torch.from_numpy(random((32, 5000), seed)).float() for seed in (0, 1))
    y = x + y
    x[outlier] *= 20
    x = x + offset
    exact = cka(x.double(), y.double())
    for shift in (False, True):  # as on a GPU, and as it is here where the mean dominates
        if shift or offset == 0:
            hsic = products(centre(torch.stack([_products(v, shift) for v in (x, y)]))).numpy()
            assert hsic[0, 1] / np.sqrt(hsic[0, 0] * hsic[1, 1]) == pytest.approx(exact, abs=1e-5)
    hsic = products(centre(torch.stack([gram(x), gram(y)]))).numpy()
    assert hsic[0, 1] / np.sqrt(hsic[0, 0] * hsic[1, 1]) == pytest.approx(exact, abs=1e-5)


def test_mismatched_or_too_few_images() -> None:
    with pytest.raises(InputError, match=r"got \(8, 3\) and \(9, 3\)"):
        cka(random((8, 3), 0), random((9, 3), 0))
    with pytest.raises(InputError, match=r"features \(images, …\)"):
        cka(random((8,), 0), random((8,), 0))
    with pytest.raises(InputError, match="The batch size is 3"):
        cka(random((8, 3), 0), random((8, 3), 0), batch=3)
    with pytest.raises(InputError, match="at least 4"):
        cka(random((3, 3), 0), random((3, 3), 0))
