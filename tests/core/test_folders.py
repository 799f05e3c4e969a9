"""Only what Sightline has written is ever replaced or removed: in others' folders, behind links, after kills."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

import sightline as sl
from sightline import cli
from sightline.api import detect, finetune, pretrain, segment
from sightline.cli.application import app
from sightline.core.errors import InputError
from sightline.core.folders import KINDS, MARK
from sightline.core.settings import to_toml
from sightline.core.stopping import Stopped
from sightline.report.tables import export_run
from sightline.studies.reinit import reinit
from sightline.training.launch import Launch
from sightline.training.loop import Loop
from sightline.training.recipe import make_recipe
from sightline.transfer.detection.detect import train_detector
from sightline.transfer.segmentation.segment import train_segmenter

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=16&num_heads=2&num_classes=0"
OTHER = f"{VIT}&seed=1"
IMAGES = "shapes?size=16&train=32&val=16&test=16"
SCENES = "shapes:scenes?size=32&train=8&val=0&test=6"
BACKBONE: dict[str, Any] = {"backbone": "vit", "size": 16, "width": 16, "depth": 1, "heads": 2, "patch": 8}
BRIEF: dict[str, Any] = {"images": IMAGES, "batch": 16, "epochs": 2, "evaluate_every": 0, "log_every": 1}
SIMCLR = BACKBONE | BRIEF | {"hidden": 16, "out": 8}
BEIT = BACKBONE | BRIEF | {"tokenizer_epochs": 1, "tokenizer_width": 8, "codes": 16, "epochs": 1}
TUNED = BRIEF | {"keep": 2, "mixup": 0.0, "cutmix": 0.0}
HEAD: dict[str, Any] = {"size": 32, "batch": 4, "epochs": 1, "evaluate_every": 0, "log_every": 1}
DETECTOR = HEAD | {
    "channels": 8,
    "strides": [4, 8, 16],
    "box_convolutions": 0,
    "box_width": 16,
    "mask_convolutions": 0,
    "mask_size": 4,
    "proposals": 12,
    "regions": 8,
    "detections": 8,
}
DIFFUSION = BRIEF | {"size": 16, "channels": [32], "layers": 1, "head_width": 32, "epochs": 1, "sampling_steps": 2}
NOT_OURS = "is not a run folder: Sightline did not write what is in it; choose a new folder"
QUIET: dict[str, Any] = {"workers": 0, "show_progress": False}

Tree = dict[str, bytes | str]


def tree(folder: Path) -> Tree:
    """All files below a folder, links as what they point to; without locks, which only say who is there now."""
    paths = [path for path in folder.rglob("*") if path.name != ".lock" and (path.is_symlink() or not path.is_dir())]
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in paths
    }


def put(folder: Path, **files: str) -> Tree:
    """Someone's files; __ in a name is a folder and _ a dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tree(folder)


MINE = (
    *("notes.txt", "mine.csv", "mine.json", "mine.nc", "mine.npz", "mine.parquet", "mine.pdf", "mine.png", "mine.svg"),
    *("best.pth", "mine.safetensors", "events.out.tfevents.1.host", ".hidden"),
)


def put_mine(folder: Path) -> Tree:
    """Files of a user in a folder and in all that are in it, and in some that are not; results/mine.nc is a result."""
    everywhere = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    mine = [where / name for where in everywhere for name in MINE if (where.name, name) != ("results", "mine.nc")]
    for path in (
        *mine,
        folder / "data" / "1.png",
        folder / "checkpoints" / "7" / "state.json",
        folder / "steps" / "readme",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    return {name: content for name, content in tree(folder).items() if content == b"mine"}


def without_marks(folder: Path) -> Tree:
    return {name: content for name, content in tree(folder).items() if Path(name).name != MARK}


def train(out: Path, objective: str | None = "simclr", settings: dict[str, Any] = SIMCLR, **more: Any) -> sl.Encoder:
    return pretrain(objective, out=out, settings=settings, **QUIET, **more)


def compare(out: Path, what: str = VIT, names: tuple[str, ...] = ("cka",), **more: Any) -> sl.Run:
    run = sl.analyze({"a": what}, IMAGES, names, out=out, batch=8, **QUIET, **more)
    sl.write_report(run)
    return run


def compare_and_export(out: Path, what: str = VIT, **more: Any) -> None:
    run = compare(out, what, ("knn", "attention"), **more)
    for format in ("csv", "netcdf"):
        export_run(run, format)


def study(out: Path, what: str = VIT, reuse: Any = None, **more: Any) -> sl.Run:
    settings = BRIEF | {"epochs": 1, "mixup": 0.0, "cutmix": 0.0}
    launch = Launch(**QUIET, **more)
    return reinit({"a": what}, IMAGES, out, None, settings, launch, counts=[1], ends=["last"], reuse=reuse)


def draw(out: Path, what: str = VIT, **more: Any) -> None:
    few: dict[str, Any] = {"samples": 2, "sources": 2, "compared": 4, "transformations": ("mirror",)}
    sl.write_report(sl.rcdm({"a": what}, None, out, settings=DIFFUSION, **few, **QUIET, **more))
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(out.parent / "dog.png")
    words = ["imagine", str(out), str(out.parent / "dog.png"), "--samples", "1"]
    assert CliRunner().invoke(app, words).exit_code == 0


def look(out: Path, what: str = VIT, overwrite: bool = False) -> None:
    encoder = sl.load_encoder(what)
    sl.watch(encoder, IMAGES, out=out, limit=16, batch=8, overwrite=overwrite, show_progress=False).end(0)


def launch(overwrite: bool) -> Launch:
    return Launch(resume=False, overwrite=overwrite, workers=0, show_progress=False)


WRITERS: dict[str, Callable[..., object]] = {"training": train, "comparison": compare, "reinit": study}
# Each kind of folder: how it is made, of one encoder or another.
EVERY: dict[str, Callable[[Path, str, bool], object]] = {
    "comparison": lambda out, what, anew: compare_and_export(out, what, overwrite=anew),
    "pretrain": lambda out, what, anew: train(out, settings=SIMCLR | {"keep": 2}, overwrite=anew),
    "pretrain beit": lambda out, what, anew: train(out, "beit", BEIT, overwrite=anew),
    "finetune": lambda out, what, anew: finetune(what, IMAGES, out, settings=TUNED, overwrite=anew, **QUIET),
    "detect": lambda out, what, anew: train_detector(what, SCENES, out, settings=DETECTOR, launch=launch(anew)),
    "segment": lambda out, what, anew: train_segmenter(
        what, SCENES, out, settings=HEAD | {"frozen": False}, launch=launch(anew)
    ),
    "detection": lambda out, what, anew: sl.write_report(
        detect({"a": what}, SCENES, out, settings=DETECTOR, overwrite=anew, **QUIET)
    ),
    "segmenters": lambda out, what, anew: sl.write_report(
        segment({"a": what}, SCENES, out, settings=HEAD, overwrite=anew, **QUIET)
    ),
    "reinit": lambda out, what, anew: sl.write_report(study(out, what, overwrite=anew)),
    "rcdm": lambda out, what, anew: draw(out, what, overwrite=anew),
    "watch": lambda out, what, anew: look(out, what, overwrite=anew),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each of some kinds, to be copied."""
    folder = tmp_path_factory.mktemp("runs")
    for kind, write in WRITERS.items():
        write(folder / kind)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(runs[kind], tmp_path / "run"))


# Folders that are not Sightline's


@pytest.mark.parametrize("more", [{}, {"overwrite": True}, {"resume": True}], ids=["plainly", "overwrite", "resume"])
def test_the_folder_of_another_tool_stays_as_it_is(tmp_path: Path, more: dict[str, bool]) -> None:
    recipe = to_toml(make_recipe("simclr", SIMCLR).values())
    files = {"recipe_toml": recipe, "checkpoints__best_pth": "weights", "checkpoints__00000001__best_pth": "weights"}
    before = put(
        tmp_path, **files, tensorboard__events_out_tfevents_1_host="curve", steps__00000002__model_pth="weights"
    )
    assert len(before) == 5
    for write in (
        lambda: train(tmp_path, None, {}, recipe=tmp_path / "recipe.toml", **more),
        lambda: finetune(VIT, IMAGES, tmp_path, settings=TUNED, **QUIET, **more),
    ):
        with pytest.raises(InputError, match=NOT_OURS):
            write()
        assert tree(tmp_path) == before
    assert not (tmp_path / ".lock").exists()


def test_the_command_refuses_the_folder_of_another_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = put(tmp_path, recipe_toml='objective = "simclr"', checkpoints__best_pth="weights")
    for more in ([], ["--overwrite"]):
        words = ["sightline", "pretrain", "--recipe", str(tmp_path / "recipe.toml"), "-o", str(tmp_path), *more]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        assert NOT_OURS in " ".join(capsys.readouterr().err.split())
        assert tree(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "about",
    [
        "{}",
        "[1]",
        "not JSON",
        '{"kind": "pretrain", "recipe": {}, "versions": {"sightline": "1"}}',
        '{"encoders": [], "images": {}, "settings": {}, "analyses": {}, "versions": {"torch": "2"}, "date": "today"}',
    ],
)
def test_a_run_json_alone_makes_no_run(tmp_path: Path, about: str, overwrite: bool) -> None:
    files = {"results__climate_nc": "degrees", "figures__fig1_png": "picture", "report_html": "page"}
    before = put(tmp_path, run_json=about, recipe_toml="", latest_json="{}", metrics_csv="", **files)
    for write in WRITERS.values():
        with pytest.raises(InputError, match=NOT_OURS):
            write(tmp_path, overwrite=overwrite)
        assert tree(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("kind", "writer"), [(kind, writer) for kind in WRITERS for writer in WRITERS if kind != writer]
)
def test_runs_of_two_kinds_are_not_mixed(
    kind: str, writer: str, overwrite: bool, copy: Callable[[str], Path], runs: dict[str, Path]
) -> None:
    out = copy(kind)
    words = f"holds {KINDS[kind]}, not {KINDS[writer]}; choose another folder"
    with pytest.raises(InputError, match=words):
        WRITERS[writer](out, overwrite=overwrite)
    assert tree(out) == tree(runs[kind])


# Sightline's own


def of_ours(folder: Path) -> set[str]:
    """All files but what says what the folder is, and the cache."""
    return {name for name in without_marks(folder) if not name.startswith("cache/")}


@pytest.mark.parametrize("kind", list(EVERY))
def test_starting_over_leaves_what_is_yours_and_removes_what_is_not(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    EVERY[kind](out, VIT, False)
    old = {name: (out / name).stat().st_mtime_ns for name in of_ours(out)}
    assert "run.json" in old
    mine = put_mine(out)
    folders = [path for path in out.rglob("*") if path.is_dir() and path.name in ("checkpoints", "results")]
    for where in (out, *folders):
        (where / ".run.json.999999-0123abcd.tmp").write_text("what a kill has left")
        (where / ".00000009.999999-0123abcd.tmp").mkdir()
        (where / ".00000009.999999-0123abcd.tmp" / "state.json").touch()
    capsys.readouterr()
    EVERY[kind](out, OTHER, True)
    new = tree(out)
    assert {name: new[name] for name in mine} == mine
    assert not [name for name in old if name in new and (out / name).stat().st_mtime_ns == old[name]]
    assert not [name for name in new if name.endswith(".tmp") or ".tmp/" in name]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Left in")]
    assert line.startswith(f"Left in {out}, since Sightline did not write it: .hidden, best.pth, checkpoints/")


def test_without_files_of_yours_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", settings=SIMCLR | {"keep": 2})
    assert {"00000000", "00000004"} <= {path.name for path in (tmp_path / "run" / "steps").iterdir()}
    train(tmp_path / "run", settings=SIMCLR | {"epochs": 1}, overwrite=True)
    assert not (tmp_path / "run" / "steps").exists()
    for part in ("checkpoints", "tensorboard"):
        assert len(list((tmp_path / "run" / part).iterdir())) == 1
    assert "Left in" not in capsys.readouterr().err


def test_what_a_training_needs_first_is_a_part_of_it(tmp_path: Path) -> None:
    train(tmp_path / "run", "beit", BEIT)
    for name in ("latest.json", "checkpoints", "tokenizer/latest.json"):  # stopped while the tokenizer was trained
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    train(tmp_path / "run", "beit", BEIT, resume=True)
    assert [path.name for path in (tmp_path / "run" / "tokenizer" / "checkpoints").iterdir()] == ["00000002"]
    train(tmp_path / "run", settings=SIMCLR, overwrite=True)
    assert not (tmp_path / "run" / "tokenizer").exists()


def test_another_run_inside_a_run_is_not_a_part_of_it(copy: Callable[[str], Path], runs: dict[str, Path]) -> None:
    out = copy("reinit")
    places = (out / "mine", out / "trainings" / "mine", out / "figures" / "mine")
    for place in places:
        shutil.copytree(runs["training"], place)
    study(out, OTHER, overwrite=True)
    for place in places:
        assert tree(place) == tree(runs["training"])


def test_exports_replace_exports_only(copy: Callable[[str], Path], tmp_path: Path) -> None:
    run = sl.open_run(copy("comparison"))
    mine = put(tmp_path / "tables", thesis_tex="years of work")
    for format in ("csv", "netcdf", "csv"):
        written = export_run(run, format, tmp_path / "tables")
        inside = export_run(run, format)
    assert all(path.is_file() for path in (*written, *inside))
    assert mine.items() <= tree(tmp_path / "tables").items()
    before = put(tmp_path / "others", cka_csv="mine")
    for _ in range(2):
        with pytest.raises(InputError, match=r"cka.csv' already exists, and Sightline did not write it"):
            export_run(run, "csv", tmp_path / "others")
        assert tree(tmp_path / "others") == before
    assert run.path is not None
    with pytest.raises(InputError, match="holds a comparison, not exported tables"):
        export_run(run, "csv", run.path)


# Links


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("comparison", "results"),
        ("comparison", "figures"),
        ("comparison", "report.html"),
        ("training", "checkpoints"),
        ("training", "tensorboard"),
        ("training", "latest.json"),
        ("training", ".lock"),
        ("reinit", "trainings"),
    ],
)
def test_links_are_not_followed(kind: str, part: str, copy: Callable[[str], Path], tmp_path: Path) -> None:
    out = copy(kind)
    shutil.move(out / part, tmp_path / "elsewhere")
    (out / part).symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    with pytest.raises(InputError, match=rf"{part}' is a link, and Sightline does not follow links inside a run"):
        WRITERS[kind](out, **({} if kind == "training" else {"what": OTHER}), overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("part", ["checkpoints", "tensorboard", "metrics.csv"])
def test_a_training_does_not_go_on_behind_a_link(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_told_to_stop", lambda _: signal.SIGTERM)
        with pytest.raises(Stopped):
            train(tmp_path / "run")
    shutil.move(tmp_path / "run" / part, tmp_path / "elsewhere")
    (tmp_path / "run" / part).symlink_to(tmp_path / "elsewhere")
    there = tmp_path / "elsewhere"
    before = tree(there) if there.is_dir() else there.read_bytes()
    sl.load_encoder(f"run:{tmp_path / 'run'}")  # looking is free
    with pytest.raises(InputError, match="does not follow links"):
        train(tmp_path / "run", resume=True)
    assert (tree(there) if there.is_dir() else there.read_bytes()) == before


def test_a_run_folder_may_itself_be_a_link(copy: Callable[[str], Path], tmp_path: Path) -> None:
    out = copy("comparison")
    (tmp_path / "linked").symlink_to(out)
    compare(tmp_path / "linked", OTHER, overwrite=True)
    assert sl.open_run(out).request["encoders"][0]["reference"] == OTHER
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=NOT_OURS):
        compare(tmp_path / "dangling", overwrite=True)
    assert not (tmp_path / "nowhere").exists()


# Kills and refusals of the system


KILLED = """
import json, os, shutil, sys
from pathlib import Path
from sightline.core.files import replacing_folder, write_atomically
from sightline.core.folders import MARK, begin, remove_checkpoints

out = Path(sys.argv[1])
event = "events.out.tfevents.0.sightline"

def work(text):
    begin(out, "training", anew=True)
    write_atomically(out / "recipe.toml", text)
    (out / "tensorboard").mkdir(exist_ok=True)
    (out / "tensorboard" / event).write_bytes(text)
    for step in ("00000001", "00000002"):
        folder = out / "checkpoints" / step
        with replacing_folder(folder) as temporary:
            for name in ("training.safetensors", "state.json"):
                (temporary / name).write_bytes(text)
        write_atomically(out / "latest.json", json.dumps({"checkpoint": step}).encode())
        remove_checkpoints(out, keep=folder)

def found():
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}

def counted(function, left):
    def call(*words, **more):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return function(*words, **more)
    return call

yours = {f"{n}": b"mine" for n in ("notes.txt", "checkpoints/best.pth", "checkpoints/3/notes", "tensorboard/events.1")}
wanted = {
    "recipe.toml": b"new", "latest.json": b'{"checkpoint": "00000002"}', f"tensorboard/{event}": b"new",
    "checkpoints/00000002/training.safetensors": b"new", "checkpoints/00000002/state.json": b"new",
}
for moment in range(1000):
    shutil.rmtree(out, ignore_errors=True)
    work(b"old")
    for name, text in yours.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(text)
    child = os.fork()
    if child == 0:
        left = [moment]
        os.replace, os.fsync, os.unlink, os.rmdir, os.mkdir, shutil.rmtree = (
            counted(f, left) for f in (os.replace, os.fsync, os.unlink, os.rmdir, os.mkdir, shutil.rmtree)
        )
        work(b"new")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    if status:
        work(b"new")
    left = found()
    left.pop(MARK)
    assert left == wanted | yours, (moment, left.keys() ^ (wanted | yours).keys())
    if status == 0:
        break
print(moment)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a child in the middle of its work")
def test_a_kill_at_any_moment_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """A child is killed at its first, second, … step of overwriting a run; then the same is done again, to its end."""
    words = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_a_kill_while_a_run_is_replaced_leaves_what_can_be_replaced_again(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy("comparison")
    unlink, count = Path.unlink, 0

    def killed(self: Path, missing_ok: bool = False) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            compare(out, OTHER, overwrite=True)
    with pytest.raises(InputError, match=r"holds a run with other encoders"):
        compare(out, OTHER)
    compare(out, OTHER, names=("knn",), overwrite=True)
    assert sl.open_run(out).names() == ["knn"]


def test_results_without_their_question_are_replaced_only_if_told_so(copy: Callable[[str], Path]) -> None:
    out = copy("comparison")
    (out / "run.json").unlink()
    with pytest.raises(InputError, match=r"has results, but no run.json; pass --overwrite to replace them"):
        compare(out)
    compare(out, names=("knn",), overwrite=True)
    assert sl.open_run(out).names() == ["knn"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_what_may_not_be_removed_is_a_sentence(
    number: int, copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy("training")
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self.name == "encoder.json":
            raise OSError(number, "no", str(self))
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(InputError, match=r"No permission to write .*encoder.json"):
            train(out, overwrite=True)
    assert (out / "run.json").is_file()
    train(out, overwrite=True)
    assert len(pd.read_csv(out / "metrics.csv")) == 4


def test_a_folder_that_cannot_be_written_is_a_sentence_and_can_be_read(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy("comparison")
    before = tree(out)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refused)
        patch.setattr(Path, "unlink", refused)
        assert sl.open_run(out)["cka"].cka.size
        with pytest.raises(InputError, match="No permission to write"):
            compare(out, OTHER, overwrite=True)
        found = sl.open_run(out)
        with pytest.raises(InputError, match="No permission to write"):
            sl.write_report(found)
    assert tree(out) == before


# What says of which kind a folder is


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "training"}', '{"format": 1, "kind": "poem"}'])
def test_what_cannot_be_understood_is_a_sentence(text: str, copy: Callable[[str], Path]) -> None:
    out = copy("training")
    assert json.loads((out / MARK).read_text()) == {"kind": "training", "format": 1}
    (out / MARK).write_text(text)
    before = tree(out)
    for more in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(InputError, match=rf"{MARK}.*choose another folder"):
            train(out, **more)
    assert tree(out) == before
    sl.load_encoder(f"run:{out}")


@pytest.mark.parametrize("kind", ["training", "comparison", "reinit"])
def test_a_folder_that_does_not_say_it_is_refused(kind: str, copy: Callable[[str], Path]) -> None:
    out = copy(kind)
    (out / MARK).unlink()
    before = tree(out)
    for more in ({"overwrite": True}, {}):
        with pytest.raises(InputError, match=NOT_OURS):
            WRITERS[kind](out, **more)
    assert tree(out) == before


def test_a_training_is_taken_over_whole_and_shares_its_weights(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source, out = copy("reinit"), tmp_path / "other"
    before = tree(source)
    study(out, reuse={"a": [source]})
    one, other = source / "trainings" / "a" / "none", out / "trainings" / "a" / "none"
    assert tree(one) == tree(other)
    shared = {path.name for path in other.rglob("*") if path.is_file() and path.samefile(one / path.relative_to(other))}
    assert shared == {"training.safetensors", "optimizer.safetensors", "encoder.safetensors"}
    study(out, OTHER, overwrite=True)  # what was taken over is its own, and nobody else's
    assert tree(source) == before
