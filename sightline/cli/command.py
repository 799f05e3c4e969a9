"""One function makes a command of a Python function: of its signature, the help beside its types, and its docstring.

    @command("Files and lists")
    def report(run: Annotated[Path, "Folder of a run or a study."]) -> None:
        ...

What has no default, and what Python takes by position, is an argument; all else is an option of the same name, and so
are `images` and `out` wherever they have a default. What the words of an option mean follows from its type:

    int, float, str, Path        one word
    Literal["csv", "parquet"]    one of these words
    bool                         none: --overwrite; where the default is True, --no-show-progress
    Sequence                     words between commas, --only cka,knn; as an argument, several words
    list                         the option given several times, each word as it is
    Mapping                      key=value, given several times: of `settings`, --set lr=1e-3
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from sightline.api import Encoders
from sightline.cli.application import app, ended, say
from sightline.core.errors import InputError, nearest
from sightline.core.references import parse_reference
from sightline.core.settings import parse_settings

if TYPE_CHECKING:
    from sightline.encoders.encoder import Encoder

Function = TypeVar("Function", bound=Callable[..., Any])

BY_NAME = ("images", "out")  # options, though Python takes them by position as well
KINDS = (Path, bool, int, float, Literal, list, Sequence, Mapping, str)
NAMES = {"settings": ["--set"], "out": ["--out", "-o"]}
WORDS = {int: "N", float: "X", Path: "PATH", Sequence: "A,B", Mapping: "KEY=VALUE"}  # as help shows values
NUMBERS = {int: "a whole number", float: "a number"}


class _Option(NamedTuple):
    """A parameter of a function, and what its words mean."""

    parameter: inspect.Parameter
    kind: Any  # one of KINDS
    inner: tuple[Any, ...]  # the types, or the choices, within it
    help: str
    loaded: bool  # whether the function is given encoders for the words that name them

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def argument(self) -> bool:
        """Whether it is known by its place."""
        needed = self.parameter.default is inspect.Parameter.empty
        placed = self.parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        return placed and (needed or self.name not in BY_NAME)

    @property
    def turned_off(self) -> bool:
        """Whether its flag turns it off."""
        return self.kind is bool and self.parameter.default is True

    @property
    def words(self) -> list[str]:
        """How it is written."""
        dashed = self.name.rstrip("_").replace("_", "-")
        return NAMES.get(self.name, [f"--no-{dashed}" if self.turned_off else f"--{dashed}"])

    @property
    def said(self) -> str:
        """How it is called in a sentence."""
        return self.name.upper() if self.argument else self.words[0]


def command(panel: str, *, name: str = "", then: Callable[..., None] | None = None) -> Callable[[Function], Function]:
    """Make a command of a function; `then` gets what it returns, in the first process, and its options are added."""

    def add(function: Function) -> Function:
        own, after = _options(function), [] if then is None else _options(then)[1:]

        @functools.wraps(function)
        def run(**words: Any) -> None:
            with ended(resumed="resume" in words) as first:
                given = {one.name: _value(one, words[one.name]) for one in own}
                later = {one.name: _value(one, words[one.name]) for one in after}
                _check_settings(own, given.get("settings"))
                for one in own:
                    if one.loaded:
                        given[one.name] = load_encoders(given[one.name])
                result = function(**given)
                if then is not None and first():
                    then(result, **later)

        parameters = [_typer(one) for one in [*own, *after]]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        del run.__wrapped__  # whose signature is another
        app.command(name or function.__name__, rich_help_panel=panel)(run)
        return function

    return add


def _options(function: Callable[..., Any]) -> list[_Option]:
    hints = get_type_hints(function, include_extras=True)
    return [_option(one, hints[one.name]) for one in inspect.signature(function).parameters.values()]


def _option(parameter: inspect.Parameter, hint: Any) -> _Option:
    """Of a union that type counts which KINDS names first; what none of them is, is text."""
    type_, help_ = get_args(hint) if get_origin(hint) is Annotated else (hint, "")
    union = [type_] if type_ in KINDS or get_origin(type_) in KINDS else get_args(type_)
    kinds = {get_origin(one) or one: get_args(one) for one in union}
    kind = next((kind for kind in KINDS if kind in kinds), str)
    return _Option(parameter, kind, kinds.get(kind, ()), help_, hint == Encoders)


def _typer(option: _Option) -> inspect.Parameter:
    """The same parameter as Typer is told of it: one word, several, or a flag."""
    several = option.kind in (list, Mapping, Sequence)
    type_: Any = bool if option.kind is bool else list[str] if several else str
    help_ = f"Do not {option.help[0].lower()}{option.help[1:]}" if option.turned_off else option.help
    about: dict[str, Any] = {"help": help_}
    if option.argument:
        about["metavar"] = option.name.upper()
    elif option.kind is not bool:
        about["metavar"] = WORDS.get(option.kind, "TEXT")
    default = option.parameter.default
    if option.kind is bool:
        default = False
    elif several and default is not inspect.Parameter.empty:
        default = [",".join(map(str, default))] if default else None
    elif default is not None and default is not inspect.Parameter.empty:
        default = str(default)
    declared = typer.Argument(**about) if option.argument else typer.Option(*option.words, **about)
    optional = type_ | None if default is None else type_
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[optional, declared]
    )


def _value(option: _Option, words: Any) -> Any:
    """What the words of an option mean, as its function takes it."""
    if option.kind is bool:
        return words is not option.turned_off
    if words is None or (words == [] and option.parameter.default is not inspect.Parameter.empty):
        return option.parameter.default
    said = option.said
    if option.kind is Mapping:
        return _pairs(said, words, option.inner)
    if option.kind is Sequence:
        parts = words if option.argument else [part.strip() for word in words for part in word.split(",")]
        if not all(parts):
            raise InputError(f"{said} {','.join(words)!r} names nothing; leave it out or write {said} A,B")
        example = f", such as {said} 1,2,4" if option.inner[0] in NUMBERS else ""
        return [_one(said, option.inner[0], part, example=example) for part in parts]
    return words if option.kind is list else _one(said, option.kind, words, option.inner)


def _one(said: str, kind: Any, word: str, choices: Sequence[str] = (), example: str = "") -> Any:
    """A word in the type of its option."""
    if kind is Literal and word not in choices:
        raise InputError(f"{said} is {word!r}{nearest(word, choices)}")
    if kind in NUMBERS:
        try:
            return kind(word)
        except ValueError:
            raise InputError(f"{said} is {word!r}, but {NUMBERS[kind]} is expected{example}") from None
    return Path(word) if kind is Path else word


def _pairs(said: str, words: Sequence[str], inner: tuple[Any, ...]) -> dict[str, Any]:
    """`key=value`, values as TOML has them, or as they are where the type says that they are text."""
    if inner[1] is not str:
        settings = parse_settings(words, said)
        for name, values in settings.items():
            if inner[1] is not Any and not isinstance(values, dict):
                raise InputError(f"{said} {name}={values}: write {said} {name}.KEY=VALUE, a setting of {name}")
        return settings
    texts: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if not key or not value:
            raise InputError(f"{said} {word}: write name=value")
        if key in texts:
            raise InputError(f"{said} {word}: {key} is given twice; give one of them another name")
        texts[key] = value
    return texts


def _check_settings(options: Sequence[_Option], settings: Mapping[str, Any] | None) -> None:
    """A setting that has an option of its own is given by that alone."""
    for option in options:
        # Objectives have a setting `out`, too: how many numbers their heads give.
        if option.name in (settings or {}) and option.name not in ("settings", "out"):
            raise InputError(f"--set {option.name}=…: {option.name} is an argument of its own; write {option.said}")


def load_encoders(words: Sequence[str]) -> dict[str, Encoder]:
    """`name=source:id` or `source:id`; names that occur twice get a number."""
    from sightline.encoders.encoder import name_apart
    from sightline.encoders.loading import load_encoder
    from sightline.encoders.sources.run import every_step

    given = [re.fullmatch(r"(?:([^:?@=]+)=)?(.+)", word, re.DOTALL) for word in words]
    encoders = [
        load_encoder(str(reference), name=name)
        for match in given
        if match
        for name, reference in every_step(match[1], parse_reference(match[2]))
    ]
    for encoder in encoders:
        for note in encoder.notes:
            say(f"{encoder.name}: {note}", err=True)
    return name_apart(encoders)
