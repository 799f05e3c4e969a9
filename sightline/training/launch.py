"""How a training is started: where and by whom it is computed, which does not change what is learned."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Launch:
    """What the functions and commands that train have in common."""

    resume: bool = False  # go on with the training in the folder
    overwrite: bool = False  # start anew in a folder that holds one
    device: str = "auto"
    devices: int | None = None  # processes per node; torchrun says itself
    nodes: int = 1
    workers: int | None = None  # processes that decode images
    show_progress: bool = True

    def processes(self) -> tuple[int, int]:
        """Processes per node and nodes: torchrun says, otherwise the caller, otherwise one."""
        if "LOCAL_WORLD_SIZE" in os.environ:
            local = int(os.environ["LOCAL_WORLD_SIZE"])
            return local, int(os.environ.get("WORLD_SIZE", local)) // local
        return self.devices or 1, self.nodes


class Placed(TypedDict, total=False):
    """Where it is computed, as arguments of a function: `def study(..., **arguments: Unpack[Placed])`."""

    device: str
    devices: int | None
    nodes: int
    workers: int | None
    show_progress: bool


class Launched(Placed, total=False):
    """All of it, as arguments of a function: `def train(..., **arguments: Unpack[Launched])`."""

    resume: bool
    overwrite: bool


def launching(arguments: type[Placed]) -> Callable[[Function], Function]:
    """Let a function whose last arguments are these show them, with their defaults, in `help` and to editors."""

    def shown(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        shared = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in fields(Launch)
            if f.name in arguments.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return function

    return shown
