"""The last page: everything that is needed to reproduce the numbers of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sightline.core.run_folder import Run

Facts = Mapping[str, object]  # name → a JSON value


@dataclass(frozen=True)
class Provenance:
    """What the page says."""

    template: ClassVar[str] = "provenance.html"
    key: ClassVar[str] = "provenance"
    title: ClassVar[str] = "Provenance"
    topic: ClassVar[str] = ""
    command: str
    parts: Sequence[tuple[str, Facts]]  # headings and what stands below
    encoders: Sequence[Facts]  # in what they differ, with the same names
    common: Facts  # what all encoders share
    skipped: Sequence[Sequence[str]]  # images that could not be read, and why


def provenance_page(run: Run) -> Provenance:
    request = dict(run.request)
    skipped = request.pop("skipped", None) or []
    command = request.pop("command", None) or ""
    encoders, common = _shared(request.pop("encoders", []))
    request["analyses"] = {name: asked(settings) for name, settings in request.get("analyses", {}).items()}
    grouped = {key.replace("_", " ").capitalize(): value for key, value in request.items() if isinstance(value, dict)}
    single = {key: value for key, value in request.items() if not isinstance(value, dict)}
    return Provenance(
        command=" ".join(map(str, command)) if isinstance(command, (list, tuple)) else command,
        parts=[("Run", {"folder": run.path.name if run.path else None} | single), *grouped.items()],
        encoders=encoders,
        common=common,
        skipped=[(pair[0], pair[-1]) for pair in skipped if pair],
    )


def asked(settings: Mapping[str, Any]) -> dict[str, object]:
    """Settings of an analysis, flat, with the number of sites in place of their names, once where all have as many.

    >>> asked({"config": {"k": 20}, "splits": ["test"], "sites": {"dino": ["block.0", "block.1"]}})
    {'k': 20, 'splits': ['test'], 'number of sites': 2}
    """
    flat: dict[str, object] = dict(settings.get("config") or {})
    flat |= {key: value for key, value in settings.items() if key not in {"config", "sites", "name"}}
    if isinstance(settings.get("sites"), Mapping):
        numbers = {name: len(sites) for name, sites in settings["sites"].items()}
        flat["number of sites"] = numbers if len(set(numbers.values())) > 1 else next(iter(numbers.values()), 0)
    return flat


def _shared(entries: Sequence[Facts]) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Entries without what is the same in all of them, and that; a name is never shared.

    >>> _shared([{"name": "a", "depth": 12, "heads": 6}, {"name": "b", "depth": 12}])
    ([{'name': 'a', 'heads': 6}, {'name': 'b', 'heads': None}], {'depth': 12})
    """
    keys = list(dict.fromkeys(key for entry in entries for key in entry))
    common = {
        key: entries[0][key]
        for key in keys
        if key != "name" and all(key in entry and entry[key] == entries[0][key] for entry in entries)
    }
    return [{key: entry.get(key) for key in keys if key not in common} for entry in entries], common
