"""Features on disk: one float32 matrix (n images, D width) per encoder, site, pooling and split, memory-mapped.

    about = {**describe_features(encoder, images, "train", "float32"), "site": "block.3", "feature": "cls"}
    features = Features(cache, about, n, width)
    reserve([features])                 # takes the disk space now, or says in one sentence why it cannot
    features.write(rows, values)        # any process, any order; each row once or again
    features.finish()                   # one process, when the pass is over
    values, valid = features.read()     # memory map (n, D), bool (n,): False where an image could not be read

While it is being filled, an entry is the folder `KEY.part`; `finish` renames it to `KEY`, so that what is found under
its key is always whole. `rows.npy` records the rows that are written: an interrupted pass goes on where it stopped.
The key is a sha256 over all that can change the numbers, see `describe_features`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.filesize import decimal

from sightline.core.errors import InputError
from sightline.core.files import abandoned, explain

if TYPE_CHECKING:
    import numpy.typing as npt

    from sightline.encoders.encoder import Encoder
    from sightline.images.sets import Images


FORMAT = 1  # of the files; a new number leaves all older entries unread
VALUES, ROWS, ABOUT = "features.npy", "rows.npy", "about.json"


def describe_encoder(encoder: Encoder) -> dict[str, Any]:
    """All of an encoder that can change its activations, as plain data for keys and fingerprints.

    The weights do not tell everything: the number of heads, for one, is not in them. So the architecture as the
    module prints it (without addresses in memory) and the layout that we know of it are part of it.
    """
    printed = re.sub(r"0x[0-9a-fA-F]+", "", repr(encoder.module))
    window = max(getattr(part, "attention_window", 0) for part in encoder.module.modules())  # which is not printed
    return {
        "weights": encoder.weights,
        "architecture": hashlib.sha256(printed.encode()).hexdigest(),
        **({"window": window} if window else {}),
        "reference": encoder.reference,
        "family": encoder.family,
        "layout": [encoder.depth, encoder.heads, encoder.patch],
        "tokens": None if encoder.tokens is None else asdict(encoder.tokens),
        "preprocess": asdict(encoder.preprocess),
    }


def describe_features(encoder: Encoder, images: Images, split: str, precision: str) -> dict[str, Any]:
    """All that can change the numbers beside site and pooling, as plain data for the key of an entry."""
    return {
        **describe_encoder(encoder),
        "precision": precision,
        "images": images.name,
        "split": split,
        "digest": images.digest(split),
    }


@dataclass(frozen=True, eq=False)
class Features:
    """One matrix of features in the folder `cache`; `about` says what they are."""

    cache: Path
    about: Mapping[str, Any]
    rows: int
    width: int

    @cached_property
    def key(self) -> str:
        """sha256 of `about`, the shape and the format of the files."""
        everything = {"format": FORMAT, "shape": [self.rows, self.width], **self.about}
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()

    @property
    def path(self) -> Path:
        """Where the finished entry is."""
        return self.cache / self.key

    @property
    def part(self) -> Path:
        """Where the entry is while it is being filled."""
        return self.cache / f"{self.key}.part"

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return self.rows * (4 * self.width + 1)

    @property
    def complete(self) -> bool:
        """Whether a pass has finished it, now or in an earlier run."""
        return self.path.is_dir()

    @property
    def exists(self) -> bool:
        """Whether its disk space is taken already, complete or not."""
        return self.complete or self.part.is_dir()

    def written(self) -> npt.NDArray[np.bool_]:
        """Which rows are there, (n,); of an entry that is being filled or of a finished one."""
        there: npt.NDArray[np.bool_] = self._load(ROWS, (self.rows,)) == 1
        return there

    def write(self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
        """Write some rows; an entry that is complete already stays as it is."""
        if self.complete:
            return
        values = np.ascontiguousarray(values, "<f4").reshape(len(rows), self.width)
        try:
            self._put(VALUES, rows, values)
            self._put(ROWS, rows, np.ones((len(rows), 1), np.uint8))  # the record comes after what it records
        except FileNotFoundError as error:
            if not self.complete:  # else another run has just finished the same entry
                raise InputError(
                    f"The feature cache {str(self.part)!r} vanished during the pass; run it again"
                ) from error
        except OSError as error:
            raise InputError(explain(error, self.part)) from error

    def _put(self, name: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        # Plain writes: a map would hold a file open for each of hundreds of entries, and kill us if the disk is full.
        stride = values[:1].nbytes
        with open(self.part / name, "r+b", buffering=0) as file:
            number = file.fileno()
            first = os.fstat(number).st_size - self.rows * stride  # the data are the end of an .npy file
            for row, value in zip(rows.tolist(), values, strict=True):
                os.pwrite(number, value, first + row * stride)

    def finish(self) -> None:
        """Call it complete, in one step; rows that were not written belong to images that could not be read."""
        if self.complete:
            return
        try:
            for name in (VALUES, ROWS):
                with open(self.part / name, "rb+") as file:
                    os.fsync(file.fileno())
            self.part.rename(self.path)
        except OSError as error:
            if not self.complete:
                raise InputError(explain(error, self.path)) from error

    def read(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """The finished matrix (n, D) as a memory map, and which of its rows are valid (n,)."""
        if not self.complete:
            raise InputError(
                f"The features {self.key[:12]}… in {str(self.cache)!r} are not complete; run the pass again"
            )
        return self._load(VALUES, (self.rows, self.width)), self.written()

    def _load(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        folder = self.path if self.complete else self.part
        try:
            found: npt.NDArray[Any] = np.load(folder / name, mmap_mode="r", allow_pickle=False)
            if found.shape == shape:
                return found
            problem = f"{name} has shape {found.shape}, not {shape}"
        except (OSError, ValueError) as error:
            problem = str(error)
        raise InputError(f"The feature cache {str(folder)!r} is damaged ({problem}); delete that folder and run again")


def reserve(entries: Iterable[Features]) -> None:
    """Take the disk space of all entries that do not exist yet, or none of it and say why."""
    entries = list({entry.key: entry for entry in entries if not entry.exists}.values())
    made: list[Path] = []
    entry = None
    try:
        for entry in entries:
            entry.cache.mkdir(parents=True, exist_ok=True)
            if _create(entry):
                made.append(entry.part)
    except OSError as error:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or entry is None:
            raise InputError(explain(error, entry.cache if entry else Path())) from error
        needed, free = sum(e.bytes for e in entries), shutil.disk_usage(entry.cache).free
        raise InputError(
            f"The disk is full: the features need {decimal(needed)}, and {str(entry.cache)!r} has {decimal(free)} "
            "free; use fewer images or sites, or a folder with room"
        ) from error


def _create(entry: Features) -> bool:
    """Make `KEY.part`; False if another process was faster."""
    for left in entry.cache.glob(f"{entry.key}.*.tmp"):
        if abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    draft = entry.cache / f"{entry.key}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        draft.mkdir()
        (draft / ABOUT).write_text(json.dumps(dict(entry.about), indent=1))
        _allocate(draft / VALUES, np.dtype("<f4"), (entry.rows, entry.width))
        _allocate(draft / ROWS, np.dtype("u1"), (entry.rows,))
        try:
            draft.rename(entry.part)
        except OSError:
            if not entry.exists:
                raise
            return False
        return True
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _allocate(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """An .npy file of zeros whose disk blocks are taken, so that a full disk is noticed now and not in the pass."""
    size = int(np.prod(shape)) * dtype.itemsize
    with open(path, "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), file.tell(), size)
            return
        file.writelines(bytes(min(2**24, size - start)) for start in range(0, size, 2**24))
