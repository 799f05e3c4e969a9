#!/usr/bin/env python
"""Write tests/support/plugin_types.py: every plugin with its contract, for mypy. `scripts/check` runs this.

Nothing is imported: the plugins are the files of their rooms, and what a file has is read off its text.
"""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "support" / "plugin_types.py"
ROOMS = {  # kind → room, and the contract of its files
    "analyses": ("analyses", "AnalysisFile"),
    "datasets": ("images.sources", "ImageSource"),
    "families": ("encoders.families", "Family"),
    "formats": ("encoders.formats", "Format"),
    "objectives": ("training.objectives", "ObjectiveFile"),
    "sources": ("encoders.sources", "ModelSource"),
    "studies": ("studies", "StudyFile"),
}
CLASSES = ("Analysis", "Config", "Objective")  # a file has them under names that end so
OPTIONAL = {  # kind → what a file may leave out or call by a name of its own, and its type
    "analyses": {
        "Analysis": "Callable[[Any, Plan], Analysis]",
        "TOPIC": "str",
        "PROJECTION": "tuple[str, ...]",
        "IMAGES": "Mapping[str, FurtherImages]",
        "TARGETS": "bool",
        "Config": "type[Any]",
        "views": "Callable[[Any, str], tuple[str, ...]]",
        "precision": "Callable[[Any], str]",
        "summary": "Callable[[xr.Dataset], Sequence[str]]",
        "tables": "Callable[[xr.Dataset], Sequence[Table]]",
        "key_numbers": "Callable[[xr.Dataset], Sequence[KeyNumber]]",
        "likeness": "Callable[[xr.Dataset], Likeness | None]",
    },
    "objectives": {
        "Objective": "Callable[..., Objective]",
        "Config": "type[Any]",
        "LABELS": "bool",
        "TARGETS": "bool",
        "first": "Callable[[Any, Backbone], First | None]",
    },
}
HEAD = '''\
"""Every plugin of Sightline with its contract: mypy checks here that each file has what its contract asks for.

Written by scripts/plugin_types.py. What a file may leave out is listed by member, so that mypy sees the type of it
where a file has it; so are classes, whose names a file chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xarray as xr

from sightline.core.contract import StudyFile
from sightline.encoders.contract import Family, Format, ModelSource
from sightline.images.contract import ImageSource
from sightline.measure.contract import Analysis, AnalysisFile, FurtherImages
from sightline.measure.plan import Plan
from sightline.report.figures import KeyNumber, Likeness, Table
from sightline.training.backbones import Backbone
from sightline.training.objective import First, Objective, ObjectiveFile
'''


def files(room: str) -> dict[str, Path]:
    """The plugins of a room by name."""
    folder = ROOT / "sightline" / room.replace(".", "/")
    every = [entry.name for entry in pkgutil.iter_modules([str(folder)])]
    names = listed(folder / "__init__.py") or every
    return {
        name: (one if (one := folder / f"{name}.py").is_file() else folder / name / "__init__.py") for name in names
    }


def listed(path: Path) -> list[str]:
    """The plugins that a room names because it holds other files, too: its PLUGINS."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PLUGINS":
            return list(ast.literal_eval(node.value))
    return []


def defined(path: Path) -> set[str]:
    """The names at the top of a file, with what it takes over from others (`from a import b as b`)."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return names


def is_(member: str, word: str) -> bool:
    """Whether a file means a member of its contract by this name."""
    return word.endswith(member) if member in CLASSES else word == member


def text() -> str:
    """The file, before it is formatted."""
    imports, tables = [], []
    for kind, (room, contract) in ROOMS.items():
        found = files(room)
        imports += [f"from sightline.{room} import {name} as {kind}_{name}" for name in found]
        named = ", ".join(f'"{name}": {kind}_{name}' for name in found)
        tables.append(f"{kind.upper()}: Mapping[str, {contract}] = {{{named}}}")
        has = {name: defined(path) for name, path in found.items()}
        for member, kind_of in OPTIONAL.get(kind, {}).items():
            words = {name: word for name in found if (word := next((w for w in has[name] if is_(member, w)), ""))}
            named = ", ".join(f'"{name}": {kind}_{name}.{word}' for name, word in words.items())
            tables.append(f"{kind.upper()}_{member.upper()}: Mapping[str, {kind_of}] = {{{named}}}")
    kinds = ", ".join(f'"{kind}": {kind.upper()}' for kind in ROOMS if kind != "sources")
    tables.append(f'KINDS: Mapping[str, Mapping[str, object]] = {{{kinds}, "sources": {{**SOURCES, **FORMATS}}}}')
    for kind, members in OPTIONAL.items():
        named = ", ".join(f'"{member}": {kind.upper()}_{member.upper()}' for member in members)
        tables.append(f"{kind.upper()}_OPTIONAL: Mapping[str, Mapping[str, object]] = {{{named}}}")
    return "\n".join([HEAD, *imports, "", *tables]) + "\n"


def formatted(source: str) -> str:
    """As the linters want it."""
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    for words in (["check", "--quiet", "--fix", "--select", "I,F401"], ["format", "--quiet"]):
        command = [*ruff, *words, "--stdin-filename", str(TARGET), "-"]
        source = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    return source


if __name__ == "__main__":
    new = formatted(text())
    if not TARGET.is_file() or TARGET.read_text("utf-8") != new:
        TARGET.write_text(new, "utf-8")
        print(f"{TARGET.relative_to(ROOT)} now names all plugins")
