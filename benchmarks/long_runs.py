"""Memory of a long pass and of a long training, over their steps: it should not grow.

    python benchmarks/long_runs.py [--steps 10000] [--of pass,training]

Resident memory is read after every hundredth of the steps. What counts is the second half, since caches fill in the
first: its line, fitted by least squares, in kB for a thousand steps, and how far the highest is above the lowest.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sightline as sl
from sightline.measure import analyze
from sightline.training.loop import Loop

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=12&num_heads=2"
SETTINGS = {"batch": 8, "depth": 1, "width": 12, "heads": 2, "patch": 8, "size": 16, "watch": [], "save_minutes": 0.05}


def resident() -> int:
    """kB of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1000


def watched(function: Callable[..., Any], seen: list[int], every: int) -> Callable[..., Any]:
    """The same function, after some of whose calls the memory is read."""
    calls = 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        result = function(*arguments, **more)
        calls += 1
        if calls % every == 0:
            seen.append(resident())
        return result

    return counted


def long_pass(steps: int, seen: list[int], every: int) -> None:
    """Batches of four images through four analyses."""
    analyze._step = watched(analyze._step, seen, every)
    images = sl.load_images(f"shapes?size=16&train=0&val=0&test={4 * steps}")
    with tempfile.TemporaryDirectory() as folder:
        names = ["cka", "fourier", "attention", "diversity"]
        sl.analyze(VIT, images, names, batch=4, workers=0, show_progress=False, out=Path(folder) / "run")


def long_training(steps: int, seen: list[int], every: int) -> None:
    """Steps of eight images, with a checkpoint every three seconds."""
    Loop._save_when_due = watched(Loop._save_when_due, seen, every)  # type: ignore[method-assign]
    settings = SETTINGS | {"epochs": steps / 8}
    with tempfile.TemporaryDirectory() as folder:
        sl.pretrain(
            "mae",
            "shapes?size=16&train=64&val=0&test=8",
            Path(folder) / "run",
            settings=settings,
            workers=0,
            show_progress=False,
        )


def main() -> None:
    """Print a line for each."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--steps", type=int, default=10_000)
    words.add_argument("--of", default="pass,training")
    asked = words.parse_args()
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, {asked.steps} steps")
    for name in asked.of.split(","):
        seen: list[int] = []
        {"pass": long_pass, "training": long_training}[name](asked.steps, seen, max(1, asked.steps // 100))
        late = np.array(seen[len(seen) // 2 :])
        slope = np.polyfit(np.linspace(asked.steps / 2, asked.steps, len(late)), late, 1)[0] * 1000
        spread = int(late.max() - late.min())
        print(
            f"  {name:9} {late[-1] / 1000:6.0f} MB, {slope:+8.1f} kB per 1000 steps, {spread} kB from lowest to highest"
        )


if __name__ == "__main__":
    main()
