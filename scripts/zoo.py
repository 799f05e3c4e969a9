#!/usr/bin/env python
"""Train the reference encoders of sightline/zoo again, one after the other, and put them there.

Each sees the same number of images through the same backbone. Its learning rate is found in three short trials of the
same length for every objective: the rate with the lowest loss of a reconstructive objective, with the highest k-NN
accuracy on val of any other. The trials are stored with the encoder (trials.csv).

scripts/zoo.py                 train all of which runs/zoo has no finished training, and store them
scripts/zoo.py moco_v3 mae     only these
scripts/zoo.py --pack          train nothing, store what is finished
scripts/zoo.py --pixels        train nothing, print the k-NN accuracy of raw pixels

An interrupted training goes on where it stopped.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pandas as pd
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

import sightline as sl
from sightline.core.files import write_atomically
from sightline.core.run_folder import latest
from sightline.core.stopping import Stopped
from sightline.images.preprocess import Preprocess
from sightline.training.watchers import FeatureWatch

RUNS, ZOO = Path("runs/zoo"), Path("sightline/zoo")
ROLES = ("moco_v3", "dino", "mae", "simmim", "simclr", "msn", "beit", "supervised", "hybrid", "dino_single")
RATES = (5e-4, 1e-3, 2e-3)
TRIAL = {"epochs": 2.0, "warmup_epochs": 0.5, "evaluate_every": 1.0}  # a tenth of the training
BY_LOSS = ("beit", "mae", "simmim")  # after so few epochs their k-NN accuracy is hardly above that of random weights


def tried(name: str) -> pd.DataFrame:
    """The trials of a recipe, one row per learning rate; those that are missing are made."""
    rows = []
    for lr in RATES:
        run = RUNS / "trials" / f"{name}-{lr:g}"
        if not finished(run):
            sl.pretrain(out=run, recipe=name, settings=TRIAL | {"lr": lr}, resume=True)
        table = pd.read_csv(run / "metrics.csv")
        loss, accuracies = table.loss.iloc[-5:].mean(), table.filter(like="knn").iloc[-1]
        rows.append({"lr": lr, "loss": loss, **accuracies, "seconds": table.seconds.iloc[-1]})
    return pd.DataFrame(rows)


def best(name: str, trials: pd.DataFrame) -> float:
    """The learning rate that the trials choose."""
    if name in BY_LOSS:
        return float(trials.lr.iloc[int(trials.loss.argmin())])
    return float(trials.lr.iloc[int(trials.filter(like="knn").max(axis=1).argmax())])


def pack(run: Path, target: Path) -> None:
    """Weights rounded to bfloat16, the recipe, and the curve with at most 200 rows."""
    checkpoint = latest(run)
    assert checkpoint is not None
    sl.save_encoder(sl.load_encoder(f"run:{run}"), target, dtype=torch.bfloat16)
    for part in ("decoder", "head"):
        if (checkpoint / f"{part}.safetensors").is_file():
            tensors = load_file(checkpoint / f"{part}.safetensors")
            rounded = {key: x.bfloat16() if x.is_floating_point() else x for key, x in tensors.items()}
            write_atomically(target / f"{part}.safetensors", save(rounded))
            if (checkpoint / f"{part}.json").is_file():  # trainings before it was written have none of a decoder
                shutil.copy(checkpoint / f"{part}.json", target / f"{part}.json")
    shutil.copy(run / "recipe.toml", target / "recipe.toml")
    table = pd.read_csv(run / "metrics.csv")
    every = -(-len(table) // 200)
    kept = table[(table.index % every == every - 1) | table.filter(like="knn").notna().any(axis=1)]
    kept.to_csv(target / "metrics.csv", index=False)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    accuracies = table.filter(like="knn").iloc[-1].items()
    print(f"{target}: {size / 1e6:.2f} MB,", *(f"{name} {value:.1%}" for name, value in accuracies))


def finished(run: Path) -> bool:
    """Whether a training has made all of its epochs."""
    if not (run / "metrics.csv").is_file() or latest(run) is None:
        return False
    epochs = tomllib.loads((run / "recipe.toml").read_text())["epochs"]
    return bool(pd.read_csv(run / "metrics.csv").epoch.iloc[-1] >= epochs - 1e-3)


class Pixels(nn.Module):
    """An encoder that leaves its input as it is, or first takes some of it away."""

    PREPARED: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        "as the encoders get them": lambda x: x,
        "without the mean of the image": lambda x: x - x.mean((1, 2, 3), keepdim=True),
        "without the mean of each channel": lambda x: x - x.mean((2, 3), keepdim=True),
        "grey, without the mean of the image": lambda x: x.mean(1) - x.mean((1, 2, 3))[:, None, None],
    }

    def __init__(self, prepared: str) -> None:
        super().__init__()
        self.prepare = self.PREPARED[prepared]

    def forward_features(self, x: Tensor) -> Tensor:  # (B, 3, S, S) -> (B, D, 1, 1), a map of one place
        """All pixels as the features of one place."""
        return self.prepare(x).flatten(1)[..., None, None]


def pixels() -> None:
    """What the encoders have to do better: 20-NN of the images themselves, by the protocol of the trainings."""
    images = sl.load_images("shapes?size=48")
    accuracy = FeatureWatch(images, Preprocess((48, 48), 48), torch.device("cpu"))
    for prepared in Pixels.PREPARED:
        print(f"raw pixels, {prepared}: {accuracy(Pixels(prepared))['knn_gap']:.1%}")


def main(words: list[str]) -> None:
    """Train and store."""
    if "--pixels" in words:
        pixels()
        return
    for name in [word for word in words if not word.startswith("-")] or ROLES:
        try:
            if "--pack" not in words and not finished(RUNS / name):
                trials = tried(name)
                sl.pretrain(out=RUNS / name, recipe=name, settings={"lr": best(name, trials)}, resume=True)
        except Stopped as stop:
            sys.exit(str(stop))
        if finished(RUNS / name):
            pack(RUNS / name, ZOO / name)
            tried(name).to_csv(ZOO / name / "trials.csv", index=False)
        else:
            print(f"{RUNS / name} is not finished")


if __name__ == "__main__":
    main(sys.argv[1:])
