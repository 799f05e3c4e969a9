"""Recipes: what to train and how, in TOML files; every value can be set on the command line.

A recipe is flat: the keys of the backbone, of the optimiser, of the training and of the objective in one table. Only
the parts of a hybrid have tables of their own (`[moco_v3]`, or `--set moco_v3.temperature=0.1`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sightline.core import plugins
from sightline.core.errors import InputError, nearest
from sightline.core.files import is_file, read_toml
from sightline.core.schedules import points
from sightline.core.settings import flatten, make_settings, to_toml
from sightline.training.backbones import Backbone
from sightline.training.objective import ObjectivePlugin, objective_named
from sightline.training.optimization import Optimization

FOLDER = Path(__file__).parent.parent / "recipes"
COMMANDS = {  # of recipes that are no pre-training: in words, and by which command
    "detect": ("detection", "detect"),
    "finetune": ("fine-tuning", "finetune"),
    "rcdm": ("pictures from representations", "rcdm"),
    "segment": ("segmentation", "segment"),
}
MEASURES = ("width", "depth", "heads", "patch", "relative_positions", "layer_scale", "stem", "init")


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
        for key in ("limit", "seed", "evaluate_every", "save_minutes"):
            if not getattr(self, key) >= 0:
                raise InputError(f"{key} is {getattr(self, key)}, but it cannot be negative")


WATCHERS = ("knn", "rank", "collapse")


@dataclass(frozen=True)
class Pretraining(Training):
    """Settings of the loop of a pre-training."""

    watch: tuple[str, ...] = WATCHERS  # what is told on the way, see watchers.py
    keep: str | int = ""  # points at which the encoder is kept: "log", or so many at equal distances; "": none

    def __post_init__(self) -> None:
        super().__post_init__()
        points(self.keep, 1)
        for name in self.watch:
            if name not in WATCHERS:
                raise InputError(f"There is no watcher {name!r}{nearest(name, WATCHERS)}")


@dataclass(frozen=True)
class PretrainingRecipe:
    """Everything that decides a training."""

    objective: str
    backbone: Backbone
    optimization: Optimization
    training: Pretraining
    config: Any  # the objective's own settings

    @property
    def plugin(self) -> ObjectivePlugin:
        """The file of `training/objectives/`."""
        return objective_named(self.objective)

    def values(self) -> dict[str, Any]:
        """All settings in one flat table; those of a hybrid's parts in tables of their own."""
        return flatten(self.objective, self.training, self.backbone, self.optimization, self.config)

    def to_toml(self) -> str:
        """As a file that `read_recipe` reads."""
        return to_toml(self.values())


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_recipe(which: str | Path) -> dict[str, Any]:
    """The values of a recipe: one of ours by its name, or a file."""
    path = Path(which)
    if path.suffix != ".toml" and str(which) in recipe_names():
        path = FOLDER / f"{which}.toml"
    if not is_file(path):
        raise InputError(f"There is no recipe {str(which)!r}{nearest(str(which), recipe_names())}")
    return read_toml(path, "recipe")


def make_recipe(objective: str, *layers: Mapping[str, Any]) -> PretrainingRecipe:
    """Put a recipe together; later layers override earlier ones, and unknown keys are errors.

    >>> make_recipe("supervised", {"lr": 0.1}, {"lr": 0.2, "depth": 3}).optimization.lr
    0.2
    """
    if objective in COMMANDS:
        what, command = COMMANDS[objective]
        raise InputError(f"This recipe is for {what}, not for pre-training; use it with `sightline {command}`")
    config = objective_named(objective).Config
    return PretrainingRecipe(objective, *make_parts(objective, (Backbone, Optimization, Pretraining, config), layers))


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
                    raise InputError(f"The recipe is for {value!r}, not for {objective!r}; name that objective")
            elif key not in known:
                raise InputError(f"There is no setting {key!r} of {objective}{nearest(key, known)}")
            else:
                flat[key] = value
    chosen = [{key: value for key, value in flat.items() if known[key] is part} for part in parts]
    if nested:
        chosen[-1]["settings"] = tables
    return [make_settings(part, values) for part, values in zip(parts, chosen, strict=True)]
