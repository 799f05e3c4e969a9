"""Probes against scikit-learn and plain arithmetic, on features whose secrets are known."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import StandardScaler
from support.plans import LAYERS, TEST, TOKENS, TRAIN, WIDTH, activations, computed, make_plan

import sightline as sl
from sightline.analyses.probes import ProbesAnalysis, ProbesConfig, cost
from sightline.analyses.probes.advice import headlines, summary
from sightline.analyses.probes.charts import figures
from sightline.analyses.probes.results import NO_SUCH_PROBE, mean_of_best
from sightline.core.errors import InputError
from sightline.measure.estimators.intervals import wilson
from sightline.measure.estimators.probes import Probe
from sightline.measure.estimators.ridge import PENALTIES
from sightline.measure.estimators.sweep import Labelled, Sweep, hold_out, train_sweep
from sightline.measure.plan import Key, Plan, make_plans

Array = np.ndarray[Any, Any]

THREE = {"train": ("plain",), "val": ("plain",), "test": ("plain",)}
QUICK: dict[str, Any] = {
    "epochs": (30.0,),
    "warmup_epochs": (3.0,),
    "lrs": (1.0, 0.1),
    "weight_decays": (0.0, 0.05, 0.1),
}
VIT = {"vit": LAYERS["vit"]}


def measured(plan: Plan, data: dict[Key, torch.Tensor], **settings: Any) -> xr.Dataset:
    result: xr.Dataset = computed(ProbesAnalysis(ProbesConfig(**{**QUICK, **settings}), plan), plan, data)
    return result


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict[Key, torch.Tensor], xr.Dataset]:
    plan = make_plan(tmp_path_factory.mktemp("both"))
    data = activations(plan)
    return plan, data, measured(plan, data)


def test_every_probe_of_every_layer(both: tuple[Plan, dict[Key, torch.Tensor], xr.Dataset]) -> None:
    result = both[2]
    assert result.probe.values.tolist() == ["ridge", "linear", "depth 2", "depth 3", "multilayer"]
    assert result.last_site.values.tolist() == ["norm", "block.1"]
    known = result.accuracy.notnull()
    for probe in ("ridge", "linear"):
        assert known.sel(encoder="vit", probe=probe).all()
        assert known.sel(encoder="cnn", probe=probe).sum() == 2
    for depth in ("depth 2", "depth 3"):
        assert known.sel(encoder="vit", probe=depth).any("feature").values.tolist() == [False, False, True]
    assert known.sel(encoder="vit", probe="multilayer", feature="cls").values.tolist() == [True, True, False]
    assert known.sel(encoder="cnn", probe="multilayer", feature="gap").values.tolist() == [True, False, False]
    assert (known == (result.reason == "")).all()
    assert result.reason.sel(encoder="vit", probe="depth 2", site="block.0", feature="cls") == NO_SUCH_PROBE
    assert (
        result.reason.sel(encoder="cnn", probe="linear", site="block.0", feature="cls")
        == "this site has no such feature"
    )
    assert result.attrs["selection"] == "20% of the training images, by class"
    assert (result.attrs["n_train"], result.attrs["n_selection"], result.attrs["n_test"]) == (31, 9, TEST)
    assert result.sizes["config"] == 6
    assert result.lr.values.tolist() == [1.0] * 3 + [0.1] * 3
    # All but the first block know the class.
    assert float(result.accuracy.sel(encoder="vit", probe="linear", site="block.0", feature="gap")) < 0.7
    assert float(result.accuracy.sel(encoder="vit", probe="linear", site="norm", feature="gap")) > 0.9


def test_the_numbers_of_the_best_settings_by_hand(both: tuple[Plan, dict[Key, torch.Tensor], xr.Dataset]) -> None:
    result = both[2]
    swept = result.isel(probe=slice(1, None)).stack(at=("encoder", "probe", "site", "feature"))
    seen = 0
    for _, row in swept.groupby("at"):
        if np.isnan(row.accuracy.item()):
            continue
        pairs = list(zip(row.selection_accuracy.values.ravel(), row.test_accuracy.values.ravel(), strict=True))
        order = sorted(range(6), key=lambda k: (-pairs[k][0], k))
        assert row.chosen.item() == order[0]
        assert row.selection.item() == pairs[order[0]][0]
        assert row.accuracy.item() == pytest.approx(pairs[order[0]][1], abs=1e-12)
        assert (row.accuracy_low.item(), row.accuracy_high.item()) == wilson(round(TEST * pairs[order[0]][1]), TEST)
        five = [pairs[k][1] for k in order[:5]]
        mean = sum(five) / 5
        assert row.mean_of_best.item() == pytest.approx(mean)
        assert row.std_of_best.item() == pytest.approx((sum((x - mean) ** 2 for x in five) / 5) ** 0.5)
        seen += 1
    assert seen == 2 * 3 + 2 + 2 * (2 + 1) + 2 * 2 + 1  # linear, depths, multilayer


def test_the_ridge_path_is_scikit_learns(both: tuple[Plan, dict[Key, torch.Tensor], xr.Dataset]) -> None:
    plan, data, result = both
    kept, held = hold_out(plan.images.labels_of("train"), 0.2, plan.seed)
    values, labels = data[Key("vit", "norm", "plain")][:, 0].double().numpy(), plan.images.labels
    scale = StandardScaler().fit(values[kept])
    peer = RidgeCV(alphas=len(kept) * np.array(PENALTIES), store_cv_results=True)
    peer.fit(scale.transform(values[kept]), 2 * np.eye(3)[labels[kept]] - 1)
    ours = result.sel(encoder="vit", site="norm", feature="cls")
    np.testing.assert_allclose(ours.ridge_error, peer.cv_results_.sum(1).mean(0), rtol=1e-5)
    decided = peer.predict(scale.transform(values)).argmax(1)
    ridge = ours.sel(probe="ridge")
    assert float(ridge.accuracy) == np.mean(decided[TRAIN:] == labels[TRAIN:])
    assert float(ridge.selection) == np.mean(decided[held] == labels[held])


def test_the_test_labels_choose_nothing(tmp_path: Path) -> None:
    labels = np.arange(TRAIN + TEST) % 3
    others = np.concatenate([labels[:TRAIN], np.random.default_rng(0).permutation(labels[TRAIN:])])
    data = activations(make_plan(tmp_path, labels, layers=VIT))
    one, two = (
        measured(make_plan(tmp_path / n, given, layers=VIT), data) for n, given in (("1", labels), ("2", others))
    )
    for name in ("loss", "selection_accuracy", "selection", "chosen", "best_probe", "best_site", "best_feature"):
        xr.testing.assert_equal(one[name], two[name])
    assert not one.test_accuracy.equals(two.test_accuracy)
    assert not one.accuracy.equals(two.accuracy)


def test_a_val_split_chooses_where_there_is_one(tmp_path: Path) -> None:
    labels = np.arange(TRAIN + 2 * TEST) % 3
    plan = make_plan(tmp_path, labels, layers=VIT, views=THREE)
    data = activations(plan)
    result = measured(plan, data, kinds=("ridge", "linear"))
    assert result.attrs["selection"] == "the val split"
    assert (result.attrs["n_train"], result.attrs["n_selection"], result.attrs["n_test"]) == (TRAIN, TEST, TEST)
    # The linear probe of all training images, asked about the val images.
    wrong = np.concatenate([labels[:TRAIN], 2 - labels[TRAIN : TRAIN + TEST], labels[TRAIN + TEST :]])
    other = measured(make_plan(tmp_path / "other", wrong, layers=VIT, views=THREE), data, kinds=("ridge", "linear"))
    xr.testing.assert_equal(other.loss, result.loss)
    xr.testing.assert_equal(other.test_accuracy, result.test_accuracy)
    assert not other.selection_accuracy.equals(result.selection_accuracy)
    # Val images without labels are of no use.
    labels[TRAIN : TRAIN + TEST] = -1
    held = measured(make_plan(tmp_path / "held", labels, layers=VIT, views=THREE), data, kinds=("ridge",))
    assert held.attrs["selection"] == "20% of the training images, by class"


@pytest.mark.parametrize(
    ("there", "seen"),
    [
        (("train", "val", "test"), ("train", "val", "test")),
        (("train", "test"), ("train", "test")),
        (("train", "val"), ("train", "test")),  # val stands in for test, and may not choose as well
    ],
)
def test_which_splits_the_pass_shows(there: tuple[str, ...], seen: tuple[str, ...], small: str) -> None:
    pixels, names = np.zeros((48, 32, 32, 3), np.uint8), [there[i % len(there)] for i in range(48)]
    images = sl.load_images(pixels, labels=[i // 8 for i in range(48)], splits=names)
    encoders = {"vit": sl.load_encoder(small)}
    settings = {"batch": 8, "seed": 0, "precision": "float32"}
    plan = make_plans(
        encoders, images, {"probes": ProbesConfig()}, None, settings, Path("unused"), torch.device("cpu")
    )["probes"]
    assert plan.splits == seen
    assert ProbesAnalysis(ProbesConfig(), plan).splits == seen


def secrets(plan: Plan, known: dict[str, Array]) -> dict[Key, torch.Tensor]:
    """Tokens that say no more than these vectors (n, 2) of each site, with a little noise."""
    random = torch.Generator().manual_seed(1)
    data = {}
    for site, vectors in known.items():
        values = 0.3 * torch.randn((len(vectors), *TOKENS), generator=random)
        values[:, :, :2] += 3 * torch.from_numpy(vectors).float()[:, None]
        data[Key("vit", site, "plain")] = values
    return data


def test_an_added_layer_gains_what_the_last_one_has_lost(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 4, TRAIN + TEST)
    first, second = 2.0 * (labels // 2) - 1, 2.0 * (labels % 2) - 1
    nothing = np.zeros(len(labels))
    plan = make_plan(tmp_path, labels, layers=VIT, classes=tuple("abcd"))
    known = {"block.0": first, "block.1": nothing, "norm": second}
    data = secrets(plan, {site: np.stack([values, nothing], 1) for site, values in known.items()})
    whole = measured(plan, data, poolings=("cls",))
    result = whole.sel(encoder="vit", feature="cls")
    linear, added = (result.sel(probe=probe) for probe in ("linear", "multilayer"))
    best = float(added.accuracy.sel(site="block.0"))
    assert best > 0.9
    assert 0.3 < float(linear.accuracy.sel(site="norm")) < 0.75
    for site in ("block.0", "block.1"):
        by_hand = float(added.accuracy.sel(site=site) - linear.accuracy.sel(site="norm"))
        assert float(added.gain.sel(site=site)) == pytest.approx(by_hand)
    assert float(linear.gain.sel(site="norm")) == 0
    assert float(added.gain_low.sel(site="block.0")) > 0
    assert float(added.gain_low.sel(site="block.1")) < 0.1
    assert (result.best_probe.item(), result.best_site.item()) == ("multilayer", "block.0")
    np.testing.assert_allclose(result["lead"], best - result.accuracy, atol=1e-12)
    text = " ".join(summary(whole))
    assert "layers norm and block.0 side by side, the CLS token, a linear probe" in text
    assert "the last layer has lost something that block.0 knows" in text
    assert f"The best frozen probe stays at {best:.1%}" in text


def test_the_last_layer_is_that_of_the_pooling(tmp_path: Path) -> None:
    """A final norm of a single vector, as of CLIP, has no CLS token: the last layer of `cls` is the block before."""
    plan = make_plan(tmp_path, layers={"vit": {"block.0": TOKENS, "block.1": TOKENS, "norm": (WIDTH,)}})
    result = measured(plan, activations(plan))
    last = dict(zip(result.feature.values.tolist(), result.last_site_of_feature.values[0].tolist(), strict=True))
    assert last == {"gap": "norm", "cls": "block.1"}
    table = next(figure.table for figure in figures(result) if figure.name == "depth")
    assert table.groupby("feature").site.unique().map(list).to_dict() == {"gap": ["norm"], "cls": ["block.1"]}
    assert table.groupby("feature").size().to_dict() == {"gap": 3, "cls": 3}
    for feature, site in last.items():
        best = {"best_probe": "multilayer", "best_site": "block.0", "best_feature": feature}
        words = result.assign({name: ("encoder", [value]) for name, value in best.items()})
        assert f"layers {site} and block.0 side by side" in headlines(words)[0][2]
        linear = result.accuracy.sel(encoder="vit", probe="linear", feature=feature, site=site).item()
        assert any(f"on the last layer ({site}) reaches {linear:.1%}" in line for line in summary(words))


def test_depth_gains_where_classes_are_not_linear(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    signs = random.choice([-1.0, 1.0], (TRAIN + TEST, 2))
    labels = (signs[:, 0] * signs[:, 1] > 0).astype(np.int64)
    plan = make_plan(tmp_path, labels, layers={"vit": {"norm": TOKENS}}, classes=("a", "b"))
    result = measured(
        plan, secrets(plan, {"norm": signs}), kinds=("linear", "nonlinear"), depths=(2,), poolings=("gap",)
    )
    at = result.sel(encoder="vit", site="norm", feature="gap")
    assert float(at.accuracy.sel(probe="depth 2")) > 0.9
    assert float(at.accuracy.sel(probe="linear")) < 0.8
    gain = float(at.accuracy.sel(probe="depth 2") - at.accuracy.sel(probe="linear"))
    assert float(at.gain.sel(probe="depth 2")) == pytest.approx(gain)
    assert float(at.gain_low.sel(probe="depth 2")) > 0
    assert any("the classes are in its features, but not linearly" in line for line in summary(result))
    every = ProbesConfig(nonlinear_at="every", kinds=("nonlinear",), depths=(3,)).shapes(["block.0", "norm"])
    assert [(site, shape.depth) for (_, site), shape in every.items()] == [("block.0", 3), ("norm", 3)]


def test_what_cannot_be_probed_has_a_reason(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    data = activations(plan)
    data[Key("vit", "block.0", "plain")][TRAIN + 1] = torch.nan
    data[Key("vit", "norm", "plain")][:, 0] = 1.5  # the CLS token of the last layer
    data[Key("cnn", "block.1", "plain")][:] = torch.inf
    result = measured(plan, data, lrs=(0.1,), weight_decays=(0.0,))
    reason = result.reason.sel(encoder="vit", feature="cls")
    assert reason.sel(probe="linear", site="block.0").item() == "1 of 24 test features is not finite (NaN or infinity)"
    for probe, site in (("ridge", "norm"), ("depth 2", "norm"), ("multilayer", "block.1")):
        assert reason.sel(probe=probe, site=site).item() == "the features are the same for all training images"
    assert (
        "of 40 train features are not finite"
        in result.reason.sel(encoder="cnn", probe="linear", site="block.1", feature="gap").item()
    )
    assert result.accuracy.isnull().equals(result.reason != "")
    assert np.isfinite(result.accuracy.sel(encoder="vit", probe="linear", site="block.1", feature="cls"))
    assert result.attrs["best_of"] == 1  # fewer settings than five
    assert float(result.std_of_best.max()) == 0
    assert figures(result)
    for values in data.values():
        values[:] = torch.nan
    nothing = measured(make_plan(tmp_path / "nan"), data, lrs=(0.1,), weight_decays=(0.0,))
    assert summary(nothing) == ["No probe could be trained on these features, so there is nothing to recommend."]
    assert headlines(nothing) == figures(nothing) == []


def test_classes_that_are_not_in_train_and_images_without_label(tmp_path: Path) -> None:
    labels = np.arange(TRAIN + TEST) % 3
    labels[TRAIN : TRAIN + 4] = 5
    labels[[0, -1]] = -1
    plan = make_plan(tmp_path, labels, layers=VIT, classes=tuple("abcdef"))
    result = measured(plan, activations(plan))
    assert (result.attrs["n_train"] + result.attrs["n_selection"], result.attrs["n_test"]) == (TRAIN - 1, TEST - 1)
    assert result.attrs["classes"] == 3
    assert 0.5 < float(result.accuracy.max()) <= (TEST - 5) / (TEST - 1)


def test_ridge_alone_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("sightline.measure.estimators.sweep.train_probes")
    plan = make_plan(tmp_path)
    result = measured(plan, activations(plan), kinds=("ridge",))
    assert "config" not in result.dims
    assert {figure.name for figure in figures(result)} == {"layers-ridge", "ridge"}
    assert "a ridge probe" in summary(result)[0]
    assert "settings" not in summary(result)[0]
    assert float(result.gain.sel(encoder="vit", probe="ridge", site="norm", feature="cls")) == 0


def test_words_for_two_encoders(both: tuple[Plan, dict[Key, torch.Tensor], xr.Dataset]) -> None:
    result = both[2]
    names = {figure.name for figure in figures(result)}
    assert names == {"layers-linear", "layers-ridge", "depth", "added", "sweep", "ridge"}
    first = max(result.encoder.values, key=lambda e: float(result.selection.sel(encoder=e).max()))
    text = summary(result)
    assert text[0].startswith(f"For these images take {first}: layer")
    assert headlines(result)[0][0] == "For these images"
    pair = result.assign(
        {f"difference{end}": result.difference * 0 + x for end, x in (("", 0.1), ("_low", 0.02), ("_high", 0.2))}
    )
    assert "10.0 points (95 % 2.0 to 20.0) ahead of" in summary(pair)[1]
    pair = pair.assign(difference_low=pair.difference_low - 0.1)
    assert "cannot be separated with these 24 test images" in summary(pair)[1]
    pair = result.assign(
        {f"difference{end}": result.difference * 0 - x for end, x in (("", 0.1), ("_low", 0.2), ("_high", 0.02))}
    )
    assert "On the test images" in summary(pair)[1]
    assert "10.0 points (95 % 2.0 to 20.0) ahead of" in summary(pair)[1]
    guess = result.assign_attrs(majority=0.99)
    assert summary(guess)[2].startswith("No frozen probe is clearly better than guessing")
    perfect = result.assign(accuracy=result.accuracy * 0 + 0.99, accuracy_low=result.accuracy * 0 + 0.9)
    assert summary(perfect)[2] == "Frozen features reach 99.0%: fine-tuning has little left to add."
    middling = result.assign(accuracy=result.accuracy * 0 + 0.7, accuracy_low=result.accuracy * 0 + 0.6)
    assert "stays at 70.0%" in summary(middling)[2]
    assert "30.0% of the images would need fine-tuning, or more than these 31 training images" in summary(middling)[2]


def test_figures_show_what_differs(both: tuple[Plan, dict[Key, torch.Tensor], xr.Dataset]) -> None:
    found = {figure.name: figure for figure in figures(both[2])}
    depth = found["depth"].chart.to_dict()["spec"]["layer"][2]["encoding"]["x"]
    assert set(found["depth"].table.depth) == {1, 2, 3}
    assert depth["title"] == "depth of the probe"
    assert "datum.value % 1 ?" in depth["axis"]["labelExpr"]  # no label at a depth of 1.5
    layers = found["sweep"].chart.to_dict()["spec"]["layer"]
    low, high = next(one["encoding"]["color"]["scale"]["domain"] for one in layers if "color" in one["encoding"])
    chosen_by = found["sweep"].table.selection_accuracy
    assert low <= chosen_by.min() < low + 0.1
    assert high - 0.1 < chosen_by.max() <= high
    other = [line for line in summary(both[2]) if " instead (" in line]
    assert other
    assert all(re.search(r"With the .+ instead \(layers? .+, a .*probe.*\): \d+\.\d%, ", line) for line in other)


def test_more_than_linear_probes_on_the_first_pooling_alone(
    both: tuple[Plan, dict[Key, torch.Tensor], xr.Dataset],
) -> None:
    plan, data, every = both
    some = measured(plan, data, more_on="first")
    known, missing = some.accuracy.notnull(), every.accuracy.notnull() & some.accuracy.isnull()
    assert (some.accuracy.where(known) == every.accuracy.where(known)).where(known, True).all()
    left_out = missing.to_series()[lambda s: s].reset_index()
    assert set(left_out.probe) == {"depth 2", "depth 3", "multilayer"}
    assert set(left_out.feature) == {"gap"}
    assert set(left_out.encoder) == {"vit"}  # a CNN has no other
    assert (some.reason.where(missing, NO_SUCH_PROBE) == NO_SUCH_PROBE).all()


def test_the_mean_of_the_best() -> None:
    assert mean_of_best(np.array([0.3, 0.9, np.nan]), np.array([0.0, 0.5, 1.0])) == (0.25, 0.25)
    assert np.isnan(mean_of_best(np.array([np.nan]), np.array([0.5]))).all()


def test_images_without_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="A probe needs labels of at least two classes"):
        ProbesAnalysis(ProbesConfig(), make_plan(tmp_path, np.zeros(TRAIN + TEST, np.int64)))


def test_cls_and_gap_side_by_side_each_through_its_own_batch_norm(tmp_path: Path) -> None:
    """The probe of CLS ⊕ GAP is one that sees two matrices, as that of two layers does."""
    plan = make_plan(tmp_path)
    data = activations(plan)
    data[Key("vit", "norm", "plain")][:, 0] *= 1000  # only with a BatchNorm of its own is the mean not drowned
    result = measured(plan, data, poolings=("cls_gap", "cls"))
    assert result.feature.values.tolist() == ["cls", "cls_gap"]
    assert result.accuracy.sel(encoder="cnn").isnull().all()
    kept, held = hold_out(plan.images.labels_of("train"), 0.2, plan.seed)
    pooled = {
        (site, name): values.numpy()
        for site in ("block.0", "norm")
        for tokens in [data[Key("vit", site, "plain")]]
        for name, values in {"cls": tokens[:, 0], "gap": tokens.mean(1)}.items()
    }
    labels = plan.images.labels
    train, selection, test = (
        Labelled({f"{site} {name}": values[rows] for (site, name), values in pooled.items()}, labels[rows])
        for rows in (kept, held, np.arange(TRAIN, TRAIN + TEST))
    )
    both = [tuple(f"{site} {name}" for name in ("cls", "gap")) for site in ("norm", "block.0")]
    shapes = {"linear": Probe(both[0]), "depth 3": Probe(both[0], 3), "multilayer": Probe((*both[0], *both[1]))}
    swept = train_sweep(list(shapes.values()), Sweep(**QUICK), train, selection, 3, plan.seed)
    ours = result.sel(encoder="vit", feature="cls_gap")
    for number, probe in enumerate(shapes):
        at = ours.sel(probe=probe, site="block.0" if probe == "multilayer" else "norm")
        np.testing.assert_allclose(at.loss, swept.loss[number], rtol=1e-5)
        np.testing.assert_array_equal(at.test_accuracy, swept.accuracy(test)[number])
    beside = np.concatenate([pooled["norm", name] for name in ("cls", "gap")], 1).astype(np.float64)
    scale = StandardScaler().fit(beside[kept])
    peer = RidgeCV(alphas=len(kept) * np.array(PENALTIES), store_cv_results=True)
    peer.fit(scale.transform(beside[kept]), 2 * np.eye(3)[labels[kept]] - 1)
    np.testing.assert_allclose(ours.ridge_error.sel(site="norm"), peer.cv_results_.sum(1).mean(0), rtol=1e-4)
    assert "the CLS token and the mean over all positions side by side" in " ".join(summary(result))


def test_one_setting_has_no_spread(tmp_path: Path) -> None:
    """As Table A.1 of Park et al. 2023 has."""
    plan = make_plan(tmp_path, layers=VIT)
    whole = ProbesAnalysis(ProbesConfig(preset="a1", kinds=("linear",)), plan)
    result: xr.Dataset = computed(whole, plan, activations(plan))
    assert result.sizes["config"] == result.attrs["best_of"] == 1
    assert (result.lr.item(), result.weight_decay.item(), result.min_lr.item()) == (1.0, 0.05, 0.0)
    assert result.attrs["preset"] == "a1"
    assert result.attrs["learning_rate"].startswith("lr · 31 / 256 at its peak")
    assert "best settings" not in " ".join(summary(result))


def test_the_best_end_of_each_cell_is_drawn(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, layers=VIT)
    result = measured(plan, activations(plan), kinds=("linear",), min_lrs=(0.0, 0.001, 0.1))
    drawn = next(figure for figure in figures(result) if figure.name == "sweep")
    assert len(drawn.table) == 2 * 18
    assert "with the best learning rate at the end" in drawn.caption
    found = pd.DataFrame(drawn.chart.data)
    best = drawn.table.groupby(["feature", "weight_decay", "lr"]).selection_accuracy.max()
    assert len(found) == len(best) == 12
    assert sorted(found.value) == sorted(best)


def test_cost(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    told = cost(ProbesConfig(poolings=("cls",), kinds=("linear",)), plan)
    assert told.disk == 3 * (TRAIN + TEST) * (4 * 6 + 1)
    assert told.memory == 4 * (3 * 9 * (3 * 6 * 3) + 12 * (TRAIN + 32 * 12))
    both = cost(ProbesConfig(poolings=("cls", "gap", "cls_gap"), kinds=("linear",)), plan)
    assert both.disk == (2 * 3 + 2) * (TRAIN + TEST) * (4 * 6 + 1)  # CLS and GAP are there once; a CNN has no CLS
    joined = 27 * (3 * 12 * 3) + 24 * (TRAIN + 32 * 24)
    assert both.memory == 4 * joined  # the largest: they are trained one after the other
    table = cost(ProbesConfig(preset="table4", poolings=("cls",), kinds=("linear",)), plan)
    assert table.memory == 4 * ((216 + 2 * 54) * (3 * 6 * 3) + 12 * (TRAIN + 32 * 12))
