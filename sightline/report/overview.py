"""The first page of a report: the table of headline numbers, the map of encoders, a small picture of each analysis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from sightline.report.figures import Figure, KeyNumber, Likeness
from sightline.report.html import clean
from sightline.report.shell import Shown
from sightline.report.standing import Column, Standing, classical_mds

SIDE = 420  # pixels of the map
LETTER = 7.2  # pixels of a letter of its labels
DIGITS = 4  # of numbers that are only drawn


# The table


@dataclass(frozen=True)
class NumberHead:
    """The head of a column."""

    analysis: str
    title: str
    about: str
    over: str
    further: bool  # beyond the first eight: shown when asked for


@dataclass(frozen=True)
class NumberCell:
    """A number as it is written, and the length of its bar."""

    text: str
    ends: str
    value: float | None
    part: float  # of the longest bar
    best: bool
    curve: Sequence[float]


@dataclass(frozen=True)
class NumberTable:
    """Encoders as rows."""

    heads: Sequence[NumberHead]
    rows: Sequence[tuple[str, Sequence[NumberCell]]]


def number_table(standing: Standing) -> NumberTable | None:
    """The table of the terminal, and the columns that it has no room for; None where nothing is declared."""
    both = [*((column, False) for column in standing.columns), *((column, True) for column in standing.others)]
    if not both:
        return None
    heads = [
        NumberHead(column.analysis, column.number.title, column.number.about, column.number.over, further)
        for column, further in both
    ]
    return NumberTable(heads, [(name, [_cell(column, name) for column, _ in both]) for name in standing.encoders])


def _cell(column: Column, name: str) -> NumberCell:
    number = column.number
    curve = [float(f"{value:.{DIGITS}g}") for value in number.curves.get(name, ())]
    return NumberCell(
        number.write(name),
        number.write_ends(name),
        number.values.get(name),
        _part(number, name),
        name in number.winners(),
        curve,
    )


def _part(number: KeyNumber, name: str) -> float:
    """How long a bar is: from 0, or from the lowest value where one is below."""
    if name not in number.values:
        return 0.0
    low, high = min(0.0, *number.values.values()), max(0.0, *number.values.values())
    return (number.values[name] - low) / (high - low) if high > low else 0.0


# Small multiples


@dataclass(frozen=True)
class Multiple:
    """A small picture that opens the page of an analysis; `caption` says what it shows."""

    key: str
    title: str
    question: str
    caption: str


def multiples(
    standing: Standing, pages: Sequence[tuple[str, str, str]]
) -> tuple[list[Multiple], dict[str, dict[str, Any]]]:
    """Of each page (key, title, question) a small picture, and the data that it is drawn from.

    Curves over depth where the first number of an analysis has them, else a dot for each encoder; of the analysis that
    knows who is alike, the matrix of all encoders.
    """
    numbers: dict[str, KeyNumber] = {}
    for column in (*standing.columns, *standing.others):
        numbers.setdefault(column.analysis, column.number)
    small, drawn = [], {}
    for key, title, question in pages:
        number, caption = numbers.get(key), ""
        if number is not None:
            caption = f"{number.about.partition(';')[0]}" + (f", over {number.over}" if number.curves else "")
            drawn[key] = _drawn(number)
        small.append(Multiple(key, title, question, caption))
    return small, drawn


def _drawn(number: KeyNumber) -> dict[str, Any]:
    def short(value: float) -> float:
        return float(f"{value:.{DIGITS}g}")

    return {
        "values": {clean(name): short(value) for name, value in number.values.items()},
        "texts": {clean(name): number.write(name) for name in number.values},
        "curves": {clean(name): [short(value) for value in curve] for name, curve in number.curves.items()},
    }


# The map


def map_figure(likeness: Likeness | None, shown: Sequence[Shown]) -> Figure | None:
    """Encoders in the plane, near where they are alike; None for fewer than three."""
    if likeness is None:
        return None
    known = np.isfinite(likeness.values).sum(1) > 1
    values = likeness.values[np.ix_(known, known)]
    names = [clean(name) for name, there in zip(likeness.encoders, known, strict=True) if there]
    if len(names) < 3 or not np.isfinite(values).all():
        return None
    points, share = classical_mds(np.arccos(np.clip(values, 0, 1)))
    kinds = {encoder.name: encoder.kind for encoder in shown}
    table = pd.DataFrame({"encoder": names, "kind": [kinds.get(name, "") for name in names], "x": points[:, 0]})
    table = table.assign(y=points[:, 1], side=_sides(points, names))
    caption = (
        f"Near each other: alike, by the {likeness.about}. Classical scaling of the angles arccos {likeness.name}; the "
        f"plane keeps {share:.0%} of their squares."
    )
    return Figure("map", "Who is alike", caption, _map_chart(table, [e.name for e in shown]), table)


def _map_chart(table: pd.DataFrame, encoders: Sequence[str]) -> Any:
    (left, right), (bottom, top), height = _frame(table[["x", "y"]].to_numpy())
    x = alt.X("x:Q", title=None).scale(domain=[left, right], nice=False, zero=False).axis(None)
    y = alt.Y("y:Q", title=None).scale(domain=[bottom, top], nice=False, zero=False).axis(None)
    domain = list(dict.fromkeys([*encoders, *table.encoder]))
    colour = alt.Color("encoder:N").scale(domain=domain, range="category").legend(None)
    shape = alt.Shape("encoder:N").scale(domain=domain).legend(None)
    tip = ["encoder:N", *(["kind:N"] if table.kind.any() else [])]
    base = alt.Chart(table).encode(x=x, y=y)
    layers = [base.mark_point(filled=True, size=150, opacity=1).encode(color=colour, shape=shape, tooltip=tip)]
    for side, place in PLACES.items():
        text = base.transform_filter(alt.datum.side == side).mark_text(fontSize=12, fontWeight=600, limit=150, **place)
        layers.append(text.encode(text="encoder:N", color=colour))
    return alt.layer(*layers).properties(width=SIDE, height=height, usermeta={"shape": "map"})


PLACES: dict[str, dict[str, Any]] = {
    "right": {"align": "left", "baseline": "middle", "dx": 11},
    "left": {"align": "right", "baseline": "middle", "dx": -11},
    "above": {"align": "center", "baseline": "bottom", "dy": -11},
    "below": {"align": "center", "baseline": "top", "dy": 11},
}


def _frame(points: np.ndarray[Any, Any]) -> tuple[tuple[float, float], tuple[float, float], int]:
    """What the map shows, from left to right and from bottom to top in the same unit, and its height in pixels."""
    low, high = points.min(0), points.max(0)
    reach = max(float((high - low).max()), 1e-6)
    spans = np.maximum(high - low, [reach, 0.45 * reach]) + 0.3 * reach
    middle = (low + high) / 2
    (left, bottom), (right, top) = middle - spans / 2, middle + spans / 2
    return (float(left), float(right)), (float(bottom), float(top)), round(SIDE * float(spans[1] / spans[0]))


def _sides(points: np.ndarray[Any, Any], names: Sequence[str]) -> list[str]:
    """On which side of its point each name stands: where it covers the fewest others, one after the other."""
    (left, right), (_, top), _ = _frame(points)
    centres = np.stack([points[:, 0] - left, top - points[:, 1]], 1) * SIDE / (right - left)
    taken = [(x - 9, y - 9, x + 9, y + 9) for x, y in centres]
    sides = []
    for (x, y), name in zip(centres, names, strict=True):
        width = min(len(name) * LETTER, 150)
        boxes = {
            "right": (x + 11, y - 8, x + 11 + width, y + 8),
            "left": (x - 11 - width, y - 8, x - 11, y + 8),
            "above": (x - width / 2, y - 27, x + width / 2, y - 11),
            "below": (x - width / 2, y + 11, x + width / 2, y + 27),
        }
        costs = {side: sum(_overlap(box, other) for other in taken) + _outside(box) for side, box in boxes.items()}
        side = min(costs, key=lambda key: costs[key])
        taken.append(boxes[side])
        sides.append(side)
    return sides


Box = tuple[float, float, float, float]


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _outside(box: Box) -> float:
    return 20 * (max(0.0, -box[0]) + max(0.0, box[2] - SIDE))
