"""Agreement against SciPy and scikit-learn, image by image, and as a stream."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau
from sklearn.metrics import cohen_kappa_score, f1_score
from support.plans import LAYERS, TEST, TOKENS, TRAIN, activations, computed, make_plan

from sightline.analyses import agreement
from sightline.analyses.agreement import AgreementAnalysis, AgreementConfig, cohen_kappa, kendall_tau, macro_f1
from sightline.core.errors import InputError
from sightline.measure.estimators.intervals import wilson
from sightline.measure.plan import Key

Array = np.ndarray[Any, Any]


def plain_tau(a: Array, b: Array, k: int) -> Array:
    """The definition, image by image."""
    taus = []
    for row_a, row_b in zip(a, b, strict=True):
        sides = [sorted(range(len(row)), key=lambda c, row=row: (-row[c], c))[:k] for row in (row_a, row_b)]
        taus.append(np.mean([kendalltau(row_a[best], row_b[best]).statistic for best in sides]))
    return np.array(taus)


@pytest.mark.parametrize("k", [2, 5, 10, 100])
@pytest.mark.parametrize("levels", [None, 4], ids=["no ties", "ties"])
def test_same_as_scipy_on_every_image(k: int, levels: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "CHUNK_NUMBERS", 128)  # several chunks of images
    random = np.random.default_rng(0)
    a = random.normal(size=(40, 30))
    b = a + random.normal(size=a.shape)
    if levels:
        a, b = (np.round(x) for x in (a, b))
    np.testing.assert_allclose(kendall_tau(a, b, k), plain_tau(a, b, k), atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 6), classes=st.integers(2, 9), k=st.integers(2, 12))
def test_properties_of_tau(seed: int, n: int, classes: int, k: int) -> None:
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(2, n, classes))
    tau = kendall_tau(a, b, k)
    np.testing.assert_array_equal(kendall_tau(b, a, k), tau)  # symmetric
    np.testing.assert_array_equal(kendall_tau(np.exp(a), 3 * b - 7, k), tau)  # of ranks alone
    np.testing.assert_array_equal(kendall_tau(a, a, k), 1)
    np.testing.assert_array_equal(kendall_tau(a, -a, classes), -1)
    order = random.permutation(classes)
    np.testing.assert_allclose(kendall_tau(a[:, order], b[:, order], k), tau, atol=1e-12)
    as_tensors = kendall_tau(torch.from_numpy(a), torch.from_numpy(b), k)
    np.testing.assert_array_equal(as_tensors, tau)


def test_tied_classes_have_no_order() -> None:
    assert np.isnan(kendall_tau(np.ones((1, 4)), np.arange(4.0)[None], 3)).all()
    infinite = np.array([[np.inf, 1.0, -np.inf, -np.inf]])
    assert kendall_tau(infinite, np.array([[4.0, 3.0, 2.0, 2.0]]), 4) == 1
    assert kendall_tau(np.zeros((0, 4)), np.zeros((0, 4)), 2).shape == (0,)
    assert kendall_tau(infinite, -infinite, 4) == -1


def test_scores_of_any_kind() -> None:
    scores = np.array([[0, 200, 100, 50], [3, 2, 1, 0]])
    other = np.array([[0, 200, 50, 100], [3, 2, 1, 0]])
    expected = kendall_tau(scores.astype(float), other.astype(float), 2)
    np.testing.assert_array_equal(kendall_tau(scores.astype(np.uint8), other.astype(np.uint8), 2), expected)
    tensors = [torch.tensor(x, dtype=torch.bfloat16, requires_grad=True) for x in (scores, other)]
    np.testing.assert_array_equal(kendall_tau(*tensors, 2), expected)  # type: ignore[call-arg]
    missing = np.where(scores == 50, np.nan, scores)
    assert np.isnan(kendall_tau(missing, other, 2)).tolist() == [True, False]


@pytest.mark.parametrize("classes", [2, 7, 40])
def test_decisions_same_as_scikit_learn(classes: int) -> None:
    random = np.random.default_rng(classes)
    a = random.integers(3, 3 + classes, 60)
    b = np.where(random.random(60) < 0.6, a, random.integers(3, 3 + classes, 60))
    assert macro_f1(a, b) == pytest.approx(f1_score(b, a, average="macro"), abs=1e-12)
    assert macro_f1(b, a) == pytest.approx(macro_f1(a, b), abs=1e-12)
    assert cohen_kappa(a, b) == pytest.approx(cohen_kappa_score(a, b), abs=1e-12)
    names = np.array([f"class {i}" for i in range(50)])
    assert macro_f1(names[a], names[b]) == pytest.approx(macro_f1(a, b), abs=1e-12)


def test_one_class_only() -> None:
    assert np.isnan(cohen_kappa([1, 1], [1, 1]))
    assert macro_f1([1, 1], [1, 1]) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kendall_tau(np.ones((2, 3)), np.ones((2, 4)), 2), "of the same shape"),
        (lambda: kendall_tau(np.ones(3), np.ones(3), 2), "two arrays"),
        (lambda: kendall_tau(np.ones((2, 3)), np.ones((2, 3)), 1), "k of at least 2, not 1"),
        (lambda: macro_f1([], []), "two sequences of decisions"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


# The streaming analysis, fed with made activations

CLASSES = ("a", "b", "c", "d", "e", "f")
HEADS = {
    "vit": {**LAYERS["vit"], "head.0": (6,)},
    "vit b": {**LAYERS["vit"], "head.0": (6,)},
    "probed": {"block.0": (6, 3, 3), "block.1": (6, 3, 3)},
}


def run(plan: Any, data: Any, size: int = 8, **config: Any) -> xr.Dataset:
    result: xr.Dataset = computed(AgreementAnalysis(AgreementConfig(**config), plan), plan, data, size)
    return result


def test_streamed_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "BLOCK_NUMBERS", 1)  # blocks of 64 images at least, so all 24 and more
    plan = make_plan(tmp_path, layers=HEADS, classes=CLASSES)
    data = activations(plan)
    result = run(plan, data, k=(2, 5, 6, 100))
    truth = plan.images.labels[TRAIN:]
    scores = {name: data[Key(name, "head.0", "plain")].numpy()[TRAIN:] for name in ("vit", "vit b")}
    top = {name: values.argmax(1) for name, values in scores.items()}
    right = {name: top[name] == truth for name in scores}
    subsets = {
        "all images": np.ones(TEST, bool),
        "both right": right["vit"] & right["vit b"],
        "both wrong": ~right["vit"] & ~right["vit b"],
    }
    assert result.k.values.tolist() == [2, 5, 6]
    for (a, b), k, (images, chosen) in itertools.product(
        [("vit", "vit b"), ("vit b", "vit")], (2, 5, 6), subsets.items()
    ):
        found = result.sel(encoder_a=a, encoder_b=b, k=k, images=images)
        expected = plain_tau(scores[a], scores[b], k)[chosen]
        assert chosen.sum() > 1
        assert float(found.tau) == pytest.approx(expected.mean(), abs=1e-12)
        assert float(found.tau_images) == chosen.sum()
        half = 1.96 * expected.std(ddof=1) / np.sqrt(len(expected))
        assert float(found.tau_low) == pytest.approx(expected.mean() - half, abs=1e-4)
        assert str(found.reason.values) == ""
    pair = result.sel(encoder_a="vit", encoder_b="vit b")
    assert float(pair.f1) == pytest.approx(f1_score(top["vit b"], top["vit"], average="macro"))
    assert float(pair.kappa) == pytest.approx(cohen_kappa_score(top["vit"], top["vit b"]))
    assert pair.kappa_low < pair.kappa < pair.kappa_high
    assert pair.f1_low < pair.f1 < pair.f1_high
    vit = result.sel(encoder="vit")
    assert float(vit.test_accuracy) == right["vit"].mean()
    assert (float(vit.test_accuracy_low), float(vit.test_accuracy_high)) == wilson(int(right["vit"].sum()), TEST)
    assert result.classifier.values.tolist() == ["own head", "own head", "ridge probe"]
    assert (np.diagonal(result.tau.values, axis1=2, axis2=3) == 1).all()


def test_k_is_bounded_by_the_classes(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)  # three classes
    assert AgreementAnalysis(AgreementConfig(), plan).k == [3]
    assert AgreementAnalysis(AgreementConfig(k=(3, 2, 5)), plan).k == [2, 3]


def test_flaws_have_a_reason(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, layers={**HEADS, "vit c": {"norm": TOKENS}}, classes=CLASSES)
    data = activations(plan)
    data[Key("probed", "block.1", "plain")][:] = 1.0
    data[Key("vit", "head.0", "plain")] = torch.eye(6)[torch.from_numpy(plan.images.labels)]  # never wrong
    result = run(plan, data)
    lost = result.sel(encoder_a="vit", encoder_b="probed")
    assert np.isnan(lost.tau).all()
    assert np.isnan(lost.kappa)
    assert (lost.reason == "probed: the features are the same for all training images").all()
    assert np.isnan(result.tau.sel(encoder_a="probed", encoder_b="probed")).all()
    perfect = result.sel(encoder_a="vit", encoder_b="vit c")
    assert perfect.reason.values.tolist() == ["", "", "there are no such images"]
    assert np.isnan(perfect.tau.sel(images="both wrong")).all()
    assert not np.isnan(perfect.tau.sel(images="all images")).any()
    figure = agreement.figures(result)[0]
    assert len(figure.table) == 3 * len(result.k) * 16
    assert "probed: ridge probe at block.1, which cannot decide" in figure.caption
    assert [line[0] for line in agreement.headlines(result)] == ["vit and vit b", "vit and vit c", "vit b and vit c"]


def test_nobody_can_decide(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    result = run(plan, {key: values * 0 for key, values in activations(plan).items()})
    assert np.isnan(result.tau).all()
    assert np.isnan(result.f1).all()
    assert np.isnan(result.test_accuracy).all()
    assert (result.reason != "").all()
    assert agreement.headlines(result) == []
    assert len(agreement.figures(result)) == 2


def test_two_encoders_and_labels_are_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is only 'vit'; give at least two"):
        AgreementAnalysis(AgreementConfig(), make_plan(tmp_path, layers={"vit": LAYERS["vit"]}))
    with pytest.raises(InputError, match="Agreement needs labels of at least two classes"):
        AgreementAnalysis(AgreementConfig(), make_plan(tmp_path, np.full(TRAIN + TEST, -1)))
