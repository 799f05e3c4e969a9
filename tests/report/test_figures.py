"""The chart shapes: what is drawn is what the table says."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import pytest
import vl_convert
from support.results import cka_result, constant_site, knn_result, resnet_sites, vit_sites

from sightline.core import plugins
from sightline.report.figures import curve_over_depth, heatmap, linked_charts, same_colours, theme, with_depth

VIRIDIS_ENDS = ("rgb(68, 1, 84)", "rgb(253, 231, 37)")


def items(chart: Any, kind: str, dark: bool = False) -> list[dict[str, Any]]:
    """Drawn marks of a kind, as the renderer has them: position, colour, tooltip."""
    graph = vl_convert.vegalite_to_scenegraph(chart.to_dict(), config=theme(dark))

    def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for item in node.get("items", []):
            if node.get("marktype") == kind and node.get("role", "mark") == "mark":
                yield item
            yield from walk(item)

    return list(walk({"items": [graph["scenegraph"]]}))


def said(item: dict[str, Any]) -> dict[str, str]:
    """The tooltip, which is also what a screen reader is told."""
    return dict(part.split(": ", 1) for part in item["description"].split("; "))


def cells(values: np.ndarray, reason: str = "") -> pd.DataFrame:
    rows = [
        {"row": f"block.{i}", "column": f"block.{j}", "value": v, "reason": "" if np.isfinite(v) else reason}
        for (i, j), v in np.ndenumerate(values)
    ]
    return pd.DataFrame(rows)


def square(values: np.ndarray, **more: Any) -> Any:
    names = [f"block.{i}" for i in range(max(values.shape))]
    rows, columns = names[: values.shape[0]], names[: values.shape[1]]
    return heatmap(
        cells(values, "constant"),
        row_title="A",
        column_title="B",
        value_title="CKA",
        rows=rows,
        columns=columns,
        **more,
    )


def test_heatmap_colours_follow_the_values_and_depth_goes_right_and_up() -> None:
    drawn = items(square(np.array([[0.0, 0.5], [0.75, 1.0]])), "rect")
    assert len(drawn) == 4
    by_place = {(round(d["y"]), round(d["x"])): d["fill"] for d in drawn}
    assert by_place[18, 0] == VIRIDIS_ENDS[0]  # first row of the table: the lowest on the page
    assert by_place[0, 18] == VIRIDIS_ENDS[1]
    assert len(set(by_place.values())) == 4


def test_negative_values_take_the_colour_of_zero_and_keep_their_number() -> None:
    drawn = items(square(np.array([[-0.0123, 1.0]])), "rect")
    assert drawn[0]["fill"] == VIRIDIS_ENDS[0]
    assert said(drawn[0])["CKA"] == "−0.0123"


def test_a_missing_value_is_grey_and_hatched_with_its_reason_and_never_a_zero() -> None:
    chart = square(np.array([[np.nan, 0.0], [0.5, 1.0]]))
    missing = [d for d in items(chart, "rect") if "NaN" in said(d)["CKA"]]
    assert [said(d)["CKA"] for d in missing] == ["NaN: constant"]
    assert missing[0]["fill"] == theme()["style"]["missing"]["color"] not in VIRIDIS_ENDS
    (hatch,) = items(chart, "rule")
    assert (hatch["x"], hatch["y"]) == (missing[0]["x"], missing[0]["y"])
    assert hatch["stroke"] == theme()["style"]["hatch"]["color"]


def test_the_null_is_told_beside_the_value() -> None:
    table = cells(np.array([[0.5]])).assign(low=0.45, high=0.55, null=0.01)
    (drawn,) = items(heatmap(table, row_title="A", column_title="B", value_title="CKA"), "rect")
    assert said(drawn) == {"A": "block.0", "B": "block.0", "CKA": "0.5", "shuffled null": "0.0100"}


def curve(table: pd.DataFrame, **more: Any) -> Any:
    return curve_over_depth(
        table, value_title="accuracy", depth_title="block", series_title="encoder", series=["a", "b"], **more
    )


def test_curve_points_lie_at_their_values_and_gaps_stay_gaps() -> None:
    table = pd.DataFrame({"depth": [0, 1, 2], "value": [0.0, np.nan, 1.0], "series": "a", "site": ["x", "y", "z"]})
    points = items(curve(table), "symbol")
    assert [round(p["y"]) for p in points] == [260, 0]
    assert [said(p)["accuracy"] for p in points] == ["0.0", "1.0"]
    line = next(i for i in items(curve(table), "line") if i.get("defined") is False)
    assert line is not None


def test_curve_has_the_band_the_null_and_the_reference() -> None:
    table = pd.DataFrame(
        {"depth": [0, 1], "value": 0.5, "low": 0.4, "high": 0.6, "null": 0.25, "series": "b", "site": "x"}
    )
    chart = curve(table, reference=(0.1, "chance, 10 %"))
    assert {(round(a["y"]), round(a["y2"])) for a in items(chart, "area")} == {(156, 104)}
    assert {round(i["y"]) for i in items(chart, "line")} == {130, 195}
    assert {said(p)["95 % interval"] for p in items(chart, "symbol")} == {"0.4000 – 0.6000"}
    (rule,) = items(chart, "rule")
    assert round(rule["y"]) == 234
    assert "chance, 10 %" in json.dumps(chart.to_dict())


def test_an_encoder_keeps_its_colour_whatever_else_is_drawn() -> None:
    table = pd.DataFrame({"depth": [0, 1], "value": 0.5, "series": "b", "site": "x"})
    alone = curve_over_depth(table, value_title="v", depth_title="d", series_title="encoder", series=["b"])
    spec = alone.to_dict()
    same_colours(spec, ["a", "b"])
    assert theme()["range"]["category"][1] in vl_convert.vegalite_to_svg(spec, config=theme())
    assert theme()["range"]["category"][0] not in vl_convert.vegalite_to_svg(spec, config=theme())
    assert {p["fill"] for p in items(curve(table), "symbol")} == {theme()["range"]["category"][1]}
    assert {p["fill"] for p in items(curve(table), "symbol", dark=True)} == {theme(dark=True)["range"]["category"][1]}


def test_panels_keep_the_order_of_the_table() -> None:
    table = pd.concat([cells(np.eye(2)).assign(pair=name, row=[0, 0, 1, 1], column=[0, 1, 0, 1]) for name in "cab"])
    svg = vl_convert.vegalite_to_svg(
        heatmap(table, row_title="A", column_title="B", value_title="CKA", facet="pair").to_dict(), config=theme()
    )
    assert sorted("cab", key=lambda name: svg.index(f">{name}</text>")) == ["c", "a", "b"]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("dark", "paper"), [(False, "#ffffff"), (True, "#181b20")])
def test_words_and_lines_stand_out_from_the_paper(dark: bool, paper: str) -> None:
    def contrast(colour: str) -> float:
        high, low = sorted((luminance(colour), luminance(paper)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    look = theme(dark)
    assert min(contrast(look["axis"][key]) for key in ("labelColor", "titleColor")) >= 4.5  # WCAG 2.1 AA, text
    assert min(contrast(colour) for colour in look["range"]["category"]) >= 2.3
    assert len(set(look["range"]["category"])) == len(look["range"]["category"])


def blocks_of(**blocks: int) -> pd.DataFrame:
    rows = [(name, f"block.{n}", n) for name, count in blocks.items() for n in range(count)]
    return pd.DataFrame(rows, columns=["encoder", "site", "block"])


def test_depth_is_the_block_number_or_relative() -> None:
    same, title = with_depth(blocks_of(a=3, b=3))
    assert title == "block"
    assert same.depth.tolist() == [0, 1, 2, 0, 1, 2]
    mixed, title = with_depth(blocks_of(a=5, b=3, c=1))
    assert title == "relative depth"
    assert mixed.depth.tolist() == [0, 0.25, 0.5, 0.75, 1, 0, 0.5, 1, 0]


def test_a_decoder_and_a_head_lie_behind_their_encoder() -> None:
    decoder = pd.DataFrame({"encoder": "a", "site": ["decoder.block.0", "decoder.block.1"], "block": [3, 4]})
    assert with_depth(pd.concat([blocks_of(a=3, b=3), decoder]))[0].depth.tolist()[-2:] == [3, 4]
    head = pd.DataFrame({"encoder": "a", "site": ["head.0", "head.1"], "block": -1})
    assert with_depth(pd.concat([blocks_of(a=3, b=3), head]))[0].depth.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert with_depth(pd.concat([blocks_of(a=3, b=5), head]))[0].depth.tolist()[-2:] == [1.5, 2]
    assert with_depth(head)[0].depth.tolist() == [0, 1]
    decoder = decoder.assign(block=[5, 6])  # counted on from the deepest encoder
    assert with_depth(pd.concat([blocks_of(a=3, b=5), decoder]))[0].depth.tolist()[-2:] == [1.5, 2]


def expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in {"signal", "expr", "test", "update", "init"} and isinstance(value, str):
                yield value
            yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


def test_names_of_users_never_become_part_of_an_expression() -> None:
    evil = "'+alert(1)+'"
    table = pd.DataFrame({"depth": [0, 1], "value": 0.5, "series": evil, "site": evil, "panel_name": evil})
    shapes = [
        curve_over_depth(table, value_title="v", depth_title="d", series_title="s", series=[evil], facet="panel_name"),
        heatmap(cells(np.eye(2)).assign(pair=evil), row_title="A", column_title="B", value_title="CKA", facet="pair"),
    ]
    for chart in shapes:
        vega = vl_convert.vegalite_to_vega(chart.to_dict(), config=theme())
        assert evil in json.dumps(vega, ensure_ascii=False)
        assert not [e for e in expressions(vega) if "alert" in e]


def test_the_linked_charts_mark_what_the_page_tells_them() -> None:
    text = json.dumps(linked_charts()["heat"])
    for place, value in (
        ('["@rows"]', '["x", "y"]'),
        ('["@columns"]', '["x", "y"]'),
        ('"@dark"', "0"),
        ('"@bright"', "1"),
    ):
        text = text.replace(place, value)
    heat = json.loads(text)
    pairs = itertools.product("xy", "xy")
    heat["datasets"] = {"cells": [{"row": r, "column": c, "value": 0.5, "best": r == c} for r, c in pairs]}
    count = vl_convert.vegalite_to_svg(heat, config=theme()).count(theme()["style"]["marked"]["color"])
    for param in heat["params"]:
        param["value"] = "y"
    assert count == 0
    assert vl_convert.vegalite_to_svg(heat, config=theme()).count(theme()["style"]["marked"]["color"]) == 1


SITES = {"vit": vit_sites(12), "deep": vit_sites(24), "resnet": resnet_sites(8)}


@pytest.mark.parametrize("name", ["cka", "knn"])
def test_figures_of_the_analyses_draw_encoders_of_different_kinds(name: str) -> None:
    result = {"cka": cka_result, "knn": knn_result}[name](SITES, without_cls=["resnet"])
    figures = plugins.find("analyses", name).figures(result)
    assert figures
    for figure in figures:
        svg = vl_convert.vegalite_to_svg(figure.chart.to_dict(), config=theme())
        assert svg.startswith("<svg")
        assert len(figure.table) > 0


def test_the_cka_figures_say_what_the_result_says() -> None:
    result = constant_site(cka_result(SITES), "resnet", "block.3")
    pairs, depth, distance, *_ = plugins.find("analyses", "cka").figures(result)
    table = pairs.table
    assert set(table.pair) == {
        "vit × vit",
        "vit × deep",
        "vit × resnet",
        "deep × deep",
        "deep × resnet",
        "resnet × resnet",
    }
    assert len(table[table.pair == "vit × resnet"]) == 12 * 8
    one = table[(table.pair == "vit × deep") & (table.row == 3) & (table.column == 7)].iloc[0]
    where = {"tokens": "all", "encoder_a": "vit", "encoder_b": "deep", "site_a": "block.3", "site_b": "block.7"}
    assert one.value == float(result.cka.sel(where))
    assert one.null == float(result.cka_null.sel(where))
    empty = table[table.value.isna()]
    assert set(empty.reason) == {"the activations are the same for all images"}
    assert len(empty) == 12 + 24 + 8 + 7
    last = depth.table[(depth.table.encoder_a == "vit") & (depth.table.series == "deep")].iloc[-1]
    assert (last.depth, last.site, last.site_b) == (1.0, "block.11", "block.23")
    vit = [f"block.{i}" for i in range(12)]
    own = result.cka.sel(tokens="all", encoder_a="vit", encoder_b="vit", site_a=vit, site_b=vit).values
    near = distance.table[distance.table.series == "vit"].iloc[0]
    assert near.value == pytest.approx(np.diagonal(own, 1).mean())
    assert near.depth == pytest.approx(1 / 11)


def test_an_empty_result_has_no_figures() -> None:
    empty = cka_result({"a": ["embed", "norm"]})
    assert plugins.find("analyses", "cka").figures(empty) == []


@pytest.mark.parametrize("dark", [False, True])
def test_legends_of_shapes_are_seen_on_any_paper(dark: bool) -> None:
    table = pd.DataFrame({"x": [1, 2], "y": [1, 2], "kind": ["a", "b"], "what": ["c", "d"]})
    chart = alt.Chart(table).mark_point(filled=True).encode(x="x", y="y", color="kind", shape="what")
    svg = vl_convert.vegalite_to_svg(chart.to_dict(), config=theme(dark))
    soft = theme(dark)["legend"]["labelColor"]
    symbols = re.findall(r"<path [^>]*>", svg.partition('class="mark-group role-legend"')[2])
    assert sum(f'fill="{soft}"' in symbol for symbol in symbols) == 2  # those of shapes
    assert not [symbol for symbol in symbols if re.search('"(black|#000|#000000)"', symbol)]
