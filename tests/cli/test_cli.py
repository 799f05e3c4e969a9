"""The command line as a user meets it: what it writes, what it says, and one clear sentence for every mistake."""

import contextlib
import errno
import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import typer
import xarray as xr
from PIL import Image
from support.references import SMALL

import sightline as sl
from sightline import cli
from sightline.cli.compare import _new_folder
from sightline.measure import request

COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
FAST = ["--limit", "32", "--batch", "8", "--workers", "0"]


def sightline(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run the command in this process, as `main` does it."""
    before = sys.argv
    sys.argv = ["sightline", *map(str, words)]
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "x"
    before = sys.argv
    sys.argv = ["sightline", "compare", f"one={SMALL}", f"two={SMALL}&seed=1", "-o", str(path), *FAST]
    with contextlib.suppress(SystemExit):
        cli.main()
    sys.argv = before
    return path


def test_too_few_files_at_once_are_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (63, limits[1]))
    try:
        code, _, err = sightline("list", "analyses", capsys=capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert code == 2
    assert err.startswith("error: Only 63 files may be open at once, and a run needs up to 64; raise the limit")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer analyses by default, where which ones does not matter."""
    monkeypatch.setattr(request, "default_analyses", lambda: ["agreement", "attention", "cka", "knn"])


def test_compare_leaves_a_run_and_a_report(run: Path) -> None:
    assert sorted(p.name for p in run.iterdir()) == [
        ".sightline.json",
        "cache",
        "figures",
        "groups",
        "report.html",
        "results",
        "run.json",
    ]
    found = sl.open_run(run)
    assert list(found) == request.default_analyses()
    assert [encoder["name"] for encoder in found.request["encoders"]] == ["one", "two"]
    assert found.request["images"]["name"] == "shapes?size=32"
    assert not list(run.rglob("*.tmp"))


def test_the_same_command_again_computes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "results" / "cka.nc").stat().st_mtime_ns
    code, out, _ = sightline("compare", f"one={SMALL}", f"two={SMALL}&seed=1", "-o", run, *FAST, capsys=capsys)
    assert code == 0
    assert (run / "results" / "cka.nc").stat().st_mtime_ns == before
    assert "k-NN" in out
    assert "one × two" not in out  # pairs are told on request
    assert "report.html" in out
    assert len(out.splitlines()) < 20


def test_pairs_are_told_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", f"one={SMALL}", f"two={SMALL}&seed=1", "--only", "cka", "-o", tmp_path / "x", *FAST]
    _, out, _ = sightline(*words, capsys=capsys)
    assert "one × two" not in out
    _, out, _ = sightline(*words, "--verbose", capsys=capsys)
    assert "one × two" in out


def test_only_and_sites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--sites", "block.*,block.*.qkv", SMALL, "--only", "cka", "-o", tmp_path / "x", *FAST]
    assert sightline(*words, capsys=capsys)[0] == 0
    found = sl.open_run(tmp_path / "x")
    assert list(found) == ["cka"]
    assert list(found["cka"].site.values) == ["block.0.qkv", "block.0", "block.1.qkv", "block.1"]


def test_names_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = sightline("compare", SMALL, SMALL, "--only", "cka", "-o", tmp_path / "x", *FAST, capsys=capsys)
    assert code == 0
    names = list(sl.open_run(tmp_path / "x")["cka"].encoder.values)
    assert names == ["vit_tiny_patch16_224", "vit_tiny_patch16_224 (2)"]


def test_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = sl.open_run(run)["cka"]
    for kind, read in {"csv": pd.read_csv, "parquet": pd.read_parquet}.items():
        code, out, _ = sightline("export", run, "--format", kind, "-o", tmp_path / kind, capsys=capsys)
        assert code == 0
        assert str(tmp_path / kind / f"cka.{kind}") in out.split()
        table = read(tmp_path / kind / f"cka.{kind}")
        at = {"encoder_a": "one", "encoder_b": "two", "site_a": "block.0", "site_b": "block.1", "tokens": "all"}
        row = table.query(" and ".join(f"{key} == {value!r}" for key, value in at.items()))
        assert len(row) == 1
        assert float(row.cka.iloc[0]) == pytest.approx(float(result.cka.sel(at)), rel=1e-12)
    sightline("export", run, "--format", "netcdf", "-o", tmp_path / "nc", capsys=capsys)
    xr.testing.assert_identical(xr.load_dataset(tmp_path / "nc" / "cka.nc", engine="h5netcdf"), result)


def test_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "x"
    sl.analyze([SMALL], sl.load_images("shapes?size=32", limit=32), ["cka"], out=run, show_progress=False)
    code, out, _ = sightline("report", run, capsys=capsys)
    assert code == 0
    assert Path(out.strip()) == run / "report.html"
    assert "CKA" in (run / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["encoders"], "timm"),
        (["encoders", "vit_small*dino"], "timm:vit_small_patch16_224.dino"),
        (["images"], "parquet"),
        (["analyses"], "cka"),
        (["sites", SMALL], "block.1.attn_map  (B, 3, 17, 17)"),
    ],
)
def test_list(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = sightline("list", *words, capsys=capsys)
    assert code == 0
    assert expected in out


# Mistakes


def fails(words: list[object], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = sightline(*words, capsys=capsys)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([SMALL, "--images", "folder:/no/such/folder"], "/no/such/folder"),
        ([SMALL, "--images", "foldr:x"], "did you mean 'folder'"),
        ([SMALL, "--only", "ckaa"], "did you mean 'cka'"),
        ([SMALL, "--sites", "blok.*"], "No site matches"),
        ([SMALL, "--sites", ","], "--sites ',' names nothing"),
        ([SMALL, "--seed", "-1"], "The seed is -1"),
        ([SMALL, "--batch", "3"], "The batch size is 3"),
        ([SMALL, "--limit", "2"], "at least 4"),
        ([SMALL, "--device", "warp"], "Device 'warp' cannot be used"),
        ([SMALL, "--precision", "float16"], "choose float32 or bf16"),
        (["timm:vit_smal_patch16_224@random"], "did you mean 'vit_small_patch16_224'"),
        (["timn:resnet18"], "did you mean 'timm'"),
        (["resnet18"], "is not an encoder reference"),
        (["timm:resnet18@nowhere.safetensors"], "no weights file 'nowhere.safetensors'"),
        ([f"a={SMALL}&flavour=7"], "flavour"),
        (["run:nowhere"], "holds no encoder"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[object], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(["compare", *words, "-o", tmp_path / "x", "--workers", "0"], sentence, capsys)
    assert not (tmp_path / "x").exists()


def folder_of(path: Path, classes: int, each: int) -> Path:
    for number in range(classes):
        (path / f"class-{number}").mkdir(parents=True)
        for i in range(each):
            pixels = np.random.default_rng(100 * number + i).integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path / f"class-{number}" / f"{i}.png")
    return path


@pytest.mark.usefixtures("few")
def test_one_class_cannot_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = f"folder:{folder_of(tmp_path / 'images', 1, 12)}"
    words = ["compare", SMALL, "--images", images, "-o", tmp_path / "x", *FAST]
    fails([*words, "--only", "knn"], "two classes", capsys)
    assert not (tmp_path / "x").exists()
    code, out, _ = sightline(*words, "--only", "cka", capsys=capsys)
    assert code == 0  # CKA needs no labels
    assert "Left out" not in out
    code, out, _ = sightline(*words, capsys=capsys)
    assert code == 0
    assert "Left out: k-NN needs labels of at least two classes" in out


def test_settings_of_analyses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", SMALL, "--only", "knn", "--set", "knn.k=3", "-o", tmp_path / "x", *FAST]
    assert sightline(*words, capsys=capsys)[0] == 0
    assert sl.open_run(tmp_path / "x")["knn"].attrs["k"] == 3
    for setting, sentence in {
        "knn.kk=3": "There is no setting 'kk' of knn; did you mean 'k'",
        "knn=3": "--set knn=3: write --set knn.KEY=VALUE",
        "cka.tokens=all": "cka is not an analysis of --only",
        "kn.k=3": "There is no analysis 'kn'",
        "knn.k=many": "a whole number is expected",
    }.items():
        fails([*words, "--set", setting], sentence, capsys)
    fails(["compare", SMALL, "--only", "knn", "--also", "noise", *FAST], "give only one of them", capsys)


@pytest.mark.usefixtures("few")
def test_more_than_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", SMALL, "--also", "orientation", "--set", 'cka.tokens=["cls"]', "-o", tmp_path / "x", *FAST]
    code, out, _ = sightline(*words, capsys=capsys)
    assert code == 0
    found = sl.open_run(tmp_path / "x")
    assert {"cka", "knn", "attention", "orientation"} <= set(found)
    assert "noise" not in found
    assert list(found["cka"].tokens.values) == ["cls"]
    assert "Left out: " in out  # agreement needs two encoders


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    fails(
        ["compare", SMALL, "--images", f"folder:{tmp_path / 'images'}", "-o", tmp_path / "x"],
        "There are no images in the folder",
        capsys,
    )


def test_corrupt_images_are_named_and_skipped_or_fatal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = folder_of(tmp_path / "images", 2, 12)
    (images / "class-1" / "broken.jpg").write_bytes(b"not a picture")
    words = ["compare", SMALL, "--images", f"folder:{images}", "--only", "cka", *FAST, "--limit", "0"]
    code, _, err = sightline(*words, "-o", tmp_path / "x", capsys=capsys)
    assert code == 0
    assert "class-1/broken.jpg" in err
    assert sl.open_run(tmp_path / "x").request["skipped"][0][0] == "class-1/broken.jpg"
    fails([*words, "--strict", "-o", tmp_path / "y"], "class-1/broken.jpg", capsys)


def test_a_checkpoint_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.nn.Linear(3, 3).state_dict(), tmp_path / "other.pth")
    reference = SMALL.replace("@random", f"@{tmp_path / 'other.pth'}")
    fails(["compare", reference, "-o", tmp_path / "x"], "another model", capsys)


def test_nan_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = sl.load_encoder(SMALL)
    with torch.no_grad():
        encoder.module.norm.weight[0] = float("inf")
    sl.save_encoder(encoder, tmp_path / "bad")
    fails(["compare", f"run:{tmp_path / 'bad'}", "-o", tmp_path / "x"], "NaN or infinite weights", capsys)


@pytest.mark.skipif(os.name != "posix" or not Path("/proc").exists(), reason="needs a folder nobody can write to")
def test_no_write_permission(capsys: pytest.CaptureFixture[str]) -> None:
    fails(["compare", SMALL, "--only", "cka", "-o", "/proc/runs/x", *FAST], "/proc/runs", capsys)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_in_the_middle(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up when the result is to be written: one sentence, no half of a file, and the run can go on."""
    replace = os.replace

    def full(source: str, target: Path) -> None:
        if str(target).endswith("cka.nc"):
            raise OSError(number, os.strerror(number), str(target))
        replace(source, target)

    words = ["compare", SMALL, "--only", "cka", "-o", tmp_path / "x", *FAST]
    monkeypatch.setattr(os, "replace", full)
    fails(words, "disk is full" if number == errno.ENOSPC else "No permission", capsys)
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("*.nc"))
    monkeypatch.setattr(os, "replace", replace)
    assert sightline(*words, capsys=capsys)[0] == 0


def test_interrupted_by_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("sightline.measure.analyze"), "_step", interrupt)
    code, _, err = sightline("compare", SMALL, "--only", "cka", "-o", tmp_path / "x", *FAST, capsys=capsys)
    assert code == 130
    assert "run the same command again" in err
    assert "Traceback" not in err


def test_mistakes_about_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "run.json").write_text("{}")
    for command in ("report", "export"):
        fails([command, tmp_path / "nothing"], "is not a run folder", capsys)
        fails([command, tmp_path / "unfinished"], "no finished analysis", capsys)
    fails(["pretrain", "--resume", "-o", tmp_path / "nowhere"], "There is no training in", capsys)


def test_help_does_not_wait_for_torch() -> None:
    """What `--help` and `import sightline` import stays light: no torch, no timm, no altair, no xarray."""
    heavy = "('torch', 'timm', 'altair', 'xarray', 'pandas')"
    script = f"import sys, sightline.cli; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the command does, each argument and option in words, and an example that can be typed."""
    command = COMMANDS[name]
    code, out, _ = sightline(name, "--help", capsys=capsys)
    assert code == 0
    assert command.help is not None
    assert len(command.help.split()) > 8
    words = " ".join(out.split())
    for parameter in command.params:
        assert parameter.help, parameter.name
        longest = max(parameter.opts, key=len)
        assert longest.strip("-") in words or longest.upper() in words
    assert f"sightline {name}" in command.help


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_into_eighty_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option is on one line with its form, and no word is cut."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    _, out, _ = sightline(name, "--help", capsys=capsys)
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    helps = [parameter.help for parameter in COMMANDS[name].params if parameter.help]
    assert out.count("…") <= (COMMANDS[name].help + "".join(helps)).count("…")
    for parameter in COMMANDS[name].params:
        if parameter.opts[0].startswith("--") and parameter.metavar:
            (line,) = [
                one for one in lines if one.startswith("│") and one.strip("│ *").startswith(f"{parameter.opts[0]} ")
            ]
            assert f" {parameter.metavar} " in line


def test_help_shows_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = sightline("--help", capsys=capsys)
    assert code == 0
    for name, command in COMMANDS.items():
        assert name in out
        assert command.help is not None
        assert " ".join(command.help.replace("`", "").split()[:2]) in " ".join(out.split())


def test_a_module_runs_as_the_command() -> None:
    found = subprocess.run([sys.executable, "-m", "sightline", "--help"], check=True, capture_output=True, text=True)
    assert "compare" in found.stdout


def test_two_commands_of_the_same_second_choose_two_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _new_folder()
    monkeypatch.setattr(os, "getpid", lambda: 0)
    assert _new_folder().parent == first.parent
    assert _new_folder().name.rpartition("-")[2] != first.name.rpartition("-")[2]
