"""Targets on the way to the model: in batches, in views, in joined sets, by hand and by the pixels themselves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sightline.core.errors import InputError
from sightline.core.keyed_random import fold, id_keys
from sightline.images.augment.crops import boxes as crops_of
from sightline.images.augment.crops import flips
from sightline.images.pipeline import Batch, batches
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images, Item, join
from sightline.images.targets import Targets
from sightline.images.views import _AUGMENT, make_view, move_targets, policies_of

HEIGHT, WIDTH = 40, 60
BOXES = [[10, 5, 30, 20], [2, 30, 8, 38], [54, 0, 60, 40]]  # x0 y0 x1 y1


CLASSES = np.array([-1, 0, 1, 0])  # of black and of the three values


class Painted:
    """Black images with rectangles of the value 50, 100 and 150; the second image cannot be read."""

    def read(self, indices: Sequence[int]) -> list[Item]:
        return [Item(None, "torn") if i == 1 else Item(self.image(), None) for i in indices]

    def image(self) -> Any:
        image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        for value, (x0, y0, x1, y1) in zip((50, 100, 150), BOXES, strict=True):
            image[y0:y1, x0:x1] = value
        return image

    def targets(self, indices: Sequence[int]) -> list[Targets[Any]]:
        values = self.image()[..., 0]
        masks = np.stack([values == value for value in (50, 100, 150)])
        whole = Targets(np.array([0, 1, 0]), np.array(BOXES, np.float32), masks, CLASSES[values // 50])
        return [whole._replace(labels=(whole.labels + i) % 2) for i in indices]


class Bare:
    """The same without targets."""

    def read(self, indices: Sequence[int]) -> list[Item]:
        return Painted().read(indices)


def painted(name: str = "painted", classes: tuple[str, ...] = ("a", "b"), source: Any = None) -> Images:
    ids = np.array([f"{name}-{i}" for i in range(6)])
    return Images(name, source or Painted(), ids, np.arange(6) % 2, classes, {"test": np.arange(6)})


def batch_of(images: Images, *preprocesses: Preprocess, workers: int = 0, split: str = "test") -> Batch:
    (batch,) = batches(images, preprocesses, splits=[split], batch=8, workers=workers, targets=[split])
    return batch


def told(targets: Sequence[Targets[torch.Tensor]]) -> list[tuple[list[int], list[list[float]]]]:
    return [(one.labels.tolist(), one.boxes.tolist()) for one in targets]


HALF = Preprocess((20, 20), 20, "nearest")  # 40 × 60 → 20 × 30, then 5 off the left and the right
WHOLE = Preprocess((10, 30), (10, 30), "nearest")  # exactly, a quarter and a half
CENTRE = Preprocess((30, 30), None, "nearest")  # no resize: 5 off top and bottom, 15 off the sides


def test_boxes_are_where_the_preprocessing_puts_them() -> None:
    batch = batch_of(painted(), HALF, WHOLE, CENTRE)
    expected = {
        HALF: ([0], [[0.0, 2.5, 10.0, 10.0]]),
        WHOLE: ([0, 1, 0], [[5.0, 1.25, 15.0, 5.0], [1.0, 7.5, 4.0, 9.5], [27.0, 0.0, 30.0, 10.0]]),
        CENTRE: ([0], [[0.0, 0.0, 15.0, 15.0]]),
    }
    row = [batch.ids.index(name) for name in ("painted-0", "painted-2", "painted-4")]
    for preprocess, (labels, boxes) in expected.items():
        assert len(batch.targets[preprocess]) == len(batch.ids) == 5  # without the one that cannot be read
        assert told([batch.targets[preprocess][i] for i in row]) == [(labels, boxes)] * 3
    odd = batch.targets[WHOLE][batch.ids.index("painted-3")]
    assert odd.labels.tolist() == [1, 0, 1]  # each image has its own


@pytest.mark.parametrize("preprocess", [HALF, WHOLE, CENTRE])
def test_masks_and_maps_show_what_the_pixels_show(preprocess: Preprocess) -> None:
    batch = batch_of(painted(), preprocess)
    for pixels, targets in zip(batch.pixels[preprocess], batch.targets[preprocess], strict=True):
        assert targets.masks is not None
        assert targets.segmentation is not None
        values = [int(pixels[0][mask].unique()) for mask in targets.masks]
        assert values == ([50, 100, 150] if preprocess is WHOLE else [50])
        assert targets.masks.shape[1:] == pixels.shape[1:]
        assert targets.segmentation.tolist() == CLASSES[pixels[0] // 50].tolist()
        for mask, box in zip(targets.masks, targets.boxes.tolist(), strict=True):
            rows, columns = mask.nonzero(as_tuple=True)
            around = [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]
            assert np.abs(np.array(around) - box).max() <= 0.5


def test_targets_come_only_where_they_are_wanted_and_whoever_reads() -> None:
    images = replace(painted(), splits={"train": np.arange(3), "test": np.arange(3, 6)})
    found = list(batches(images, [HALF], splits=["train", "test"], batch=8, workers=0, targets=["test"]))
    assert [(batch.split, list(batch.targets)) for batch in found] == [("train", []), ("test", [HALF])]
    assert told(batch_of(painted(), HALF, workers=2).targets[HALF]) == told(batch_of(painted(), HALF).targets[HALF])
    with pytest.raises(InputError, match="no boxes, masks or segmentation maps"):
        batch_of(painted(source=Bare()), HALF)


def test_joined_images_bring_theirs_in_the_classes_of_the_first() -> None:
    images = join(painted(), "more", painted("others", ("b", "a")))
    batch = batch_of(images, WHOLE, split="more")
    first = batch.targets[WHOLE][batch.ids.index("more/others-0")]
    assert first.labels.tolist() == [1, 0, 1]  # 0 is "b" there, and 1 here
    here = batch.pixels[WHOLE][batch.ids.index("more/others-0")][0] // 50
    assert first.segmentation is not None
    assert first.segmentation.tolist() == np.array([-1, 1, 0, 1])[here].tolist()
    own = images.targets([0])[0]
    assert own.labels.tolist() == [0, 1, 0]
    both = images.targets([6, 0, 7])
    assert [one.labels.tolist() for one in both] == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]


def test_what_was_joined_without_targets_says_so_only_when_asked() -> None:
    plain = painted("bare", source=Bare())
    images = join(painted(), "plain", plain)
    assert images.targets([2])[0].labels.tolist() == [0, 1, 0]
    assert len(list(batches(images, [HALF], splits=["plain", "test"], batch=8, workers=0, targets=["test"]))) == 2
    with pytest.raises(InputError, match="joined images have no boxes"):
        images.targets([2, 7])
    with pytest.raises(InputError, match="has no boxes"):
        join(plain, "more", plain).targets([0])


def test_views_move_targets() -> None:
    batch = batch_of(painted(), WHOLE)
    given = batch.targets[WHOLE]
    mirrored = move_targets("mirror", given, WHOLE.size)
    assert mirrored[0].boxes.tolist() == [[15.0, 1.25, 25.0, 5.0], [26.0, 7.5, 29.0, 9.5], [0.0, 0.0, 3.0, 10.0]]
    pixels = make_view("mirror", batch.pixels[WHOLE])
    for image, one in zip(pixels, mirrored, strict=True):
        assert one.segmentation is not None
        assert one.segmentation.tolist() == CLASSES[image[0] // 50].tolist()
    for same in ("plain", "noise:0.5"):
        assert told(move_targets(same, given, WHOLE.size)) == told(given)
    with pytest.raises(InputError, match="no view 'miror'"):
        move_targets("miror", given, WHOLE.size)
    with pytest.raises(InputError, match="turns and shears"):
        move_targets("augment:supervised?randaugment=[9, 0.5]:0", given, WHOLE.size, batch.ids)


@pytest.mark.parametrize("preprocess", [HALF, WHOLE])
@pytest.mark.parametrize("copy", [0, 1])
def test_augmented_copies_move_targets_as_their_crops(preprocess: Preprocess, copy: int) -> None:
    batch, view, seed = batch_of(painted(), preprocess), f"augment:moco_v3?crop=[0.3, 0.9]:{copy}", 3
    height, width = preprocess.size
    found = move_targets(view, batch.targets[preprocess], preprocess.size, batch.ids, seed)
    policy = policies_of("moco_v3?crop=[0.3, 0.9]", max(height, width))[copy]
    keys = fold(id_keys(np.array(batch.ids, dtype=object)), seed, _AUGMENT, copy)
    where = crops_of(np.full(len(keys), height), np.full(len(keys), width), policy, keys)
    assert flips(policy, keys).any()
    for one, moved, (top, left, h, w), flip in zip(
        batch.targets[preprocess], found, where.tolist(), flips(policy, keys).tolist(), strict=True
    ):
        expected = []
        for label, (x0, y0, x1, y1) in zip(one.labels.tolist(), one.boxes.tolist(), strict=True):
            xs = sorted(
                (width - x if flip else x) for x in ((min(max(x, left), left + w) - left) * width / w for x in (x0, x1))
            )
            ys = [(min(max(y, top), top + h) - top) * height / h for y in (y0, y1)]
            if xs[1] > xs[0] and ys[1] > ys[0]:
                expected.append((label, [xs[0], ys[0], xs[1], ys[1]]))
        kept = [
            (label, box) for label, box in expected if any(np.allclose(box, b, atol=1e-4) for b in moved.boxes.tolist())
        ]
        assert len(kept) == len(moved.boxes)  # an object without a pixel of its mask left is dropped
        assert moved.labels.tolist() == [label for label, _ in kept]


def test_augmented_pixels_and_boxes_meet() -> None:
    large = Preprocess((120, 120), (120, 120), "nearest")
    only = "augment:moco_v3?crop=[0.5, 0.9]&jitter=[0, 0, 0, 0]&jitter_probability=0&gray=0&blur=0&solarize=0:0"
    batch = batch_of(painted(), large)
    pixels = make_view(only, batch.pixels[large], batch.ids)
    for image, targets in zip(pixels, move_targets(only, batch.targets[large], (120, 120), batch.ids), strict=True):
        assert targets.segmentation is not None
        values = CLASSES[(image[0] * 255 / 50).round().long().clamp(0, 3)]
        assert (values == targets.segmentation.numpy()).mean() > 0.97  # but for the smooth edges
