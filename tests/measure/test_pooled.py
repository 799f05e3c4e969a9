"""Pooled features on disk: names, views in the key, rows that are missing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.plans import PLAIN, TEST, TRAIN, activations, feed, make_plan

from sightline.core.errors import InputError
from sightline.core.processes import shared
from sightline.measure.feature_cache import Features
from sightline.measure.plan import Key
from sightline.measure.pooled import Matrix, Pooled, Which, disk, every_site, flaw, matrices, share, widths

BOTH = {"train": ("plain",), "test": ("plain", "mirror")}
ONE = {("vit", "norm"): ("cls",)}


class Bare(Pooled):
    def compute(self) -> None:  # type: ignore[override]
        self.finish()


def test_features_come_back_row_for_row(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    data = activations(plan)
    metric = Bare(plan, ("train", "test"), every_site(plan))
    feed(metric, plan, data, 7)
    metric.finish()
    values = data[Key("vit", "block.1", "plain")]
    for split, where in plan.images.splits.items():
        for feature, pooled in {
            "cls": values[:, 0],
            "gap": values.mean(1),
            "gap_without_cls": values[:, 2:].mean(1),
        }.items():
            found = metric.features("vit", "block.1", feature, "plain", split)
            np.testing.assert_allclose(np.asarray(found), pooled[where], atol=1e-6)
    maps = metric.features("cnn", "block.0", "gap", "plain", "train")
    np.testing.assert_allclose(maps[3:5], data[Key("cnn", "block.0", "plain")][3:5].mean((2, 3)), atol=1e-6)


def test_two_poolings_side_by_side_are_read_from_both(tmp_path: Path) -> None:
    """CLS and GAP are on disk once, whoever asks for them, and only where there is a CLS token."""
    plan = make_plan(tmp_path)
    data, wanted = activations(plan), every_site(plan, ("cls_gap",))
    assert wanted["vit", "norm"] == ("cls_gap",)
    assert wanted["cnn", "block.0"] == ()
    assert widths(plan, "vit", "norm")["cls_gap"] == 12
    metric = Bare(plan, ("train", "test"), wanted)
    assert {which.feature for which in metric.files} == {"cls", "gap"}
    assert disk(plan, ("train", "test"), wanted) == 3 * 2 * (TRAIN + TEST) * (4 * 6 + 1)
    assert disk(plan, ("test",), {("vit", "norm"): ("gap", "cls_gap", "cls")}) == 2 * TEST * (4 * 6 + 1)
    feed(metric, plan, data)
    metric.finish()
    found = metric.features("vit", "block.1", "cls_gap", "plain", "test")
    values = data[Key("vit", "block.1", "plain")][TRAIN:]
    expected = torch.cat([values[:, 0], values.mean(1)], 1)
    assert found.shape == (TEST, 12)
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(list(found.blocks())), expected, atol=1e-6)
    np.testing.assert_allclose(found.some(np.array([5, 2]))[1:], expected[2:3], atol=1e-6)
    one = Bare(plan, ("train", "test"), {("vit", "block.1"): ("cls",)})  # finished already, by the other
    assert all(entry.complete for entry in one.files.values())


def test_only_what_is_wanted_is_pooled_and_written(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    metric = Bare(plan, ("train", "test"), ONE)
    assert metric.reduce(Key("vit", "block.0", "plain"), torch.ones(2, 6, 6)) == {}
    assert set(metric.reduce(Key("vit", "norm", "plain"), torch.ones(2, 6, 6))) == {"cls"}
    expected = disk(plan, ("train", "test"), ONE)
    assert expected == (TRAIN + TEST) * (4 * 6 + 1)
    feed(metric, plan, activations(plan))
    metric.finish()
    assert disk(plan, ("train", "test"), ONE) == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_views_and_their_seed_enter_the_key_and_plain_does_not(tmp_path: Path) -> None:
    plain, both = (matrices(make_plan(tmp_path, views=views), ("train", "test"), ONE) for views in (PLAIN, BOTH))
    key = Which("vit", "norm", "cls", "plain", "test")
    assert plain[key].key == both[key].key
    assert "view" not in plain[key].about
    mirror = both[key._replace(view="mirror")]
    assert mirror.key != both[key].key
    assert mirror.about["seed"] == 0
    assert key._replace(view="mirror", split="train") not in both


def test_features_that_another_analysis_has_finished_are_found(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    data = activations(plan)
    one, other = (Bare(plan, ("train", "test"), wanted) for wanted in (every_site(plan), ONE))
    for metric in (one, other):  # in one pass, both write the same rows
        feed(metric, plan, data)
    one.finish()
    other.finish()
    a, b = (metric.features("vit", "norm", "cls", "plain", "test") for metric in (one, other))
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_every_row_is_written_once_in_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path)
    data = activations(plan)
    one, other, third = (
        Bare(plan, splits, wanted)
        for splits, wanted in ((("test",), ONE), (("train", "test"), every_site(plan)), (("train", "test"), ONE))
    )
    share([one, other, third])
    expected = data[Key("vit", "norm", "plain")][plan.images.indices("test"), 0]
    rows: dict[str, list[int]] = {}
    write = Features.write

    def counted(entry: Features, where: np.ndarray, values: np.ndarray) -> None:
        rows.setdefault(entry.key, []).extend(where.tolist())
        write(entry, where, values)

    monkeypatch.setattr(Features, "write", counted)
    for metric in (one, other, third):
        feed(metric, plan, data)
    assert set(rows) == {entry.key for entry in other.files.values()}
    assert all(sorted(found) == list(range(len(found))) for found in rows.values())
    for metric in (one, other, third):
        metric.finish()
        found = metric.features("vit", "norm", "cls", "plain", "test", labelled=False)
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_images_without_label_or_that_could_not_be_read(tmp_path: Path) -> None:
    labels = np.arange(TRAIN + TEST) % 3
    labels[[TRAIN, TRAIN + 5]] = -1
    plan = make_plan(tmp_path, labels)
    metric = Bare(plan, ("train", "test"), ONE)
    feed(metric, plan, activations(plan), 8, slice(1, None))  # the first batch of test images was corrupt
    metric.finish()
    assert len(metric.rows["test"]) == TEST - 8
    assert set(metric.labelled("test")) == set(metric.rows["test"]) - {0, 5}
    np.testing.assert_array_equal(metric.labels("test"), labels[TRAIN:][metric.labelled("test")])
    assert len(metric.features("vit", "norm", "cls", "plain", "test", labelled=False)) == TEST - 8


def test_nothing_could_be_read(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    metric = Bare(plan, ("train", "test"), ONE)
    feed(metric, plan, activations(plan), 8, slice(3, None))  # no batch of test images
    with pytest.raises(InputError, match="None of the test images of made could be read"):
        metric.finish()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x, ""),
        (lambda x: x * 0 + 3, "the features are the same for all training images"),
        (lambda x: x * 1e-8 + 3, "the features are the same for all training images"),
        (lambda x: x * 0, "the features are the same for all training images"),
        (lambda x: np.where(x == x[0, 0], np.nan, x), "1 of 30 train features is not finite (NaN or infinity)"),
        (lambda x: np.where(x == x[0, 0], np.inf, x), "1 of 30 train features is not finite (NaN or infinity)"),
    ],
)
def test_flaws(change: object, reason: str) -> None:
    values = change(np.random.default_rng(0).normal(size=(30, 4)))
    assert flaw(Matrix(values, np.arange(30)), "train") == reason


def test_work_of_one_process() -> None:
    assert shared([1, 2, 3], lambda n: n * n) == [1, 4, 9]
