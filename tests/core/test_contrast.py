"""Contrasts on made results: exactness, pairing, seeds, and whether intervals cover the truth as often as they say."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import sightline as sl
from sightline.core.contrast import Estimate, Factor, drawn_seeds
from sightline.core.groups import Alignment, Axis, Kept, LeftOut, Mean, Spread, TopChoices, split
from sightline.core.run_folder import Run

Array = np.ndarray[Any, Any]

AXIS = {"group": Axis("made", "groups of images")}


def run_of(result: xr.Dataset, kept: Kept) -> Run:
    """A run in memory with one result, called made."""
    run = Run(None)
    run.save("made", *split(kept.beside(result)))
    return run


def mean_run(values: Array, groups: int, axis: dict[str, Axis] = AXIS) -> Run:
    """Means of values (images, encoders), whose images come in groups of one after another."""
    encoders = [f"e{number}" for number in range(values.shape[1])]
    parts = np.array_split(values, groups)
    result = xr.Dataset({"x": ("encoder", values.mean(0))}, coords={"encoder": encoders})
    kept = Kept(axis)
    kept.add(
        "x",
        Mean("sum", "count"),
        sum=(("group", "encoder"), np.array([part.sum(0) for part in parts])),
        count=(("group",), np.array([len(part) for part in parts])),
    )
    return run_of(result, kept)


def between(run: Run, one: str = "e0", other: str = "e1", **more: Any) -> sl.Contrast:
    return run.contrast("made.x", {"encoder": one}, {"encoder": other}, **more)


# What it is


def test_with_an_image_in_each_group_it_is_the_paired_t_test() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=(23, 1)) + random.normal(size=(23, 2)) + [0.4, 0.0]
    found, known = between(mean_run(values, 23)), stats.ttest_rel(values[:, 0], values[:, 1])
    low, high = known.confidence_interval(0.95)
    np.testing.assert_allclose(
        [found.value, found.p, found.low, found.high],
        [(values[:, 0] - values[:, 1]).mean(), known.pvalue, low, high],
        rtol=1e-10,
    )
    assert (found.freedom, found.n_groups, found.n_seeds) == (22.0, 23, 0)


def test_the_value_is_the_difference_of_the_numbers_in_the_result() -> None:
    run = mean_run(np.random.default_rng(1).normal(size=(50, 3)), 7)
    x = run["made"].x.values
    assert between(run).value == x[0] - x[1]
    both = run.contrast("made.x", {"encoder": ["e0", "e1"]}, {"encoder": "e2"})
    assert both.value == x[:2].mean() - x[2]


@given(st.integers(0, 2**32 - 1), st.sampled_from(["jackknife", "bootstrap"]))
@settings(max_examples=20, deadline=None)
def test_exchanged_sides_flip_the_sign(seed: int, method: str) -> None:
    run = mean_run(np.random.default_rng(seed).gamma(1.0, size=(40, 2)), 10)
    one, other = (between(run, *pair, method=method, draws=200) for pair in (("e0", "e1"), ("e1", "e0")))
    np.testing.assert_allclose([one.value, one.low, one.high], [-other.value, -other.high, -other.low], atol=1e-12)
    np.testing.assert_allclose(one.p, other.p)


def test_what_is_paired_is_known_better() -> None:
    random = np.random.default_rng(2)
    values = 3 * random.normal(size=(64, 1)) + random.normal(size=(64, 2))
    paired = between(mean_run(values, 32))
    apart = mean_run(values[:, :1], 32).estimate("made.x") - mean_run(
        values[:, 1:], 32, {"group": Axis("other images", "groups of other images")}
    ).estimate("made.x")
    assert apart.value == pytest.approx(paired.value, abs=1e-12)
    assert apart.contrast().error > 2 * paired.error
    assert apart.contrast().n_groups == 64


def test_the_same_groups_are_paired_across_runs() -> None:
    values = np.random.default_rng(3).normal(size=(60, 2))
    apart = mean_run(values[:, :1], 12).estimate("made.x") - mean_run(values[:, 1:], 12).estimate("made.x")
    whole = between(mean_run(values, 12))
    np.testing.assert_allclose([apart.contrast().low, apart.contrast().p], [whole.low, whole.p], rtol=1e-12)


def test_differences_of_differences_and_ratios() -> None:
    values = np.random.default_rng(4).normal(5.0, size=(40, 4))
    run = mean_run(values, 40)
    a, b, c, d = (run.estimate("made.x", encoder=f"e{n}") for n in range(4))
    found, known = ((a - b) - (c - d)).contrast(), stats.ttest_1samp(values @ [1, -1, -1, 1], 0.0)
    np.testing.assert_allclose([found.p, found.low], [known.pvalue, known.confidence_interval().low], rtol=1e-9)
    ratio = (a / b).contrast()
    x, y = values[:, 0], values[:, 1]
    delta = np.std(x - x.mean() / y.mean() * y, ddof=1) / y.mean() / np.sqrt(40)
    assert ratio.value == pytest.approx(x.mean() / y.mean())
    assert ratio.error == pytest.approx(delta, rel=0.05)


def test_a_plain_number_may_be_subtracted() -> None:
    run = mean_run(np.random.default_rng(5).normal(1.0, size=(30, 1)), 30)
    found = run.contrast("made.x", {}, 0.75)
    assert found.value == run["made"].x.values[0] - 0.75
    assert "− 0.75" in found.what


def test_nothing_changes_what_is_compared_with_itself() -> None:
    found = between(mean_run(np.random.default_rng(6).normal(size=(30, 1)), 6), "e0", "e0")
    assert (found.value, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("method", ["jackknife", "bootstrap"])
def test_images_that_all_agree_tell_nothing_about_others(method: str) -> None:
    """A is right on all of four images, B on none: with a true difference of 0.5, one in 16 samples is like that."""
    found = between(mean_run(np.array([[1.0, 0.0]] * 4), 4), method=method, draws=200)
    assert (found.value, found.error) == (1.0, 0.0)
    assert np.isnan([found.low, found.high, found.p]).all()
    assert found.how == "no interval: the number is the same without any of 4 groups of images"
    third = between(mean_run(np.full((9, 2), [0.1, 0.7 / 3]), 3), method=method, draws=200)  # equal but for rounding
    assert np.isnan([third.low, third.high, third.p]).all()
    one = between(mean_run(np.array([[1.0, 0.0]] * 3 + [[1.0, 1.0]]), 4))
    assert (one.value, one.p) == (0.75, pytest.approx(stats.ttest_1samp([1, 1, 1, 0], 0).pvalue))


def test_it_reads_as_a_sentence_and_as_a_row() -> None:
    found = between(mean_run(np.random.default_rng(0).normal([2.0, 0.0], size=(30, 2)), 6))
    assert str(found).startswith("made.x: [encoder=e0] − [encoder=e1] = ")
    assert "jackknife over 6 groups of images, t with 5 degrees of freedom" in str(found)
    assert found.table().to_dict("records")[0]["p"] == found.p


# Seeds


def test_seeds_alone_are_welchs_test() -> None:
    """Numbers that images do not change: two sets of trainings with unequal spread."""
    random = np.random.default_rng(7)
    x, y = random.normal(1.0, size=4), random.normal(0.0, 3.0, size=6)
    names = [f"{kind}-{n}" for kind, of in (("a", x), ("b", y)) for n in range(len(of))]
    kept = Kept({})
    kept.nothing("it is a number of a training", "x")
    run = run_of(xr.Dataset({"x": ("encoder", np.concatenate([x, y]))}, coords={"encoder": names}), kept)
    found = run.contrast("made.x", {"encoder": "a"}, {"encoder": "b"}, seeds={"a": names[:4], "b": names[4:]})
    known = stats.ttest_ind(x, y, equal_var=False)
    np.testing.assert_allclose([found.p, found.low], [known.pvalue, known.confidence_interval().low], rtol=1e-10)
    assert (found.n_groups, found.n_seeds) == (0, 10)
    alone = run.contrast("made.x", {"encoder": "a-0"}, {"encoder": "b-0"})
    assert np.isnan([alone.low, alone.high, alone.p]).all()
    assert alone.how == "no interval: it is a number of a training"


def test_seeds_and_images_both_count() -> None:
    random = np.random.default_rng(8)
    values = random.normal(size=(80, 1)) + random.normal(size=(80, 4)) + [0.0, 1.0, 2.0, 0.5]
    run, seeds = mean_run(values, 16), {"a": ["e0", "e1", "e2"]}
    found = run.contrast("made.x", {"encoder": "a"}, {"encoder": "e3"}, seeds=seeds)
    fixed = run.contrast("made.x", {"encoder": ["e0", "e1", "e2"]}, {"encoder": "e3"})
    of_seeds = values[:, :3].mean(0).std(ddof=1) / np.sqrt(3)
    assert found.value == pytest.approx(fixed.value, abs=1e-12)
    assert found.error == pytest.approx(np.hypot(fixed.error, of_seeds), rel=1e-10)
    assert 2 < found.freedom < 5
    assert "16 groups of images and 3 seeds of a" in found.how
    drawn = run.contrast("made.x", {"encoder": "a"}, {"encoder": "e3"}, seeds=seeds, method="bootstrap")
    assert (drawn.value, drawn.n_seeds) == (found.value, 3)
    assert drawn.high - drawn.low > fixed.high - fixed.low


# Rules


def test_first_choices_give_f1_and_kappa_of_the_images_that_are_left() -> None:
    from sklearn.metrics import cohen_kappa_score, f1_score

    random = np.random.default_rng(9)
    chosen = random.integers(0, 4, size=(60, 2))
    chosen[random.random(60) < 0.5, 1] = 0
    group = np.arange(60) % 5
    one_hot = np.eye(4)[chosen]  # (images, encoders, choices)
    of_group = np.eye(5)[group].T
    counts = np.einsum("gi,iec->gec", of_group, one_hot)
    both = np.einsum("gi,iac,ibc->gabc", of_group, one_hot, one_hot)

    def both_of(rows: Array) -> tuple[float, float]:
        a, b = chosen[rows].T
        return f1_score(a, b, average="macro"), cohen_kappa_score(a, b)

    whole = both_of(np.arange(60))
    result = xr.Dataset(
        {n: (("encoder_a", "encoder_b"), np.full((2, 2), v)) for n, v in zip(("f1", "kappa"), whole, strict=True)},
        coords={"encoder_a": ["a", "b"], "encoder_b": ["a", "b"], "encoder": ["a", "b"]},
    )
    kept = Kept(AXIS)
    parts = {
        "chosen": (("group", "encoder", "choice"), counts),
        "both": (("group", "encoder_a", "encoder_b", "choice"), both),
    }
    kept.add("f1", TopChoices("chosen", "both", kappa=False), **parts)
    kept.add("kappa", TopChoices("chosen", "both", kappa=True), **parts)
    run = run_of(result, kept)
    for number, name in enumerate(("f1", "kappa")):
        found = run.estimate(f"made.{name}", encoder="a", other="b")
        known = [both_of(np.flatnonzero(group != g))[number] for g in range(5)]
        np.testing.assert_allclose(next(iter(found.left_out.values())), known, rtol=1e-12)


def test_groups_without_images_do_not_count() -> None:
    values = np.random.default_rng(10).normal(size=(20, 2))
    full = mean_run(values, 10)
    measured = full.measured("made")
    assert measured.kept is not None
    wider = measured.kept.pad(group=(0, 5), constant_values=0).assign_attrs(measured.kept.attrs)
    run = Run(None)
    run.save("made", measured.table, wider)
    one, other = between(full), between(run)
    np.testing.assert_allclose([one.low, one.high, one.p], [other.low, other.high, other.p], rtol=1e-12)
    assert other.n_groups == 10


def test_a_result_that_keeps_nothing_has_no_contrasts() -> None:
    run = Run(None)
    run.save("made", xr.Dataset({"x": ("encoder", [1.0, 2.0])}, coords={"encoder": ["e0", "e1"]}))
    with pytest.raises(sl.InputError, match="keeps nothing that an interval of a difference could be computed from"):
        between(run)


def test_what_is_kept_lies_beside_the_result_and_comes_back(tmp_path: Any) -> None:
    values = np.random.default_rng(11).normal(size=(20, 2))
    made = mean_run(values, 5).measured("made")
    Run(tmp_path).save("made", made.table.assign_attrs(fingerprint="f"), made.kept)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.nc")) == [
        "groups/made.nc",
        "results/made.nc",
    ]
    again = Run(tmp_path)
    assert list(again["made"].data_vars) == ["x"]
    assert between(again) == between(mean_run(values, 5))


def test_sums_of_another_result_are_not_taken(tmp_path: Any) -> None:
    made = mean_run(np.random.default_rng(12).normal(size=(20, 2)), 5).measured("made")
    Run(tmp_path).save("made", made.table.assign_attrs(fingerprint="old"), made.kept)
    Run(tmp_path).save("made", made.table.assign_attrs(fingerprint="new"))
    with pytest.raises(sl.InputError, match="keeps nothing"):
        between(Run(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence": 1.0}, "between 0 and 1"),
        ({"method": "bootstap"}, "did you mean 'bootstrap'"),
        ({"one": "e9"}, "No encoder is e9"),
        ({"enkoder": "e0"}, "did you mean 'encoder'"),
        ({"seeds": {"e0": []}}, "no seeds of 'e0'"),
    ],
)
def test_what_cannot_be_is_a_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.InputError, match=message):
        between(mean_run(np.zeros((8, 2)), 4), **change)


def test_an_unknown_number_is_a_sentence() -> None:
    run = mean_run(np.zeros((8, 2)), 4)
    with pytest.raises(sl.InputError, match=r"No contrasts of made.y can be computed"):
        run.contrast("made.y", {"encoder": "e0"})
    with pytest.raises(sl.InputError, match="several values of encoder"):
        run.contrast("made.x", {})


# Coverage: of the 95 % intervals of 300 made data sets as many must cover the truth as 99.5 % of binomial numbers do

SETS = 300


def covered(found: Iterator[sl.Contrast], truth: float) -> float:
    return float(np.mean([one.low <= truth <= one.high for one in found]))


def assert_covers(make: Callable[[np.random.Generator], Run], truth: float, **more: Any) -> None:
    random = np.random.default_rng(0)
    share = covered((between(make(random), **more) for _ in range(SETS)), truth)
    low, high = stats.binom.interval(0.995, SETS, 0.95)
    assert low / SETS <= share <= high / SETS, share


@pytest.mark.chance
def test_intervals_of_a_difference_of_means_cover() -> None:
    def make(random: np.random.Generator) -> Run:
        hard = random.exponential(size=(96, 1))  # an image that is hard for one is hard for both
        return mean_run(hard + random.exponential(size=(96, 2)) + [0.2, 0.0], 12)

    assert_covers(make, 0.2)


@pytest.mark.chance
def test_intervals_of_a_difference_of_accuracies_with_seeds_cover() -> None:
    """Three seeds each, whose true accuracies differ as much as images let them."""

    def make(random: np.random.Generator) -> Run:
        skill = np.repeat([0.6, 0.5], 3) + 0.05 * random.normal(size=6)
        return mean_run((random.random((128, 6)) < skill).astype(float), 32)

    seeds = {"a": ["e0", "e1", "e2"], "b": ["e3", "e4", "e5"]}
    assert_covers(make, 0.1, one="a", other="b", seeds=seeds)


def hsic(x: Array, y: Array) -> float:
    """The textbook formula on one batch."""
    n = len(x)
    k, m = (z @ z.T * (1 - np.eye(n)) for z in (x, y))
    parts = (k * m).sum() + k.sum() * m.sum() / (n - 1) / (n - 2) - 2 / (n - 2) * k.sum(0) @ m.sum(0)
    return float(parts / (n * (n - 3)))


@pytest.mark.chance
def test_intervals_of_a_difference_of_cka_cover() -> None:
    """Of Gaussian features y = a x + noise the CKA with x is a² / (a² + 1)."""
    strengths = (1.0, 0.7)

    def make(random: np.random.Generator) -> Run:
        cross, own, other = np.zeros((16, 2)), np.zeros(16), np.zeros((16, 2))
        for group in range(16):
            x = random.normal(size=(16, 4))
            own[group] = hsic(x, x)
            for at, a in enumerate(strengths):
                y = a * x + random.normal(size=(16, 4))
                cross[group, at], other[group, at] = hsic(x, y), hsic(y, y)
        value = cross.sum(0) / np.sqrt(own.sum() * other.sum(0))
        kept, dims = Kept(AXIS), ("group", "encoder")
        kept.add(
            "x", Alignment("cross", "own", "other"), cross=(dims, cross), own=(("group",), own), other=(dims, other)
        )
        return run_of(xr.Dataset({"x": ("encoder", value)}, coords={"encoder": ["e0", "e1"]}), kept)

    assert_covers(make, 1 / 2 - 0.49 / 1.49)


@pytest.mark.chance
def test_intervals_of_a_difference_of_spreads_cover() -> None:
    """Standard deviation over heads of means over images, which is not linear in the images."""
    heads = np.array([[0.0, 1.0, 2.0, 3.0], [1.0, 1.5, 2.0, 2.5]])

    def make(random: np.random.Generator) -> Run:
        values = heads + random.normal(size=(128, 1, 1)) + 2 * random.gamma(1.0, size=(128, 2, 4)) - 2
        sums = values.reshape(32, 4, 2, 4).sum(1)
        mean = values.mean(0)
        kept = Kept(AXIS)
        kept.add(
            "y", Mean("sum", "count"), sum=(("group", "encoder", "head"), sums), count=(("group",), np.full(32, 4))
        )
        kept.add("x", Spread("y", "head"))
        data = {"x": ("encoder", mean.std(1)), "y": (("encoder", "head"), mean)}
        return run_of(xr.Dataset(data, coords={"encoder": ["e0", "e1"], "head": np.arange(4)}), kept)

    assert_covers(make, heads[0].std() - heads[1].std())


@pytest.mark.chance
def test_intervals_from_numbers_without_each_group_cover() -> None:
    """The logarithm of a variance."""

    def make(random: np.random.Generator) -> Run:
        values = random.normal(size=(160, 2)) * [2.0, 1.0]
        rest = [np.log(np.delete(values, np.arange(g, 160, 20), 0).var(0)) for g in range(20)]
        kept = Kept(AXIS)
        kept.add("x", LeftOut("rest"), rest=(("group", "encoder"), np.array(rest)))
        return run_of(xr.Dataset({"x": ("encoder", np.log(values.var(0)))}, coords={"encoder": ["e0", "e1"]}), kept)

    assert_covers(make, np.log(4.0))


@pytest.mark.parametrize("apart", [0.05, 0.2, 1.0, 4.0])
@pytest.mark.parametrize("count", [2, 3, 4, 8, 32])
def test_drawn_intervals_and_p_agree_also_with_a_few_groups(count: int, apart: float) -> None:
    """Of two seeds the draws reach no further than the two, which 95 % of all seeds do."""
    values = 1.0 + apart * np.resize([1.0, -1.0, 0.3], count)
    factor = Factor("seeds of x", "seeds of x", seeds=True)
    left_out = np.array([np.delete(values, number).mean() for number in range(count)])
    drawn = drawn_seeds(factor, np.repeat(values[:, None], 2000, 1))
    made = Estimate(values.mean(), {factor: left_out}, {factor: np.ones(count, bool)}, drawn, "x")
    found, plain = made.contrast(method="bootstrap"), made.contrast()
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0)
    if count < 5:
        assert (found.high - found.low) / (plain.high - plain.low) == pytest.approx(1, abs=0.1)


def test_a_group_without_which_there_is_no_number_leaves_no_interval() -> None:
    """All small objects in one part of the images, say."""
    rest = np.array([[0.51], [0.49], [0.52], [np.nan]])
    kept = Kept(AXIS)
    kept.add("x", LeftOut("rest"), rest=(("group", "encoder"), rest))
    run = run_of(xr.Dataset({"x": ("encoder", [0.5])}, coords={"encoder": ["e0"]}), kept)
    found = run.contrast("made.x", {"encoder": "e0"})
    assert np.isnan([found.low, found.high, found.p]).all()
    assert "there is no number" in found.how


@pytest.mark.chance
def test_drawn_intervals_cover() -> None:
    def make(random: np.random.Generator) -> Run:
        return mean_run(random.exponential(size=(96, 2)) + np.array([0.2, 0.0]), 24)

    assert_covers(make, 0.2, method="bootstrap", draws=400)
