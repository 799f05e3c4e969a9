"""Images, samples and orders: closed forms, and every way a reference can be wrong."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numbered import Numbered, all_batches, numbered

from sightline.core.errors import InputError
from sightline.core.keyed_random import mix
from sightline.images.loading import load_images
from sightline.images.sets import Images, halves

PINNED_SAMPLE = [1, 3, 7, 15, 20, 31, 32, 34, 44, 53]
PINNED_ORDER = [37, 36, 44, 13, 39, 5, 1, 51, 16, 52]


# ---- samples


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=6), st.integers(4, 40), st.integers(0, 5))
def test_sample_fills_classes_like_water(sizes, limit, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    images = Images(
        "x",
        Numbered(),
        np.array([str(i) for i in range(len(labels))], str),
        labels,
        (),
        {"train": np.arange(len(labels))},
    )
    sample = images.sample(limit, seed)
    counts = np.bincount(sample.labels_of("train"), minlength=len(sizes))
    assert counts.sum() == min(limit, sum(sizes))
    level = counts.max()
    assert all(have >= min(size, level - 1) for have, size in zip(counts, sizes, strict=True))
    assert (counts <= sizes).all()
    assert len(np.unique(sample.indices("train"))) == counts.sum()
    assert (np.diff(sample.indices("train")) > 0).all()


def test_samples_are_seeded_nested_and_pinned():
    images = numbered()
    small, large = images.sample(10, 3).indices("train"), images.sample(20, 3).indices("train")
    assert set(small) < set(large)
    assert not np.array_equal(small, images.sample(10, 4).indices("train"))
    assert len(images.sample(10, 3).indices("test")) == 10
    assert small.tolist() == PINNED_SAMPLE
    assert images.order("train", 3)[:10].tolist() == PINNED_ORDER


def test_mix_is_splitmix64():
    # First output of splitmix64 with state 0 and 1, from its published reference implementation.
    assert mix(np.array([0, 1], np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]


def test_order_is_a_shuffle_of_the_split_that_mixes_classes():
    images = numbered(classes=2, labels=np.repeat([0, 1], 50))
    order = images.order("train", 0)
    assert sorted(order.tolist()) == images.indices("train").tolist()
    assert not np.array_equal(order, images.order("train", 1))
    assert 10 < images.labels[order[:35]].sum() + images.labels[order[35:]].sum() <= 20
    assert 0 < images.labels[order[:35]].mean() < 0.6


def test_order_of_an_image_depends_on_ids_not_on_positions():
    images = numbered(n=40, splits={"train": np.arange(40)})
    turned = replace(images, ids=images.ids[::-1])
    assert images.ids[images.order("train", 0)].tolist() == turned.ids[turned.order("train", 0)].tolist()


def test_halves_cut_every_class_in_half_and_single_images_in_turns():
    labels = np.array([0] * 10 + [1] * 7 + list(range(2, 10)))
    ids = np.array([f"i{i}" for i in range(len(labels))])
    parts = halves(ids, labels)
    counts = {name: np.bincount(labels[where], minlength=10) for name, where in parts.items()}
    assert counts["train"][0] == counts["test"][0] == 5
    assert abs(counts["train"][1] - counts["test"][1]) == 1
    assert abs(len(parts["train"]) - len(parts["test"])) <= 1
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(labels)))
    # Adding a file to one class moves no image of the classes before it.
    more = halves(np.append(ids, "new"), np.append(labels, 9))
    assert set(parts["train"][labels[parts["train"]] < 9]) == set(more["train"][more["train"] < 24])


def test_digest_sees_ids_labels_splits_and_fingerprint():
    images = numbered()
    digests = {
        images.digest(),
        images.sample(20, 0).digest(),
        replace(images, labels=images.labels[::-1]).digest(),
        replace(images, ids=np.array([f"x{i}" for i in range(100)])).digest(),
        replace(images, fingerprint="other pixels").digest(),
        images.digest("train"),
        images.digest("test"),
    }
    assert len(digests) == 7
    assert images.digest() == numbered().digest()
    assert images.describe()["splits"] == {"train": 70, "test": 30}


# ---- references


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("shaeps", "no image source 'shaeps'; did you mean 'shapes'"),
        ("folder:/nowhere/at/all", "no folder '/nowhere/at/all'"),
        ("shapes?sise=32", "no option 'sise'; did you mean 'size'"),
        ("shapes?size=big", "'big', but a whole number is expected"),
        ("shapes?size=4", "8 to 2048 pixels, not 4"),
        ("shapes?train=999999999", "10000000 images at most"),
        ("shapes:conflikt", "did you mean 'conflict'"),
        ("shapes?train=2&val=0&test=0", "has 2 images, but at least 4"),
        ("folder:", "There is no folder"),
        ("", "does not name images"),
        ("arrays:x", "only be given from Python"),
        ("parquet:/nowhere.parquet", "no file or folder"),
    ],
)
def test_bad_references_are_one_sentence(reference, message):
    with pytest.raises(InputError, match=message) as caught:
        load_images(reference)
    assert "\n" not in str(caught.value)


def test_a_path_without_source_suggests_folder(tmp_path):
    with pytest.raises(InputError, match="did you mean 'folder:"):
        load_images(str(tmp_path))


def test_unknown_split_limit_and_batch():
    images = numbered()
    with pytest.raises(InputError, match="no split 'tset'; did you mean 'test'"):
        images.indices("tset")
    with pytest.raises(InputError, match="limit of images per split is 3"):
        load_images(images, limit=3)
    with pytest.raises(InputError, match="batch size is 0"):
        all_batches(images, batch=0)
    with pytest.raises(InputError, match="labels can only be given with arrays"):
        load_images("shapes", labels=[1, 2])


def test_test_falls_back_to_val():
    images = numbered(splits={"train": np.arange(50), "val": np.arange(50, 100)})
    assert images.indices("test").tolist() == list(range(50, 100))
    assert {b.split for b in all_batches(images)} == {"train", "test"}


def test_images_pass_through_and_are_sampled():
    assert load_images(numbered()).ids.tolist() == numbered().ids.tolist()
    assert len(load_images(numbered(), limit=15).indices("train")) == 15


def test_the_reference_is_the_name():
    assert load_images("shapes:conflict?size=32&train=240").name == "shapes:conflict?size=32&train=240"
