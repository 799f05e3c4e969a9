"""Finds the plugins: every file or folder of a plugin folder is one plugin, and its name is the plugin's."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

from sightline.core.errors import InputError, nearest

__all__ = ["author", "find", "names"]


# Where the plugins of a kind live, below sightline. Formats are sources that read official checkpoint files.
ROOMS = {
    "analyses": ("analyses",),
    "datasets": ("images.sources",),
    "families": ("encoders.families",),
    "objectives": ("training.objectives",),
    "sources": ("encoders.sources", "encoders.formats"),
}
STUDIES = ("reinit",)  # whose results come from trainings, not from a pass


def names(folder: str) -> list[str]:
    """Names of the plugins of a folder.

    >>> names("datasets")
    ['arrays', 'folder', 'huggingface', 'parquet', 'shapes']
    """
    return sorted(_places(folder))


def find(folder: str, name: str) -> ModuleType:
    """Import the plugin `name` of `folder`; an unknown name is an error that says which ones there are."""
    if name not in names(folder):
        kind = {"analyses": "analysis", "families": "family"}.get(folder, folder.removesuffix("s"))
        raise InputError(f"There is no {kind} {name!r}{nearest(name, names(folder))}")
    return importlib.import_module(_places(folder)[name])


@functools.cache
def _places(folder: str) -> dict[str, str]:
    """The module of each plugin of a kind."""
    rooms = [f"sightline.{room}" for room in ROOMS[folder]]
    paths = {room: importlib.import_module(room).__path__ for room in rooms}
    return {entry.name: f"{room}.{entry.name}" for room in rooms for entry in pkgutil.iter_modules(paths[room])}


def author(result: str) -> ModuleType:
    """The module that a result of a run comes from and that knows its page: an analysis or a study."""
    return importlib.import_module(f"sightline.studies.{result}") if result in STUDIES else find("analyses", result)
