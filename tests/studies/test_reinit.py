"""The study of re-initialised blocks: its numbers, what is trained and what is not trained again, its page."""

import importlib
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from sightline import Encoder, Run, load_encoder, load_images, open_run
from sightline.api import reinit
from sightline.cli.application import app
from sightline.core.errors import InputError
from sightline.core.results import ABSENT
from sightline.core.stopping import Stopped
from sightline.measure.estimators.intervals import difference_of, wilson
from sightline.studies.reinit import figures, headlines
from sightline.training.launch import Launch
from sightline.training.recipe import read_recipe
from sightline.transfer.trainings import NOT_YET

MODULE = importlib.import_module("sightline.studies.reinit")
TINY = "timm:vit_tiny_patch16_224@random?size=16&patch_size=4&depth=3&embed_dim=16&num_heads=2&num_classes=0"
SHAPES = "shapes?size=16&train=64&val=16&test=48"
SETTINGS: dict[str, Any] = {"epochs": 3, "batch": 16, "lr": 2e-2, "mixup": 0.0, "cutmix": 0.0, "log_every": 100}


def study(out: Path, settings: Mapping[str, Any] = SETTINGS, **more: Any) -> Run:
    encoders = {"a": TINY, "b": f"{TINY}&depth=2".replace("depth=3&", "")}
    words: dict[str, Any] = {"counts": [1], "settings": settings, "workers": 0, "show_progress": False}
    return reinit(more.pop("encoders", encoders), SHAPES, out, **words | more)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study(tmp_path_factory.mktemp("reinit") / "x")


def right(folder: Path) -> np.ndarray:
    """Which test images a fine-tuned classifier gets right, all at once."""
    encoder, images = load_encoder(f"run:{folder}"), load_images(SHAPES)
    pictures = [item.image for item in images.source.read(images.indices("test").tolist())]
    with torch.inference_mode(), encoder.evaluating():
        scores = encoder(encoder.preprocess([picture for picture in pictures if picture is not None]))
    found: np.ndarray = scores.argmax(1).numpy() == images.labels_of("test")
    return found


def test_accuracies_and_drops_are_those_of_the_classifiers(run: Run) -> None:
    assert run.path is not None
    result = run["reinit"]
    assert dict(result.sizes) == {"encoder": 2, "end": 2, "n": 2}
    for name in ("a", "b"):
        base = right(run.path / "trainings" / name / "none")
        for end, n in (("first", 0), ("last", 0), ("first", 1), ("last", 1)):
            cell = result.sel(encoder=name, end=end, n=n)
            mine = right(run.path / "trainings" / name / (f"{end}-{n}" if n else "none"))
            assert float(cell.accuracy) == mine.mean()
            assert (float(cell.accuracy_low), float(cell.accuracy_high)) == wilson(mine.sum(), 48)
            assert float(cell.accuracy_drop) == pytest.approx(base.mean() - mine.mean(), abs=1e-12)
            ends = (float(cell.accuracy_drop_low), float(cell.accuracy_drop_high))
            assert ends == difference_of(base, mine if n else base)[1:]
    assert (result.reason == "").all()
    assert len(np.unique(result.accuracy)) > 1  # or the numbers above would say little
    assert result.attrs["test_images"] == 48


def test_differences_of_drops_have_an_interval_over_the_test_images(run: Run) -> None:
    assert run.path is not None
    found = run.contrast("reinit.accuracy_drop", {"encoder": "a"}, {"encoder": "b"}, end="first", n=1)
    lost = []
    for name in ("a", "b"):
        base, mine = (right(run.path / "trainings" / name / part) for part in ("none", "first-1"))
        lost.append(base.astype(float) - mine)
    apart = lost[0] - lost[1]  # of each image, which is a group of its own here
    assert found.value == pytest.approx(apart.mean(), abs=1e-12)
    assert found.error == pytest.approx(apart.std(ddof=1) / np.sqrt(48), rel=1e-9)


def test_each_training_has_its_setting_and_nothing_else_differs(run: Run) -> None:
    assert run.path is not None
    folders = sorted((run.path / "trainings" / "a").iterdir())
    recipes = {folder.name: read_recipe(folder / "recipe.toml") for folder in folders}
    assert {name: recipe.pop("reinit") for name, recipe in recipes.items()} == {
        "none": "",
        "first-1": "first:1",
        "last-1": "last:1",
    }
    assert recipes["none"] == recipes["first-1"] == recipes["last-1"]
    assert recipes["none"]["lr"] == SETTINGS["lr"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants that are handed to fine-tuning, which is replaced by taking those that are there."""
    asked: list[str] = []

    def already(encoder: Encoder, images: Any, out: Path, recipe: Any, settings: Any, launch: Launch) -> Encoder:
        asked.append(f"{out.parent.name} {settings['reinit']}".strip())
        assert launch.resume
        return load_encoder(f"run:{out}")

    monkeypatch.setattr(MODULE, "finetune", already)
    return asked


def test_a_finished_study_is_not_repeated(run: Run, trained: list[str]) -> None:
    assert run.path is not None
    again = study(run.path)
    assert not trained
    assert again["reinit"].identical(open_run(run.path)["reinit"])
    study(run.path, ends=["last"])  # another question, answered from what is there
    assert trained == ["a", "a last:1", "b", "b last:1"]


def test_a_stopped_study_keeps_what_it_has_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune, begun = MODULE.finetune, []

    def stopping(encoder: Encoder, images: Any, out: Path, recipe: Any, settings: Any, launch: Launch) -> Encoder:
        begun.append(settings["reinit"])
        if len(begun) == 3:
            raise Stopped(signal.SIGTERM, "Stopped and saved after step 1 of 2")
        tuned: Encoder = tune(encoder, images, out, recipe, settings, launch)
        return tuned

    brief = {**SETTINGS, "epochs": 1}
    monkeypatch.setattr(MODULE, "finetune", stopping)
    with pytest.raises(Stopped):
        study(tmp_path / "x", brief, encoders=[TINY])
    partial = open_run(tmp_path / "x")["reinit"]
    assert partial.reason.squeeze("encoder").values.tolist() == [["", ""], ["", NOT_YET]]
    assert "fingerprint" not in partial.attrs
    assert figures(partial)[0].table.drop_duplicates(["end", "n"]).shape[0] == 3
    curve = tmp_path / "x" / "trainings" / "vit_tiny_patch16_224" / "none" / "metrics.csv"
    before = curve.read_bytes()

    whole = study(tmp_path / "x", brief, encoders=[TINY])["reinit"]
    assert begun == ["", "first:1", "last:1", "", "first:1", "last:1"]
    assert curve.read_bytes() == before  # its seconds would differ if it had been trained again
    assert (whole.reason == "").all()
    np.testing.assert_array_equal(whole.accuracy_drop.sel(end="first"), partial.accuracy_drop.sel(end="first"))


def test_numbers_that_only_some_encoders_have() -> None:
    images = load_images("shapes?size=16&train=2&val=0&test=2")
    truth = images.labels_of("test")
    result = MODULE._result(
        {("a", ""): np.where([True, False], truth, truth + 1), ("a", "first:2"): truth + 1},
        dict.fromkeys("ab"),
        {"a": ["", "first:1", "first:2"], "b": ["", "first:1"]},
        images,
    )
    assert result.reason.squeeze("end").values.tolist() == [["", NOT_YET, ""], [NOT_YET, NOT_YET, ABSENT]]
    assert float(result.accuracy_drop.sel(encoder="a", end="first", n=2)) == 0.5
    assert headlines(result)[0][:2] == ("a", "+50.0%")
    assert "the first 2 blocks" in headlines(result)[0][2]
    assert len(headlines(result)) == 1


def test_default_numbers_are_powers_of_two_below_the_depth() -> None:
    encoder = load_encoder("timm:vit_tiny_patch16_224@random?embed_dim=12&depth=8&num_heads=2")
    expected = ["", "first:1", "last:1", "first:2", "last:2", "first:4", "last:4"]
    assert MODULE._variants(encoder, None, ("first", "last")) == expected
    assert MODULE._variants(encoder, [0, 8, 3], ("last",)) == ["", "last:3", "last:8"]
    assert MODULE._variants(load_encoder(TINY), None, ("first",)) == ["", "first:1", "first:2"]


def test_what_cannot_be_done_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    for words, sentence in (
        ({"counts": [4]}, r"Cannot re-initialise 4 of the 3 blocks of .*; choose one or more numbers from 1 to 3"),
        ({"counts": [-1]}, "choose one or more numbers from 1 to 3"),
        ({"counts": []}, "Cannot re-initialise none of"),
        ({"ends": ["lats"]}, "An encoder has no end 'lats'; did you mean 'last'"),
        ({"settings": {"epoch": 3}}, "There is no setting 'epoch'"),
    ):
        with pytest.raises(InputError, match=sentence) as caught:
            reinit(TINY, SHAPES, tmp_path / "x", **words)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_another_study_is_refused_unless_it_may_replace_the_old_one(run: Run, trained: list[str]) -> None:
    assert run.path is not None
    with pytest.raises(InputError, match="holds a run with other settings"):
        study(run.path, {**SETTINGS, "lr": 1.0})
    assert not trained


def test_the_command_writes_report_and_tables(tmp_path: Path) -> None:
    out, words = tmp_path / "x", ["--set", "epochs=1", "--batch", "16", "--workers", "0", "--verbose"]
    command = ["reinit", f"mine={TINY}", "--images", SHAPES, "--counts", "2", "--ends", "last", *words, "-o", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "Re-initialised blocks" in done.output
    assert "with the last 2 blocks re-initialised" in done.output
    page = (out / "report.html").read_text("utf-8")
    assert "Which blocks does fine-tuning build on" in page
    assert "All were fine-tuned with the same settings" in page
    assert {"reinit-accuracy_drop.svg", "reinit-accuracy_drop.csv", "reinit-accuracy.pdf"} <= {
        p.name for p in (out / "figures").iterdir()
    }
    assert CliRunner().invoke(app, ["export", str(out)]).exit_code == 0
    table = pd.read_csv(out / "export" / "reinit.csv")
    assert table[["encoder", "end", "n"]].values.tolist() == [["mine", "last", 0], ["mine", "last", 2]]
    assert table.accuracy_drop.tolist() == open_run(out)["reinit"].accuracy_drop.values.ravel().tolist()
    wrong = CliRunner().invoke(app, [*command, "--counts", "1;2"])
    assert isinstance(wrong.exception, InputError)
    assert "such as --counts 1,2,4" in str(wrong.exception)
