"""Measures of similarity against their definitions, other people's numbers, and what they promise."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr

from sightline.core.errors import InputError
from sightline.measure.estimators import similarity
from sightline.measure.estimators.similarity import (
    angular_distance,
    bootstrap_linear,
    centred_ranks,
    cloud_of,
    compare,
    influence_of_ratio,
    mutual_knn,
    procrustes,
    pwcca,
    rank_products,
    rsa,
    svcca,
)

Array = np.ndarray[Any, Any]
MEASURES: dict[str, Callable[..., float]] = {
    "procrustes": procrustes,
    "shape": angular_distance,
    "svcca": svcca,
    "pwcca": pwcca,
    "rsa": rsa,
    "mutual_knn": mutual_knn,
}
SHAPES = ((60, 7, 5), (30, 40, 50), (40, 20, 60))  # more images than features, fewer, between


def arrays(n: int, p: int, q: int, seed: int = 0) -> tuple[Array, Array]:
    """Two arrays that have something in common, with an offset."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, p)) @ random.normal(size=(p, p)) + 3
    return x, x @ random.normal(size=(p, q)) + 2 * math.sqrt(p) * random.normal(size=(n, q)) - 5


def centred(x: Array) -> Array:
    return x - x.mean(0)


def variates(x: Array, y: Array, variance: float) -> tuple[Array, Array, Array]:
    """Canonical variates and correlations of the leading principal components, by SVD of the data."""
    bases = []
    for values in (centred(x), centred(y)):
        u, s, _ = np.linalg.svd(values, full_matrices=False)
        bases.append(u[:, : int(np.searchsorted(np.cumsum(s**2) / (s**2).sum(), variance - 1e-12)) + 1])
    p, correlations, q = np.linalg.svd(bases[0].T @ bases[1], full_matrices=False)
    return bases[0] @ p, bases[1] @ q.T, correlations


@pytest.mark.parametrize("shape", SHAPES)
def test_definitions(shape: tuple[int, int, int]) -> None:
    x, y = arrays(*shape)
    a, b = (np.pad(centred(v), ((0, 0), (0, max(shape[1:]) - v.shape[1]))) for v in (x, y))
    best = orthogonal_procrustes(a / np.linalg.norm(a), b / np.linalg.norm(b))[1]
    assert procrustes(x, y) == pytest.approx(best, abs=1e-12)
    assert angular_distance(x, y) == pytest.approx(math.acos(best), abs=1e-12)
    h, g, correlations = variates(x, y, 0.9)
    assert svcca(x, y, 0.9) == pytest.approx(correlations.mean(), abs=1e-9)
    left, right = np.abs(h.T @ centred(x)).sum(1), np.abs(g.T @ centred(y)).sum(1)
    assert pwcca(x, y, 0.9, "x") == pytest.approx(correlations @ left / left.sum(), abs=1e-9)
    assert pwcca(x, y, 0.9, "y") == pytest.approx(correlations @ right / right.sum(), abs=1e-9)
    assert pwcca(x, y, 0.9) == pytest.approx((pwcca(x, y, 0.9, "x") + pwcca(x, y, 0.9, "y")) / 2, abs=1e-12)
    for kind in similarity.DISSIMILARITIES:
        assert rsa(x, y, kind) == pytest.approx(spearmanr(pdist(x, kind), pdist(y, kind)).statistic, abs=1e-12)
    near = []
    for v in (x, y):
        unit = v / np.linalg.norm(v, axis=1, keepdims=True)
        cosine = unit @ unit.T
        np.fill_diagonal(cosine, -2)
        near.append(np.argsort(-cosine, axis=1)[:, :6])
    shared = [len(set(mine) & set(theirs)) / 6 for mine, theirs in zip(*near, strict=True)]
    assert mutual_knn(x, y, 6) == pytest.approx(np.mean(shared), abs=1e-12)


def test_numbers_of_other_packages() -> None:
    """Computed by netrep (0186b8a), google/svcca (1f3fbf1) and platonic-rep (dcd76ba), the last one in float32."""
    i, j = np.arange(30.0)[:, None], np.arange(1, 5.0)
    x = np.sin(i * j + j**2) * j
    y = np.cos(i * j * 1.3) + x[:, ::-1] / 2
    assert angular_distance(x, y) == pytest.approx(0.5956870509921883, abs=1e-13)
    assert svcca(x, y, variance=1) == pytest.approx(0.6989910206290246, abs=1e-11)
    assert mutual_knn(x, y, k=5) == pytest.approx(0.5266667008399963, abs=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MEASURES)
def test_invariances(name: str, shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(1)
    x, y = arrays(*shape)
    measure, value = MEASURES[name], MEASURES[name](x, y)
    if name == "pwcca" and shape != SHAPES[0]:
        assert math.isnan(value)
        assert measure(x, x) == pytest.approx(1, abs=1e-7)
        return
    assert measure(y, x) == pytest.approx(value, abs=1e-9)
    assert measure(x, x) == pytest.approx(0 if name == "shape" else 1, abs=1e-7)
    assert measure(37.5 * x, y) == pytest.approx(value, abs=1e-9)
    rotation = np.linalg.qr(random.normal(size=(shape[1], shape[1])))[0]
    if name == "pwcca":  # its weights go by the features one by one
        assert abs(measure(x @ rotation, y) - value) > 1e-6
    else:
        assert measure(x @ rotation, y) == pytest.approx(value, abs=1e-9)
    if name != "mutual_knn":  # which goes by the cosine
        assert measure(x + 20, y) == pytest.approx(value, abs=1e-9)
    perm = random.permutation(shape[0])
    assert measure(x[perm], y[perm]) == pytest.approx(value, abs=1e-9)
    assert measure(x.reshape(shape[0], 1, -1), torch.from_numpy(y)) == pytest.approx(value, abs=1e-12)


def test_cca_does_not_see_invertible_maps() -> None:
    x, y = arrays(60, 7, 5)
    change = np.random.default_rng(1).normal(size=(7, 7))
    assert svcca(x @ change, y, 1) == pytest.approx(svcca(x, y, 1), abs=1e-9)
    assert abs(procrustes(x @ change, y) - procrustes(x, y)) > 0.01
    assert svcca(*arrays(20, 30, 30), 1) == pytest.approx(1, abs=1e-9)  # as many features as images: nothing is learned


def test_the_shape_distance_is_a_metric() -> None:
    random = np.random.default_rng(0)
    for n, d in ((8, 3), (5, 9)):
        clouds = [random.normal(size=(n, d)) * random.uniform(0.1, 1, d) for _ in range(12)]
        apart = np.array([[angular_distance(x, y) for y in clouds] for x in clouds])
        detour = (apart[:, :, None] + apart[None, :, :]).min(1)  # over all third ones
        assert (apart <= detour + 1e-7).all()
        assert (apart[~np.eye(12, dtype=bool)] > 0.01).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_images_change_nothing(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = arrays(*shape)
    whole = {name: measure(x, y) for name, measure in MEASURES.items()}
    monkeypatch.setattr(similarity, "BLOCK", 7)
    for name, measure in MEASURES.items():
        assert measure(x, y) == pytest.approx(whole[name], abs=1e-12, nan_ok=True)


def test_a_large_offset_costs_no_digits() -> None:
    x, y = (torch.from_numpy(v).float() for v in arrays(200, 6, 6))
    far = x + 1000
    for name in ("procrustes", "svcca", "rsa"):
        assert MEASURES[name](far, y) == pytest.approx(MEASURES[name](far.double() - 1000, y), abs=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [1e7, 1e10])
def test_features_far_from_zero_are_centred_in_float64(shape: tuple[int, int, int], offset: float) -> None:
    x, y = arrays(*shape)
    for name in ("procrustes", "shape", "svcca", "rsa"):
        assert MEASURES[name](x + offset, y - offset) == pytest.approx(MEASURES[name](x, y), abs=1e-4)
    # Cosines do see the offset: in the limit an image is near another along the way from zero to their mean.
    exact = []
    for v in (x + offset, y - offset):
        unit = v.astype(np.longdouble) / np.linalg.norm(v.astype(np.longdouble), axis=1, keepdims=True)
        apart = np.square(unit[:, None] - unit).sum(2)
        exact.append(apart.astype(float))
    assert rsa(x + offset, y - offset, "cosine") == pytest.approx(
        spearmanr(*(apart[np.triu_indices(len(x), 1)] for apart in exact)).statistic, abs=1e-4
    )
    near = [np.argsort(apart + np.diag(np.full(len(x), np.inf)), axis=1)[:, :6] for apart in exact]
    shared = [len(set(mine) & set(theirs)) / 6 for mine, theirs in zip(*near, strict=True)]
    assert mutual_knn(x + offset, y - offset, 6) == pytest.approx(np.mean(shared), abs=0.006)


def test_unrelated_wide_features_are_not_at_zero() -> None:
    """Which is why every value has its null."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 50, 100))
    assert procrustes(x, y) > 0.5
    assert svcca(x, y) > 0.9
    assert abs(rsa(x, y)) < 0.1


def test_constant_features_have_no_value() -> None:
    x = np.random.default_rng(0).normal(size=(20, 4))
    for name in ("procrustes", "svcca", "pwcca", "rsa", "mutual_knn"):
        assert math.isnan(MEASURES[name](x, np.full((20, 3), 0.1)))
    assert math.isnan(mutual_knn(np.full((20, 4), 0.1), np.full((20, 3), 0.1)))


def test_images_in_one_direction_have_no_nearest_by_cosine() -> None:
    random = np.random.default_rng(0)
    x, line = random.normal(size=(20, 4)), random.uniform(1, 2, (20, 1)) * [1.0, 2.0, -1.0]
    assert math.isnan(mutual_knn(x, line, 3))
    assert math.isnan(mutual_knn(line.astype(np.float32), x, 3))
    assert procrustes(x, line) > 0
    assert math.isnan(mutual_knn(np.zeros((20, 3)), x, 3))


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="nothing here is more precise than float64")
@pytest.mark.parametrize("width", [8, 64, 384])
@pytest.mark.parametrize("variation", [1.0, 1e-4, 1e-5, 5e-6])
def test_features_that_hardly_differ_keep_their_neighbours(width: int, variation: float) -> None:
    """Of unrelated features chance is 10/299 = 0.033, however small their variation is beside their mean."""
    random = np.random.default_rng(0)
    pair = [
        (random.normal(size=width) + variation * random.normal(size=(300, width))).astype(np.float32) for _ in range(2)
    ]
    near = []
    for x in pair:
        exact = x.astype(np.longdouble)
        exact /= np.sqrt(np.square(exact).sum(1, keepdims=True))
        cosine = exact @ exact.T
        np.fill_diagonal(cosine, -2)
        near.append([set(row) for row in np.argsort(-cosine, axis=1)[:, :10].tolist()])
        found = similarity.neighbours_of(torch.from_numpy(x).double(), 10)
        assert found is not None
        # Those at such small angles that the reference itself may round them
        assert np.mean([set(row) == known for row, known in zip(found.tolist(), near[-1], strict=True)]) > 0.98
    value = mutual_knn(*pair, k=10)
    assert value == pytest.approx(np.mean([len(a & b) / 10 for a, b in zip(*near, strict=True)]), abs=1e-3)
    assert value == pytest.approx(10 / 299, abs=0.012)


def test_zeros_have_a_cosine_of_zero_with_everything() -> None:
    x = np.random.default_rng(0).normal(size=(12, 3)) * ([0], *[[1]] * 10, [0])
    norms = np.linalg.norm(x, axis=1)
    cosine = x @ x.T / np.maximum(norms[:, None] * norms, 1e-300)
    np.fill_diagonal(cosine, -2)
    found = similarity.neighbours_of(torch.from_numpy(x), 4)
    assert found is not None
    for i in range(1, 11):
        assert found[i].tolist() == np.argsort(-cosine[i])[:4].tolist()
    assert all(len(set(found[i].tolist()) - {i}) == 4 for i in range(12))


def test_duplicates_are_neighbours_of_each_other() -> None:
    x = np.random.default_rng(0).normal(size=(10, 4)).repeat(2, 0)
    assert mutual_knn(x, x, 1) == 1
    near = similarity.neighbours_of(torch.from_numpy(x), 1)
    assert near is not None
    assert near[:, 0].tolist() == [i ^ 1 for i in range(20)]


@pytest.mark.parametrize("shape", SHAPES)
def test_influences_are_derivatives(shape: tuple[int, int, int]) -> None:
    """Of the weights of images, with the means held fixed, by finite differences."""
    x, y = (torch.from_numpy(centred(v)) for v in arrays(*shape))
    a, b = (cloud_of(v.__getitem__, len(v), 1.0) for v in (x, y))
    found = compare(a, b, ("procrustes", "svcca"))
    step = 1e-5
    for image in (0, 3):
        weight = torch.ones(len(x), 1, dtype=torch.float64)
        weight[image] += step
        c, d = (v * weight.sqrt() for v in (x, y))
        moved = torch.linalg.svdvals(c.T @ d).sum() / torch.linalg.norm(c) / torch.linalg.norm(d)
        expected = (float(moved) - found["procrustes"].value) / step
        influences = found["procrustes"].influences
        assert influences is not None
        assert float(influences[image]) == pytest.approx(expected, rel=1e-3, abs=1e-8)
        if shape[0] > sum(shape[1:]):
            whitened = [torch.linalg.qr(v)[0] for v in (c, d)]
            expected = float(torch.linalg.svdvals(whitened[0].T @ whitened[1]).mean()) - found["svcca"].value
            influences = found["svcca"].influences
            assert influences is not None
            assert float(influences[image]) == pytest.approx(expected / step, rel=1e-3, abs=1e-8)


def interval_width(name: str, x: Array, y: Array) -> float:
    """Of the interval of one draw, over images one by one."""
    n, parts = len(x), [torch.from_numpy(v) for v in (x, y)]
    each = list(torch.split(torch.arange(n), 1))
    if name == "rsa":
        influences = influence_of_ratio(rank_products([centred_ranks(v, "euclidean") for v in parts], each), 2)[:, 0, 1]
    else:
        one, other = (cloud_of(v.__getitem__, n, 1.0) for v in parts)
        found = compare(one, other, (name,))[name].influences
        assert found is not None
        influences = found.numpy()
    low, high = bootstrap_linear(np.zeros(()), influences, 400, 0)
    return float(high - low)


@pytest.mark.chance
@pytest.mark.parametrize("name", ["procrustes", "svcca", "rsa"])
def test_intervals_are_as_wide_as_values_differ(name: str) -> None:
    """1.96 deviations to either side, of values from other images of the same kind."""
    random = np.random.default_rng(0)
    mixing = random.normal(size=(3, 4))

    def draw() -> tuple[Array, Array]:
        x = random.normal(size=(150, 3))
        return x, x @ mixing + random.normal(size=(150, 4))

    measure = (lambda x, y: svcca(x, y, 1)) if name == "svcca" else MEASURES[name]
    deviation = np.std([measure(*draw()) for _ in range(120)])
    width = np.mean([interval_width(name, *draw()) for _ in range(12)])
    assert width / (2 * 1.96 * deviation) == pytest.approx(1, abs=0.2)


def test_a_single_group_has_no_interval() -> None:
    assert np.isnan(bootstrap_linear(np.ones(3), np.zeros((1, 3)), 10, 0)).all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: procrustes(x, x[:5]), "the same images twice"),
        (lambda x: svcca(x, x, 0), "above 0 and up to 1, not 0"),
        (lambda x: pwcca(x, x, weights="left"), "no weights 'left'"),
        (lambda x: rsa(x, x, "manhattan"), "no dissimilarity 'manhattan'"),
        (lambda x: mutual_knn(x, x, 20), "more than 20 images, not 20"),
        (lambda x: mutual_knn(x, x, 0), "at least one neighbour, not 0"),
    ],
)
def test_wrong_input(call: Callable[[Array], float], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        call(np.random.default_rng(0).normal(size=(20, 4)))
