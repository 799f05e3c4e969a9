"""Finds the plugins: every file of a plugin folder is one plugin, its file name is its name."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from sightline.errors import InputError, nearest

__all__ = ["author", "find", "names"]

STUDIES = ("reinit",)  # modules of Sightline whose results come from trainings, not from a pass


def names(folder: str) -> list[str]:
    """Names of the plugins of a folder.

    >>> names("datasets")
    ['arrays', 'folder', 'huggingface', 'parquet', 'shapes']
    """
    return sorted(entry.name for entry in pkgutil.iter_modules([str(Path(__file__).parent / folder)]))


def find(folder: str, name: str) -> ModuleType:
    """Import the plugin `name` of `folder`; an unknown name is an error that says which ones there are."""
    if name not in names(folder):
        kind = {"analyses": "analysis", "families": "family"}.get(folder, folder.removesuffix("s"))
        raise InputError(f"There is no {kind} {name!r}{nearest(name, names(folder))}")
    return importlib.import_module(f"sightline.{folder}.{name}")


def author(result: str) -> ModuleType:
    """The module that a result of a run comes from and that knows its page: an analysis or a study."""
    return importlib.import_module(f"sightline.{result}") if result in STUDIES else find("analyses", result)
