"""What a figure or table of a paper is here: parts with letters, each drawn from the results of a study."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import altair as alt
import pandas as pd

from sightline.report.figures import Figure, pdf_of, specification, svg_of
from sightline.studies.evidence import Evidence

LINE = 110  # characters of a line above a static figure


class Printed(NamedTuple):
    """A number that the paper prints, and the same of the study."""

    what: str
    paper: str
    ours: str


@dataclass(frozen=True)
class Panel:
    """A part of a figure, drawn: a chart, the numbers in it, sentences for the caption, and the paper's numbers."""

    chart: Any  # an Altair chart of any kind
    table: pd.DataFrame
    note: str = ""
    remark: str = ""  # what holds for this part alone
    who: str = ""  # the encoder, where the chart does not name it
    printed: tuple[Printed, ...] = ()


@dataclass(frozen=True)
class Lettered:
    """A lettered part of a figure, and how it is drawn; `draw` raises Missing where results are missing."""

    title: str
    draw: Callable[[Evidence], Panel]


@dataclass(frozen=True)
class PaperFigure:
    """A figure or table as the paper has it: the letters of its parts, their order, how many stand side by side."""

    id: str  # "001 Fig 1"
    title: str
    results: tuple[str, ...]  # of analyses and studies
    roles: str  # who has to be there, in words
    parts: Mapping[str, Lettered]  # by letter; a figure without letters has one, ""
    columns: int = 3
    one_legend: bool = True  # the parts share their colours

    def part(self, letter: str) -> PaperFigure:
        """One part as a figure of its own."""
        title = f"{self.title}: {self.parts[letter].title}"
        return PaperFigure(f"{self.id}{letter}", title, self.results, self.roles, {"": self.parts[letter]})


@dataclass(frozen=True, kw_only=True)
class PaperDrawing(Figure):
    """A figure of a paper drawn from results; as those of analyses, and the paper's numbers beside ours."""

    id: str
    paper: pd.DataFrame | None  # what the paper prints, and the same of the study; None: it prints no numbers
    missing: Mapping[str, str] = field(default_factory=dict)  # letter → what that part would need
    encoders: tuple[str, ...] = ()  # of the study, in the order of their colours

    def svg(self) -> str:
        """With its title and the paper's numbers above it."""
        shown_in_it = "paper" in self.table and bool(self.table.paper.notna().all())  # a table has them in its cells
        rows = () if self.paper is None or shown_in_it else self.paper.itertuples(index=False)
        lines = [f"{what}: {paper} in the paper, here {ours}" for what, paper, ours in rows]
        title = alt.TitleParams(
            textwrap.wrap(f"{self.id}: {self.title}", LINE),
            subtitle=[part for line in lines for part in textwrap.wrap(line, LINE)],
            anchor="start",
            offset=12,
        )
        return svg_of(specification(self.chart.properties(title=title), self.encoders))

    def pdf(self) -> bytes:
        return pdf_of(self.svg())
