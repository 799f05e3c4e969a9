"""Who decides: own heads and probes, what they see, and what they cannot decide."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import StandardScaler
from support.plans import LAYERS, MAP, TEST, TOKENS, TRAIN, activations, feed, make_plan

import sightline as sl
from sightline.core.errors import InputError
from sightline.measure.classifiers import (
    HEAD,
    LINEAR,
    PROBE,
    Classifier,
    ClassifierChoice,
    DecisionAnalysis,
    Where,
    about,
    cost_of,
)
from sightline.measure.estimators.intervals import wilson
from sightline.measure.estimators.probes import Probe
from sightline.measure.estimators.ridge import PENALTIES
from sightline.measure.estimators.sweep import Labelled, Sweep, hold_out, train_sweep
from sightline.measure.plan import Key, Plan

SPLITS = ("train", "test")
FOUR = {
    **LAYERS,
    "vit with head": {**LAYERS["vit"], "head.0": (3,)},
    "vit with other head": {**LAYERS["vit"], "head.0": (1000,)},
    "vit with projector": {**LAYERS["vit"], "head.0": (3,), "head.1": (3,)},
    "vit without norm": {"block.0": TOKENS, "block.10": TOKENS, "block.9": TOKENS},
    "cnn with norm": {"block.0": MAP, "norm": (6, 1, 1)},
}


class Bare(DecisionAnalysis):
    def compute(self) -> None:  # type: ignore[override]
        self.fitted()


def decided(plan: Plan, **choice: str) -> DecisionAnalysis:
    return Bare(ClassifierChoice(**choice), plan, SPLITS, "This", "this")


def test_who_decides(tmp_path: Path) -> None:
    assert decided(make_plan(tmp_path, layers=FOUR)).where == {
        "vit": Where(PROBE, "norm", "cls"),
        "cnn": Where(PROBE, "block.1", "gap"),
        "vit with head": Where(HEAD, "head.0", "gap"),
        "vit with other head": Where(PROBE, "norm", "cls"),
        "vit with projector": Where(PROBE, "norm", "cls"),
        "vit without norm": Where(PROBE, "block.10", "cls"),
        "cnn with norm": Where(PROBE, "norm", "gap"),
    }
    assert set(decided(make_plan(tmp_path, layers=FOUR), classifier="probe", pooling="gap").where.values()) == {
        Where(PROBE, "norm", "gap"),
        Where(PROBE, "block.1", "gap"),
        Where(PROBE, "block.10", "gap"),
    }


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"classifier": "heads"}, "There is no classifier 'heads'; did you mean 'head'"),
        ({"pooling": "mean"}, "There is no pooling 'mean'"),
        ({"preset": "a2", "classifier": "linear"}, "There is no preset 'a2'; choose from default, table4, a1"),
        ({"preset": "a1"}, "The preset a1 is a sweep of linear probes, but the classifier is auto; choose"),
        ({"classifier": "head"}, "Encoder 'vit' has no head that classifies, but made has 3 classes"),
        ({"pooling": "cls"}, "Encoder 'cnn' has no feature 'cls' after its last block"),
    ],
)
def test_choices_that_cannot_be(tmp_path: Path, choice: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decided(make_plan(tmp_path, layers=FOUR), **choice)


def test_probe_is_scikit_learns_and_head_is_the_heads(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, layers=FOUR)
    data = activations(plan)
    metric = decided(plan)
    feed(metric, plan, data)
    found = metric.fitted()
    values, labels = data[Key("vit", "norm", "plain")][:, 0].double().numpy(), plan.images.labels
    scale = StandardScaler().fit(values[:TRAIN])
    peer = RidgeCV(alphas=TRAIN * np.array(PENALTIES)).fit(
        scale.transform(values[:TRAIN]), 2 * np.eye(3)[labels[:TRAIN]] - 1
    )
    scores = peer.predict(scale.transform(values[TRAIN:]))
    np.testing.assert_allclose(found["vit"].scores(metric.input_of("vit", "test")[:]), scores, atol=1e-5)
    about = metric.describe(found)
    assert about["penalty"][1][0] == pytest.approx(peer.alpha_ / TRAIN)
    right = int((peer.predict(scale.transform(values[:TRAIN])).argmax(1) == labels[:TRAIN]).sum())
    assert about["train_accuracy"][1][0] == right / TRAIN
    assert (about["train_accuracy_low"][1][0], about["train_accuracy_high"][1][0]) == wilson(right, TRAIN)
    logits = data[Key("vit with head", "head.0", "plain")].numpy()
    decisions, why = metric.decisions(found["vit with head"], "vit with head", "test")
    np.testing.assert_array_equal(decisions, logits[TRAIN:].argmax(1))
    assert why == ""
    assert about["classifier"][1][2] == HEAD
    assert np.isnan(about["penalty"][1][2])


@pytest.mark.parametrize("preset", ["default", "a1"])
def test_a_linear_probe_is_the_best_of_a_sweep_on_images_that_are_held_out(tmp_path: Path, preset: str) -> None:
    plan, sweep = make_plan(tmp_path, layers=FOUR), Sweep(preset=preset)
    data = activations(plan)
    metric = decided(plan, classifier="linear", preset=preset)
    assert {where.kind for where in metric.where.values()} == {LINEAR}  # also where there is a head
    feed(metric, plan, data)
    found = metric.fitted()
    values, labels = data[Key("vit", "norm", "plain")][:, 0].numpy(), plan.images.labels
    kept, held = (
        Labelled({"x": values[part]}, labels[part]) for part in hold_out(labels[:TRAIN], sweep.held_out, plan.seed)
    )
    swept = train_sweep([Probe(("x",))], sweep, kept, held, 3, plan.seed)
    best = swept.selection[0].argmax()
    about_it = metric.describe(found)
    assert about_it["left_out_accuracy"][1][0] == swept.selection[0].max()
    assert about_it["setting"][1][0] == str(sweep.settings[best])
    assert about_it["classifier"][1][0] == LINEAR
    assert np.isnan(about_it["penalty"][1][0])
    decisions, _ = metric.decisions(found["vit"], "vit", "test")
    chosen = swept.chosen(0)
    assert chosen is not None
    np.testing.assert_array_equal(decisions, chosen.decisions({"x": values[TRAIN:]}))
    assert (decisions == labels[TRAIN:]).mean() > 0.6
    again = pickle.loads(pickle.dumps(found["vit"]))  # processes hand it to each other
    np.testing.assert_array_equal(again.scores(values), found["vit"].scores(values))


def test_how_probes_are_fitted_in_words() -> None:
    assert about(ClassifierChoice()).startswith("ridge")
    assert "the best of 9 settings on 20% of train" in about(ClassifierChoice(classifier="linear"))


def test_classes_that_do_not_begin_at_zero_and_images_without_label(tmp_path: Path) -> None:
    labels = 4 + np.arange(TRAIN + TEST) % 3
    labels[[2, TRAIN + 1]] = -1
    plan = make_plan(tmp_path, labels, classes=tuple("abcdefghi"), layers={"vit": {"norm": (6, 9)}})
    metric = decided(plan)
    feed(metric, plan, activations(plan))
    found = metric.fitted()
    decisions, _ = metric.decisions(found["vit"], "vit", "test")
    assert decisions is not None
    assert len(decisions) == TEST - 1
    assert set(decisions.tolist()) <= {4, 5, 6}
    assert (decisions == metric.labels("test")).mean() > 0.6


def test_what_cannot_be_classified_has_a_reason(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, layers=FOUR)
    data = activations(plan)
    data[Key("vit", "norm", "plain")][3, 0, 0] = torch.nan  # a training image
    data[Key("cnn", "block.1", "plain")][:] = 2.0
    data[Key("vit with head", "head.0", "plain")][TRAIN, 0] = torch.inf  # a test image
    metric = decided(plan)
    feed(metric, plan, data)
    found = metric.fitted()
    assert found["vit"].reason == "1 of 40 train features is not finite (NaN or infinity)"
    assert found["cnn"].reason == "the features are the same for all training images"
    assert metric.decisions(found["vit"], "vit", "test") == (None, found["vit"].reason)
    nothing, why = metric.decisions(found["vit with head"], "vit with head", "test")
    assert nothing is None
    assert why == "1 of 24 test features is not finite (NaN or infinity)"
    assert np.isnan(metric.describe(found)["train_accuracy"][1][:2]).all()


def test_cost(tmp_path: Path) -> None:
    cost = cost_of(ClassifierChoice(), make_plan(tmp_path), SPLITS)
    assert cost.disk == 2 * (TRAIN + TEST) * (4 * 6 + 1)
    assert cost.memory > 0
    more = cost_of(ClassifierChoice(classifier="linear"), make_plan(tmp_path), SPLITS)
    assert more.memory - cost.memory == 4 * (3 * 9 * 6 * 3 + 6 * TRAIN)


def test_equal_scores_go_to_the_first_class() -> None:
    assert Classifier(Where(HEAD, "head.0", "gap")).scores(np.ones((1, 3))).argmax(1) == 0


def test_an_own_head_is_read_by_the_names_of_its_classes() -> None:
    """Class folders come in the order of the alphabet, the head in that of its training."""
    images = sl.load_images("shapes?size=48", limit=64)
    order = np.argsort(images.classes)
    place = np.argsort(order)
    turned = dataclasses.replace(
        images, classes=tuple(np.array(images.classes)[order].tolist()), labels=place[images.labels]
    )
    options: Any = {"batch": 32, "workers": 0, "show_progress": False}
    found = [sl.analyze(["zoo:supervised", "zoo:simclr"], i, ["agreement"], **options) for i in (images, turned)]
    for run in found:
        assert run["agreement"].classifier.values.tolist() == ["own head", "ridge probe"]
        assert float(run["agreement"].train_accuracy[0]) > 0.5
    assert float(found[0]["agreement"].train_accuracy[0]) == float(found[1]["agreement"].train_accuracy[0])
    others = dataclasses.replace(images, classes=tuple(f"other {name}" for name in images.classes))
    run = sl.analyze(["zoo:supervised", "zoo:simclr"], others, ["agreement"], **options)
    assert run["agreement"].classifier.values.tolist() == ["ridge probe", "ridge probe"]
