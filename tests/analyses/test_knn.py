"""k-NN in the pass: streamed, in any batches, with reasons for what has no value."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from support.neighbours import plain
from support.plans import LAYOUT, TEST, TRAIN, WIDTH, activations, computed, feed, make_plan

from sightline.analyses import knn
from sightline.analyses.knn import KnnAnalysis, KnnConfig
from sightline.core.errors import InputError
from sightline.measure.estimators.intervals import wilson
from sightline.measure.estimators.neighbours import knn_predict
from sightline.measure.plan import Key, Plan

Array = np.ndarray[Any, Any]


def run(plan: Plan, data: dict[Key, torch.Tensor], size: int = 8, k: int = 20) -> Any:
    return computed(KnnAnalysis(KnnConfig(k=k), plan), plan, data, size)


def test_streamed_is_whole(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    data = activations(plan)
    result = run(plan, data)
    labels = plan.images.labels
    pools = {
        ("vit", "cls"): lambda x: x[:, 0],
        ("vit", "gap"): lambda x: x.mean(1),
        ("vit", "gap_without_cls"): lambda x: x[:, 2:].mean(1),
        ("cnn", "gap"): lambda x: x.mean((2, 3)),
    }
    for (encoder, feature), pool in pools.items():
        for site in plan.sites[encoder]:
            vectors = pool(data[Key(encoder, site, "plain")]).numpy()
            predicted = plain(vectors[:TRAIN], labels[:TRAIN], vectors[TRAIN:])
            right = int((predicted == labels[TRAIN:]).sum())
            got = result.sel(encoder=encoder, site=site, feature=feature)
            assert got.accuracy == right / TEST
            assert (got.accuracy_low, got.accuracy_high) == wilson(right, TEST)
            assert got.reason == ""
    assert result.sel(encoder="vit", site="block.1", feature="gap").accuracy > 0.9
    for feature in ("cls", "gap_without_cls"):
        missing = result.sel(encoder="cnn", site="block.0", feature=feature)
        assert np.isnan(missing.accuracy)
        assert missing.reason == "this site has no such feature"
    assert result.sel(encoder="cnn", site="norm", feature="gap").reason == "this encoder has no such site"


def test_protocol_is_named_and_survives_a_file(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "cache")
    result = run(plan, activations(plan), k=5)
    result.to_netcdf(tmp_path / "knn.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "knn.nc", engine="h5netcdf") as again:
        xr.testing.assert_equal(again.load(), result)
        about = again.attrs
    words = {"weighting": "exp(cosine / temperature)", "normalisation": "L2"}
    assert json.loads(about["protocol"]) == {"k": 5, "temperature": 0.07, **words}
    assert (about["n_train"], about["n_test"], about["classes"], about["chance"]) == (TRAIN, TEST, 3, 1 / 3)
    assert about["majority"] == 8 / 24
    assert result.block.values.tolist() == [0, 1, -1]


def test_a_second_run_finds_the_features(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    data = activations(plan)
    expected = run(plan, data)
    assert knn.cost(KnnConfig(), plan).disk == 0
    nothing = {key: values * 0 for key, values in data.items()}
    xr.testing.assert_identical(run(plan, nothing), expected)  # found by their key, not written again


def test_cost_is_what_the_disk_holds(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    disk = knn.cost(KnnConfig(), plan).disk
    assert disk == (3 * 3 + 2) * (TRAIN + TEST) * (4 * WIDTH + 1)
    run(plan, activations(plan))
    assert disk == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_flaws_have_a_reason(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    data = activations(plan)
    data[Key("vit", "block.0", "plain")][50, 0, 0] = torch.nan
    data[Key("cnn", "block.0", "plain")][:] = 1.5
    result = run(plan, data)
    vit, cnn = (result.sel(encoder=name, site="block.0") for name in ("vit", "cnn"))
    assert vit.reason.sel(feature="cls") == "1 of 24 test features is not finite (NaN or infinity)"
    assert np.isnan(vit.accuracy.sel(feature="cls"))
    assert vit.reason.sel(feature="gap_without_cls") == ""
    assert cnn.reason.sel(feature="gap") == "the features are the same for all training images"


def test_images_that_could_not_be_read_or_have_no_label_are_left_out(tmp_path: Path) -> None:
    labels = np.arange(TRAIN + TEST) % 3
    labels[[3, 60]] = -1
    plan = make_plan(tmp_path, labels)
    data = activations(plan)
    metric = KnnAnalysis(KnnConfig(), plan)
    torch.manual_seed(0)
    feed(metric, plan, data, 8, slice(1, None))  # one batch of 8 test images was corrupt
    result = KnnAnalysis.compute(metric)
    torch.manual_seed(0)
    test = np.sort(torch.randperm(TEST).split(8)[0].numpy())
    keep = np.setdiff1d(np.arange(TRAIN + TEST), [3, 60, *(test + TRAIN)])
    train, test = keep[keep < TRAIN], keep[keep >= TRAIN]
    vectors = data[Key("vit", "norm", "plain")].mean(1).numpy()
    right = (plain(vectors[train], labels[train], vectors[test]) == labels[test]).mean()
    assert result.sel(encoder="vit", site="norm", feature="gap").accuracy == right
    assert (result.attrs["n_train"], result.attrs["n_test"]) == (len(train), len(test))


def test_lost_rows_are_noticed(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    metric = KnnAnalysis(KnnConfig(), plan)
    feed(metric, plan, activations(plan), 8)
    for entry in metric.files.values():
        np.memmap(entry.part, "u1", "r+")[-3:] = 0
    with pytest.raises(InputError, match="lost rows"):
        KnnAnalysis.compute(metric)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full(TRAIN + TEST, -1), "train split of made has no labelled classes"),
        (np.zeros(TRAIN + TEST, dtype=np.int64), "train split of made has 1 labelled class;"),
        (np.where(np.arange(TRAIN + TEST) < TRAIN, np.arange(TRAIN + TEST) % 2, -1), "test split of made has no"),
    ],
)
def test_labels_are_checked_before_the_pass(tmp_path: Path, labels: Array, message: str) -> None:
    with pytest.raises(InputError, match=message):
        KnnAnalysis(KnnConfig(), make_plan(tmp_path, labels))
    assert not list(tmp_path.iterdir())


def test_reductions_are_copies(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    values = torch.ones(4, LAYOUT.count, WIDTH)
    found = KnnAnalysis(KnnConfig(), plan).reduce(Key("vit", "norm", "plain"), values)
    values.zero_()
    kept = {name: (vector.dtype, float(vector.min())) for name, vector in found.items()}
    assert kept == dict.fromkeys(("cls", "gap", "gap_without_cls"), (torch.float32, 1.0))


def test_the_highest_number_says_of_how_many_and_has_no_interval(tmp_path: Path) -> None:
    """It was chosen on the images that it is measured on."""
    plan = make_plan(tmp_path)
    result = run(plan, activations(plan))
    (figure,) = knn.figures(result)
    assert len(figure.table) == 2 * 3 + 2
    (key,) = knn.key_numbers(result)
    assert key.ends == {}
    for label, number, detail in knn.headlines(result):
        own = result.accuracy.sel(encoder=label)
        assert (number, key.values[label]) == (f"{float(own.max()):.1%}", float(own.max()))
        assert detail.startswith(f"the highest of {int(own.notnull().sum())} on test, at ")


def test_top_five_of_six(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, classes=tuple("abcdef"))
    data = activations(plan)
    result = run(plan, data, k=8)
    labels, vectors = plan.images.labels, data[Key("vit", "norm", "plain")][:, 0].numpy()
    best = knn_predict(vectors[:TRAIN], labels[:TRAIN], vectors[TRAIN:], k=8, top=5)
    right = int((best == labels[TRAIN:, None]).any(1).sum())
    got = result.sel(encoder="vit", site="norm", feature="cls")
    assert got.top5_accuracy == right / TEST
    assert (got.top5_accuracy_low, got.top5_accuracy_high) == wilson(right, TEST)
    assert (result.top5_accuracy >= result.accuracy).where(result.accuracy.notnull(), True).all()
    assert [figure.name for figure in knn.figures(result)] == ["depth", "top5"]
    assert f"; top-5 {result.top5_accuracy.sel(encoder='vit').max():.0%}"[:8] in knn.headlines(result)[0][2]
    assert [figure.name for figure in knn.figures(result.assign_attrs(classes=5))] == ["depth"]
