"""PyTorch files, unpickled without running anything in them.

PyTorch's unpickler for weights (`weights_only=True`) makes tensors, containers and numbers, and calls nothing but what
it is told to be safe. Official files hold objects besides, an `argparse.Namespace` or a yacs `CfgNode`. So for every
class that a file names it is given a stand-in of ours: an object becomes a dict of what it holds, its class is never
looked for, and a file that would call something is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._utils import IMPORT_MAPPING, NAME_MAPPING
from torch.serialization import MAGIC_NUMBER

__all__ = ["ForbiddenError", "PickledModule", "unpickle"]


CLASS = "the class of an object"  # under this name an object's dict says that it is one
# What PyTorch's unpickler knows of Python's own; it takes precedence over any stand-in.
KNOWN = {"_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set"}
KNOWN |= {"collections.Counter", "collections.OrderedDict"}
MOST_NAMES = 1000  # PyTorch goes through all of them for every object
DEEPEST = 1000  # tuples in each other


class ForbiddenError(Exception):
    """A file would call what is named in the message, as files of weights never do."""


class PickledModule(str):
    """In the place of an nn.Module that was pickled whole: the name of its class."""


def unpickle(path: Path, zipped: bool) -> Any:
    """What `torch.save` wrote, as plain data and tensors; those of a zip file stay on disk until they are used."""
    named = set()
    for name in _named_in(path, zipped):
        # Classes of other libraries are data as long as they are not called; of Python's own, most can do harm.
        if name.partition(".")[0] in sys.stdlib_module_names and name not in STAND_INS and name not in KNOWN:
            raise ForbiddenError(name)
        named.add(name)
        if len(named) > MOST_NAMES:
            raise ValueError(f"it names more than {MOST_NAMES} classes")
    allowed: Any = [(STAND_INS.get(name) or _class(name), name) for name in named]
    with torch.serialization.safe_globals(allowed), warnings.catch_warnings(action="ignore"):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    return _plain(content, {}, path.stat().st_size)


# ---------------------------------------------------------------------------------------------------------------
# What a pickle names


class _Seen(NamedTuple):
    """What is known of a value on the stack of a pickle, before it is loaded."""

    text: str = ""
    depth: int = 0  # of tuples in tuples


def _named_in(path: Path, zipped: bool) -> Iterator[str]:
    """Everything outside of the file that its pickles name: `module.Class`."""
    if zipped:  # read as `torch.load` does: an archive could show another pickle to another reader
        yield from _names(io.BytesIO(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")))
        return
    with path.open("rb") as stream:
        # A magic number, a version, the machine, the content, the keys of its storages: each is a pickle.
        official = stream.peek()[2:].startswith(pickle.dumps(MAGIC_NUMBER, protocol=2)[2:])
        for _ in range(5 if official else 1):
            yield from _names(stream)


def _names(stream: IO[bytes]) -> Iterator[str]:
    """Names in one pickle, whose stack is followed: names may be put together from texts on it.

    Tuples in tuples in … are refused: as the key of a dict they would overflow the stack of Python itself.
    """
    stack: list[_Seen] = []
    marks: list[int] = []
    memo: dict[int, _Seen] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "MARK":
            marks.append(len(stack))
            continue
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        to_mark = pickletools.stackslice in opcode.stack_before
        fixed = opcode.stack_before.index(pickletools.markobject) if to_mark else len(opcode.stack_before)
        start = (marks.pop() if to_mark else len(stack)) - fixed
        if start < 0:
            raise ValueError("its pickle reads more than there is")
        taken = stack[start:]
        del stack[start:]
        made = _Seen(argument if isinstance(argument, str) else "")
        if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
            named = tuple(seen.text for seen in taken) if opcode.name == "STACK_GLOBAL" else made.text.split(" ", 1)
            module, name = NAME_MAPPING.get((named[0], named[1]), (IMPORT_MAPPING.get(named[0], named[0]), named[1]))
            yield f"{module}.{name}"
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            made = memo[argument or 0]
        elif opcode.name.startswith("TUPLE"):
            made = _Seen(depth=1 + max((seen.depth for seen in taken), default=0))
            if made.depth > DEEPEST:
                raise ValueError(f"it nests tuples more than {DEEPEST} deep")
        stack += [taken[0]] * 2 if opcode.name == "DUP" else [made] * len(opcode.stack_after)


# ---------------------------------------------------------------------------------------------------------------
# Stand-ins


class _Class(type):
    """Stands for a class. The unpickler makes objects by `__new__`; what is called instead might do anything."""

    name: str

    def __call__(cls, *arguments: Any) -> Any:
        raise ForbiddenError(cls.name)


def _class(name: str) -> _Class:
    return _Class("StandIn", (), {"name": name, "__new__": lambda cls, *arguments: _object(name)})


def _object(name: str, *arguments: Any) -> OrderedDict[Any, Any]:
    """The unpickler puts the items of a dict, such as a CfgNode, into it, and attributes into its `__dict__`."""
    made: OrderedDict[Any, Any] = OrderedDict()
    made.__dict__[CLASS] = name
    return made


def _reconstructed(kind: Any, base: Any = None, items: Any = None) -> Any:
    """As `copyreg` makes objects in protocols before 2."""
    if not isinstance(kind, _Class):
        raise ForbiddenError("copyreg._reconstructor")
    made = kind.__new__(kind)  # type: ignore[call-overload]
    made.update(dict.items(items) if isinstance(items, dict) else ())
    return made


def _dict(*factory: Any) -> OrderedDict[Any, Any]:
    return OrderedDict()


def _list(*arguments: Any) -> list[Any]:
    return []


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


class _Opaque:
    """Something whose value is of no use here."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Dtype:
    """numpy.dtype("f8", False, True), then its byte order."""

    def __init__(self, code: Any = "", *flags: Any) -> None:
        self.code, self.order = str(code), "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = str(state[1])

    def read(self, data: bytes) -> NDArray[Any]:
        if not re.fullmatch(r"[biufcSU]\d+", self.code) or self.order not in ("<", ">", "|", "="):
            raise ValueError(f"numpy type {self.order}{self.code}")
        return np.frombuffer(data, np.dtype(self.order + self.code))


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return dtype.read(data)[0].item()


class _Array:
    """An array of numpy: made empty, then given its state."""

    def __init__(self, *arguments: Any) -> None:
        self.value: NDArray[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if isinstance(data, bytes):  # of objects it would be a list
            self.value = dtype.read(data).reshape(shape, order="F" if fortran else "C").copy()


def _classes(module: str, names: str) -> dict[str, Any]:
    return {f"{module}.{name}": _class(f"{module}.{name}") for name in names.split()}


STAND_INS: dict[str, Any] = {
    **_classes("builtins", "bool bytes dict float int list object str tuple type"),
    **_classes("collections", "UserDict"),
    **_classes("typing", "Any List Dict Tuple Optional Union"),
    **{f"pathlib.{name}": _path for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")},
    **{f"datetime.{name}": _Opaque for name in ("date", "datetime", "time", "timedelta", "timezone")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    "argparse.Namespace": _class("argparse.Namespace"),
    "builtins.bytes": _Opaque,  # how old protocols write empty ones
    "builtins.frozenset": frozenset,
    "collections.defaultdict": _dict,
    "collections.deque": _list,
    "copyreg._reconstructor": _reconstructed,
    "functools.partial": _Opaque,
    "numpy.dtype": _Dtype,
    "types.SimpleNamespace": partial(_object, "types.SimpleNamespace"),
}


# ---------------------------------------------------------------------------------------------------------------


def _plain(value: Any, done: dict[int, tuple[Any, Any]], most: int) -> Any:
    """Dicts in the place of objects, each once, since a file may repeat or contain itself; `done` keeps them alive.

    `most` is how many numbers a tensor may have.
    """
    if id(value) in done:
        return done[id(value)][1]
    result: Any
    match value:
        case Tensor():
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
                return None  # sparse, without numbers (meta), or quantised: no weights that could be copied
            if value.numel() > most:  # its numbers repeat (stride 0); a copy of it could take all of the memory
                raise ValueError("a tensor is larger than the file")
            return Tensor.detach(value)  # without what a file may have attached to it
        case OrderedDict() if CLASS in value.__dict__ and {"_modules", "_parameters"} <= value.__dict__.keys():
            return PickledModule(value.__dict__[CLASS])
        case dict():
            done[id(value)] = value, (result := {})
            result.update((_plain(key, done, most), _plain(item, done, most)) for key, item in _items(value))
        case list():
            done[id(value)] = value, (result := [])
            result.extend(_plain(item, done, most) for item in value)
        case tuple() | set() | frozenset():
            kind = tuple if isinstance(value, tuple) else type(value)  # torch.Size holds numbers only
            done[id(value)] = value, (result := kind(_plain(item, done, most) for item in value))
        case _Array():
            return value.value
        case _Class():
            return value.name
        case _ if callable(value) or isinstance(value, (_Opaque, _Dtype)):
            return None
        case _:
            return value
    return result


def _items(value: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Items of a dict, or attributes of what was an object without items."""
    attributes = vars(value) if isinstance(value, OrderedDict) else {}
    # Not value.items(): a file may have put something else in the place of that method.
    if value or CLASS not in attributes:
        return dict.items(value)
    for inner in ("_content", "_fields"):  # of omegaconf, of ml_collections
        if isinstance(attributes.get(inner), dict):
            return [(key, _unboxed(item)) for key, item in dict.items(attributes[inner])]
    return [(key, item) for key, item in attributes.items() if key != CLASS and not str(key).startswith("__")]


def _unboxed(value: Any) -> Any:
    """omegaconf keeps every number in an object."""
    return vars(value).get("_val", value) if isinstance(value, OrderedDict) else value
