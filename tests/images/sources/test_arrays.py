"""Arrays from Python: every layout, labels of every kind, and what is refused."""

import numpy as np
import pytest
import torch

from sightline.core.errors import InputError
from sightline.images.loading import load_images

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (8, 5, 6, 3), dtype=np.uint8)


def pixels_of(images):
    return np.stack([item.image for item in images.source.read(range(len(images.ids)))])


@pytest.mark.parametrize(
    "given",
    [
        PIXELS,
        torch.from_numpy(PIXELS),
        PIXELS.transpose(0, 3, 1, 2),
        torch.from_numpy(PIXELS).permute(0, 3, 1, 2),
        list(PIXELS),
        PIXELS / 255,
        (torch.from_numpy(PIXELS).float() / 255).permute(0, 3, 1, 2),
        np.concatenate([PIXELS, PIXELS[..., :1]], 3),
    ],
    ids=["hwc", "torch", "chw", "torch-chw", "list", "float", "torch-float-chw", "alpha"],
)
def test_layouts_give_the_same_pixels(given):
    assert np.array_equal(pixels_of(load_images(given)), PIXELS)


def test_greyscale_is_repeated_and_sizes_may_differ():
    assert np.array_equal(pixels_of(load_images(PIXELS[..., 0])), PIXELS[..., :1].repeat(3, 3))
    mixed = load_images([np.zeros((4 + i, 7, 3), np.uint8) for i in range(5)])
    assert [item.image.shape[0] for item in mixed.source.read(range(5))] == [4, 5, 6, 7, 8]


def test_labels_names_numbers_and_gaps():
    assert load_images(PIXELS).labels.tolist() == [-1] * 8
    named = load_images(PIXELS, labels=list("babababa"))
    assert (named.classes, named.labels.tolist()) == (("a", "b"), [1, 0] * 4)
    gaps = load_images(PIXELS, labels=torch.tensor([30, 7, 30, 7, 30, 7, 30, 7]))
    assert (gaps.classes, gaps.labels.tolist()) == (("7", "30"), [1, 0] * 4)
    known = load_images(PIXELS, labels=[2, 0] * 4, classes=["x", "y", "z"])
    assert (known.classes, known.labels.tolist()) == (("x", "y", "z"), [2, 0] * 4)
    by_name = load_images(PIXELS, labels=["z", "x"] * 4, classes=["x", "y", "z"])
    assert by_name.labels.tolist() == [2, 0] * 4


def test_splits_and_ids():
    images = load_images(PIXELS, splits={"train": range(6), "validation": [7, 6]}, ids=[f"n{i}" for i in range(8)])
    assert {name: where.tolist() for name, where in images.splits.items()} == {
        "train": [0, 1, 2, 3, 4, 5],
        "val": [6, 7],
    }
    assert images.own_splits
    assert images.ids[0] == "n0"
    listed = load_images(PIXELS, splits=["test", "train"] * 4)
    assert listed.splits["train"].tolist() == [1, 3, 5, 7]
    assert not load_images(PIXELS).own_splits


def test_digest_follows_the_pixels():
    changed = PIXELS.copy()
    changed[3, 0, 0, 0] ^= 1
    assert load_images(PIXELS).digest() == load_images(PIXELS.copy()).digest() != load_images(changed).digest()


@pytest.mark.parametrize(
    ("pixels", "options", "message"),
    [
        (PIXELS, {"labels": [0, 1]}, r"8 images, but labels of shape \(2,\)"),
        (PIXELS, {"labels": [0.5] * 8}, "whole numbers or names"),
        (PIXELS, {"labels": [5] * 8, "classes": ["a"]}, "label 5 is not one of the classes: a"),
        (PIXELS, {"labels": ["q"] * 8, "classes": ["a"]}, "'q' is not one of the classes: a"),
        (PIXELS, {"ids": ["a"] * 8}, "8 different ids"),
        (PIXELS, {"splits": {"train": [0, 8]}}, "at most once"),
        (PIXELS, {"splits": {"train": [0, 1], "test": [1, 2]}}, "at most once"),
        (PIXELS[:3], {}, "3 images, but at least 4"),
        (PIXELS.astype(np.int64), {}, "int64, but uint8"),
        (PIXELS * 1.0, {}, r"must be in \[0, 1\]"),
        (np.zeros((8, 5), np.uint8), {}, r"shape \(5,\)"),
        (3, {}, "Pixels are a int"),
        (PIXELS, {"ids": 0.5}, "The ids are 0.5, but a list"),
        (PIXELS, {"classes": "ab"}, "The classes are 'ab', but a list"),
        (PIXELS, {"splits": True}, "The splits are True, but a list"),
        (np.float64(3), {}, "Pixels are a float64"),
        ([[[1, 2], [3]]] * 4, {}, "An image cannot be made an array"),
        (PIXELS, {"limit": "4"}, "The limit is '4', but a whole number"),
        (PIXELS, {"limit": 4.0}, "The limit is 4.0"),
        (PIXELS, {"limit": True}, "The limit is True"),
        (PIXELS, {"seed": None}, "The seed is None"),
        (PIXELS, {"seed": -1}, "The seed is -1"),
        (PIXELS, {"labels": [[0], [1, 2]] * 4}, "The labels cannot be made an array"),
        (PIXELS, {"labels": np.array([{}] * 8)}, r"The label {} is neither"),
        (PIXELS, {"labels": np.array([2**70] * 8, object), "classes": ["a"]}, "is not one of the classes"),
        (PIXELS, {"splits": {"train": "abc"}}, "no list of whole numbers"),
        (PIXELS, {"splits": {"train": [0.5]}}, "no list of whole numbers"),
    ],
)
def test_what_cannot_be_used_is_said(pixels, options, message):
    with pytest.raises(InputError, match=message):
        load_images(pixels, **options)
