"""The embedded images: the same bits everywhere, balanced, both cues present, true annotations."""

import hashlib
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from sightline.images.loading import load_images
from sightline.images.sources import shapes
from sightline.images.sources.shapes import CLASSES, TEXTURE_NAMES, annotate, cues, drawing

# sha256 of single images (reference, split, number); a change of bits must be meant, and said in the CHANGELOG.
PINS = {
    ("shapes", "train", 0): "9e7b7648eb13b46c032a0f2cf0f96bee79efb7fc04f0bdfc095e93f657d254fb",
    ("shapes", "test", 2047): "ceca46976ddf9a506509d756cf6379e22a069b8d0b9f027686828f76affef24e",
    ("shapes?size=32", "val", 9): "462e762533fd585a7f07e7fa0f12106116c66078faa766fc4ec1c1c652db4509",
    ("shapes?size=224", "train", 14): "aadc18fd32c44029b56cf9d4da6727ecd688216e8c7dde1f9bfedbc1257a8d30",
    ("shapes?size=64&seed=7", "train", 16383): "9e089a59f52ccd9fb007c1771a6115e9da330d7227d8243b2ab7d432321edc6a",
    ("shapes:conflict", "test", 100): "1eb004a75b381d6090d2a616bd23cfb4abb63dc83bbc00d4021b17dea541c88b",
    (
        "shapes:conflict?size=32&seed=3",
        "train",
        239,
    ): "b4e9aebcd5eb43a76f40d19bb0c8d04802f8011dd9fc409f8b928701f154b325",
    ("shapes:scenes", "train", 5): "c495465c525737f33cc077195061332e074045f2d72f2b1abd45c817f3a5c51c",
    ("shapes:scenes?size=64", "test", 11): "686fe8b0c9d216373f48ba343dd736320c1ad04da24b8c345b16c36474551e5d",
    ("shapes?size=48", "train", 0): "e53fe5e122c332f3eec7368ff06e5256bec66e19133a6db2f7d8d70fc78981ea",
    ("shapes?size=48", "train", 1): "64761d46724a125169b5cb9ad0e26c24be71d8f18f895d0db1ded57517bc3668",
    ("shapes?size=48", "train", 2): "f947ca4155ce40af88c6430a1de4a315dc2b1ce2ee5b66d775b9e5fdba816d59",
    ("shapes?size=48", "train", 3): "af25b1836db9ff821a594b123e0fa2c148a0c95b708ed1161f1a8020b31acb8f",
    ("shapes?size=48", "train", 4): "791281faec828ab1cade0fdd82a61c80f465621e76b562741795545f85dde690",
    ("shapes?size=48", "train", 5): "d54b6cea83d8e91c27d21e1b2968cc0d2dd4cd347a55ae6283c2e542e217447a",
    ("shapes?size=48", "train", 6): "37898e56139b915ea6487f2327e51c6aeff5819852493fd4825ac93c5192d39e",
    ("shapes?size=48", "train", 7): "13b0f78a826e3a1f2ece805ef1c5987d79179870c9517868fa85ac90cb60e714",
    ("shapes?size=48", "train", 8): "4b5ecb816331806a773f66ad48cb04683ee27edd59a3f21a51beeb12ec073175",
    ("shapes?size=48", "train", 9): "35b972d8c084f42f49dab05aabe023b70a2a9ae98fdc99a6ea34ac73708ab06d",
    ("shapes?size=48", "train", 10): "b9621deef35f25c65ad33d08320a0e1f9e0b8bf1a91cfc90116aad2d4f31a6c8",
    ("shapes?size=48", "train", 11): "06a8b449de6e8f7d4041157b1dcfdff9220e1f933f431e91907029541ebbbe55",
    ("shapes?size=48", "train", 12): "9caffe7118eb7dbdba5289b45beafc1cf17ffb18125e0c1e26361c00efc37ed8",
    ("shapes?size=48", "train", 13): "c7d80645f05dbec6182db4ff21b7a134eba11ef48bc729eeedbad75fc52a4505",
    ("shapes?size=48", "train", 14): "92058cf236f29963f36063ed4a332c9d105ad9252edddc995e7b94d0797cf0aa",
    ("shapes?size=48", "train", 15): "ab2e0b37bf7f0b86c28a8710e856ff1652bf93391c4fc771bf7002dd820d356b",
}


def pixels(images, positions):
    return np.stack([item.image for item in images.source.read(positions)])


@pytest.mark.parametrize(("reference", "split", "number"), PINS)
def test_bits_are_pinned(reference, split, number):
    images = load_images(reference)
    (image,) = pixels(images, [images.indices(split)[number]])
    assert image.dtype == np.uint8
    assert hashlib.sha256(image.tobytes()).hexdigest() == PINS[reference, split, number]


def test_bits_do_not_depend_on_the_vector_unit():
    """The same images from another process, in which numpy may not use what this processor has beyond the baseline."""
    core = pytest.importorskip("numpy._core._multiarray_umath")
    extra = [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]
    if not extra:
        pytest.skip("this processor has no vector unit beyond the baseline; run on another to compare")
    code = (
        "import hashlib; from sightline.images import load_images; d = hashlib.sha256()\n"
        "for kind in ('shapes', 'shapes:conflict', 'shapes:scenes'):\n"
        "    for item in load_images(kind + '?size=40').source.read(range(48)): d.update(item.image.tobytes())\n"
        "print(d.hexdigest())"
    )
    digests = [
        subprocess.run([sys.executable, "-c", code], env=os.environ | added, capture_output=True, text=True, check=True)
        for added in ({}, {"NPY_DISABLE_CPU_FEATURES": " ".join(extra)})
    ]
    assert len(digests[0].stdout.strip()) == 64
    assert digests[0].stdout == digests[1].stdout


@pytest.mark.parametrize("kind", ["shapes", "shapes:conflict", "shapes:scenes"])
def test_an_image_depends_on_nothing_but_its_number(kind):
    images = load_images(f"{kind}?size=32")
    together = pixels(images, range(20, 40))
    alone = np.concatenate([pixels(images, [i]) for i in range(39, 19, -1)])[::-1]
    assert np.array_equal(together, alone)
    other_counts = load_images(f"{kind}?size=32&train=10&val=7&test=64")
    for split in ("train", "val", "test"):
        first = pixels(images, images.indices(split)[:5])
        assert np.array_equal(first, pixels(other_counts, other_counts.indices(split)[:5]))
        assert (
            images.ids[images.indices(split)[:5]].tolist() == other_counts.ids[other_counts.indices(split)[:5]].tolist()
        )
    assert np.array_equal(pixels(pickle.loads(pickle.dumps(images)), [3]), pixels(images, [3]))


def test_seeds_splits_and_kinds_draw_different_images():
    references = ["shapes?size=32", "shapes?size=32&seed=1", "shapes:conflict?size=32", "shapes:scenes?size=32"]
    loaded = [load_images(reference) for reference in references]
    first = [pixels(images, images.indices(split)[:2]) for images in loaded for split in images.splits]
    assert len({image.tobytes() for pair in first for image in pair}) == 2 * len(first)
    ids = [name for images in loaded for name in images.ids[[0, -1]]]
    assert len(set(ids)) == len(ids)


def test_sizes_show_the_same_picture():
    large, small = (pixels(load_images(f"shapes?size={size}"), range(32)).astype(float) for size in (128, 32))
    shrunk = large.reshape(32, 32, 4, 32, 4, 3).mean((2, 4))
    assert np.abs(shrunk - small).mean() < 14
    wrong = np.abs(np.roll(shrunk, 1, 0) - small).mean()
    assert wrong > 40


def test_size_changes_the_digest():
    assert load_images("shapes?size=32").digest() != load_images("shapes?size=64").digest()


def test_default_splits_are_balanced():
    images = load_images("shapes")
    assert {name: len(where) for name, where in images.splits.items()} == {"train": 16384, "val": 2048, "test": 2048}
    for split in images.splits:
        assert len(set(np.bincount(images.labels_of(split), minlength=16))) == 1
    assert images.own_splits
    assert images.classes == CLASSES
    assert len(set(images.ids)) == 20480
    assert images.ids[images.indices("val")[3]] == "shapes-0/val/000003"


def test_conflict_goes_through_all_pairs():
    images = load_images("shapes:conflict")
    for split, times in (("train", 32), ("val", 4), ("test", 8)):
        where = images.indices(split)
        pairs = np.zeros((16, 16), int)
        np.add.at(pairs, (images.labels[where], images.extras["texture"][where]), 1)
        assert np.array_equal(pairs, times * (1 - np.eye(16, dtype=int)))
    labels, textures = cues("plain", np.arange(100))
    assert np.array_equal(labels, textures)


def test_silhouettes_and_textures_are_all_different():
    grid = (np.arange(64, dtype=np.float32) + 0.5) / 26 - 64 / 52
    x, y = np.broadcast_arrays(grid, grid[:, None])
    inside = np.stack([shape(x, y) < 0 for shape in drawing.SILHOUETTES.values()])
    overlap = np.array([[(a & b).sum() / (a | b).sum() for b in inside] for a in inside])
    assert (overlap[~np.eye(16, dtype=bool)] < 0.87).all()
    assert all(0.1 < mask.mean() < 0.5 for mask in inside)
    shares = np.stack([texture(x * 2, y * 2, 12.0) for texture in drawing.TEXTURES.values()])
    assert shares.dtype == np.float32
    assert shares.min() >= 0
    assert shares.max() <= 1
    correlation = np.corrcoef(shares.reshape(16, -1))
    assert np.abs(correlation[~np.eye(16, dtype=bool)]).max() < 0.6
    assert len(set(CLASSES)) == len(set(TEXTURE_NAMES)) == 16


@pytest.mark.parametrize("kind", ["shapes", "shapes:conflict"])
def test_objects_wear_the_texture_of_their_label(kind, monkeypatch):
    images = load_images(f"{kind}?size=16")
    drawn = []
    original = shapes.figure

    def recorded(canvas, dice, light, label, stuff, *rest):
        drawn.append((label, stuff.texture))
        return original(canvas, dice, light, label, stuff, *rest)

    monkeypatch.setattr(shapes, "figure", recorded)
    images.source.read(range(240))
    textures = images.extras.get("texture", images.labels)
    assert drawn == list(zip(images.labels[:240].tolist(), textures[:240].tolist(), strict=True))


def test_background_textures_say_nothing_about_the_class(monkeypatch):
    images = load_images("shapes?size=8")
    seen = np.zeros((16, 16))
    original = shapes.Material.paint

    def counted(stuff, *rest):
        seen[label, stuff.texture] += 1
        return original(stuff, *rest)

    monkeypatch.setattr(shapes.Material, "paint", counted)
    for i in range(1600):
        label = i % 16
        images.source.read([i])
    others = seen - 100 * np.eye(16)  # without the object itself
    expected = others.sum(1, keepdims=True) * others.sum(0) / others.sum()
    assert ((others - expected) ** 2 / expected).sum() < 290  # χ² with 225 degrees of freedom, p = 0.002


def test_exact_functions_agree_with_the_library():
    turns = np.linspace(-3, 3, 1001)
    assert np.allclose([drawing.sine(t) for t in turns], np.sin(2 * np.pi * turns), atol=1e-6)
    assert np.allclose([drawing.cosine(t) for t in turns], np.cos(2 * np.pi * turns), atol=1e-6)
    assert np.allclose(drawing.wave(turns), np.sin(2 * np.pi * turns), atol=2e-3)


def test_colours_do_not_depend_on_the_class():
    images = load_images("shapes?size=16&train=3200&val=0&test=0")
    means = pixels(images, range(3200)).mean((1, 2)).reshape(200, 16, 3)  # classes take turns
    spread = means.mean(0).std(0)
    chance = means.std((0, 1)) / np.sqrt(200)
    assert (spread < 2.5 * chance).all()


# ---- scenes


def test_boxes_are_the_extents_of_the_masks():
    images = load_images("shapes:scenes?size=96")
    annotations = images.source.annotations(range(48))  # type: ignore[attr-defined]
    for found in annotations:
        assert found.masks.dtype == bool
        assert found.boxes.dtype == np.float32
        assert found.masks.sum(0).max(initial=0) <= 1  # visible pixels belong to one object
        for box, mask in zip(found.boxes, found.masks, strict=True):
            x0, y0, x1, y1 = box.astype(int)
            assert mask[y0:y1, x0:x1].sum() == mask.sum() >= 12 * 96**2 // 64**2
            assert mask[y0].any()
            assert mask[y1 - 1].any()
            assert mask[:, x0].any()
            assert mask[:, x1 - 1].any()
    counts = np.bincount([len(found.labels) for found in annotations], minlength=9)
    assert counts[0] == counts[9:].sum() == 0
    assert (counts[1:] > 0).sum() >= 6
    areas = np.concatenate([found.masks.sum((1, 2)) for found in annotations])
    assert areas.max() / areas.min() > 30


def test_the_label_of_a_scene_is_its_largest_object():
    images = load_images("shapes:scenes?size=96")
    first = [found.labels[0] for found in images.source.annotations(range(48))]  # type: ignore[attr-defined]
    assert np.mean(np.array(first) == images.labels[:48]) > 0.95  # unless others hide it


def test_annotate_drops_what_is_hidden():
    owner = np.full((64, 64), -1)
    owner[10:20, 5:30] = 0
    owner[40:43, 40:43] = 1  # nine pixels: a crumb
    found = annotate(owner, [7, 8, 9])  # the third is hidden
    assert found.labels.tolist() == [7]
    assert found.boxes.tolist() == [[5, 10, 30, 20]]
    nothing = annotate(np.full((8, 8), -1), [1])
    assert (nothing.boxes.shape, nothing.masks.shape, nothing.labels.shape) == ((0, 4), (0, 8, 8), (0,))


def test_a_portrait_has_one_annotation():
    images = load_images("shapes")
    for label, found in zip(images.labels[:32], images.source.annotations(range(32)), strict=True):  # type: ignore[attr-defined]
        assert found.labels.tolist() == [label]
