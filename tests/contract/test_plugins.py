"""Which plugins there are."""

from importlib import import_module
from pathlib import Path

import pytest

import sightline as sl
from sightline.core import plugins

PACKAGE = Path(sl.__file__).parent


@pytest.mark.parametrize("kind", plugins.ROOMS)
def test_plugins_are_the_files_and_folders_of_their_rooms(kind: str) -> None:
    folders = [PACKAGE / room.replace(".", "/") for room in plugins.ROOMS[kind]]
    expected = [
        path.parent.name if path.name == "__init__.py" else path.stem
        for folder in folders
        for path in [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
        if path != folder / "__init__.py"
    ]
    listed = [
        name for room in plugins.ROOMS[kind] for name in getattr(import_module(f"sightline.{room}"), "PLUGINS", ())
    ]
    assert set(listed) <= set(expected)  # of a room that holds other files, too
    assert plugins.built_in(kind) == sorted(listed or expected)
    assert expected
