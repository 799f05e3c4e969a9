"""A step with one more encoder trains for that one alone; what other steps have trained is taken over."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sightline as sl
from sightline.core.errors import InputError
from sightline.studies.commands import COMMANDS, Machine
from sightline.studies.costs import _made
from sightline.studies.folders import made_before, place
from sightline.studies.running import perform, ticket
from sightline.studies.steps import Step
from sightline.studies.study import make_study
from sightline.studies.worker import work_off

TINY = "timm:vit_tiny_patch16_224@random?size=16&patch_size=4&depth=2&embed_dim=16&num_heads=2&num_classes=0"
STUDY = """
images = "shapes?size=16&train=32&val=0&test=16"
[step.again]
command = "reinit {encoders}"
counts = [1]
ends = {ends}
set = {{ epochs = 1, batch = 16, mixup = 0.0, cutmix = 0.0, lr = {lr} }}
"""
ONE = Step("x", "detect", {"a": "zoo:a", "b": "zoo:b"}, "shapes", {"set": {"lr": 1.0}})


def written(folder: Path, step: Step, key: str) -> Path:
    """As a step leaves it beside its folder."""
    placed = place(step, key, folder)
    about = {"key": key, "name": step.name, "command": step.command, "encoders": dict(step.encoders)}
    folder.mkdir(exist_ok=True)
    placed.beside("json").write_text(json.dumps({**about, "images": step.images, "options": dict(step.options)}))
    return placed.folder


@pytest.mark.unit
def test_steps_that_trained_the_same_upon_some_encoders(tmp_path):
    keys = {}

    def earlier(name: str, **change) -> Path:
        step = replace(ONE, name=name, **change)
        keys[name] = f"{name:0<64}"
        return written(tmp_path / "steps", step, keys[name])

    two = earlier("two", encoders={"a": "zoo:a", "c": "zoo:c"})
    earlier("other weights", encoders={"a": "zoo:other"})
    earlier("other images", images="shapes:scenes")
    earlier("other settings", options={"set": {"lr": 2.0}})
    earlier("another command", command="segment")
    (tmp_path / "steps" / "damaged-00000000.json").write_text('{"command": "detect", "encoders": 3}')
    found = made_before(ONE, "mine", tmp_path / "steps", lambda step: keys[step.name])
    assert found == {"a": (two,)}
    # Its weights or images have changed since, or it cannot be looked at any more.
    assert made_before(ONE, "mine", tmp_path / "steps", lambda step: "changed") == {}

    def gone(step: Step) -> str:
        raise InputError("It is gone")

    assert made_before(ONE, "mine", tmp_path / "steps", gone) == {}
    assert made_before(ONE, keys["two"], tmp_path / "steps", lambda step: keys[step.name]) == {}  # itself


@pytest.mark.unit
def test_what_trains_upon_each_encoder_apart():
    assert {name for name, command in COMMANDS.items() if command.apart} == {"detect", "reinit", "segment"}


def study(folder: Path, encoders: dict[str, str], ends: str = '["first", "last"]', lr: float = 1e-3) -> sl.Study:
    text = STUDY.format(encoders=" ".join(f"{name}={of}" for name, of in encoders.items()), ends=ends, lr=lr)
    (folder / "study.toml").write_text(text)
    return make_study(folder / "study.toml", out=folder / "study", steps_folder=folder / "steps")


def test_one_more_encoder_trains_for_itself_alone(tmp_path):
    encoders = {"a": TINY, "b": f"{TINY}&seed=1"}
    quiet = Machine("cpu", 0, show_progress=False)
    (before,) = study(tmp_path, encoders).steps
    assert before.reuse == {}
    assert perform(before, {}, quiet).state == "done"
    (after,) = study(tmp_path, encoders | {"c": f"{TINY}&seed=2"}, ends='["first"]').steps
    assert after.key != before.key
    assert after.reuse == {"a": (before.folder,), "b": (before.folder,)}
    assert [len(_made(after, name)) for name in "abc"] == [3, 3, 0]
    (other,) = study(tmp_path, encoders, lr=2e-3).steps
    assert other.reuse == {}
    assert work_off(json.loads(json.dumps(ticket(after, {}, quiet))))["state"] == "done"  # as another process does it

    def weights(folder: Path, name: str) -> Path:
        return next((folder / "trainings" / name / "none" / "checkpoints").rglob("encoder.safetensors"))

    for name in "ab":
        assert weights(after.folder, name).samefile(weights(before.folder, name))
        assert not (after.folder / "trainings" / name / "last-1").exists()  # nobody asked for it
    one, two = (sl.open_run(placed.folder)["reinit"].sel(end="first") for placed in (before, after))
    assert two.encoder.values.tolist() == ["a", "b", "c"]
    for number in ("accuracy", "accuracy_drop", "accuracy_drop_low"):
        np.testing.assert_array_equal(one[number], two[number].sel(encoder=["a", "b"]))
    assert np.isfinite(two.accuracy).all()
