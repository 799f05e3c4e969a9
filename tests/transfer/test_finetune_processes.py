"""Two processes with half the batch each fine-tune what one process fine-tunes, through the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.processes import in_two
from support.words import options

from sightline.api import finetune
from sightline.core.folders import latest

ENCODER = "timm:vit_tiny_patch16_224@random?size=16&patch_size=4&depth=2&embed_dim=16&num_heads=2&num_classes=0"
SETTINGS: dict[str, Any] = {
    "images": "shapes?size=16&train=48&val=18&test=14",
    "batch": 16,
    "epochs": 2,
    "optimizer": "sgd",  # AdamW would make steps of full size out of the rounding of gradients that are 0
    "lr": 0.05,
    "log_every": 1,
    "evaluate_every": 1,
    "drop_path": 0.0,
    "clip": 1.0,
    "ema": 0.9,
    "mixup": 0.8,
    "cutmix": 1.0,
    "randaugment": [9, 0.5],
    "erase": 0.5,
    "keep": 3,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    finetune(ENCODER, out=folder / "one", settings=SETTINGS, device="cpu", show_progress=False)
    sets = options(SETTINGS)
    in_two("finetune", ENCODER, "-o", str(folder / "two"), "--device", "cpu", *sets)
    return folder / "one", folder / "two"


def test_rows_are_those_of_one_process(runs: tuple[Path, Path]) -> None:
    one, two = (pd.read_csv(run / "metrics.csv") for run in runs)
    assert one.step.tolist() == two.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert one.loss.nunique() == 6
    for column in ("loss", "accuracy", "gradient_norm", "lr", "val_accuracy", "test_accuracy"):
        np.testing.assert_allclose(two[column], one[column], rtol=1e-3, err_msg=column)
    results = [json.loads((run / "run.json").read_text())["results"] for run in runs]
    assert results[0] == results[1]


def test_weights_are_those_of_one_process(runs: tuple[Path, Path]) -> None:
    folders = [latest(run) for run in runs]
    one, two = (load_file(folder / "training.safetensors") for folder in folders if folder is not None)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-5)
    moved = one["model.head.weight"] - one["average.head.weight"]
    assert moved.abs().max() > 1e-3  # what is compared has moved by far more than the tolerance


def test_one_process_writes_for_all(runs: tuple[Path, Path]) -> None:
    files = [[path for path in run.rglob("*") if "tfevents" not in path.name] for run in runs]
    names = [sorted(str(path.relative_to(run)) for path in of) for run, of in zip(runs, files, strict=True)]
    assert names[0] == names[1]
    assert {"steps/00000000", "steps/00000006"} <= set(names[0])
