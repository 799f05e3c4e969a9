"""Only what Sightline has written is ever replaced or removed: in others' folders, behind links, after kills."""

from __future__ import annotations

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

import pandas as pd
import pytest
import torch

import sightline as sl
from sightline import cli
from sightline.core import ownership as owned
from sightline.core.errors import InputError
from sightline.core.folders import latest
from sightline.core.settings import to_toml
from sightline.core.stopping import Stopped
from sightline.studies.reinit import reinit
from sightline.training.checkpoints import tensors_of
from sightline.training.loop import Loop
from sightline.training.pretrain import pretrain
from sightline.training.recipe import make_recipe
from sightline.transfer.finetune import finetune

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=16&num_heads=2&num_classes=0"
OTHER = f"{VIT}&seed=1"
IMAGES = "shapes?size=16&train=32&val=16&test=16"
BACKBONE: dict[str, Any] = {"backbone": "vit", "size": 16, "width": 16, "depth": 1, "heads": 2, "patch": 8}
BRIEF: dict[str, Any] = {"images": IMAGES, "batch": 16, "epochs": 2, "evaluate_every": 0, "log_every": 1}
SIMCLR = BACKBONE | BRIEF | {"hidden": 16, "out": 8}
TUNED = BRIEF | {"keep": 3, "mixup": 0.0, "cutmix": 0.0}
NOT_OURS = "is not a run folder: Sightline did not write what is in it; choose a new folder"
EARLIER = "from a version of Sightline that kept no list of its files"

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


def listed(folder: Path) -> set[str]:
    return set(json.loads((folder / owned.LIST).read_text())["files"])


def without_lists(folder: Path) -> Tree:
    return {name: content for name, content in tree(folder).items() if Path(name).name != owned.LIST}


def forget(folder: Path) -> None:
    """As an earlier version has left it: without a list."""
    for path in folder.rglob(owned.LIST):
        path.unlink()


def train(out: Path, objective: str | None = "simclr", settings: dict[str, Any] = SIMCLR, **more: Any) -> sl.Encoder:
    return pretrain(objective, out=out, settings=settings, workers=0, show_progress=False, **more)


def tune(out: Path, **more: Any) -> sl.Encoder:
    return finetune(VIT, IMAGES, out, settings=TUNED, workers=0, show_progress=False, **more)


def compare(out: Path, what: str = VIT, names: tuple[str, ...] = ("cka",), **more: Any) -> sl.Run:
    run = sl.analyze({"a": what}, IMAGES, names, out=out, batch=8, workers=0, show_progress=False, **more)
    sl.write_report(run)
    return run


def study(out: Path, what: str = VIT, **more: Any) -> sl.Run:
    settings = BRIEF | {"epochs": 1, "mixup": 0.0, "cutmix": 0.0}
    return reinit(
        {"a": what}, IMAGES, out, counts=[1], ends=["last"], settings=settings, workers=0, show_progress=False, **more
    )


WRITERS: dict[str, Callable[..., object]] = {"training": train, "comparison": compare, "reinit": study}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind, to be copied."""
    folder = tmp_path_factory.mktemp("runs")
    for kind, write in WRITERS.items():
        write(folder / kind)
    tune(folder / "finetune")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(runs[kind], tmp_path / "run"))


# ---------------------------------------------------------------------------------------------------------------
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
        lambda: tune(tmp_path, **more),
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
    words = f"holds {owned.FOLDER_KINDS[kind]}, not {owned.FOLDER_KINDS[writer]}; choose another folder"
    for _ in range(2):
        with pytest.raises(InputError, match=words):
            WRITERS[writer](out, overwrite=overwrite)
        assert without_lists(out) == without_lists(runs[kind])
        forget(out)  # of an earlier version it is the same


# ---------------------------------------------------------------------------------------------------------------
# Sightline's own


@pytest.mark.parametrize("kind", ["training", "finetune", "comparison", "reinit"])
def test_every_file_of_a_run_is_listed(kind: str, runs: dict[str, Path]) -> None:
    out = runs[kind]
    here = {name for name in tree(out) if name != owned.LIST and "trainings/" not in name}
    endings = [name.rpartition("*")[2] for name in listed(out) if "*" in name]
    boards = {name for name in here if name.endswith(tuple(endings))} if endings else set()
    assert len(boards) == len(endings) == (kind in ("training", "finetune"))
    exact = {name for name in listed(out) if "*" not in name and "trainings/" not in name}
    unwritten = {"cache/pass-0-of-1.safetensors"} if kind == "comparison" else set()
    assert exact - unwritten == here - boards
    within = {name for name in listed(out) if "trainings/" in name}
    assert within == ({f"trainings/a/{n}/{owned.LIST}" for n in ("none", "last-1")} if kind == "reinit" else set())


def test_the_tokenizer_is_in_the_list_of_its_training(tmp_path: Path) -> None:
    settings = BACKBONE | BRIEF | {"tokenizer_epochs": 1, "tokenizer_width": 8, "codes": 16, "epochs": 1}
    train(tmp_path / "run", "beit", settings)
    assert {"tokenizer/latest.json", "tokenizer/metrics.csv"} <= listed(tmp_path / "run")
    assert not (tmp_path / "run" / "tokenizer" / owned.LIST).exists()
    forget(tmp_path / "run")
    for name in ("latest.json", "checkpoints", "tokenizer/latest.json"):  # stopped while the tokenizer was trained
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    train(tmp_path / "run", "beit", settings, resume=True)
    train(tmp_path / "new", "beit", settings)
    train(tmp_path / "new", "beit", settings, overwrite=True)
    folders = [
        sorted(p.name for p in (tmp_path / run / "tokenizer" / "checkpoints").iterdir()) for run in ("run", "new")
    ]
    assert folders == [["00000002"]] * 2
    assert len(list((tmp_path / "new" / "tokenizer" / "tensorboard").iterdir())) == 1


MINE = {
    "notes_txt": "mine",
    "figures__fig1_png": "mine",
    "results__climate_csv": "mine",
    "checkpoints__best_pth": "mine",
    "checkpoints__00000004__notes_txt": "mine",
    "tensorboard__events_out_tfevents_1_host": "mine",
    "steps__00000002__notes_txt": "mine",
    "trainings__a__none__notes_txt": "mine",
}


@pytest.mark.parametrize("kind", ["training", "comparison", "reinit"])
def test_overwriting_leaves_what_is_yours_and_removes_what_is_not(
    kind: str, copy: Callable[[str], Path], tmp_path: Path
) -> None:
    out = copy(kind)
    mine = put(tmp_path / "mine", **MINE)
    shutil.copytree(tmp_path / "mine", out, dirs_exist_ok=True)
    old = {name: (out / name).stat().st_mtime_ns for name in tree(out) if not name.startswith("cache/")}
    changed = {"settings": SIMCLR | {"lr": 2e-3}} if kind == "training" else {"what": OTHER}
    WRITERS[kind](out, **changed, overwrite=True)
    new = tree(out)
    assert {name: new[name] for name in mine} == mine
    assert {name for name in old if name in new and (out / name).stat().st_mtime_ns == old[name]} == mine.keys()
    boards = [name for name in new if "tensorboard/" in name and name not in mine]
    assert len(boards) == {"training": 1, "comparison": 0, "reinit": 2}[kind]


def test_fine_tuning_replaces_the_steps_that_it_has_kept(copy: Callable[[str], Path]) -> None:
    out = copy("finetune")
    assert sorted(path.name for path in (out / "steps").iterdir()) == ["00000000", "00000002", "00000004"]
    finetune(VIT, IMAGES, out, settings=TUNED | {"epochs": 1}, workers=0, show_progress=False, overwrite=True)
    assert sorted(path.name for path in (out / "steps").iterdir()) == ["00000000", "00000001", "00000002"]


def test_a_file_of_yours_with_one_of_our_names_is_not_replaced(copy: Callable[[str], Path]) -> None:
    out = copy("comparison")
    shutil.copy(out / "results" / "cka.nc", out / "results" / "knn.nc")
    put(out, cache__notes_txt="mine")
    before = tree(out)
    with pytest.raises(InputError, match=r"knn.nc' already exists, and Sightline did not write it"):
        compare(out, names=("knn",))
    assert {name for name, content in before.items() if tree(out)[name] != content} <= {"run.json"}


def test_exports_replace_exports_only(copy: Callable[[str], Path], tmp_path: Path) -> None:
    from sightline.report.tables import export_run

    run = sl.open_run(copy("comparison"))
    mine = put(tmp_path / "tables", thesis_tex="years of work")
    for format in ("csv", "netcdf", "csv"):
        written = export_run(run, format, tmp_path / "tables")
        inside = export_run(run, format)
    assert all(path.is_file() for path in (*written, *inside))
    assert mine.items() <= tree(tmp_path / "tables").items()
    before = put(tmp_path / "others", cka_csv="mine")
    with pytest.raises(InputError, match=r"cka.csv' already exists, and Sightline did not write it"):
        export_run(run, "csv", tmp_path / "others")
    assert before.items() <= tree(tmp_path / "others").items()
    assert run.path is not None
    with pytest.raises(InputError, match="holds a comparison, not exported tables"):
        export_run(run, "csv", run.path)


# ---------------------------------------------------------------------------------------------------------------
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


# ---------------------------------------------------------------------------------------------------------------
# Kills and refusals of the system


KILLED = """
import os, shutil, sys
from pathlib import Path
from sightline.core import ownership as owned

out = Path(sys.argv[1])

def work(text):
    owned.begin(out, "training", anew=True)
    owned.write(out, out / "recipe.toml", text)
    owned.claim(out, out / "tensorboard" / "*.0123456789abcdef")
    (out / "tensorboard").mkdir(exist_ok=True)
    (out / "tensorboard" / "events.0123456789abcdef").write_bytes(text)
    for step in ("1", "2"):
        with owned.new_folder(out, out / "checkpoints" / step) as temporary:
            for name in ("a", "b"):
                (temporary / name).write_bytes(text)
        owned.write(out, out / "latest.json", step.encode())
        owned.remove(out, out / "checkpoints", keep=out / "checkpoints" / step)

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
    "recipe.toml": b"new", "latest.json": b"2", "checkpoints/2/a": b"new", "checkpoints/2/b": b"new",
    "tensorboard/events.0123456789abcdef": b"new",
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
    left.pop(owned.LIST)
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


def test_a_kill_while_a_run_is_replaced_needs_overwrite_again(
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
    assert not (out / "run.json").exists()
    with pytest.raises(InputError, match=r"has no run.json, but other files of a run; pass --overwrite"):
        compare(out, OTHER)
    compare(out, OTHER, names=("knn",), overwrite=True)
    assert sl.open_run(out).names() == ["knn"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_what_may_not_be_removed_stays_listed(
    number: int, copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy("training")
    before, unlink = listed(out), Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self.name == "encoder.json":
            raise OSError(number, "no", str(self))
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(InputError, match=r"No permission to write .*encoder.json"):
            train(out, overwrite=True)
    assert listed(out) == before
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


# ---------------------------------------------------------------------------------------------------------------
# Lists


TOGETHER = """
import sys
from pathlib import Path
from sightline.core import ownership as owned
out, name = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for i in range(60):
    owned.write(out, out / f"{name}{i}", b"")
"""


def test_two_processes_may_write_to_a_run_at_once(tmp_path: Path) -> None:
    owned.begin(tmp_path / "run", "comparison")
    words = [sys.executable, "-c", TOGETHER, str(tmp_path / "run")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*words, name], **pipes) for name in "ab"]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert listed(tmp_path / "run") == {f"{name}{i}" for name in "ab" for i in range(60)}


@pytest.mark.parametrize("name", ["../mine.txt", "/mine.txt", "results/../../mine.txt", "./", "results/", "*", "*.txt"])
def test_a_list_that_leads_elsewhere_is_refused(name: str, copy: Callable[[str], Path], tmp_path: Path) -> None:
    out = copy("comparison")
    (tmp_path / "mine.txt").write_text("mine")
    about = json.loads((out / owned.LIST).read_text())
    (out / owned.LIST).write_text(json.dumps(about | {"files": [*about["files"], name]}))
    with pytest.raises(InputError, match="it names files that Sightline cannot have written there"):
        compare(out, OTHER, overwrite=True)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2, "kind": "training", "earlier": false, "files": []}'])
def test_an_unreadable_list_is_a_sentence(text: str, copy: Callable[[str], Path]) -> None:
    out = copy("training")
    (out / owned.LIST).write_text(text)
    before = tree(out)
    for more in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(InputError, match="the list of what Sightline has written there"):
            train(out, **more)
    assert tree(out) == before
    sl.load_encoder(f"run:{out}")


# ---------------------------------------------------------------------------------------------------------------
# Runs of versions that kept no list


@pytest.mark.parametrize("kind", ["training", "comparison", "reinit"])
def test_runs_without_a_list_are_not_replaced(kind: str, copy: Callable[[str], Path]) -> None:
    out = copy(kind)
    forget(out)
    before = tree(out)
    with pytest.raises(InputError, match=EARLIER):
        WRITERS[kind](out, **({} if kind == "training" else {"what": OTHER}), overwrite=True)
    assert tree(out) == before


def test_trainings_without_a_list_go_on_as_if_nothing_had_happened(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_told_to_stop", lambda loop: signal.SIGTERM if len(loop.monitor.rows) == 3 else 0)
        with pytest.raises(Stopped):
            train(out)
    forget(out)
    put(out, checkpoints__00000003__notes_txt="mine", checkpoints__best_pth="mine")
    sl.load_encoder(f"run:{out}")
    train(out, resume=True)
    whole, resumed = (sl.load_encoder(f"run:{run}") for run in (runs["training"], out))
    for name, value in tensors_of(whole.module).items():
        assert torch.equal(value, tensors_of(resumed.module)[name]), name
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["00000003", "00000004", "best.pth"]
    assert [path.name for path in (out / "checkpoints" / "00000003").iterdir()] == ["notes.txt"]
    with pytest.raises(InputError, match=EARLIER):  # the list of the rest is not that of the whole
        train(out, overwrite=True)


def test_kept_steps_without_a_list_are_written_again(copy: Callable[[str], Path], runs: dict[str, Path]) -> None:
    """A fine-tuning of an earlier version that was killed after it kept a step and before its checkpoint."""
    out = copy("finetune")
    forget(out)
    (out / "latest.json").unlink()
    shutil.rmtree(out / "checkpoints")
    tune(out, resume=True)
    for step in (2, 4):
        names = [f"run:{run}?step={step}" for run in (out, runs["finetune"])]
        assert sl.load_encoder(names[0]).weights == sl.load_encoder(names[1]).weights
    assert latest(out) is not None


def test_comparisons_and_studies_without_a_list_go_on(
    copy: Callable[[str], Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    out = copy("comparison")
    forget(out)
    put(out, figures__fig1_png="mine")
    assert compare(out, names=("cka", "knn")).names() == ["cka", "knn"]
    assert (out / "results" / "cka.nc").read_bytes() == (runs["comparison"] / "results" / "cka.nc").read_bytes()
    assert (out / "figures" / "fig1.png").read_text() == "mine"
    with pytest.raises(InputError, match=EARLIER):
        compare(out, OTHER, overwrite=True)
    shutil.rmtree(out)
    out = copy("reinit")
    forget(out)
    (out / "results" / "reinit.nc").unlink()
    assert study(out)["reinit"].identical(sl.open_run(runs["reinit"])["reinit"])


def test_a_run_is_taken_over_whole_and_shares_its_weights(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for run in (one, other):
        owned.begin(run, "detection")
    source, target = one / "trainings" / "a", other / "trainings" / "a"
    owned.claim(one, source / owned.LIST)
    owned.begin(source, "training")
    owned.write(source, source / "metrics.csv", b"step")
    owned.write(source, source / "checkpoints" / "1" / "encoder.safetensors", b"weights")
    (source / ".lock").touch()
    owned.bring(other, source, target)
    files = {path.relative_to(target).as_posix(): path for path in target.rglob("*") if path.is_file()}
    assert set(files) == {owned.LIST, "metrics.csv", "checkpoints/1/encoder.safetensors"}
    shared = {name for name, path in files.items() if path.samefile(source / name)}
    assert shared == {"checkpoints/1/encoder.safetensors"}
    owned.begin(other, "detection", anew=True)  # what was taken over is its own, and nobody else's
    assert not target.exists()
    assert (source / "checkpoints" / "1" / "encoder.safetensors").read_bytes() == b"weights"
