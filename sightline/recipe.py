"""Recipes: what to train and how, in TOML files; every value can be set on the command line.

A recipe is flat: the keys of the backbone, of the optimiser, of the training and of the objective in one table. Only
the parts of a hybrid have tables of their own (`[moco_v3]`, or `--set moco_v3.temperature=0.1`).
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from sightline import plugins
from sightline.backbones import Backbone
from sightline.errors import InputError, counted, first_line, nearest
from sightline.optimization import Optimization

__all__ = [
    "Recipe",
    "Training",
    "flatten",
    "make_parts",
    "make_recipe",
    "make_settings",
    "parse_settings",
    "read_recipe",
    "recipe_names",
    "to_toml",
]

FOLDER = Path(__file__).parent / "recipes"
MEASURES = ("width", "depth", "heads", "patch", "relative_positions", "layer_scale", "stem", "init")
T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """Settings of the loop itself."""

    images: str = "shapes"
    limit: int = 0  # at most this many images of each split, balanced over classes; 0: all
    seed: int = 0
    precision: str = "float32"  # or "bf16": products in bfloat16, weights in float32
    compile: bool = False  # blocks through torch.compile
    evaluate_every: float = 5  # epochs between two evaluations; 0: at the end only
    log_every: int = 20  # steps between two rows of metrics.csv
    save_minutes: float = 2.0  # between two checkpoints

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "bf16"):
            raise InputError(f"There is no precision {self.precision!r}{nearest(self.precision, ('float32', 'bf16'))}")
        if self.log_every < 1:
            raise InputError(f"log_every is {self.log_every}, but at least 1 step is needed")
        for key in ("limit", "evaluate_every", "save_minutes"):
            if not getattr(self, key) >= 0:
                raise InputError(f"{key} is {getattr(self, key)}, but it cannot be negative")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training."""

    objective: str
    backbone: Backbone
    optimization: Optimization
    training: Training
    config: Any  # the objective's own settings

    @property
    def plugin(self) -> ModuleType:
        """The file of `objectives/`."""
        return plugins.find("objectives", self.objective)

    def values(self) -> dict[str, Any]:
        """All settings in one flat table; those of a hybrid's parts in tables of their own."""
        return flatten(self.objective, self.training, self.backbone, self.optimization, self.config)

    def to_toml(self) -> str:
        """As a file that `read_recipe` reads."""
        return to_toml(self.values())


def flatten(objective: str, *parts: Any) -> dict[str, Any]:
    """The settings of dataclasses in one flat table; a field `settings` becomes tables of its own."""
    flat: dict[str, Any] = {"objective": objective}
    for part in parts:
        flat |= dataclasses.asdict(part)
    tables: dict[str, Any] = flat.pop("settings", {})
    return flat | tables


def to_toml(values: Mapping[str, Any]) -> str:
    """Settings as a file that `read_recipe` reads."""
    lines = [f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for name, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def recipe_names() -> list[str]:
    """Recipes that come with Sightline."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_recipe(which: str | Path) -> dict[str, Any]:
    """The values of a recipe: one of ours by its name, or a file."""
    path = Path(which)
    if path.suffix != ".toml" and str(which) in recipe_names():
        path = FOLDER / f"{which}.toml"
    if not path.is_file():
        raise InputError(f"There is no recipe {str(which)!r}{nearest(str(which), recipe_names())}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read the recipe {str(path)!r}: {first_line(error)}") from error


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """`--set` words as values.

    >>> parse_settings(["lr=1e-3", "depth=12", "backbone=resnet18", "moco_v3.temperature=0.1"])
    {'lr': 0.001, 'depth': 12, 'backbone': 'resnet18', 'moco_v3': {'temperature': 0.1}}
    """
    result: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {word!r}: settings are written key=value, such as --set lr=1e-3")
        try:
            value = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            value = {"True": True, "False": False}.get(text.strip(), text.strip())
        table, dot, inner = key.strip().partition(".")
        if dot:
            if not isinstance(result.setdefault(table, {}), dict):
                raise InputError(f"--set {word!r}: {table} was given a value of its own before; name one of the two")
            result[table][inner] = value
        else:
            result[table] = value
    return result


def make_recipe(objective: str, *layers: Mapping[str, Any]) -> Recipe:
    """Put a recipe together; later layers override earlier ones, and unknown keys are errors.

    >>> make_recipe("supervised", {"lr": 0.1}, {"lr": 0.2, "depth": 3}).optimization.lr
    0.2
    """
    if objective == "finetune":
        raise InputError("This is a recipe of fine-tuning, not of pre-training; use it with `sightline finetune`")
    config = plugins.find("objectives", objective).Config
    return Recipe(objective, *make_parts(objective, (Backbone, Optimization, Training, config), layers))


def make_parts(objective: str, parts: Sequence[type[Any]], layers: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The dataclasses of a recipe from layers of settings; a field `settings` of the last one takes the tables."""
    known = {field.name: part for part in parts for field in fields(part) if field.name != "settings"}
    nested = any(field.name == "settings" for field in fields(parts[-1]))
    flat: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    for layer in layers:
        if layer.get("backbone", flat.get("backbone")) != flat.get("backbone"):
            flat = {key: value for key, value in flat.items() if key not in MEASURES}  # those of another architecture
        for key, value in layer.items():
            if nested and isinstance(value, Mapping) and key in plugins.names("objectives"):
                tables[key] = tables.get(key, {}) | dict(value)
            elif key == "objective":
                if value != objective:
                    raise InputError(f"The recipe is one of {value!r}, not of {objective!r}; name that objective")
            elif key not in known:
                raise InputError(f"There is no setting {key!r} of {objective}{nearest(key, known)}")
            else:
                flat[key] = value
    chosen = [{key: value for key, value in flat.items() if known[key] is part} for part in parts]
    if nested:
        chosen[-1]["settings"] = tables
    return [make_settings(part, values) for part, values in zip(parts, chosen, strict=True)]


def make_settings(part: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of settings from values as TOML has them; a value of another type is an error."""
    hints = get_type_hints(part)
    return part(**{key: _fitting(key, value, hints[key]) for key, value in values.items()})


def _fitting(key: str, value: Any, hint: Any) -> Any:
    """The value in the type of its setting; a list where that is a tuple."""
    kinds = [getattr(kind, "__origin__", kind) for kind in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
    for kind in kinds:
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
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


def _elements(key: str, value: Sequence[Any], hint: Any) -> tuple[Any, ...]:
    """A tuple whose elements have the types that its hint names."""
    inner = next(kind for kind in (hint, *get_args(hint)) if getattr(kind, "__origin__", None) is tuple)
    kinds = get_args(inner)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise InputError(f"{key} is {list(value)!r}, but a list of {counted(len(kinds), 'value')} is expected")
    return tuple(_fitting(f"Each value of {key}", one, kind) for one, kind in zip(value, kinds, strict=True))


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are words of TOML, too
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
