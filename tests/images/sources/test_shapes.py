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
    ("shapes", "train", 0): "90bff32e7f31b228470c4d596b60e16d05226a2cdcb02af4eed650ad2c9525fd",
    ("shapes", "test", 2047): "fcd75b5b66be7c5191df74e29195b94ec54133d10e867c8c2fd9a22deff26a5a",
    ("shapes?size=32", "val", 9): "82dba44180861aaab83cd47f12d68a8b4b42dfdbccf3c13ef59d2d17f0022157",
    ("shapes?size=224", "train", 14): "d8da1dc050b21dee6c96f7c5532bf1d384355d7ec21ad8fda8a17ab02ab27c8f",
    ("shapes?size=64&seed=7", "train", 16383): "56277f53839ce4e941c740bbd7232e462ccfd09dbf5a51f5c3e6e79a3aaba371",
    ("shapes:conflict", "test", 100): "1143003f67d5f37d36bced9faf4a3cf2162cb89e05a529211fd5683895f97484",
    (
        "shapes:conflict?size=32&seed=3",
        "train",
        239,
    ): "dfdf1a585442d7787a2a0877b95aaa81300247e048164cb32ff7c70776314112",
    ("shapes:scenes", "train", 5): "c495465c525737f33cc077195061332e074045f2d72f2b1abd45c817f3a5c51c",
    ("shapes:scenes?size=64", "test", 11): "686fe8b0c9d216373f48ba343dd736320c1ad04da24b8c345b16c36474551e5d",
    ("shapes?size=48", "train", 0): "3b48e3f1cf0c3aed8914f7c04a0eb4fdc7faa3b4c8fb462b485277a2de38a3e9",
    ("shapes?size=48", "train", 1): "2b707343afb7addae5a86992d77dd135d4b57f8a85539aaef2fd717a0b396180",
    ("shapes?size=48", "train", 2): "1c2033a9a5a7009eb76bcc2ef532bdb01ca5906050c68b33e3f833ecad9f4c22",
    ("shapes?size=48", "train", 3): "385f04727e7b38a5062702769136f66522365cff2181bb90a82bb2e1d166fe38",
    ("shapes?size=48", "train", 4): "5aa34ef53ed3056339dff4bd0a3dfa25e76a41e12ac7d6b5ef84d41d37a87470",
    ("shapes?size=48", "train", 5): "8e87949725a78c453b7b04eb4573deccf71756615a3113d2eb704ea2b503726c",
    ("shapes?size=48", "train", 6): "8061389ff9bb1964ffe395b65fc1ffa12ddf3c45d1fe30f187aff919752d87c7",
    ("shapes?size=48", "train", 7): "b0e1fad449e91189632c92a9f5b01f92be60b07d08067316c19a6565843c7a9c",
    ("shapes?size=48", "train", 8): "1572411051a04fc37676f77ee10b851b631961889e17e0597a0d8031ec8756e2",
    ("shapes?size=48", "train", 9): "fa67dd8d62b95abe1f6015ec879ea9a7c2b5f031ce42074af3b75175a971aac3",
    ("shapes?size=48", "train", 10): "d7b2adaca13fd06adf64c54037b9235244c32249d8e7b51e3815fc76c1b1e33b",
    ("shapes?size=48", "train", 11): "8a93c0c6a214ad7fecde2d361459c0a00e49caaf06ae584e52d791d0f383c80d",
    ("shapes?size=48", "train", 12): "c7ce153ddc638d065eeeb40c9909cedd6503f783132bde5f4c7fe2b2d00aeb63",
    ("shapes?size=48", "train", 13): "d8686b6f364224be8fbb33038b15603c949bd5e23aa9b7c149a394953efa7003",
    ("shapes?size=48", "train", 14): "65a5b36e0be660952896054c109235d0859978521ce7f5d53e66604efc066261",
    ("shapes?size=48", "train", 15): "25062febd8ee51b3597d3d4dd0bf201eca2d1846637aa3a98d1e8645f72b4bdf",
}


def pixels(images, positions):
    return np.stack([item.image for item in images.source.read(positions)])


@pytest.mark.parametrize(("reference", "split", "number"), PINS)
def test_bits_are_pinned(reference, split, number):
    images = load_images(reference)
    (image,) = pixels(images, [images.indices(split)[number]])
    assert image.dtype == np.uint8
    assert hashlib.sha256(image.tobytes()).hexdigest() == PINS[reference, split, number]


@pytest.mark.processes
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


@pytest.mark.chance
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


@pytest.mark.chance
def test_colours_do_not_depend_on_the_class():
    images = load_images("shapes?size=16&train=3200&val=0&test=0")
    means = pixels(images, range(3200)).mean((1, 2)).reshape(200, 16, 3)  # classes take turns
    spread = means.mean(0).std(0)
    chance = means.std((0, 1)) / np.sqrt(200)
    assert (spread < 2.5 * chance).all()


# ---- scenes


def test_boxes_are_the_extents_of_the_masks():
    images = load_images("shapes:scenes?size=96")
    annotations = images.targets(range(48))
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
    first = [found.labels[0] for found in images.targets(range(48))]
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
    for label, found in zip(images.labels[:32], images.targets(range(32)), strict=True):
        assert found.labels.tolist() == [label]
