"""Charts and headlines of the token clouds."""

from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from sightline.core.results import outside_decoder
from sightline.report.figures import Figure, KeyNumber, key_number, over_depth


def figures(result: xr.Dataset) -> list[Figure]:
    how = (
        "Each point is a patch token before or after attention, each cross the centre of a cloud; first, middle and "
        "last block, on the first two singular vectors of what a panel shows. "
    )
    readable = result.cloud.dropna("cloud_image", how="all")
    caption = (
        "Near 1, the tokens of a group are close to each other and far from other groups; at 0 they are intermingled. "
        f"{result.attrs['images']} images; bands are 95 % intervals over them."
    )
    clouds = [
        _tsne_figure(result),
        _cloud_figure(
            readable.isel(cloud_image=slice(1)),
            "clouds",
            "Tokens of an image before and after attention",
            how + "A cloud that moves and keeps its shape: attention adds the same to all tokens; one that "
            "changes its shape: tokens are treated one by one.",
        ),
        _cloud_figure(
            result.cloud_joint,
            "centres",
            "Tokens of several images before and after attention",
            how + "Crosses that move apart: attention tells the images from each other.",
        ),
    ]
    silhouettes = over_depth(
        result,
        {f"silhouette_{name}": f"grouped by {name}" for name in ("image", "class")},
        name="silhouette",
        title="Silhouette of tokens over depth",
        caption=caption,
        value_title="silhouette",
        types=("embed", "block"),
        reference=(0.0, "intermingled"),
        domain=None,
    )
    return [*silhouettes, *(figure for figure in clouds if figure is not None)]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    lines = []
    for encoder, site in zip(result.encoder.values, result.tsne_site.values, strict=True):
        at = result.sel(encoder=encoder, site=str(site)) if site else None
        if at is not None and np.isfinite(at.silhouette_image):
            by_class = f"{float(at.silhouette_class):.2f}" if np.isfinite(at.silhouette_class) else "no number"
            detail = f"silhouette of tokens grouped by image at {site}; grouped by class: {by_class}"
            lines.append((str(encoder), f"{float(at.silhouette_image):.2f}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    about = "silhouette of the tokens grouped by image at the last block"
    return key_number(result, "silhouette_image", at="last", title="tokens by image", about=about)


def _tsne_figure(result: xr.Dataset) -> Figure | None:
    table = _points(result.tsne, "tsne_axis", (0, 1))
    if table.empty:
        return None
    # Colours tell classes, shapes the images of a class: as many colours as images could not be told apart. In a
    # single class, or without labels, neither alone could tell all images; both together do.
    classes = result.image_class.to_series()
    table["number"] = table.image.map(classes.groupby(classes).cumcount() + 1)
    field, title, names = "image_class", "class", list(dict.fromkeys(classes))
    if len(names) == 1:
        field, title, names = "image", "image", [str(name) for name in result.image.values]
    colour = alt.Color(f"{field}:N", title=title).scale(domain=names, range="category")
    tip = ["encoder:N", "image:N", alt.Tooltip("image_class:N", title="class")]
    chart = _scatter(table, "encoder", colour, alt.Shape("number:N", title="image of its class"), tip)
    caption = (
        f"Each point is a patch token at the last block, from {result.attrs['images']} images. Islands of one image "
        "each: images differ, their tokens do not; a mixture: the other way round. Distances between islands "
        f"mean nothing ({result.attrs['tsne']})."
    )
    return Figure("tsne", "t-SNE of the tokens of several images", caption, chart, table)


def _cloud_figure(values: xr.DataArray, name: str, title: str, caption: str) -> Figure | None:
    """Clouds at the first, middle and last block with attention of each encoder, on the first two axes."""
    points = _points(values.sel(site=outside_decoder(values.site.values)), "axis", (0, 1))
    if points.empty:
        return None
    sites = {encoder: list(dict.fromkeys(rows.site)) for encoder, rows in points.groupby("encoder")}
    drawn = {(encoder, of[i]) for encoder, of in sites.items() for i in (0, len(of) // 2, -1)}
    table = points[[place in drawn for place in zip(points.encoder, points.site, strict=True)]]
    table = table.assign(panel_name=table.encoder.astype(str) + " · " + table.site)
    colour = alt.Color("moment:N", title="attention").scale(domain=["after", "before"], range="ordinal")
    # A single image needs no shape, nor a scale that is not that of a chart of several beside it.
    images = [str(image) for image in values.cloud_image.values]
    shape = alt.Shape("cloud_image:N", title="image").scale(domain=images) if len(images) > 1 else None
    tip = ["moment:N", alt.Tooltip("cloud_image:N", title="image")]
    chart = _scatter(table, "panel_name", colour, shape, tip, "moment", "cloud_image")
    return Figure(name, title, caption, chart, table)


def _points(values: xr.DataArray, axis: str, pair: tuple[int, int]) -> pd.DataFrame:
    """One row for each point, its places on two axes as x and y."""
    x, y = (values.isel({axis: n}, drop=True) for n in pair)
    return xr.Dataset({"x": x, "y": y}).to_dataframe().dropna().reset_index()


def _scatter(
    table: pd.DataFrame, facet: str, colour: alt.Color, shape: alt.Shape | None, tip: list[Any], *groups: str
) -> Any:
    """Points in square panels, each with axes of its own; with `groups`, the centre of each group as a cross."""
    base = alt.Chart(table.assign(panel=pd.factorize(table[facet])[0]))
    x, y = (kind(f"{name}:Q", title=None) for kind, name in ((alt.X, "x"), (alt.Y, "y")))
    x, y = (axis.axis(grid=False, tickCount=4).scale(zero=False) for axis in (x, y))
    points = base.mark_point(filled=True, size=14, opacity=0.7)
    told = {} if shape is None else {"shape": shape}
    layers = [points.encode(x=x, y=y, color=colour, tooltip=tip, **told)]
    if groups:
        centres = base.transform_aggregate(x="mean(x)", y="mean(y)", groupby=list(groups))
        layers.append(centres.mark_point(size=180, shape="cross", strokeWidth=2).encode(x=x, y=y, color=colour))
    panels = alt.Facet(f"{facet}:N", title=None, sort=alt.EncodingSortField("panel", op="min"))
    chart = alt.layer(*layers).properties(width=200, height=200).facet(panels, columns=3)
    return chart.resolve_scale(x="independent", y="independent")
