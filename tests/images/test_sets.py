"""Images, samples, orders and batches: closed forms, and every way a reference can be wrong."""

import multiprocessing
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.errors import InputError
from sightline.core.keyed_random import mix
from sightline.images.loading import load_images
from sightline.images.pipeline import batch_count, batches
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images, Item, halves

SMALL = Preprocess(size=(8, 8))
PINNED_SAMPLE = [1, 3, 7, 15, 20, 31, 32, 34, 44, 53]
PINNED_ORDER = [37, 36, 44, 13, 39, 5, 1, 51, 16, 52]


class Numbered:
    """Image i is filled with i; positions in `bad` are corrupt."""

    def __init__(self, bad=()):
        self.bad = set(bad)

    def read(self, indices):
        return [
            Item(None, "it is broken") if i in self.bad else Item(np.full((8, 8, 3), i, np.uint8), None)
            for i in indices
        ]


def numbered(n=100, classes=5, bad=(), **changes):
    labels = np.arange(n) % classes
    ids = np.array([f"{i:03d}.png" for i in range(n)])
    images = Images(
        name="numbered",
        source=Numbered(bad),
        ids=ids,
        labels=labels,
        classes=tuple("abcdefgh"[:classes]),
        splits={"train": np.arange(0, n - 30), "test": np.arange(n - 30, n)},
        extras={"twice": 2 * labels},
    )
    return replace(images, **changes)


def all_batches(images, **options):
    given = {"splits": ["train", "test"], "batch": 8, "seed": 0, "workers": 0} | options
    return list(batches(images, [SMALL], **given))


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


# ---- batches


@given(st.integers(1, 500), st.integers(1, 64))
def test_batch_sizes_differ_by_one_and_none_is_too_small(n, batch):
    count = batch_count(n, batch)
    sizes = [len(part) for part in np.array_split(np.arange(n), count)]
    assert max(sizes) - min(sizes) <= 1
    if batch >= 4 and n >= 4:
        assert min(sizes) >= 4
    assert max(sizes) <= max(batch, 7)


def test_batches_carry_every_image_once_with_its_labels():
    images = numbered()
    seen = all_batches(images)
    assert [len(b.ids) for b in seen] == [8] * 7 + [7] * 2 + [8] * 2 + [7] * 2
    assert [b.number for b in seen] == list(range(13))
    for batch in seen:
        where = images.indices(batch.split)[batch.rows.numpy()]
        assert images.ids[where].tolist() == list(batch.ids)
        assert batch.pixels[SMALL].dtype == torch.uint8
        assert batch.pixels[SMALL][:, 0, 0, 0].tolist() == where.tolist()
        assert batch.labels.tolist() == (where % 5).tolist()
        assert batch.extras["twice"].tolist() == (2 * (where % 5)).tolist()
    assert Counter(i for b in seen for i in b.ids) == Counter(images.ids.tolist())


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_ranks_partition_the_batches(world):
    images = numbered()
    whole = {b.number: b for b in all_batches(images)}
    parts = [all_batches(images, rank=rank, world=world) for rank in range(world)]
    assert sorted(b.number for part in parts for b in part) == sorted(whole)
    for rank, part in enumerate(parts):
        for batch in part:
            assert batch.number % world == rank
            assert batch.ids == whole[batch.number].ids
            assert torch.equal(batch.pixels[SMALL], whole[batch.number].pixels[SMALL])


def test_start_resumes_where_a_pass_stopped():
    whole, rest = all_batches(numbered()), all_batches(numbered(), start=5)
    assert [b.ids for b in rest] == [b.ids for b in whole[5:]]
    assert all_batches(numbered(), start=13) == []


def test_worker_processes_see_the_same_as_none():
    plain, parallel = all_batches(numbered()), all_batches(numbered(), workers=2)
    assert [b.ids for b in plain] == [b.ids for b in parallel]
    assert all(torch.equal(a.pixels[SMALL], b.pixels[SMALL]) for a, b in zip(plain, parallel, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_leaves_the_global_generators_alone(workers):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    all_batches(numbered(), workers=workers)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_small_shared_memory_sends_arrays_instead(monkeypatch):
    monkeypatch.setattr("sightline.images.workers._shared_memory", lambda: 0)
    plain, parallel = all_batches(numbered()), all_batches(numbered(), workers=1)
    assert all(torch.equal(a.pixels[SMALL], b.pixels[SMALL]) for a, b in zip(plain, parallel, strict=True))


def test_no_process_stays_behind_when_the_consumer_stops_early():
    stream = batches(numbered(), [SMALL], splits=["train"], batch=4, seed=0, workers=2)
    next(stream)
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    deadline = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


def test_encoders_of_one_geometry_share_pixels():
    other_colours = replace(SMALL, mean=(0.5, 0.5, 0.5))
    smaller = replace(SMALL, size=(4, 4))
    (batch,) = batches(numbered(), [SMALL, other_colours, smaller], splits=["test"], batch=30, seed=0, workers=0)
    assert batch.pixels[SMALL] is batch.pixels[other_colours]
    assert batch.pixels[smaller].shape == (30, 3, 4, 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_images_are_skipped_by_name(workers):
    seen = all_batches(numbered(bad=[3, 50, 99]), workers=workers)
    skipped = [entry for b in seen for entry in b.skipped]
    assert sorted(skipped) == [(f"{i:03d}.png", "it is broken") for i in (3, 50, 99)]
    assert sum(len(b.ids) for b in seen) == 97
    assert all(len(b.ids) == len(b.labels) == len(b.rows) == len(b.pixels[SMALL]) for b in seen)
    assert all(b.pixels[SMALL][:, 0, 0, 0].tolist() == [int(i[:3]) for i in b.ids] for b in seen)


def test_a_batch_of_corrupt_images_is_empty():
    (batch,) = all_batches(numbered(bad=range(70, 100)), splits=["test"], batch=30)
    assert batch.pixels[SMALL].shape == (0, 3, 8, 8)
    assert len(batch.skipped) == 30


def test_strict_makes_corrupt_images_fatal():
    images = load_images(numbered(bad=[3]), strict=True)
    with pytest.raises(InputError, match=r"003\.png cannot be read: it is broken"):
        all_batches(images)


# ---- references


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("shaeps", "no dataset 'shaeps'; did you mean 'shapes'"),
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
