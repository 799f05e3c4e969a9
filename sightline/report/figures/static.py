"""A chart outside of the page: its specification, and what vl-convert makes of it."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from sightline.report.figures.theme import same_colours, theme
from sightline.report.html import clean


def specification(chart: Any, encoders: Sequence[str] = ()) -> dict[str, Any]:
    """The chart in Vega-Lite without a theme, all its text valid; each of `encoders` has the same colour in all."""
    with alt.data_transformers.enable("default", max_rows=None), alt.theme.enable("none"):
        spec: dict[str, Any] = chart.to_dict(validate=False)  # validating would take most of the time
    same_colours(spec, encoders)
    spec["datasets"] = {
        key: [{k: clean(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows]
        for key, rows in spec.get("datasets", {}).items()
    }
    return spec


def svg_of(spec: dict[str, Any], colours: Sequence[str] = ()) -> str:
    """In the light theme, as the files of a run folder are; `colours` are those of the encoders, in their order."""
    import vl_convert  # large, and every analysis imports this module

    return str(vl_convert.vegalite_to_svg(spec, config=theme(False, colours)))


def pdf_of(svg: str) -> bytes:
    import vl_convert

    return bytes(vl_convert.svg_to_pdf(svg))
