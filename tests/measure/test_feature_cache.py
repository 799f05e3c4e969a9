"""The feature cache: keys, interruptions, several writers, full disks."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import SERVER

from sightline.core.errors import InputError
from sightline.encoders.sites import Tokens
from sightline.images.preprocess import Preprocess
from sightline.measure import feature_cache as module
from sightline.measure.feature_cache import Features, describe_features, reserve

N, D = 10, 6
MATRIX = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


def entry(cache: Path, rows: int = N, width: int = D, **about: Any) -> Features:
    return Features(cache, {"weights": "a", **about}, rows, width)


def encoder(**changes: Any) -> Any:
    usual = {
        "weights": "w",
        "module": torch.nn.Linear(2, 3),
        "reference": "timm:x",
        "family": "vit",
        "depth": 2,
        "heads": 2,
        "patch": 4,
        "tokens": Tokens(1, 0, (2, 2)),
        "preprocess": Preprocess(),
        "name": "x",
    }
    return SimpleNamespace(**{**usual, **changes})


def images(digest: str = "d", name: str = "folder:a") -> Any:
    return SimpleNamespace(name=name, digest=lambda split: f"{digest}-{split}")


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    one = entry(tmp_path)
    assert one.bytes == N * (4 * D + 1)
    assert not one.exists
    reserve([one])
    assert one.exists
    assert not one.complete
    one.write(np.array([7, 2, 9]), MATRIX[[7, 2, 9]])
    one.write(np.array([0, 1, 3, 4, 5, 6]), MATRIX[[0, 1, 3, 4, 5, 6]])
    one.finish()
    values, valid = entry(tmp_path).read()  # found again by its key
    assert isinstance(values, np.memmap)
    np.testing.assert_array_equal(valid, np.arange(N) != 8)  # the image of row 8 could not be read
    np.testing.assert_array_equal(values[valid], MATRIX[valid])
    assert os.listdir(tmp_path) == [one.key]
    disk = sum(file.stat().st_size for file in one.path.iterdir())
    assert one.bytes <= disk <= one.bytes + 1024


PREPROCESS = Preprocess()


@pytest.mark.parametrize(
    "changed",
    [
        (encoder(weights="other"), images(), "train", "float32"),
        (encoder(reference="timm:x?img_size=64"), images(), "train", "float32"),
        (encoder(family="eva"), images(), "train", "float32"),
        (encoder(heads=4), images(), "train", "float32"),
        (encoder(module=torch.nn.Linear(2, 3, bias=False)), images(), "train", "float32"),
        (encoder(tokens=Tokens(2, 0, (2, 2))), images(), "train", "float32"),
        (encoder(tokens=None), images(), "train", "float32"),
        (encoder(preprocess=replace(PREPROCESS, size=(64, 64))), images(), "train", "float32"),
        (encoder(preprocess=replace(PREPROCESS, resize=256)), images(), "train", "float32"),
        (encoder(preprocess=replace(PREPROCESS, interpolation="bilinear")), images(), "train", "float32"),
        (encoder(preprocess=replace(PREPROCESS, mean=(0.5, 0.5, 0.5))), images(), "train", "float32"),
        (encoder(preprocess=replace(PREPROCESS, std=(0.5, 0.5, 0.5))), images(), "train", "float32"),
        (encoder(), images(digest="other ids"), "train", "float32"),
        (encoder(), images(name="folder:b"), "train", "float32"),
        (encoder(), images(), "test", "float32"),
        (encoder(), images(), "train", "bf16"),
    ],
)
def test_key_changes_with_whatever_changes_the_numbers(tmp_path: Path, changed: tuple[Any, ...]) -> None:
    usual = describe_features(encoder(), images(), "train", "float32")
    other = describe_features(*changed)
    assert Features(tmp_path, usual, N, D).key != Features(tmp_path, other, N, D).key


def test_key_depends_on_site_feature_shape_and_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    different = [
        entry(tmp_path, site="block.0"),
        entry(tmp_path, site="block.1"),
        entry(tmp_path, site="block.0", feature="gap"),
        entry(tmp_path),
        entry(tmp_path, width=D + 1),
        entry(tmp_path, rows=N + 1),
    ]
    keys = {one.key for one in different}
    assert len(keys) == len(different)
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    assert entry(tmp_path).key not in keys


def test_key_does_not_depend_on_the_name_that_a_user_gives(tmp_path: Path) -> None:
    one, two = (describe_features(encoder(name=name), images(), "train", "float32") for name in ("mine", "yours"))
    assert Features(tmp_path, one, N, D).key == Features(tmp_path, two, N, D).key


def test_interrupted_fill_is_not_a_result_and_goes_on(tmp_path: Path) -> None:
    one = entry(tmp_path)
    reserve([one])
    one.write(np.arange(6), MATRIX[:6])
    with pytest.raises(InputError, match="not complete"):
        one.read()
    again = entry(tmp_path)  # a later run
    reserve([again])
    np.testing.assert_array_equal(again.written(), np.arange(N) < 6)
    again.write(np.arange(5, N), MATRIX[5:])
    again.finish()
    np.testing.assert_array_equal(again.read()[0], MATRIX)


def test_a_finished_entry_is_never_written_again(tmp_path: Path) -> None:
    one = entry(tmp_path)
    reserve([one])
    one.write(np.arange(N), MATRIX)
    one.finish()
    one.write(np.arange(N), MATRIX + 1)
    one.finish()
    reserve([one])
    np.testing.assert_array_equal(one.read()[0], MATRIX)
    assert os.listdir(tmp_path) == [one.key]


def _half(cache: Path, first: int) -> None:
    one = entry(cache)
    reserve([one])
    for row in range(first, N, 2):
        one.write(np.array([row]), MATRIX[row : row + 1])


def test_two_processes_fill_one_entry(tmp_path: Path) -> None:
    writers = [SERVER.Process(target=_half, args=(tmp_path, first)) for first in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    one = entry(tmp_path)
    assert one.written().all()
    one.finish()
    np.testing.assert_array_equal(one.read()[0], MATRIX)
    assert os.listdir(tmp_path) == [one.key]


def test_losing_the_race_to_create_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = entry(tmp_path)
    reserve([one])
    one.write(np.arange(N), MATRIX)
    real = Features.exists.fget  # type: ignore[attr-defined]
    answers = iter([False])  # as if the other process had created it after we looked
    monkeypatch.setattr(Features, "exists", property(lambda self: next(answers, None) is None and real(self)))
    reserve([one])
    assert one.written().all()
    assert os.listdir(tmp_path) == [f"{one.key}.part"]


def test_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(fd: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 2:  # the first entry fits
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(InputError, match=r"disk is full: the features need 500 bytes, and .* has .* free"):
        reserve([entry(tmp_path), entry(tmp_path, site="b")])
    assert os.listdir(tmp_path) == []


def test_full_disk_where_space_cannot_be_reserved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    one = entry(tmp_path)
    reserve([one])
    one.write(np.arange(N), MATRIX)
    one.finish()
    np.testing.assert_array_equal(one.read()[0], MATRIX)


def test_disk_that_fills_up_during_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = entry(tmp_path)
    reserve([one])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Features, "_put", full)
    with pytest.raises(InputError, match="The disk is full: cannot write"):
        one.write(np.arange(N), MATRIX)
    assert not one.complete


def test_no_permission_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match="No permission to write"):
        reserve([entry(tmp_path / "cache")])


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(InputError, match="a file stands where a folder is needed"):
        reserve([entry(tmp_path / "cache")])


def test_damaged_and_vanished_files_are_named(tmp_path: Path) -> None:
    one = entry(tmp_path)
    reserve([one])
    shutil.rmtree(one.part)
    with pytest.raises(InputError, match="vanished during the pass"):
        one.write(np.arange(2), MATRIX[:2])
    reserve([one])
    one.finish()
    file = one.path / "features.npy"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InputError, match="damaged"):
        one.read()


def test_no_file_stays_open(tmp_path: Path) -> None:
    many = [entry(tmp_path, site=str(i)) for i in range(50)]
    reserve(many)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for one in many:
        one.write(np.arange(N), MATRIX)
    after = len(os.listdir("/proc/self/fd")) if before else 0
    assert after <= before + 2
