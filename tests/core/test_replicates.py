"""Intervals of anything computed from replicates: against contrasts, against formulas, and where there is none."""

from typing import Any

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import sightline as sl
from sightline.core.errors import InputError
from sightline.core.replicates import AXIS, with_replicates

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=4&depth=4&embed_dim=16&num_heads=2&num_classes=0"
ENCODERS = {name: f"{VIT}&seed={seed}" for seed, name in enumerate(("a", "b", "a1"), 1)}
SUBTRACTED: list[tuple[str, dict[str, Any]]] = [
    ("knn.accuracy", {"site": "block.2", "feature": "cls"}),
    ("attention.distance_mean", {"site": "block.1.attn_map"}),
    ("diversity.cosine", {"site": "block.3", "kind": "tokens"}),
]


@pytest.fixture(scope="module")
def run() -> sl.Run:
    images = sl.load_images("shapes?size=16&train=64&val=0&test=96")
    analyses = ["cka", "knn", "attention", "diversity", "spectra"]
    return sl.analyze(ENCODERS, images, analyses, batch=12, show_progress=False)


def same(found: xr.Dataset, expected: sl.Contrast) -> None:
    ends = [float(found[name]) for name in ("value", "low", "high", "p")]
    assert ends == pytest.approx([expected.value, expected.low, expected.high, expected.p], rel=1e-7, abs=1e-12)


@pytest.mark.parametrize(("name", "where"), SUBTRACTED)
def test_a_difference_has_the_interval_of_the_contrast(run: sl.Run, name: str, where: dict[str, Any]) -> None:
    x = run.replicates(name.partition(".")[0])[name.partition(".")[2]].sel(where)
    expected = run.contrast(name, {"encoder": "a"}, {"encoder": "b"}, **where)
    same(sl.interval(x.sel(encoder="a") - x.sel(encoder="b")), expected)


def test_a_mean_over_layers_of_a_depth(run: sl.Run) -> None:
    late = sl.depth(run.replicates("attention").distance_mean, "last half").mean("site")
    expected = run.contrast("attention.distance_mean", {"encoder": "a"}, {"encoder": "b"}, depth="last half")
    same(sl.interval(late.sel(encoder="a") - late.sel(encoder="b")), expected)


def test_pairs_of_layers_over_batches(run: sl.Run) -> None:
    where: dict[str, Any] = {"encoder_a": "a", "site_a": "block.1", "site_b": "block.1", "tokens": "all"}
    x = run.replicates("cka.cka").cka.sel(where)
    expected = run.contrast("cka.cka", {"encoder_b": "b"}, {"encoder_b": "a1"}, **where)
    same(sl.interval(x.sel(encoder_b="b") - x.sel(encoder_b="a1")), expected)


def test_seeds_are_one_more_axis(run: sl.Run) -> None:
    x = run.replicates("knn").accuracy.sel(site="block.2", feature="cls")
    seeds = x.sel(encoder=["a", "a1"]).rename(encoder="seed")
    difference = seeds.drop_vars("seed") - x.sel(encoder="b", drop=True)
    expected = run.contrast(
        "knn.accuracy", {"encoder": "s"}, {"encoder": "b"}, seeds={"s": ["a", "a1"]}, site="block.2", feature="cls"
    )
    same(sl.interval(difference, over=("left_out", "seed")), expected)


def test_the_mean_of_groups_of_one_has_the_interval_of_students_t() -> None:
    x = np.random.default_rng(0).normal(size=20)
    found = sl.interval(with_replicates(xr.DataArray(x.mean()), (x.sum() - x) / 19, "test images"))
    low, high = stats.t.interval(0.95, 19, x.mean(), stats.sem(x))
    assert [float(found.low), float(found.high)] == pytest.approx([low, high])
    assert found.attrs["how"] == "jackknife over 20 test images, Student's t"


def test_groups_of_unequal_size_are_weighted() -> None:
    """Of a mean: the sum over groups of w² (mean − mean of group)², corrected, as in Busing et al., formula by hand."""
    chance = np.random.default_rng(1)
    sizes = np.array([1, 2, 3, 5, 8, 13, 2, 4, 6, 9])
    groups = [chance.normal(size=n) for n in sizes]
    every, total, n = np.concatenate(groups), sum(map(np.sum, groups)), sizes.sum()
    without = np.array([(total - part.sum()) / (n - len(part)) for part in groups])
    x = with_replicates(xr.DataArray(every.mean()), without, "patients", sizes / n)
    h = n / sizes
    pseudo = h * every.mean() - (h - 1) * without
    error = np.sqrt(np.mean((pseudo - pseudo.mean()) ** 2 / (h - 1)))
    found = sl.interval(x)
    assert float(found.high - found.value) == pytest.approx(stats.t.ppf(0.975, 9) * error)


def test_fewer_than_eight_groups_of_the_users_own_have_no_interval() -> None:
    for count, known in ((7, False), (8, True)):
        x = with_replicates(xr.DataArray(0.5), np.linspace(0.4, 0.6, count), "patients", np.full(count, 1 / count))
        assert bool(sl.interval(x).low.notnull()) == known


def test_a_group_that_a_number_does_not_have_does_not_count() -> None:
    without = np.array([[0.4, 0.4], [0.6, 0.6], [0.5, np.nan], [0.7, 0.7]])
    x = with_replicates(xr.DataArray([0.5, 0.5], dims="site"), without, "test images")
    three = with_replicates(xr.DataArray(0.5), np.array([0.4, 0.6, 0.7]), "test images")
    assert float(sl.interval(x).high[1]) == pytest.approx(float(sl.interval(three).high))


def test_where_no_group_changes_the_number_the_interval_is_that_point() -> None:
    found = sl.interval(with_replicates(xr.DataArray(1.0), np.ones(8), "test images"))
    assert [float(found[name]) for name in ("value", "low", "high", "p")] == [1, 1, 1, 0]


def test_what_cannot_be_is_a_sentence(run: sl.Run) -> None:
    with pytest.raises(InputError, match=r"An interval needs the axis 'left_out'.*run\.replicates"):
        sl.interval(run["knn"].accuracy)
    of_images, of_batches = run.replicates("knn").accuracy, run.replicates("cka").diagonal
    with pytest.raises(InputError, match="no group of images in common"):
        sl.interval(
            of_images.isel(encoder=0, site=0, feature=0) - of_batches.isel({d: 0 for d in of_batches.dims if d != AXIS})
        )
    with pytest.raises(InputError, match="one value along 'seed'"):
        sl.interval(of_images.isel(encoder=[0]).rename(encoder="seed"), over=("left_out", "seed"))
