"""Figures and words of the segmentation analysis."""

from __future__ import annotations

import base64
import colorsys
import io
import json
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pandas as pd
from PIL import Image

from sightline.core.results import interval
from sightline.report.figures import Figure, over_depth

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr

__all__ = ["class_colours", "figures", "headlines", "picture_url", "summary"]


GOLDEN = 0.618034  # neighbours in the order of classes get hues that lie far apart
BACKGROUND_GREY, LEFT_OUT = (225, 225, 225), (60, 60, 60)
CELL, SMALL_CELL = 104, 52  # pixels of a picture in the figures


def figures(result: xr.Dataset) -> list[Figure]:
    """mIoU over depth, IoU of each class, pictures with maps and decisions, components of the patches."""
    curves = over_depth(
        result,
        "miou",
        title="mIoU over depth",
        value_title="mIoU",
        caption=f"Discriminant analysis of each block, λ chosen on {_protocol(result)['chosen on']}; bands are 95 % "
        f"intervals (jackknife over groups of the {result.attrs['n_test']} test images).",
        domain=(0, 0.1),
        percent=True,
    )
    found = [*curves, _classes(result), _gallery(result), _components(result)]
    return [figure for figure in found if figure is not None]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    """mIoU at the chosen block of each encoder: (label, number, detail)."""
    lines = []
    for encoder in result.encoder.values:
        at = result.sel(encoder=encoder)
        site = str(at.chosen.item())
        if not site:
            continue
        lda = at.sel(site=site)
        if np.isfinite(at.softmax_miou):
            low, high = at.softmax_miou_low, at.softmax_miou_high
            value = float(at.softmax_miou)
            detail = f"mIoU of a softmax on pixels of {site}, {interval(float(low), float(high))}"
            detail += f"; discriminant analysis {float(lda.miou):.1%}"
        else:
            value = float(lda.miou)
            detail = f"mIoU at {site}, {interval(float(lda.miou_low), float(lda.miou_high))}"
        lines.append((str(encoder), f"{value:.1%}", detail))
    return lines


def summary(result: xr.Dataset) -> list[str]:
    """Which block for dense tasks, and how far the last one is behind."""
    sentences = []
    for encoder in result.encoder.values:
        at = result.sel(encoder=encoder)
        site = str(at.chosen.item())
        blocks = at.val_miou.where(at.layer_type == "block", drop=True).dropna("site")
        if not site or not blocks.size:
            continue
        last = str(blocks.site.values[-1])
        best = float(at.val_miou.sel(site=site))
        sentence = f"{encoder}: for dense tasks take {site}, which has the highest mIoU on the images that choose"
        if last != site:
            sentence += f", {best:.1%} of patches against {float(blocks[-1]):.1%} at {last}"
        sentences.append(f"{sentence}.")
    return sentences


def _protocol(result: xr.Dataset) -> dict[str, str]:
    found: dict[str, str] = json.loads(result.attrs["protocol"])
    return found


def _best_iou(result: xr.Dataset) -> pd.DataFrame:
    """IoU of each class at the chosen block: of the softmax where there is one."""
    rows = []
    for encoder in result.encoder.values:
        at = result.sel(encoder=encoder)
        if site := str(at.chosen.item()):
            values = at.softmax_iou if np.isfinite(at.softmax_miou) else at.iou.sel(site=site)
            rows += [
                {"encoder": str(encoder), "class": str(name), "iou": float(value), "pixels": float(pixels)}
                for name, value, pixels in zip(result["class"].values, values.values, result.pixels.values, strict=True)
                if np.isfinite(value)
            ]
    return pd.DataFrame(rows)


def _classes(result: xr.Dataset) -> Figure | None:
    table = _best_iou(result)
    if table.empty:
        return None
    order = table.groupby("class").iou.mean().sort_values(ascending=False).index.tolist()
    tip = [
        "encoder:N", "class:N", alt.Tooltip("iou:Q", format=".1%", title="IoU"),
        alt.Tooltip("pixels:Q", format=",", title="test pixels"),
    ]  # fmt: skip
    chart = (
        alt.Chart(table)
        .mark_point(filled=True, size=40)
        .encode(
            x=alt.X("iou:Q", title="IoU").axis(format="%"),
            y=alt.Y("class:N", title=None, sort=order),
            color=alt.Color("encoder:N", title="encoder"),
            tooltip=tip,
        )
        .properties(width=360, height=alt.Step(16))
    )
    caption = "At the chosen block of each encoder, the easiest class on top; classes without test pixels are left out."
    return Figure("classes", "IoU of each class", caption, chart, table)


# Pictures


def class_colours(count: int) -> npt.NDArray[np.uint8]:
    """Colours of the channels 0 … count − 1, the background first, and of what is left out, last: (count + 1, 3)."""
    colours = [BACKGROUND_GREY]
    for number in range(count - 1):
        hue, lightness = (number * GOLDEN) % 1, (0.45, 0.62)[number % 2]
        red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.75)
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    return np.array([*colours, LEFT_OUT], np.uint8)


def picture_url(pixels: npt.NDArray[np.uint8], side: int) -> str:
    """uint8 (y, x, 3) as a PNG of about `side` pixels, each of them a square, in a data: address."""
    times = max(1, round(side / max(pixels.shape[:2])))
    buffer = io.BytesIO()
    Image.fromarray(pixels.repeat(times, 0).repeat(times, 1)).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _gallery(result: xr.Dataset) -> Figure | None:
    """A row for each picture: the image, its map, and the decisions of each encoder."""
    colours, names = class_colours(result.sizes["class"]), [str(name) for name in result["class"].values]
    rows: list[dict[str, Any]] = []
    shown: set[int] = set()
    columns = ["image", "labels"]
    for number, encoder in _with_pictures(result):
        columns.append(str(encoder))
        truth, found = (result[f"picture_{what}_{number}"].values for what in ("truth", "found"))
        for k, name in enumerate(result.picture.values.astype(str)):
            parts = {str(encoder): colours[found[k]]}
            if len(columns) == 3:  # images and labels once, as the first encoder sees them
                parts |= {"image": result[f"picture_pixels_{number}"].values[k], "labels": colours[truth[k]]}
            rows += [{"row": name, "column": key, "url": picture_url(part, CELL)} for key, part in parts.items()]
            shown |= {*np.unique(truth[k]).tolist(), *np.unique(found[k]).tolist()} - {-1}
    if not rows:
        return None
    table = pd.DataFrame(rows)
    used = sorted(shown)
    key = pd.DataFrame({"class": [names[c] for c in used], "row": table.row[0], "column": "image"})
    colour = alt.Color("class:N", title="class").scale(
        domain=[names[c] for c in used], range=["#{:02x}{:02x}{:02x}".format(*colours[c]) for c in used]
    )
    legend = colour.legend(symbolType="square", symbolOpacity=1, columns=1 + len(used) // 20)
    points = alt.Chart(key).mark_point(opacity=0, filled=True).encode(x="column:N", y="row:N", color=legend)
    caption = (
        "Decisions at the chosen block of each encoder, at every pixel that it sees; background is light, pixels that "
        "are left out dark."
    )
    chart = _images(table, columns, CELL) + points
    return Figure("pictures", "Images, labels and decisions", caption, chart, table.drop(columns="url"))


def _components(result: xr.Dataset) -> Figure | None:
    """A column for each layer, a row for each picture and encoder."""
    rows: list[dict[str, Any]] = []
    columns: list[str] = []
    for number, encoder in _with_pictures(result):
        parts = result[f"picture_parts_{number}"]
        sites = parts[f"picture_layer_{number}"].values.astype(str).tolist()
        columns += [site for site in sites if site not in columns]
        for picture in range(parts.sizes["picture"]):
            rows += [
                {
                    "row": f"{picture + 1} · {encoder}",
                    "column": site,
                    "url": picture_url(parts.isel({parts.dims[0]: layer, "picture": picture}).values, SMALL_CELL),
                }
                for layer, site in enumerate(sites)
            ]
    if not rows:
        return None
    table = pd.DataFrame(sorted(rows, key=lambda row: int(row["row"].partition(" ")[0])))
    caption = (
        "The first three principal components of the patches as red, green and blue: one basis and one scale for "
        "all pictures of a block, so that a colour means the same in them; two blocks or encoders do not compare."
    )
    chart = _images(table, columns, SMALL_CELL)
    return Figure("components", "Principal components of the patches", caption, chart, table.drop(columns="url"))


def _with_pictures(result: xr.Dataset) -> list[tuple[int, str]]:
    names = enumerate(result.encoder.values)
    return [(number, str(name)) for number, name in names if f"picture_pixels_{number}" in result]


def _images(table: pd.DataFrame, columns: list[str], side: int) -> Any:
    rows = list(dict.fromkeys(table.row))
    x = alt.X("column:N", title=None).scale(domain=columns).axis(orient="top", labelAngle=0 if side > 100 else -60)
    y = alt.Y("row:N", title=None).scale(domain=rows).axis(labelLimit=120)
    return (
        alt.Chart(table)
        .mark_image(width=side, height=side)
        .encode(x=x, y=y, url="url:N", tooltip=["row:N", "column:N"])
        .properties(width=alt.Step(side + 6), height=alt.Step(side + 6))
    )
