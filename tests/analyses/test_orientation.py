"""The orientation probe: what is told, what cannot be told, and as a stream."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeClassifier
from sklearn.preprocessing import StandardScaler
from support.passes import measured
from support.plans import LAYERS, TEST, TRAIN, activations, computed, make_plan

import sightline as sl
from sightline.analyses import orientation as plugin
from sightline.analyses.orientation import OrientationAnalysis, OrientationConfig, orientation_accuracy
from sightline.core.errors import InputError
from sightline.encoders.encoder import build_encoder
from sightline.images.preprocess import Preprocess
from sightline.measure.estimators.intervals import wilson
from sightline.measure.estimators.ridge import fit_ridge
from sightline.measure.plan import Key, Plan

BOTH = dict.fromkeys(("train", "test"), ("plain", "mirror"))
UNLABELLED = np.full(TRAIN + TEST, -1)


def mirrored(plan: Plan) -> dict[Key, torch.Tensor]:
    """The first block knows the orientation in one channel, the others do not."""
    data = activations(plan)
    for key, values in list(data.items()):
        other = values.clone()
        if key.site == "block.0":
            (other if key.encoder == "vit" else other.movedim(1, -1))[..., 2] += 4
        data[key._replace(view="mirror")] = other
    return data


def test_same_as_scikit_learn() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(160, 8))
    other = x + 0.5 * random.normal(size=x.shape) + np.linspace(0, 1, 8)
    train, test = (x[:100], other[:100]), (x[100:], other[100:])
    probe = fit_ridge(train, (np.zeros(100, int), np.ones(100, int)))
    scale = StandardScaler().fit(np.concatenate(train))
    labels = np.repeat([0, 1], 100)
    peer = RidgeClassifier(alpha=200 * probe.penalty).fit(scale.transform(np.concatenate(train)), labels)
    expected = peer.score(scale.transform(np.concatenate(test)), np.repeat([0, 1], 60))
    assert orientation_accuracy(train, test) == pytest.approx(expected)
    assert 0.6 < expected < 1


def test_invariant_features_give_one_half_exactly() -> None:
    x = np.random.default_rng(1).normal(size=(90, 20))
    assert orientation_accuracy((x[:40], x[:40]), (x[40:], x[40:])) == 0.5


@pytest.mark.parametrize("width", [10, 200])
def test_noise_gives_chance(width: int) -> None:
    """Two views that differ at random: with more features than images a fit by heart is found out."""
    random = np.random.default_rng(width)
    a, b = random.normal(size=(2, 400, width))
    assert orientation_accuracy((a[:100], b[:100]), (a[100:], b[100:])) == pytest.approx(0.5, abs=0.07)


def test_streamed_is_whole(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, UNLABELLED, views=BOTH)  # labels are not needed
    data = mirrored(plan)
    result = computed(OrientationAnalysis(OrientationConfig(), plan), plan, data)
    pools = {
        ("vit", "cls"): lambda x: x[:, 0],
        ("vit", "gap"): lambda x: x.mean(1),
        ("cnn", "gap"): lambda x: x.mean((2, 3)),
    }
    for (encoder, feature), pool in pools.items():
        for site in plan.sites[encoder]:
            views = [pool(data[Key(encoder, site, view)]).numpy() for view in ("plain", "mirror")]
            train, test = ((views[0][part], views[1][part]) for part in (slice(TRAIN), slice(TRAIN, None)))
            expected = orientation_accuracy(train, test)
            got = result.sel(encoder=encoder, site=site, feature=feature)
            assert float(got.accuracy) == expected
            assert (float(got.accuracy_low), float(got.accuracy_high)) == wilson(expected * TEST, TEST)
            assert got.reason == ""
    assert (result.accuracy.sel(site="block.0", feature="gap") > 0.9).all()
    assert (result.accuracy.sel(site="block.1", feature="gap") == 0.5).all()
    assert result.reason.sel(encoder="cnn", site="block.0", feature="cls") == "this site has no such feature"
    assert result.reason.sel(encoder="cnn", site="norm", feature="gap") == "this encoder has no such site"
    assert (result.attrs["n_train"], result.attrs["n_test"]) == (TRAIN, TEST)
    (figure,) = plugin.figures(result)
    assert len(figure.table) == 2 * 2 + 2
    label, number, detail = plugin.headlines(result)[0]
    assert (label, number) == ("vit", "50.0%")
    assert detail.startswith("at norm, feature cls")
    assert "most at block.0" in detail
    decoded = result.assign_coords(site=["block.0", "block.1", "decoder.block.0"])
    assert plugin.headlines(decoded)[0][2].startswith("at block.1")


def test_flaws_have_a_reason(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, views=BOTH)
    data = mirrored(plan)
    data[Key("vit", "norm", "mirror")][TRAIN + 3, 0, 0] = torch.nan
    data[Key("cnn", "block.1", "plain")][:] = 1.0
    result = computed(OrientationAnalysis(OrientationConfig(), plan), plan, data)
    vit, cnn = result.reason.sel(encoder="vit", site="norm"), result.reason.sel(encoder="cnn", site="block.1")
    assert vit.sel(feature="cls") == "1 of 24 test features is not finite (NaN or infinity)"
    assert cnn.sel(feature="gap") == "the features are the same for all training images"
    assert np.isnan(result.accuracy.sel(encoder="cnn", site="block.1")).all()


def test_no_encoder_has_the_feature(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, layers={"cnn": LAYERS["cnn"]}, views=BOTH)
    with pytest.raises(InputError, match="None of these sites has the pooling"):
        OrientationAnalysis(OrientationConfig(features=("cls",)), plan)


def test_a_mirror_symmetric_encoder_is_invariant() -> None:
    """Ramps from left to right are told by an encoder of pixels, and not by one that adds the mirror image first."""

    class Encoder(torch.nn.Module):
        def __init__(self, symmetric: bool) -> None:
            super().__init__()
            self.symmetric, self.pixels = symmetric, torch.nn.Flatten()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.pixels(x + x.flip(-1) if self.symmetric else x)
            return found

    random = np.random.default_rng(0)
    ramps = np.linspace(0, 100, 8)[:, None] + random.integers(0, 100, (64, 8, 8, 3))
    images = sl.load_images(ramps.astype(np.uint8), labels=np.arange(64) % 2)
    encoders = {
        name: build_encoder(Encoder(symmetric), reference=name, preprocess=Preprocess(size=(8, 8)))
        for name, symmetric in (("pixels", False), ("symmetric", True))
    }
    accuracy = measured("orientation", encoders, images).accuracy.sel(site="pixels", feature="gap")
    assert float(accuracy.sel(encoder="pixels")) > 0.9
    assert float(accuracy.sel(encoder="symmetric")) == 0.5
