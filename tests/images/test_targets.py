"""Boxes, masks and maps in a view, against loops in exact fractions and against torchvision."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as tv

import sightline as sl
from sightline.core.errors import InputError
from sightline.images.augment.crops import boxes as crops_of
from sightline.images.augment.crops import flips
from sightline.images.augment.policy import Policy
from sightline.images.targets import Targets, move

HEIGHT, WIDTH = 23, 31
CROPS = [((3, 5, 11, 17), True, 8), ((0, 0, 23, 31), False, 23), ((7, 2, 16, 5), True, 40), ((22, 30, 1, 1), False, 3)]


def sample(seed: int) -> Targets[Any]:
    chance = np.random.default_rng(seed)
    corners = np.sort(chance.uniform(0, 1, (6, 2, 2)), axis=1) * [WIDTH, HEIGHT]
    masks = np.zeros((6, HEIGHT, WIDTH), bool)
    for mask, ((x0, y0), (x1, y1)) in zip(masks, corners, strict=True):
        mask[int(y0) : int(y1) + 1, int(x0) : int(x1) + 1] = chance.uniform(size=()) < 0.9
    segmentation = chance.integers(-1, 5, (HEIGHT, WIDTH))
    return Targets(np.arange(6), corners.reshape(6, 4).astype(np.float32), masks, segmentation)


def plain(given: Targets[Any], box: tuple[int, ...], flip: bool, size: int) -> list[tuple[int, list[Fraction], Any]]:
    """Label, corners and mask of what is left, pixel by pixel in exact numbers."""
    top, left, height, width = box
    left_over = []
    for label, corners, mask in zip(given.labels, given.boxes, given.masks, strict=True):
        x0, y0, x1, y1 = (Fraction(float(value)) for value in corners)
        xs = [min(max((x - left) * size / width, Fraction(0)), Fraction(size)) for x in (x0, x1)]
        ys = [min(max((y - top) * size / height, Fraction(0)), Fraction(size)) for y in (y0, y1)]
        if flip:
            xs = [size - xs[1], size - xs[0]]
        seen = viewed(mask, box, flip, size)
        if xs[1] > xs[0] and ys[1] > ys[0] and any(map(any, seen)):
            left_over.append((int(label), [xs[0], ys[0], xs[1], ys[1]], seen))
    return left_over


def viewed(image: Any, box: tuple[int, ...], flip: bool, size: int) -> list[list[Any]]:
    top, left, height, width = box
    rows = []
    for i in range(size):
        row = [
            image[top + int(Fraction(2 * i + 1, 2 * size) * height), left + int(Fraction(2 * j + 1, 2 * size) * width)]
            for j in range(size)
        ]
        rows.append(row[::-1] if flip else row)
    return rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("box", "flip", "size"), CROPS)
def test_targets_move_as_a_plain_loop_moves_them(box: tuple[int, ...], flip: bool, size: int, seed: int) -> None:
    given = sample(seed)
    found, expected = move(given, np.array(box), flip, size), plain(given, box, flip, size)
    assert found.labels.tolist() == [label for label, _, _ in expected]
    corners = np.array([list(map(float, corners)) for _, corners, _ in expected]).reshape(-1, 4)
    np.testing.assert_array_equal(found.boxes, corners.astype(np.float32))
    assert found.masks is not None
    assert found.masks.tolist() == [seen for _, _, seen in expected]
    assert found.segmentation is not None
    assert found.segmentation.tolist() == viewed(given.segmentation, box, flip, size)
    assert [part.dtype for part in found if part is not None] == [np.int64, np.float32, bool, np.int64]


@pytest.mark.parametrize(("box", "flip", "size"), CROPS)
def test_boxes_are_torchvisions(box: tuple[int, ...], flip: bool, size: int) -> None:
    given = sample(5)
    boxes: Any = tv_tensors.BoundingBoxes(
        torch.from_numpy(given.boxes).double(), format="XYXY", canvas_size=(HEIGHT, WIDTH)
    )
    theirs = tv.resized_crop(boxes, *box, [size, size])
    theirs = tv.clamp_bounding_boxes(tv.horizontal_flip(theirs) if flip else theirs)
    areas = (theirs[:, 2:] - theirs[:, :2]).prod(1)
    found = move(given._replace(masks=None), np.array(box), flip, size)
    np.testing.assert_allclose(found.boxes, theirs[areas > 0].numpy(), atol=1e-5)


def test_nothing_left_is_nothing() -> None:
    given = Targets(np.array([1]), np.array([[0, 0, 4, 4]], np.float32), np.ones((1, 8, 8), bool))
    found = move(given, np.array([4, 4, 4, 4]), False, 16)  # the box ends where the crop begins
    assert found.boxes.shape == (0, 4)
    assert found.masks is not None
    assert found.masks.shape == (0, 16, 16)
    assert found.labels.shape == (0,)


def test_an_object_without_visible_pixels_is_dropped() -> None:
    mask = np.zeros((1, 8, 8), bool)
    mask[0, 0, 0] = mask[0, 7, 7] = True
    given = Targets(np.array([1]), np.array([[0, 0, 8, 8]], np.float32), mask)
    assert len(move(given, np.array([2, 2, 4, 4]), False, 4).labels) == 0
    assert len(move(given._replace(masks=None), np.array([2, 2, 4, 4]), False, 4).labels) == 1


def test_targets_stay_with_the_pixels() -> None:
    """A scene whose own map says where an object is: the crop of the map is the map of the crop."""
    images = sl.load_images("shapes:scenes?size=64&train=8&val=0&test=0")
    policy = Policy(64, crop=(0.2, 0.9))
    keys = np.arange(8, dtype=np.uint64)
    where, mirrored = crops_of(np.full(8, 64), np.full(8, 64), policy, keys), flips(policy, keys)
    for given, box, flip in zip(images.targets(range(8)), where, mirrored.tolist(), strict=True):
        found = move(given, box, flip, 64)
        assert found.masks is not None
        assert found.segmentation is not None
        for label, mask, (x0, y0, x1, y1) in zip(found.labels, found.masks, found.boxes, strict=True):
            assert (found.segmentation[mask] == label).all()
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            # The centres of its pixels lie in the box, which is tight around it in the image.
            assert columns[0] + 0.5 >= x0
            assert rows[0] + 0.5 >= y0
            assert columns[-1] + 0.5 <= x1
            assert rows[-1] + 0.5 <= y1


def test_images_without_targets_say_so() -> None:
    images = sl.load_images([np.zeros((8, 8, 3), np.uint8)] * 4)
    with pytest.raises(InputError, match="has no boxes, masks or segmentation maps"):
        images.targets([0])
