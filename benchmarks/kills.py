"""Commands killed with SIGKILL at random moments: does the same command go on, to the same bits, without litter?

    python benchmarks/kills.py [--kills 1000] [--commands compare,pretrain] [--out runs/kills]

Each command runs once without interruption. A series then runs it into a folder of its own, kills it up to eight times
and lets it end at last; what is there is compared with the uninterrupted run bit by bit. Moments are drawn over the
whole life of a run, some by the time that it has computed, some before one of the changes that it makes to files, from
the first to the last, and some in its first moments. Commands run in forks of this process (forks.py).

One line of OUT/series.jsonl is one series, and running the script again goes on after the last one, so that it can run
in the background for as long as there is time. Moments follow from the number of the series.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forks
import xarray as xr

import sightline as sl

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=12&num_heads=2"
IMAGES = "shapes?size=16&train=16&val=4&test=12"
SCENES = "shapes:scenes?size=32&train=8&val=0&test=4"
TRAINED = ["--set", "epochs=2", "--batch", "8", "--set", "save_minutes=0", "--workers", "0", "--resume"]
SMALL = [f"--set={word}" for word in ("size=16", "patch=8", "depth=1", "width=12", "heads=2", "warmup_epochs=0")]
DETECTOR = [
    f"--set={word}" for word in ("size=32", "epochs=1", "channels=8", "box_width=8", "proposals=10", "save_minutes=0")
]
PICTURES = [f"--set={word}" for word in ("size=16", "channels=[16, 16]", "epochs=1", "save_minutes=0")]
DETECTOR += ["--batch", "4"]
PICTURES += ["--batch", "8", "--samples", "2", "--sources", "2", "--compared", "4", "--transformations", "mirror"]
PASS = ["--images", IMAGES, "--batch", "4", "--workers", "0"]
COMMANDS: dict[str, list[str]] = {
    "compare": ["compare", f"a={VIT}", f"b={VIT}&seed=1", *PASS, "--only", "attention,fourier,knn"],
    "pretrain": ["pretrain", "mae", "--images", IMAGES, *TRAINED, *SMALL],
    "finetune": ["finetune", VIT, "--images", IMAGES, *TRAINED, "--set", "keep=3"],
    "detect": ["detect", f"a={VIT.replace('size=16', 'size=32')}", "--images", SCENES, *DETECTOR, "--workers", "0"],
    "rcdm": ["rcdm", f"a={VIT}", "--images", IMAGES, *PICTURES, "--workers", "0"],
    "study": ["study", "study.toml", "--workers", "0"],
}
STUDY = f"""
images = "{IMAGES}"
findings = ["P3"]

[step.mae]
command = "pretrain mae"
set = {{ epochs = 1, batch = 8, size = 16, patch = 8, depth = 1, width = 12, heads = 2, warmup_epochs = 0 }}

[step.tuned]
command = "finetune step:mae"
set = {{ epochs = 1, batch = 8 }}

[step.pass]
command = "compare step:mae step:tuned"
only = ["knn"]
batch = 4

[role]
mae = {{ family = "reconstruction", method = "mae" }}
tuned = {{ family = "reconstruction", method = "mae", tuned_from = "mae" }}
"""
# What a run says of when and how long it ran, and the curves for TensorBoard, of which each start has a file.
TIMES = ("date", "timing", "command", "seconds", "images_per_second", "finished")
PASSING = re.compile(r"(.*/)?(tensorboard/.*|cache/.*|\.lock)")
MOST_KILLS = 8  # of a series
PATIENCE = 600  # seconds after which a run hangs


class Problem(Exception):  # noqa: N818 — a finding
    """What is not as it should be after a kill."""


@dataclass(frozen=True)
class Life:
    """How long an uninterrupted run is."""

    seconds: float  # of computing
    events: int  # changes of files


def uninterrupted(words: list[str], folder: Path, log: Path) -> Life:
    """Run the command twice without a kill: the second time with everything imported, as all that follow are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.toml").write_text(STUDY)
    imported, counted = folder / "imported.json", folder / "events"
    finish(forks.command(words, folder, log, lambda: forks.telling_imports(imported)), log)
    forks.import_as(imported)
    shutil.rmtree(folder / "run")
    began = _children_seconds()
    finish(forks.command(words, folder, log, lambda: _count(counted)), log)
    return Life(_children_seconds() - began, counted.stat().st_size)


def kill(words: list[str], folder: Path, log: Path, kind: str, at: float) -> bool:
    """Start the command and kill it and all that it has started; False if it had ended well before."""
    if kind == "files":
        child = forks.command(words, folder, log, lambda: _kill_at(round(at)))
        at = float("inf")
    else:
        child = forks.command(words, folder, log)
    status = _watched(child, at)
    forks.kill(child)  # what it has started
    if status not in (0, -signal.SIGKILL):
        raise Problem(f"exit status {status}: {log.read_text()[-800:]}")
    return status != 0


def _count(file: Path) -> None:
    """Count changes of files by the length of a file."""
    to = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    forks.at_file_event(lambda number: os.write(to, b".") and None)


def _kill_at(number: int) -> None:
    forks.at_file_event(lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == number else None)


def _children_seconds() -> float:
    return os.times().children_user + os.times().children_system


def _watched(child: int, at: float) -> int:
    """Kill a process when it has computed for so long; its exit status."""
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        if forks.cpu_seconds(child) >= at:
            break
        time.sleep(0.002)
    else:
        forks.kill(child)
        forks.end(child)
        raise Problem(f"it hangs for {PATIENCE} seconds")
    forks.kill(child)
    return forks.end(child)


def finish(child: int, log: Path) -> None:
    """Let a command end by itself."""
    status = _watched(child, float("inf"))
    text = log.read_text(errors="replace")
    if status or "Traceback" in text:
        raise Problem(f"exit status {status}: {text[-800:]}")


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
    ".json": same_json,
    "metrics.csv": same_rows,
}


def moment(chance: random.Random, life: Life) -> tuple[str, float]:
    """When to kill, over the whole life of a run."""
    kind = chance.choice(("files", "files", "time", "time", "start"))
    if kind == "files":
        return kind, chance.randint(1, life.events)
    return kind, round(chance.random() * (life.seconds if kind == "time" else 0.1), 4)


def series(command: str, number: int, folder: Path, expected: Path, life: Life) -> dict[str, Any]:
    """One command, killed some times and then left alone."""
    chance, log = random.Random(f"{command} {number}"), folder / "log.txt"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "study.toml").write_text(STUDY)
    words, kills, problem = [*COMMANDS[command], "-o", "run"], 0, ""
    moments, began = [moment(chance, life) for _ in range(chance.randint(1, MOST_KILLS))], _children_seconds()
    try:
        for kind, at in moments:
            if not kill(words, folder, log, kind, at):
                break
            kills += 1
        finish(forks.command(words, folder, log), log)
        check(folder / "run", expected / "run")
    except Problem as found:
        problem = str(found)
    if not problem:
        shutil.rmtree(folder)
    return {
        "command": command,
        "number": number,
        "kills": kills,
        "problem": problem,
        "moments": moments[: kills + 1],
        "seconds": round(_children_seconds() - began, 2),
    }


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Counts by command."""
    rows = [f"{'':12}{'series':>8}{'kills':>8}{'problems':>10}"]
    lines = list(lines)
    for command in COMMANDS:
        own = [line for line in lines if line["command"] == command]
        bad = sum(bool(line["problem"]) for line in own)
        rows.append(f"{command:12}{len(own):8}{sum(line['kills'] for line in own):8}{bad:10}")
    return "\n".join(rows)


def main() -> None:
    """Read the options."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--kills", type=int, default=1000, help="in all, those of earlier times included")
    words.add_argument("--commands", default=",".join(COMMANDS))
    words.add_argument("--out", type=Path, default=Path("runs/kills"))
    words.add_argument("--smoke", action="store_true", help="one kill, to see whether the script still runs")
    asked = words.parse_args()
    if asked.smoke:  # no TemporaryDirectory, which the first fork that ends would remove
        vars(asked).update(kills=1, commands="pretrain", out=Path(tempfile.mkdtemp(prefix="kills-")))
    if problems := go_on(asked):
        sys.exit(f"{problems} of the series had a problem; {asked.out} keeps their folders")
    if asked.smoke:
        shutil.rmtree(asked.out)


def go_on(asked: argparse.Namespace) -> int:
    """Series after series, until there were so many kills; how many of all had a problem."""
    out = asked.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(out / "cache")
    forks.import_all()
    forks.remember_drawings(out / "drawn")
    state = out / "series.jsonl"
    lines = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
    chosen = asked.commands.split(",")
    lives: dict[str, Life] = {}
    while sum(line["kills"] for line in lines if line["command"] in chosen) < asked.kills:
        # All commands have the same time, so that those that are soon done are killed more often.
        command = min(chosen, key=lambda name: sum(line["seconds"] for line in lines if line["command"] == name))
        expected = out / "expected" / command
        if command not in lives:
            shutil.rmtree(expected, ignore_errors=True)
            again = uninterrupted([*COMMANDS[command], "-o", "run"], expected, out / f"{command}.log")
            print(f"{command}: {again}", flush=True)
            lives[command] = again
        number = sum(line["command"] == command for line in lines)
        line = series(command, number, out / f"{command}-{number}", expected, lives[command])
        lines.append(line)
        with state.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{command} {number}: {line['kills']} kills {line['problem']}", flush=True)
    print(f"Sightline {sl.__version__}\n{table(lines)}")
    return sum(bool(line["problem"]) for line in lines)


if __name__ == "__main__":
    main()
