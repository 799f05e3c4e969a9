"""A detector from any encoder: frozen or trained along, cached or not, stop and go, learned by heart."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.trainings import ENCODER as VIT
from support.trainings import TINY_DETECTOR, same_state, stopped

import sightline as sl
from sightline.core.errors import InputError
from sightline.core.folders import latest
from sightline.core.settings import to_toml
from sightline.encoders.files.weights import hash_weights
from sightline.training.launch import Launch
from sightline.training.optimization import make_optimizer
from sightline.training.recipe import make_recipe as make_pretraining
from sightline.training.recipe import read_recipe
from sightline.transfer.detection.average_precision import ap_of
from sightline.transfer.detection.detect import ALL, _prepare, make_recipe, train_detector, truth_of
from sightline.transfer.detection.objects import Detections
from sightline.transfer.finetune import make_recipe as make_finetuning

IMAGES = "shapes:scenes?size=32&train=12&val=4&test=6"
TINY: dict[str, Any] = TINY_DETECTOR | {
    "size": 32,
    "batch": 4,
    "epochs": 2,
    "lr": 1e-3,
    "log_every": 1,
    "evaluate_every": 0,
    "warmup_epochs": 0.1,
    "drop_path": 0.1,
}


def train(out: Path, what: Any = VIT, images: Any = IMAGES, resume: bool = False, **settings: Any) -> Any:
    launch = Launch(resume=resume, show_progress=False, workers=0)
    return train_detector(what, images, out, settings=TINY | settings, launch=launch)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("frozen") / "run"
    train(run, blocks="last-1,last", evaluate_every=1)
    return run


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tuned") / "run"
    train(run, frozen=False, scale=[0.6, 1.6])
    return run


def test_a_run_says_what_it_was_and_what_it_found(frozen: Path) -> None:
    about = json.loads((frozen / "run.json").read_text())
    assert about["kind"] == "detect"
    assert about["encoder"]["reference"] == VIT
    table = pd.read_csv(frozen / "metrics.csv")
    assert table.step.tolist() == [1, 2, 3, 4, 5, 6]
    parts = table[["objectness", "rpn_box_reg", "classifier", "box_reg", "mask"]].sum(axis=1)
    np.testing.assert_allclose(parts, table.loss, rtol=1e-4)
    assert table.dropna(subset="val_box_AP").step.tolist() == [3, 6]
    images = sl.load_images(IMAGES)
    found = train(frozen, resume=True, blocks="last-1,last", evaluate_every=1)  # read, not trained again
    truth = truth_of(images, "test")
    assert list(found) == list(truth)
    for kind in ("box", "mask"):
        assert about["results"][f"{kind}_AP"] == pytest.approx(ap_of(truth, found, 16, [ALL], kind)[0, 0], abs=1e-6)
    assert all(len(one.labels) <= 5 and one.masks is not None for one in found.values())
    assert make_recipe(read_recipe(frozen / "recipe.toml")).config.blocks == "last-1,last"


def test_a_frozen_encoder_keeps_its_weights(tmp_path: Path) -> None:
    encoder = sl.load_encoder(VIT)
    before = encoder.weights
    train(tmp_path / "run", encoder, epochs=0.5)
    assert hash_weights(encoder.module) == before
    folder = latest(tmp_path / "run")
    assert folder is not None
    assert not [name for name in load_file(folder / "training.safetensors") if name.startswith("features")]
    assert not (folder / "encoder.safetensors").exists()


def test_cached_maps_are_computed_ones(frozen: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", blocks="last-1,last", evaluate_every=1, cache_gb=0.0)
    cached, computed = (pd.read_csv(run / "metrics.csv") for run in (frozen, tmp_path / "run"))
    np.testing.assert_allclose(cached.loss, computed.loss, rtol=2e-3)
    np.testing.assert_allclose(cached.loss[0], computed.loss[0], rtol=1e-4)


@pytest.mark.parametrize("name", ["frozen", "tuned"])
def test_a_stopped_training_goes_on_bit_exactly(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Path = request.getfixturevalue(name)
    settings = read_recipe(whole / "recipe.toml")
    run, told = tmp_path / "run", {key: value for key, value in settings.items() if key not in ("objective", "encoder")}
    with stopped(2, 6, monkeypatch):
        train(run, **told)
    assert not (run / "detections.json").exists()
    train_detector(out=run, launch=Launch(resume=True, show_progress=False, workers=0))
    assert same_state(whole, run)
    assert (run / "detections.json").read_bytes() == (whole / "detections.json").read_bytes()


def test_an_encoder_that_is_trained_along_can_be_loaded(tuned: Path) -> None:
    trained, begun = sl.load_encoder(f"run:{tuned}"), sl.load_encoder(VIT)
    assert trained.weights != begun.weights
    state, before = trained.module.state_dict(), begun.module.state_dict()
    assert state.keys() == before.keys()
    assert torch.equal(state["norm.weight"], before["norm.weight"])  # behind the maps
    assert not torch.equal(state["blocks.0.attn.qkv.weight"], before["blocks.0.attn.qkv.weight"])


def test_learning_rates_fall_with_the_layers() -> None:
    recipe = make_recipe(TINY | {"encoder": VIT, "frozen": False, "layer_decay": 0.5, "drop_path": 0.0})
    parts = _prepare(recipe, sl.load_encoder(VIT), sl.load_images(IMAGES), Launch(show_progress=False))
    scales = parts.objective.lr_scales()
    names = {"pos_embed": 1 / 8, "blocks.0.mlp.fc1.weight": 1 / 4, "blocks.1.mlp.fc1.weight": 1 / 2}
    assert {name: scales[f"features.module.{name}"] for name in names} == names
    groups = make_optimizer(parts.objective, recipe.optimization, scales).param_groups
    assert {group["scale"] for group in groups} == {1 / 8, 1 / 4, 1 / 2, 1.0}


def test_one_image_is_learned_by_heart(tmp_path: Path) -> None:
    scenes = sl.load_images("shapes:scenes?size=48&train=4&val=0&test=0")
    one = dataclasses.replace(scenes, splits={"train": np.array([3]), "test": np.array([3, 3, 3])})
    heads = {"channels": 32, "box_width": 64, "mask_size": 14, "proposals": 50, "regions": 32, "detections": 20}
    steps = {"size": 48, "batch": 1, "epochs": 300, "lr": 5e-3, "warmup_epochs": 5, "log_every": 50}
    found = train(tmp_path / "run", f"{VIT}&embed_dim=32".replace("embed_dim=16&", ""), one, **steps, **heads)
    truth = truth_of(one, "test")
    assert ap_of(truth, found, 16, [ALL], "box")[1, 0] > 0.9
    assert ap_of(truth, found, 16, [ALL], "mask")[1, 0] > 0.9


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        (VIT, {"masks": False, "frozen": False, "drop_path": 0.0}),
        ("timm:resnet10t@random?size=32", {"frozen": False, "drop_path": 0.0}),
        (f"{VIT}&patch_size=14".replace("patch_size=8&", "").replace("size=16", "size=28"), {}),
    ],
)
def test_boxes_alone_and_other_encoders(what: str, settings: dict[str, Any], tmp_path: Path) -> None:
    found = train(tmp_path / "run", what, epochs=0.4, **settings)
    assert len(found) == 6
    for one in found.values():
        assert (one.masks is None) == (settings.get("masks") is False)
        assert one.size == (32, 32)
        assert ((one.boxes >= 0) & (one.boxes <= 32)).all()


def test_images_of_any_shape_are_found_in_their_own_pixels(tmp_path: Path) -> None:
    """Wide pictures with one square each: what is found lies within the picture."""
    rows, images = [], []
    for number in range(8):
        pixels = np.full((20, 50, 3), 90, np.uint8)
        pixels[5:15, 4 * number : 4 * number + 10] = 250
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 50, "height": 20})
        polygon = [4 * number, 5, 4 * number + 10, 5, 4 * number + 10, 15, 4 * number, 15]
        place = {"bbox": [4 * number, 5, 10, 10], "area": 100, "segmentation": [polygon]}
        rows.append({"id": number + 1, "image_id": number, "category_id": 1, **place})
    file = tmp_path / "squares.json"
    file.write_text(json.dumps({"images": images, "annotations": rows, "categories": [{"id": 1, "name": "square"}]}))
    found: dict[str, Detections] = train(tmp_path / "run", VIT, f"coco:{file}", epochs=1)
    assert len(found) == 4
    for one in found.values():
        assert one.size == (20, 50)
        assert (one.boxes <= [50, 20, 50, 20]).all()
        assert all(mask["size"] == [20, 50] for mask in one.masks or [])


def test_recipes_know_their_commands() -> None:
    assert make_recipe(read_recipe("detect")).optimization.lr == 1e-3
    published = make_recipe(read_recipe("detect_vitdet"))
    assert (published.config.scale, published.config.frozen) == ((0.1, 2.0), False)
    assert make_recipe({**published.values()}) == published
    assert "strides" in to_toml(published.values())
    with pytest.raises(InputError, match="for fine-tuning, not for detection; use it with `sightline finetune`"):
        make_recipe(read_recipe("finetune"))
    with pytest.raises(InputError, match="for detection, not for fine-tuning; use it with `sightline detect`"):
        make_finetuning(read_recipe("detect"))
    with pytest.raises(InputError, match="recipe is for detection, not for pre-training"):
        make_pretraining("detect", {})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"what": None}, "Name an encoder for detection, such as `sightline detect "),
        ({"images": "shapes?size=32&train=0&test=8"}, "has no split 'train'"),
        ({"blocks": "last-7"}, "'last-7' is not a block"),
        ({"batch": 64}, "has 12 images to train on, fewer than one batch of 64"),
        ({"areas": [3.0]}, "two sides in pixels are expected"),
        ({"scale": [2.0, 1.0]}, "fit is a range"),
        ({"layer_decay": 0.0}, "layer_decay is 0.0"),
        ({"what": torch.nn.Conv2d(3, 4, 1), "frozen": False}, "no grid of patches"),
    ],
)
def test_mistakes_are_sentences_before_anything_is_written(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    what = settings.pop("what", VIT)
    if isinstance(what, torch.nn.Module):
        what = sl.load_encoder(what)
        settings["frozen"] = True
    with pytest.raises(InputError, match=sentence):
        train(tmp_path / "run", what, settings.pop("images", IMAGES), **settings)
    assert not (tmp_path / "run").exists()
