"""Segmenters compared: their numbers and paired differences, what is not trained again, the page, the command."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.words import options
from typer.testing import CliRunner

import sightline as sl
from sightline.api import segment
from sightline.cli.application import app
from sightline.measure.estimators.overlap import iou_of, mean_over_classes
from sightline.studies.segmenters import figures, headlines, tables

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=16&num_heads=2&num_classes=0"
IMAGES = "shapes:scenes?size=32&train=8&val=0&test=6"
TINY: dict[str, Any] = {"size": 32, "batch": 4, "epochs": 1, "lr": 5e-3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> sl.Run:
    out = tmp_path_factory.mktemp("segmenters") / "x"
    return segment({"a": VIT, "b": f"{VIT}&seed=1"}, IMAGES, out, settings=TINY, workers=0, show_progress=False)


def test_numbers_are_those_of_the_trainings(run: sl.Run) -> None:
    assert run.path is not None
    result = run["segmenters"]
    for name in ("a", "b"):
        with np.load(run.path / "trainings" / name / "segments.npz") as kept:
            counts = kept["counts"].sum(0)
        np.testing.assert_allclose(result.miou.sel(encoder=name).item(), mean_over_classes(iou_of(counts)))
        np.testing.assert_allclose(result.iou.sel(encoder=name), iou_of(counts))
    difference = result.difference.sel(encoder="b", other="a").item()
    np.testing.assert_allclose(difference, result.miou.sel(encoder="b").item() - result.miou.sel(encoder="a").item())
    assert int(result.pixels.sum()) == 6 * 32 * 32
    assert result.gallery.sizes["gallery_column"] == 4
    assert result["class"].values[0] == "background"


def test_differences_of_miou_have_an_interval_over_the_test_images(run: sl.Run) -> None:
    assert run.path is not None
    without = []
    for name in ("a", "b"):
        with np.load(run.path / "trainings" / name / "segments.npz") as kept:
            counts = kept["counts"]
        without.append([mean_over_classes(iou_of(np.delete(counts, i, 0).sum(0))) for i in range(6)])
    apart = np.array(without[0]) - np.array(without[1])
    found = run.contrast("segmenters.miou", {"encoder": "a"}, {"encoder": "b"})
    assert found.value == pytest.approx(-run["segmenters"].difference.sel(encoder="b", other="a").item())
    assert found.error == pytest.approx(np.sqrt(5 / 6 * np.square(apart - apart.mean()).sum()), rel=1e-6)


def test_the_page_has_tables_figures_and_a_gallery(run: sl.Run) -> None:
    result = run["segmenters"]
    first, differences = tables(result)
    assert [row[0] for row in first.rows] == ["a", "b"]
    assert [row[0] for row in differences.rows] == ["b"]
    assert [figure.name for figure in figures(result)] == ["classes"]
    assert headlines(result)[0][1] == f"{result.miou.values[0]:.1%}"
    page = sl.write_report(run).read_text()
    assert "Images, labels and decisions" in page
    assert "Differences from a" in page


def test_the_command_finds_what_is_trained(run: sl.Run) -> None:
    words = ["segment", f"a={VIT}", f"b={VIT}&seed=1", "--images", IMAGES, "-o", str(run.path), "--workers", "0"]
    told = CliRunner().invoke(app, [*words, "--verbose", *options(TINY)])
    assert told.exit_code == 0, told.output
    assert "mIoU, linear head, frozen" in " ".join(told.output.split())


def test_a_class_beyond_the_images_is_refused_before_the_first_training(tmp_path: Path) -> None:
    with pytest.raises(sl.InputError, match="UperNet looks at 4 blocks"):
        segment(VIT, IMAGES, tmp_path / "x", settings=TINY | {"head": "upernet"}, show_progress=False)
    assert not (tmp_path / "x").exists()
