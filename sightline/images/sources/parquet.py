"""`parquet:PATH[?image=column&label=column]`: a Parquet file, or a folder of them, as Hugging Face writes images.

The image column holds encoded bytes (binary, or a struct of bytes and path), the label column numbers or names. In a
folder, files such as `train.parquet`, `test-00000-of-00002.parquet` or `validation/0.parquet` give the splits.

Images are read on demand: a row group's image column is read once and kept, at most 256 MB of them per process. It is
read some rows at a time, since a value that the file holds once may stand in every row.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.filesize import decimal

from sightline.core.errors import InputError, first_line, nearest
from sightline.images.decoding import OUTSIDE, check_descriptors, decode, inside
from sightline.images.loading import read_options
from sightline.images.sets import Images, Item, by_name, halves, split_name
from sightline.images.sources.arrays import encode_parts

KEEP = 256 * 2**20  # bytes of row groups that a process keeps
UNPACKED = 10  # times what a row group takes in the file: images hardly shrink when they are packed
BATCH = 65536  # numbers that are read at a time
FEW = 128  # texts that are read at a time, or fewer: one may be large, and the file may say otherwise
FEW_ROWS = 10_000  # that a file may have whatever its size
LABEL_NAMES = ("label", "labels", "fine_label", "class", "target", "category")


class ParquetRows:
    """Decodes images from the row groups of Parquet files."""

    def __init__(
        self, files: Sequence[Path], footers: Sequence[Any], column: str, groups: Sequence[tuple[int, int, int]]
    ) -> None:
        self.files, self.footers, self.column = list(files), list(footers), column
        self.groups = list(groups)  # file, row group in it, number of rows
        self.starts = np.cumsum([0, *(rows for _, _, rows in groups)])
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._refused: dict[int, str] = {}  # row groups that unpack to far too much

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict()}

    def read(self, indices: Sequence[int]) -> list[Item]:
        """Images at these positions; neighbours share the reading of their row group."""
        items: dict[int, Item] = {}
        groups = np.searchsorted(self.starts, indices, side="right") - 1
        for index, group in sorted(zip(indices, groups.tolist(), strict=True)):
            try:
                items[index] = self._decode(group, self._group(group)[index - int(self.starts[group])].as_py())
            except (OSError, pa.ArrowException) as error:
                check_descriptors(error)
                items[index] = Item(None, f"{self._file(group).name} cannot be read: {first_line(error)}")
            except TooLargeError as error:
                self._refused[group] = str(error)
                items[index] = Item(None, str(error))
        return [items[index] for index in indices]

    def _file(self, group: int) -> Path:
        return self.files[self.groups[group][0]]

    def _decode(self, group: int, cell: Any) -> Item:
        if isinstance(cell, dict):
            folder, path = self._file(group).parent, cell.get("path") or ""
            if not cell.get("bytes") and not inside(folder, path):
                return Item(None, OUTSIDE.format(path))
            cell = cell.get("bytes") or (folder / path if path and (folder / path).exists() else None)
        return Item(None, "the row has no image") if cell is None else decode(cell)

    def _group(self, group: int) -> Any:
        if group in self._refused:
            raise TooLargeError(self._refused[group])
        if group not in self._kept:
            number, inner, _ = self.groups[group]
            with pq.ParquetFile(self.files[number], metadata=self.footers[number], memory_map=True) as file:
                self._kept[group] = read_column(file, self.column, [inner])
            while len(self._kept) > 1 and sum(column.nbytes for column in self._kept.values()) > KEEP:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]


class TooLargeError(Exception):
    """A column takes far more memory than the file says it could."""


def read_column(file: Any, column: str, groups: Sequence[int]) -> Any:
    """A column of some row groups, in memory that is in proportion to what it takes in the file."""
    chunks = [
        chunk
        for group in (file.metadata.row_group(number) for number in groups)
        for chunk in (group.column(number) for number in range(group.num_columns))
        if f"{chunk.path_in_schema}.".startswith(f"{column}.")
    ]
    stored = sum(chunk.total_compressed_size for chunk in chunks)
    most = max(KEEP, UNPACKED * stored)
    unpacked = max((chunk.total_uncompressed_size for chunk in chunks), default=0)  # a value is no larger than that
    varied = any(chunk.physical_type == "BYTE_ARRAY" for chunk in chunks)
    rows = max(1, min(FEW, KEEP // 2 // max(unpacked, 1))) if varied else BATCH
    parts, size = [], sum(chunk.total_uncompressed_size for chunk in chunks)
    if size <= most:
        size = 0
        # Without threads: a worker process is a fork, and its parent's threads do not live in it.
        for batch in file.iter_batches(rows, row_groups=groups, columns=[column], use_threads=False):
            parts.append(batch.column(0))
            if (size := size + batch.nbytes) > most:
                break
    if size > most:
        raise TooLargeError(
            f"the column {column!r} takes more than {decimal(most)} of memory and {decimal(stored)} in the file, which "
            "images do not; write it again"
        )
    return pa.chunked_array(parts, file.schema_arrow.field(column).type)


def load(where: str, options: Mapping[str, str]) -> Images:
    chosen = read_options("parquet", options, {"image": "", "label": ""})
    files, root = _files(where)
    schemas, footers = zip(*map(_open, files), strict=True)
    features = _features(schemas[0])
    image = _image_column(schemas[0], features, chosen["image"], where)
    label = _label_column(schemas[0], features, chosen["label"], where)
    for path, schema in zip(files, schemas, strict=True):
        for column in (image, *([label] if label else [])):
            if column not in schema.names:
                raise InputError(f"{path} has no column {column!r}, which other files have")
    groups = [
        (f, g, footer.row_group(g).num_rows) for f, footer in enumerate(footers) for g in range(footer.num_row_groups)
    ]
    counts = [footer.num_rows for footer in footers]
    stems = [file.relative_to(root).with_suffix("").as_posix() for file in files]
    ids = np.array([f"{stem}/{row:06d}" for stem, n in zip(stems, counts, strict=True) for row in range(n)], str)
    names = [name for stem, n in zip(stems, counts, strict=True) for name in [_split(stem)] * n]
    known = [(str(path), schema, footer) for path, schema, footer in zip(files, schemas, footers, strict=True)]
    values = {path: _labels(path, footer, label) if label else [-1] * footer.num_rows for path, _, footer in known}
    labels, classes = encode_parts(values, {path: _names(schema, label) for path, schema, _ in known})
    splits = by_name(names)
    return Images(
        name=f"parquet:{where}",
        source=ParquetRows([file.absolute() for file in files], footers, image, groups),
        ids=ids,
        labels=labels,
        classes=classes,
        splits=splits or halves(ids, labels),
        own_splits=bool(splits),
        fingerprint=hashlib.sha256(b"".join(map(_footer, files))).hexdigest(),
    )


def _files(where: str) -> tuple[list[Path], Path]:
    path = Path(where).expanduser()
    if where and path.is_file():
        return [path], path.parent
    if not where or not path.is_dir():
        raise InputError(f"There is no file or folder {where!r}; give one, such as parquet:/data/cifar10")
    files = sorted(file for file in path.rglob("*.parquet") if not file.name.startswith("."))
    if not files:
        raise InputError(f"There are no .parquet files in the folder {where!r}")
    return files, path


def _open(file: Path) -> tuple[Any, Any]:
    """Schema and metadata; the file is closed again, since there may be thousands."""
    try:
        with pq.ParquetFile(file, memory_map=True) as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: names of columns that are no text
        check_descriptors(error)
        raise InputError(f"{file} is not a readable Parquet file: {first_line(error)}") from error
    rows, size = metadata.num_rows, file.stat().st_size
    if rows > max(size, FEW_ROWS):  # of nothing, repeated, which takes memory all the same
        raise InputError(
            f"{file} has {rows:,} rows in {size:,} bytes, which cannot be an image each; give a file that holds them"
        )
    return schema, metadata


def _footer(file: Path) -> bytes:
    """The file's metadata, which hold sizes and statistics of all its columns."""
    with file.open("rb") as stream:
        stream.seek(-8, 2)
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(-8 - length, 2)
        return stream.read(length)


def _features(schema: Any) -> dict[str, Any]:
    """What Hugging Face notes about the columns: {"label": {"_type": "ClassLabel", "names": […]}}."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError):  # it is something else
        return {}


def _image_column(schema: Any, features: Mapping[str, Any], wanted: str, where: str) -> str:
    fit = [field.name for field in schema if _holds_bytes(field.type)]
    if wanted:
        if wanted not in fit:
            raise InputError(f"{where} has no column {wanted!r} of image bytes{nearest(wanted, fit or schema.names)}")
        return wanted
    noted = [name for name in fit if features.get(name, {}).get("_type") == "Image"]
    likely = [name for name in fit if name in ("image", "img")]
    if not fit:
        raise InputError(f"{where} has no column of image bytes; its columns are {', '.join(schema.names)}")
    return str((noted or likely or fit)[0])


def _holds_bytes(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _label_column(schema: Any, features: Mapping[str, Any], wanted: str, where: str) -> str | None:
    if wanted:
        if wanted not in schema.names:
            raise InputError(f"{where} has no column {wanted!r}{nearest(wanted, schema.names)}")
        return wanted
    noted = [name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"]
    likely = [name for name in LABEL_NAMES if name in schema.names]
    return next(iter([*noted, *likely]), None)


def _names(schema: Any, label: str | None) -> list[str] | None:
    """Names of the classes that Hugging Face notes in a file."""
    names = _features(schema).get(label or "", {}).get("names")
    return [str(name) for name in names] if isinstance(names, list) else None


def _labels(path: str, footer: Any, label: str) -> list[Any]:
    try:
        with pq.ParquetFile(path, metadata=footer, memory_map=True) as file:
            values: list[Any] = read_column(file, label, range(footer.num_row_groups)).to_pylist()
    except (OSError, pa.ArrowException) as error:
        check_descriptors(error)
        raise InputError(f"{path} is not a readable Parquet file: {first_line(error)}") from error
    except TooLargeError as error:
        raise InputError(f"{path} holds no labels: {error}") from error
    if not all(isinstance(value, int | str | None) for value in values):
        raise InputError(f"The column {label!r} of {path} must hold whole numbers or names to serve as labels")
    return values


def _split(stem: str) -> str:
    """Split of a file from its name or its folder.

    >>> _split("train-00000-of-00002"), _split("data/validation/0"), _split("images"), _split("test")
    ('train', 'val', '', 'test')
    """
    parts = [re.split(r"[-_.]", part)[0] for part in reversed(stem.split("/"))]
    return next((name for part in parts if (name := split_name(part))), "")
