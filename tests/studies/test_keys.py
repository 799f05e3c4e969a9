"""Keys of steps: what leaves them as they are, and what changes them."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.references import SMALL

import sightline as sl
from sightline.studies.keys import Contents, keys_of
from sightline.studies.steps import Step

pytestmark = pytest.mark.unit

IMAGES = "shapes?size=32&train=16&val=0&test=8"
TRAIN = Step("mae", "pretrain", {}, IMAGES, {"objective": "mae", "set": {"epochs": 1, "depth": 2}})
TUNE = Step("tuned", "finetune", {"mae": "step:mae"}, IMAGES, {"set": {"epochs": 1, "lr": 1e-3}})
PASS = Step("cka", "compare", {"a": SMALL, "tuned": "step:tuned"}, IMAGES, {"only": ["cka", "knn"], "limit": 8})


@pytest.fixture(scope="module")
def contents():
    return Contents()


def keys(contents: Contents, *steps: Step) -> dict[str, str]:
    return keys_of(steps or (TRAIN, TUNE, PASS), contents)


def test_they_do_not_depend_on_how_a_step_is_written(contents):
    same = {
        "order of settings": replace(TUNE, options={"set": {"lr": 1e-3, "epochs": 1}}),
        "a default written out": replace(TUNE, options={"set": {"epochs": 1, "lr": 1e-3, "keep_head": False}}),
        "its recipe by name": replace(TUNE, options={"recipe": "finetune", "set": {"epochs": 1, "lr": 1e-3}}),
        "how often it is saved": replace(TUNE, options={"set": {"epochs": 1, "lr": 1e-3, "save_minutes": 9.0}}),
        "the same images by other words": replace(TUNE, images="shapes?test=8&train=16&val=0&size=32"),
    }
    before = keys(contents)
    for what, step in same.items():
        assert keys(contents, TRAIN, step, PASS) == before, what
    renamed = keys(contents, replace(TRAIN, name="x"), replace(TUNE, name="y", encoders={"mae": "step:x"}))
    assert list(renamed.values()) == [before["mae"], before["tuned"]]


def test_a_pass_does_not_depend_on_order_and_defaults(contents):
    before = keys(contents)["cka"]
    same = {
        "order of encoders": replace(PASS, encoders=dict(reversed([*PASS.encoders.items()]))),
        "order of analyses": replace(PASS, options={"limit": 8, "only": ["knn", "cka"]}),
        "defaults": replace(PASS, options={**PASS.options, "batch": 32, "seed": 0, "set": {"knn": {"k": 20}}}),
    }
    for what, step in same.items():
        assert keys(contents, TRAIN, TUNE, step)["cka"] == before, what


@pytest.mark.parametrize(
    ("place", "step", "changed"),
    [
        ("an upstream setting", replace(TRAIN, options={"objective": "mae", "set": {"epochs": 1}}), "mae tuned cka"),
        ("upstream images", replace(TRAIN, images=f"{IMAGES}&seed=1"), "mae tuned cka"),
        ("a setting", replace(TUNE, options={"set": {"epochs": 1, "lr": 2e-3}}), "tuned cka"),
        ("an option of the encoder", replace(TUNE, encoders={"mae": "step:mae?decoder=true"}), "tuned cka"),
        ("the name in the results", replace(PASS, encoders={"b": SMALL, "tuned": "step:tuned"}), "cka"),
        ("weights", replace(PASS, encoders={"a": f"{SMALL}&seed=1", "tuned": "step:tuned"}), "cka"),
        ("the batch", replace(PASS, options={**PASS.options, "batch": 16}), "cka"),
        ("another analysis", replace(PASS, options={**PASS.options, "only": ["cka"]}), "cka"),
        ("its settings", replace(PASS, options={**PASS.options, "set": {"knn": {"k": 5}}}), "cka"),
        ("fewer images", replace(PASS, options={**PASS.options, "limit": 4}), "cka"),
    ],
)
def test_whatever_decides_a_number_changes_them(contents, place, step, changed):
    before = keys(contents)
    after = keys(contents, *(step if one.name == step.name else one for one in (TRAIN, TUNE, PASS)))
    assert {name for name in before if before[name] != after[name]} == set(changed.split())


def test_they_follow_the_contents_of_files_and_not_their_place(tmp_path):
    def folder(name: str, last: int) -> str:
        for split, label, number in [(s, c, n) for s in ("train", "test") for c in "ab" for n in range(2)]:
            path = tmp_path / name / split / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            value = last if (split, label, number) == ("test", "b", 1) else number
            Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(path)
        return f"folder:{tmp_path / name}"

    def key(images: str) -> str:
        step = replace(PASS, encoders={"a": SMALL}, images=images, options={**PASS.options, "only": ["knn"]})
        return keys(Contents(), step)["cka"]

    one = key(folder("one", 7))
    assert key(folder("moved", 7)) == one
    assert key(folder("other", 8)) != one  # a single pixel value of a single image
    for name in ("one", "other"):
        (tmp_path / name / "test").rename(tmp_path / name / "val")
    assert key(f"folder:{tmp_path / 'one'}") != key(f"folder:{tmp_path / 'other'}")  # `val` stands in for `test`


def test_they_follow_the_weights_of_an_encoder_and_not_its_place(tmp_path):
    where = [shutil.copytree(Path(sl.__file__).parent / "zoo" / "mae", tmp_path / name) for name in ("one", "moved")]
    found = {keys(Contents(), replace(PASS, encoders={"a": f"run:{folder}"}))["cka"] for folder in where}
    assert len(found) == 1
    option = keys(Contents(), replace(PASS, encoders={"a": f"run:{where[0]}?decoder=true"}))["cka"]
    assert option not in found


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (replace(PASS, encoders={"a": "timm:nothing"}), "The step 'cka': timm has no model 'nothing'"),
        (replace(PASS, encoders={"a": "zoo:nobody"}), "The step 'cka': The zoo has no encoder 'nobody'"),
        (replace(PASS, options={"only": ["ckaa"]}), "There is no analysis 'ckaa'"),
        (replace(PASS, options={"onyl": ["cka"]}), "compare has no setting 'onyl'; did you mean 'only'"),
        (replace(PASS, options={"set": {"probes": {}}}), "sets probes, which is not among its analyses"),
        (replace(PASS, options={"set": {"knn": {"q": 1}}}), "There is no setting 'q' of knn"),
        (replace(TRAIN, options={"objective": "mae", "set": {"depht": 2}}), "There is no setting 'depht' of mae"),
        (replace(TRAIN, options={}), "pre-trains with no objective"),
        (replace(TRAIN, encoders={"a": SMALL}), "pretrain takes no encoder, not 1"),
        (Step("two", "finetune", {"a": SMALL, "b": SMALL}), "finetune takes one encoder, not 2"),
    ],
)
def test_a_step_that_cannot_be_is_one_sentence(contents, step, sentence):
    others = [one for one in (TRAIN, TUNE) if one.name != step.name and step.name == "cka"]
    with pytest.raises(sl.InputError) as error:
        keys(contents, *others, step)
    assert sentence in str(error.value)


def test_an_encoder_of_a_step_that_trains_none(contents):
    two = Step("again", "compare", {"x": "step:cka"}, IMAGES, {"only": ["cka"]})
    with pytest.raises(sl.InputError, match="wants an encoder of the step 'cka', which is a compare and leaves none"):
        keys(contents, TRAIN, TUNE, PASS, two)
