"""The look of every figure, and the few chart shapes that all analyses share.

A chart is defined once, with Altair: interactive in the report, static as SVG and PDF in the run folder. Colours come
from the theme, never from a chart, so that the same chart is right on paper, on a light and on a dark screen. A shape
takes a table with fixed column names, so that an analysis says only what its rows are:

    heatmap            row, column, value            optional: low, high, null, reason
    curve_over_depth   depth, value, series          optional: low, high, null, site, reason
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from sightline.core.results import ABSENT, ENDS, interval

__all__ = [
    "DARK",
    "LIGHT",
    "Figure",
    "Table",
    "accuracy_table",
    "curve_over_depth",
    "curve_table",
    "depth_figure",
    "figure_over_depth",
    "heatmap",
    "interval_of",
    "linked_charts",
    "same_colours",
    "theme",
    "with_depth",
]


def accuracy_table(result: xr.Dataset) -> pd.DataFrame:
    """One row for each accuracy that is known, with its interval."""
    names = [f"accuracy{end}" for end in ENDS]
    return result[names].to_dataframe().reset_index().dropna(subset="accuracy")


def figure_over_depth(
    result: xr.Dataset, title: str, caption: str, reference: str, lowest: float = 0.0
) -> list[Figure]:
    """Accuracy over the blocks: a panel for each feature, a colour for each encoder, chance as a line."""

    table = accuracy_table(result.sel(site=result.layer_type.isin(["block", "head"])))
    if table.empty:  # only other sites were chosen: the table of the report has them
        return []
    points, depth_title = with_depth(table)
    names = {"encoder": "series", "accuracy": "value", "accuracy_low": "low", "accuracy_high": "high"}
    points = points.rename(columns=names)
    chart = curve_over_depth(
        points,
        value_title=title,
        depth_title=depth_title,
        series_title="encoder",
        series=[str(name) for name in result.encoder.values],
        facet="feature",
        reference=(float(result.attrs["chance"]), reference),
        percent=True,
        domain=(min(lowest, math.floor(10 * points.low.min()) / 10), min(1.0, math.ceil(10 * points.high.max()) / 10)),
    )
    return [Figure("depth", f"{title} over depth", caption, chart, table)]


# Helvetica comes first: its metrics are those of Arial and Liberation Sans, and of the text in the PDF files.
FONT = '"Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif'

# Okabe–Ito (safe for colour-blind readers) goes first, without its yellow and black; its order keeps neighbours apart.
# The dark colours are the same hues, lighter.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#c0619a", "#d99500", "#3fa2dc", "#7a1f4f", "#8a8a1f", "#4b3aa8", "#7d5a3c")
DARK = ("#5aaeea", "#f5894a", "#35c79c", "#e79cc8", "#f3ba45", "#9ad6fa", "#d77aa2", "#cccc66", "#a394f0", "#cfa785")

PANEL = 150  # pixels, the side of one heat map among several


@dataclass(frozen=True)
class Figure:
    """A chart with its words and the numbers behind it; `name` is the file name, `<analysis>-<name>.svg`."""

    name: str
    title: str
    caption: str
    chart: Any  # an Altair chart of any kind: they share no public type
    table: pd.DataFrame


@dataclass(frozen=True)
class Table:
    """Numbers as a paper prints them, above the figures of a page."""

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]  # the first cell of each is its name


def theme(dark: bool = False) -> dict[str, Any]:
    """Vega-Lite configuration of the light (default) or the dark look.

    >>> theme()["range"]["category"][0], theme(dark=True)["range"]["category"][0]
    ('#0072b2', '#5aaeea')
    """
    ink, soft, line, missing = (
        ("#e8eaed", "#a5abb5", "#3a404a", "#343a44") if dark else ("#1c2026", "#5a626e", "#d9dde3", "#e4e7eb")
    )
    accent = ("#f5894a", "#5aaeea") if dark else ("#d55e00", "#0072b2")
    words = {"labelColor": soft, "titleColor": ink, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": 600}
    return {
        "font": FONT,
        "background": None if dark else "#ffffff",
        "padding": 4,
        "axis": words
        | {
            "domainColor": line,
            "tickColor": line,
            "gridColor": line,
            "tickSize": 4,
            "labelPadding": 4,
            "titlePadding": 8,
        },
        "axisBand": {"grid": False, "ticks": False, "domain": False},
        "legend": words | {"gradientThickness": 10, "symbolStrokeWidth": 2, "labelLimit": 220, "titleLimit": 220},
        "header": words | {"labelColor": ink, "labelFontWeight": 600, "labelLimit": 220},
        "title": {"color": ink, "fontSize": 13, "anchor": "start"},
        "view": {"stroke": None},
        "text": {"color": ink},
        "range": {
            "category": list(DARK if dark else LIGHT),
            "ordinal": list(accent),
            "heatmap": {"scheme": "viridis"},
        },
        "style": {
            "missing": {"color": missing},
            "hatch": {"color": soft, "strokeWidth": 0.8},
            "null": {"color": soft, "strokeDash": [3, 3], "strokeWidth": 1.2},
            "reference": {"color": soft, "strokeDash": [6, 3], "strokeWidth": 1.2},
            "marked": {"color": accent[0], "strokeWidth": 2.5},
            "best": {"color": "#ffffff", "stroke": "#1c2026", "strokeWidth": 0.8},
        },
    }


def with_depth(points: pd.DataFrame, encoder: str = "encoder") -> tuple[pd.DataFrame, str]:
    """Points (with columns `encoder`, `site`, `block`) and their `depth`, and the title of that axis.

    Encoders of the same depth are drawn over their block numbers; of different depths over the relative depth, first
    block 0 and last block 1, since block 6 is the middle of one and the end of the other. The blocks of a decoder,
    and the layers of a head, follow behind, from 1 to 2.

    >>> table = pd.DataFrame({"encoder": list("aaab"), "site": "block", "block": [0, 1, 2, 0]})
    >>> with_depth(table)[0].depth.tolist(), with_depth(table)[1], with_depth(table[:3])[1]
    ([0.0, 0.5, 1.0, 0.0], 'relative depth', 'block')
    """
    heads, later = points.site.str.startswith("head."), points.site.str.startswith(("decoder.", "head."))
    deepest = points.block[~later].max() if not later.all() else -1
    layer = points.site.str.extract(r"^head\.(\d+)$")[0].fillna("0").astype(int)
    places = points.block.where(~heads, deepest + 1 + layer)
    blocks: dict[tuple[str, bool], set[int]] = {}
    for name, behind, block in zip(points[encoder], later, places, strict=True):
        blocks.setdefault((name, behind), set()).add(block)
    if len({frozenset(own) for (_, behind), own in blocks.items() if not behind}) <= 1:
        return points.assign(depth=places), "block"

    def relative(name: str, behind: bool, block: int) -> float:
        own = sorted(blocks[name, behind])
        place = own.index(block)
        return 1 + (place + 1) / len(own) if behind else place / max(len(own) - 1, 1)

    depth = [relative(*row) for row in zip(points[encoder], later, places, strict=True)]
    return points.assign(depth=depth), "relative depth"


def heatmap(
    cells: pd.DataFrame | alt.NamedData,
    *,
    row_title: str,
    column_title: str,
    value_title: str,
    rows: Sequence[str | int] | None = None,
    columns: Sequence[str | int] | None = None,
    facet: str | None = None,
    details: Mapping[str, str] | None = None,
    linked: bool = False,
    step: float = 18,
    domain: tuple[float, float] = (0, 1),
) -> Any:
    """Cells coloured by a value in `domain`; a missing value is grey and hatched, its reason in the tooltip, never a 0.

    Depth goes right and up. Values outside (an unbiased estimate may be below 0) take the colour of the nearest end and
    keep their number in the tooltip.

    rows, columns  the order on the axes; None sorts what is there
    facet          a column that cuts the cells into panels, each with axes of its own
    details        more columns for the tooltip, each with its title
    linked         adds what the report needs to mark a cell from elsewhere, and dots where the column `best` is true
    """
    cells = _numbered(cells, facet)
    x = alt.X(
        "column:O",
        title=column_title,
        axis=alt.Axis(labelOverlap=True, labelSeparation=2, labelAngle=0 if facet else -90),
    )
    y = alt.Y("row:O", title=row_title, axis=alt.Axis(labelOverlap=True, labelSeparation=1))
    x = x.scale(domain=list(columns)) if columns is not None else x
    y = y.scale(reverse=True, domain=list(rows)) if rows is not None else y.scale(reverse=True)
    number = f"format(datum.value, '.4f') + ({_between()} == '—' ? '' : ' (95 % ' + {_between()} + ')')"
    tip = [alt.Tooltip(f"{name}:N", title=title) for name, title in (details or {}).items()]
    tip += [alt.Tooltip("row:N", title=row_title), alt.Tooltip("column:N", title=column_title)] if not linked else []
    tip += [alt.Tooltip("shown:N", title=value_title), alt.Tooltip("chance:N", title="shuffled null")]
    colour = alt.Color("value:Q", title=value_title).scale(domain=list(domain), clamp=True, range="heatmap")
    colour = colour.legend(orient="top", direction="horizontal", gradientLength=160, titleAnchor="start", offset=8)
    base = alt.Chart(cells).transform_calculate(
        shown=f"isValid(datum.value) ? {number} : 'NaN' + (datum.reason ? ': ' + datum.reason : '')",
        chance="isValid(datum.null) ? format(datum.null, '.4f') : '—'",
    )
    empty = "!isValid(datum.value)"
    layers = [
        base.mark_rect(style="missing").transform_filter(empty).encode(x=x, y=y, tooltip=tip),
        base.mark_rule(style="hatch")
        .transform_filter(empty)
        .encode(
            x=alt.X("column:O", bandPosition=0), x2=alt.X2("column", bandPosition=1),
            y=alt.Y("row:O", bandPosition=0), y2=alt.Y2("row", bandPosition=1), tooltip=tip,
        ),
        base.mark_rect().transform_filter("isValid(datum.value)").encode(x=x, y=y, color=colour, tooltip=tip),
    ]  # fmt: skip
    if linked:
        layers.append(
            base.mark_point(style="best", size=22, filled=True).transform_filter("datum.best").encode(x=x, y=y)
        )
        here = "datum.row == marked_row && datum.column == marked_column"
        layers.append(base.mark_rect(style="marked", filled=False).transform_filter(here).encode(x=x, y=y))
    chart = alt.layer(*layers).properties(width=alt.Step(step), height=alt.Step(step))
    if linked:
        chart = chart.add_params(*(alt.param(name=f"marked_{axis}", value="") for axis in ("row", "column")))
    if facet:
        chart = chart.properties(width=PANEL, height=PANEL)
        chart = chart.facet(_panels(facet), columns=4)
        chart = chart.resolve_scale(x="independent", y="independent")
    return chart.properties(usermeta={"shape": "heatmap"})


def curve_over_depth(
    points: pd.DataFrame | alt.NamedData,
    *,
    value_title: str,
    depth_title: str,
    series_title: str,
    series: Sequence[str],
    facet: str | None = None,
    reference: tuple[float, str] | None = None,
    domain: tuple[float, float] | None = (0, 1),
    percent: bool = False,
    palette: str = "category",
    details: Mapping[str, str] | None = None,
    linked: bool = False,
) -> Any:
    """Lines over depth, one for each of `series`, with 95 % bands, the null as dashes, and a line such as chance.

    series      the order of the colours; give all encoders of the run, so that each keeps its colour in every figure
    reference   (value, what it is)
    palette     "category" for encoders, "ordinal" for the two kinds of match of the linked view
    linked      adds what the report needs to mark a depth from elsewhere
    """
    points = _numbered(points, facet)
    style = ".1%" if percent else ".4f"
    tip = [alt.Tooltip("series:N", title=series_title)]
    tip += [alt.Tooltip(f"{name}:N", title=title) for name, title in (details or {"site": "site"}).items()]
    tip += [alt.Tooltip("value:Q", title=value_title, format=style), alt.Tooltip("between:N", title="95 % interval")]
    base = alt.Chart(points).transform_calculate(between=_between(style))
    # Over two or three blocks Vega has ticks at halves as well, whatever the least step: these have no label.
    whole = depth_title.startswith(("block", "epoch", "depth"))
    words = "datum.value % 1 ? '' : format(datum.value, 'd')" if whole else "datum.label"
    x = alt.X("depth:Q", title=depth_title).axis(grid=False, tickMinStep=1 if whole else 0.1, labelExpr=words)
    x = x.scale(nice=False, padding=8)
    scale = alt.Scale(domain=list(domain)) if domain else alt.Scale(zero=False)
    axis = alt.Axis(format="%" if percent else ".1f" if domain and domain[1] - domain[0] >= 0.4 else "~r", tickCount=6)
    y, low = (alt.Y(f"{name}:Q", title=value_title, axis=axis, scale=scale) for name in ("value", "low"))
    colour = alt.Color("series:N", title=series_title).scale(domain=list(series), range=palette)
    colour = colour.legend(orient="bottom", columns=2, symbolOpacity=1)
    shape = alt.Shape("series:N", title=series_title).scale(domain=list(series))
    shuffled, known = base.transform_filter("isValid(datum.null)"), base.transform_filter("isValid(datum.value)")
    layers = [
        base.mark_area(opacity=0.16).encode(x=x, y=low, y2="high:Q", color=colour),
        shuffled.mark_line(style="null").encode(x=x, y=alt.Y("null:Q"), detail="series:N"),
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        known.mark_point(size=34, filled=True, opacity=1).encode(x=x, y=y, color=colour, shape=shape, tooltip=tip),
    ]
    if reference is not None:
        once = alt.Chart(points).transform_aggregate(rows="count()")  # one line in each panel, not one for each row
        layers.append(
            once.mark_rule(style="reference").encode(y=alt.datum(reference[0]), tooltip=alt.value(reference[1]))
        )
    if linked:
        here = base.transform_filter("datum.site == marked_row")
        layers.append(here.mark_point(style="marked", filled=False, size=150, shape="circle").encode(x=x, y=y))
    chart = alt.layer(*layers).properties(width=420, height=260)
    if linked:
        chart = chart.add_params(alt.param(name="marked_row", value=""))
    if facet:
        chart = chart.properties(width=260, height=200).facet(_panels(facet), columns=3)
    return chart.properties(usermeta={"shape": "curve"})


def depth_figure(
    panels: Sequence[tuple[str, xr.Dataset, str]],
    name: str,
    title: str,
    value_title: str,
    caption: str,
    reference: tuple[float, str] | None = None,
) -> Figure | None:
    """Numbers over the blocks that were passed, embedding first, a panel for each (label, result, variable).

    The interval is in the variables `_low` and `_high`, if there is one; a variable whose name ends in `reason` says
    which encoder has no such site. A block that has no number keeps its place in the depth.
    """
    parts = []
    for label, result, variable in panels:
        reason = next(str(name) for name in result.data_vars if str(name).endswith("reason"))
        own = {variable: "value", f"{variable}_low": "low", f"{variable}_high": "high", reason: "reason"}
        part = result[[v for v in own if v in result]].to_dataframe().reset_index().rename(columns=own)
        parts.append(part[part.layer_type.isin(["embed", "block"]) & (part.reason != ABSENT)].assign(what=label))
    points = pd.concat(parts, ignore_index=True)
    if not points.value.notna().any():
        return None
    points, axis = with_depth(points.assign(block=points.block + 1))
    table = (
        points.dropna(subset="value")
        .drop(columns=["block", "layer_type", "reason"])
        .rename(columns={"encoder": "series"})
    )
    chart = curve_over_depth(
        table,
        value_title=value_title,
        depth_title="blocks passed" if axis == "block" else axis,
        series_title="encoder",
        series=[str(encoder) for encoder in panels[0][1].encoder.values],
        facet="what",
        domain=None,
        reference=reference,
    )
    return Figure(name, title, caption, chart, table)


def linked_charts(label: str) -> dict[str, Any]:
    """The two charts of the report's linked view, with places (@…) for what is chosen in the page."""
    heat = heatmap(
        alt.NamedData("cells"),
        row_title="@row",
        column_title="@column",
        value_title=label,
        rows=["@rows"],
        columns=["@columns"],
        details={"a": "A", "site_a": "layer of A", "b": "B", "site_b": "layer of B"},
        linked=True,
    )
    curve = curve_over_depth(
        alt.NamedData("points"),
        value_title=label,
        depth_title="@depth",
        series_title="matched by",
        series=["@series"],
        palette="ordinal",
        details={"site_a": "layer of A", "site_b": "layer of B"},
        linked=True,
    )
    with alt.theme.enable("none"):
        return {"heat": heat.to_dict(), "curve": curve.to_dict()}


def same_colours(spec: dict[str, Any], encoders: Sequence[str]) -> None:
    """Give every colour and shape scale whose domain is a part of `encoders` the whole of it: colours never shift.

    >>> spec = {"color": {"field": "series", "scale": {"domain": ["b"]}}}
    >>> same_colours(spec, ["a", "b"]); spec["color"]["scale"]["domain"], spec["color"]["legend"]["values"]
    (['a', 'b'], ['b'])
    """
    for key, value in spec.items():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict) and key != "datasets":
                same_colours(inner, encoders)
        domain = value.get("scale", {}).get("domain") if key in {"color", "shape"} and isinstance(value, dict) else None
        if isinstance(domain, list) and domain and set(map(str, domain)) < set(encoders):
            value["scale"]["domain"] = list(encoders)
            value["legend"] = (value.get("legend") or {}) | {"values": domain}


def _between(style: str = ".4f") -> str:
    """Vega expression: the interval as text, or a dash where there is none."""
    pair = f"format(datum.low, '{style}') + ' – ' + format(datum.high, '{style}')"
    return f"(isValid(datum.low) && isValid(datum.high) ? {pair} : '—')"


def _numbered(data: pd.DataFrame | alt.NamedData, facet: str | None) -> pd.DataFrame | alt.NamedData:
    """Number the panels by first appearance: Vega-Lite can order them by a number, or else by the alphabet."""
    if facet is None or not isinstance(data, pd.DataFrame):
        return data
    return data.assign(panel=pd.factorize(data[facet])[0])


def _panels(facet: str) -> alt.Facet:
    header = alt.Header(labelLimit=200)  # a long name is cut before it reaches the next panel
    return alt.Facet(f"{facet}:N", title=None, sort=alt.EncodingSortField("panel", op="min"), header=header)


def curve_table(result: xr.Dataset, name: str) -> pd.DataFrame:
    """Rows for `curve_over_depth` of a variable over encoder, site and others; `attrs["depth"]` names the axis."""
    columns = {name: "value", f"{name}_low": "low", f"{name}_high": "high", f"{name}_null": "null"}
    blocks = result[list(columns)].sel(site=result.layer_type.isin(["block", "head"]))
    table = blocks.to_dataframe().reset_index().dropna(subset=name).rename(columns=columns | {"encoder": "series"})
    table, title = with_depth(table, "series")
    table.attrs["depth"] = title
    return table


def interval_of(row: Any) -> str:
    """How a headline ends: the 95 % interval of a row with `low` and `high`, or nothing if there is none."""
    return f", {interval(row.low, row.high, '.2f')}" if np.isfinite([row.low, row.high]).all() else ""
