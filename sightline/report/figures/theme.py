"""The look of every figure: fonts and colours, which no chart says itself."""

from collections.abc import Sequence
from typing import Any

# Helvetica comes first: its metrics are those of Arial and Liberation Sans, and of the text in the PDF files.
FONT = '"Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif'

# Okabe–Ito (safe for colour-blind readers) goes first, without its yellow and black; its order keeps neighbours apart.
# The dark colours are the same hues, lighter.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#c0619a", "#d99500", "#3fa2dc", "#7a1f4f", "#8a8a1f", "#4b3aa8", "#7d5a3c")
DARK = ("#5aaeea", "#f5894a", "#35c79c", "#e79cc8", "#f3ba45", "#9ad6fa", "#d77aa2", "#cccc66", "#a394f0", "#cfa785")


def theme(dark: bool = False, encoders: Sequence[str] = ()) -> dict[str, Any]:
    """Vega-Lite configuration of the light (default) or the dark look; `encoders` are their colours, in their order.

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
        "legend": words
        | {
            "gradientThickness": 10,
            "symbolStrokeWidth": 2,
            "symbolBaseFillColor": soft,  # where the colour means something else
            "symbolBaseStrokeColor": soft,
            "labelLimit": 220,
            "titleLimit": 220,
        },
        "header": words | {"labelColor": ink, "labelFontWeight": 600, "labelLimit": 220},
        "title": {"color": ink, "fontSize": 13, "anchor": "start"},
        "view": {"stroke": None},
        "text": {"color": ink},
        "rule": {"color": ink},
        "range": {
            "category": list(encoders or (DARK if dark else LIGHT)),
            "ordinal": list(accent),
            "heatmap": {"scheme": "viridis"},
        },
        "style": {
            "missing": {"color": missing},
            "hatch": {"color": soft, "strokeWidth": 0.8},
            "null": {"color": soft, "strokeDash": [3, 3], "strokeWidth": 1.2},
            "reference": {"color": soft, "strokeDash": [6, 3], "strokeWidth": 1.2},
            "marked": {"color": accent[0], "strokeWidth": 2.5},
            "stage": {"color": "#ffffff", "strokeWidth": 1, "opacity": 0.9},
            "best": {"color": "#ffffff", "stroke": "#1c2026", "strokeWidth": 0.8},
        },
    }


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
            if value.get("legend", {}) is not None:  # None: it has none
                value["legend"] = value.get("legend", {}) | {"values": domain}
