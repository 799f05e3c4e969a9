"""Hashes of image files, so that new pixels under old names are noticed.

A file is read once: its hash is remembered in ~/.cache/sightline (or XDG_CACHE_HOME) for as long as its size, its times
and its place on the disk stay the same. A file that has changed in the last seconds is hashed again next time, since
another change might leave its times as they are.
"""

import contextlib
import hashlib
import io
import os
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sightline.core.errors import InputError
from sightline.core.files import user_cache, write_atomically
from sightline.core.progress import bar_of_steps
from sightline.images.decoding import check_descriptors

WIDTH = 16  # bytes of a hash
SETTLED = 2.0  # seconds after which a change of a file shows in its times
Stamp = tuple[int, ...]


def hashes(root: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The hash of each of these files below a folder; zeros for what cannot be read."""
    remembered, now = _recall(root), time.time()
    stamps = {name: _stamp(root / name) for name in names}
    known_hashes = {
        name: remembered[name][1]
        for name, stamp in stamps.items()
        if name in remembered and remembered[name][0] == stamp
    }
    if missing := [name for name in stamps if name not in known_hashes]:
        with ThreadPoolExecutor(8) as pool, bar_of_steps("Reading files for the first time", len(missing)) as move:
            for name, value in zip(missing, pool.map(_hash, [root / name for name in missing]), strict=True):
                known_hashes[name] = value
                move()
        settled = {name for name in missing if stamps[name] and max(stamps[name][1:3]) < (now - SETTLED) * 1e9}
        _remember(root, {**remembered, **{name: (stamps[name], known_hashes[name]) for name in settled}})
    return known_hashes


def _stamp(path: Path) -> Stamp:
    """Size, times and place of a file; empty if it is not there."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


def _hash(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would keep its reader waiting
            return bytes(WIDTH)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=WIDTH)).digest()
    except OSError as error:
        check_descriptors(error)
        return bytes(WIDTH)


def _record(root: Path) -> Path:
    return user_cache() / f"contents-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}.npz"


def _recall(root: Path) -> dict[str, tuple[Stamp, bytes]]:
    try:
        with np.load(io.BytesIO(_record(root).read_bytes()), allow_pickle=False) as file:
            names = os.fsdecode(file["names"].tobytes()).split("\0")
            stamps, values = file["stamps"], file["hashes"]
        if stamps.shape != (len(names), 4) or values.shape != (len(names), WIDTH):
            return {}
        return {n: (tuple(s), v.tobytes()) for n, s, v in zip(names, stamps.tolist(), values, strict=True)}
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile):  # none, or damaged
        return {}


def _remember(root: Path, known: dict[str, tuple[Stamp, bytes]]) -> None:
    """Keep what is known; if that cannot be written, the files are read again next time."""
    if not known:
        return
    stamps: NDArray[np.int64] = np.array([stamp for stamp, _ in known.values()], np.int64)
    values = np.frombuffer(b"".join(value for _, value in known.values()), np.uint8).reshape(-1, WIDTH)
    names = np.frombuffer(os.fsencode("\0".join(known)), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, names=names, stamps=stamps, hashes=values)
    with contextlib.suppress(InputError, OSError, RuntimeError):
        write_atomically(_record(root), buffer.getvalue())
