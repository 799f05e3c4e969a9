"""The shapes that the papers' figures share, each from results to a panel."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr

from sightline.analyses.cka.charts import CKA, pair_cells
from sightline.core import plugins
from sightline.core.results import ENDS, of_decoder, outside_decoder
from sightline.report.figures import curve_over_depth, heatmap, over_depth, picture_grid, picture_url
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.figures.contract import Panel, Printed

SIDE = 156  # pixels of a map of layers
CURVE = {"width": 300, "height": 210}
PICTURE = 52  # pixels of a small picture
LEAST = 110  # pixels of a column of a table
MINUS = re.compile(r"(?<!\w)-(?=\d)")
MAPS_SHOWN = 4  # layers of an encoder whose attention is shown, from the first to the last


# Results


def part_of(result: xr.Dataset, encoders: Sequence[str], decoder: bool = False) -> xr.Dataset:
    """A result of some encoders alone, in this order; without the layers of decoders unless they are wanted."""
    dims = [dim for dim in ("encoder", "encoder_a", "encoder_b") if dim in result.dims]
    part = result.sel({dim: list(encoders) for dim in dims})
    if decoder or "site" not in part.dims:
        return part
    return part.sel(site=outside_decoder(part.site.values))


def analysed(
    evidence: Evidence, result: str, figure: str, encoders: Sequence[str], *, decoder: bool = False, **select: Any
) -> Panel:
    """A figure of the page that a result has in the report, of some encoders; `select` as in xarray's `sel`."""
    table = part_of(evidence.table(result, *encoders), encoders, decoder)
    table = _selected(result, table, select)
    for drawn in plugins.module_of(result).figures(table):
        if drawn.name == figure:
            return Panel(drawn.chart, drawn.table, drawn.caption)
    raise Missing(f"numbers of {result}, of which {' and '.join(encoders)} have none")


def _selected(name: str, table: xr.Dataset, select: Mapping[str, Any]) -> xr.Dataset:
    for dim, wanted in select.items():
        values = {str(value) for value in table[dim].values}
        lacking = [str(value) for value in wanted if str(value) not in values]
        if lacking:
            raise Missing(f"{name} with {dim} {', '.join(lacking)}; this run has {', '.join(sorted(values))}")
    return table.sel({dim: list(wanted) for dim, wanted in select.items()})


# Maps of layers


class LayerMap(NamedTuple):
    """One heat map: the layers of one encoder (upwards) against those of another (to the right)."""

    row: str
    column: str
    layer: str = "block"  # layer type; "residual" and "all" of ResNets, too
    title: str = ""


def layer_maps(evidence: Evidence, maps: Iterable[LayerMap], *, best: bool = False, columns: int = 3) -> Panel:
    """CKA of all pairs of layers, a map for each pair of encoders or layer type; `best` marks the closest of B."""
    charts, tables = [], []
    for one in maps:
        result = evidence.table("cka", one.row, one.column)
        cells = pair_cells(result, _numbers(result, one.layer), CKA, [(one.row, one.column)])
        if cells.value.isna().all():
            raise Missing(f"CKA of {one.layer} layers of {one.row} and {one.column}: compare them with these sites")
        if best:
            cells = cells.assign(best=cells.value == cells.groupby("row").value.transform("max"))
        tables.append(cells.assign(layer_type=one.layer))
        charts.append(_layer_map(cells, one))
    note = (
        "CKA of all pairs of layers, in order of depth to the right and upwards, all tokens. Dots: the closest layer."
    )
    chart = charts[0] if len(charts) == 1 else _side_by_side(charts, columns)
    return Panel(chart, pd.concat(tables, ignore_index=True), note if best else note.partition(" Dots")[0])


def _side_by_side(charts: Sequence[Any], columns: int) -> alt.ConcatChart:
    return alt.concat(*charts, columns=columns, resolve=alt.Resolve(scale={"color": "shared"}))


def _numbers(result: xr.Dataset, layer: str) -> npt.NDArray[np.int64]:
    """The place of each layer on its axis, −1 for those that are not drawn; a decoder is not."""
    kinds, blocks = result.layer_type.values.astype(str), result.block.values
    if layer == "all":  # of a ResNet: residual branches are odd, block outputs even
        numbers = np.select([kinds == "residual", kinds == "block"], [2 * blocks + 1, 2 * blocks + 2], -1)
    else:
        numbers = np.where(kinds == layer, blocks, -1)
    places: npt.NDArray[np.int64] = np.where([of_decoder(str(site)) for site in result.site.values], -1, numbers)
    return places


def _layer_map(cells: pd.DataFrame, one: LayerMap) -> Any:
    longest = max(cells.row.nunique(), cells.column.nunique())
    chart = heatmap(
        cells,
        row_title=f"{one.row}, layers",
        column_title=f"{one.column}, layers",
        value_title="CKA",
        step=max(5.0, SIDE / longest),
        details={"site_a": one.row, "site_b": one.column},
    )
    return _plain(chart, one.title)


def _plain(chart: Any, title: str = "") -> Any:
    """A chart as a part of another one, which cannot have what only a whole has."""
    chart = chart.copy(deep=False)
    chart.usermeta = alt.Undefined
    return chart.properties(title=title) if title else chart


# Curves, bars, points


def depth_curves(
    evidence: Evidence,
    result: str,
    variable: str,
    encoders: Sequence[str],
    *,
    value_title: str,
    note: str = "",
    types: Sequence[str] = ("block",),
    decoder: bool = False,
    select: Mapping[str, Any] | None = None,
    **more: Any,
) -> Panel:
    """A number over depth, a line for each encoder; `more` goes to `over_depth`."""
    table = part_of(evidence.table(result, *encoders), encoders, decoder)
    table = _selected(result, table, {dim: [value] for dim, value in (select or {}).items()}).squeeze(
        list(select or {})
    )
    drawn = over_depth(
        table, variable, title="", caption="", value_title=value_title, types=types, **{"domain": None, **more}
    )
    if not drawn:
        raise Missing(f"numbers of {result}, of which {' and '.join(encoders)} have none")
    return Panel(drawn[0].chart.properties(**CURVE), drawn[0].table, note)


def lines(
    table: pd.DataFrame, *, x_title: str, y_title: str, series_title: str = "encoder", note: str = "", **more: Any
) -> Panel:
    """Lines through points with `depth`, `value`, `series`; `more` goes to `curve_over_depth`."""
    options = {"domain": None, "details": {}, **more}
    chart = curve_over_depth(
        table,
        value_title=y_title,
        depth_title=x_title,
        series_title=series_title,
        series=list(dict.fromkeys(table.series)),
        **options,
    )
    return Panel(chart if "facet" in more else chart.properties(**CURVE), table, note)


def bars(table: pd.DataFrame, *, x_title: str, y_title: str, series_title: str, note: str = "") -> Panel:
    """Bars of `value` with `low` and `high`, side by side within each `group`, a colour for each of `series`."""
    series, groups = (list(dict.fromkeys(table[name])) for name in ("series", "group"))
    base = alt.Chart(table)
    x = alt.X("group:N", title=x_title, sort=groups).axis(labelAngle=0)
    offset = alt.XOffset("series:N", sort=series)
    colour = alt.Color("series:N", title=series_title).scale(domain=series, range="category")
    colour = colour.legend(orient="bottom", columns=1)
    tip = ["series:N", "group:N", *(alt.Tooltip(f"{name}:Q", format=".4f") for name in ("value", "low", "high"))]
    bar = base.mark_bar().encode(x=x, xOffset=offset, y=alt.Y("value:Q", title=y_title), color=colour, tooltip=tip)
    ends = base.mark_rule().encode(x=x, xOffset=offset, y=alt.Y("low:Q", title=y_title), y2="high:Q")
    return Panel(alt.layer(bar, ends).properties(width=200, height=170), table, note)


def labelled_points(
    table: pd.DataFrame, *, x_title: str, y_title: str, percent: bool = True, note: str = "", kind: str = "family"
) -> Panel:
    """A point for each encoder (`series`) at `x` and `y`, its name beside it, a shape for each `kind`."""
    names, kinds = (list(dict.fromkeys(table[column])) for column in ("series", kind))
    number = "%" if percent else "~r"
    x = alt.X("x:Q", title=x_title).axis(format=number, tickCount=5).scale(zero=False, padding=24)
    y = alt.Y("y:Q", title=y_title).axis(format=number, tickCount=5).scale(zero=False, padding=24)
    colour = alt.Color("series:N").scale(domain=names, range="category").legend(None)
    shape = alt.Shape(f"{kind}:N", title=None).scale(domain=kinds, range=["square", "triangle-up", "circle", "diamond"])
    base = alt.Chart(table)
    tip = ["series:N", *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("x", "y"))]
    dots = base.mark_point(size=90, filled=True, opacity=1).encode(
        x=x, y=y, color=colour, shape=shape.legend(orient="bottom"), tooltip=tip
    )
    words = base.mark_text(align="left", dx=8, dy=-6, fontSize=11).encode(x=x, y=y, text="series:N")
    return Panel(alt.layer(dots, words).properties(width=240, height=220), table, note)


# Tables


def number_table(cells: pd.DataFrame, *, corner: str = "encoder", note: str = "") -> Panel:
    """Numbers in `row` and `column` as a paper prints them: ours (`ours`), and below it the paper's (`paper`)."""
    rows, columns = (list(dict.fromkeys(cells[name])) for name in ("row", "column"))
    x = alt.X("column:N", title=None, sort=columns).axis(orient="top", labelAngle=0, labelLimit=150)
    y = alt.Y("row:N", title=corner, sort=rows).axis(labelLimit=220, titleAngle=0, titleAlign="right", titleY=-10)
    cells = cells.assign(**{name: [MINUS.sub("−", text) for text in cells[name]] for name in ("ours", "paper")})
    wide = max(
        LEAST,
        *(15 + 5.4 * len(f"paper {text}") for text in cells.paper),
        *(15 + 7.5 * len(text) for text in cells.ours),
    )
    base = alt.Chart(cells.assign(printed=[f"paper {text}" if text else "" for text in cells.paper]))
    ours = base.mark_text(fontSize=13, fontWeight=600, dy=-6).encode(x=x, y=y, text="ours:N")
    paper = base.mark_text(fontSize=10, dy=9, opacity=0.7).encode(x=x, y=y, text="printed:N")
    once = alt.Chart(cells.drop_duplicates("row"))
    lines_between = once.mark_rule(style="hatch", opacity=0.4).encode(y=alt.Y("row:N", sort=rows, bandPosition=1))
    chart = alt.layer(lines_between, ours, paper).properties(width=alt.Step(wide), height=alt.Step(40))
    printed = tuple(
        Printed(f"{column}, {row}", paper, ours)
        for row, column, ours, paper in cells[["row", "column", "ours", "paper"]].itertuples(index=False)
        if paper
    )
    return Panel(chart, cells, note, printed=printed)


# Pictures


def sheets(evidence: Evidence, encoders: Sequence[str], rows: int = 4, note: str = "") -> Panel:
    """Pictures drawn from representations: a sheet for each encoder, a row for each source, which comes first."""
    result = evidence.table("rcdm", *encoders)
    charts, tables = [], []
    for encoder in encoders:
        pictures = result.pictures.sel(picture_sheet=encoder).values[:rows]
        columns = [str(name) for name in result.picture_column.values]
        names = [str(result.picture_note.sel(picture_sheet=encoder).values[row, 0]) for row in range(len(pictures))]
        table = pd.DataFrame(
            {
                "row": _short(names[row]),
                "column": columns[at],
                "encoder": encoder,
                "url": picture_url(pictures[row, at], PICTURE),
            }
            for row, at in itertools.product(range(len(pictures)), range(len(columns)))
        )
        tables.append(table)
        charts.append(picture_grid(table, columns, PICTURE).properties(title=f"{encoder}{_faces(result, encoder)}"))
    table = pd.concat(tables, ignore_index=True).drop(columns="url")
    return Panel(alt.concat(*charts, columns=2), table, note)


def _short(name: str) -> str:
    """The end of the name of an image, which tells it from others."""
    return name if len(name) <= 14 else f"…{name[-13:]}"


def _faces(result: xr.Dataset, encoder: str) -> str:
    """How much of the orientation is kept, by the measure that decides."""
    if "mirror" not in result.transformation.values:
        return ""
    return f": {float(result.share.sel(encoder=encoder, transformation='mirror')):.0%} told from their mirror image"


def attention_maps(evidence: Evidence, encoder: str, image: int = 0) -> Panel:
    """Where two patches of an image attend, from the first layer to the last: mean of the heads over the picture."""
    result = evidence.table("attention", encoder)
    number = [str(name) for name in result.encoder.values].index(encoder)
    if f"viewer_map_{number}" not in result:
        raise Missing(f"attention maps to look at of {encoder}: measure attention with viewer_images above 0")
    maps = result[f"viewer_map_{number}"].isel({"viewer_image": image, f"viewer_head_{number}": 0})
    pixels = result[f"viewer_pixels_{number}"].isel(viewer_image=image).values
    grid = tuple(int(side) for side in maps.attrs["grid"])
    layers = [str(name) for name in maps[f"viewer_layer_{number}"].values if not of_decoder(str(name))]
    shown = sorted({round(place) for place in np.linspace(0, len(layers) - 1, min(MAPS_SHOWN, len(layers)))})
    queries = maps[f"viewer_query_{number}"].values
    rows = []
    for query in (len(queries) // 4, 3 * len(queries) // 4):
        at = divmod(int(queries[query]), grid[1])
        where = f"patch {at[0]}, {at[1]}"
        rows.append((where, "image", np.nan, picture_url(_marked(pixels, grid, at), 2 * PICTURE)))
        for layer in shown:
            weights = maps.isel({f"viewer_layer_{number}": layer, f"viewer_query_{number}": query}).values
            lit = _lit(pixels, weights.reshape(grid))
            # How even the map is: 1 for one that is the same everywhere, 1 / keys for one that sees a single key.
            even = float(weights.sum() / (255 * weights.size))
            rows.append((where, f"block {layers[layer].split('.')[1]}", even, picture_url(lit, 2 * PICTURE)))
    table = pd.DataFrame(rows, columns=["row", "column", "mean", "url"])
    columns = list(dict.fromkeys(table.column))
    chart = picture_grid(table, columns, 2 * PICTURE)
    note = (
        "Where two patches, marked in the picture on the left, attend to: mean of the heads, the brightest key of each "
        "map in full light."
    )
    return Panel(chart, table.drop(columns="url").assign(encoder=encoder), note, who=encoder)


def _lit(pixels: npt.NDArray[np.uint8], weights: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A picture in the light of a map over its patches."""
    rows, columns = (np.arange(n) * m // n for n, m in zip(pixels.shape[:2], weights.shape, strict=True))
    light = 0.15 + 0.85 * weights[rows[:, None], columns, None] / 255
    lit: npt.NDArray[np.uint8] = (pixels * light).round().astype(np.uint8)
    return lit


def _marked(pixels: npt.NDArray[np.uint8], grid: tuple[int, ...], at: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """A picture with one of its patches framed."""
    picture = pixels.copy()
    (top, bottom), (left, right) = (
        (math.floor(place * side / parts), math.ceil((place + 1) * side / parts) - 1)
        for place, side, parts in zip(at, pixels.shape[:2], grid, strict=True)
    )
    frame = np.array([213, 94, 0], np.uint8)
    picture[[top, bottom], left : right + 1] = frame
    picture[top : bottom + 1, [left, right]] = frame
    return picture


def with_ends(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """A number and the ends of its interval by the names that curves and bars have."""
    return table.rename(columns=dict(zip((f"{name}{end}" for end in ENDS), ("value", "low", "high"), strict=True)))
