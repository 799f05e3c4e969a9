"""k-NN of arrays: the definition, ties, rounding, invariances, bad input."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier
from support.neighbours import plain

from sightline.core.errors import InputError
from sightline.measure.estimators import neighbours
from sightline.measure.estimators.neighbours import knn_predict

Array = np.ndarray[Any, Any]


def normal(random: np.random.Generator, n: int, width: int = 32) -> Array:
    return random.normal(size=(n, width))


def clustered(random: np.random.Generator, n: int, width: int = 32) -> Array:
    centres = np.random.default_rng(5).normal(size=(10, width))
    return 3 + centres[random.integers(0, 10, n)] + 0.3 * random.normal(size=(n, width)) * np.linspace(2, 0.01, width)


def narrow(random: np.random.Generator, n: int, width: int = 32) -> Array:
    """All cosines above 0.999, as in the first blocks of a transformer."""
    return np.linspace(1, 2, width) + 0.01 * random.normal(size=(n, width))


def near_duplicates(random: np.random.Generator, n: int, width: int = 32) -> Array:
    few = np.random.default_rng(6).normal(size=(12, width))
    return few[random.integers(0, 12, n)] + 1e-4 * random.normal(size=(n, width))


def duplicates(random: np.random.Generator, n: int, width: int = 32) -> Array:
    return np.random.default_rng(6).normal(size=(12, width))[random.integers(0, 12, n)]


def constant(random: np.random.Generator, n: int, width: int = 32) -> Array:
    return np.full((n, width), 0.3)


def with_zeros(random: np.random.Generator, n: int, width: int = 32) -> Array:
    return normal(random, n, width) * (random.random((n, 1)) < 0.5)


KINDS = [normal, clustered, narrow, near_duplicates, duplicates, constant, with_zeros]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_same_as_the_definition(kind: Callable[..., Array], dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "BLOCK_NUMBERS", 32 * 1100)  # several blocks of training rows
    monkeypatch.setattr(neighbours, "QUERIES", 64)
    random = np.random.default_rng(0)
    train, test = kind(random, 3000).astype(dtype), kind(random, 150).astype(dtype)
    labels = random.integers(-2, 8, 3000)
    for k, temperature in ((20, 0.07), (1, 0.07), (50, 1.0)):
        ours = knn_predict(train, labels, test, k, temperature)
        np.testing.assert_array_equal(ours, plain(train, labels, test, k, temperature))


@pytest.mark.parametrize("kind", [normal, clustered, narrow])
def test_same_as_scikit_learn(kind: Callable[..., Array]) -> None:
    random = np.random.default_rng(1)
    train, test, labels = kind(random, 2000), kind(random, 300), random.integers(0, 10, 2000)
    peer = KNeighborsClassifier(20, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07))
    np.testing.assert_array_equal(knn_predict(train, labels, test), peer.fit(train, labels).predict(test))


def test_float32_alone_would_choose_other_neighbours() -> None:
    """Rows of two classes whose cosines differ by less than float32 resolves; only the last ones are nearest."""
    random = np.random.default_rng(2)
    width, n = 256, 4000
    query = random.normal(size=(1, width))
    query /= np.linalg.norm(query)
    aside = random.normal(size=(n, width))
    aside -= (aside @ query.T) * query
    aside /= np.linalg.norm(aside, axis=1, keepdims=True)
    cosine = 0.6 + 1e-9 * random.permutation(n)
    train = cosine[:, None] * query + np.sqrt(1 - cosine[:, None] ** 2) * aside
    nearest = np.argsort(-cosine)[:20]
    labels = np.isin(np.arange(n), nearest).astype(int)
    rounded = [torch.from_numpy(x).float() for x in (query, train)]
    for dtype in (torch.float32, torch.bfloat16):
        scan = (rounded[0].to(dtype) @ rounded[1].to(dtype).T)[0].topk(20).indices.numpy()
        assert labels[scan].mean() < 0.5, "the test must be hard enough to fool a plain scan"
    assert knn_predict(train, labels, query) == 1
    keys = neighbours.nearest(neighbours.Rows(train), torch.from_numpy(query), 20)
    assert set(neighbours.row_of(keys)[0].tolist()) == set(nearest.tolist())


def test_queries_without_proof_are_done_again_and_only_those(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    train = np.concatenate([normal(random, 2000), np.repeat(normal(random, 1), 200, 0)])
    test = np.concatenate([normal(random, 30), train[-1:]])  # one query whose nearest rows are 200 equal ones
    again = []
    real = neighbours._sweep

    def spy(rows: Any, queries: torch.Tensor, *rest: Any) -> Any:
        again.append((queries.dtype, len(queries)))
        return real(rows, queries, *rest)

    monkeypatch.setattr(neighbours, "_sweep", spy)
    knn_predict(train, np.arange(2200), test)
    assert again == [(torch.float32, 31), (torch.float64, 1)]


@pytest.mark.bf16
def test_coarse_matrix_products_do_not_change_the_answer() -> None:
    random = np.random.default_rng(4)
    train, test, labels = narrow(random, 1500), narrow(random, 50), random.integers(0, 5, 1500)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        np.testing.assert_array_equal(knn_predict(train, labels, test), plain(train, labels, test))
    finally:
        torch.set_float32_matmul_precision(before)


def test_ties_go_to_the_smaller_row_and_the_smaller_label() -> None:
    same = np.ones((100, 4))
    assert knn_predict(same, np.arange(100)[::-1].copy(), same[:1], k=1) == 99  # row 0
    assert knn_predict(same, np.array([7, 3] * 50), same[:1], k=20) == 3  # ten votes each
    assert knn_predict(same, np.array([7, 3, 7] + [3] * 97), same[:1], k=3) == 7  # rows 0 to 2


def test_top_five_are_the_classes_with_the_most_votes() -> None:
    random = np.random.default_rng(3)
    train, test, labels = random.normal(size=(60, 8)), random.normal(size=(25, 8)), random.integers(0, 12, 60)
    best = knn_predict(train, labels, test, k=15, top=5)
    np.testing.assert_array_equal(best[:, 0], plain(train, labels, test, 15))
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, test)]
    for query, found in zip(unit[1], best, strict=True):
        cosine = unit[0] @ query
        near = np.argsort(-cosine)[:15]
        votes = np.bincount(labels[near], np.exp(cosine[near] / 0.07), minlength=12)
        expected = [c for c in np.argsort(-votes) if votes[c] > 0][:5]
        assert found[: len(expected)].tolist() == expected
    few = knn_predict(train, labels % 2, torch.from_numpy(test).numpy(), k=15, top=3)
    assert (few[:, 2] == few[:, 1]).all()  # there are no more than two
    names = np.array(list("abcdefghijkl"))
    assert (knn_predict(train, names[labels], test, k=15, top=5) == names[best]).all()
    assert (knn_predict(train, torch.from_numpy(labels), test, k=15, top=5).numpy() == best).all()
    with pytest.raises(InputError, match="at least one class for each feature, not 0"):
        knn_predict(train, labels, test, top=0)


def test_few_images() -> None:
    train, labels = np.eye(3), np.array([5, 6, 7])
    np.testing.assert_array_equal(knn_predict(train, labels, train), labels)
    np.testing.assert_array_equal(knn_predict(train[:1], labels[:1], train), [5, 5, 5])
    assert knn_predict(train, labels, np.array([[0.1, 0.9, 0.2]])).tolist() == [6]
    assert knn_predict(train, labels, train[:0]).shape == (0,)


@pytest.mark.parametrize(
    "names",
    [
        np.array([-5, 10**15]),
        np.array(["zebra", "ant"]),
        np.array([3, 250], dtype=np.uint8),
        np.array([0.5, -1.5]),
        np.array([False, True]),
        torch.tensor([-(2**60), 7]),
        torch.tensor([1, 0], dtype=torch.int32),
    ],
    ids=str,
)
def test_any_labels(names: Any) -> None:
    random = np.random.default_rng(6)
    codes = random.integers(0, 2, 60)
    train = np.where(codes[:, None] == 1, 1.0, -1.0) + 0.1 * random.normal(size=(60, 5))
    given = names[torch.from_numpy(codes)] if isinstance(names, torch.Tensor) else names[codes]
    got = knn_predict(train, given, train)
    assert type(got) is type(given)
    assert got.dtype == given.dtype
    assert (got == given).all()


def test_tensors_arrays_and_maps_give_the_same(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    train, test = normal(random, 400).astype(np.float32), normal(random, 40).astype(np.float32)
    labels = random.integers(0, 4, 400)
    expected = knn_predict(train, labels, test)
    wide = [x.astype(np.float64) for x in (train, test)]
    np.testing.assert_array_equal(knn_predict(wide[0], labels, wide[1]), expected)
    np.testing.assert_array_equal(wide[0], train)  # what was given is left as it was
    as_tensors = knn_predict(torch.from_numpy(train).requires_grad_(), torch.from_numpy(labels), torch.from_numpy(test))
    assert isinstance(as_tensors, torch.Tensor)
    np.testing.assert_array_equal(as_tensors.numpy(), expected)
    np.save(tmp_path / "train.npy", train)
    mapped = np.load(tmp_path / "train.npy", mmap_mode="r")
    np.testing.assert_array_equal(knn_predict(mapped, labels, test), expected)
    np.testing.assert_array_equal(knn_predict(train.astype(">f4"), labels, test), expected)
    np.testing.assert_array_equal(knn_predict(train[:, ::-1], labels, test[:, ::-1]), expected)
    whole = [(1000 * x).astype(np.int32) for x in (train, test)]
    np.testing.assert_array_equal(knn_predict(whole[0], labels, whole[1]), plain(whole[0], labels, whole[1]))
    half = [torch.from_numpy(x).bfloat16() for x in (train, test)]
    exact = [x.double().numpy() for x in half]
    np.testing.assert_array_equal(knn_predict(half[0], labels, half[1]), plain(exact[0], labels, exact[1]))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_very_small_and_very_large_features(scale: float) -> None:
    random = np.random.default_rng(8)
    train, test, labels = normal(random, 300), normal(random, 30), random.integers(0, 4, 300)
    small = [(scale * x).astype(np.float32) for x in (train, test)]
    np.testing.assert_array_equal(knn_predict(small[0], labels, small[1]), knn_predict(train, labels, test))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 200), width=st.integers(2, 20), k=st.integers(1, 30))
def test_invariances(seed: int, n: int, width: int, k: int) -> None:
    random = np.random.default_rng(seed)
    train, test, labels = normal(random, n, width), normal(random, 9, width), random.integers(0, 4, n)
    expected = knn_predict(train, labels, test, k)
    rotation = np.linalg.qr(random.normal(size=(width, width)))[0]
    np.testing.assert_array_equal(knn_predict(train @ rotation, labels, test @ rotation, k), expected)
    scales = random.uniform(0.01, 100, (n, 1))
    np.testing.assert_array_equal(knn_predict(train * scales, labels, test * 7, k), expected)
    order, queries = random.permutation(n), random.permutation(9)
    np.testing.assert_array_equal(knn_predict(train[order], labels[order], test[queries], k), expected[queries])
    one_by_one = [knn_predict(train, labels, test[i : i + 1], k)[0] for i in range(9)]
    np.testing.assert_array_equal(one_by_one, expected)


@pytest.mark.parametrize(
    ("train", "labels", "test", "options", "message"),
    [
        (np.ones((3, 2)), np.arange(3), np.ones((1, 5)), {}, "width 2 and test features of width 5"),
        (np.ones((3, 2)), np.arange(4), np.ones((1, 2)), {}, "3 training features and 4 labels"),
        (np.ones((0, 2)), np.arange(0), np.ones((1, 2)), {}, "0 training features"),
        (np.ones(3), np.arange(3), np.ones((1, 2)), {}, "training features as a real numpy array or tensor"),
        (np.ones((3, 2)), np.arange(3), [[1, 2]], {}, "test features .* not list"),
        (np.array([["a"]]), np.arange(1), np.ones((1, 1)), {}, "training features as a real"),
        (np.array([[1, np.nan], [1, 1]]), np.arange(2), np.ones((1, 2)), {}, "NaN or infinity is in 1 of 2 rows"),
        (np.ones((3, 2)), np.arange(3), np.array([[np.inf, 1]]), {}, "1 of 1 rows"),
        (np.ones((3, 2)), np.arange(3), np.ones((1, 2)), {"k": 0}, "k of at least 1"),
        (np.ones((3, 2)), np.arange(3), np.ones((1, 2)), {"temperature": 0}, "temperature above 0"),
    ],
)
def test_bad_input(train: Any, labels: Any, test: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        knn_predict(train, labels, test, **options)
