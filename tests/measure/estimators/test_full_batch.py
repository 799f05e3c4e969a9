"""CKA of all images at once from sums over batches, against Gram matrices of all images."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.errors import InputError
from sightline.measure.estimators.cka import centre, cka
from sightline.measure.estimators.full_batch import FullBatch

WIDTHS = [7, 4, 9]


def layers(n: int, offset: float = 0.0, seed: int = 0) -> list[torch.Tensor]:
    """Three layers that have something in common, far from the origin by `offset`."""
    random = np.random.default_rng(seed)
    shared = random.normal(size=(n, 6))
    mixed = [shared @ random.normal(size=(6, width)) + 0.3 * random.normal(size=(n, width)) for width in WIDTHS]
    return [torch.from_numpy(x + k * offset) for k, x in enumerate(mixed, start=-1)]


def summed(of: list[torch.Tensor], batch: int) -> FullBatch:
    sums = FullBatch([layer.shape[1] for layer in of])
    for rows in torch.arange(len(of[0])).split(batch):
        sums.add([layer[rows] for layer in of])
    return sums


def textbook(x: torch.Tensor, y: torch.Tensor) -> float:
    """HSIC₁ of Song et al. 2012 on n × n Gram matrices with a zero diagonal, features centred first."""
    k, l = ((v - v.mean(0)).numpy() for v in (x, y))  # noqa: E741
    k, l = k @ k.T, l @ l.T  # noqa: E741
    n, one = len(k), np.ones(len(k))
    np.fill_diagonal(k, 0)
    np.fill_diagonal(l, 0)
    middle = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
    return float((np.trace(k @ l) + middle - 2 / (n - 2) * (one @ k @ l @ one)) / (n * (n - 3)))


@pytest.mark.parametrize("offset", [0.0, 10.0, 1e4])
@pytest.mark.parametrize("batch", [1, 10, 101])
def test_the_stream_is_the_formula_of_gram_matrices(offset: float, batch: int) -> None:
    of = layers(101, offset)
    sums = summed(of, batch)
    hsic = sums.hsic()[0] / (101 * 98)
    for a, b in itertools.product(range(3), repeat=2):
        assert float(hsic[a, b]) == pytest.approx(textbook(of[a], of[b]), rel=1e-7 if offset > 10 else 1e-10)
        for unbiased in (True, False):
            expected = cka(of[a], of[b], batch=None, unbiased=unbiased)
            assert sums.cka(unbiased=unbiased)[a, b] == pytest.approx(expected, abs=1e-10)


def test_parts_of_several_processes_are_one() -> None:
    """Each has a point of its own, and one of them has seen nothing."""
    of = layers(90, 50.0)
    parts = [summed([layer[rows] for layer in of], 16) for rows in (slice(0, 30), slice(30, 90))]
    parts.insert(1, FullBatch(WIDTHS))
    merged = FullBatch(WIDTHS, sums={name: torch.cat([part.sums[name] for part in parts]) for name in parts[0].sums})
    for unbiased in (True, False):
        whole = summed(of, 90).cka(unbiased=unbiased)
        np.testing.assert_allclose(merged.cka(unbiased=unbiased), whole, rtol=0, atol=1e-12)


def test_the_null_is_the_mean_over_all_pairings() -> None:
    """Of five images there are 120 ways to pair them with themselves."""
    of = layers(5)
    grams = torch.stack([layer @ layer.T for layer in of])
    for unbiased in (True, False):
        centred = centre(grams, unbiased)
        products = [
            centred.flatten(1) @ centred[:, order][:, :, order].flatten(1).T
            for order in map(list, itertools.permutations(range(5)))
        ]
        hsic, null = summed(of, 2).hsic(unbiased=unbiased)
        torch.testing.assert_close(null, torch.stack(products).mean(0), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(hsic, centred.flatten(1) @ centred.flatten(1).T, rtol=1e-10, atol=1e-10)


@given(st.integers(0, 10**6), st.floats(1e-6, 1e6), st.integers(4, 40), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_invariances(seed: int, scale: float, n: int, batch: int) -> None:
    """Rotation, scale, translation, and how images are put into batches do not matter."""
    x, y, z = layers(n, seed=seed)
    rotation = torch.linalg.qr(torch.from_numpy(np.random.default_rng(seed).normal(size=(7, 7))))[0]
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    changed = summed([(scale * (x @ rotation) + 3)[order], y[order], -z[order]], batch)
    for unbiased in (True, False):
        plain = summed([x, y, z], n).cka(unbiased=unbiased)
        np.testing.assert_allclose(changed.cka(unbiased=unbiased), plain, rtol=0, atol=1e-7)


def test_only_the_pairs_that_are_asked_for() -> None:
    of = layers(40)
    some = FullBatch(WIDTHS, [(a, a, a + 1) for a in range(3)] + [(0, 2, 3)])
    some.add(of)
    every = summed(of, 40)
    wanted = np.array([[True, False, True], [False, True, False], [True, False, True]])
    np.testing.assert_allclose(some.cka(), np.where(wanted, every.cka(), np.nan), rtol=0, atol=1e-12)
    assert some.shapes()["products"] == (7 * 7 + 4 * 4 + 9 * 9 + 7 * 9,)
    assert every.shapes()["products"] == (7 * 20 + 4 * 13 + 9 * 9,)


def test_a_layer_that_says_nothing_spoils_no_other() -> None:
    x, y, z = layers(30)
    y = torch.full_like(y, 0.1)
    z[3, 2] = torch.nan
    for unbiased in (True, False):
        found = summed([x, y, z, x[:, :0], x * 2], 8).cka(unbiased=unbiased)
        known = np.isin(np.arange(5), [0, 4])
        np.testing.assert_allclose(found[known][:, known], 1, atol=1e-12)
        assert np.isnan(found[~known]).all()
        assert np.isnan(found[:, ~known]).all()


def test_images_that_are_all_equally_far_apart_say_nothing() -> None:
    found = summed([torch.eye(12, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)], 5).cka()
    assert np.isnan(found[0]).all()


def test_too_few_images_and_wrong_widths() -> None:
    of = layers(3)
    assert np.isnan(summed(of, 3).cka()).all()
    assert np.isnan(FullBatch(WIDTHS).cka()).all()
    with pytest.raises(InputError, match=r"\[7, 4, 9\] are expected"):
        FullBatch(WIDTHS).add(of[::-1])
