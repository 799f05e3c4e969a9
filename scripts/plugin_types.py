#!/usr/bin/env python
"""Write tests/support/plugin_types.py, which git leaves out: every plugin with its contract, for mypy.

`scripts/check` runs this. Nothing is imported: the plugins are the files of their rooms, and what a file has is read
off its text. What it may leave out, or calls by a name of its own, is checked against the contract member by member.
"""

from __future__ import annotations

import ast
import pkgutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {  # room → the module of its contract, what a file must have, and the contract with what it may have
    "analyses": ("measure.contract", "AnalysisFile", "AnalysisPlugin"),
    "images/sources": ("images.contract", "ImageSource", ""),
    "encoders/families": ("encoders.contract", "Family", ""),
    "encoders/formats": ("encoders.contract", "Format", ""),
    "encoders/sources": ("encoders.contract", "ModelSource", ""),
    "studies": ("core.contract", "StudyFile", ""),
    "training/objectives": ("training.objective", "ObjectiveFile", "ObjectivePlugin"),
}
HEAD = '# mypy: enable-error-code="assignment, list-item"'  # which tests leave out
CLASSES = ("Analysis", "Config", "Objective")  # a file has them under names that end so


def parsed(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text("utf-8")).body


def plugins(folder: Path) -> list[str]:
    """The files and folders of a room, or those that it names because it holds others, too: its PLUGINS."""
    for node in parsed(folder / "__init__.py"):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PLUGINS":
            return list(ast.literal_eval(node.value))
    return [entry.name for entry in pkgutil.iter_modules([str(folder)])]


def defined(body: list[ast.stmt]) -> set[str]:
    """The names at the top of a file or class, with what a file takes over from others (`from a import b as b`)."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return names


def checks(room: str, module: str, contract: str, optional: str) -> list[str]:
    """The lines for one room: a variable has the type of the member of a contract, and each plugin's is assigned."""
    folder, kind = ROOT / "sightline" / room, room.replace("/", "_")
    names = plugins(folder)
    lines = [f"from sightline.{module} import {part}" for part in (contract, optional) if part]
    lines += [f"from sightline.{room.replace('/', '.')} import {name} as {kind}_{name}" for name in names]
    lines += [f"{kind}: list[{contract}] = [{', '.join(f'{kind}_{name}' for name in names)}]"]
    path = ROOT / "sightline" / f"{module.replace('.', '/')}.py"
    classes = [node for node in parsed(path) if isinstance(node, ast.ClassDef) and node.name == optional]
    members = sorted(defined(classes[0].body)) if classes else []
    lines += [f"def of_{kind}(contract: {optional}) -> None:"] if members else []
    for member in members:
        lines.append(f"    {member.lower()} = contract.{member}")
        for name in names:
            file = one if (one := folder / f"{name}.py").is_file() else folder / name / "__init__.py"
            words = [w for w in defined(parsed(file)) if w == member or (member in CLASSES and w.endswith(member))]
            lines += [f"    {member.lower()} = {kind}_{name}.{word}" for word in words]
    return lines


if __name__ == "__main__":
    lines = [HEAD, *(line for room, contract in ROOMS.items() for line in checks(room, *contract))]
    (ROOT / "tests" / "support" / "plugin_types.py").write_text("\n".join(lines) + "\n", "utf-8")
