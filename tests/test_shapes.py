"""The embedded images: the same bits everywhere, balanced, both cues present, true annotations."""

import hashlib
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from sightline import drawing
from sightline.datasets import shapes
from sightline.datasets.shapes import CLASSES, TEXTURE_NAMES, annotate, cues
from sightline.images import load_images

# sha256 of single images (reference, split, number); a change of bits must be meant, and said in the CHANGELOG.
PINS = {
    ("shapes", "train", 0): "06baea9923502b4ccebe533458cf3a095edfaec5a555d0a62073245ed383335c",
    ("shapes", "test", 2047): "e78ae48025b8ddbb40ab1cd2d0a7e5b5c0fffe81652f758da5e61b527683122a",
    ("shapes?size=32", "val", 9): "54690aecb8716f9026e3f0dd1e52d724fba2038cf9c2b343c2d381a181ea2964",
    ("shapes?size=224", "train", 14): "69bd9ce822b831a5d1ffbac7de96ab28037eeb750b4ef4a45cae86af35c2aed8",
    ("shapes?size=64&seed=7", "train", 16383): "cd679e6b37db6b45d4530eb582b5456b175f7559a02500bb77e034fac804ea19",
    ("shapes:conflict", "test", 100): "ce28a59cf1c4a7376167e66ea1678773bc75e33f5ec2c0ff447b69d4955e460e",
    (
        "shapes:conflict?size=32&seed=3",
        "train",
        239,
    ): "fd6bfdde6a43ee922d8694795fd92efab8c44a9dd560676c22df89027a109d48",
    ("shapes:scenes", "train", 5): "9a72433358240514fb5ff77bd73d62a8fe05c896ae980f111543d6b0391678f5",
    ("shapes:scenes?size=64", "test", 11): "62198289dfe09ff99bb241baad4f35abe2bb8c8c1a975d2b6a21c83189d7b5ba",
    ("shapes?size=48", "train", 0): "2f0d4b667dedb2e68b326c8684cb9e1598b1487587c8ca144a0325e48e0756d6",
    ("shapes?size=48", "train", 1): "c3b7f9f57913704db4afc2660891cc88ae53494d6d32b8f9cfd27b5085c270b8",
    ("shapes?size=48", "train", 2): "721e367658ae5aa096635c7d86c8cc7e7131a405fbaa680b2698924d9140524b",
    ("shapes?size=48", "train", 3): "989cf1cda12ebc8bb86c1518ae2f624da9ac8fea10931ee8959875f86f56d7b9",
    ("shapes?size=48", "train", 4): "af2b69ff3b7393009049e6be76e947683f7187beb512afcf6db396094a6243a4",
    ("shapes?size=48", "train", 5): "f92032fffc0a0ae80ca64bc9954f914c3ada58b4f28099d8e4d23b1d2c79e525",
    ("shapes?size=48", "train", 6): "e06490118bbd336c7396f548ed7be63ed0e23c633c6f6eba1b9e42c13be6a8fc",
    ("shapes?size=48", "train", 7): "2469e3f34b4e0526e9238db4d5335fd6cbd6cb953b02fd3f74d6f8b4ec86cbf5",
    ("shapes?size=48", "train", 8): "1a2abfd18484c9f3bb3fe6f1adab3348d9f8ccf2deb280e22c9dcf52ecf3131f",
    ("shapes?size=48", "train", 9): "84f530dbd4914565ea2d827b5c0c8524150b84e8231d8dd5778fbf7008b069f3",
    ("shapes?size=48", "train", 10): "4e3493cde3697412c4dcd49e820e7257437097041bc9e3d9c7ec356222ac8a4e",
    ("shapes?size=48", "train", 11): "63cb424aa8bf2a63f2b0f39b0595bcf340f4e754ce204e6ad1f9ce55c10c8efc",
    ("shapes?size=48", "train", 12): "27925fc4c7c9921a574226c892d152514719e2a9b707ef73fb582fc6f14d8fbb",
    ("shapes?size=48", "train", 13): "c9b4f2ac6565b61f65b8d390bd0630435ab248abf88b6e8c9ed869844b1111bd",
    ("shapes?size=48", "train", 14): "826a74433bf68d303a8a29705ac0392f81cbae6bd5639876e213baaa1c689c47",
    ("shapes?size=48", "train", 15): "78efa0abfe7252f9597b9881763bd6d04bcdd2e19a2cf876f3674f9649db7ccf",
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
    annotations = images.source.annotations(range(48))
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
    first = [found.labels[0] for found in images.source.annotations(range(48))]
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
    for label, found in zip(images.labels[:32], images.source.annotations(range(32)), strict=True):
        assert found.labels.tolist() == [label]
