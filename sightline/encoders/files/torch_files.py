"""PyTorch's files, and pickles of arrays, as plain data and tensors; nothing in them is run.

They are read by torch's own `torch.load(weights_only=True)`. A class or function that a file names is never looked for:
what it would have made becomes a dict of its attributes and items.
"""

import math
import pickle
import re
import reprlib
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SETTINGS = ("args", "config", "cfg", "hparams", "hyper_parameters")  # where trainings keep theirs
MOST_SETTINGS, LONGEST = 1000, 200
MOST_CLASSES = 100  # that a file may name: torch reads it anew for each
ARRAYS = {"numpy.dtype", "numpy.ndarray", "_codecs.encode", "collections.OrderedDict"}
ARRAYS |= {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
ARRAYS |= {f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")}


def load(path: Path, mapped: bool) -> Any:
    """What `torch.save` wrote; its tensors stay on disk until they are used if the file can be mapped (a zip file)."""
    if mapped:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type for entry in archive.infolist()):  # torch would take the bytes as they are
                raise ValueError("its entries are compressed")
    named = set[str]()
    while True:
        try:
            with warnings.catch_warnings(), torch.serialization.safe_globals([(_Inert, name) for name in named]):
                warnings.simplefilter("ignore")
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            return _Plain(path.stat().st_size).copy(content)
        except pickle.UnpicklingError as error:
            unknown = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
            name = "" if unknown is None else unknown[1] if "." in unknown[1] else f"builtins.{unknown[1]}"
            if not name or name in named or len(named) == MOST_CLASSES:
                raise
            named.add(name)


def load_arrays(path: Path) -> Any:
    """What a pickle of plain data and arrays holds, as detectron2 writes its models; the arrays become tensors."""
    with path.open("rb") as file:
        return _Plain(path.stat().st_size).copy(_Arrays(file, encoding="latin1").load())


class _Arrays(pickle.Unpickler):
    """Refuses whatever arrays are not made with."""

    def find_class(self, module: str, name: str) -> Any:
        """What the file names."""
        if f"{module}.{name}" not in ARRAYS:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return super().find_class(module, name)


class _Inert:
    """In the place of a class or function: makes the one kind of dict to which torch gives items and a state."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        made = OrderedDict[Any, Any]()
        made.__dict__ = _Attributes()
        return made


class _Attributes(dict[Any, Any]):
    """Those of an object, whose state may be a tuple of them and of other things."""

    def update(self, state: Any) -> None:  # type: ignore[override]
        """Take the attributes alone."""
        for part in state if isinstance(state, tuple) else (state,):
            super().update(part if isinstance(part, dict) else {})


class _Plain:
    """Copies dicts, lists, tensors, numbers and texts, each once, since a file may repeat or contain itself."""

    def __init__(self, size: int) -> None:
        self.left = 4 * size + 2**20  # numbers in all tensors; tied weights are in the file once
        self.copies = dict[int, Any]()

    def copy(self, value: Any) -> Any:
        """None of anything else."""
        if _is_plain(value):
            return value
        if id(value) in self.copies:
            return self.copies[id(value)]
        match value:
            case Tensor() if value.layout is torch.strided and not value.is_quantized and not value.is_meta:
                self.copies[id(value)] = self.counted(Tensor.detach(value))
            case np.ndarray() if value.dtype.kind in "biuf":
                native = self.counted(value).astype(value.dtype.newbyteorder("="))
                self.copies[id(value)] = torch.from_numpy(native)
            case list() | tuple():
                elements = self.copies[id(value)] = list[Any]()
                elements.extend(map(self.copy, value))
            case dict():
                self.copy_dict(value)
        return self.copies.get(id(value))

    def copy_dict(self, value: dict[Any, Any]) -> None:
        """With the attributes of what was an object."""
        attributes = getattr(value, "__dict__", None)
        attributes = attributes if isinstance(attributes, _Attributes) else {}
        for inner in ("_content", "_val"):  # of omegaconf, which keeps every value in an object
            if inner in attributes:
                self.copies[id(value)] = self.copy(attributes[inner])
                return
        items = self.copies[id(value)] = dict[Any, Any]()
        for source in (attributes, value):
            for key, item in dict.items(source):
                named = isinstance(key, str) and not (source is attributes and key.startswith("__"))
                copied = self.copy(item) if named or isinstance(key, int) else None
                if copied is not None or (item is None and named):
                    items[key] = copied

    def counted(self, numbers: Any) -> Any:
        """Refuse tensors whose numbers repeat (stride 0): copied, they could take all memory."""
        self.left -= math.prod(numbers.shape)
        if self.left < 0:
            raise ValueError("its tensors are far larger than the file")
        return numbers


def settings(content: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and texts beside the weights (epoch, arch), then the settings of the training, which come last to win."""
    if isinstance(content, dict):
        beside = {key: value for key, value in content.items() if _is_plain(value)}
        for part in (beside, *(content.get(key) for key in SETTINGS)):
            if isinstance(part, dict):
                yield from (
                    (name, _short(value))
                    for name, value in islice(_flat(part, ""), MOST_SETTINGS)
                    if _is_plain(value) or isinstance(value, list)
                )


def _flat(values: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """All that is met: dicts may share what they hold."""
    for key, value in values.items():
        if len(prefix) + len(str(key)) <= LONGEST and prefix.count(".") < 9:  # a file may contain itself
            yield f"{prefix}{key}", value
            if isinstance(value, dict):
                yield from _flat(value, f"{prefix}{key}.")


def _short(value: Any) -> Any:
    """A setting as it is, or the beginning of a long one in words, since many names may point to it."""
    parts = value if isinstance(value, list) else [value]
    short = len(parts) <= LONGEST and all(_is_plain(part) and len(str(part)) <= LONGEST for part in parts)
    return value if short else reprlib.repr(value)


def _is_plain(value: Any) -> bool:
    """Numbers of a file have 64 bits at most: Python refuses to write out very long ones."""
    return value is None or isinstance(value, (float, str)) or (isinstance(value, int) and value.bit_length() <= 64)
