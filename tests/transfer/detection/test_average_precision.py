"""AP against pycocotools, to the last digit, and its intervals."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sightline.images.targets import Targets
from sightline.measure.estimators.intervals import jackknife
from sightline.transfer.detection.average_precision import MEASURES, Range, ap_of, parts_of, replicates
from sightline.transfer.detection.masks import run_lengths
from sightline.transfer.detection.objects import Detections, Objects, objects_of, read_detections, write_detections

pytestmark = pytest.mark.unit
SIDE, CLASSES = 48, 3
RANGES = [Range("all", 0, 1e5), Range("small", 0, 9), Range("medium", 9, 14), Range("large", 14, 1e5)]
COCO_RANGES = [Range("all", 0, 1e5), Range("small", 0, 32), Range("medium", 32, 96), Range("large", 96, 1e5)]


def rectangles(boxes: np.ndarray) -> np.ndarray:
    masks = np.zeros((len(boxes), SIDE, SIDE), bool)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.round().astype(int), strict=True):
        mask[y0:y1, x0:x1] = True
    return masks


def made(seed: int, images: int = 14, crowd: float = 0.0, empty: float = 0.0, ties: bool = False) -> tuple[Any, Any]:
    """Objects and detections near them, wrong classes and false alarms among them."""
    chance = np.random.default_rng(seed)
    truth, found = {}, {}
    for image in range(images):
        k = 0 if chance.uniform() < empty else int(chance.integers(1, 6))
        corner, side = chance.uniform(0, SIDE - 21, (k, 2)), chance.uniform(4, 20, (k, 2))
        boxes = np.concatenate([corner, corner + side], 1)
        labels = chance.integers(0, CLASSES, k)
        crowds: Any = chance.uniform(size=k) < crowd
        targets = Targets(labels, boxes.astype(np.float32), rectangles(boxes), crowd=crowds)
        truth[f"image {image}"] = objects_of(targets)
        more = int(chance.integers(0, 4))
        guesses = np.concatenate([boxes + chance.normal(0, 1, (k, 4)), chance.uniform(0, 20, (more, 4)).cumsum(1)])
        guesses = np.concatenate([guesses, guesses[:2] + 0.5]).clip(0, SIDE)
        guesses[:, 2:] = np.maximum(guesses[:, 2:], guesses[:, :2] + 1)
        said = chance.integers(0, CLASSES, len(guesses))
        said[:k] = np.where(chance.uniform(size=k) < 0.8, labels, said[:k])
        scores = chance.uniform(0.1, 1, len(guesses))
        scores = scores.round(1) if ties else scores
        order = np.argsort(-scores, kind="stable")
        found[f"image {image}"] = Detections(
            (SIDE, SIDE), said[order], scores[order], guesses[order], run_lengths(rectangles(guesses[order]))
        )
    return truth, found


SETS = {
    "crowds": made(0, crowd=0.3),
    "empty images": made(1, empty=0.5),
    "no detections": (made(2)[0], {}),
    "ties": made(3, ties=True, crowd=0.1, empty=0.2),
}


def reference(truth: Any, found: Any, kind: str, ranges: list[Range]) -> np.ndarray:
    """pycocotools' own summary: AP, AP50, AP75 of all; AP by size; AR of all and by size."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def sides(box: np.ndarray) -> list[float]:
        return [*box[:2].tolist(), *(box[2:] - box[:2]).tolist()]

    numbers = {name: i for i, name in enumerate(truth, 1)}
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for name, one in truth.items():
        for i, label in enumerate(one.labels.tolist()):
            place = {"bbox": sides(one.boxes[i]), "area": float(one.areas[i]), "segmentation": one.masks[i]}
            about = {"image_id": numbers[name], "category_id": label, "iscrowd": int(one.crowd[i])}
            annotations.append({"id": len(annotations) + 1, **about, **place})
    for name, one in found.items():
        for i, label in enumerate(one.labels.tolist()):
            row = {"image_id": numbers[name], "category_id": label, "score": float(one.scores[i])}
            results.append(row | ({"bbox": sides(one.boxes[i])} if kind == "box" else {"segmentation": one.masks[i]}))
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": i, "height": SIDE, "width": SIDE} for i in numbers.values()],
            "annotations": annotations,
            "categories": [{"id": i} for i in range(CLASSES)],
        }
        coco.createIndex()
        detections = COCO()
        detections.dataset = {**coco.dataset, "annotations": []}
        detections.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results) if results else detections, {"box": "bbox"}.get(kind, "segm"))
        evaluation.params.areaRng = [size.areas for size in ranges]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    numbers_of = np.where(evaluation.stats == -1, np.nan, evaluation.stats)
    return np.array([*numbers_of[:6], *numbers_of[8:]])  # without AR of 1 and of 10 detections


@pytest.mark.parametrize("kind", ["box", "mask"])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("ranges", [RANGES, COCO_RANGES], ids=["own", "COCO's"])
def test_the_numbers_are_those_of_pycocotools(name: str, kind: str, ranges: list[Range]) -> None:
    truth, found = SETS[name]
    ap, ap50, ap75, ar = ap_of(truth, found, CLASSES, ranges, kind)
    ours = np.array([ap[0], ap50[0], ap75[0], *ap[1:], *ar])
    np.testing.assert_allclose(ours, reference(truth, found, kind, ranges), rtol=0, atol=1e-15)
    assert np.isnan(ap[3]) == (ranges is not RANGES)  # no object of 96 pixels
    assert name == "no detections" or 0 < ap[0] < 1


def test_false_alarms_on_empty_images_count() -> None:
    """One hit at score ½ and nine surer false alarms elsewhere: precision 1/10."""
    box = np.array([[4.0, 4.0, 20.0, 20.0]])
    there = Objects(np.array([0]), box, np.array([256.0]), np.array([False]), run_lengths(rectangles(box)))
    nothing = Objects(np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0), np.zeros(0, bool), [])
    truth = {"0": there} | {str(i): nothing for i in range(1, 10)}
    masks = run_lengths(rectangles(box))
    found = {
        name: Detections((SIDE, SIDE), np.array([0]), np.array([0.5 if name == "0" else 0.9]), box, masks)
        for name in truth
    }
    for kind in ("box", "mask"):
        assert ap_of(truth, found, 1, RANGES[:1], kind)[0, 0] == pytest.approx(0.1, abs=1e-12)


def test_replicates_leave_their_part_out() -> None:
    truth, found = SETS["ties"]
    parts = parts_of(list(truth), 4)
    whole, without = replicates(truth, found, CLASSES, RANGES, "box", parts)
    assert whole.shape == (len(MEASURES), 4)
    assert without.shape == (4, len(MEASURES), 4)
    for part in range(4):
        left = {name: one for (name, one), p in zip(truth.items(), parts, strict=True) if p != part}
        np.testing.assert_array_equal(without[part], ap_of(left, found, CLASSES, RANGES, "box"))


def test_parts_are_even_and_those_of_the_ids() -> None:
    ids = [f"image {i}" for i in range(50)]
    parts = parts_of(ids)
    assert np.bincount(parts).tolist() == [3] * 10 + [2] * 10
    order = np.random.default_rng(0).permutation(50)
    np.testing.assert_array_equal(parts_of([ids[i] for i in order]), parts[order])
    assert sorted(parts_of(ids[:3])) == [0, 1, 2]


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    values = np.random.default_rng(0).normal(size=12)
    low, high = jackknife(values.mean(), (values.sum() - values) / 11)
    expected = stats.t.interval(0.95, 11, values.mean(), stats.sem(values))
    assert (float(low), float(high)) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(jackknife(np.float64(1), np.ones(1))[0])


def test_detections_survive_writing(tmp_path: Any) -> None:
    _, found = SETS["crowds"]
    (tmp_path / "detections.json").write_bytes(write_detections(found, ["a", "b", "c"]))
    again = read_detections(tmp_path / "detections.json")
    assert again.keys() == found.keys()
    for name, one in found.items():
        assert again[name].masks == one.masks
        np.testing.assert_array_equal(again[name].labels, one.labels)
        np.testing.assert_allclose(again[name].boxes, one.boxes, atol=6e-4)
