"""What has a page in the report: the contract that analyses and studies share, and how a plugin is held to a contract.

A contract is a Protocol whose implementations are modules. What the type checker sees for every plugin of Sightline
(scripts/plugin_types.py), `fulfil` sees for those of other packages when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import xarray as xr

    from sightline.report.figures import Figure


Headline = tuple[str, str, str]  # label, number, detail
# What an analysis asks about (its `TOPIC`), in the order of the report; others come last.
TOPICS: Mapping[str, str] = {
    "alike": "Who is alike?",
    "separable": "What can be separated?",
    "attention": "Where do they look?",
    "structure": "How are features built?",
    "robust": "What do they ignore?",
    "transfer": "What do they become?",
    "other": "And besides?",
}


class Reported(Protocol):
    """What the report says about a result, and how it draws it."""

    TITLE: str
    QUESTION: str
    FORMULA: str
    HOW_TO_READ: str
    SOURCE: str

    @property
    def figures(self) -> Callable[[xr.Dataset], Sequence[Figure]]:
        """Figures from the chart shapes of report/figures."""

    @property
    def headlines(self) -> Callable[[xr.Dataset], Sequence[Headline]]:
        """What there is to tell beside `key_numbers`, for the page and `--verbose`."""


class StudyFile(Reported, Protocol):
    """A file of `studies/`: its results come from trainings, not from a pass, and have the same kind of page."""


def members(contract: type) -> list[str]:
    """The names that a Protocol asks for.

    >>> members(StudyFile)
    ['TITLE', 'QUESTION', 'FORMULA', 'HOW_TO_READ', 'SOURCE', 'figures', 'headlines']
    """
    own = [
        part for part in reversed(contract.__mro__) if part not in (object, Protocol) and "_is_protocol" in vars(part)
    ]
    names = [name for part in own for name in (*vars(part).get("__annotations__", ()), *vars(part))]
    return list(dict.fromkeys(name for name in names if not name.startswith("_")))


def fulfil(plugin: Any, contract: type, defaults: Mapping[str, Any]) -> list[str]:
    """Give a plugin the defaults of what it leaves out; returns what it may not leave out and has not."""
    for name, value in defaults.items():
        vars(plugin).setdefault(name, value)
    return [name for name in members(contract) if name not in vars(plugin)]
