#!/usr/bin/env python
"""Train the reference encoders, one after the other, and put them where `zoo:NAME` finds them.

scripts/zoo.py                            the encoders of drawn images
scripts/zoo.py dino mae_1 --cifar10 DIR   some of CIFAR-10, whose Parquet files (train, test) lie in DIR
scripts/zoo.py all --cifar10 DIR          seed 0 of all, then seeds 1 and 2, then each of them fine-tuned
scripts/zoo.py --gate --cifar10 DIR       how seed 0 fares: k-NN, linear probes, what the last blocks still do

Everything is trained in `--runs` (runs/zoo). What is finished is not trained again, what was interrupted goes on, and
several processes may train different encoders. `--list` tells what is finished; `--pack` stores it and trains nothing.

On CIFAR-10 joint-embedding encoders get twice the time of reconstructive ones, as in the papers. The settings of each
method are those of the best of three trials of four epochs, by a linear probe on images that the trials never see.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w
import torch
from safetensors.torch import load_file, save

import sightline as sl
from sightline.analyses import probes
from sightline.core.files import write_atomically
from sightline.core.folders import latest
from sightline.core.stopping import Stopped

ZOO, WEIGHTS = Path("sightline/zoo"), Path("weights")
NATURAL = {"size": 32, "patch": 4, "precision": "bf16", "evaluate_every": 4.0, "keep": "log"}
# Epochs of 50,000 images: 2.8 hours of one core for joint embedding, 1.4 for reconstruction, 1 for labels.
EPOCHS = {"moco_v3": 24.0, "dino": 19.0, "mae": 39.4, "simmim": 34.4, "supervised": 22.0}
RATES: list[dict[str, Any]] = [{"lr": 5e-4}, {"lr": 1e-3}, {"lr": 2e-3}]
# With 64 images a batch the last blocks of MoCo-v3 attend to all patches alike.
TRIALS = {"moco_v3": [{"lr": 1e-3, "batch": 64}, {"lr": 1e-3, "batch": 256}, {"lr": 2e-3, "batch": 256}]}
TRIAL = {"epochs": 4.0, "warmup_epochs": 0.5, "evaluate_every": 0.0, "keep": ""}
HELD_OUT = 5_000  # training images, balanced over classes, that trials do not see
SEEDS = (0, 1, 2)
GATE_SITES = ["block.*", "norm"]


@dataclass(frozen=True)
class Training:
    """One encoder: its name, the recipe that it follows, and what is other than there."""

    name: str
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    natural: bool = False
    start: str = ""  # the training that a fine-tuning begins with

    @property
    def folder(self) -> str:
        """Below the folder of runs, of the zoo or of the weights."""
        return f"cifar10/{self.name}" if self.natural else self.name

    @property
    def stored(self) -> Path:
        """Where it is put: seed 0 and what was trained on drawn images come with the package."""
        ours = not self.natural or self.name in EPOCHS
        return (ZOO if ours else WEIGHTS) / self.folder


def drawn() -> list[Training]:
    """The encoders of drawn images."""
    names = ("supervised", "dino", "simclr", "moco_v3")
    return [*(Training(name, name) for name in names), Training("mae", "mae", {"epochs": 60.0})]


def natural() -> list[Training]:
    """Those of CIFAR-10: five methods with three seeds each, and the self-supervised ones fine-tuned."""
    trained = [
        Training(method if not seed else f"{method}_{seed}", method, {"epochs": epochs, "seed": seed}, natural=True)
        for seed in SEEDS
        for method, epochs in EPOCHS.items()
    ]
    tuned = [
        Training(f"{one.name}_tuned", "finetune", {"epochs": 5.0, "keep": 10, "precision": "bf16"}, True, one.name)
        for one in trained
        if one.recipe != "supervised"
    ]
    return [*trained, *tuned]


class Work:
    """Trains, in a folder of runs, on the images that were given."""

    def __init__(self, runs: Path, cifar10: Path | None) -> None:
        self.runs = runs
        self.cifar10 = None if cifar10 is None else replace(sl.load_images(f"parquet:{cifar10}"), name="cifar10")

    def train(self, one: Training) -> None:
        """Train one encoder to its end."""
        run = self.runs / one.folder
        if not one.natural:
            self._note(run, partial(sl.pretrain, one.recipe, out=run, settings=one.settings, resume=True))
        elif one.start:
            start = f"run:{self.runs / 'cifar10' / one.start}"
            images = self._images()
            self._note(run, partial(sl.finetune, start, images, run, settings=one.settings, resume=True))
        else:
            settings = NATURAL | self.best(one.recipe) | dict(one.settings)
            images = self._images()
            self._note(run, partial(sl.pretrain, one.recipe, images, run, settings=settings, resume=True))

    def best(self, method: str) -> dict[str, Any]:
        """What the trials of a method choose: the best linear probe among those whose last blocks do something."""
        table = self.trials(method)
        alive = table[table.nmi_last_half > 0.01]
        chosen = (alive if len(alive) else table).sort_values("probe", ascending=False).iloc[0]
        names = [name for name in ("lr", "batch") if name in table]
        return {name: int(chosen[name]) if name == "batch" else float(chosen[name]) for name in names}

    def trials(self, method: str) -> pd.DataFrame:
        """The trials of a method, a row each; those that are not there are made."""
        file = self.runs / "cifar10" / "trials" / f"{method}.csv"
        if file.is_file():
            return pd.read_csv(file)
        rows = []
        for number, settings in enumerate(TRIALS.get(method, RATES)):
            run = file.parent / f"{method}-{number}"
            of = NATURAL | TRIAL | settings
            seen = self._images("trial")
            self._note(run, partial(sl.pretrain, method, seen, run, settings=of, resume=True))
            rows.append({**settings, **self.told(f"run:{run}"), "seconds": _seconds(run)})
        found = pd.DataFrame(rows)
        write_atomically(file, found.to_csv(index=False).encode())
        return found

    def told(self, reference: str) -> dict[str, float]:
        """A linear probe (ridge) on val, the better of CLS and mean; attention and tokens of the last half."""
        held_out = self._images("trial")
        scored = replace(held_out, splits={"train": held_out.splits["train"], "test": held_out.splits["val"]})
        encoder = {"encoder": sl.load_encoder(reference)}
        ridge = probes.ProbesConfig(kinds=("ridge",))
        probe = sl.analyze(encoder, scored, {"probes": ridge}, sites=["norm"], show_progress=False)["probes"]
        few = scored.sample(512, 0)
        look = sl.analyze(encoder, few, ["attention", "diversity"], show_progress=False)
        nmi, cosine = (
            values.dropna("site").isel(site=slice(6, None))
            for values in (look["attention"].nmi_mean.squeeze(), look["diversity"].cosine.sel(kind="tokens").squeeze())
        )
        return {
            "probe": float(probe.accuracy.max()),
            "nmi_last_half": float(nmi.mean()),
            "token_cosine_last_half": float(cosine.mean()),
        }

    def finished(self, one: Training) -> bool:
        """Whether a training has made all of its steps."""
        return _finished(self.runs / one.folder)

    def _images(self, purpose: str = "") -> sl.Images:
        """CIFAR-10; for a trial, and for choosing a block, with a part of the training images as val."""
        if self.cifar10 is None:
            sys.exit("Give the folder of CIFAR-10's Parquet files: --cifar10 DIR")
        if not purpose:
            return self.cifar10
        every = self.cifar10.splits["train"]
        part = replace(self.cifar10, splits={"train": every}).sample(HELD_OUT, seed=0).splits["train"]
        rest = np.setdiff1d(every, part)
        return replace(
            self.cifar10, name="cifar10 with val", splits={**self.cifar10.splits, "train": rest, "val": part}
        )

    def _note(self, run: Path, train: Any) -> None:
        """Train, and write down on which processor and how long."""
        if _finished(run):
            return
        begun, clock = datetime.now(UTC), time.process_time()
        try:
            train()
        finally:
            file = run / "sessions.json"
            sessions = json.loads(file.read_text()) if file.is_file() else []
            about = {"date": begun.isoformat(timespec="seconds"), "processor": processor()}
            sessions.append({**about, "cpu_seconds": round(time.process_time() - clock)})
            if run.is_dir():
                file.write_text(json.dumps(sessions, indent=1))

    def pack(self, one: Training) -> None:
        """Weights rounded to bfloat16, the recipe, the curve with at most 200 rows, and how it was trained."""
        run, target = self.runs / one.folder, one.stored
        checkpoint = latest(run)
        assert checkpoint is not None
        encoder = sl.load_encoder(f"run:{run}")
        sl.save_encoder(replace(encoder, name=target.name), target, dtype=torch.bfloat16)
        parts = ("decoder", "head") if target.is_relative_to(ZOO) else ("decoder",)
        for part in parts:
            if (checkpoint / f"{part}.safetensors").is_file():
                tensors = load_file(checkpoint / f"{part}.safetensors")
                rounded = {key: x.bfloat16() if x.is_floating_point() else x for key, x in tensors.items()}
                write_atomically(target / f"{part}.safetensors", save(rounded))
                if (checkpoint / f"{part}.json").is_file():
                    shutil.copy(checkpoint / f"{part}.json", target / f"{part}.json")
        shutil.copy(run / "recipe.toml", target / "recipe.toml")
        table = pd.read_csv(run / "metrics.csv")
        every = -(-len(table) // 200)
        measured = table.filter(regex="knn|accuracy")
        kept = table[(table.index % every == every - 1) | measured.notna().any(axis=1)]
        kept.to_csv(target / "metrics.csv", index=False)
        sessions = json.loads((run / "sessions.json").read_text())
        about: dict[str, Any] = {"cpu_hours": round(sum(s["cpu_seconds"] for s in sessions) / 3600, 2)}
        about |= {"interruptions": len(sessions) - 1, "sessions": sessions}
        if one.natural and not one.start:
            about["trials"] = self.trials(one.recipe).to_dict("records")
        write_atomically(target / "training.toml", tomli_w.dumps(about).encode())
        size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        print(f"{target}: {size / 1e6:.2f} MB")

    def gate(self) -> None:
        """Of seed 0: 20-NN and the linear probe at the best block by val, and CKA of block 6 with the last one."""
        chosen, whole = self._images("choice"), self._images()
        by_val = replace(chosen, splits={"train": chosen.splits["train"], "test": chosen.splits["val"]})
        rows = []
        for method in EPOCHS:
            encoder = {method: sl.load_encoder(f"run:{self.runs / 'cifar10' / method}")}
            asked = {"knn": None, "probes": probes.ProbesConfig(kinds=("ridge",))}
            val, test = (
                sl.analyze(encoder, images, asked, sites=GATE_SITES, show_progress=False) for images in (by_val, whole)
            )
            row: dict[str, Any] = {"encoder": method}
            for measure in asked:
                on_val = val[measure].accuracy.squeeze()
                at = on_val.where(on_val.notnull(), -1).argmax(...)
                row[measure] = float(test[measure].accuracy.squeeze().isel(at))
                row[f"{measure}_at"] = " ".join(str(on_val[axis].values[int(i)]) for axis, i in at.items())
            cka = sl.analyze(encoder, whole.sample(2048, 0), ["cka"], sites=["block.*"], show_progress=False)["cka"]
            matrix = cka.cka.isel(tokens=0, encoder_a=0, encoder_b=0)
            row["cka_6_to_last"] = float(matrix.sel(site_a="block.6", site_b="block.11"))
            rows.append(row)
        table = pd.DataFrame(rows).set_index("encoder")
        write_atomically(self.runs / "cifar10" / "gate.csv", table.to_csv().encode())
        print(table.to_string(float_format="{:.3f}".format))


def _finished(run: Path) -> bool:
    checkpoint = latest(run) if run.is_dir() else None
    if not (run / "metrics.csv").is_file() or checkpoint is None:
        return False
    epochs, table = tomllib.loads((run / "recipe.toml").read_text())["epochs"], pd.read_csv(run / "metrics.csv")
    return bool(len(table) and table.epoch.iloc[-1] >= epochs - 1e-2 and table.step.iloc[-1] == int(checkpoint.name))


def _seconds(run: Path) -> int:
    return sum(session["cpu_seconds"] for session in json.loads((run / "sessions.json").read_text()))


def processor() -> str:
    """Its name as Linux tells it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    words = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return f"{words.get('model name')}, family {words.get('cpu family')}, model {words.get('model')}"


def chosen(names: list[str], cifar10: bool) -> Iterator[Training]:
    """The trainings that are named: of CIFAR-10 if its folder is given, else of drawn images."""
    every = {one.name: one for one in (natural() if cifar10 else drawn())}
    for name in every if names in ([], ["all"]) else names:
        if name not in every:
            sys.exit(f"There is no {name!r}; choose from all, {', '.join(every)}")
        yield every[name]


def main() -> None:
    """Train and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="encoders to train; all without it")
    parser.add_argument("--cifar10", type=Path, help="folder with CIFAR-10 as Parquet files")
    parser.add_argument("--runs", type=Path, default=Path("runs/zoo"), help="where trainings are")
    for flag in ("--list", "--pack", "--gate", "--trials"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    work = Work(options.runs, options.cifar10)
    if options.gate:
        work.gate()
        return
    for one in chosen(options.names, options.cifar10 is not None):
        try:
            if options.trials:
                print(one.recipe, work.trials(one.recipe).to_string(index=False), sep="\n")
            elif options.list:
                print(f"{one.folder:28} {'finished' if work.finished(one) else 'not finished'}")
            elif not options.pack:
                work.train(one)
            if not (options.trials or options.list) and work.finished(one):
                work.pack(one)
        except Stopped as stop:
            sys.exit(str(stop))


if __name__ == "__main__":
    main()
