"""The bootstrap of groups against NumPy's quantiles, and whether its intervals cover with few groups."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from sightline.measure.estimators.cka import bootstrap, centre, products, ratio, within_bounds
from sightline.measure.estimators.full_batch import FullBatch
from sightline.measure.estimators.resampling import draw_groups, percentile_ends, tail_of
from sightline.measure.gram_sums import GramSums

IMAGES, WIDTH, STRENGTH = 16, 4, 1.0  # of a batch; y = STRENGTH · x + noise
TRUTH = STRENGTH**2 / (STRENGTH**2 + 1)  # CKA of Gaussian x and y


@pytest.mark.parametrize(("replicates", "groups"), [(400, 8), (999, 32), (60, 10**6), (1500, 6)])
def test_ends_are_quantiles(replicates: int, groups: int) -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(replicates, 3, 2)))
    tail = stats.norm.cdf(math.sqrt(groups / (groups - 1)) * stats.t.ppf(0.025, groups - 1))
    assert tail_of(groups) == pytest.approx(tail)
    for found, share in zip(percentile_ends(values, groups, 0.0), (tail, 1 - tail), strict=True):
        np.testing.assert_allclose(found, np.quantile(values.numpy(), share, axis=0), rtol=0, atol=1e-12)


def test_a_replicate_without_a_value_leaves_no_interval() -> None:
    values = torch.zeros(20, 3, dtype=torch.float64)
    values[4, 1], values[5, 2] = torch.nan, torch.inf
    for replicates in (values, values.repeat(20, 1)):  # too few for the percentiles of 8 groups, and enough
        for end in percentile_ends(replicates, 8, 0.0):
            assert end.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_few_groups_have_the_interval_of_student(groups: int) -> None:
    """Of a mean, the deviation of infinitely many draws is that of the groups over √G: the interval is exact."""
    sample = np.random.default_rng(groups).normal(size=(groups, 4000))
    values, mean = draw_groups(groups, 1000, 0) / groups @ torch.from_numpy(sample), sample.mean(0)
    found = torch.stack(percentile_ends(values, groups, torch.from_numpy(mean))).numpy()
    exact = np.array(stats.t.interval(0.95, groups - 1, mean, stats.sem(sample)))
    np.testing.assert_allclose(found - mean, exact - mean, rtol=0.12)
    assert np.mean((found[0] < 0) & (found[1] > 0)) == pytest.approx(0.95, abs=0.015)


def test_draws_are_of_as_many_groups_as_there_are() -> None:
    draws = draw_groups(12, 5000, 3)
    assert (draws.sum(1) == 12).all()
    np.testing.assert_allclose(draws.mean(0), 1, atol=0.06)
    np.testing.assert_array_equal(draws, draw_groups(12, 5000, 3))


def made(random: np.random.Generator, groups: int) -> tuple[Any, Any]:
    """Features of two layers (G, n, 2, D), and HSIC of all pairs by batches (G, 2, 2)."""
    x = random.normal(size=(groups, IMAGES, WIDTH))
    both = torch.from_numpy(np.stack([x, STRENGTH * x + random.normal(size=x.shape)], 1))
    return both, products(centre(both @ both.mT)).numpy()


def share_that_covers(ends: Any) -> float:
    return float(np.mean([low[0, 1] <= TRUTH <= high[0, 1] for low, high in ends]))


@pytest.mark.chance
def test_intervals_of_cka_cover_with_few_batches() -> None:
    """Plain percentiles of 8 batches cover 88 % of the time."""
    random = np.random.default_rng(0)
    found = share_that_covers(bootstrap(made(random, 8)[1], 300, 0) for _ in range(400))
    low, high = stats.binom.interval(0.995, 400, 0.94)
    assert low / 400 <= found <= high / 400


def test_a_pair_of_layers_has_the_interval_of_the_pair_turned_round() -> None:
    """Intervals of pairs of the same layers are computed once; the plain way is all of them."""
    random = np.random.default_rng(2)
    part = random.normal(size=(9, 3, 5, 40))
    hsic = part @ part.swapaxes(-1, -2)
    own = np.diagonal(hsic, axis1=-2, axis2=-1)
    for once, plain in zip(bootstrap(hsic, 50, 0), bootstrap(hsic, 50, 0, (own, own)), strict=True):
        np.testing.assert_allclose(once, plain, rtol=1e-12)
        np.testing.assert_array_equal(once, once.swapaxes(-1, -2))


@pytest.mark.parametrize("unbiased", [True, False])
def test_no_cka_is_beyond_one(unbiased: bool) -> None:
    """Of the smallest batches, however their features are mixed, and of sums over them with any weights."""
    random = np.random.default_rng(4)
    for n in (4, 5, 7):
        x = random.normal(size=(3000, n, 3)) * 10 ** random.uniform(-2, 2, (3000, n, 1))
        y = x @ random.normal(size=(3000, 3, 2)) + 10 ** random.uniform(-4, 2, (3000, 1, 1)) * random.normal(
            size=(3000, n, 2)
        )
        grams = torch.from_numpy(np.stack([x @ x.swapaxes(1, 2), y @ y.swapaxes(1, 2)], 1))
        hsic = products(centre(grams, unbiased), unbiased).numpy()
        each = ratio(hsic)[:, 0, 1]
        summed = ratio(np.tensordot(random.multinomial(40, np.full(40, 1 / 40), 500), hsic[:40], 1))[:, 0, 1]
        assert np.abs(each).max() > 0.999
        assert max(np.abs(each).max(), np.abs(summed).max()) <= 1 + 1e-12


def test_ends_are_cut_at_the_bounds_of_cka() -> None:
    """But never so that an interval leaves its value out, which rounding may put beyond 1; NaN stays."""
    value = np.array([0.788, -0.4, 1 + 1e-15, 0.5, math.nan])
    low = np.array([-0.037, -1.7, 0.9, math.nan, -3.0])
    high = np.array([1.613, 0.9, 1.2, math.nan, 3.0])
    ends = within_bounds(value, low, high)
    np.testing.assert_array_equal(ends[0], [-0.037, -1, 0.9, math.nan, math.nan])
    np.testing.assert_array_equal(ends[1], [1, 0.9, 1 + 1e-15, math.nan, math.nan])


def test_few_batches_have_an_interval_within_bounds() -> None:
    """Student's of two batches is wider than CKA can be; percentiles of many are as they were."""
    random, cut = np.random.default_rng(5), 0
    for _ in range(30):
        hsic = made(random, 2)[1]
        value, free, ends = ratio(hsic.sum(0)), bootstrap(hsic, 100, 0, bounds=False), bootstrap(hsic, 100, 0)
        cut += free[1][0, 1] > 1
        for wide, end in zip(free, ends, strict=True):
            np.testing.assert_array_equal(end[0, 1], np.clip(wide[0, 1], -1, 1))
        assert (ends[0] <= value).all()
        assert (value <= ends[1]).all()
    assert cut > 5
    hsic = made(random, 16)[1]
    for wide, end in zip(bootstrap(hsic, 300, 0, bounds=False), bootstrap(hsic, 300, 0), strict=True):
        assert end[0, 1] == wide[0, 1]


def test_a_full_batch_moves_its_interval_before_it_is_cut() -> None:
    value, low, high, whole = (
        np.array(numbers) for numbers in ([0.8] * 3, [-0.1] * 3, [1.7] * 3, [0.7, -0.2, 1 + 1e-15])
    )
    batched = {"cka": value, "cka_low": low, "cka_high": high}
    moved = GramSums.with_interval("cka", {"": whole, "_null": whole}, batched)
    np.testing.assert_allclose(moved["cka_low"], [-0.2, -1, 0.1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(moved["cka_high"], [1, 0.7, 1], rtol=0, atol=1e-12)
    assert (moved["cka_high"] >= whole).all()


@pytest.mark.chance
def test_intervals_of_full_batches_cover() -> None:
    """Those of the minibatches on the same images, moved to the value of the full batch."""
    random = np.random.default_rng(1)

    def ends() -> Any:
        both, hsic = made(random, 16)
        low, high = bootstrap(hsic, 300, 0, bounds=False)
        whole = FullBatch([WIDTH, WIDTH])
        for batch in both:
            whole.add(list(batch))
        batched = {"cka": ratio(hsic.sum(0)), "cka_low": low, "cka_high": high}
        moved = GramSums.with_interval("cka", {"": whole.cka(), "_null": whole.cka()}, batched)
        return moved["cka_low"], moved["cka_high"]

    found = share_that_covers(ends() for _ in range(300))
    low, high = stats.binom.interval(0.995, 300, 0.95)
    assert low / 300 <= found <= high / 300
