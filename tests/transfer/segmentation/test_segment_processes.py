"""Two processes train a segmenter together, through the command line, and make the steps of one."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from support.processes import in_two
from support.trainings import ENCODER
from support.words import options

import sightline as sl
from sightline.api import segment

IMAGES = "shapes:scenes?size=32&train=8&val=4&test=6"
SETTINGS: dict[str, Any] = {
    "size": 32,
    "batch": 4,
    "epochs": 2,
    "lr": 1e-3,
    "log_every": 1,
    "dropout": 0.0,
    "drop_path": 0.0,
    "evaluate_every": 1,
    "frozen": False,
}


def test_two_processes_make_the_steps_of_one(tmp_path: Path) -> None:
    sets = options(SETTINGS)
    in_two("segment", f"a={ENCODER}", "--images", IMAGES, "-o", str(tmp_path / "two"), "--device", "cpu", *sets)
    one = segment({"a": ENCODER}, IMAGES, tmp_path / "one", settings=SETTINGS, workers=0, show_progress=False)
    tables = [pd.read_csv(tmp_path / name / "trainings" / "a" / "metrics.csv") for name in ("one", "two")]
    assert tables[0].step.tolist() == tables[1].step.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(tables[0].loss, tables[1].loss, rtol=1e-5)
    np.testing.assert_allclose(tables[0].val_miou, tables[1].val_miou, atol=2e-3)  # a pixel or two may be a tie
    two = sl.open_run(tmp_path / "two")["segmenters"]
    assert two.attrs["test_images"] == 6
    np.testing.assert_allclose(two.miou, one["segmenters"].miou, atol=2e-3)
