"""Figures and words of the segmentation analysis."""

import json
from dataclasses import replace
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from sightline.core.results import ENDS, interval
from sightline.report.figures import (
    Figure,
    KeyNumber,
    class_colours,
    class_figure,
    key_number,
    over_depth,
    picture_grid,
    picture_url,
)

CELL, SMALL_CELL = 104, 52  # pixels of a picture in the figures


def figures(result: xr.Dataset) -> list[Figure]:
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
    drawn = [*curves, _classes(result), _gallery(result), _components(result)]
    return [figure for figure in drawn if figure is not None]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
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


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    """mIoU at the chosen block: the highest on test images would be chosen by what is measured."""
    about = "mIoU of a linear probe of the pixels at the chosen block"
    words: dict[str, Any] = {"title": "mIoU", "about": about, "style": ".1%", "best": "highest"}
    names, here = [f"miou{end}" for end in ENDS], result.site == result.chosen
    at_chosen = result.assign({name: result[name].where(here) for name in names})
    curves = [number.curves for number in key_number(result, "miou", at="highest", **words)]
    numbers = key_number(at_chosen, "miou", at="highest", **words)
    return [replace(number, curves=of) for number, of in zip(numbers, curves, strict=False)]


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
        sentence = f"{encoder}: for dense tasks use {site}, which has the highest mIoU on the images for selection"
        if last != site:
            sentence += f", {best:.1%} of patches against {float(blocks[-1]):.1%} at {last}"
        sentences.append(f"{sentence}.")
    return sentences


def _protocol(result: xr.Dataset) -> dict[str, str]:
    protocol: dict[str, str] = json.loads(result.attrs["protocol"])
    return protocol


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
    caption = "At the chosen block of each encoder, the easiest class on top; classes without test pixels are left out."
    return class_figure(table, caption)


# Pictures


def _gallery(result: xr.Dataset) -> Figure | None:
    """A row for each picture: the image, its map, and the decisions of each encoder."""
    colours, names = class_colours(result.sizes["class"]), [str(name) for name in result["class"].values]
    rows: list[dict[str, Any]] = []
    shown: set[int] = set()
    columns = ["image", "labels"]
    for number, encoder in _with_pictures(result):
        columns.append(str(encoder))
        truth, decided = (result[f"picture_{what}_{number}"].values for what in ("truth", "found"))
        for k, name in enumerate(result.picture.values.astype(str)):
            parts = {str(encoder): colours[decided[k]]}
            if len(columns) == 3:  # images and labels once, as the first encoder sees them
                parts |= {"image": result[f"picture_pixels_{number}"].values[k], "labels": colours[truth[k]]}
            rows += [{"row": name, "column": key, "url": picture_url(part, CELL)} for key, part in parts.items()]
            shown |= {*np.unique(truth[k]).tolist(), *np.unique(decided[k]).tolist()} - {-1}
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
    chart = picture_grid(table, columns, CELL) + points
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
    rows.sort(key=lambda row: int(row["row"].partition(" ")[0]))
    table = pd.DataFrame(rows)
    caption = (
        "The first three principal components of the patches as red, green and blue: one basis and one scale for "
        "all pictures of a block, so a colour means the same in all of them, but not in another block or encoder."
    )
    chart = picture_grid(table, columns, SMALL_CELL)
    return Figure("components", "Principal components of the patches", caption, chart, table.drop(columns="url"))


def _with_pictures(result: xr.Dataset) -> list[tuple[int, str]]:
    names = enumerate(result.encoder.values)
    return [(number, str(name)) for number, name in names if f"picture_pixels_{number}" in result]
