"""Pasted masks against loops, and what perfect boxes and masks reach."""

import numpy as np
import pytest
import torch
from torchvision.models.detection.roi_heads import project_masks_on_boxes

import sightline as sl
from sightline.transfer.detection.average_precision import Range, ap_of
from sightline.transfer.detection.detector import UNALIGNED
from sightline.transfer.detection.masks import paste, run_lengths, unpacked
from sightline.transfer.detection.objects import Detections, objects_of

pytestmark = pytest.mark.unit


def value(mask: np.ndarray, box: np.ndarray, x: float, y: float) -> float:
    """Bilinear between the centres of cells, pixel by pixel; nothing outside of the box."""
    x0, y0, x1, y1 = box
    if not (x0 <= x < x1 and y0 <= y < y1):
        return 0.0
    m = len(mask)
    u, v = (min(max(m * share - 0.5, 0), m - 1) for share in ((x - x0) / (x1 - x0), (y - y0) / (y1 - y0)))
    i, j = min(int(v), m - 2), min(int(u), m - 2)
    rows = [mask[i + k, j] * (1 - u + j) + mask[i + k, j + 1] * (u - j) for k in range(2)]
    return float(rows[0] * (1 - v + i) + rows[1] * (v - i))


def test_pasting_is_bilinear_between_the_centres_of_cells() -> None:
    chance = np.random.default_rng(0)
    masks = chance.uniform(0, 1, (20, 5, 5))
    corners = np.sort(chance.uniform(-3, 15, (20, 2, 2)), axis=1)
    boxes = corners.reshape(20, 4)
    made = paste(torch.from_numpy(masks).float(), torch.from_numpy(boxes), (9, 13)).numpy()
    for mask, box, pasted in zip(masks, boxes, made, strict=True):
        values = np.array([[value(mask, box, x + 0.5, y + 0.5) for x in range(13)] for y in range(9)])
        sure = np.abs(values - 0.5) > 1e-5
        np.testing.assert_array_equal(pasted[sure], (values >= 0.5)[sure])
    assert made.any()


def test_no_masks() -> None:
    assert paste(torch.zeros(0, 7, 7), torch.zeros(0, 4), (4, 5)).shape == (0, 4, 5)
    assert run_lengths(np.zeros((0, 4, 5), bool)) == []
    assert unpacked([], (4, 5)).shape == (0, 4, 5)


def test_run_lengths_lead_back() -> None:
    masks = np.random.default_rng(0).uniform(size=(3, 5, 7)) < 0.4
    np.testing.assert_array_equal(unpacked(run_lengths(masks), (5, 7)), masks)


@pytest.mark.parametrize(("cells", "least"), [(14, 0.9), (28, 0.95)])
def test_perfect_boxes_and_masks_are_nearly_perfect(cells: int, least: float) -> None:
    """What a detector of patch 8 says at 64 px if it has learned its masks by heart, as torchvision shows them."""
    scenes = sl.load_images("shapes:scenes?size=64&train=4&val=0&test=48")
    truth, found = {}, {}
    for name, targets in enumerate(scenes.targets(scenes.indices("test"))):
        truth[str(name)] = objects_of(targets)
        boxes = torch.from_numpy(targets.boxes)
        masks = torch.from_numpy(targets.masks).repeat_interleave(2, 1).repeat_interleave(2, 2)
        learned = project_masks_on_boxes(masks.float(), 2 * boxes, torch.arange(len(boxes)), cells)
        pasted = paste(learned, (2 * boxes + UNALIGNED) / 2, (64, 64)).numpy()
        scores = np.ones(len(boxes))
        found[str(name)] = Detections((64, 64), targets.labels, scores, targets.boxes, run_lengths(pasted))
    every = [Range("all", 0, 1e5)]
    assert ap_of(truth, found, 16, every, "box")[:, 0].tolist() == [1, 1, 1, 1]
    assert ap_of(truth, found, 16, every, "mask")[0, 0] > least
