"""The commands that steps are made of: what decides their numbers, and how they are run.

Settings are compared with the defaults, so that a new option leaves the steps as they are that do not use it.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sightline.core.errors import InputError, nearest
from sightline.encoders.encoder import Encoder
from sightline.generation.training import NAME as RCDM
from sightline.generation.training import make_recipe as rcdm_recipe
from sightline.images.loading import load_images
from sightline.images.sets import Images
from sightline.measure.analyze import analyze
from sightline.measure.contract import analysis
from sightline.measure.request import choose_analyses, config_of
from sightline.studies.detection import detect
from sightline.studies.rcdm import rcdm
from sightline.studies.reinit import reinit
from sightline.studies.segmenters import segment
from sightline.studies.steps import Step
from sightline.training.launch import Launch
from sightline.training.pretrain import pretrain
from sightline.training.recipe import make_recipe as pretraining_recipe
from sightline.training.recipe import read_recipe, recipe_names
from sightline.transfer.detection.detect import NAME as DETECT
from sightline.transfer.detection.detect import make_recipe as detection_recipe
from sightline.transfer.finetune import NAME as FINETUNE
from sightline.transfer.finetune import finetune
from sightline.transfer.finetune import make_recipe as finetuning_recipe
from sightline.transfer.segmentation.segment import NAME as SEGMENT
from sightline.transfer.segmentation.segment import make_recipe as segmentation_recipe
from sightline.transfer.trainings import Reuse


@dataclass(frozen=True)
class Machine:
    """Where a step runs, which does not change its numbers."""

    device: str = "auto"
    workers: int | None = None
    show_progress: bool = True


@dataclass(frozen=True)
class Work:
    """All that it takes to run a step."""

    step: Step
    members: Mapping[str, Encoder]
    out: Path
    anew: bool = False  # replace what is in the folder
    machine: Machine = field(default_factory=Machine)
    reuse: Reuse = field(default_factory=dict)  # trainings of other steps
    features: Path | None = None  # a folder for those that other passes have computed


@dataclass(frozen=True)
class Command:
    """One of Sightline's commands as a step."""

    options: Mapping[str, Any]  # its arguments with their defaults
    decisive: Callable[[Step], dict[str, Any]]  # settings that decide its numbers and are not the defaults
    images: Callable[[Step], Images]
    splits: Callable[[Step], set[str]]  # which of them it looks at
    run: Callable[[Work], Any]
    recipe: Callable[[Step], Any] = lambda step: None  # of a training
    encoders: tuple[int, int] = (1, 1000)  # fewest and most
    trains: bool = True  # whether `step:NAME` of it is an encoder
    apart: bool = False  # whether what it trains upon an encoder does not depend on the others


@dataclass(frozen=True)
class OptionKind:
    """What the value of an option has to be."""

    title: str
    holds: Callable[[Any], bool]


def _every(kind: type, values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, kind) for value in values)


TEXT = OptionKind("text", lambda value: isinstance(value, str))
NUMBER = OptionKind("a whole number", lambda value: type(value) is int)
TABLE = OptionKind("a table", lambda value: isinstance(value, Mapping))
NAMES = OptionKind('a list of names, such as ["a", "b"],', lambda value: _every(str, value))
OPTION_KINDS: Mapping[str, OptionKind] = {
    **dict.fromkeys(("objective", "recipe"), TEXT),
    **dict.fromkeys(("batch", "compared", "limit", "samples", "seed", "sources"), NUMBER),
    **dict.fromkeys(("ends", "only", "sites", "transformations"), NAMES),
    "counts": OptionKind("a list of whole numbers, such as [1, 2],", lambda value: _every(int, value)),
    "further": OptionKind("a table of texts", lambda value: TABLE.holds(value) and _every(str, [*value.values()])),
    "lenient": OptionKind("true or false", lambda value: isinstance(value, bool)),
    "set": TABLE,
}


def command_of(step: Step) -> Command:
    """The command of a step, which must have such options and so many encoders."""
    if step.command not in COMMANDS:
        raise InputError(f"The step {step.name!r} has no command {step.command!r}{nearest(step.command, COMMANDS)}")
    command = COMMANDS[step.command]
    for key, value in step.options.items():
        if key not in command.options:
            raise InputError(
                f"The step {step.name!r}: {step.command} has no setting {key!r}{nearest(key, command.options)}"
            )
        kind = OPTION_KINDS[key]
        if not kind.holds(value) and not (value is None and command.options[key] is None):
            raise InputError(f"The step {step.name!r}: {key} is {value!r}, but {kind.title} is expected")
    fewest, most = command.encoders
    if not fewest <= len(step.encoders) <= most:
        wanted = "no encoder" if not most else "one encoder" if most == 1 else "at least one encoder"
        raise InputError(f"The step {step.name!r}: {step.command} takes {wanted}, not {len(step.encoders)}")
    return command


def _option(step: Step, key: str) -> Any:
    return step.options.get(key, COMMANDS[step.command].options[key])


# A pass


PASS: Mapping[str, Any] = {
    "only": None,
    "set": {},
    "limit": 1024,
    "batch": 32,
    "seed": 0,
    "sites": None,
    "further": {},
    "lenient": False,
}


def analyses_of(step: Step) -> dict[str, Any]:
    """The analyses of a pass with their settings."""
    only = "all" if _option(step, "only") == ["all"] else _option(step, "only")
    chosen, _ = choose_analyses(only)
    for name, values in _option(step, "set").items():
        if name not in chosen:
            raise InputError(f"The step {step.name!r} sets {name}, which is not among its analyses; add it there")
        if not isinstance(values, Mapping):
            raise InputError(f"The step {step.name!r} sets {name} to {values!r}; write {name} = {{ key = value }}")
        chosen[name] = config_of(name, values)
    return chosen


def _decisive_pass(step: Step) -> dict[str, Any]:
    decisive: dict[str, Any] = {
        key: _option(step, key)
        for key in ("limit", "batch", "seed", "sites", "lenient")
        if _option(step, key) != PASS[key]
    }
    configs = {}
    for name, config in analyses_of(step).items():
        usual = asdict(analysis(name).Config())
        configs[name] = {key: value for key, value in asdict(config).items() if usual[key] != value}
    return decisive | {"analyses": configs}


def _images_of_pass(step: Step, reference: str | None = None) -> Images:
    limit, seed = _option(step, "limit"), _option(step, "seed")
    return load_images(reference or step.images or "shapes", limit=limit or None, seed=seed)


def _splits_of_pass(step: Step) -> set[str]:
    return {split for name in analyses_of(step) for split in analysis(name).SPLITS}


def _compare(work: Work) -> None:
    step = work.step
    analyze(
        work.members,
        _images_of_pass(step),
        analyses_of(step),
        further={name: _images_of_pass(step, images) for name, images in _option(step, "further").items()},
        out=work.out,
        cache=work.features,
        sites=_option(step, "sites"),
        batch=_option(step, "batch"),
        seed=_option(step, "seed"),
        device=work.machine.device,
        workers=work.machine.workers,
        overwrite=work.anew,
        lenient=_option(step, "lenient"),
        show_progress=work.machine.show_progress,
    )


# Trainings


ASIDE = ("encoder", "encoders", "images", "log_every", "objective", "save_minutes")  # what no number depends on


class _Training:
    """What a command that trains by a recipe has in common with the others."""

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make

    def recipe(self, step: Step) -> Any:
        """The recipe of a step; a setting that it does not have is an error."""
        try:
            return self.make(*self.layers(step))
        except InputError as error:
            raise InputError(f"The step {step.name!r}: {error}") from error

    def layers(self, step: Step) -> list[Mapping[str, Any]]:
        """Settings, later ones over earlier ones."""
        recipe = _option(step, "recipe")
        return [read_recipe(self.name if recipe is None else recipe), _option(step, "set")]

    def usual(self, step: Step) -> Mapping[str, Any]:
        values: Mapping[str, Any] = self.make().values()
        return values

    def decisive(self, step: Step) -> dict[str, Any]:
        """Settings that are not the defaults, and other arguments that are not."""
        values, usual = self.recipe(step).values(), self.usual(step)
        unusual = {key: value for key, value in values.items() if usual.get(key) != value}
        defaults = COMMANDS[step.command].options
        rest = {k: v for k, v in step.options.items() if k not in ("recipe", "set") and v != defaults[k]}
        return {key: value for key, value in unusual.items() if key not in ASIDE} | rest

    def images(self, step: Step) -> Images:
        """What is trained and tested on."""
        training = self.recipe(step).training
        return load_images(step.images or training.images, limit=training.limit or None, seed=training.seed)

    def splits(self, step: Step) -> set[str]:
        return {"train", "val", "test"}


class _Pretraining(_Training):
    """A pre-training, whose recipe is that of an objective."""

    def recipe(self, step: Step) -> Any:
        objective = _option(step, "objective")
        if objective is None:
            raise InputError(f"The step {step.name!r} pre-trains with no objective; name one, such as mae")
        try:
            return pretraining_recipe(objective, *self.layers(step))
        except InputError as error:
            raise InputError(f"The step {step.name!r}: {error}") from error

    def layers(self, step: Step) -> list[Mapping[str, Any]]:
        recipe = _option(step, "recipe") or _option(step, "objective")
        return [
            read_recipe(recipe) if recipe in recipe_names() or step.options.get("recipe") else {},
            _option(step, "set"),
        ]

    def usual(self, step: Step) -> Mapping[str, Any]:
        return pretraining_recipe(_option(step, "objective")).values()


def _arguments(work: Work) -> dict[str, Any]:
    step, machine = work.step, work.machine
    return {
        "images": step.images,
        "out": work.out,
        "recipe": _option(step, "recipe"),
        "settings": dict(_option(step, "set")),
        "launch": Launch(
            resume=not work.anew,
            overwrite=work.anew,
            device=machine.device,
            workers=machine.workers,
            show_progress=machine.show_progress,
        ),
    }


def _pretrain(work: Work) -> None:
    pretrain(_option(work.step, "objective"), **_arguments(work))


def _finetune(work: Work) -> None:
    (encoder,) = work.members.values()
    finetune(encoder, **_arguments(work))


def _trainings(function: Callable[..., Any]) -> Callable[[Work], None]:
    """Of a command that trains something on several encoders, on each apart or on all together."""

    def run(work: Work) -> None:
        command = COMMANDS[work.step.command]
        given = {key: _option(work.step, key) for key in command.options.keys() - TRAINED.keys()}
        shared = {"reuse": work.reuse} if command.apart else {}
        function(work.members, **_arguments(work), **given, **shared)

    return run


TRAINED: Mapping[str, Any] = {"recipe": None, "set": {}}


def _command(kind: _Training, run: Callable[[Work], None], **more: Any) -> Command:
    options = {**TRAINED, **more.pop("options", {})}
    return Command(options, kind.decisive, kind.images, kind.splits, run, kind.recipe, **more)


COMMANDS: Mapping[str, Command] = {
    "compare": Command(PASS, _decisive_pass, _images_of_pass, _splits_of_pass, _compare, trains=False),
    "detect": _command(_Training(DETECT, detection_recipe), _trainings(detect), trains=False, apart=True),
    "finetune": _command(_Training(FINETUNE, finetuning_recipe), _finetune, encoders=(1, 1)),
    "pretrain": _command(_Pretraining("", pretraining_recipe), _pretrain, options={"objective": None}, encoders=(0, 0)),
    "rcdm": _command(
        _Training(RCDM, rcdm_recipe),
        _trainings(rcdm),
        trains=False,
        options={"samples": 8, "sources": 32, "compared": 256, "transformations": None},
    ),
    "reinit": _command(
        _Training(FINETUNE, finetuning_recipe),
        _trainings(reinit),
        trains=False,
        apart=True,
        options={"counts": None, "ends": ["first", "last"]},
    ),
    "segment": _command(_Training(SEGMENT, segmentation_recipe), _trainings(segment), trains=False, apart=True),
}
