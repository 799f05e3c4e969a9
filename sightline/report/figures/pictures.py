"""Figures of segmentations: maps in colours, pictures in rows and columns, IoU of each class."""

import base64
import colorsys
import io
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import numpy.typing as npt
import pandas as pd
from PIL import Image

from sightline.report.figures.charts import Figure

GOLDEN = 0.618034  # neighbours in the order of classes get hues that lie far apart
BACKGROUND_GREY, LEFT_OUT = (225, 225, 225), (60, 60, 60)
LETTER = 7  # pixels of a letter of the names above pictures


def class_colours(count: int) -> npt.NDArray[np.uint8]:
    """Colours of the channels 0 … count − 1, the background first, and of what is left out, last: (count + 1, 3)."""
    colours = [BACKGROUND_GREY]
    for number in range(count - 1):
        hue, lightness = (number * GOLDEN) % 1, (0.45, 0.62)[number % 2]
        red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.75)
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    return np.array([*colours, LEFT_OUT], np.uint8)


def coloured(channels: npt.NDArray[Any], count: int) -> npt.NDArray[np.uint8]:
    """A map of channels (y, x), −1 where it is left out, as a picture (y, x, 3)."""
    pixels: npt.NDArray[np.uint8] = class_colours(count)[channels]
    return pixels


def picture_url(pixels: npt.NDArray[np.uint8], side: int) -> str:
    """uint8 (y, x, 3) as a PNG of about `side` pixels, each of them a square, in a data: address."""
    times = max(1, round(side / max(pixels.shape[:2])))
    buffer = io.BytesIO()
    Image.fromarray(pixels.repeat(times, 0).repeat(times, 1)).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def picture_grid(table: pd.DataFrame, columns: Sequence[str], side: int) -> Any:
    """Pictures (`url`) of `side` pixels by their `row`, in order of appearance, and `column`."""
    rows = list(dict.fromkeys(table.row))
    x = alt.X("column:N", title=None).scale(domain=list(columns))
    y = alt.Y("row:N", title=None).scale(domain=rows).axis(labelLimit=120)
    return (
        alt.Chart(table)
        .mark_image(width=side, height=side)
        .encode(
            x=x.axis(orient="top", labelAngle=0 if max(map(len, columns)) * LETTER <= side else -60),
            y=y,
            url="url:N",
            tooltip=["row:N", "column:N"],
        )
        .properties(width=alt.Step(side + 6), height=alt.Step(side + 6))
    )


def class_figure(table: pd.DataFrame, caption: str) -> Figure:
    """IoU of each class, from rows of `encoder`, `class`, `iou` and `pixels`."""
    order = table.groupby("class").iou.mean().sort_values(ascending=False).index.tolist()
    tip = [
        "encoder:N",
        "class:N",
        alt.Tooltip("iou:Q", format=".1%", title="IoU"),
        alt.Tooltip("pixels:Q", format=",", title="test pixels"),
    ]
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
    return Figure("classes", "IoU of each class", caption, chart, table)
