"""What there is in an image, and what a detector finds there, in pixels of the image itself.

k objects or detections, an image of H × W pixels.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sightline.core.errors import InputError, first_line
from sightline.images.targets import Targets
from sightline.transfer.detection.masks import RunLengths, run_lengths


class Objects(NamedTuple):
    """What is to be found in an image."""

    labels: NDArray[np.int64]  # (k,)
    boxes: NDArray[np.float64]  # (k, 4), x0 y0 x1 y1
    areas: NDArray[np.float64]  # (k,), of the masks where there are any: what decides between small and large
    crowd: NDArray[np.bool_]  # (k,)
    masks: list[RunLengths] | None


class Detections(NamedTuple):
    """What a detector finds in an image, the surest first."""

    size: tuple[int, int]  # of the image
    labels: NDArray[np.int64]  # (k,)
    scores: NDArray[np.float64]  # (k,)
    boxes: NDArray[np.float64]  # (k, 4)
    masks: list[RunLengths] | None


def objects_of(targets: Targets[NDArray[Any]]) -> Objects:
    """Targets of a whole image.

    >>> objects_of(Targets(np.array([3]), np.array([[1, 1, 3, 4]], np.float32))).areas
    array([6.])
    """
    boxes = targets.boxes.astype(np.float64)
    areas = targets.areas
    if areas is None and targets.masks is not None:
        areas = targets.masks.sum((1, 2))
    elif areas is None:
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    crowd = np.zeros(len(boxes), bool) if targets.crowd is None else targets.crowd
    masks = None if targets.masks is None else run_lengths(targets.masks)
    return Objects(targets.labels, boxes, areas.astype(np.float64), crowd, masks)


def write_detections(found: Mapping[str, Detections], classes: Sequence[str]) -> bytes:
    """Detections by the ids of their images, as JSON."""
    images = [
        {
            "id": name,
            "size": list(one.size),
            "labels": one.labels.tolist(),
            "scores": [round(score, 6) for score in one.scores.tolist()],
            "boxes": np.round(one.boxes, 3).tolist(),
            "masks": None if one.masks is None else [mask["counts"].decode("ascii") for mask in one.masks],
        }
        for name, one in found.items()
    ]
    return json.dumps({"classes": list(classes), "images": images}).encode()


def read_detections(file: Path) -> dict[str, Detections]:
    try:
        return parse_detections(file.read_bytes())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"Cannot read the detections {str(file)!r}: {first_line(error)}; detect again") from error


def parse_detections(content: bytes) -> dict[str, Detections]:
    """What `write_detections` has made, with its rounding."""
    return {image["id"]: _detections(image) for image in json.loads(content)["images"]}


def _detections(image: Mapping[str, Any]) -> Detections:
    size = tuple(image["size"])
    masks = image["masks"]
    return Detections(
        size,
        np.array(image["labels"], np.int64),
        np.array(image["scores"], np.float64),
        np.array(image["boxes"], np.float64).reshape(-1, 4),
        None if masks is None else [{"size": list(size), "counts": mask.encode("ascii")} for mask in masks],
    )
