"""Shape bias: shares by hand, and as a stream over cue-conflict images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.plans import LAYERS, TEST, TRAIN, activations, computed, make_plan

import sightline as sl
from sightline.analyses import shape_bias as plugin
from sightline.analyses.shape_bias import ShapeBiasAnalysis, ShapeBiasConfig, shape_bias
from sightline.core.errors import InputError
from sightline.images.sets import join
from sightline.measure.estimators.intervals import wilson
from sightline.measure.plan import Key

SPLITS = {"train": ("plain",), "conflict": ("plain",)}
LABELS = np.concatenate([np.arange(TRAIN) % 4, np.arange(TEST) % 3])  # no conflict image has the shape of class 3
TEXTURE = np.concatenate([np.full(TRAIN, -1), (np.arange(TEST) + 1 + np.arange(TEST) // 12) % 4])
HEAD = {"vit": {**LAYERS["vit"], "head.0": (4,)}, "cnn": LAYERS["cnn"]}


def plan_of(cache: Path, **changes: Any) -> Any:
    given = {"labels": LABELS, "layers": HEAD, "views": SPLITS, "classes": ("a", "b", "c", "d"), "texture": TEXTURE}
    return make_plan(cache, **{**given, **changes})


def test_shares_by_hand() -> None:
    shape, texture = np.array([0, 0, 0, 1, 1, 2]), np.array([1, 1, 2, 0, 2, 2])
    assert shape_bias([0, 1, 0, 1, 0, 2], shape, texture) == 3 / 4  # the last is no conflict, the fifth is neither
    assert shape_bias(shape, shape, texture) == 1
    assert shape_bias(texture, shape, texture) == 0
    assert np.isnan(shape_bias([5, 5], [0, 1], [1, 0]))


def test_streamed_is_whole(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    data = activations(plan)
    random = np.random.default_rng(0)
    shape, texture = LABELS[TRAIN:], TEXTURE[TRAIN:]
    decided = np.where(random.random(TEST) < 0.6, shape, np.where(random.random(TEST) < 0.6, texture, 3))
    data[Key("vit", "head.0", "plain")][TRAIN:] = torch.eye(4)[torch.from_numpy(decided)]
    result = computed(ShapeBiasAnalysis(ShapeBiasConfig(), plan), plan, data)
    assert result["class"].values.tolist() == ["a", "b", "c"]
    for number, name in enumerate(["a", "b", "c"]):
        of = (shape == number) & (texture != shape)
        row = result.sel(encoder="vit").sel({"class": name})
        assert float(row.shape_bias) == shape_bias(decided[of], shape[of], texture[of])
        right, other = int((decided == shape)[of].sum()), int((decided == texture)[of].sum())
        assert (float(row.shape_bias_low), float(row.shape_bias_high)) == wilson(right, right + other)
        assert float(row.either) == (right + other) / of.sum()
    overall = result.sel(encoder="vit")
    assert float(overall.overall) == shape_bias(decided, shape, texture)
    assert overall.overall_low < overall.overall < overall.overall_high
    assert result.attrs["n_conflict"] == int((texture != shape).sum())
    assert result.classifier.values.tolist() == ["own head", "ridge probe"]
    (figure,) = plugin.figures(result)
    assert len(figure.table) == 2 * 3
    head, probe = plugin.headlines(result)
    assert (head[0], probe[0]) == ("vit", "cnn")
    for row, line, number in (
        (overall, head, "train_accuracy"),
        (result.sel(encoder="cnn"), probe, "left_out_accuracy"),
    ):
        how_well = f"by its {row.classifier.item()}, {float(row[number]):.1%} right on training images"
        assert how_well in line[2]
        assert how_well in figure.caption


def test_flaws_have_a_reason(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    data = activations(plan)
    data[Key("cnn", "block.1", "plain")][TRAIN + 2] = torch.nan
    data[Key("vit", "head.0", "plain")][TRAIN:] = torch.eye(4)[3] * (torch.from_numpy(TEXTURE[TRAIN:]) != 3)[:, None]
    result = computed(ShapeBiasAnalysis(ShapeBiasConfig(), plan), plan, data)
    assert (result.reason.sel(encoder="cnn") == "1 of 24 conflict features is not finite (NaN or infinity)").all()
    assert np.isnan(result.shape_bias.sel(encoder="cnn")).all()
    assert "cnn: 1 of 24 conflict features is not finite" in plugin.figures(result)[0].caption
    nowhere = result.sel(encoder="vit").either == 0
    assert (result.reason.sel(encoder="vit")[nowhere] == "no decision was for the shape or for the texture").all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texture": np.full(TRAIN + TEST, -1)}, "None of the cue-conflict images has a texture class"),
        ({"labels": np.full(TRAIN + TEST, -1)}, "Shape bias needs labels of at least two classes"),
    ],
)
def test_what_is_needed_is_said_before_the_pass(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ShapeBiasAnalysis(ShapeBiasConfig(), plan_of(tmp_path, **changes))


def test_images_without_texture(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, LABELS, views=SPLITS, classes=("a", "b", "c", "d"))
    with pytest.raises(InputError, match="give some such as shapes:conflict"):
        ShapeBiasAnalysis(ShapeBiasConfig(), plan)


def test_in_the_pass(small: str) -> None:
    images = join(
        sl.load_images("shapes?size=32", limit=48), "conflict", sl.load_images("shapes:conflict?size=32", limit=48)
    )
    run = sl.analyze({"a": small}, images, ["shape_bias"], workers=0, show_progress=False)
    assert run["shape_bias"].attrs["n_conflict"] == 48
    assert 0 <= float(run["shape_bias"].overall_either[0]) <= 1
