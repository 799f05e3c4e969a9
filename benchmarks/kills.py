"""Commands killed with SIGKILL at random moments: does the same command go on, to the same bits, without litter?

    python benchmarks/kills.py [--kills 1000] [--commands compare,pretrain] [--out runs/kills]

Each command runs once without interruption. A series then runs it into a folder of its own, kills it up to four times
at random moments between its first millisecond and its end, and lets it end at last; what is there is compared with the
uninterrupted run bit by bit. One line of OUT/series.jsonl is one series, and running the script again goes on after the
last one, so that it can run in the background for as long as there is time. Moments follow from the number of the
series. Commands run in forks of this process, which has imported everything: a start costs no time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import xarray as xr

import sightline as sl
from sightline.cli import main

VIT = "timm:vit_tiny_patch16_224@random?size=32&patch_size=8&depth=2&embed_dim=24&num_heads=2"
IMAGES = "shapes?size=32&train=24&val=8&test=24"
SCENES = "shapes:scenes?size=64&train=12&val=4&test=8"
TRAINED = ["--set", "epochs=2", "--set", "batch=8", "--set", "save_minutes=0", "--workers", "0", "--resume"]
SMALL = [f"--set={word}" for word in ("size=32", "patch=8", "depth=1", "width=24", "heads=2", "warmup_epochs=0")]
DETECTOR = [
    f"--set={word}"
    for word in ("size=64", "epochs=1", "batch=4", "channels=8", "box_width=16", "proposals=20", "save_minutes=0")
]
PICTURES = [f"--set={word}" for word in ("size=16", "channels=[16, 16]", "epochs=1", "batch=8", "save_minutes=0")]
PICTURES += ["--samples", "2", "--sources", "4", "--compared", "8", "--transformations", "mirror"]
COMMANDS: dict[str, list[str]] = {
    "compare": ["compare", f"a={VIT}", f"b={VIT}&seed=1", "--images", IMAGES, "--batch", "8", "--workers", "0"],
    "pretrain": ["pretrain", "mae", "--images", IMAGES, *TRAINED, *SMALL],
    "finetune": ["finetune", VIT, "--images", IMAGES, *TRAINED, "--set", "save_epochs=true"],
    "detect": ["detect", f"a={VIT.replace('32', '64')}", "--images", SCENES, *DETECTOR, "--workers", "0"],
    "rcdm": ["rcdm", f"a={VIT}", "--images", IMAGES, *PICTURES, "--workers", "0"],
}
# What a run says of when and how long it ran, and the curves for TensorBoard, of which each start has a file.
TIMES = ("date", "timing", "command", "seconds", "images_per_second")
PASSING = re.compile(r"(.*/)?(tensorboard/.*|cache/.*|\.lock)")
MOST_KILLS = 4  # of a series


def import_all() -> None:
    """Everything that a command would import."""
    for found in pkgutil.walk_packages(sl.__path__, "sightline."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of what is not installed
                importlib.import_module(found.name)
    importlib.import_module("torch.utils.tensorboard")


class Problem(Exception):  # noqa: N818 — a finding
    """What is not as it should be after a kill."""


def start(words: list[str], log: Path) -> int:
    """The command in a fork, which leads a group of its own; its number."""
    if child := os.fork():
        return child
    code = 1
    try:
        os.setsid()
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(to, 1)
        os.dup2(to, 2)
        sys.argv = ["sightline", *words]
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(words: list[str], log: Path) -> float:
    """Let the command end by itself; how long it took."""
    began = time.monotonic()
    _, status = os.waitpid(start(words, log), 0)
    if status:
        raise Problem(f"exit status {os.waitstatus_to_exitcode(status)}: {log.read_text()[-800:]}")
    return time.monotonic() - began


def kill(words: list[str], log: Path, after: float) -> bool:
    """Start the command and kill it and all that it has started; False if it had ended before."""
    child, until = start(words, log), time.monotonic() + after
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(min(0.002, max(0.0, until - time.monotonic())))
    for target in (lambda: os.killpg(child, signal.SIGKILL), lambda: os.kill(child, signal.SIGKILL)):
        try:
            target()
            break
        except ProcessLookupError:  # it does not lead a group yet
            continue
    os.waitpid(child, 0)
    return True


def files_of(run: Path) -> dict[str, Path]:
    """All files of a run but those that say when it ran."""
    found = {path.relative_to(run).as_posix(): path for path in sorted(run.rglob("*")) if not path.is_dir()}
    return {name: path for name, path in found.items() if not PASSING.fullmatch(name)}


def check(ours: Path, theirs: Path) -> None:
    """Compare a run with the one that was not interrupted."""
    found, expected = files_of(ours), files_of(theirs)
    litter = [path.name for path in ours.rglob("*.tmp")]
    if litter:
        raise Problem(f"litter: {litter}")
    if found.keys() != expected.keys():
        raise Problem(f"other files: {sorted(found.keys() ^ expected.keys())}")
    for name, path in found.items():
        compare = next((how for ending, how in HOW.items() if name.endswith(ending)), same_bytes)
        if not compare(path, expected[name]):
            raise Problem(f"{name} differs")


def same_bytes(a: Path, b: Path) -> bool:
    """Weights, figures, tables."""
    return a.read_bytes() == b.read_bytes()


def same_numbers(a: Path, b: Path) -> bool:
    """Results, to the last bit; when and by which command they were computed is among their attributes."""
    with xr.open_dataset(a, engine="h5netcdf") as first, xr.open_dataset(b, engine="h5netcdf") as second:
        pair = [table.load().drop_attrs() for table in (first, second)]
    return pair[0].identical(pair[1])


def same_json(a: Path, b: Path) -> bool:
    """run.json and others, without the time."""
    return without_times(json.loads(a.read_text())) == without_times(json.loads(b.read_text()))


def without_times(value: Any) -> Any:
    """The same value without what is different each time."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def same_rows(a: Path, b: Path) -> bool:
    """metrics.csv without the columns of time."""
    import pandas as pd

    tables = [pd.read_csv(path).drop(columns=list(TIMES), errors="ignore") for path in (a, b)]
    return tables[0].equals(tables[1])


def of_same_size(a: Path, b: Path) -> bool:
    """The report and PDFs say when they were made; that they are whole is what can be told."""
    return abs(a.stat().st_size - b.stat().st_size) < 4096


HOW: dict[str, Callable[[Path, Path], bool]] = {
    ".nc": same_numbers,
    "report.html": of_same_size,
    ".pdf": of_same_size,
    ".sightline.json": lambda a, b: True,  # it lists TensorBoard's files, too
    ".json": same_json,
    "metrics.csv": same_rows,
}


def series(command: str, number: int, folder: Path, expected: Path, seconds: float) -> dict[str, Any]:
    """One command, killed some times and then left alone."""
    chance, run, log = random.Random(f"{command} {number}"), folder / "run", folder / "log.txt"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words, kills, problem = [*COMMANDS[command], "-o", str(run)], 0, ""
    try:
        for _ in range(chance.randint(1, MOST_KILLS)):
            kills += kill(words, log, chance.choice((seconds, seconds, 0.1)) * chance.random() * 1.05)
        finish(words, log)
        check(run, expected)
    except Problem as found:
        problem = str(found)
    if not problem:
        shutil.rmtree(folder)
    return {"command": command, "number": number, "kills": kills, "problem": problem}


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Counts by command."""
    rows = [f"{'':12}{'series':>8}{'kills':>8}{'problems':>10}"]
    lines = list(lines)
    for command in COMMANDS:
        own = [line for line in lines if line["command"] == command]
        bad = sum(bool(line["problem"]) for line in own)
        rows.append(f"{command:12}{len(own):8}{sum(line['kills'] for line in own):8}{bad:10}")
    return "\n".join(rows)


def run() -> None:
    """Go on until there were so many kills."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--kills", type=int, default=1000, help="in all, those of earlier times included")
    words.add_argument("--commands", default=",".join(COMMANDS))
    words.add_argument("--out", type=Path, default=Path("runs/kills"))
    asked = words.parse_args()
    torch.set_num_threads(1)
    import_all()
    asked.out.mkdir(parents=True, exist_ok=True)
    state = asked.out / "series.jsonl"
    lines = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
    chosen = asked.commands.split(",")
    whole: dict[str, float] = {}
    while sum(line["kills"] for line in lines if line["command"] in chosen) < asked.kills:
        command = min(chosen, key=lambda name: sum(line["kills"] for line in lines if line["command"] == name))
        expected = asked.out / "expected" / command
        if command not in whole:  # measured anew each time: it decides when to kill
            shutil.rmtree(expected, ignore_errors=True)
            whole[command] = finish([*COMMANDS[command], "-o", str(expected / "run")], asked.out / f"{command}.log")
        number = sum(line["command"] == command for line in lines)
        line = series(command, number, asked.out / f"{command}-{number}", expected / "run", whole[command])
        lines.append(line)
        with state.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{command} {number}: {line['kills']} kills {line['problem']}", flush=True)
    print(f"Sightline {sl.__version__}\n{table(lines)}")


if __name__ == "__main__":
    run()
