"""Accuracy under noise: paired drops, and as a stream."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from support.passes import measured
from support.plans import LAYERS, TEST, TRAIN, activations, computed, make_plan

import sightline as sl
from sightline.analyses import noise as plugin
from sightline.analyses.noise import NoiseAnalysis, NoiseConfig, accuracy_drop, views
from sightline.core.errors import InputError
from sightline.images.noise import view
from sightline.measure.estimators.intervals import wilson
from sightline.measure.plan import Key

TWO = NoiseConfig(frequencies=(0.2, 0.8))
VIEWS = {split: views(TWO, split) for split in ("train", "test")}
HEAD = {"vit": {**LAYERS["vit"], "head.0": (3,)}, "cnn": LAYERS["cnn"]}


def test_views_name_what_they_show() -> None:
    assert views(TWO, "train") == ("plain",)
    assert views(TWO, "test") == ("plain", "noise:0.2", "noise:0.8")
    assert views(NoiseConfig(frequencies=(0.5,), strength=0.2), "test") == ("plain", "noise:0.5,0.2")
    assert views(NoiseConfig(frequencies=(0.2,), kind="sign"), "test") == ("plain", "noise:0.2,0.1,sign")


def test_drop_is_paired() -> None:
    random = np.random.default_rng(0)
    truth = random.integers(0, 3, 400)
    plain = np.where(random.random(400) < 0.8, truth, 3)
    noisy = np.where(random.random(400) < 0.9, plain, 3)
    drop, low, high = accuracy_drop(plain, noisy, truth)
    assert drop == pytest.approx((plain == truth).mean() - (noisy == truth).mean())
    lost = (plain == truth).astype(float) - (noisy == truth)
    again = [lost[rows].mean() for rows in random.integers(0, 400, (2000, 400))]
    np.testing.assert_allclose([low, high], np.percentile(again, [2.5, 97.5]), atol=0.005)


def noisy_activations(plan: Any) -> dict[Key, torch.Tensor]:
    """The second band destroys what the first one leaves."""
    data = activations(plan)
    random = torch.Generator().manual_seed(1)
    for key, values in list(data.items()):
        data[key._replace(view="noise:0.2")] = values + 0.1
        data[key._replace(view="noise:0.8")] = torch.randn(values.shape, generator=random)
    return data


def test_streamed_is_whole(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, layers=HEAD, views=VIEWS)
    data = noisy_activations(plan)
    result = computed(NoiseAnalysis(TWO, plan), plan, data)
    truth = plan.images.labels[TRAIN:]
    told = {name: data[Key("vit", "head.0", name)][TRAIN:].argmax(1).numpy() for name in VIEWS["test"]}
    assert result.frequency.values.tolist() == [0.2, 0.8]
    vit = result.sel(encoder="vit")
    right = int((told["plain"] == truth).sum())
    assert float(vit.test_accuracy) == right / TEST
    for f in (0.2, 0.8):
        row = vit.sel(frequency=f)
        right = int((told[f"noise:{f}"] == truth).sum())
        assert float(row.accuracy) == right / TEST
        assert (float(row.accuracy_low), float(row.accuracy_high)) == wilson(right, TEST)
        expected = accuracy_drop(told["plain"], told[f"noise:{f}"], truth)
        assert (float(row["drop"]), float(row.drop_low), float(row.drop_high)) == expected
    assert (result["drop"].sel(frequency=0.8) > 0.2).all()
    assert (abs(result["drop"].sel(frequency=0.2)) < 0.2).all()
    assert result.classifier.values.tolist() == ["own head", "ridge probe"]
    (figure,) = plugin.figures(result)
    assert len(figure.table) == 4
    _, number, detail = plugin.headlines(result)[0]
    assert number == f"−{100 * float(result['drop'][0].max()):.1f} points"
    assert detail.startswith("at most, with noise of 0.8π")


def test_flaws_have_a_reason(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, layers=HEAD, views=VIEWS)
    data = noisy_activations(plan)
    data[Key("cnn", "block.1", "noise:0.8")][TRAIN] = torch.inf
    data[Key("vit", "head.0", "plain")][:] = 0.0
    result = computed(NoiseAnalysis(TWO, plan), plan, data)
    flaw = "1 of 24 test features is not finite (NaN or infinity)"
    assert result.reason.sel(encoder="cnn").values.tolist() == ["", flaw]
    assert np.isnan(result["drop"].sel(encoder="cnn")).values.tolist() == [False, True]
    assert (result.reason.sel(encoder="vit") == "the features are the same for all training images").all()
    assert np.isnan(result.test_accuracy.sel(encoder="vit"))
    assert "Accuracy without noise: cnn: " in plugin.figures(result)[0].caption
    assert [line[0] for line in plugin.headlines(result)] == ["cnn"]


def test_in_the_pass_noise_is_added_to_the_images(small: str) -> None:
    encoder = sl.load_encoder(small)
    images = sl.load_images("shapes?size=32", limit=32)
    result, other = (measured("noise", {"a": encoder}, images, TWO, batch=batch) for batch in (8, 20))
    xr.testing.assert_allclose(result, other)
    where = images.indices("test")[:4]
    pixels = encoder.preprocess([item.image for item in images.source.read(where.tolist()) if item.image is not None])
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (encoder.preprocess.mean, encoder.preprocess.std))
    noisy = view("noise:0.2", pixels * std + mean, images.ids[where].tolist())
    assert (noisy - (pixels * std + mean)).square().mean().sqrt() == pytest.approx(0.1, rel=1e-3)


def test_images_without_such_a_frequency(small: str) -> None:
    tiny = small.replace("size=32&patch_size=8", "size=8&patch_size=4")
    with pytest.raises(InputError, match=r"sees 8 × 8 pixels, which have no frequency near 0\.1π"):
        measured("noise", {"a": tiny}, sl.load_images("shapes?size=32", limit=32))
