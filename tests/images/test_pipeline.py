"""Batches of images: sizes, ranks, workers, what cannot be read."""

import multiprocessing
import os
import resource
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.numbered import SMALL, all_batches, numbered

from sightline.core.errors import InputError
from sightline.images.loading import load_images
from sightline.images.pipeline import batch_count, batches

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


@pytest.mark.processes
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


@pytest.mark.processes
def test_small_shared_memory_sends_arrays_instead(monkeypatch):
    monkeypatch.setattr("sightline.images.workers._shared_memory", lambda: 0)
    plain, parallel = all_batches(numbered()), all_batches(numbered(), workers=1)
    assert all(torch.equal(a.pixels[SMALL], b.pixels[SMALL]) for a, b in zip(plain, parallel, strict=True))


@pytest.mark.processes
def test_no_process_stays_behind_when_the_consumer_stops_early():
    stream = batches(numbered(), [SMALL], splits=["train"], batch=4, seed=0, workers=2)
    next(stream)
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    deadline = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


class Refusing:
    def read(self, indices):
        raise InputError("The mask x.png has the number 7")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_is_its_sentence(workers):
    with pytest.raises(InputError, match=r"\AThe mask x.png has the number 7\Z"):
        all_batches(replace(numbered(), source=Refusing()), workers=workers)


@pytest.mark.processes
def test_too_few_file_descriptors_for_workers_are_a_sentence():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        with pytest.raises(InputError, match=r"too few file descriptors for 2 processes .* ulimit -n 1024"):
            all_batches(numbered(), workers=2)
        assert len(all_batches(numbered(), workers=0)) == 13
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_one_image_at_a_time_is_decoded():
    images = numbered()
    seen, read = [], images.source.read
    all_batches(replace(images, source=SimpleNamespace(read=lambda where: seen.append(len(where)) or read(where))))
    assert seen == [1] * len(images.ids)


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
