"""Crops against torchvision's on the same boxes, and boxes against the distribution of torchvision's."""

from typing import Any

import numpy as np
import pytest
import torch
from support.augmentation import as_bytes, close, images, keys_of, same_distribution, theirs_drawn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from sightline.images.augment import batched
from sightline.images.augment.crops import boxes, crop, crop_one, flips
from sightline.images.augment.policy import Policy


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width", "size"), [(20, 20, 20), (37, 23, 16), (24, 50, 11), (9, 12, 32)])
def test_crop_is_resized_crop(interpolation: str, height: int, width: int, size: int) -> None:
    policy = Policy(size, crop=(0.05, 1.0), interpolation=interpolation)
    x, keys = images(40, height, width), keys_of(40)
    where, mirrored = boxes(np.full(40, height), np.full(40, width), policy, keys), flips(policy, keys)
    where[0] = 0, 0, height, width
    where[1] = height - 1, 0, 1, 1
    where[2] = 0, 1, 1, width - 1
    assert mirrored.any()
    assert not mirrored.all()
    ours = crop(x, where, mirrored, policy)
    for row, box, flip, image in zip(ours, where.tolist(), mirrored, x, strict=True):
        mode = v2.InterpolationMode(interpolation)
        theirs = TF.resized_crop(image, *box, [size, size], mode, antialias=True).clamp(0, 1)
        close(row, theirs.flip(2) if flip else theirs)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crop_of_large_images_in_pieces(monkeypatch: pytest.MonkeyPatch, interpolation: str) -> None:
    policy = Policy(32, interpolation=interpolation)
    x, keys = images(6, 301, 199), keys_of(6)
    where, mirrored = boxes(np.full(6, 301), np.full(6, 199), policy, keys), np.zeros(6, bool)
    monkeypatch.setattr(batched, "CACHED", 2 * 3 * 301 * 199)
    mode = v2.InterpolationMode(interpolation)
    theirs = [TF.resized_crop(image, *box, [32, 32], mode) for image, box in zip(x, where.tolist(), strict=True)]
    close(crop(x, where, mirrored, policy), torch.stack(theirs).clamp(0, 1))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_one_image_is_cropped_as_a_batch_is(interpolation: str) -> None:
    policy = Policy(16, crop=(0.05, 1.0), interpolation=interpolation)
    x, keys = as_bytes(images(12, 60, 45)), keys_of(12)
    where, mirrored = boxes(np.full(12, 60), np.full(12, 45), policy, keys), flips(policy, keys)
    together = crop(x, where, mirrored, policy) * 255
    differences = []
    for image, box, flip, row in zip(x, where, mirrored, together, strict=True):
        array = image.permute(1, 2, 0).contiguous().numpy()
        array.flags.writeable = False  # as Pillow's arrays are
        one = crop_one(array, box, bool(flip), policy)
        assert one.flags.c_contiguous
        for like in (image, TF.to_pil_image(image)):
            theirs = TF.resized_crop(like, *box.tolist(), [16, 16], v2.InterpolationMode(interpolation))
            theirs = TF.pil_to_tensor(theirs) if like is not image else theirs
            assert np.abs(one - (theirs.flip(2) if flip else theirs).numpy().astype(float)).max() <= 1
        differences.append(np.abs(one - row.numpy()))
    # Bytes are rounded, and the cubic's overshoot cut off, after the rows and again after the columns.
    assert np.mean(differences) < 0.5
    assert np.max(differences) < (1.01 if interpolation == "bilinear" else 10)


@pytest.mark.chance
@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [
        (64, 64, (0.08, 1.0), (3 / 4, 4 / 3)),
        (48, 96, (0.4, 1.0), (3 / 4, 4 / 3)),  # many tries do not fit
        (100, 20, (0.9, 1.0), (3 / 4, 4 / 3)),  # none fits: too tall
        (20, 100, (0.9, 1.0), (3 / 4, 4 / 3)),  # too wide
        (31, 30, (1.0, 1.0), (1.5, 1.5)),  # too wide for any try, and the centre is between pixels
        (16, 16, (0.01, 0.05), (1 / 3, 3)),
    ],
)
def test_boxes_are_drawn_as_random_resized_crop_draws(height: int, width: int, scale: Any, ratio: Any) -> None:
    n = 4000
    params = theirs_drawn(v2.RandomResizedCrop(8, scale=scale, ratio=ratio), n, (3, height, width))
    theirs = np.array([[p[name] for name in ("top", "left", "height", "width")] for p in params])
    ours = boxes(np.full(n, height), np.full(n, width), Policy(8, crop=scale, ratio=ratio), keys_of(n))
    assert ours.dtype == np.int64
    assert (ours >= [0, 0, 1, 1]).all()
    assert (ours[:, :2] + ours[:, 2:] <= [height, width]).all()
    for column in range(4):
        same_distribution(ours[:, column], theirs[:, column])
    same_distribution(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3])  # area
    same_distribution(ours[:, 3] / ours[:, 2], theirs[:, 3] / theirs[:, 2])  # ratio
    free = (np.array([height, width]) - ours[:, 2:] + 1)[:, 0]
    same_distribution((ours[:, 0] + 0.5) / free, (theirs[:, 0] + 0.5) / (height - theirs[:, 2] + 1))  # position


def test_boxes_of_images_of_several_sizes() -> None:
    heights, widths, keys = np.array([10, 300, 7]), np.array([500, 20, 7]), keys_of(3)
    policy = Policy(8)
    together = boxes(heights, widths, policy, keys)
    for i in range(3):
        assert (boxes(heights[i : i + 1], widths[i : i + 1], policy, keys[i : i + 1])[0] == together[i]).all()
    whole = boxes(heights, widths, Policy(8, crop=None), keys)
    assert whole.tolist() == [[0, 0, 10, 500], [0, 0, 300, 20], [0, 0, 7, 7]]
