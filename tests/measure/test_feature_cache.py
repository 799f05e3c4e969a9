"""The feature cache: keys, interruptions, several writers, full disks."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import SERVER

from sightline.core.errors import InputError
from sightline.core.version import FORMAT
from sightline.encoders.sites import Tokens
from sightline.images.preprocess import Preprocess
from sightline.measure.feature_cache import Features, describe_features

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
    one.write(np.array([7, 2, 9]), MATRIX[[7, 2, 9]])
    assert one.exists
    assert not one.complete
    one.write(np.array([0, 1, 3, 4, 5, 6]), MATRIX[[0, 1, 3, 4, 5, 6]])
    one.finish()
    values, valid = entry(tmp_path).read()  # found again by its key
    assert isinstance(values, np.memmap)
    np.testing.assert_array_equal(valid, np.arange(N) != 8)  # the image of row 8 could not be read
    np.testing.assert_array_equal(values[valid], MATRIX[valid])
    assert os.listdir(tmp_path) == [f"{one.key}.features"]
    assert one.path.stat().st_size == one.bytes


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
    monkeypatch.setattr("sightline.measure.feature_cache.FORMAT", FORMAT + 1)
    assert entry(tmp_path).key not in keys


def test_key_does_not_depend_on_the_name_that_a_user_gives(tmp_path: Path) -> None:
    one, two = (describe_features(encoder(name=name), images(), "train", "float32") for name in ("mine", "yours"))
    assert Features(tmp_path, one, N, D).key == Features(tmp_path, two, N, D).key


def test_interrupted_fill_is_not_a_result_and_goes_on(tmp_path: Path) -> None:
    one = entry(tmp_path)
    one.write(np.arange(6), MATRIX[:6])
    with pytest.raises(InputError, match="not complete"):
        one.read()
    again = entry(tmp_path)  # a later run
    np.testing.assert_array_equal(again.written(), np.arange(N) < 6)
    again.write(np.arange(5, N), MATRIX[5:])
    again.finish()
    np.testing.assert_array_equal(again.read()[0], MATRIX)


def test_a_finished_entry_is_never_written_again(tmp_path: Path) -> None:
    one = entry(tmp_path)
    one.write(np.arange(N), MATRIX)
    one.finish()
    one.write(np.arange(N), MATRIX + 1)
    one.finish()
    np.testing.assert_array_equal(one.read()[0], MATRIX)
    assert os.listdir(tmp_path) == [f"{one.key}.features"]


def _half(cache: Path, first: int) -> None:
    one = entry(cache)
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
    assert os.listdir(tmp_path) == [f"{one.key}.features"]


def test_disk_that_fills_up_during_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that did not fit may take a part of what it was given."""
    one = entry(tmp_path)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, values, place: whole(file, values[:1], place))
    with pytest.raises(InputError, match="The disk is full: cannot write"):
        one.write(np.arange(N), MATRIX)
    assert not one.complete
    assert not one.written().any()


def test_no_permission_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match="No permission to write"):
        entry(tmp_path / "cache").write(np.arange(N), MATRIX)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(InputError, match="a file stands where a folder is needed"):
        entry(tmp_path / "cache").write(np.arange(N), MATRIX)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    one = entry(tmp_path)
    one.write(np.arange(N), MATRIX)
    one.finish()
    one.path.write_bytes(one.path.read_bytes()[:-40])
    with pytest.raises(InputError, match=rf"{one.key}.features' are damaged \(it has 210 bytes, not 250\); delete"):
        one.read()


def test_what_another_run_has_finished_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    one = entry(tmp_path)
    one.write(np.arange(N), MATRIX)
    one.finish()
    one.part.touch()  # opened when it had just been finished
    one.finish()
    assert os.listdir(tmp_path) == [f"{one.key}.features"]


def test_no_file_stays_open(tmp_path: Path) -> None:
    many = [entry(tmp_path, site=str(i)) for i in range(50)]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for one in many:
        one.write(np.arange(N), MATRIX)
    after = len(os.listdir("/proc/self/fd")) if before else 0
    assert after <= before + 2
