"""Pixels from features in closed form, against scikit-learn and plain loops."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score

from sightline.measure.estimators.inversion import Recovered, fit_inverse, odd_part
from sightline.measure.estimators.ridge import PENALTIES

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(90, 5)) * [3.0, 1.0, 0.1, 2.0, 1.0] + 4
Y = X @ RANDOM.normal(size=(5, 12)) + RANDOM.normal(size=(90, 12))


def halves(x: np.ndarray, y: np.ndarray, cut: int):
    rows = [tuple(torch.from_numpy(part[side]) for part in (x, y)) for side in (slice(cut), slice(cut, None))]
    return lambda: rows


def test_each_set_of_targets_is_the_ridge_of_scikit_learn_with_the_best_penalty() -> None:
    noise = RANDOM.normal(size=Y.shape)
    both = np.concatenate([Y, noise], 1)
    fit = fit_inverse(halves(X[:60], both[:60], 17), halves(X[60:], both[60:], 11), sets=2)
    scale = np.sqrt(X[:60].var(0).mean())
    for number, targets in enumerate((Y, noise)):
        peers = [Ridge(alpha=60 * penalty).fit(X[:60] / scale, targets[:60]) for penalty in PENALTIES]
        errors = [np.square(peer.predict(X[60:] / scale) - targets[60:]).sum() for peer in peers]
        best = max(k for k, error in enumerate(errors) if error <= min(errors) * (1 + 1e-6))
        assert fit.penalties[number] == PENALTIES[best]
        expected = peers[best].predict(X / scale)
        np.testing.assert_allclose(fit(X)[:, 12 * number : 12 * (number + 1)], expected, rtol=1e-8, atol=1e-8)


def test_what_comes_back_is_counted_as_in_plain_loops() -> None:
    pictures = RANDOM.random((20, 3, 4, 5))
    made = np.stack([pictures, pictures[..., ::-1]]) * 0.5 + RANDOM.normal(size=(2, 20, 3, 4, 5)) * 0.5
    mean = (pictures + pictures[..., ::-1]).mean(0) / 2
    whole, parts = Recovered(mean), Recovered(mean)
    whole.add(pictures, made)
    parts.add(pictures[:7], made[:, :7])
    parts.add(pictures[7:], made[:, 7:])
    truth = np.concatenate([pictures, pictures[..., ::-1]]).reshape(40, -1)
    guess = made.reshape(40, -1)
    numbers = whole.numbers()
    assert numbers["r2"][0] == pytest.approx(r2_score(truth, guess, multioutput="variance_weighted"))
    nearer = [
        np.square(m - p).sum() < np.square(m - p[..., ::-1]).sum()
        for p, m in zip(np.concatenate([pictures, pictures[..., ::-1]]), made.reshape(40, 3, 4, 5), strict=True)
    ]
    assert numbers["nearer"][0] == pytest.approx(np.mean(nearer))
    odd = odd_part(truth.reshape(40, 3, 4, 5))
    assert numbers["odd"][0] == pytest.approx((odd_part(made.reshape(odd.shape)) * odd).sum() / np.square(odd).sum())
    for name, (value, low, high) in parts.numbers().items():
        assert (value, low, high) == pytest.approx(numbers[name])
        assert low < value < high


def test_the_same_picture_for_both_is_chance_exactly() -> None:
    pictures = RANDOM.random((20, 3, 4, 4))
    even = np.stack([pictures + pictures[..., ::-1]] * 2)
    even = (even + even[..., ::-1]) / 2
    found = Recovered(pictures.mean(0))
    found.add(pictures, even)
    assert found.numbers()["nearer"][0] == pytest.approx(0.5)
    assert found.numbers()["odd"][0] == pytest.approx(0, abs=1e-12)


def test_intervals_cover() -> None:
    """Of samples from a population whose odd part is known, 95 % of the intervals hold it, more or less."""
    inside = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        pictures = random.normal(size=(60, 3, 2, 2))
        made = np.stack([pictures, pictures[..., ::-1]]) * 0.3 + random.normal(size=(2, 60, 3, 2, 2))
        found = Recovered(np.zeros((3, 2, 2)))
        found.add(pictures, made)
        _, low, high = found.numbers()["odd"]
        inside += low < 0.3 < high
    assert 180 <= inside <= 199
