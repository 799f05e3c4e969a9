"""Two processes train detectors together, frozen and end to end, through the command line."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.processes import in_two
from support.trainings import ENCODER, TINY_DETECTOR
from support.words import options

import sightline as sl
from sightline.transfer.detection.objects import read_detections

IMAGES = "shapes:scenes?size=32&train=8&val=4&test=40"
SETTINGS: dict[str, Any] = TINY_DETECTOR | {
    "size": 32,
    "batch": 4,
    "epochs": 1,
    "lr": 1e-3,
    "log_every": 1,
    "drop_path": 0.0,
    "evaluate_every": 1,
}


@pytest.mark.parametrize("frozen", [True, False])
def test_two_processes_share_steps_and_test_images(frozen: bool, tmp_path: Path) -> None:
    sets = options(SETTINGS | {"frozen": frozen})
    in_two("detect", f"a={ENCODER}", "--images", IMAGES, "-o", str(tmp_path / "x"), "--device", "cpu", *sets)
    table = pd.read_csv(tmp_path / "x" / "trainings" / "a" / "metrics.csv")
    assert table.step.tolist() == [1, 2]
    assert np.isfinite(table.loss).all()
    assert table.val_box_AP.notna().sum() == 1
    images = sl.load_images(IMAGES)
    found = read_detections(tmp_path / "x" / "trainings" / "a" / "detections.json")
    assert list(found) == images.ids[images.indices("test")].tolist()  # 32 of one process, 8 of the other
    assert sl.open_run(tmp_path / "x")["detection"].attrs["test_images"] == 40
