"""Checkpoint files: read without running anything in them and without taking the weights into memory."""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.serialization import MAGIC_NUMBER

from sightline.core.errors import InputError, first_line, nearest
from sightline.encoders.files import torch_files

SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".safetensors", ".tar")
MAGIC = MAGIC_NUMBER.to_bytes(10, "little")  # at the beginning of PyTorch's old files


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a file holds: nested dicts of tensors, which stay on disk until they are used, and of plain data."""

    path: Path
    container: str  # "PyTorch (zip)", "PyTorch (old format)", "pickle of arrays", "safetensors"
    content: Mapping[str, Any]  # as in the file; a bare state dict is the content itself
    arguments: Mapping[str, Any]  # of the training: plain values, nested names joined with dots


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a PyTorch or safetensors file; any other, and a damaged one, is an InputError of one sentence."""
    container = _container(path)
    settings: dict[str, Any]
    try:
        if container == "safetensors":
            content, settings = _safetensors(path)
        else:
            arrays, zipped = container == "pickle of arrays", container == "PyTorch (zip)"
            content = torch_files.load_arrays(path) if arrays else torch_files.load(path, mapped=zipped)
            settings = dict(torch_files.settings(content))
    except Exception as error:  # damaged bytes may raise anything
        # Without its cause, in which torch advises to switch `weights_only` off.
        raise InputError(f"{str(path)!r} {_reason(error)}") from None
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
    part: Any = content
    for key in keys:
        part = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping):
        return {}
    return {_name(name): value for name, value in part.items() if isinstance(name, str) and isinstance(value, Tensor)}


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


# What kind of file it is


def _container(path: Path) -> str:
    """The kind of a file that is there, by its first bytes."""
    try:
        if not path.is_file():
            raise _no_file(path)
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise InputError(f"Cannot read weights from {str(path)!r}: {error.strerror or first_line(error)}") from error
    if head[8:9] == b"{" or (head and path.suffix == ".safetensors"):
        return "safetensors"
    if head.startswith(b"PK\x03\x04"):
        return "PyTorch (zip)"
    if head.startswith(b"\x80"):
        return "PyTorch (old format)" if MAGIC in head[:32] else "pickle of arrays"
    begin = printable(head[:24].decode("utf-8", "backslashreplace"))
    what = f"begins with '{begin}'" if head else "is empty"
    raise InputError(f"{str(path)!r} is not a checkpoint, it {what}; get it again, or give a .safetensors or .pth file")


def _no_file(path: Path) -> InputError:
    folder, name = path if path.is_dir() else path.parent, repr(str(path))
    files = sorted(file.name for file in folder.iterdir() if file.suffix in SUFFIXES) if folder.is_dir() else []
    hint = nearest(path.name, files) or "; give a .safetensors or .pth file"
    if path.is_dir():
        return InputError(f"{name} is a folder{hint}")
    return InputError(
        f"{name} is a device or pipe{hint}" if path.exists() else f"There is no weights file {name}{hint}"
    )


def _reason(error: Exception) -> str:
    """Why a file could not be read, as the end of a sentence."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"is refused, nothing of it was executed: it asks for {printable(named[1], 60)}, which weights do "
            "not need; get a file of torch.save with the weights (state_dict) alone, from someone you trust"
        )
    why = "" if isinstance(error, pickle.UnpicklingError) else f" ({printable(first_line(error), 100)})"
    return (
        f"cannot be read{why}: it is damaged, incomplete or more than a state dict; get it again, or save "
        "model.state_dict() with torch.save and give that"
    )


# What is in it


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that are views of the mapped file, and the texts of its header."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        settings = {key: text for key, text in (file.metadata() or {}).items() if key != "format"}
        return {name: file.get_tensor(name) for name in file.keys()}, settings  # noqa: SIM118 — it is no dict


def _mapping(content: Any, path: Path) -> dict[str, Any]:
    """The content, if it is a dict and no module."""
    if not isinstance(content, dict):
        raise InputError(
            f"{str(path)!r} holds no state dict (a mapping of names to tensors) but a {type(content).__name__}"
        )
    held = [content, *(value for value in content.values() if isinstance(value, dict))]
    if any({"_modules", "_parameters"} <= value.keys() for value in held) and not any(map(tensors, held)):
        raise InputError(
            f"{str(path)!r} holds a module pickled whole, which only its code can load; save model.state_dict() "
            "instead, and give that"
        )
    return {_name(str(name)): value for name, value in content.items()}


def _name(text: str) -> str:
    return text if text.isprintable() else printable(text)
