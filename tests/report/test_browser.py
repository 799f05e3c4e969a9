"""The report in a real browser: what a reader sees, hovers, chooses and downloads."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.browser import NEEDS_BROWSER, Reader
from support.results import (
    SampleRun,
    cka_result,
    constant_site,
    knn_result,
    request,
    resnet_sites,
    sample_run,
    vit_sites,
)

from sightline.core import plugins
from sightline.report.page import write_report

pytestmark = NEEDS_BROWSER

PAGES = ("overview", "cka", "knn", "provenance")
HELD = [("block.1", "block.1"), ("block.6", "block.6")]  # drawn in this order
EVIL = ["</script><script>window.hacked=1</script>", '"><img src=x onerror="window.hacked=1">', "模型 α → β", "m" * 240]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    run = sample_run(tmp_path_factory.mktemp("run"))
    write_report(run)
    return run


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    """Names that try to break out, and a ResNet among ViTs of different depths."""
    sites = {EVIL[0]: vit_sites(3), EVIL[1]: resnet_sites(4), EVIL[2]: vit_sites(2), EVIL[3]: vit_sites(3)}
    cka = constant_site(cka_result(sites, [EVIL[1]]), EVIL[0], "block.1", why=EVIL[1])
    results = {"cka": cka, "knn": knn_result(sites, [EVIL[1]])}
    run = SampleRun(tmp_path_factory.mktemp("hostile"), request(EVIL, sites, list(results)), results)
    run.request["skipped"] = [[name, name] for name in EVIL]
    write_report(run)
    return run


@pytest.fixture
def reader(browser: Any, run: SampleRun) -> Iterator[Reader]:
    reader = Reader(browser, run)
    yield reader
    assert reader.problems == []
    assert [url for url in reader.requests if not url.startswith((reader.file, "blob:", "data:"))] == []
    reader.context.close()


def test_all_pages_open_without_a_request_and_without_an_error(reader: Reader) -> None:
    for page in PAGES:
        reader.open(page)
        assert reader.tab.locator(".page.open h1").count() == 1
        assert reader.tab.locator("nav a[aria-current]").get_attribute("data-page") == page
    reader.tab.click(".brand")
    reader.tab.locator('.page.open[data-page="overview"]').wait_for()  # the address changes first, the page follows
    for page in PAGES[1:]:  # every chart has something in it
        reader.open(page)
        for chart in reader.tab.locator(".page.open .chart svg").all():
            assert chart.locator("path").count() > 10


def test_hovering_a_cell_tells_the_results_numbers(reader: Reader, run: SampleRun) -> None:
    reader.open("cka")
    where = {"tokens": "all", "encoder_a": "dino", "encoder_b": "mae", "site_a": "block.5", "site_b": "block.7"}
    value, low, high, null = (float(run["cka"][n].sel(where)) for n in ("cka", "cka_low", "cka_high", "cka_null"))
    tip = reader.hover("block.5", "block.7")
    assert tip == {
        "A": "dino", "layer of A": "block.5", "B": "mae", "layer of B": "block.7",
        "CKA": f"{value:.4f} (95 % {low:.4f} – {high:.4f})", "shuffled null": f"{null:.4f}",
    }  # fmt: skip
    assert f"{value:.4f}" in reader.tab.locator(".readout").inner_text()


def test_a_missing_value_is_grey_and_says_why(reader: Reader) -> None:
    reader.open("cka")
    assert (
        reader.hover("block.5", "block.2")["CKA"] == "NaN: block.2 of mae: the activations are the same for all images"
    )
    fills = {c["fill"] for c in reader.cells() if c["column"] == "block.2"}
    assert fills == {"#e4e7eb"}
    assert reader.tab.locator(".heat .mark-rule line").count() == 12


def test_choices_change_both_charts(reader: Reader, run: SampleRun) -> None:
    reader.open("cka")
    assert len(reader.cells()) == 12 * 12
    reader.choose(type="all")
    assert len(reader.cells()) == 50 * 50
    reader.choose(type="qkv", tokens="cls", a="mae", b="dino")
    where = {"tokens": "cls", "encoder_a": "mae", "encoder_b": "dino", "site_a": "block.3.qkv", "site_b": "block.9.qkv"}
    assert reader.hover("block.3.qkv", "block.9.qkv")["CKA"].startswith(f"{float(run['cka'].cka.sel(where)):.4f}")
    titles = reader.tab.locator(".heat svg text").all_text_contents()
    assert {"mae", "dino"} <= set(titles)
    assert {"same depth", "best match"} <= set(reader.tab.locator(".curve svg text").all_text_contents())
    reader.choose(b="mae")
    assert "next layer" in reader.tab.locator(".curve svg text").all_text_contents()


def test_a_cell_and_its_point_are_linked_and_the_arrow_keys_move_the_mark(reader: Reader) -> None:
    reader.open("cka")
    marked = "document.querySelector('.readout').dataset.cell"
    sites = vit_sites(12)
    reader.hover("block.4", "block.8")
    assert reader.tab.evaluate(marked) == f"{sites.index('block.4')},{sites.index('block.8')}"
    reader.tab.focus(".heat")
    reader.tab.keyboard.press("ArrowUp")
    reader.tab.keyboard.press("ArrowLeft")
    assert reader.tab.evaluate(marked) == f"{sites.index('block.5')},{sites.index('block.7')}"
    reader.until("document.querySelector('.curve').view.signal('marked_row') === 'block.5'")
    held, other = ([c[k] for k in "xy"] for c in reader.cells() if (c["row"], c["column"]) in HELD)
    reader.tab.mouse.click(*held)
    reader.tab.mouse.move(*other)
    assert reader.tab.evaluate(marked) == f"{sites.index('block.1')},{sites.index('block.1')}"  # a click keeps the cell
    reader.tab.mouse.click(*held)  # and another lets it go
    point = reader.tab.evaluate(
        """(() => {
            const points = [...document.querySelectorAll(".curve .mark-symbol path")].map(p => [p, p.__data__.datum]);
            const [path] = points.find(([, d]) => d?.site === "block.9" && d?.series === "same depth");
            const {left, top, width, height} = path.getBoundingClientRect();
            return [left + width / 2, top + height / 2];
        })()"""
    )
    reader.tab.mouse.move(*point)
    reader.until(f"{marked} === '{sites.index('block.9')},{sites.index('block.9')}'")
    assert reader.tab.evaluate("document.querySelector('.heat').view.signal('marked_row')") == "block.9"


def test_downloads_of_the_linked_view_show_what_is_chosen(reader: Reader, run: SampleRun) -> None:
    reader.open("cka")
    reader.choose(type="fc1", tokens="patches")
    svg = ET.fromstring(reader.download(".explorer", 0))
    words = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"dino", "mae", "block.11.fc1", "CKA"} <= words
    curve = ET.fromstring(reader.download(".explorer", 3))
    words = {element.text for element in curve.iter("{http://www.w3.org/2000/svg}text")}
    assert {"CKA", "same depth"} <= words
    table = pd.read_csv(io.BytesIO(reader.download(".explorer", 1)), keep_default_na=False, na_values={"cka": [""]})
    assert len(table) == 12 * 12
    row = table[(table.site_a == "block.3.fc1") & (table.site_b == "block.8.fc1")].iloc[0]
    where = {"tokens": "patches", "encoder_a": "dino", "encoder_b": "mae", "site_a": row.site_a, "site_b": row.site_b}
    for name in ("cka", "cka_low", "cka_high", "cka_null"):
        assert float(row[name]) == pytest.approx(float(run["cka"][name].sel(where)), rel=1e-6)
    everything = pd.read_csv(
        io.BytesIO(reader.download(".explorer", 2)), usecols=["tokens", "encoder_a", "encoder_b", "cka"]
    )
    assert len(everything) == 4 * 4 * 50 * 50
    part = (
        everything.query("tokens == 'mean' and encoder_a == 'mae' and encoder_b == 'dino'")
        .cka.to_numpy()
        .reshape(50, 50)
    )
    np.testing.assert_allclose(part, run["cka"].cka.sel(tokens="mean", encoder_a="mae", encoder_b="dino"), rtol=1e-6)


def test_every_figure_can_be_downloaded_and_its_csv_is_the_table(reader: Reader, run: SampleRun) -> None:
    for analysis in ("cka", "knn"):
        for figure in plugins.find("analyses", analysis).figures(run[analysis]):
            reader.tab.goto("about:blank")  # Chromium swallows the eleventh download of a page within seconds
            reader.open(analysis)
            place = f"[data-figure='{analysis}-{figure.name}']"
            assert b"<svg" in reader.download(place, 0)
            back = list(csv.reader(io.StringIO(reader.download(place, 1).decode(), newline="")))
            assert back[0] == list(figure.table.columns)
            assert len(back) == len(figure.table) + 1
            number = "value" if "value" in figure.table else "accuracy"
            shown = [float(row[back[0].index(number)] or "nan") for row in back[1:]]
            np.testing.assert_allclose(shown, figure.table[number], rtol=1e-7)
            reader.tab.locator(f"{place} summary").click()
            reader.until(f'document.querySelectorAll("{place} tbody tr").length === {min(200, len(figure.table))}')


def test_names_of_users_are_shown_and_never_run(browser: Any, hostile: SampleRun) -> None:
    reader = Reader(browser, hostile)
    for page in PAGES:
        reader.open(page)
        assert EVIL[0] in reader.tab.locator(".page.open").inner_text() or page == "knn"
    reader.open("cka")
    reader.choose(b=EVIL[1])
    tip = reader.hover("block.1", "block.2")
    assert tip["CKA"] == f"NaN: block.1 of {EVIL[0]}: {EVIL[1]}"
    assert tip["B"] == EVIL[1]
    reader.choose(b=EVIL[2], tokens="cls")
    svg = ET.fromstring(reader.download(".explorer", 0))
    assert EVIL[2] in {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert reader.tab.evaluate("window.hacked") is None
    assert reader.tab.locator("img").count() == 0
    assert reader.problems == []
    reader.context.close()


def test_a_type_of_layer_that_one_encoder_lacks_is_said_in_words(browser: Any, hostile: SampleRun) -> None:
    reader = Reader(browser, hostile)
    reader.open("cka")
    reader.choose(type="residual")
    assert "has no layer of this type" in reader.tab.locator(".heat").inner_text()
    assert reader.tab.locator(".explorer .downloads button").first.is_disabled()
    reader.tab.click("#theme")
    reader.choose(a=EVIL[1], b=EVIL[1])
    assert len(reader.cells()) == 4 * 4
    assert reader.tab.locator(".explorer .downloads button").first.is_enabled()
    assert reader.problems == []
    reader.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_never_scrolls_sideways(browser: Any, run: SampleRun, hostile: SampleRun, scheme: str) -> None:
    for one in (run, hostile):
        reader = Reader(browser, one, viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True)
        for page in PAGES:
            reader.open(page)
            assert reader.tab.evaluate("document.documentElement.scrollWidth") <= 390, page
        assert reader.problems == []
        reader.context.close()


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_dark_mode_follows_the_system_and_the_switch_and_charts_follow_too(browser: Any, run: SampleRun) -> None:
    reader = Reader(browser, run, color_scheme="dark")
    reader.open("cka")
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.curve svg text')).fill"
    assert brightness(reader.tab.evaluate(paper)) < 60
    assert brightness(reader.tab.evaluate(ink)) > 140
    before = reader.drawn()
    reader.tab.click("#theme")
    reader.until(f"document.querySelector('.heat').dataset.ready > {before}")
    reader.until("document.querySelector('.curve').dataset.ready > 1")
    assert brightness(reader.tab.evaluate(paper)) == 255
    assert brightness(reader.tab.evaluate(ink)) < 120
    assert reader.tab.locator("#theme").inner_text() == "Dark"
    assert reader.problems == []
    reader.context.close()


def test_the_keyboard_reaches_everything_and_the_focus_is_seen(reader: Reader) -> None:
    reader.open("cka")
    reached = set()
    for _ in range(24):
        reader.tab.keyboard.press("Tab")
        reached.add(
            reader.tab.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.name"
            )
        )
        assert reader.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert {"skip", "brand", "theme", "a", "b", "type", "tokens", "chart heat"} <= reached
    unnamed = """[...document.querySelectorAll("button, select, .chart, nav")].filter(
        e => !e.textContent.trim() && !e.getAttribute("aria-label") && !e.labels?.length).length"""
    assert reader.tab.evaluate(unnamed) == 0


def test_print_shows_all_pages_without_the_controls(reader: Reader) -> None:
    reader.open("overview")
    reader.tab.emulate_media(media="print")
    assert reader.tab.locator(".page:visible").count() == len(PAGES)
    assert reader.tab.locator(".bar:visible, .controls:visible, .downloads:visible").count() == 0
