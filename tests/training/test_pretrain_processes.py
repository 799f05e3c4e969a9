"""Two processes with half the batch each train what one process trains, through the command line."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.processes import in_two
from support.trainings import TINY_VIT
from support.words import options

from sightline.api import pretrain
from sightline.core.folders import latest
from sightline.core.settings import parse_settings

SETTINGS: dict[str, Any] = {
    **TINY_VIT,
    "images": "shapes?size=16&train=48&val=16&test=16",
    "batch": 16,
    "epochs": 2,
    # AdamW would make steps of full size out of the rounding of gradients that are 0, such as that of a bias before a
    # batch normalisation.
    "optimizer": "sgd",
    "lr": 0.05,
    "warmup_epochs": 0.5,
    "log_every": 1,
    "evaluate_every": 1,
    "clip": 1.0,
}
HEADS = ["hidden=16", "out=8"]
OBJECTIVES = {
    "moco_v3": HEADS,
    "hybrid": ["mim=simmim", "cl=moco_v3", "simmim.mask_unit=4", *(f"moco_v3.{word}" for word in HEADS)],
}


@pytest.fixture(scope="module", params=OBJECTIVES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    name, folder = request.param, tmp_path_factory.mktemp("runs")
    own = parse_settings(OBJECTIVES[name])
    pretrain(name, out=folder / "one", settings=SETTINGS | own, device="cpu", show_progress=False)
    sets = [*options(SETTINGS), *(f"--set={word}" for word in OBJECTIVES[name])]
    in_two("pretrain", name, "-o", str(folder / "two"), "--device", "cpu", *sets)
    return folder / "one", folder / "two"


def test_losses_are_those_of_one_process(runs: tuple[Path, Path]) -> None:
    one, two = (pd.read_csv(run / "metrics.csv") for run in runs)
    assert one.step.tolist() == two.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert one.loss.nunique() == 6
    np.testing.assert_allclose(two.loss, one.loss, rtol=1e-4)
    np.testing.assert_allclose(two.gradient_norm, one.gradient_norm, rtol=1e-3)
    np.testing.assert_allclose(two.lr, one.lr)


def test_weights_are_those_of_one_process(runs: tuple[Path, Path]) -> None:
    folders = [latest(run) for run in runs]
    one, two = (load_file(folder / "training.safetensors") for folder in folders if folder is not None)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-5)
    # Momentum has parted them: what is compared has moved by far more than the tolerance.
    name = next(name for name in one if name.endswith("momentum_backbone.blocks.0.mlp.fc1.weight"))
    assert (one[name] - one["backbone.blocks.0.mlp.fc1.weight"]).abs().max() > 1e-3


def test_one_process_writes_for_all(runs: tuple[Path, Path]) -> None:
    names = [sorted(path.name for path in run.rglob("*") if "tfevents" not in path.name) for run in runs]
    assert names[0] == names[1]
    assert len(pd.read_csv(runs[1] / "metrics.csv").dropna(subset="knn_cls")) == 2
