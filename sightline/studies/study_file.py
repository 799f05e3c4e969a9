"""A study as a file: steps, each an existing command with its arguments, and the roles of the encoders.

title = "Does fine-tuning bring MAE closer to MoCo?"
images = "shapes?size=48"                       # of steps that name none
findings = ["S15"]                              # by default all

[matrix]
seed = [0, 1]                                   # a step that says {seed} becomes one for each

[step.mae]
command = "pretrain mae"
set = { seed = "{seed}", epochs = 2 }

[step.mae-tuned]
command = "finetune step:mae"                   # of the same seed
set = { seed = "{seed}" }

[step.cka]
command = "compare step:mae step:mae-tuned moco=zoo:moco_v3"     # of all seeds
only = ["cka"]

[role]
mae = { family = "reconstruction", method = "mae", seed = "{seed}" }
mae-tuned = { family = "reconstruction", method = "mae", tuned_from = "mae", seed = "{seed}" }
"""

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sightline.core.errors import InputError, first_line, nearest
from sightline.core.files import is_file, read_toml
from sightline.core.settings import make_settings, parse_settings
from sightline.studies.commands import COMMANDS
from sightline.studies.findings import all_findings
from sightline.studies.roles import Role, known_role
from sightline.studies.steps import Design, Step, in_order, step_of, with_needed

KEYS = {"title": str, "images": str, "findings": list, "matrix": dict, "step": dict, "role": dict}
FORMS = {str: "text", list: 'a list of names, such as ["S15"]', dict: "a table, such as [step.mae] begins"}
MOST_STEPS = 10_000


def read_study(
    path: Path, *, images: str | None = None, steps: Sequence[str] | None = None, findings: Sequence[str] | None = None
) -> Design:
    """The study of a file; `images` replaces its own, `steps` chooses some, by name, with those that they need."""
    about = _read(path)
    matrix = _matrix(about.get("matrix", {}))
    tables = about.get("step", {})
    if not tables:
        raise InputError(f"{str(path)!r} has no steps; write [step.NAME] with a command")
    for name, table in about.get("role", {}).items():
        if not isinstance(table, Mapping):
            raise InputError(f'The role of {name!r} is a table, such as {{ family = "reconstruction" }}')
    copies = {name: _copies(name, table, matrix) for name, table in tables.items()}
    default = images or about.get("images")
    every = [
        _step(str(table["name"]), table, values, copies, default) for name in tables for table, values in copies[name]
    ]
    ordered = in_order(every)
    for word in steps or ():
        if word not in copies and word not in {step.name for step in every}:
            raise InputError(f"{str(path)!r} has no step {word!r}{nearest(word, copies)}")
    chosen = [step for step in ordered if not steps or step.name in steps or step.group in steps]
    wanted = findings or about.get("findings") or list(all_findings())
    for finding in wanted:
        if finding not in all_findings():
            raise InputError(f"There is no finding {finding!r}{nearest(str(finding), all_findings())}")
    return Design(
        path.stem, _roles(about.get("role", {}), matrix, every), tuple(with_needed(chosen, ordered)), tuple(wanted)
    )


def _read(path: Path) -> dict[str, Any]:
    """What the file holds, each key of its kind."""
    if not is_file(path):
        raise InputError(f"There is no study {str(path)!r}; give a file, or one of `sightline list studies`")
    about = read_toml(path, "study")
    for key, value in about.items():
        if key not in KEYS:
            raise InputError(f"{str(path)!r} has no {key!r}{nearest(key, KEYS)}")
        if not isinstance(value, KEYS[key]):
            raise InputError(f"{key} of {str(path)!r} is {value!r}, but {FORMS[KEYS[key]]} is expected")
    for finding in about.get("findings", []):
        if not isinstance(finding, str):
            raise InputError(f"findings of {str(path)!r} has {finding!r}, but {FORMS[list]} is expected")
    _plain(about)
    return about


def _plain(value: Any) -> None:
    """Refuse dates and times, which no step takes and which no run can keep."""
    if isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            _plain(one)
    elif not isinstance(value, (str, int, float)):
        raise InputError(f"A study has no dates and times, but {value} is one; write it as text, in quotation marks")


# The matrix


def _matrix(table: Any) -> dict[str, list[Any]]:
    for key, values in table.items():
        if not isinstance(values, list) or not values or any(isinstance(value, (dict, list)) for value in values):
            raise InputError(f"matrix.{key} is {values!r}, but a list of values is expected, such as [0, 1]")
    return dict(table)


def _axes(value: Any, matrix: Mapping[str, Any]) -> list[str]:
    """The axes of the matrix that something mentions, `{seed}`."""
    mentioned = set(re.findall(r"\{(\w+)\}", json.dumps(value)))
    return [axis for axis in matrix if axis in mentioned]


def _fill(value: Any, values: Mapping[str, Any]) -> Any:
    """Put the values of the axes in; what is nothing but `{seed}` keeps the type of the value."""
    if isinstance(value, Mapping):
        return {key: _fill(one, values) for key, one in value.items()}
    if isinstance(value, list):
        return [_fill(one, values) for one in value]
    if not isinstance(value, str):
        return value
    if (whole := re.fullmatch(r"\{(\w+)\}", value)) and whole[1] in values:
        return values[whole[1]]
    return re.sub(r"\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), value)


def _named(name: str, values: Mapping[str, Any]) -> str:
    return "-".join([name, *map(str, values.values())])


def _copies(name: str, table: Any, matrix: Mapping[str, list[Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """A step once for each point of the axes that it mentions."""
    if not isinstance(table, Mapping) or not isinstance(table.get("command"), str):
        raise InputError(f'The step {name!r} has no command, such as command = "compare zoo:mae zoo:moco_v3"')
    if not re.fullmatch(r"[\w.-]+", name):
        raise InputError(f"The step {name!r} has a name that cannot be that of a folder; take letters, digits and -")
    points = _points(name, _axes(table, matrix), matrix)
    return [({**_fill(table, values), "name": _named(name, values), "group": name}, values) for values in points]


def _points(name: str, axes: Sequence[str], matrix: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """The values of these axes, each with each."""
    if (count := math.prod(len(matrix[axis]) for axis in axes)) > MOST_STEPS:
        raise InputError(f"{name!r} stands for {count} points of the matrix; at most {MOST_STEPS} can be")
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*(matrix[axis] for axis in axes))]


# Steps


def _step(
    name: str,
    table: Mapping[str, Any],
    values: Mapping[str, Any],
    copies: Mapping[str, list[tuple[dict[str, Any], dict[str, Any]]]],
    images: str | None,
) -> Step:
    try:
        words = shlex.split(table["command"])
    except ValueError as error:  # quotation marks that are not closed
        raise InputError(f"The command of the step {name!r} cannot be read: {first_line(error)}") from error
    if not isinstance(own := table.get("images", images), (str, type(None))):
        raise InputError(f'The images of the step {name!r} are {own!r}; write a reference, such as "shapes?size=48"')
    command = words.pop(0) if words else ""
    options = {key: value for key, value in table.items() if key not in ("command", "images", "name", "group")}
    if command not in COMMANDS:
        raise InputError(f"The step {name!r} has no command {command!r}{nearest(command, COMMANDS)}")
    if command == "pretrain":
        if len(words) != 1:
            raise InputError(f'The step {name!r}: write pretrain and one objective, such as "pretrain mae"')
        options["objective"], words = words[0], []
    if not isinstance(options.get("set", {}), Mapping):
        raise InputError(f"The step {name!r} sets {options['set']!r}; write a table, such as set = {{ epochs = 2 }}")
    if "set" in options and command != "compare":
        options["set"] = dict(options["set"])
    elif "set" in options:
        options["set"] = _by_analysis(options["set"])
    encoders: dict[str, str] = {}
    for word in words:
        for one, reference in _encoders(name, word, values, copies):
            if one in encoders:
                raise InputError(
                    f"The step {name!r} has two encoders {one!r}; name one of them, such as other={reference}"
                )
            encoders[one] = reference
    return Step(name, command, encoders, own, options, group=str(table["group"]))


def _by_analysis(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"knn.k" = 10}` and `{knn = {k = 10}}` are the same."""
    return parse_settings([f"{key}={json.dumps(value)}" for key, value in values.items() if "." in key]) | {
        key: value for key, value in values.items() if "." not in key
    }


def _encoders(
    step: str, word: str, values: Mapping[str, Any], copies: Mapping[str, list[tuple[dict[str, Any], dict[str, Any]]]]
) -> list[tuple[str, str]]:
    """What a word of a command stands for: `NAME=REFERENCE`, or a step, which may be several of a matrix."""
    given, _, reference = word.rpartition("=") if re.match(r"[^:?@=]+=", word) else ("", "", word)
    if given:
        given, _, reference = word.partition("=")
    needed = step_of(reference)
    if needed is None:
        return [(given or reference.partition(":")[2].partition("?")[0] or reference, reference)]
    query = "".join(f"{'&' if k else '?'}{key}={value}" for k, (key, value) in enumerate(needed.options.items()))
    if needed.id not in copies:
        exact = [str(table["name"]) for of in copies.values() for table, _ in of]
        if needed.id not in exact:
            raise InputError(
                f"The step {step!r} needs a step {needed.id!r}, which there is not"
                f"{nearest(needed.id, [*copies, *exact])}"
            )
        return [(given or needed.id, f"step:{needed.id}{query}")]
    chosen = [
        (str(table["name"]), own)
        for table, own in copies[needed.id]
        if all(values.get(axis, value) == value for axis, value in own.items())
    ]
    return [
        (_named(given, own) if given and len(chosen) > 1 else given or name, f"step:{name}{query}")
        for name, own in chosen
    ]


# Roles


def _roles(tables: Mapping[str, Any], matrix: Mapping[str, list[Any]], steps: Sequence[Step]) -> tuple[Role, ...]:
    """The roles that the file gives, and those that are known of its other encoders."""
    references = {name: reference for step in steps for name, reference in step.encoders.items()}
    names = {*references, *(step.name for step in steps if COMMANDS[step.command].trains)}
    roles: dict[str, Role] = {}
    keys = [field.name for field in fields(Role) if field.name != "name"]
    for name, table in tables.items():
        for key in table:
            if key not in keys:
                raise InputError(f"The role of {name!r} has no {key!r}{nearest(key, keys)}")
        if "family" not in table:
            raise InputError(f'The role of {name!r} has no family; give it one, such as "reconstruction"')
        start = table.get("tuned_from")
        if not isinstance(start, (str, type(None))):
            raise InputError(f"The role of {name!r} is tuned from {start!r}; write the name of an encoder")
        for values in _points(name, _axes(table, matrix), matrix):
            own = _named(name, values)
            if own not in names:
                raise InputError(f"The role {own!r} belongs to no encoder of the study{nearest(own, names)}")
            filled = _fill(table, values) | (
                {"tuned_from": _named(start, values) if _named(start, values) in names else start} if start else {}
            )
            roles[own] = make_settings(Role, {"name": own, **filled})
    for name, reference in references.items():
        if name not in roles and step_of(reference) is None and (role := known_role(name, reference, references)):
            roles[name] = role
    return tuple(roles.values())
