"""Hashes of files: new pixels under old names and sizes are noticed, and no file is read twice."""

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.images import contents
from sightline.images.loading import load_images
from sightline.images.sets import join


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight bitmaps of two classes, which were written long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "SETTLED", -60.0)
    for number in range(8):
        paint(tmp_path / "images" / "ab"[number % 2] / f"{number}.bmp", number)
    return tmp_path / "images"


def paint(path: Path, colour: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), colour, np.uint8)).save(path)


def digests(root: Path) -> dict[str | None, str]:
    images = load_images(f"folder:{root}")
    return {split: images.digest(split) for split in ("train", "test", None)}


def test_the_hash_is_that_of_the_file(root: Path) -> None:
    found = contents.hashes(root, ["a/0.bmp", "b/1.bmp", "gone.bmp"])
    expected = hashlib.blake2b((root / "b" / "1.bmp").read_bytes(), digest_size=16).digest()
    assert found["b/1.bmp"] == expected
    assert found["a/0.bmp"] != expected
    assert found["gone.bmp"] == bytes(16)


def test_other_pixels_of_the_same_size_are_other_images(root: Path) -> None:
    before = digests(root)
    assert digests(root) == before
    same = load_images(f"folder:{root}")
    assert {split: same.digest(split) for split in before} == before
    file = root / "a" / "0.bmp"
    times = file.stat()
    paint(file, 200)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy that keeps its times
    assert {split: same.digest(split) for split in before} == digests(root)  # the object that has seen the old ones
    after = digests(root)
    images = load_images(f"folder:{root}")
    touched = "train" if "a/0.bmp" in images.ids[images.indices("train")] else "test"
    assert after[touched] != before[touched]
    assert sum(after[split] != before[split] for split in after) == 1  # all splits together are told by names and sizes


def test_files_are_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{'ab'[n % 2]}/{n}.bmp" for n in range(8)]
    first = contents.hashes(root, names[:6])
    whole, read = contents._hash, []
    monkeypatch.setattr(contents, "_hash", lambda path: (read.append(path.name), whole(path))[1])
    second = contents.hashes(root, names)
    assert read == ["6.bmp", "7.bmp"]
    assert {name: second[name] for name in first} == first
    contents.hashes(root, names[2:])
    assert len(read) == 2


def test_what_has_just_changed_is_not_trusted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SETTLED", 60.0)
    contents.hashes(root, ["a/0.bmp"])
    assert not contents._record(root).exists()
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    contents.hashes(root, ["a/0.bmp"])
    assert contents._record(root).exists()


@pytest.mark.parametrize("damage", [b"", b"PK\x05\x06", b"no archive"])
def test_a_damaged_record_is_made_anew(root: Path, damage: bytes) -> None:
    first = contents.hashes(root, ["a/0.bmp"])
    contents._record(root).write_bytes(damage)
    assert contents.hashes(root, ["a/0.bmp"]) == first
    assert contents._recall(root)["a/0.bmp"][1] == first["a/0.bmp"]


def test_joined_images_have_the_contents_of_both(root: Path, tmp_path: Path) -> None:
    for number in range(8):
        paint(tmp_path / "more" / "ab"[number % 2] / f"{number}.bmp", 100 + number)
    both = join(load_images(f"folder:{root}"), "further", load_images(f"folder:{tmp_path / 'more'}"))
    before = both.digest("test"), both.digest("further")
    for file in (tmp_path / "more").rglob("*.bmp"):
        paint(file, 7)
    both = join(load_images(f"folder:{root}"), "further", load_images(f"folder:{tmp_path / 'more'}"))
    assert both.digest("test") == before[0]
    assert both.digest("further") != before[1]
