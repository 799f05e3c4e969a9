"""Charts and headlines of the attention analysis."""

import math
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from sightline.core.results import outside_decoder
from sightline.report.figures import FIRST, Figure, KeyNumber, curve_over_depth, key_number, present, with_depth

THIRDS = ("first third of the blocks", "middle third", "last third")


# Figures


def figures(result: xr.Dataset) -> list[Figure]:
    layers, heads, title = _tables(result)
    if layers.empty:
        return []
    names = [str(name) for name in result.encoder.values]
    images = f"{result.attrs['images']} images"
    decoder = " Blocks of a decoder follow those of its encoder." if layers.decoder.any() else ""
    drawn = [
        Figure(
            "distance",
            "Attention distance over depth",
            "How far patches attend, in pixels: the line is the mean over heads, with its 95 % interval over "
            f"{images}, a small point is a head. High is global, low is local.{decoder}",
            _over_depth(layers, heads, "distance", "attention distance (pixels)", title, names),
            heads[["encoder", "site", "block", "head", "distance", "distance_relative"]],
        ),
        Figure(
            "nmi",
            "Normalised mutual information over depth",
            "How much the keys depend on the query: the line is the mean over heads, the wide band their standard "
            f"deviation, a small point is a head. Near 0, all queries attend to the same keys.{decoder}",
            _over_depth(layers, heads, "nmi", "normalised mutual information", title, names),
            heads[["encoder", "site", "block", "head", "nmi"]],
        ),
        _spread_figure(layers, title, names),
    ]
    for measure, what in (("distance_relative", "distance / image diagonal"), ("nmi", "normalised mutual information")):
        curves = densities(heads, measure)
        caption = (
            f"Distribution over the heads of all blocks of a third of the depth: {what}. Gaussian kernel density; a "
            "point is a head. A bump of its own is a few heads that behave differently from the rest."
        )
        name = f"{measure.removesuffix('_relative')}-heads"
        title_of = "Distances of heads" if measure != "nmi" else "NMI of heads"
        drawn.append(Figure(name, title_of, caption, _density_chart(curves, heads, measure, what, names), curves))
        curves = densities(heads, measure, by="site")
        caption = (
            f"Distribution over the heads of each layer by itself: {what}. Gaussian kernel density; a point is a head. "
            "One far from the others moves the mean of its layer."
        )
        chart = _density_chart(curves, heads, measure, what, names, by="site")
        drawn.append(Figure(f"{name}-of-layers", f"{title_of}, layer by layer", caption, chart, curves))
    return drawn


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    layers, _, _ = _tables(result)
    late = layers[layers.third == THIRDS[2]] if len(layers) else layers
    return [
        (
            str(name),
            f"NMI {rows.nmi_mean.mean():z.2f}",
            f"attention distance {rows.distance_mean.mean():.0f} pixels, "
            f"{rows.distance_relative_mean.mean():.0%} of the diagonal; "
            f"block{'s' * (len(rows) > 1)} {'–'.join(map(str, sorted({rows.block.min(), rows.block.max()})))}, "
            "mean over heads",
        )
        for name, rows in (late.groupby("encoder", sort=False) if len(late) else ())
    ]


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    where: dict[str, Any] = {"at": "last third", "types": ("attn_map",), "place": FIRST}
    about = "attention NMI in the last third of the blocks"
    far = "attention distance (part of the diagonal) in the last third of the blocks"
    return [
        *key_number(result, "nmi_mean", title="attention NMI", about=about, style=".3f", **where),
        *key_number(result, "distance_relative_mean", title="attention distance", about=far, style=".1%", **where),
    ]


def _tables(result: xr.Dataset) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """A row for each layer and one for each head, both with their depth, and the title of the depth axis."""
    numbers = result[[name for name in result.data_vars if not str(name).startswith("viewer_")]]
    by_layer = [name for name, values in numbers.data_vars.items() if values.dims == ("encoder", "site")]
    layers, title = with_depth(present(numbers[by_layer]))
    layers["decoder"] = ~outside_decoder(layers.site)
    blocks = layers[~layers.decoder].groupby("encoder").block
    size = blocks.transform("size")  # counted from the end, so that the last block is of the last third at any depth
    third = (2 - 3 * (size - blocks.rank()) // size).reindex(layers.index, fill_value=3)
    layers["third"] = [(*THIRDS, "decoder")[int(place)] for place in third]
    layers = layers.dropna(subset="nmi_mean")  # only now: a layer without a number keeps its place in the depth
    heads = numbers[["distance", "distance_relative", "nmi"]].to_dataframe().reset_index().dropna(subset="nmi")
    heads = heads.merge(layers[["encoder", "site", "depth", "third"]], on=["encoder", "site"])
    return layers, heads, title


def _over_depth(
    layers: pd.DataFrame, heads: pd.DataFrame, measure: str, what: str, depth_title: str, names: list[str]
) -> Any:
    """Mean over heads as a line, and a small point for each head."""
    ends = {f"{measure}_mean": "value", f"{measure}_mean_low": "low", f"{measure}_mean_high": "high"}
    points = layers.rename(columns={**ends, "encoder": "series"})
    points = points.assign(below=points.value - points[f"{measure}_std"], above=points.value + points[f"{measure}_std"])
    top = 1.05 * float(heads[measure].max())
    bottom = min(0.0, float(heads[measure].min()), float(points.below.min()) if measure == "nmi" else 0.0)
    chart = curve_over_depth(
        points[["series", "site", "depth", "value", "low", "high"]],
        value_title=what,
        depth_title=depth_title,
        series_title="encoder",
        series=names,
        domain=(bottom, top),
    )
    colour = alt.Color("series:N", title="encoder").scale(domain=names, range="category")
    colour = colour.legend(orient="right", symbolOpacity=1)
    x, y = alt.X("depth:Q"), alt.Y(f"{measure}:Q")
    dots = alt.Chart(heads.rename(columns={"encoder": "series"})[["series", "site", "head", "depth", measure]])
    tip = ["series:N", "site:N", "head:Q", alt.Tooltip(f"{measure}:Q", format=".4f")]
    chart += dots.mark_circle(size=14, opacity=0.45).encode(x=x, y=y, color=colour, tooltip=tip)
    if measure == "nmi":
        spread = alt.Chart(points[["series", "depth", "below", "above"]]).mark_area(opacity=0.1)
        chart += spread.encode(x=x, y=alt.Y("below:Q"), y2="above:Q", color=colour)
    return chart


def _spread_figure(layers: pd.DataFrame, depth_title: str, names: list[str]) -> Figure:
    both = {"distance_relative_std": "distance / image diagonal", "nmi_std": "normalised mutual information"}
    table = pd.concat(
        layers[["encoder", "site", "block", "depth"]].assign(measure=what, value=layers[name])
        for name, what in both.items()
    ).rename(columns={"encoder": "series"})
    chart = curve_over_depth(
        table,
        value_title="standard deviation over heads",
        depth_title=depth_title,
        series_title="encoder",
        series=names,
        facet="measure",
        domain=(0, max(0.05, math.ceil(20 * table.value.max()) / 20)),
        percent=True,
    )
    caption = (
        "Standard deviation over the heads of a layer. A peak says that some heads of this layer attend differently "
        "from the others, and that its mean is not typical of them."
    )
    return Figure("spread", "Spread over heads", caption, chart, table)


def densities(heads: pd.DataFrame, measure: str, by: str = "third") -> pd.DataFrame:
    """Gaussian kernel density of the heads of each encoder and third of its blocks, with Silverman's bandwidth.

    `by="site"`: of each layer by itself.
    """
    low, high = heads[measure].min(), heads[measure].max()
    room = max(high - low, 0.02)
    grid = np.linspace(low - 0.15 * room, high + 0.15 * room, 120)
    curves = []
    for (encoder, place), rows in heads.groupby(["encoder", by], sort=False):
        values = rows[measure].to_numpy()
        # A floor, or heads that are all the same would have a density without width.
        width = max(0.9 * values.std() * len(values) ** -0.2, 0.02 * room)
        kernel = np.exp(-0.5 * ((grid[:, None] - values) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        about = {"encoder": encoder, by: place, "heads": len(values), "bandwidth": width}
        curves.append(pd.DataFrame({"value": grid, "density": kernel.mean(1)}).assign(**about))
    return pd.concat(curves, ignore_index=True)


def _density_chart(
    curves: pd.DataFrame, heads: pd.DataFrame, measure: str, what: str, names: list[str], by: str = "third"
) -> Any:
    """A panel for each third of the depth, or each layer; small points under the curves are the heads."""
    dots = heads.rename(columns={measure: "value"})[["encoder", "third", "site", "head", "value"]]
    table = pd.concat([curves, dots.assign(density=math.nan, zero=0.0)], ignore_index=True)
    places = (*THIRDS, "decoder") if by == "third" else heads.sort_values("block", kind="stable").site.unique()
    order = [place for place in places if place in set(table[by])]
    base = alt.Chart(table)
    x = alt.X("value:Q", title=what).scale(zero=False, nice=False)
    colour = alt.Color("encoder:N", title="encoder").scale(domain=names, range="category")
    colour = colour.legend(orient="right", symbolOpacity=1)
    lines = base.transform_filter("isValid(datum.density)").mark_line(strokeWidth=2)
    points = base.transform_filter("isValid(datum.zero)").mark_point(size=24, opacity=0.6)
    chart = alt.layer(
        lines.encode(x=x, y=alt.Y("density:Q", title="density").axis(tickCount=4), color=colour),
        points.encode(
            x=x,
            y=alt.Y("zero:Q"),
            color=colour,
            tooltip=["encoder:N", "site:N", "head:Q", "value:Q"],
            shape=alt.Shape("encoder:N", title="encoder").scale(domain=names),
        ),
    )
    panels = alt.Facet(f"{by}:N", title=None, sort=order)
    size = {"width": 260, "height": 160} if by == "third" else {"width": 180, "height": 100}
    columns = 3 if by == "third" else 4
    return chart.properties(**size).facet(panels, columns=columns).properties(usermeta={"shape": "density"})
