"""Features on disk: one float32 matrix (n images, D width) per encoder, site, pooling and split, memory-mapped.

    about = {**describe_features(encoder, images, "train", "float32"), "site": "block.3", "feature": "cls"}
    features = Features(cache, about, n, width)
    features.write(rows, values)        # any process, any order; each row once or again
    features.finish()                   # one process, when the pass is over
    values, valid = features.read()     # memory map (n, D), bool (n,): False where an image could not be read

An entry is a file: the matrix, then a byte for each row that is written, so that an interrupted pass goes on where it
stopped. While it is being filled its name ends in .part; what is found under its key is always whole. The key is a
sha256 over all that can change the numbers, see `describe_features`.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sightline.core.errors import InputError
from sightline.core.files import explain
from sightline.core.version import FORMAT
from sightline.encoders.encoder import Encoder
from sightline.images.sets import Images


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
        return self.cache / f"{self.key}.features"

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
        return self.path.is_file()

    @property
    def exists(self) -> bool:
        """Whether some of it is there, complete or not."""
        return self.complete or self.part.is_file()

    def written(self) -> npt.NDArray[np.bool_]:
        """Which rows are there, (n,); of an entry that is being filled or of a finished one."""
        there: npt.NDArray[np.bool_] = self._map("u1", (self.rows,), 4 * self.rows * self.width) == 1
        return there

    def write(self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
        """Write some rows; an entry that is complete already stays as it is."""
        if self.complete or not len(rows):
            return
        values = np.ascontiguousarray(values, "<f4").reshape(len(rows), self.width)
        runs = np.split(np.arange(len(rows)), np.flatnonzero(np.diff(rows) != 1) + 1)  # of rows that follow each other
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            # Plain writes: a map would hold a file open for each of hundreds of entries, and a full disk would kill us.
            with open(os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
                file.truncate(self.bytes)  # zeros that take no space; several processes may do so
                for run in runs:
                    _put(file.fileno(), values[run], 4 * self.width * int(rows[run[0]]))
                for run in runs:  # the record comes after what it records
                    _put(file.fileno(), np.ones(len(run), "u1"), 4 * self.width * self.rows + int(rows[run[0]]))
        except OSError as error:
            raise InputError(explain(error, self.part)) from error

    def finish(self) -> None:
        """Call it complete, in one step; rows that were not written belong to images that could not be read."""
        if self.complete:
            self.part.unlink(missing_ok=True)  # of another run that has finished it meanwhile
            return
        try:
            with open(self.part, "rb") as file:
                os.fsync(file.fileno())
            self.part.rename(self.path)
        except OSError as error:
            if not self.complete:  # else another run has just finished the same entry
                raise InputError(explain(error, self.path)) from error

    def read(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """The finished matrix (n, D) as a memory map, and which of its rows are valid (n,)."""
        if not self.complete:
            raise InputError(
                f"The features {self.key[:12]}… in {str(self.cache)!r} are not complete; run the pass again"
            )
        return self._map("<f4", (self.rows, self.width), 0), self.written()

    def _map(self, dtype: str, shape: tuple[int, ...], offset: int) -> npt.NDArray[Any]:
        path = self.path if self.complete else self.part
        try:
            if path.stat().st_size == self.bytes:
                return np.memmap(path, dtype, "r", offset, shape)
            problem = f"it has {path.stat().st_size} bytes, not {self.bytes}"
        except OSError as error:
            problem = str(error)
        raise InputError(f"The features {str(path)!r} are damaged ({problem}); delete that file and run again")


def _put(file: int, values: npt.NDArray[Any], place: int) -> None:
    if os.pwrite(file, values.data, place) != values.nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
