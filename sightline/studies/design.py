"""What a study consists of: encoders with their roles, steps, and the findings that it is to decide."""

from __future__ import annotations

from dataclasses import dataclass

from sightline.studies.roles import Role
from sightline.studies.steps import Step


@dataclass(frozen=True)
class Given:
    """An encoder of a study."""

    role: Role
    reference: str  # also step:NAME
    step: str = ""  # the step that trains it


@dataclass(frozen=True)
class Design:
    """All of a study before anything is run."""

    name: str
    roles: tuple[Role, ...]
    steps: tuple[Step, ...]
    findings: tuple[str, ...]
