#!/usr/bin/env python
"""Probe and fine-tune the reference encoders and random weights, and print the table of docs/transfer.md.

scripts/transfer.py                  all of them, those first of which runs/transfer has nothing yet
scripts/transfer.py moco_v3 random   only these
scripts/transfer.py --table          train nothing, print what is finished

Given again it goes on where it stopped. Measured on one core: see docs/transfer.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import xarray as xr
from safetensors import safe_open

import sightline as sl
from sightline.analyses.dynamics.paths import path_efficiency
from sightline.core.run_folder import kept_epochs
from sightline.core.stopping import Stopped
from sightline.encoders.sources import zoo
from sightline.measure.estimators.intervals import wilson

RUNS, IMAGES = Path("runs/transfer"), "shapes?size=48"
PROBED = 4096  # training images of the probes; fine-tuning has all
RANDOM = "timm:vit_tiny_patch16_224@random?size=48&embed_dim=96&depth=8&num_heads=6&patch_size=8&num_classes=0"
COLUMNS = (
    "encoder", "k-NN, CLS", "linear, last layer", "linear, best layer", "depth 3, last layer",
    "last layer ⊕ best block", "fine-tuned", "path efficiency",
)  # fmt: skip


def measure(name: str) -> None:
    """Probes and k-NN on frozen features, then fine-tuning with the small recipe, each in a folder of its own."""
    encoder = RANDOM if name == "random" else f"zoo:{name}"
    probed = sl.load_images(IMAGES, limit=PROBED)
    run = sl.analyze({name: encoder}, probed, ["knn", "probes"], out=RUNS / "probes" / name)
    sl.write_report(run)
    sl.finetune(encoder, IMAGES, RUNS / "finetune" / name, settings={"save_epochs": True}, resume=True)


def finished(name: str) -> bool:
    """Whether all numbers of an encoder are there."""
    run, tuned = RUNS / "probes" / name / "results", RUNS / "finetune" / name / "run.json"
    return (run / "probes.nc").is_file() and tuned.is_file() and "results" in json.loads(tuned.read_text())


def share(value: Any, low: Any, high: Any) -> str:
    """An accuracy and its interval, in percent."""
    return f"{100 * float(value):.1f} ({100 * float(low):.1f}–{100 * float(high):.1f})"


def chosen(result: xr.Dataset, probe: str, last: bool) -> str:
    """Accuracy of the probe that the selection split prefers, on the last layer or anywhere, and where that is."""
    part = result.sel(probe=probe).squeeze("encoder")
    part = part.isel(site=[-1]) if last else part
    part = part.stack(at=("site", "feature")).dropna("at", subset=["accuracy"])
    best = part.isel(at=int(part.selection.argmax("at")))
    site, feature = best["at"].item()
    return f"{share(best.accuracy, best.accuracy_low, best.accuracy_high)} {feature if last else f'{site}, {feature}'}"


def row(name: str) -> list[str]:
    """The numbers of an encoder."""
    run, tuned = sl.open_run(RUNS / "probes" / name), RUNS / "finetune" / name
    knn = run["knn"].squeeze("encoder").isel(site=-1).sel(feature="cls")
    about = json.loads((tuned / "run.json").read_text())
    right, n = about["results"]["test_accuracy"], about["images"]["splits"]["test"]
    weights = [safe_open(folder / "encoder.safetensors", "pt") for folder in kept_epochs(tuned).values()]
    return [
        f"`{name}`",
        share(knn.accuracy, knn.accuracy_low, knn.accuracy_high),
        chosen(run["probes"], "linear", last=True),
        chosen(run["probes"], "linear", last=False),
        chosen(run["probes"], "depth 3", last=True),
        chosen(run["probes"], "multilayer", last=False),
        share(right, *wilson(right * n, n)),
        f"{path_efficiency(weights)[-1]:.2f}",
    ]


def main(words: list[str]) -> None:
    """Measure what is missing, then print what is there."""
    names = [word for word in words if not word.startswith("-")] or [*zoo.pretrained(), "random"]
    for name in sorted(names, key=finished):
        if "--table" not in words:
            try:
                measure(name)
            except Stopped as stop:
                sys.exit(f"{str(stop).partition(';')[0]}; run the same command again to continue")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in names:
        if finished(name):
            print(f"| {' | '.join(row(name))} |")


if __name__ == "__main__":
    main(sys.argv[1:])
