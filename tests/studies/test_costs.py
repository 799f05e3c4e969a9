"""What a plan says of time and disk: of every command, by one trial for each architecture."""

from pathlib import Path
from typing import Any

import pytest
from support.references import SMALL

from sightline.studies import costs
from sightline.studies.commands import Machine
from sightline.studies.costs import StepCost, cost_of
from sightline.studies.keys import Contents
from sightline.studies.roles import Role
from sightline.studies.study import Study, make_study

IMAGES = "shapes?size=32&train=32&val=0&test=16"
SCENES = "shapes:scenes?size=32&train=32&val=0&test=16"
QUIET = Machine("cpu", 0, show_progress=False)
FEW: dict[str, dict[str, Any]] = {
    "detect": {"size": 32, "batch": 4, "epochs": 3},
    "rcdm": {"size": 16, "channels": [32, 32], "batch": 8},
    "finetune": {"batch": 8},
    "reinit": {"batch": 8},
    "segment": {"size": 32, "batch": 4},
}
ENCODERS = {"a": SMALL, "c": f"{SMALL}&seed=2"}
ROLES = {"a": Role("a", "joint-embedding", "dino"), "c": Role("c", "reconstruction", "mae")}


@pytest.fixture(autouse=True)
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial of another test is remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(*groups: str) -> Study:
    return make_study(
        "papers",
        ENCODERS,
        roles=ROLES,
        images=IMAGES,
        detection=SCENES,
        segmentation=SCENES,
        steps=groups,
        settings={group: FEW[group] for group in groups if group in FEW},
        out="x",
    )


def cost(study: Study, name: str) -> StepCost | None:
    steps = {placed.step.name: placed for placed in study.steps}
    return cost_of(steps[name], steps, Contents(), QUIET)


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("passes", "passes"),
        ("finetune", "finetune-a"),
        ("detect", "detect-frozen"),
        ("segment", "segment"),
        ("reinit", "reinit"),
        ("rcdm", "rcdm"),
    ],
)
def test_every_command_can_be_estimated(group: str, name: str) -> None:
    found = cost(planned(group), name)
    assert found is not None
    assert found.seconds > 0
    assert found.disk > 0


def test_encoders_of_one_architecture_share_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 10 images a second, 32 images 3 times and for two encoders take 19.2 s, and a tenth more to evaluate."""
    tried = []
    monkeypatch.setattr(costs._Trial, "_speed", lambda *given: tried.append(given) or 10.0)
    study = planned("detect")
    found = cost(study, "detect-frozen")
    assert found is not None
    assert found.seconds == pytest.approx(1.1 * 2 * 3 * 32 / 10)
    assert len(tried) == 1
    cost(study, "detect-tuned")
    assert len(tried) == 2


def test_rcdm_takes_pictures_besides_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations of the network, a third of a training's each, and the images and their mirror images per encoder."""
    monkeypatch.setattr(costs._Trial, "_speed", lambda *given: 10.0)
    monkeypatch.setattr(costs, "_forward", lambda *given: 0.5)
    study = planned("rcdm")
    (placed,) = [one for one in study.steps if one.step.name == "rcdm"]
    found = cost(study, "rcdm")
    assert found is not None
    training = 1.1 * 32 * 32 / 10
    drawn, gaps, views = 8 * 32 * 2 * 12, 256 * (8 + 24 * 8), 2 * (32 + 16)
    assert found.seconds == pytest.approx(training + 2 * ((drawn + gaps) / 30 + views * 0.5))
    assert list(placed.step.encoders) == ["a", "c"]
