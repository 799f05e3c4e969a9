"""The ridge probe against scikit-learn, refits without the images, and its own promises."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge as Peer
from sklearn.linear_model import RidgeClassifier, RidgeCV
from sklearn.preprocessing import StandardScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sightline.core.errors import InputError
from sightline.measure.estimators import ridge
from sightline.measure.estimators.ridge import PENALTIES, fit_ridge

Array = np.ndarray[Any, Any]


def problem(n: int, width: int, classes: int, seed: int = 0) -> tuple[Array, Array]:
    """Features of very different sizes and offsets, some of which know the class."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(n) % classes)
    signal = np.zeros((n, width))
    signal[:, :classes] = 2 * np.eye(classes)[labels]
    return (signal + random.normal(size=(n, width))) * np.logspace(-2, 2, width) + random.normal(size=width), labels


@pytest.mark.parametrize(("n", "width", "classes"), [(200, 30, 5), (40, 100, 4), (60, 8, 2)])
def test_same_as_scikit_learn(n: int, width: int, classes: int) -> None:
    x, labels = problem(n, width, classes)
    probe = fit_ridge(x, labels)
    z = StandardScaler().fit_transform(x)
    y = 2 * np.eye(classes)[labels] - 1
    peer = RidgeCV(alphas=n * np.array(PENALTIES), store_cv_results=True).fit(z, y)
    np.testing.assert_allclose(probe.errors, peer.cv_results_.sum(1).mean(0), rtol=1e-6)
    assert probe.penalty == pytest.approx(peer.alpha_ / n)
    test, _ = problem(50, width, classes, seed=1)
    expected = peer.predict(StandardScaler().fit(x).transform(test))
    np.testing.assert_allclose(probe.scores(test), expected, rtol=1e-8, atol=1e-8)
    classifier = RidgeClassifier(alpha=peer.alpha_).fit(z, labels)
    np.testing.assert_array_equal(probe.decisions(test), classifier.predict(StandardScaler().fit(x).transform(test)))


def test_left_out_accuracy_is_that_of_refits() -> None:
    x, labels = problem(40, 6, 3)
    probe = fit_ridge(x, labels)
    z, y = StandardScaler().fit_transform(x), 2 * np.eye(3)[labels] - 1
    right = []
    for row in range(40):
        keep = np.arange(40) != row
        scores = Peer(alpha=40 * probe.penalty).fit(z[keep], y[keep]).predict(z[~keep])
        right.append((scores + y.mean(0) - y[keep].mean(0)).argmax() == labels[row])  # as common as it was
    assert probe.left_out_accuracy == np.mean(right)


def test_who_is_left_out_does_not_make_its_class_rare() -> None:
    labels = np.arange(64) % 16
    found = [
        fit_ridge(np.random.default_rng(seed).normal(size=(64, 48)), labels).left_out_accuracy for seed in range(20)
    ]
    assert 0.02 < np.mean(found) < 2 / 16  # chance is 1/16; by the shares of the others alone nothing would be right


@pytest.mark.parametrize("width", [6, 50])
def test_views_of_an_image_are_left_out_together(width: int) -> None:
    """Against refits without both rows of an image, with the standardisation and the scale of λ of the whole."""
    random = np.random.default_rng(2)
    base = random.normal(size=(30, width))
    views = base + 0.3 * random.normal(size=base.shape) - 0.4, base + 0.3 * random.normal(size=base.shape) + 0.4
    labels = np.zeros(30, int), np.ones(30, int)
    probe = fit_ridge(views, labels)
    x, codes, image = np.concatenate(views), np.concatenate(labels), np.tile(np.arange(30), 2)
    z, y = StandardScaler().fit_transform(x), 2 * np.eye(2)[codes] - 1
    expected = []
    for penalty in PENALTIES:
        errors = [
            np.square(y[~keep] - Peer(alpha=60 * penalty).fit(z[keep], y[keep]).predict(z[~keep])).sum()
            for number in range(30)
            for keep in [image != number]
        ]
        expected.append(sum(errors) / 60)
    np.testing.assert_allclose(probe.errors, expected, rtol=1e-5)
    # Leaving out single rows would find another error.
    assert not np.allclose(fit_ridge(x, codes).errors, expected, rtol=1e-3)


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = problem(500, 12, 4)
    whole = fit_ridge(x, labels)
    monkeypatch.setattr(ridge, "BLOCK_NUMBERS", 1)  # blocks of 64 rows
    parts = fit_ridge(x, labels)
    np.testing.assert_allclose(parts.errors, whole.errors, rtol=1e-10)
    np.testing.assert_allclose(parts.weight, whole.weight, rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(parts.decisions(x), whole.decisions(x))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-3, 1e3), shift=st.floats(-10, 10))
def test_scale_and_translation_of_features_do_not_matter(seed: int, scale: float, shift: float) -> None:
    x, labels = problem(30, 6, 3, seed)
    np.testing.assert_allclose(
        fit_ridge(scale * x + shift, labels).scores(scale * x + shift), fit_ridge(x, labels).scores(x), atol=1e-6
    )


def test_constant_features_and_absent_classes_add_nothing() -> None:
    x, labels = problem(60, 6, 3)
    more = np.concatenate([x, np.full((60, 1), 1e4), np.full((60, 1), 7.0) + 1e-8 * x[:, :1]], 1)
    probe, wide = fit_ridge(x, labels), fit_ridge(more, labels + 2, classes=8)
    np.testing.assert_array_equal(wide.weight[6:], 0)
    np.testing.assert_allclose(wide.scores(more)[:, 2:5], probe.scores(x), atol=1e-9)
    np.testing.assert_allclose(wide.scores(more)[:, [0, 1, 5, 6, 7]], -1, atol=1e-12)


def test_large_offsets_do_not_cancel() -> None:
    x, labels = problem(80, 6, 3)
    x /= x.std(0)
    np.testing.assert_allclose(fit_ridge(x + 1e5, labels).scores(x + 1e5), fit_ridge(x, labels).scores(x), atol=1e-5)


@pytest.mark.parametrize(
    ("features", "labels", "options", "message"),
    [
        (np.ones((3, 2)), np.zeros(4, int), {}, "one label for each row"),
        ((np.ones((3, 2)), np.ones((3, 1))), (np.zeros(3, int),) * 2, {}, r"\(3, 1\) and \(3, 2\)"),
        (np.ones((1, 2)), np.zeros(1, int), {}, "at least 2 training images, not 1"),
        (np.ones((3, 2)), np.arange(3), {"penalties": (0.0, 1.0)}, "penalties above 0"),
    ],
)
def test_bad_input(features: Any, labels: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_ridge(features, labels, **options)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(one.numel() for one in tree_leaves(made) if isinstance(one, torch.Tensor))])
        return made


def test_many_classes_take_no_square_of_memory() -> None:
    x = np.random.default_rng(0).normal(size=(30, 4))
    labels = np.arange(30) % 3 * 9_999
    with Largest() as largest:
        probe = fit_ridge(x, labels, 20_000)
    assert largest.numbers < 1e7  # an identity matrix alone would have 4e8
    few = fit_ridge(x, labels // 9_999, 3)
    np.testing.assert_allclose(probe.scores(x)[:, ::9_999], few.scores(x), atol=1e-9)
