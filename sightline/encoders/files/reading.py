"""Checkpoint files: read without running anything in them and without taking the weights into memory."""

from __future__ import annotations

import reprlib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from sightline.core.errors import InputError, first_line, nearest, some
from sightline.encoders.files.pickles import ForbiddenError, WholeModuleError
from sightline.encoders.files.unpickling import PickledModule, unpickle

SETTINGS = ("args", "config", "cfg", "hparams", "hyper_parameters")  # where trainings keep theirs
MOST_SETTINGS, MOST_VISITED = 10_000, 100_000
SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".safetensors", ".tar")
OTHER_KINDS = {
    b"\x1f\x8b": "compressed with gzip; unpack it and give the file inside",
    b"BZh": "compressed with bzip2; unpack it and give the file inside",
    b"\xfd7zXZ": "compressed with xz; unpack it and give the file inside",
    b"\x89HDF": "an HDF5 file, as Keras and TensorFlow write; a .pth or .safetensors file is needed",
    b"GGUF": "a GGUF file of a language model; a .pth or .safetensors file of a vision model is needed",
    b"\x93NUMPY": "an array of numpy; a .pth or .safetensors file is needed",
    b"%PDF": "a PDF document; a .pth or .safetensors file is needed",
    b"version https://git-lfs": "a pointer of git-lfs to the file, not the file itself; run `git lfs pull`",
}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a file holds: nested dicts of tensors, which stay on disk until they are used, and of plain data."""

    path: Path
    container: str  # "PyTorch (zip)", "PyTorch (old format)", "safetensors"
    content: Mapping[str, Any]  # as in the file; a bare state dict is the content itself
    arguments: Mapping[str, Any]  # of the training: plain values, nested names joined with dots


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a PyTorch or safetensors file; whatever else it is gets a sentence of its own."""
    head = _head(path)
    container = _container(head, path)
    try:
        if container == "safetensors":
            content, settings = _safetensors(path)
        else:
            content = unpickle(path, zipped=container == "PyTorch (zip)")
            settings = dict(_settings(content))
    except ForbiddenError as error:
        raise InputError(
            f"{str(path)!r} is refused, nothing of it was executed: loading it would call {printable(str(error))}, "
            "which could run code; get a file from someone you trust, with the weights (state_dict) alone"
        ) from error
    except Exception as error:  # damaged bytes may raise anything
        raise InputError(f"{str(path)!r} {_reason(error, head, container)}") from error
    return Checkpoint(path, container, _mapping(content, path), settings)


def tensors(content: Mapping[str, Any], *keys: str) -> dict[str, Tensor]:
    """The tensors of the mapping at content[keys[0]][keys[1]]…, by name; none if there is no such mapping.

    Names are printable.

    >>> import torch
    >>> tensors({"model": {"w": torch.zeros(2), "epoch": 3}}, "model")
    {'w': tensor([0., 0.])}
    >>> tensors({"model": 3}, "model"), tensors({}, "model")
    ({}, {})
    """
    found: Any = content
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    return {_name(name): value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}


def distinct(content: Mapping[str, Any]) -> dict[str, Any]:
    """Each object once, under its first name: a file may point to one again and again.

    >>> part = {"w": 1}
    >>> distinct({"model": part, "other": {"w": 1}, "again": part})
    {'model': {'w': 1}, 'other': {'w': 1}}
    """
    first: dict[int, str] = {}
    for key, value in content.items():
        first.setdefault(id(value), key)
    return {key: content[key] for key in first.values()}


def without_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those of the weights whose names start with a prefix, without it.

    >>> import torch
    >>> list(without_prefix({"encoder.norm": torch.zeros(1), "decoder.norm": torch.zeros(1)}, "encoder."))
    ['norm']
    """
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def printable(text: str, most: int = 200) -> str:
    r"""Text of a file, for the terminal: one line of bounded length, without characters that command it.

    >>> print(printable("red \x1b[31m text\n"))
    red \x1b[31m text\n
    """
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:most])
    return shown + ("…" if len(text) > most else "")


# ---------------------------------------------------------------------------------------------------------------
# What kind of file it is


def _head(path: Path) -> bytes:
    """The first bytes of a file that is there, readable and not empty."""
    name = repr(str(path))
    try:
        if path.is_dir():
            inside = "".join(f", such as {file!r}" for file in _weights_in(path)[:1])
            raise InputError(f"{name} is a folder; give the weights file in it{inside}")
        if not path.exists():
            beside = _weights_in(path.parent) if path.parent.is_dir() else []
            hint = nearest(path.name, beside) or "; give a .safetensors or .pth file"
            raise InputError(f"There is no weights file {name}{hint}")
        if not path.is_file():
            raise InputError(f"{name} is not a file but a device or pipe; give a .safetensors or .pth file")
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise InputError(f"Cannot read weights from {name}: {error.strerror or first_line(error)}") from error
    if not head:
        raise InputError(f"{name} is empty, so its download or copy failed; get it again")
    return head


def _weights_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix in SUFFIXES)


def _container(head: bytes, path: Path) -> str:
    for magic, what in OTHER_KINDS.items():
        if head.startswith(magic):
            raise InputError(f"{str(path)!r} is {what}")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise InputError(
            f"{str(path)!r} is a web page that was saved in the place of the file: the download failed; open the "
            "link in a browser to see why, and download the file itself"
        )
    if head[257:262] == b"ustar":
        raise InputError(
            f"{str(path)!r} is a tar archive; unpack it and give the file inside (a checkpoint of PyTorch before 0.2 "
            "is one, too: load it there and save it again)"
        )
    if head.startswith(b"PK\x03\x04"):
        _check_zip(path)
        return "PyTorch (zip)"
    return "safetensors" if path.suffix == ".safetensors" or head[8:9] == b"{" else "PyTorch (old format)"


def _check_zip(path: Path) -> None:
    """Only what `torch.save` writes: a pickle of the content, and tensors that are not compressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:
        raise InputError(
            f"{str(path)!r} is damaged or was not downloaded completely (its list of contents, at the end, cannot be "
            "read); get it again"
        ) from error
    names = {entry.filename.partition("/")[2] or entry.filename for entry in entries}
    if "constants.pkl" in names:
        raise InputError(
            f"{str(path)!r} is a TorchScript archive, which is a program; give a file of "
            "torch.save(model.state_dict(), FILE)"
        )
    if "data.pkl" not in names or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        inside = some(printable(entry.filename, 40) for entry in entries)
        raise InputError(
            f"{str(path)!r} is a zip archive that torch.save did not write (inside: {inside}); unpack it "
            "and give the weights file in it"
        )


def _reason(error: Exception, head: bytes, container: str) -> str:
    """Why a file could not be read, as the end of a sentence."""
    if isinstance(error, WholeModuleError):
        return _whole("a module")
    if container == "PyTorch (old format)" and not head.startswith(b"\x80"):
        begin = printable(head[:24].decode("utf-8", "backslashreplace"))
        return f"is not a checkpoint, it begins with '{begin}'; give a .safetensors or .pth file"
    return f"is damaged or was not downloaded completely ({printable(first_line(error), 100)}); get it again"


def _whole(what: str) -> str:
    return f"holds {what} pickled whole, which only its code can load; save model.state_dict() instead, and give that"


# ---------------------------------------------------------------------------------------------------------------
# What is in it


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that are views of the mapped file, and the texts of its header."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        settings = {key: text for key, text in (file.metadata() or {}).items() if key != "format"}
        return {name: file.get_tensor(name) for name in file.keys()}, settings  # noqa: SIM118 — it is no dict


def _mapping(content: Any, path: Path) -> dict[str, Any]:
    held = distinct(content).values() if isinstance(content, dict) else [content]
    module = next((value for value in held if isinstance(value, PickledModule)), None)
    if module is not None and not any(tensors({"": value}) or tensors({"": value}, "") for value in held):
        raise InputError(f"{str(path)!r} {_whole(printable(module))}")
    if not isinstance(content, dict):
        raise InputError(
            f"{str(path)!r} holds no state dict (a mapping of names to tensors) but a {type(content).__name__}"
        )
    return {_name(str(name)): value for name, value in content.items()}


def _name(text: str) -> str:
    return text if text.isprintable() else printable(text)


def _settings(content: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and texts beside the weights (epoch, arch), then the settings of the training, which come last to win."""
    if not isinstance(content, dict):
        return
    yield from ((str(key), value) for key, value in content.items() if _is_plain(value))
    for key in SETTINGS:
        if isinstance(content.get(key), dict):
            visited = islice(_flat(content[key], ""), MOST_VISITED)
            yield from islice(((name, value) for name, value in visited if not isinstance(value, dict)), MOST_SETTINGS)


def _flat(values: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Settings, and the dicts in which they are: dicts may share what they hold, so all that is visited counts."""
    if prefix.count(".") > 8:  # settings are not nested deeper, and a file may contain itself
        return
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{prefix}{key}", value
            yield from _flat(value, f"{prefix}{key}.")
        elif _is_plain(value):
            yield f"{prefix}{key}", value
        elif isinstance(value, (list, tuple)):
            yield f"{prefix}{key}", value if all(map(_is_plain, value)) else reprlib.repr(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
