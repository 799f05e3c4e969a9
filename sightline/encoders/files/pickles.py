"""A machine for the instructions of a pickle that makes plain data and can do nothing else.

Python's own unpickler imports what a file names and calls it, and PyTorch's for weights still makes whatever size a
file asks for. Here a name is a name (`Named`), an object of any class is a dict of what it holds (`Object`), a tensor
is where its numbers lie in the file (`StoredTensor`), and the few functions that files of weights need are ours. A file
costs memory and time in proportion to its size: what it could repeat by pointing to it again and again is counted
against what a `Reading` may spend.
"""

from __future__ import annotations

import pickletools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import IMPORT_MAPPING, NAME_MAPPING

LARGEST_KEY = 64  # parts of the key of a dict, whose hash takes that long each time
LONGEST_NUMBER = 4096  # bits
OF_A_KEY = 1000  # what a key that consists of parts counts: some may be made to collide
MOST_AXES = 64


class ForbiddenError(Exception):
    """A file would call what is named in the message, as files of weights never do."""


class WholeModuleError(Exception):
    """A file holds a module that only its code can load."""


class Reading:
    """One file being read: its storages, and what may be made of it beside what it holds itself, in bytes or parts."""

    def __init__(self, size: int) -> None:
        self.left, self.storages = 4 * size + 2**20, dict[str, Storage]()

    def spend(self, parts: int) -> None:
        """Refuse a file that repeats itself into something far larger."""
        self.left -= parts
        if self.left < 0:
            raise ValueError("it would take far more memory or time than its size")


# What is made


@dataclass(frozen=True)
class Named:
    """A class or function that a file names; it is never looked for."""

    name: str  # module.Class


class Object(dict[Any, Any]):
    """What was an object: a dict of its items, if it had any, with its attributes beside them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.attributes = name, dict[str, Any]()


class Opaque:
    """Something whose value is of no use here."""


@dataclass(frozen=True, eq=False)
class Storage:
    """Numbers of one kind in the file."""

    key: str
    dtype: torch.dtype
    count: int
    offset: int = 0  # of old files: where a part of it begins


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Where the numbers of a tensor are."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Dtype:
    """numpy.dtype("f8", False, True), then its byte order."""

    def __init__(self, code: Any = "", *flags: Any) -> None:
        self.code, self.order = str(code), "="

    def put(self, state: tuple[Any, ...]) -> None:
        """What the file says of it."""
        self.order = str(state[1])

    def read(self, data: bytes | bytearray) -> NDArray[Any]:
        """Numbers in the bytes of the file."""
        if not re.fullmatch(r"[biufcSU]\d{1,6}", self.code) or self.order not in ("<", ">", "|", "="):
            raise ValueError(f"numpy type {self.order}{self.code}")
        return np.frombuffer(data, np.dtype(self.order + self.code))


class Array:
    """An array of numpy: made empty, then given its state."""

    value: NDArray[Any] | None = None

    def put(self, state: tuple[Any, ...]) -> None:
        """What the file says of it."""
        _, shape, dtype, fortran, data = state
        if isinstance(data, bytes):  # of objects it would be a list
            self.fill(data, dtype, shape, "F" if fortran else "C")

    def fill(self, data: bytes | bytearray, dtype: Any, shape: Any, order: Any) -> None:
        """A view of the bytes of the file, not a copy."""
        self.value = dtype.read(data).reshape(shape, order="F" if order == "F" else "C")


# The functions that a file may ask for, each with the file that is read first


def _bytes(reading: Reading, data: Any = b"", encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1") or not isinstance(data, (str, bytes, bytearray)):
        raise ValueError(f"bytes from {type(data).__name__}")  # a number would mean that many zeros
    reading.spend(len(data))
    return data.encode("latin1") if isinstance(data, str) else bytes(data)


def _set(kind: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    def make(reading: Reading, items: Any = ()) -> Any:
        reading.spend(len(items))
        return kind(_key(reading, item) for item in items)

    return make


def _dict(reading: Reading, items: Any = (), *more: Any) -> dict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else items if isinstance(items, (list, tuple)) else ()
    reading.spend(len(pairs))
    return {_key(reading, key): value for key, value in pairs}


def _path(reading: Reading, *parts: str) -> str:
    reading.spend(sum(map(len, parts)))
    return str(PurePosixPath(*parts))


def _reconstructed(reading: Reading, kind: Any, base: Any = None, items: Any = None) -> Object:
    """As `copyreg` makes objects in protocols before 2."""
    if not isinstance(kind, Named):
        raise ForbiddenError("copyreg._reconstructor")
    made = Object(kind.name)
    made.update(_dict(reading, items) if isinstance(items, dict) else {})
    return made


def _scalar(reading: Reading, dtype: Dtype, data: bytes) -> Any:
    reading.spend(len(data))
    return dtype.read(data)[0].item()


def _from_buffer(reading: Reading, data: Any, dtype: Dtype, shape: Any, order: Any) -> Array:
    made = Array()
    made.fill(data, dtype, shape, order)
    return made


def _tensor(
    reading: Reading, storage: Storage, offset: int, size: Any, stride: Any, *more: Any
) -> StoredTensor:  # more: requires_grad, hooks, of the third version the dtype, …
    dtype = next((each for each in more if isinstance(each, torch.dtype)), storage.dtype)
    reading.spend(len(size) + len(stride))
    if len(size) != len(stride) or len(size) > MOST_AXES:
        raise ValueError("a tensor whose axes do not fit together")
    if any(type(number) is not int or number < 0 for number in (offset, *size, *stride)):
        raise ValueError("a tensor of impossible size")
    return StoredTensor(storage, dtype, offset, tuple(size), tuple(stride))


def _parameter(reading: Reading, data: Any, *more: Any) -> Any:
    return data


def _typed(reading: Reading, function: Any, kind: Any, arguments: Any, state: Any = None) -> Any:
    """A tensor of a class of its own."""
    if not isinstance(function, Named) or function.name not in TENSORS:
        raise ForbiddenError(getattr(function, "name", "torch._tensor._rebuild_from_type_v2"))
    return TENSORS[function.name](reading, *arguments)


def _opaque(reading: Reading, *arguments: Any) -> Opaque:
    return Opaque()


def _size(reading: Reading, numbers: Any = ()) -> tuple[Any, ...]:
    reading.spend(len(numbers))
    return tuple(numbers)


NO_WEIGHTS = "sparse_tensor sparse_csr_tensor qtensor nested_tensor meta_tensor_no_storage wrapper_subclass"
TENSORS: dict[str, Callable[..., Any]] = {
    **{f"torch._utils._rebuild_tensor{version}": _tensor for version in ("", "_v2", "_v3")},
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    **{f"torch._utils._rebuild_{kind}": _opaque for kind in NO_WEIGHTS.split()},
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **TENSORS,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": _size,
    "torch.device": lambda reading, *where: torch.device(*where),
    "torch.serialization._get_layout": _opaque,
    **{
        f"{module}.{name}": _path
        for module in ("pathlib", "pathlib._local")  # as Python 3.13 calls it
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")
    },
    **{f"datetime.{name}": _opaque for name in ("date", "datetime", "time", "timedelta", "timezone")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": lambda reading, *_: Array() for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    "numpy.dtype": lambda reading, *about: Dtype(*about),
    "_codecs.encode": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "builtins.complex": lambda reading, real=0.0, imaginary=0.0: complex(float(real), float(imaginary)),
    "builtins.frozenset": _set(frozenset),
    "builtins.set": _set(set),
    "collections.Counter": _dict,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda reading, *factory: {},
    "collections.deque": lambda reading, *about: [],
    "copyreg._reconstructor": _reconstructed,
    "functools.partial": _opaque,
    "types.SimpleNamespace": lambda reading: Object("types.SimpleNamespace"),
}
# Of Python's own modules most can do harm; these names are data as long as they are not called.
HARMLESS = {f"builtins.{name}" for name in ["bool", "dict", "float", "int", "list", "object", "str", "tuple", "type"]}
HARMLESS |= {f"typing.{name}" for name in ["Any", "List", "Dict", "Tuple", "Optional", "Union"]}
HARMLESS |= {"argparse.Namespace", "collections.UserDict"}
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
STORED = {  # names of storages, in whichever module they are
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "QInt32Storage": torch.qint32,
    "QInt8Storage": torch.qint8,
    "QUInt2x4Storage": torch.quint2x4,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt8Storage": torch.quint8,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,
}


# The machine


def load(stream: IO[bytes], reading: Reading) -> Any:
    """What one pickle makes; the stream is then behind it."""
    machine = _Machine(reading)
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "STOP":
            break
        if (instruction := INSTRUCTIONS.get(opcode.name)) is not None:
            instruction(machine, argument)
        elif opcode.name in CONSTANTS:
            if isinstance(argument, int) and argument.bit_length() > LONGEST_NUMBER:
                raise ValueError(f"it has a number of more than {LONGEST_NUMBER} bits")
            machine.stack.append(argument)
        elif opcode.name not in ("PROTO", "FRAME"):
            raise ValueError(f"its pickle has the instruction {opcode.name}")
    return machine.stack.pop()


CONSTANTS = {
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BYTEARRAY8",
}


class _Machine:
    """A stack, marks on it, and what is remembered."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        """Take what lies above the last mark."""
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def take(self, count: int) -> list[Any]:
        """Take so many from the top."""
        if len(self.stack) < count + (self.marks[-1] if self.marks else 0):
            raise ValueError("its pickle reads more than there is")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def put_items(self, values: list[Any]) -> None:
        """Keys and values in turn, into the dict on top."""
        if not isinstance(target := self.stack[-1], dict):
            raise ValueError("its pickle puts items into what is no dict")
        for key, value in _pairs(values):
            target[_key(self.reading, key)] = value

    def put_elements(self, values: list[Any]) -> None:
        """Into the list on top; those of an object that was a list are not of use."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, set):
            target.update(_key(self.reading, value) for value in values)
        elif not isinstance(target, (Object, Opaque)):
            raise ValueError("its pickle puts elements into what is no list")

    def name(self, module: str, name: str) -> None:
        """Refuse what could do harm, give what is data."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        standard = full.partition(".")[0] in sys.stdlib_module_names
        if standard and full not in FUNCTIONS and full not in HARMLESS:
            raise ForbiddenError(full)
        self.stack.append(DTYPES.get(full) or Named(full))

    def call(self, function: Any, arguments: Any) -> None:
        """One of our own functions, or nothing."""
        if not isinstance(function, Named) or function.name not in FUNCTIONS:
            raise ForbiddenError(function.name if isinstance(function, Named) else type(function).__name__)
        self.stack.append(FUNCTIONS[function.name](self.reading, *_arguments(arguments)))

    def make(self, kind: Any, arguments: Any) -> None:
        """An object of a class."""
        if isinstance(kind, Named) and kind.name in FUNCTIONS:
            self.call(kind, arguments)
        elif isinstance(kind, Named):
            self.stack.append(Object(kind.name))
        else:
            raise ForbiddenError(type(kind).__name__)

    def build(self, state: Any) -> None:
        """Give what is on top its state."""
        match self.stack[-1]:
            case Object() as made:
                for part in state if isinstance(state, tuple) else (state,):
                    if isinstance(part, dict):
                        self.reading.spend(len(part))
                        made.attributes.update({str(key): value for key, value in part.items()})
            case Dtype() | Array() as made:
                made.put(state)

    def stored(self, what: Any) -> None:
        """A storage, by its number in the file."""
        if isinstance(what, tuple) and what[:1] == ("module",):
            raise WholeModuleError
        word, kind, key, _, count, *view = what
        if word != "storage" or not isinstance(kind, Named) or type(count) is not int or count < 0:
            raise ValueError("it points to something else than numbers")
        offset = 0
        if view and view[0] is not None:
            _, offset, size = view[0]
            if type(offset) is not int or type(size) is not int or not 0 <= offset <= offset + size <= count:
                raise ValueError("a part of a storage lies outside of it")
        found = Storage(str(key), STORED[kind.name.rpartition(".")[2]], count, offset)
        self.reading.storages.setdefault(found.key, found)
        self.stack.append(found)


def _arguments(given: Any) -> tuple[Any, ...]:
    if not isinstance(given, tuple):
        raise ValueError("its pickle calls something without arguments")
    return given


def _key(reading: Reading, key: Any) -> Any:
    """A key of a dict, or an element of a set, whose hash takes little time."""
    if isinstance(key, int) and key.bit_length() > 64:
        raise ValueError("a key is a number of more than 64 bits")
    if isinstance(key, (tuple, frozenset)):
        reading.spend(OF_A_KEY)
        parts, waiting = 0, [key]
        while waiting:
            for part in waiting.pop():
                parts += 1
                if isinstance(part, (tuple, frozenset)):
                    waiting.append(part)
                else:
                    _key(reading, part)
                if parts > LARGEST_KEY:
                    raise ValueError(f"a key has more than {LARGEST_KEY} parts")
    return key


def _push(made: Callable[[_Machine], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(made(machine))


def _remember(machine: _Machine, number: Any) -> None:
    machine.memo[len(machine.memo) if number is None else number] = machine.stack[-1]


def _global(machine: _Machine, argument: Any) -> None:
    module, _, name = argument.partition(" ")
    machine.name(module, name)


def _stack_global(machine: _Machine, _: Any) -> None:
    module, name = machine.take(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("its pickle names something without a name")
    machine.name(module, name)


def _instance(machine: _Machine, argument: Any) -> None:
    """Both at once, in old protocols."""
    values = machine.since_mark()
    if argument is not None:
        _global(machine, argument)
        values.insert(0, machine.stack.pop())
    machine.make(values[0], tuple(values[1:]))


def _reduce(machine: _Machine, _: Any) -> None:
    machine.call(*machine.take(2))


def _new(count: int) -> Callable[[_Machine, Any], None]:
    def make(machine: _Machine, _: Any) -> None:
        kind, arguments, *_keywords = machine.take(count)
        machine.make(kind, arguments)

    return make


INSTRUCTIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    "NONE": _push(lambda machine: None),
    "NEWTRUE": _push(lambda machine: True),
    "NEWFALSE": _push(lambda machine: False),
    "EMPTY_LIST": _push(lambda machine: []),
    "EMPTY_DICT": _push(lambda machine: {}),
    "EMPTY_TUPLE": _push(lambda machine: ()),
    "EMPTY_SET": _push(lambda machine: set()),
    "LIST": _push(lambda machine: machine.since_mark()),
    "TUPLE": _push(lambda machine: tuple(machine.since_mark())),
    "TUPLE1": _push(lambda machine: tuple(machine.take(1))),
    "TUPLE2": _push(lambda machine: tuple(machine.take(2))),
    "TUPLE3": _push(lambda machine: tuple(machine.take(3))),
    "FROZENSET": _push(lambda machine: FUNCTIONS["builtins.frozenset"](machine.reading, machine.since_mark())),
    "DICT": _push(lambda machine: _dict(machine.reading, _pairs(machine.since_mark()))),
    "APPEND": lambda machine, _: machine.put_elements(machine.take(1)),
    "APPENDS": lambda machine, _: machine.put_elements(machine.since_mark()),
    "ADDITEMS": lambda machine, _: machine.put_elements(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.put_items(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.put_items(machine.since_mark()),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": lambda machine, _: machine.marks.pop() if machine.marks[-1:] == [len(machine.stack)] else machine.take(1),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "DUP": _push(lambda machine: machine.stack[-1]),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _remember),
    **dict.fromkeys(
        ("GET", "BINGET", "LONG_BINGET"), lambda machine, number: machine.stack.append(machine.memo[number])
    ),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "INST": _instance,
    "OBJ": _instance,
    "REDUCE": _reduce,
    "NEWOBJ": _new(2),
    "NEWOBJ_EX": _new(3),
    "BUILD": lambda machine, _: machine.build(machine.take(1)[0]),
    "BINPERSID": lambda machine, _: machine.stored(machine.take(1)[0]),
}


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))
