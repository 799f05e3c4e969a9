"""LDA from sums against scikit-learn and against itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from sightline.measure.estimators.lda import Lda, PatchSums, add_patches, fit_lda, lda_scores


def patches(seed: int, n: int = 300, width: int = 12, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=random)
    centres = torch.randn(classes, width, generator=random, dtype=torch.float64)
    mixing = torch.randn(width, width, generator=random, dtype=torch.float64)
    x = centres[labels] + torch.randn(n, width, generator=random, dtype=torch.float64) @ mixing
    return x + 20, labels


def fitted(sums: PatchSums, *shrinkages: float) -> Lda:
    found = fit_lda(sums, shrinkages)
    assert isinstance(found, Lda)
    return found


@pytest.mark.parametrize("shrinkage", [1e-4, 1e-2, 0.3])
def test_hard_labels_give_what_scikit_learn_gives(shrinkage: float) -> None:
    x, labels = patches(0)
    twin = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(x.numpy(), labels.numpy())
    scores = lda_scores(x.numpy(), labels.numpy(), x.numpy() + 0.3, shrinkage)
    theirs = twin.decision_function(x.numpy() + 0.3)
    np.testing.assert_allclose(
        scores - scores.mean(1, keepdims=True), theirs - theirs.mean(1, keepdims=True), atol=1e-8
    )
    np.testing.assert_array_equal(scores.argmax(1), twin.predict(x.numpy() + 0.3))


def test_sums_of_parts_in_float32_are_those_of_the_whole_in_float64() -> None:
    """Although the constant part is a thousand times what varies."""
    x, labels = patches(1, 1000)
    x = (x + 1000).float()
    shares = torch.nn.functional.one_hot(labels, 5).double()
    parts = [add_patches(x[part], shares[part]) for part in (slice(0, 7), slice(7, 400), slice(400, 1000))]
    together = PatchSums(*(sum(part[1:], part[0]) for part in zip(*parts, strict=True)))
    whole = x.double()
    torch.testing.assert_close(together.squares, whole.T @ whole, rtol=1e-11, atol=0)
    centred = together.squares - torch.outer(whole.sum(0), whole.sum(0)) / len(x)
    torch.testing.assert_close(centred, (whole - whole.mean(0)).T @ (whole - whole.mean(0)), rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(together.values, shares.T @ whole, rtol=1e-9, atol=0)
    torch.testing.assert_close(together.weights, shares.sum(0))


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_shares_count_as_patches_that_come_several_times(seed: int) -> None:
    x, labels = patches(seed, 60, 4, 3)
    twice = torch.cat([x, x[:20]])
    of_twice = torch.nn.functional.one_hot(torch.cat([labels, (labels[:20] + 1) % 3]), 3)
    shares = torch.nn.functional.one_hot(labels, 3)
    shares[:20] += torch.nn.functional.one_hot((labels[:20] + 1) % 3, 3)
    one, other = fitted(add_patches(x, shares), 1e-3), fitted(add_patches(twice, of_twice), 1e-3)
    torch.testing.assert_close(one.weight, other.weight)
    torch.testing.assert_close(one.bias, other.bias)


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_rotation_scale_and_translation_change_no_score(seed: int) -> None:
    x, labels = patches(seed, 80, 5, 3)
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))[0]
    moved = 37.5 * x @ turn + 3
    torch.testing.assert_close(lda_scores(x, labels, x), lda_scores(moved, labels, moved), rtol=1e-6, atol=1e-6)


def test_permuted_classes_permute_the_scores_and_weightless_patches_count_for_nothing() -> None:
    x, labels = patches(2)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(lda_scores(x, order[labels], x)[:, order], lda_scores(x, labels, x))
    shares = torch.nn.functional.one_hot(labels, 5)
    more = torch.cat([x, 1e3 * torch.ones(9, x.shape[1], dtype=x.dtype)])
    without = add_patches(more, torch.cat([shares, torch.zeros(9, 5, dtype=torch.int64)]))
    torch.testing.assert_close(fitted(without, 1e-3).weight, fitted(add_patches(x, shares), 1e-3).weight)


def test_what_cannot_be_fitted_says_why() -> None:
    x, labels = patches(3)
    shares = torch.nn.functional.one_hot(labels, 5)
    assert fit_lda(add_patches(torch.full_like(x, 7.5).float(), shares), (1e-3,)) == (
        "the features are the same for all patches"
    )
    assert "two classes" in str(fit_lda(add_patches(x, shares * torch.tensor([1, 0, 0, 0, 0])), (1e-3,)))
    x[0, 0] = torch.nan
    assert "not finite" in str(fit_lda(add_patches(x, shares), (1e-3,)))
    empty = fitted(add_patches(*(part[labels != 2] for part in (patches(3)[0], shares))), 1e-3)
    assert empty.classes.tolist() == [0, 1, 3, 4]  # a class without training pixels is never decided
