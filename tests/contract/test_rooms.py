"""Which room may import which: imports go down only, lazy ones too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sightline as sl

PACKAGE = Path(sl.__file__).parent
BELOW_ANALYSES = "core images encoders measure report.figures"
BELOW_TRANSFER = "core images encoders measure.estimators training"
ALLOWED = {
    "core": "",
    "images": "core",
    "encoders": "core images",
    "measure": "core images encoders",
    "analyses": BELOW_ANALYSES,
    "training": "core images encoders measure.estimators",
    "transfer": BELOW_TRANSFER,
    "generation": f"{BELOW_TRANSFER} measure.feature_cache measure.pooled",
    "studies": f"{BELOW_ANALYSES} analyses training transfer generation",
    "report": "core",
}


def imports_of(path: Path) -> Iterator[str]:
    """Modules of Sightline that a file imports anywhere, but not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = PACKAGE.parent / node.module.replace(".", "/") / alias.name
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_downwards_only(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__", "api", "cli"):  # they may know everyone
        return
    for imported in imports_of(path):
        if imported.startswith("sightline."):
            target = imported.removeprefix("sightline.")
            allowed = [room, *ALLOWED[room].split()]
            assert any(within(target, place) for place in allowed), f"{path.relative_to(PACKAGE)} imports {imported}"


@pytest.mark.processes
def test_loading_an_encoder_loads_nothing_that_measures_trains_or_draws() -> None:
    script = (
        "import sys, sightline as sl; sl.load_encoder('timm:resnet18@random?size=32'); "
        "print(*(name for name in sys.modules if name.startswith('sightline.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    loaded = [name.removeprefix("sightline.") for name in done.stdout.split()]
    rooms = {name.partition(".")[0] for name in loaded}
    assert rooms == {"core", "images", "encoders"}
    intervals = ("core.contrast", "core.groups", "core.selection", "core.results")
    unneeded = (*intervals, "core.run_folder", "core.folders")
    assert [name for name in loaded if any(within(name, other) for other in unneeded)] == []


LISTED = (
    "core core/groups images images/augment encoders encoders/files encoders/layouts encoders/modules measure "
    "measure/estimators training transfer studies report cli"
)  # the other folders hold one file or folder per plugin


@pytest.mark.parametrize("room", LISTED.split())
def test_a_room_names_its_files(room: str) -> None:
    """One line for each, in the docstring of its `__init__.py`, and none for a file that is gone."""
    folder = PACKAGE / room
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    _, _, lines = docstring.partition("\n\n")
    there = {path.stem for path in folder.glob("*.py")} | {
        f"{path.name}/" for path in folder.iterdir() if path.is_dir()
    }
    assert {line.split()[0] for line in lines.splitlines() if line} == there - {"__init__", "__pycache__/"}
