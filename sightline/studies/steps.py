"""What a study consists of before it is run: steps, each a command with its encoders, images and settings; their order.

An encoder of a step is a reference, or `step:NAME` for what another step has trained, also with the options of `run:`,
such as `step:mae-tuned?step=*`.
"""

import graphlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sightline.core.errors import InputError, nearest
from sightline.core.references import Reference, take_apart
from sightline.studies.roles import Role


@dataclass(frozen=True)
class Step:
    """One run folder to be."""

    name: str
    command: str  # of commands.py
    encoders: Mapping[str, str] = field(default_factory=dict)  # by their names in the results
    images: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # the other arguments of the command
    group: str = ""  # by which `--steps` chooses it: passes, finetune, …

    @property
    def needs(self) -> tuple[str, ...]:
        """Steps that have to be done before."""
        named = (step_of(reference) for reference in self.encoders.values())
        return tuple(dict.fromkeys(found.id for found in named if found is not None))


@dataclass(frozen=True)
class Given:
    """An encoder of a study."""

    role: Role
    reference: str  # also step:NAME
    step: str = ""  # the step that trains it


@dataclass(frozen=True)
class Design:
    """All of a study before anything is run: encoders, steps, and the findings that it is to decide."""

    name: str
    roles: tuple[Role, ...]
    steps: tuple[Step, ...]
    findings: tuple[str, ...]


def step_of(reference: str) -> Reference | None:
    """The step that a reference names, with its options; None if it is an encoder of another kind.

    >>> step_of("step:mae?step=*"), step_of("zoo:mae")
    (Reference(source='step', id='mae', weights=None, options={'step': '*'}), None)
    """
    source, where, options = take_apart(reference) or ("", "", {})
    return Reference("step", where, None, options) if source == "step" else None


def in_order(steps: Sequence[Step]) -> list[Step]:
    """Steps so that each comes after those it needs; what cannot be is one sentence."""
    by_name: dict[str, Step] = {}
    for step in steps:
        if step.name in by_name:
            raise InputError(f"Two steps are called {step.name!r}; give one of them another name")
        by_name[step.name] = step
    for step in steps:
        for need in step.needs:
            if need not in by_name:
                raise InputError(
                    f"The step {step.name!r} needs a step {need!r}, which there is not{nearest(need, by_name)}"
                )
    try:
        order = list(graphlib.TopologicalSorter({step.name: step.needs for step in steps}).static_order())
    except graphlib.CycleError as error:
        circle = " → ".join(reversed(error.args[1]))
        raise InputError(f"The steps {circle} need each other in a circle; one of them has to begin without") from error
    return [by_name[name] for name in order]


def with_needed(chosen: Sequence[Step], every: Sequence[Step]) -> list[Step]:
    """The chosen steps and all that they need."""
    by_name = {step.name: step for step in every}
    needed: dict[str, Step] = {}
    waiting = list(chosen)
    while waiting:
        step = waiting.pop()
        if step.name not in needed:
            needed[step.name] = step
            waiting += [by_name[name] for name in step.needs if name in by_name]
    return [step for step in every if step.name in needed]
