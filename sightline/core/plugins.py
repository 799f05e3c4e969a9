"""Finds the plugins: every file or folder of a plugin folder is one plugin, and its name is the plugin's.

The classes of a plugin are found by the end of their names (`CLASSES`): `class KnnConfig` is `plugin.Config`.

Other packages bring plugins by entry points of the groups in `GROUPS`, each of which names a module. They are imported
when they are used, and one that cannot be used stands in nobody's way.
"""

import functools
import importlib
import pkgutil
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar, cast

from sightline.core.contract import Reported, fulfil
from sightline.core.errors import InputError, first_line, nearest

# Where the plugins of a kind live, below sightline. Formats are sources that read official checkpoint files.
ROOMS = {
    "analyses": ("analyses",),
    "datasets": ("images.sources",),
    "families": ("encoders.families",),
    "formats": ("encoders.formats",),
    "objectives": ("training.objectives",),
    "sources": ("encoders.sources", "encoders.formats"),
    "studies": ("studies",),
}
# Entry points by which other packages bring plugins of a kind.
GROUPS = {
    "analyses": "sightline.analyses",
    "datasets": "sightline.images",
    "objectives": "sightline.objectives",
    "sources": "sightline.sources",
}
CLASSES = ("Analysis", "Config", "Objective")
SINGULAR = {"datasets": "image source", "analyses": "analysis", "families": "family", "studies": "study"}
# What a page of the report may leave out; others have their defaults beside their contract.
REPORTED: Mapping[str, Any] = {
    "TOPIC": "other",
    "summary": lambda result: [],
    "tables": lambda result: [],
    "key_numbers": lambda result: [],
    "likeness": lambda result: None,
}


Plugin = TypeVar("Plugin")


class PluginWarning(UserWarning):
    """A plugin of another package is left out; the message is a sentence that says why."""


@dataclass(frozen=True)
class Place:
    """Where a plugin comes from."""

    module: str
    entry: EntryPoint | None = None  # of another package

    def load(self, what: str) -> ModuleType:
        """Import it; the code of others may fail in any way."""
        if self.entry is None:
            return importlib.import_module(self.module)
        try:
            module = self.entry.load()
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"{what} of {self.package} cannot be imported ({why}); repair or remove it") from error
        if not isinstance(module, ModuleType):
            raise InputError(f"{what} of {self.package} is {self.module!r}, but the name of a module is expected")
        return module

    @property
    def package(self) -> str:
        """Who brings it, in words."""
        about = None if self.entry is None else self.entry.dist
        return "Sightline" if self.entry is None else "a package" if about is None else f"package {about.name!r}"


def names(kind: str) -> list[str]:
    """Names of the plugins of a kind, whether they can be used or not.

    >>> [name for name in names("datasets") if name in built_in("datasets")]
    ['arrays', 'coco', 'folder', 'huggingface', 'masks', 'parquet', 'shapes']
    """
    return sorted(_places(kind))


def usable(kind: str, load: Callable[[str], Plugin]) -> dict[str, Plugin]:
    """The plugins of a kind as `load` gives them, without those of other packages that fail, of which it warns."""
    plugins = {}
    for name in names(kind):
        try:
            plugins[name] = load(name)
        except InputError as error:
            if name in _own(kind):
                raise
            _warn(str(error))
    return plugins


def built_in(kind: str) -> list[str]:
    """Names of Sightline's own plugins of a kind."""
    return sorted(_own(kind))


def find(kind: str, name: str) -> ModuleType:
    """Import the plugin `name` of a kind; an unknown name is an error that says which ones there are."""
    if name not in names(kind):
        raise InputError(f"There is no {_singular(kind)} {name!r}{nearest(name, names(kind))}")
    plugin = _places(kind)[name].load(f"The {_singular(kind)} {name!r}")
    for role in CLASSES:
        classes = {value for word, value in vars(plugin).items() if word.endswith(role) and _is_own(value, plugin)}
        if len(classes) > 1:
            these = " and ".join(sorted(value.__name__ for value in classes))
            raise InputError(f"The {_singular(kind)} {name!r} has {these}; only one of its classes may end in {role}")
        if classes:
            vars(plugin)[role] = classes.pop()
    return plugin


def _is_own(value: object, plugin: ModuleType) -> bool:
    """Whether it is a class that the plugin defines, in its file or folder."""
    return isinstance(value, type) and f"{value.__module__}.".startswith(f"{plugin.__name__}.")


def held_to(contract: type, kind: str, name: str, defaults: Mapping[str, Any]) -> ModuleType:
    """A plugin with all that its contract asks for; the contracts of the kinds are functions that call this one."""
    plugin = find(kind, name)
    if missing := fulfil(plugin, contract, defaults):
        raise InputError(
            f"The {_singular(kind)} {name!r} of {_places(kind)[name].package} lacks {', '.join(missing)}; "
            "see CONTRIBUTING.md for what it needs"
        )
    return plugin


def module_of(result: str) -> Reported:
    """The module that a result of a run comes from and that knows its page: an analysis or a study."""
    kind = "studies" if result in names("studies") else "analyses"
    return cast(Reported, held_to(Reported, kind, result, REPORTED))


def _singular(kind: str) -> str:
    return SINGULAR.get(kind, kind.removesuffix("s"))


@functools.cache
def _own(kind: str) -> dict[str, Place]:
    rooms = [importlib.import_module(f"sightline.{room}") for room in ROOMS[kind]]
    files = [(room, entry.name) for room in rooms for entry in pkgutil.iter_modules(room.__path__)]
    # A room that holds other files, too, says which are plugins.
    return {name: Place(f"{room.__name__}.{name}") for room, name in files if name in getattr(room, "PLUGINS", (name,))}


@functools.cache
def _places(kind: str) -> dict[str, Place]:
    """Where each plugin of a kind comes from; a name that is taken stays with whom it belonged to before."""
    places = dict(_own(kind))
    entries = entry_points(group=GROUPS[kind]) if kind in GROUPS else ()
    for entry in sorted(entries, key=lambda e: (e.name, "" if e.dist is None else e.dist.name)):
        place, what = Place(entry.value, entry), f"{_singular(kind)} {entry.name!r}"
        if not re.fullmatch(r"[A-Za-z]\w*", entry.name):
            _warn(f"The {what} of {place.package} is left out: a name is made of letters, digits and _")
        elif entry.name not in places:
            places[entry.name] = place
        elif places[entry.name].module != entry.value:  # not the same package, found in two places
            kept = places[entry.name].package
            _warn(f"The {what} of {place.package} is left out: {kept} has one of that name, which is used")
    return places


def _warn(sentence: str) -> None:
    warnings.warn(sentence, PluginWarning, stacklevel=3)
