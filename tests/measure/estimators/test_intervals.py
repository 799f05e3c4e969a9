"""Accuracies: intervals, and labels that make no accuracy possible."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, multinomial
from support.plans import TEST, TRAIN, make_images

from sightline.core.errors import InputError
from sightline.measure.estimators.intervals import accuracy_of, difference_of, wilson
from sightline.measure.request import check_labels

IS_TRAIN, NUMBERS = np.arange(TRAIN + TEST) < TRAIN, np.arange(TRAIN + TEST)


def test_wilson_against_scipy() -> None:
    for right, n in ((0, 5), (5, 5), (3, 7), (412, 1000)):
        expected = binomtest(right, n).proportion_ci(0.95, "wilson")
        np.testing.assert_allclose(wilson(right, n), [expected.low, expected.high], atol=1e-12)


def test_accuracy_is_the_share_of_right_answers() -> None:
    assert accuracy_of(np.array([1, 2, 3, 4]), np.array([1, 2, 0, 4])) == (0.75, *wilson(3, 4))


def answers(both: int, first: int, second: int, none: int) -> tuple[Any, Any]:
    """Images that both, only the first, only the second and none of two decide right."""
    counts = (both, first, second, none)
    return np.repeat([True, True, False, False], counts), np.repeat([True, False, True, False], counts)


def test_differences_are_those_of_paired_shares() -> None:
    """Against the paired normal interval (difference of shares, its deviation over images) of the larger table."""
    for table in ((3, 2, 1, 4), (0, 6, 0, 0), (9, 0, 0, 3), (227, 132, 107, 678)):
        value, low, high = difference_of(*answers(*table))
        assert value == pytest.approx((table[1] - table[2]) / sum(table))
        shares = (np.array(table) + 0.5) / (sum(table) + 2)
        mean = shares[1] - shares[2]
        half = 1.959963984540054 * np.sqrt((shares[1] + shares[2] - mean**2) / (sum(table) + 2))
        assert (low, high) == (pytest.approx(max(-1, mean - half)), pytest.approx(min(1, mean + half)))
        assert low < value < high or value in (low, high)


def test_no_image_differs_is_no_proof_of_equality() -> None:
    widths = [np.ptp(difference_of(*answers(n // 2, 0, 0, n - n // 2))[1:]) for n in (1, 10, 100, 1000)]
    assert (np.diff(widths) < 0).all()
    assert widths[2] == pytest.approx(2 * 1.959963984540054 / 102)
    same, _ = answers(3, 0, 0, 2)
    assert difference_of(same, same) == (0, 0, 0)


@pytest.mark.parametrize("n", [10, 30])
def test_intervals_of_differences_cover(n: int) -> None:
    """Exact coverage, summed over all outcomes: 95 % on average, and nowhere as low as that of mean ± 1.96 σ/√n."""
    only = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
    intervals = np.array([difference_of(*answers(n - b - c, b, c, 0)) for b, c in only])
    coverage, plain = [], []
    for first, second in ((0.02, 0.02), (0.1, 0.0), (0.1, 0.05), (0.2, 0.2), (0.3, 0.05), (0.5, 0.1), (0.8, 0.05)):
        weights = multinomial.pmf([(b, c, n - b - c) for b, c in only], n, (first, second, 1 - first - second))
        truth = first - second
        coverage.append(weights[(intervals[:, 1] <= truth) & (truth <= intervals[:, 2])].sum())
        spread = np.array([np.sqrt((b + c - (b - c) ** 2 / n) / (n - 1) / n) for b, c in only])
        plain.append(weights[np.abs(intervals[:, 0] - truth) <= 1.96 * spread].sum())
    assert min(coverage) > 0.92
    assert 0.94 < np.mean(coverage) < 0.99
    assert min(plain) < 0.85


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full(TRAIN + TEST, -1), "This needs labels of at least two classes, but the train split of made has no"),
        (np.zeros(TRAIN + TEST, int), "the train split of made has 1 labelled class;"),
        (np.where(IS_TRAIN, NUMBERS % 2, -1), "the test split of made has no labelled classes"),
        (np.where(IS_TRAIN, NUMBERS % 2, 2), "no class of the test split is in the train split"),
    ],
)
def test_labels_are_checked_before_the_pass(labels: Any, message: str) -> None:
    images = make_images(labels, {"train": TRAIN, "test": TEST}, ("a", "b", "c"))
    with pytest.raises(InputError, match=message):
        check_labels(images, ("train", "test"), "This", "this")
