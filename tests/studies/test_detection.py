"""Detectors compared: their numbers and paired differences, what is trained and what is not trained again, the page."""

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from PIL import Image
from support.words import options
from typer.testing import CliRunner

import sightline as sl
from sightline.api import detect
from sightline.cli.application import app
from sightline.core.errors import InputError
from sightline.core.groups import split
from sightline.images.targets import Targets
from sightline.measure.estimators.intervals import jackknife
from sightline.studies.detection import figures, headlines, limits_of, tables
from sightline.transfer.detection.average_precision import Range, ap_of, parts_of, replicates
from sightline.transfer.detection.detect import DetectConfig, train_detector, truth_of
from sightline.transfer.detection.masks import run_lengths
from sightline.transfer.detection.objects import Detections, objects_of, read_detections
from sightline.transfer.detection.pictures import SIDE, Misses, draw, misses
from sightline.transfer.trainings import NOT_YET

detection: Any = importlib.import_module("sightline.studies.detection")
VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=16&num_heads=2&num_classes=0"
IMAGES = "shapes:scenes?size=32&train=12&val=0&test=12"
TINY: dict[str, Any] = {
    "size": 32,
    "batch": 4,
    "epochs": 2,
    "lr": 5e-3,
    "log_every": 10,
    "channels": 8,
    "strides": [4, 8, 16],
    "box_convolutions": 0,
    "box_width": 16,
    "mask_convolutions": 0,
    "mask_size": 4,
    "proposals": 12,
    "regions": 8,
    "detections": 8,
}


def study(out: Path, **more: Any) -> sl.Run:
    encoders = {"a": VIT, "b": f"{VIT}&seed=1"}
    words: dict[str, Any] = {"settings": TINY, "workers": 0, "show_progress": False}
    return detect(more.pop("encoders", encoders), IMAGES, out, **words | more)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> sl.Run:
    return study(tmp_path_factory.mktemp("detection") / "x")


def guessed(images: sl.Images, seed: int) -> dict[str, Detections]:
    """What is there, a little beside its place, sometimes of another class or not at all."""
    chance, found = np.random.default_rng(seed), {}
    where = images.indices("test")
    for name, targets in zip(images.ids[where], images.targets(where), strict=True):
        kept = chance.uniform(size=len(targets.labels)) < 0.9
        labels = np.where(chance.uniform(size=kept.sum()) < 0.8, targets.labels[kept], 3)
        masks = np.roll(targets.masks[kept], int(chance.integers(-1, 2)), 2)
        boxes = (targets.boxes[kept] + chance.normal(0, 0.7, (kept.sum(), 4))).clip(0, 32)
        scores = np.sort(chance.uniform(0.1, 1, kept.sum()))[::-1]
        found[str(name)] = Detections((32, 32), labels, scores, boxes.astype(np.float64), run_lengths(masks))
    return found


def test_numbers_and_differences_are_those_of_the_detections() -> None:
    images = sl.load_images(IMAGES)
    truth, found = truth_of(images, "test"), {"a": guessed(images, 0), "b": guessed(images, 1)}
    results = detection._Results(images, DetectConfig())
    for name, one in found.items():
        results.add(name, one)
    run = sl.Run(None)
    run.save("detection", *split(results.kept(["a", "b"]).beside(results.dataset(["a", "b"]))))
    result, parts = run["detection"], parts_of(list(truth))
    small, large = limits_of(images, DetectConfig())
    ranges = [Range("all", 0, 1e5), Range("small", 0, small), Range("medium", small, large), Range("large", large, 1e5)]
    assert parts.max() == 11  # each image is a part
    both = {}
    for name, kind in itertools.product("ab", ("box", "mask")):
        whole, without = both[name, kind] = replicates(truth, found[name], 16, ranges, kind, parts)
        assert (whole[0] > 0.05).all()
        cell = result.sel(encoder=name, kind=kind)
        for i, measure in enumerate(("AP", "AP50", "AP75", "AR")):
            np.testing.assert_allclose(cell[measure], whole[i], atol=1e-12)
        np.testing.assert_allclose(cell.AP_low, jackknife(whole, without)[0][0], atol=1e-12)
        np.testing.assert_array_equal(whole, ap_of(truth, found[name], 16, ranges, kind))
    assert (result.difference.sel(encoder="a", other="a") == 0).all()
    for kind in ("box", "mask"):
        (a, a_parts), (b, b_parts) = both["a", kind], both["b", kind]
        cell = result.sel(encoder="a", other="b", kind=kind)
        np.testing.assert_allclose(cell.difference, (a - b)[0], atol=1e-12)
        np.testing.assert_allclose(cell.difference_high, jackknife(a - b, a_parts - b_parts)[1][0], atol=1e-12)
        asked = run.contrast("detection.AP", {"encoder": "a"}, {"encoder": "b"}, kind=kind, area="all")
        assert asked.value == pytest.approx((a - b)[0, 0], abs=1e-12)
        assert (asked.low, asked.high) == pytest.approx(
            (cell.difference_low.sel(area="all").item(), cell.difference_high.sel(area="all").item()), abs=1e-9
        )
    assert result.objects.sel(area="all") == sum(len(one.labels) for one in truth.values())
    assert result.objects[1:].sum() >= result.objects[0]  # COCO counts an object at a limit on both sides
    assert result.bin_objects.sum() >= result.objects[0]
    assert result.attrs["test_images"] == 12


def test_each_encoder_has_its_training(run: sl.Run) -> None:
    assert run.path is not None
    for name in ("a", "b"):
        about = json.loads((run.path / "trainings" / name / "run.json").read_text())
        found = read_detections(run.path / "trainings" / name / "detections.json")
        assert list(found) == list(truth_of(sl.load_images(IMAGES), "test"))
        assert run["detection"].AP.sel(encoder=name, kind="box", area="all") == about["results"]["box_AP"]


def test_sizes_are_terciles_of_the_training_objects() -> None:
    images = sl.load_images(IMAGES)
    sides = np.sqrt(np.concatenate([one.masks.sum((1, 2)) for one in images.targets(images.indices("train"))]))
    assert limits_of(images, DetectConfig()) == tuple(np.quantile(sides, [1 / 3, 2 / 3]))
    assert limits_of(images, DetectConfig(areas=(5.0, 9.0))) == (5.0, 9.0)


def test_sizes_without_objects_are_terciles_of_coco_files_too(tmp_path: Path) -> None:
    def limits(sides: list[int]) -> tuple[float, float]:
        boxes = [
            {"id": i, "image_id": 0, "category_id": 1, "bbox": [0, 0, a, a], "area": a * a, "iscrowd": 0}
            for i, a in enumerate(sides, 1)
        ]
        Image.new("RGB", (160, 160)).save(tmp_path / "grey.png")
        about = [{"id": i, "file_name": "grey.png", "width": 160, "height": 160} for i in range(4)]
        categories = [{"id": 1, "name": "thing"}]
        file = tmp_path / "all.json"
        file.write_text(json.dumps({"images": about, "annotations": boxes, "categories": categories}))
        return limits_of(
            sl.load_images(f"coco:{file}?images={tmp_path}&test={file}&test_images={tmp_path}"), DetectConfig()
        )

    assert limits([10, 50, 120]) == (32, 96)
    assert limits([10, 16, 22, 28]) == tuple(np.quantile([10, 16, 22, 28], [1 / 3, 2 / 3]))


def test_an_image_that_one_of_them_could_not_read_counts_for_none() -> None:
    images = sl.load_images(IMAGES)
    first, second = guessed(images, 0), guessed(images, 1)
    fewer = dict(list(second.items())[:-3])
    late, early = (detection._Results(images, DetectConfig()) for _ in range(2))
    for results, order in ((late, ("a", "b")), (early, ("b", "a"))):
        for name in order:
            results.add(name, {"a": first, "b": fewer}[name])
    xr.testing.assert_equal(late.dataset(["a", "b"]), early.dataset(["a", "b"]))
    assert late.dataset(["a", "b"]).attrs["test_images"] == len(fewer)


def test_a_finished_study_is_not_repeated(run: sl.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.path is not None
    monkeypatch.setattr(detection, "train_detector", lambda *_, **__: pytest.fail("it is trained again"))
    assert study(run.path)["detection"].identical(sl.open_run(run.path)["detection"])
    with pytest.raises(InputError, match="settings"):
        study(run.path, settings=TINY | {"lr": 1e-2})


def test_a_stopped_study_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, begun = train_detector, []

    def stopping(encoder: sl.Encoder, *words: Any, **more: Any) -> Any:
        begun.append(encoder.name)
        if begun == ["a", "b"]:
            raise KeyboardInterrupt
        return train(encoder, *words, **more)

    monkeypatch.setattr(detection, "train_detector", stopping)
    brief = {**TINY, "epochs": 0.4, "masks": False}
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path / "x", settings=brief)
    partial = sl.open_run(tmp_path / "x")["detection"]
    assert (partial.reason.sel(encoder="b") == NOT_YET).all()
    assert partial.kind.values.tolist() == ["box"]
    assert "fingerprint" not in partial.attrs
    before = (tmp_path / "x" / "trainings" / "a" / "metrics.csv").read_bytes()
    whole = study(tmp_path / "x", settings=brief)["detection"]
    assert begun == ["a", "b", "a", "b"]
    assert (tmp_path / "x" / "trainings" / "a" / "metrics.csv").read_bytes() == before
    assert not (whole.reason == NOT_YET).any()


def test_the_page_has_tables_the_curve_and_the_gallery(run: sl.Run) -> None:
    assert run.path is not None
    result = run["detection"]
    printed, differences = tables(result)
    assert printed.columns[:8] == [
        "encoder",
        "box AP",
        "box AP50",
        "box AP75",
        "box APs",
        "box APm",
        "box APl",
        "box AR",
    ]
    assert [len(row) for row in printed.rows] == [len(printed.columns)] * 2
    assert printed.rows[0][1].startswith(f"{100 * result.AP.sel(encoder='a', kind='box', area='all').item():.1f} [")
    assert [row[0] for row in differences.rows] == ["b"]
    assert len(headlines(result)) == 4
    (curve,) = figures(result)
    assert set(curve.table.kind) == {"box", "mask"}
    assert result.gallery.shape == (10, 3, SIDE, SIDE, 3)
    missed = [caption.split("misses ")[1:] for caption in result.gallery_row.values.tolist()]
    counts = [sum(int(words.split(",")[0]) for words in row) for row in missed]
    assert counts == sorted(counts, reverse=True)
    page = sl.write_report(run).read_text()
    assert page.count("data:image/png;base64,") == 30
    assert "What is found, and what is missed" in page
    assert "Differences from a" in page


def test_the_command(tmp_path: Path) -> None:
    words = ["detect", f"a={VIT}", "--images", IMAGES, "-o", str(tmp_path / "x"), "--workers", "0"]
    sets = options(TINY | {"epochs": 0.4})
    done = CliRunner().invoke(app, [*words, *sets, "--verbose"])
    assert done.exit_code == 0, done.output
    assert "box AP, frozen" in done.output
    assert (tmp_path / "x" / "report.html").is_file()
    assert (tmp_path / "x" / "figures" / "detection-size.svg").is_file()


def test_what_does_not_fit_is_found_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no grid of patches and no four stages"):
        study(tmp_path / "x", encoders=[VIT, "torchvision:shufflenet_v2_x0_5@random"])
    with pytest.raises(InputError, match="2 trainings would be in one folder, 'trainings/a-b'"):
        study(tmp_path / "x", encoders={"a b": VIT, "a-b": f"{VIT}&seed=1"})
    assert not (tmp_path / "x").exists()


# Pictures


def scene() -> Any:
    boxes = np.array([[2, 2, 10, 10], [12, 4, 18, 16], [1, 12, 6, 18]], np.float32)
    masks = np.zeros((3, 20, 24), bool)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.astype(int), strict=True):
        mask[y0:y1, x0:x1] = True
    return Targets(np.array([0, 1, 1]), boxes, masks, crowd=np.array([False, False, True]))


def test_misses_and_false_alarms() -> None:
    there = objects_of(scene())

    def told(*guesses: tuple[int, float, list[float]]) -> Misses:
        labels, scores, boxes = zip(*guesses, strict=True) if guesses else ((), (), ())
        return misses(
            there,
            Detections((20, 24), np.array(labels, int), np.array(scores), np.array(boxes, float).reshape(-1, 4), None),
        )

    assert told() == Misses(2, 0)
    assert told((0, 0.9, [2, 2, 10, 11])) == Misses(1, 0)
    assert told((1, 0.9, [2, 2, 10, 11])) == Misses(2, 1)  # of another class
    assert told((0, 0.1, [2, 2, 10, 11])) == Misses(2, 0)  # not sure
    assert told((0, 0.9, [2, 2, 10, 11]), (0, 0.8, [2, 2, 10, 10])) == Misses(1, 1)  # twice
    assert told((1, 0.9, [1, 13, 5, 18])) == Misses(2, 0)  # within a crowd


def test_objects_are_drawn_where_they_are() -> None:
    image = np.full((20, 24, 3), 100, np.uint8)
    made = draw(image, objects_of(scene()), ["cat", "dog"])
    assert made.shape == (SIDE, SIDE, 3)
    assert (made[161:] == 255).all()  # below the image
    scale = SIDE / 24
    inside, outside = made[int(10 * scale), int(15 * scale)], made[int(10.5 * scale), int(22 * scale)]
    assert (outside == 100).all()
    assert (inside != 100).any()
    assert (made[int(15 * scale), int(3 * scale)] == 100).all()  # a crowd
