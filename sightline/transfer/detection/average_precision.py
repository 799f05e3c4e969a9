"""Average precision and recall as COCO defines them, with intervals.

    AP   mean over classes and over IoU thresholds 0.50, 0.55, …, 0.95 of the precision at 101 recalls
    AR   mean over classes and thresholds of the largest recall, with at most 100 detections per image

for all objects and for those whose √area lies within some limits. They are computed by faster-coco-eval, which gives
pycocotools' numbers to the last digit. Where there is no object of some size they are NaN.

AP is no mean over images, so its interval is a jackknife: with θ₍ᵢ₎ the number without part i of g parts of the images,

    s² = (g − 1)/g Σᵢ (θ₍ᵢ₎ − θ̄)²,     θ ± t · s,   t of Student's distribution with g − 1 degrees of freedom

The parts follow from the ids of the images alone, so they are the same for every detector, and the interval of a
difference is that of the differences of the θ₍ᵢ₎.

Source: Lin et al. 2014, "Microsoft COCO"; Efron & Stein 1981, "The Jackknife Estimate of Variance".

A ranges of size, g parts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sightline.core.keyed_random import id_keys
from sightline.transfer.detection.objects import Detections, Objects

KINDS = ("box", "mask")
MEASURES = ("AP", "AP50", "AP75", "AR")
PARTS = 20
MOST = 100  # detections of an image that count


class Range(NamedTuple):
    """Objects of some size."""

    name: str
    low: float  # √area in pixels
    high: float

    @property
    def areas(self) -> list[float]:
        """The limits as COCO has them; both belong to the range."""
        return [self.low**2, min(self.high**2, 1e10)]


def ap_of(
    truth: Mapping[str, Objects],
    found: Mapping[str, Detections],
    classes: int,
    ranges: Sequence[Range],
    kind: str = "box",
) -> NDArray[np.float64]:  # (measures, A)
    """AP, AP50, AP75 and AR of boxes or masks; an image that is not in `found` has no detections."""
    return _Evaluation(truth, found, classes, ranges, kind).without(())


def replicates(
    truth: Mapping[str, Objects],
    found: Mapping[str, Detections],
    classes: int,
    ranges: Sequence[Range],
    kind: str,
    parts: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # (measures, A), (g, measures, A)
    """The numbers on all images, and on all but each of the parts; `parts` says in which each image is."""
    evaluation = _Evaluation(truth, found, classes, ranges, kind)
    names = np.array(list(truth), dtype=object)
    return evaluation.without(()), np.stack(
        [evaluation.without(names[parts == part].tolist()) for part in range(int(parts.max()) + 1)]
    )


def parts_of(ids: Sequence[str], most: int = PARTS) -> NDArray[np.int64]:  # (n,)
    """In which of at most `most` parts each image is: by the hash of its id, all parts as large as they can be.

    >>> parts_of(["a", "b", "c", "d", "e"], 2)
    array([1, 1, 0, 0, 0])
    """
    order = np.argsort(id_keys(np.array(ids, dtype=object)), kind="stable")
    parts = np.empty(len(ids), np.int64)
    parts[order] = np.arange(len(ids)) % min(most, len(ids))
    return parts


class _Evaluation:
    """Truth and detections as faster-coco-eval takes them, evaluated on some of the images."""

    def __init__(
        self,
        truth: Mapping[str, Objects],
        found: Mapping[str, Detections],
        classes: int,
        ranges: Sequence[Range],
        kind: str,
    ) -> None:
        from faster_coco_eval import COCO

        self.numbers = {name: number for number, name in enumerate(truth, 1)}
        self.ranges, self.type = list(ranges), {"box": "bbox", "mask": "segm"}[kind]
        sizes = {name: one.size for name, one in found.items()}
        images = [
            {"id": number, "height": sizes.get(name, (1, 1))[0], "width": sizes.get(name, (1, 1))[1]}
            for name, number in self.numbers.items()
        ]
        there = [row for name, one in truth.items() for row in _true(one, self.numbers[name], kind)]
        for number, row in enumerate(there, 1):  # from 1 on: 0 would stand for "not matched"
            row["id"] = number
        said = [row for name, one in found.items() if name in truth for row in _said(one, self.numbers[name], kind)]
        categories = [{"id": number, "name": str(number)} for number in range(classes)]
        self.truth = COCO({"images": images, "annotations": there, "categories": categories})
        self.found = self.truth.loadRes(said)

    def without(self, names: Sequence[str]) -> NDArray[np.float64]:  # (measures, A)
        from faster_coco_eval import COCOeval_faster

        left_out = set(names)
        one = COCOeval_faster(self.truth, self.found, self.type, print_function=_nothing, rle_iou_max_workers=1)
        one.params.imgIds = [number for name, number in self.numbers.items() if name not in left_out]
        one.params.areaRng = [size.areas for size in self.ranges]
        one.params.areaRngLbl = [size.name for size in self.ranges]
        one.params.maxDets = [MOST]
        one.evaluate()
        one.accumulate()
        precision, recall = one.eval["precision"][..., 0], one.eval["recall"][..., 0]  # (T, R, K, A), (T, K, A)
        columns = range(len(self.ranges))
        return np.array(
            [
                [_mean(precision[..., a]) for a in columns],
                [_mean(precision[0, ..., a]) for a in columns],
                [_mean(precision[5, ..., a]) for a in columns],
                [_mean(recall[..., a]) for a in columns],
            ]
        )


def _true(one: Objects, image: int, kind: str) -> list[dict[str, Any]]:
    rows = zip(one.labels.tolist(), _sides(one.boxes), one.areas.tolist(), one.crowd.tolist(), strict=True)
    objects: list[dict[str, Any]] = [
        {"image_id": image, "category_id": label, "bbox": box, "area": area, "iscrowd": int(crowd)}
        for label, box, area, crowd in rows
    ]
    if kind == "mask":
        for row, mask in zip(objects, one.masks or (), strict=True):
            row["segmentation"] = mask
    return objects


def _said(one: Detections, image: int, kind: str) -> list[dict[str, Any]]:
    """Rows of results; those of masks have no box, or its area would decide between small and large."""
    rows = zip(one.labels.tolist(), one.scores.tolist(), strict=True)
    described = [{"image_id": image, "category_id": label, "score": score} for label, score in rows]
    key, values = ("bbox", _sides(one.boxes)) if kind == "box" else ("segmentation", one.masks or [])
    return [{**row, key: value} for row, value in zip(described, values, strict=True)]


def _sides(boxes: NDArray[np.float64]) -> list[list[float]]:
    sides: list[list[float]] = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    return sides


def _mean(values: NDArray[np.float64]) -> float:
    """Over what is defined; −1 says that a class has no object of this size."""
    known = values[values > -1]
    return float(known.mean()) if known.size else math.nan


def _nothing(*_: object) -> None:
    """What the library would tell."""
