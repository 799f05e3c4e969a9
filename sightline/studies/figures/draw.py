"""From the name of a figure to its drawing."""

from __future__ import annotations

import functools
import itertools
import re
import textwrap
from collections.abc import Mapping

import altair as alt
import pandas as pd

from sightline.core.errors import InputError, nearest
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.figures import grigg, park, shekhar, shekhar_workshop
from sightline.studies.figures.contract import Lettered, Panel, PaperDrawing, PaperFigure
from sightline.studies.figures.forms import SIDE

SAME_AS = {"002": "000"}  # two versions of one paper
SIDES = {1: ("left",), 2: ("left", "right"), 3: ("left", "middle", "right")}
WRITTEN = re.compile(
    r"(\d{3})\s*,?\s*(fig|tab)[a-z.]*\s*((?:[a-g]\.)?\d+)\s*([a-h]?)\s*(left|middle|right)?", re.IGNORECASE
)


@functools.cache
def all_figures() -> Mapping[str, PaperFigure]:
    """Every figure and table that is a measurement, by its name, in the order of the papers."""
    files = (shekhar_workshop, shekhar, park, grigg)
    return {figure.id: figure for figure in itertools.chain.from_iterable(file.FIGURES for file in files)}


def find_figure(name: str) -> PaperFigure:
    """The figure of a name, as papers are cited: "001 Fig 1b", "003 Fig E.2", "004 Figure 2 left", "001 Table 6".

    >>> find_figure("002 fig. 1").id, find_figure("004 Fig 2 left").id, find_figure("001 table 2b").id
    ('000 Fig 1', '004 Fig 2a', '001 Table 2b')
    """
    figures = all_figures()
    if (parts := WRITTEN.fullmatch(name.strip())) is None:
        raise InputError(
            f"{name!r} names no figure; write paper, figure or table, number and part, such as '001 Fig 1b'"
        )
    paper, kind, number, letter, side = parts.groups()
    whole = f"{SAME_AS.get(paper, paper)} {'Fig' if kind.lower() == 'fig' else 'Table'} {number.upper()}"
    letter = letter.lower()
    if f"{whole}{letter}" in figures and not side:
        return figures[f"{whole}{letter}"]
    if whole not in figures:
        raise InputError(f"There is no measurement {name!r}{nearest(whole, figures)}")
    letters = list(figures[whole].parts)
    if side:
        sides = dict(zip(SIDES.get(len(letters), ()), letters, strict=False))
        letter = sides.get(side.lower(), side)
    if letter not in letters:
        named = list(filter(None, letters))
        told = f"part {letter!r}{nearest(letter, named)}" if named else "parts"
        raise InputError(f"{whole} has no {told}")
    return figures[whole].part(letter)


def draw(name: str, evidence: Evidence) -> PaperDrawing:
    """Draw a figure or a part of it from results; Missing says what would be needed if nothing of it can be drawn."""
    figure, panels, missing = find_figure(name), dict[str, Panel](), dict[str, str]()
    for letter, part in figure.parts.items():
        try:
            panels[letter] = part.draw(evidence)
        except Missing as error:
            missing[letter] = error.needs
    if not panels:
        # Parts may need the same of a pair of encoders, in either order.
        raise Missing("; ".join({frozenset(needs.split()): needs for needs in missing.values()}.values()))
    printed = [row for panel in panels.values() for row in panel.printed]
    return PaperDrawing(
        name=re.sub(r"\W+", "-", figure.id.lower()),
        title=figure.title,
        caption=_caption(figure, panels, missing),
        chart=_chart(figure, panels),
        table=pd.concat([panel.table.assign(part=letter) for letter, panel in panels.items()], ignore_index=True),
        id=figure.id,
        paper=pd.DataFrame(printed, columns=["number", "in the paper", "here"]) if printed else None,
        missing=missing,
        encoders=tuple(dict.fromkeys(role.name for role in evidence.roles)),
    )


def _caption(figure: PaperFigure, panels: Mapping[str, Panel], missing: Mapping[str, str]) -> str:
    notes = dict.fromkeys(text for panel in panels.values() for text in (panel.note, panel.remark) if text)
    gaps = [f"({letter}) {figure.parts[letter].title} is not drawn: it needs {why}." for letter, why in missing.items()]
    return " ".join([*notes, *gaps])


def _chart(figure: PaperFigure, panels: Mapping[str, Panel]) -> alt.ConcatChart:
    """Parts side by side, each under its letter and title."""
    charts = [_titled(panel, letter, figure.parts[letter]) for letter, panel in panels.items()]
    legend = "shared" if figure.one_legend else "independent"
    return alt.concat(*charts, columns=figure.columns, resolve=alt.Resolve(scale={"color": legend, "shape": legend}))


def _titled(panel: Panel, letter: str, part: Lettered) -> alt.ChartType:
    chart = panel.chart.copy(deep=False)
    chart.usermeta = alt.Undefined  # only a whole chart may have it
    title = part.title + (f": {panel.who}" if panel.who else "")
    words = f"({letter}) {title}" if letter else title
    return chart.properties(title=textwrap.wrap(words, _letters(chart), break_on_hyphens=False))


def _letters(chart: alt.ChartType) -> int:
    """How many letters of a title fit above a chart."""
    if not isinstance(chart, alt.LayerChart):
        return 60
    return max(24, int((chart.width if isinstance(chart.width, int) else SIDE) / 6.5))
