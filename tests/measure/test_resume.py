"""Runs that stop and go on, and what may not be mixed with them."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from PIL import Image
from torch import nn

import sightline as sl
from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.core.files import write_atomically
from sightline.core.stopping import Stopped
from sightline.images.views import make_view
from sightline.measure import analyze as module
from sightline.measure import resume
from sightline.measure.contract import measured_of


@pytest.fixture
def encoders(small: str) -> dict[str, sl.Encoder]:
    return {"a": sl.load_encoder(small), "b": sl.load_encoder(small + "&seed=1")}


@pytest.fixture
def images() -> sl.Images:
    return sl.load_images("shapes?size=32", limit=40)


def measure(encoders: object, images: object, names: list[str] | None, **options: object) -> sl.Run:
    return sl.analyze(encoders, images, names, batch=8, workers=0, show_progress=False, **options)


class InterruptedByTestError(Exception):
    pass


def test_an_interrupted_pass_goes_on(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = measure(encoders, images, ["cka", "knn"])
    monkeypatch.setattr(resume, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(resume, "PAUSE", 0.0)
    step, steps = module._step, []

    def failing(*arguments: object) -> None:
        if len(steps) == 4:
            raise InterruptedByTestError
        steps.append(1)
        step(*arguments)

    monkeypatch.setattr(module, "_step", failing)
    with pytest.raises(InterruptedByTestError):
        measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    assert sl.open_run(tmp_path / "x").names() == []

    counted = []
    monkeypatch.setattr(module, "_step", lambda *a: (counted.append(1), step(*a)))
    run = measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    assert len(counted) == 10 - 4  # 5 batches of 8 in each of two splits, 4 of them done before
    for name in ("cka", "knn"):
        xr.testing.assert_equal(run[name], expected[name])  # to the last bit
    assert not list((tmp_path / "x" / "cache").glob("pass-*"))


def test_finished_analyses_are_not_computed_again(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(encoders, images, ["cka"], out=tmp_path / "x")
    seen: list[list[str]] = []
    step = module._step
    monkeypatch.setattr(module, "_step", lambda b, m, *rest: (seen.append(list(m)), step(b, m, *rest)))
    run = measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    assert {name for names in seen for name in names} == {"knn"}
    assert list(run) == ["cka", "knn"]
    seen.clear()
    measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    assert seen == []


def test_a_partial_result_file_is_not_read(encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path) -> None:
    measure(encoders, images, ["cka"], out=tmp_path / "x")
    results = tmp_path / "x" / "results"
    (results / ".knn.nc.123.tmp").write_bytes((results / "cka.nc").read_bytes()[:100])
    assert sl.open_run(tmp_path / "x").names() == ["cka"]
    (results / "cka.nc").write_bytes(b"torn")
    with pytest.raises(InputError, match="delete the file to compute it again"):
        sl.open_run(tmp_path / "x")["cka"]


def test_another_run_is_not_overwritten(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, small: str
) -> None:
    measure(encoders, images, ["cka"], out=tmp_path / "x")
    before = (tmp_path / "x" / "results" / "cka.nc").read_bytes()
    other = {"a": encoders["a"], "b": sl.load_encoder(small + "&seed=2")}
    with pytest.raises(InputError, match=r"other encoders.*--overwrite"):
        measure(other, images, ["cka"], out=tmp_path / "x")
    assert (tmp_path / "x" / "results" / "cka.nc").read_bytes() == before
    measure(other, images, ["cka"], out=tmp_path / "x", overwrite=True)
    assert (tmp_path / "x" / "results" / "cka.nc").read_bytes() != before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not a run folder"):
        measure(encoders, images, ["cka"], out=tmp_path / "mine", overwrite=True)


def test_other_sites_are_another_question(encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path) -> None:
    measure(encoders, images, ["cka"], out=tmp_path / "x")
    with pytest.raises(InputError, match="other sites or settings of cka"):
        measure(encoders, images, ["cka"], out=tmp_path / "x", sites=["block.*"])
    run = measure(encoders, images, ["cka"], out=tmp_path / "x", sites=["block.*"], overwrite=True)
    assert list(run["cka"].site.values) == ["block.0", "block.1"]


def test_other_settings_of_one_analysis_replace_that_result_alone(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path
) -> None:
    config = plugins.find("analyses", "knn").Config
    measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    before = (tmp_path / "x" / "results" / "cka.nc").stat().st_mtime_ns
    with pytest.raises(InputError, match=r"settings of knn.*to replace these results, and no others"):
        measure(encoders, images, {"knn": config(k=3)}, out=tmp_path / "x")
    run = measure(encoders, images, {"knn": config(k=3)}, out=tmp_path / "x", overwrite=True)
    assert run["knn"].attrs["k"] == 3
    assert sl.open_run(tmp_path / "x")["knn"].attrs["k"] == 3
    assert (tmp_path / "x" / "results" / "cka.nc").stat().st_mtime_ns == before


def test_a_changed_module_is_not_taken_for_the_old_one(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path
) -> None:
    measure(encoders, images, ["knn"], out=tmp_path / "x")
    with torch.no_grad():
        encoders["a"].module.pos_embed.add_(1)
    with pytest.raises(InputError, match="other encoders"):
        measure(encoders, images, ["knn"], out=tmp_path / "x")


def test_an_architecture_is_more_than_its_weights(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, small: str
) -> None:
    """The number of heads is not in the weights: the old result must not answer for it."""
    first = measure({"a": encoders["a"]}, images, ["cka"], out=tmp_path / "x")["cka"]
    other = sl.load_encoder(small.replace("num_heads=3", "num_heads=2"))
    assert other.weights == encoders["a"].weights
    second = measure({"a": other}, images, ["cka"], out=tmp_path / "x", overwrite=True)["cka"]
    assert first.attrs["fingerprint"] != second.attrs["fingerprint"]
    xr.testing.assert_equal(second, measure({"a": other}, images, ["cka"])["cka"])
    assert not second.cka.equals(first.cka)
    encoders["a"].module.blocks[0].mlp.act = nn.ReLU()  # nor is the activation function, which no description tells
    third = measure({"a": encoders["a"]}, images, ["cka"], out=tmp_path / "y")["cka"]
    assert third.attrs["fingerprint"] != first.attrs["fingerprint"]


def test_replacing_a_run_keeps_no_result_and_loses_none(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path
) -> None:
    """Other training images are another comparison, though they mean nothing to CKA, which sees the test split only."""
    less = replace(images, splits={**images.splits, "train": images.splits["train"][:20]})
    measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    sl.write_report(sl.open_run(tmp_path / "x"))
    measure(encoders, less, ["cka", "knn"], out=tmp_path / "x", overwrite=True)
    run = sl.open_run(tmp_path / "x")
    assert run.names() == ["cka", "knn"]
    assert run["knn"].attrs["n_train"] == 20
    assert not (tmp_path / "x" / "report.html").exists()  # it told of the other run
    assert not (tmp_path / "x" / "figures").exists()


def test_analyses_of_different_days_tell_their_own(encoders: dict[str, sl.Encoder], tmp_path: Path) -> None:
    for name in [f"{split}/{label}/{i}.png" for split in ("train", "test") for label in "ab" for i in range(6)]:
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (len(name) * 9, 20 * int(name[-5]), 7)).save(tmp_path / "images" / name)
    (tmp_path / "images" / "train" / "a" / "0.png").write_bytes(b"no picture")
    images = sl.load_images(f"folder:{tmp_path / 'images'}")
    measure(encoders, images, ["knn"], out=tmp_path / "x")
    about = json.loads((tmp_path / "x" / "run.json").read_text())
    (tmp_path / "x" / "run.json").write_text(json.dumps({**about, "versions": {"torch": "0.1"}}))
    run = measure(encoders, images, ["cka"], out=tmp_path / "x")
    assert json.loads(run["cka"].attrs["provenance"])["versions"]["torch"] != "0.1"
    assert [name for name, _ in sl.open_run(tmp_path / "x").request["skipped"]] == ["train/a/0.png"]  # seen by k-NN


def test_ctrl_c_loses_no_batch_and_the_next_run_says_that_it_goes_on(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    expected = measure(encoders, images, ["cka", "knn"])
    step, steps = module._step, []

    def stepping(*arguments: object) -> None:
        steps.append(1)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        step(*arguments)  # what has begun is finished

    monkeypatch.setattr(module, "_step", stepping)
    with pytest.raises(Stopped, match="Stopped and saved after image 32 of 80"):
        measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    run = sl.analyze(encoders, images, ["cka", "knn"], batch=8, workers=0, out=tmp_path / "x")
    assert "Continuing the interrupted pass at image 32 of 80" in capsys.readouterr().err
    assert len(steps) == 10
    for name in ("cka", "knn"):
        xr.testing.assert_equal(run[name], expected[name])


def test_what_dies_while_results_are_written_needs_no_second_pass(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = measure(encoders, images, ["cka", "knn"])
    whole = measured_of

    def failing(metric: object) -> object:
        if (tmp_path / "x" / "results" / "cka.nc").exists():  # that of knn is still to be written
            raise InterruptedByTestError
        return whole(metric)

    monkeypatch.setattr(module, "measured_of", failing)
    with pytest.raises(InterruptedByTestError):
        measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    monkeypatch.setattr(module, "measured_of", whole)
    monkeypatch.setattr(module, "_step", None)  # no batch is forwarded again
    run = measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    for name in ("cka", "knn"):
        xr.testing.assert_equal(run[name], expected[name])


def test_sums_tell_how_far_they_are_and_are_forgotten_together(tmp_path: Path) -> None:
    """Also those that a pass with another number of processes has left."""
    sums = resume.Sums(tmp_path, {"cka": "question"}, {})
    assert sums.reached() is None
    assert sums.path is not None
    sums.path.parent.mkdir(parents=True)
    sums.save(resume.Reached(("test", "train"), 3, (("a.png", "broken"),)))
    other = resume.sums_file(tmp_path, 1, 2)
    other.write_bytes(b"left by one of two processes")
    assert sums.reached() == sums.restore() == resume.Reached(("test", "train"), 3, (("a.png", "broken"),))
    assert resume.Sums(tmp_path, {"cka": "another question"}, {}).reached() is None
    sums.forget()
    assert sums.reached() is None
    assert not other.exists()


def test_sums_that_take_long_to_save_are_saved_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sums = resume.Sums(tmp_path, {}, {})

    def slow(path: Path, content: bytes) -> None:
        write_atomically(path, content)
        now[0] += 2.0

    for write, wait in ((write_atomically, resume.SAVE_EVERY), (slow, 2.0 * resume.PAUSE)):
        monkeypatch.setattr(resume, "write_atomically", write)
        sums.save(resume.Reached(("test",)))
        saved = now[0]
        for later, due in ((wait - 1, False), (wait, True)):
            now[0] = saved + later
            assert sums.due is due


def test_complete_features_spare_the_forward_pass(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGHTLINE_CACHE", str(tmp_path / "cache"))
    first = measure(encoders, images, ["knn"], out=tmp_path / "x")
    monkeypatch.setattr(module, "_step", None)
    again = measure(encoders, images, ["knn"], out=tmp_path / "y")
    xr.testing.assert_equal(again["knn"], first["knn"])
    assert again.request["timing"]["images"] == 0


def test_features_of_another_run_spare_the_forward_passes_that_made_them(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"noise": {"frequencies": [0.3, 0.8], "classifier": "probe"}}
    expected = measure(encoders, images, settings)
    measure({"a": encoders["a"]}, images, ["knn"], out=tmp_path / "x", cache=tmp_path / "features")
    made: list[tuple[str, int]] = []

    def counting(name: str, pixels: torch.Tensor, *rest: Any) -> torch.Tensor:
        made.append((name, len(pixels)))
        return make_view(name, pixels, *rest)

    monkeypatch.setattr(module, "make_view", counting)
    run = measure(encoders, images, settings, out=tmp_path / "y", cache=tmp_path / "features")
    xr.testing.assert_equal(run["noise"], expected["noise"])
    train, test = (len(images.indices(split)) for split in ("train", "test"))
    count = {view: sum(size for name, size in made if name == view) for view in ("plain", "noise:0.3", "noise:0.8")}
    assert count == {"plain": train + test, "noise:0.3": 2 * test, "noise:0.8": 2 * test}  # plain ones of b alone
    assert not list((tmp_path / "y" / "cache").iterdir())
    made.clear()
    measure(encoders, images, {"noise": {**settings["noise"], "frequencies": [0.8]}}, cache=tmp_path / "features")
    assert not made


def test_images_that_earlier_features_lack_are_named_again(
    encoders: dict[str, sl.Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(16):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (16 * number, 0, 0)).save(folder / f"{number:02}.png")
    (tmp_path / "images" / "a" / "04.png").write_bytes(b"broken")
    monkeypatch.setenv("SIGHTLINE_CACHE", str(tmp_path / "cache"))
    images = sl.load_images(f"folder:{tmp_path / 'images'}")
    assert [pair[0] for pair in measure(encoders, images, ["knn"], out=tmp_path / "x").request["skipped"]] == [
        "a/04.png"
    ]
    monkeypatch.setattr(module, "_step", None)
    again = measure(encoders, images, ["knn"], out=tmp_path / "y")
    assert again.request["skipped"] == [["a/04.png", "it could not be read when its features were made"]]


def test_images_that_vanish_end_the_pass_with_a_sentence(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of those images that were still there would look like one of all."""
    for number in range(16):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number, 0, 0)).save(tmp_path / "images" / "ab"[number % 2] / f"{number}.png")
    images = sl.load_images(f"folder:{tmp_path / 'images'}")
    step = module._step

    def vanishing(*arguments: object) -> None:
        step(*arguments)
        if (tmp_path / "images").exists():
            (tmp_path / "images").rename(tmp_path / "elsewhere")

    monkeypatch.setattr(resume, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(resume, "PAUSE", 0.0)
    monkeypatch.setattr(module, "_step", vanishing)
    with pytest.raises(InputError, match=r"are gone since they were listed, such as .*png; bring them back"):
        sl.analyze(small, images, ["cka"], batch=4, workers=0, show_progress=False, out=tmp_path / "run")
    (tmp_path / "elsewhere").rename(tmp_path / "images")
    monkeypatch.setattr(module, "_step", step)
    expected = sl.analyze(small, images, ["cka"], batch=4, workers=0, show_progress=False)
    found = sl.analyze(small, images, ["cka"], batch=4, workers=0, show_progress=False, out=tmp_path / "run")
    xr.testing.assert_equal(found["cka"], expected["cka"])


def test_a_clock_that_is_set_back_changes_nothing(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = measure(encoders, images, ["cka"], out=tmp_path / "before")
    clock = iter(range(2_000_000_000, 0, -1_000_000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    run = measure(encoders, images, ["cka"], out=tmp_path / "x")
    xr.testing.assert_equal(run["cka"], expected["cka"])
    assert measure(encoders, images, ["cka"], out=tmp_path / "x")["cka"].attrs == run["cka"].attrs  # still there
