"""Accuracies: intervals, and labels that make no accuracy possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from made import TEST, TRAIN, make_images
from scipy.stats import binomtest

from sightline.accuracy import accuracy_of, check_labels, wilson
from sightline.errors import InputError

IS_TRAIN, NUMBERS = np.arange(TRAIN + TEST) < TRAIN, np.arange(TRAIN + TEST)


def test_wilson_against_scipy() -> None:
    for right, n in ((0, 5), (5, 5), (3, 7), (412, 1000)):
        expected = binomtest(right, n).proportion_ci(0.95, "wilson")
        np.testing.assert_allclose(wilson(right, n), [expected.low, expected.high], atol=1e-12)


def test_accuracy_is_the_share_of_right_answers() -> None:
    assert accuracy_of(np.array([1, 2, 3, 4]), np.array([1, 2, 0, 4])) == (0.75, *wilson(3, 4))


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
