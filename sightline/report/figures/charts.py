"""The few chart shapes that all analyses share.

A chart is defined once, with Altair: interactive in the report, static as SVG and PDF in the run folder. Colours come
from the theme, never from a chart, so that the same chart is right on paper, on a light and on a dark screen. A shape
takes a table with fixed column names, so that an analysis says only what its rows are:

    heatmap            row, column, value            optional: low, high, null, reason, best
    curve_over_depth   depth, value, series          optional: low, high, null, site, reason
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import pandas as pd

PANEL = 150  # pixels, the side of one heat map among several


@dataclass(frozen=True)
class Figure:
    """A chart with its words and the numbers behind it; `name` is the file name, `<analysis>-<name>.svg`."""

    name: str
    title: str
    caption: str
    chart: Any  # an Altair chart of any kind: they share no public type
    table: pd.DataFrame
    # The linked view of a page shows the same: only its files are written.
    linked: bool = field(default=False, kw_only=True)
    # One of several things that a page shows one at a time, such as a measure; empty: always shown.
    choice: str = field(default="", kw_only=True)
    # Of second rank: drawn when a reader opens it.
    folded: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Table:
    """Numbers as a paper prints them, above the figures of a page."""

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]  # the first cell of each is its name


def heatmap(
    cells: pd.DataFrame,
    *,
    row_title: str,
    column_title: str,
    value_title: str,
    rows: Sequence[str | int] | None = None,
    columns: Sequence[str | int] | None = None,
    facet: str | None = None,
    details: Mapping[str, str] | None = None,
    step: float = 18,
    domain: tuple[float, float] = (0, 1),
) -> Any:
    """Cells coloured by a value in `domain`; a missing value is grey and hatched, its reason in the tooltip, never a 0.

    Depth goes right and up. Values outside (an unbiased estimate may be below 0) take the colour of the nearest end and
    keep their number in the tooltip.

    rows, columns  the order on the axes; None sorts what is there
    facet          a column that cuts the cells into panels, each with axes of its own
    details        more columns for the tooltip, each with its title

    Columns `row_stage` and `column_stage`, numbers from 1, draw a line wherever a stage begins; a column `best` draws a
    dot where it is true.
    """
    cells = _with_starts(cells, facet)
    told = {**(details or {}), "row": row_title, "column": column_title}
    angle = 0 if facet or pd.api.types.is_numeric_dtype(cells.column) else -90  # names of layers need room
    heat = _Heat(_numbered(cells, facet), (row_title, rows), (column_title, columns), labelAngle=angle)
    layers = heat.layers(value_title, told, domain)
    layers += heat.stages() if "row_starts" in cells else []
    layers += [heat.dots()] if "best" in cells else []
    chart = alt.layer(*layers).properties(width=alt.Step(step), height=alt.Step(step))
    if facet:
        chart = chart.properties(width=PANEL, height=PANEL)
        chart = chart.facet(_panels(facet), columns=4)
        chart = chart.resolve_scale(x="independent", y="independent")
    return chart.properties(usermeta={"shape": "heatmap"})


def curve_over_depth(
    points: pd.DataFrame,
    *,
    value_title: str,
    depth_title: str,
    series_title: str,
    series: Sequence[str],
    facet: str | None = None,
    reference: tuple[float, str] | None = None,
    domain: tuple[float, float] | None = (0, 1),
    percent: bool = False,
    details: Mapping[str, str] | None = None,
    named: Mapping[int, str] | None = None,
) -> Any:
    """Lines over depth, one for each of `series`, with 95 % bands, the null as dashes, and a line such as chance.

    series      the order of the colours; give all encoders of the run, so that each keeps its colour in every figure
    reference   (value, what it is)
    named       depths that have a name instead of a number, such as a probe behind the last block

    A column `starts` draws a vertical line where it is true: a stage of a residual network begins.
    """
    points = _numbered(points, facet)
    curve = _Curve(points, value_title, depth_title, domain, percent, named or {})
    layers = curve.layers(series_title, series, details or {"site": "site"})
    if "starts" in points:  # of stages
        begin = alt.Chart(points).transform_filter("datum.starts")
        layers.insert(0, begin.mark_rule(style="reference").encode(x=alt.X("depth:Q")))
    if reference is not None:
        once = alt.Chart(points).transform_aggregate(rows="count()")  # one line in each panel, not one for each row
        layers.append(
            once.mark_rule(style="reference").encode(y=alt.datum(reference[0]), tooltip=alt.value(reference[1]))
        )
    chart = alt.layer(*layers).properties(width=420, height=260)
    if facet:
        chart = chart.properties(width=260, height=200).facet(_panels(facet), columns=3)
    return chart.properties(usermeta={"shape": "curve"})


def linked_charts() -> dict[str, Any]:
    """The two charts of the report's linked view, with places (@…) for what is chosen in the page.

    These are the measure (@label), the values that are dark and bright, and the end of its axis. The page marks a cell
    or a depth by the parameters `marked_row` and `marked_column`; dots are where a cell is the `best` of its row.
    """
    sites = {"site_a": "layer of A", "site_b": "layer of B"}
    rows, columns = alt.param(name="marked_row", value=""), alt.param(name="marked_column", value="")
    heat = _Heat(alt.NamedData("cells"), ("@row", ["@rows"]), ("@column", ["@columns"]), labelAngle=-90)
    here = "datum.row == marked_row && datum.column == marked_column"
    marked = heat.base.mark_rect(style="marked", filled=False).transform_filter(here)
    told = {"a": "A", "site_a": sites["site_a"], "b": "B", "site_b": sites["site_b"]}
    cells = heat.layers("@label", told, ("@dark", "@bright"))
    cells += [heat.dots(), marked.encode(x=heat.x, y=heat.y)]
    matrix = alt.layer(*cells).properties(width=alt.Step(18), height=alt.Step(18)).add_params(rows, columns)
    curve = _Curve(alt.NamedData("points"), "@label", "@depth", (0, "@top"))
    ring = curve.base.transform_filter("datum.site == marked_row").mark_point(
        style="marked", filled=False, size=150, shape="circle"
    )
    lines = curve.layers("matched by", ["@series"], sites, palette="ordinal")
    line = alt.layer(*lines, ring.encode(x=curve.x, y=curve.y)).properties(width=420, height=260).add_params(rows)
    shapes = {"heat": (matrix, "heatmap"), "curve": (line, "curve")}
    with alt.theme.enable("none"):
        return {name: chart.properties(usermeta={"shape": shape}).to_dict() for name, (chart, shape) in shapes.items()}


class _Heat:
    """Parts of a heat map: cells with the words of their tooltips, and the axes, each a title and an order."""

    def __init__(
        self,
        cells: pd.DataFrame | alt.NamedData,
        row: tuple[str, Sequence[str | int] | None],
        column: tuple[str, Sequence[str | int] | None],
        **axis: Any,
    ) -> None:
        number = f"format(datum.value, '.4f') + ({_between()} == '—' ? '' : ' (95 % ' + {_between()} + ')')"
        self.base = alt.Chart(cells).transform_calculate(
            shown=f"isValid(datum.value) ? {number} : 'NaN' + (datum.reason ? ': ' + datum.reason : '')",
            chance="isValid(datum.null) ? format(datum.null, '.4f') : '—'",
        )
        x = alt.X("column:O", title=column[0], axis=alt.Axis(labelOverlap=True, labelSeparation=2, **axis))
        y = alt.Y("row:O", title=row[0], axis=alt.Axis(labelOverlap=True, labelSeparation=1))
        self.x = x.scale(domain=list(column[1])) if column[1] is not None else x
        self.y = y.scale(reverse=True, domain=list(row[1])) if row[1] is not None else y.scale(reverse=True)

    def layers(
        self, value_title: str, details: Mapping[str, str], domain: tuple[float | str, float | str]
    ) -> list[alt.Chart]:
        """What is missing, its hatching, and the values."""
        tip = [alt.Tooltip(f"{name}:N", title=title) for name, title in details.items()]
        tip += [alt.Tooltip("shown:N", title=value_title), alt.Tooltip("chance:N", title="shuffled null")]
        colour = alt.Color("value:Q", title=value_title).scale(domain=list(domain), clamp=True, range="heatmap")
        colour = colour.legend(orient="top", direction="horizontal", gradientLength=160, titleAnchor="start", offset=8)
        empty, known = (self.base.transform_filter(f"{no}isValid(datum.value)") for no in ("!", ""))
        return [
            empty.mark_rect(style="missing").encode(x=self.x, y=self.y, tooltip=tip),
            empty.mark_rule(style="hatch").encode(
                x=alt.X("column:O", bandPosition=0),
                x2=alt.X2("column", bandPosition=1),
                y=alt.Y("row:O", bandPosition=0),
                y2=alt.Y2("row", bandPosition=1),
                tooltip=tip,
            ),
            known.mark_rect().encode(x=self.x, y=self.y, color=colour, tooltip=tip),
        ]

    def dots(self) -> Any:
        """Where a cell is the `best` of its row."""
        best = self.base.mark_point(style="best", size=22, filled=True).transform_filter("datum.best")
        return best.encode(x=self.x, y=self.y)

    def stages(self) -> list[alt.Chart]:
        """Lines where a stage begins: below its first row, which is above the rows before it, left of its column."""
        rows, columns = (self.base.transform_filter(f"datum.{axis}_starts") for axis in ("row", "column"))
        return [
            rows.mark_rule(style="stage").encode(y=alt.Y("row:O", bandPosition=1)),
            columns.mark_rule(style="stage").encode(x=alt.X("column:O", bandPosition=0)),
        ]


def _with_starts(cells: pd.DataFrame, facet: str | None) -> pd.DataFrame:
    """Mark one cell of each row and column that is the first of a stage, but for the first stage of a panel."""
    if "row_stage" not in cells:
        return cells
    panels = cells[facet] if facet else pd.Series("", cells.index)
    starts = {}
    for axis, other in (("row", "column"), ("column", "row")):
        stage = cells[f"{axis}_stage"]
        first = cells[axis] == cells[axis].groupby([panels, stage]).transform("min")
        once = cells[other] == cells[other].groupby(panels).transform("min")
        starts[f"{axis}_starts"] = first & once & (stage > stage.groupby(panels).transform("min"))
    return cells.assign(**starts)


class _Curve:
    """Parts of lines over depth: points with their interval in words, and the axes."""

    def __init__(
        self,
        points: pd.DataFrame | alt.NamedData,
        value_title: str,
        depth_title: str,
        domain: tuple[float, float | str] | None,
        percent: bool = False,
        named: Mapping[int, str] | None = None,
    ) -> None:
        self.value_title, self.style = value_title, ".1%" if percent else ".4f"
        self.base = alt.Chart(points).transform_calculate(between=_between(self.style))
        # Over two or three blocks Vega has ticks at halves as well, whatever the least step: these have no label.
        whole = depth_title.startswith(("block", "epoch", "step", "depth", "log2", "window"))
        words = "datum.value % 1 ? '' : format(datum.value, 'd')" if whole else "datum.label"
        for depth, name in (named or {}).items():
            words = f"datum.value == {depth} ? {json.dumps(name)} : ({words})"
        x = alt.X("depth:Q", title=depth_title).axis(grid=False, tickMinStep=1 if whole else 0.1, labelExpr=words)
        self.x = x.scale(nice=False, padding=8)
        scale = alt.Scale(domain=list(domain)) if domain else alt.Scale(zero=False)
        wide = domain is not None and (isinstance(domain[1], str) or domain[1] - domain[0] >= 0.4)
        number = "%" if percent else ".1f" if wide else "~r"
        axis = alt.Axis(format=number, tickCount=6)
        self.y, self.low = (alt.Y(f"{n}:Q", title=value_title, axis=axis, scale=scale) for n in ("value", "low"))

    def layers(
        self, series_title: str, series: Sequence[str], details: Mapping[str, str], palette: str = "category"
    ) -> list[alt.Chart]:
        """Bands, the null, lines and points; `palette` is "category" for encoders, "ordinal" for two kinds of match."""
        tip = [alt.Tooltip("series:N", title=series_title)]
        tip += [alt.Tooltip(f"{name}:N", title=title) for name, title in details.items()]
        tip += [alt.Tooltip("value:Q", title=self.value_title, format=self.style)]
        tip += [alt.Tooltip("between:N", title="95 % interval")]
        colour = alt.Color("series:N", title=series_title).scale(domain=list(series), range=palette)
        colour = colour.legend(orient="right", symbolOpacity=1)
        shape = alt.Shape("series:N", title=series_title).scale(domain=list(series))
        shuffled, known = (self.base.transform_filter(f"isValid(datum.{name})") for name in ("null", "value"))
        x, y = self.x, self.y
        return [
            self.base.mark_area(opacity=0.16).encode(x=x, y=self.low, y2="high:Q", color=colour),
            shuffled.mark_line(style="null").encode(x=x, y=alt.Y("null:Q"), detail="series:N"),
            self.base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
            known.mark_point(size=34, filled=True, opacity=1).encode(x=x, y=y, color=colour, shape=shape, tooltip=tip),
        ]


def _between(style: str = ".4f") -> str:
    """Vega expression: the interval as text, or a dash where there is none."""
    pair = f"format(datum.low, '{style}') + ' – ' + format(datum.high, '{style}')"
    return f"(isValid(datum.low) && isValid(datum.high) ? {pair} : '—')"


def _numbered(data: pd.DataFrame, facet: str | None) -> pd.DataFrame:
    """Number the panels by first appearance: Vega-Lite can order them by a number, or else by the alphabet."""
    return data if facet is None else data.assign(panel=pd.factorize(data[facet])[0])


def _panels(facet: str) -> alt.Facet:
    header = alt.Header(labelLimit=200)  # a long name is cut before it reaches the next panel
    return alt.Facet(f"{facet}:N", title=None, sort=alt.EncodingSortField("panel", op="min"), header=header)
