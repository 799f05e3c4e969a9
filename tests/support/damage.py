"""JSON with one part missing, or of another kind, wherever that is."""

import copy
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (None, 3, -0.5, True, "text", [], [3], [[]], {}, {"x": 3}, [None], [{}], 10**30, float("inf"))
Way = tuple[Any, ...]


def places(value: Any, way: Way = ()) -> list[Way]:
    """The ways to all parts of a value, itself included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(place for key, part in inner for place in places(part, (*way, key)))]


def damaged(value: Any, way: Way) -> Iterator[Any]:
    """Copies of a value with something else in one place, and with nothing there."""
    for odd in (*ODD, KeyError):
        whole = copy.deepcopy(value)
        part = whole
        for key in way[:-1]:
            part = part[key]
        if odd is KeyError:
            del part[way[-1]]
        else:
            part[way[-1]] = odd
        yield whole
