"""Settings: dataclasses from TOML and `--set` words, and back."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

import tomli_w

from sightline.core.errors import InputError, counted

T = TypeVar("T")


def flatten(objective: str, *parts: Any) -> dict[str, Any]:
    """The settings of dataclasses in one flat table; a field `settings` becomes tables of its own."""
    flat: dict[str, Any] = {"objective": objective}
    for part in parts:
        flat |= dataclasses.asdict(part)
    tables: dict[str, Any] = flat.pop("settings", {})
    return flat | tables


def to_toml(values: Mapping[str, Any]) -> str:
    """Settings as a file that `read_recipe` reads."""
    return tomli_w.dumps(values)


def parse_settings(words: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """Words of an option as values.

    >>> parse_settings(["lr=1e-3", "depth=12", "backbone=resnet18", "moco_v3.temperature=0.1"])
    {'lr': 0.001, 'depth': 12, 'backbone': 'resnet18', 'moco_v3': {'temperature': 0.1}}
    """
    result: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{option} {word!r}: settings are written key=value, such as {option} lr=1e-3")
        try:
            value = tomllib.loads(f"x = {text}")["x"]
        except RecursionError as error:
            raise InputError(f"{option} {key}=…: the value is nested too deeply") from error
        except ValueError:  # no TOML, or a number of thousands of digits
            value = {"True": True, "False": False}.get(text.strip(), text.strip())
        table, dot, inner = key.strip().partition(".")
        if dot:
            if not isinstance(result.setdefault(table, {}), dict):
                raise InputError(f"{option} {word!r}: {table} already has a value; set only one of the two")
            result[table][inner] = value
        else:
            result[table] = value
    return result


def make_settings(part: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of settings from values as TOML has them; a value of another type is an error."""
    hints = get_type_hints(part)
    return part(**{key: _fitting(key, value, hints[key]) for key, value in values.items()})


def _fitting(key: str, value: Any, hint: Any) -> Any:
    """The value in the type of its setting; a list where that is a tuple."""
    kinds = [getattr(kind, "__origin__", kind) for kind in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
    for kind in kinds:
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return _finite(key, value)
        if kind is int and type(value) is int:
            return value
        if kind is tuple and isinstance(value, (list, tuple)):
            return _elements(key, value, hint)
        if kind is Mapping and isinstance(value, Mapping):
            return value
        if isinstance(kind, type) and type(value) is kind:
            return value
    wanted = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        tuple: 'a list, ["a", "b"] or [1, 2],',
    }
    raise InputError(f"{key} is {value!r}, but {wanted.get(kinds[0], 'another kind of value')} is expected")


def _finite(key: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{key} is {value}, but a finite number is expected")
    return number


def _elements(key: str, value: Sequence[Any], hint: Any) -> tuple[Any, ...]:
    """A tuple whose elements have the types that its hint names."""
    inner = next(kind for kind in (hint, *get_args(hint)) if getattr(kind, "__origin__", None) is tuple)
    kinds = get_args(inner)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise InputError(f"{key} is {list(value)!r}, but a list of {counted(len(kinds), 'value')} is expected")
    return tuple(_fitting(f"Each value of {key}", one, kind) for one, kind in zip(value, kinds, strict=True))
