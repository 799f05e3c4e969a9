#!/usr/bin/env python
"""Train the encoders that studies stand on, one after the other, and put the reference encoders into sightline/zoo.

Each ViT of a group sees the same number of images through the same backbone. The learning rate of an objective is found
in three short trials of the same length: the rate with the lowest loss of a reconstructive objective, with the highest
k-NN accuracy on val of any other. The trials are stored with the encoder (trials.csv), until it is finished in
scripts/trials, so that they outlive runs/zoo. Rates of CNNs are not tried.

scripts/zoo.py                       train all reference encoders that runs/zoo does not have, and store them
scripts/zoo.py moco_v3 tuned         only these, by name or by group: objectives, tuned
scripts/zoo.py cnns seeds sizes windows weights longer   what only studies need: stored in scripts/trained
scripts/zoo.py cifar10=parquet:PATH  the same backbone on CIFAR-10: it stays in runs/zoo
scripts/zoo.py --bf16 dino           in bfloat16, as its recipe will say: not always faster (benchmarks/pretrain.py)
scripts/zoo.py --list                names, and what is finished
scripts/zoo.py --pack                train nothing, store what is finished
scripts/zoo.py --pixels              train nothing, print the k-NN accuracy of raw pixels

An interrupted training goes on where it stopped.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

import sightline as sl
from sightline.core.files import write_atomically
from sightline.core.folders import latest
from sightline.core.stopping import Stopped
from sightline.images.preprocess import Preprocess
from sightline.studies.papers import CONVNEXT, RESNET
from sightline.training.watchers import FeatureWatch

RUNS, ZOO, TRIALS = Path("runs/zoo"), Path("sightline/zoo"), Path("scripts/trials")
TRAINED = Path("scripts/trained")  # `run:scripts/trained/NAME`: a study over seeds needs encoders of several machines
RATES = (5e-4, 1e-3, 2e-3)
TRIAL = {"epochs": 2.0, "warmup_epochs": 0.5, "evaluate_every": 1.0}  # a tenth of the training
BF16 = {"precision": "bf16"} if "--bf16" in sys.argv else {}
BY_LOSS = ("beit", "mae", "simmim")  # after so few epochs their k-NN accuracy is hardly above that of random weights
SEEN = 327_680  # images that a reference encoder sees
THIRD = {"epochs": 20 / 3}  # of the budget, for what a study varies
THRICE = {"epochs": 60.0}  # the budget: 983,040 images


@dataclass(frozen=True)
class Training:
    """One encoder: what it is called, the small recipe that it follows, and what is other than there."""

    name: str
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """Where it is trained."""
        return RUNS / self.name

    @property
    def stored(self) -> Path | None:
        """Where it is kept when it is finished; encoders of the images of others are not."""
        if "images" in self.settings:
            return None
        zoo = (one.name for group in STORED for one in GROUPS[group]())
        return (ZOO if self.name in zoo else TRAINED) / self.name

    @property
    def over(self) -> bool:
        """Whether it need not be trained: here, or elsewhere if only studies use it."""
        elsewhere = self.stored is not None and self.stored.parent == TRAINED and self.stored.is_dir()
        return elsewhere or finished(self.run)

    @property
    def tuned(self) -> bool:
        """Whether it starts from a reference encoder."""
        return self.recipe == "finetune"


def objectives() -> list[Training]:
    """The reference encoders."""
    roles = ("moco_v3", "dino", "mae", "simmim", "simclr", "msn", "beit", "supervised", "hybrid", "dino_single")
    return [Training(name, name) for name in roles]


def tuned() -> list[Training]:
    """Reference encoders, fine-tuned; the weights after each epoch stay in runs/zoo."""
    starts = ("moco_v3", "dino", "mae", "msn", "simmim", "hybrid")
    return [Training(f"{name}_tuned", "finetune", {"encoder": f"zoo:{name}", "save_epochs": True}) for name in starts]


def cnns() -> list[Training]:
    """Joint-embedding, supervised and reconstructing CNNs, of which two have a second seed."""
    resnet, convnext = {**THIRD, **RESNET}, {**THIRD, **CONVNEXT, "lr": 2e-3}
    return [
        Training("supervised_cnn", "supervised", resnet),
        Training("simclr_cnn", "simclr", resnet),
        Training("supervised_cnn_1", "supervised", {**resnet, "seed": 1}),
        Training("simclr_cnn_1", "simclr", {**resnet, "seed": 1}),
        Training("mae_cnn", "mae", convnext),
        Training("moco_v3_cnn", "moco_v3", resnet),
    ]


def seeds() -> list[Training]:
    """Second and third seeds."""
    names = ("moco_v3", "dino", "mae", "simmim")
    return [Training(f"{name}_{seed}", name, {"seed": seed}) for seed in (1, 2) for name in names]


def sizes() -> list[Training]:
    """Three widths, with heads of one width."""
    return [
        Training(f"{name}_width{width}", name, {**THIRD, "width": width, "heads": width // 16})
        for name in ("moco_v3", "simmim")
        for width in (48, 96, 192)
    ]


def windows() -> list[Training]:
    """Attention to 1 × 1 and 3 × 3 patches; without a window it is `moco_v3_width96`."""
    return [Training(f"moco_v3_window{k}", "moco_v3", {**THIRD, "attention_window": k}) for k in (1, 3)]


def weights() -> list[Training]:
    """λ of the hybrid, from SimMIM alone to MoCo-v3 alone."""
    return [Training(f"hybrid_{share}", "hybrid", {**THIRD, "weight": share}) for share in (0.0, 0.2, 0.5, 0.8, 1.0)]


def longer() -> list[Training]:
    """Three times the budget, to see which findings depend on it."""
    return [Training(f"{name}_longer", name, THRICE) for name in ("mae", "simmim", "moco_v3", "dino")]


def cifar10(images: str) -> list[Training]:
    """Half of the budget on natural images of 32 pixels, in the 8 × 8 patches of 4 pixels that go with them."""
    natural = {"images": images, "size": 32, "patch": 4, "epochs": SEEN / 2 / 50_000}
    return [Training(f"{name}_cifar10", name, natural) for name in ("moco_v3", "mae", "simmim", "dino")]


GROUPS = {
    "objectives": objectives,
    "tuned": tuned,
    "cnns": cnns,
    "seeds": seeds,
    "sizes": sizes,
    "windows": windows,
    "weights": weights,
    "longer": longer,
}
STORED = ("objectives", "tuned")


def chosen(words: Sequence[str]) -> list[Training]:
    """The trainings that words name; without words those of the zoo."""
    every = {one.name: one for group in GROUPS.values() for one in group()}
    found: list[Training] = []
    for word in words or STORED:
        group, _, images = word.partition("=")
        if group == "cifar10" and images:
            found += cifar10(images)
        elif word in GROUPS:
            found += GROUPS[word]()
        elif word in every:
            found.append(every[word])
        else:
            sys.exit(f"There is no {word!r}; name {', '.join((*GROUPS, 'cifar10=IMAGES', *every))}")
    return found


def trials(one: Training) -> pd.DataFrame:
    """The trials that choose its learning rate, one row per rate; those that are not stored are made."""
    for stored in (ZOO / one.recipe / "trials.csv", TRIALS / f"{one.recipe}.csv"):
        if stored.is_file():
            return pd.read_csv(stored)
    rows = []
    for lr in RATES:
        run = RUNS / "trials" / f"{one.recipe}-{lr:g}"
        if not finished(run):
            sl.pretrain(out=run, recipe=one.recipe, settings={**TRIAL, **BF16, "lr": lr}, resume=True)
        table = pd.read_csv(run / "metrics.csv")
        loss, accuracies = table.loss.iloc[-5:].mean(), table.filter(like="knn").iloc[-1]
        rows.append({"lr": lr, "loss": loss, **accuracies, "seconds": table.seconds.iloc[-1]})
    found = pd.DataFrame(rows)
    TRIALS.mkdir(exist_ok=True)
    write_atomically(TRIALS / f"{one.recipe}.csv", found.to_csv(index=False).encode())
    return found


def best(one: Training) -> float:
    """The learning rate that the trials choose."""
    table = trials(one)
    if one.recipe in BY_LOSS:
        return float(table.lr.iloc[int(table.loss.argmin())])
    return float(table.lr.iloc[int(table.filter(like="knn").max(axis=1).argmax())])


def train(one: Training) -> None:
    """Train one encoder to its end."""
    if one.tuned:
        sl.finetune(out=one.run, recipe=one.recipe, settings={**one.settings, **BF16}, resume=True)
    else:
        settings = {**one.settings, **BF16}
        if "lr" not in settings:
            settings["lr"] = best(one)
        sl.pretrain(out=one.run, recipe=one.recipe, settings=settings, resume=True)


def pack(run: Path, target: Path) -> None:
    """Weights rounded to bfloat16, the recipe, and the curve with at most 200 rows."""
    checkpoint = latest(run)
    assert checkpoint is not None
    encoder = sl.load_encoder(f"run:{run}")
    sl.save_encoder(replace(encoder, name=target.name), target, dtype=torch.bfloat16)
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
    measured = table.filter(regex="knn|accuracy")
    kept = table[(table.index % every == every - 1) | measured.notna().any(axis=1)]
    kept.to_csv(target / "metrics.csv", index=False)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    print(f"{target}: {size / 1e6:.2f} MB,", *(f"{name} {value:.1%}" for name, value in measured.iloc[-1].items()))


def finished(run: Path) -> bool:
    """Whether a training has made all of its epochs."""
    checkpoint = latest(run)
    if not (run / "metrics.csv").is_file() or checkpoint is None:
        return False
    epochs, table = tomllib.loads((run / "recipe.toml").read_text())["epochs"], pd.read_csv(run / "metrics.csv")
    return bool(len(table) and table.epoch.iloc[-1] >= epochs - 1e-3 and table.step.iloc[-1] == int(checkpoint.name))


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
    for one in chosen([word for word in words if not word.startswith("-")]):
        if "--list" in words:
            print(f"{one.name:20} {'finished' if one.over else 'not finished'}")
            continue
        try:
            if "--pack" not in words and not one.over:
                train(one)
        except Stopped as stop:
            sys.exit(str(stop))
        if not one.over:
            print(f"{one.run} is not finished")
        elif one.stored is not None and finished(one.run):
            pack(one.run, one.stored)
            if one.stored.parent == ZOO and not one.tuned:
                trials(one).to_csv(one.stored / "trials.csv", index=False)
                (TRIALS / f"{one.recipe}.csv").unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
