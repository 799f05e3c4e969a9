"""PyTorch files as plain data and tensors, without running anything in them; see pickles.py.

A zip file has the pickle of its content and the numbers of each storage as entries, uncompressed; in an old file five
pickles follow each other (a magic number, a version, the machine, the content, the keys of its storages), and then the
numbers of all storages. detectron2's models are plain pickles whose weights are arrays.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from sightline.encoders.files.pickles import Array, Dtype, Named, Object, Opaque, Reading, Storage, StoredTensor, load

Bytes = Callable[[Storage], torch.UntypedStorage]


class PickledModule(str):
    """In the place of an nn.Module that was pickled whole: the name of its class."""


def unpickle(path: Path, zipped: bool) -> Any:
    """What `torch.save` wrote, as plain data and tensors; those of a zip file stay on disk until they are used."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        content, numbers = (_zipped if zipped else _old)(path, whole, Reading(size))
        return _plain(content, {}, _Tensors(numbers, size))


def _zipped(path: Path, whole: mmap.mmap, reading: Reading) -> tuple[Any, Bytes]:
    places: dict[str, slice] = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            begin = entry.header_offset
            lengths = struct.unpack("<HH", whole[begin + 26 : begin + 30])  # of the name and of what follows it
            begin += 30 + sum(lengths)
            if begin + entry.file_size > len(whole):
                raise ValueError("an entry reaches beyond the end")
            places.setdefault(entry.filename.partition("/")[2], slice(begin, begin + entry.file_size))
    if "byteorder" in places and whole[places["byteorder"]] != b"little":
        raise ValueError("it was written on a machine with another order of bytes")
    content = load(io.BytesIO(whole[places["data.pkl"]]), reading)
    mapped = torch.UntypedStorage.from_file(str(path), False, len(whole))
    return content, lambda storage: mapped[places[f"data/{storage.key}"]]


def _old(path: Path, whole: mmap.mmap, reading: Reading) -> tuple[Any, Bytes]:
    first = load(whole, reading)  # type: ignore[arg-type]  # a mapping reads as a file does
    if type(first) is dict and type(first.get("model")) is dict:  # and no object that looks like one
        return {**first, "model": {name: _weight(value) for name, value in first["model"].items()}}, _no_storage
    if first != MAGIC_NUMBER:
        raise ValueError("torch.save did not write it")
    version, machine, content, keys = (load(whole, reading) for _ in range(4))  # type: ignore[arg-type]
    if version != PROTOCOL_VERSION or not isinstance(machine, dict) or not isinstance(keys, list):
        raise ValueError("its head is not that of torch.save")
    if machine.get("little_endian") is False:
        raise ValueError("it was written on a machine with another order of bytes")
    places, begin = dict[str, slice](), whole.tell()
    for key in map(str, keys):
        (count,) = struct.unpack("<q", whole[begin : begin + 8])
        end = begin + 8 + count * reading.storages[key].dtype.itemsize
        if count < 0 or end > len(whole):
            raise ValueError("its numbers reach beyond the end")
        places[key], begin = slice(begin + 8, end), end
    read: dict[str, torch.UntypedStorage] = {}

    def numbers(storage: Storage) -> torch.UntypedStorage:
        """A copy, since numbers are not aligned there."""
        if storage.key not in read:
            values = bytearray(whole[places[storage.key]])
            read[storage.key] = torch.frombuffer(values, dtype=torch.uint8).untyped_storage()
        return read[storage.key]

    return content, numbers


def _weight(value: Any) -> Any:
    """A tensor in the place of an array of numbers, copied, since the bytes of a file cannot be written to."""
    if not isinstance(value, Array) or value.value is None or value.value.dtype.kind not in "biuf":
        return value
    return torch.from_numpy(value.value.astype(value.value.dtype.newbyteorder("=")))


def _no_storage(storage: Storage) -> torch.UntypedStorage:
    raise ValueError("it has tensors, but torch.save did not write it")


class _Tensors:
    """Tensors of where their numbers lie."""

    def __init__(self, numbers: Bytes, most: int) -> None:
        self.numbers, self.most = numbers, most  # how many numbers a tensor may have
        self.left = 4 * most + 2**20  # and all of them: weights may be tied, and lie in the file once

    def read(self, place: StoredTensor) -> Tensor | None:
        """A view of the numbers; None of quantised ones, which are no weights."""
        dtype, storage = place.dtype, place.storage
        if str(dtype).startswith("torch.q"):
            return None
        if math.prod(place.size) > self.most:  # its numbers repeat (stride 0); a copy could take all of the memory
            raise ValueError("a tensor is larger than the file")
        self.left -= math.prod(place.size)
        if self.left < 0:
            raise ValueError("its tensors together are far larger than the file")
        steps = sum((n - 1) * step for n, step in zip(place.size, place.stride, strict=True))
        if 0 in place.size:
            return torch.empty(place.size, dtype=dtype)
        last, held = storage.offset + place.offset + steps + 1, self.numbers(storage)
        if last * dtype.itemsize > min(storage.count * storage.dtype.itemsize, held.nbytes()):
            raise ValueError("a tensor reaches beyond its numbers")
        return torch.empty(0, dtype=dtype).set_(held, storage.offset + place.offset, place.size, place.stride)


def _plain(value: Any, done: dict[int, tuple[Any, Any]], tensors: _Tensors) -> Any:
    """Dicts in the place of objects, each once, since a file may repeat or contain itself; `done` keeps them alive."""
    if id(value) in done:
        return done[id(value)][1]
    result: Any
    match value:
        case StoredTensor():
            done[id(value)] = value, (result := tensors.read(value))
        case Object() if {"_modules", "_parameters"} <= value.attributes.keys():
            return PickledModule(value.name)
        case dict():
            done[id(value)] = value, (result := {})
            result.update((_plain(key, done, tensors), _plain(item, done, tensors)) for key, item in _items(value))
        case list():
            done[id(value)] = value, (result := [])
            result.extend(_plain(item, done, tensors) for item in value)
        case tuple() | set() | frozenset():
            done[id(value)] = value, (result := type(value)(_plain(item, done, tensors) for item in value))
        case Array():
            return value.value
        case Named():
            return value.name
        case Opaque() | Dtype() | Storage():
            return None
        case _:
            return value
    return result


def _items(value: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Items of a dict, or attributes of what was an object without items."""
    if value or not isinstance(value, Object):
        return value.items()
    for inner in ("_content", "_fields"):  # of omegaconf, of ml_collections
        if isinstance(value.attributes.get(inner), dict):
            return [(key, _unboxed(item)) for key, item in value.attributes[inner].items()]
    return [(key, item) for key, item in value.attributes.items() if not key.startswith("__")]


def _unboxed(value: Any) -> Any:
    """omegaconf keeps every number in an object."""
    return value.attributes.get("_val", value) if isinstance(value, Object) else value
