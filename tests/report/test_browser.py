"""The report in a real browser: what a reader sees, hovers, chooses and downloads."""

import csv
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
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
    similarity_result,
    vit_sites,
)
from support.verdicts import finding, part, verdict

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
        "A": "dino",
        "layer of A": "block.5",
        "B": "mae",
        "layer of B": "block.7",
        "CKA": f"{value:.4f} (95 % {low:.4f} – {high:.4f})",
        "shuffled null": f"{null:.4f}",
    }
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
    # Four digits behind the point, as they are shown.
    where = {"tokens": "patches", "encoder_a": "dino", "encoder_b": "mae", "site_a": row.site_a, "site_b": row.site_b}
    for name in ("cka", "cka_low", "cka_high", "cka_null"):
        assert float(row[name]) == pytest.approx(round(float(run["cka"][name].sel(where)), 4), abs=1e-9)
    everything = pd.read_csv(
        io.BytesIO(reader.download(".explorer", 2)), usecols=["tokens", "encoder_a", "encoder_b", "cka"]
    )
    assert len(everything) == 4 * 4 * 50 * 50
    part = (
        everything.query("tokens == 'mean' and encoder_a == 'mae' and encoder_b == 'dino'")
        .cka.to_numpy()
        .reshape(50, 50)
    )
    expected = run["cka"].cka.sel(tokens="mean", encoder_a="mae", encoder_b="dino")
    np.testing.assert_allclose(part, expected.round(4), atol=1e-9)


def test_every_figure_can_be_downloaded_and_its_csv_is_the_table(reader: Reader, run: SampleRun) -> None:
    for analysis in ("cka", "knn"):
        for figure in plugins.find("analyses", analysis).figures(run[analysis]):
            if figure.linked:
                continue
            reader.tab.goto("about:blank")  # Chromium swallows the eleventh download of a page within seconds
            reader.open(analysis)
            place = f"[data-figure='{analysis}-{figure.name}']"
            assert b"<svg" in reader.download(place, 0)
            back = list(csv.reader(io.StringIO(reader.download(place, 1).decode(), newline="")))
            assert back[0] == list(figure.table.columns)
            assert len(back) == len(figure.table) + 1
            number = "value" if "value" in figure.table else "accuracy"
            shown = [float(row[back[0].index(number)] or "nan") for row in back[1:]]
            np.testing.assert_allclose(shown, figure.table[number], rtol=1e-5)
            reader.tab.locator(f"{place} .table summary").click()
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
    assert reader.tab.evaluate("Charts.line(['=1+1', '-x', -0.5, null, 'a'])") == "'=1+1,'-x,-0.5,,a\r\n"
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


def test_a_long_list_of_pages_is_scrolled_to_the_one_that_is_open(reader: Reader) -> None:
    reader.tab.set_viewport_size({"width": 1280, "height": 300})
    seen = """(() => {
        const list = document.querySelector("nav").getBoundingClientRect();
        const own = document.querySelector("nav a[aria-current]").getBoundingClientRect();
        return own.top >= list.top - 1 && own.bottom <= list.bottom + 1;
    })()"""
    for page in (PAGES[0], PAGES[-1], PAGES[0]):
        reader.open(page)
        reader.until(f"document.querySelector('nav a[aria-current]').dataset.page === '{page}'")
        assert reader.tab.evaluate(seen)
    assert reader.tab.evaluate(
        "document.querySelector('nav').scrollHeight > document.querySelector('nav').clientHeight"
    )


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


def test_print_shows_the_open_page_or_all_of_them_without_the_controls(reader: Reader) -> None:
    for page, shown in (("knn", ["knn"]), ("everything", list(PAGES))):
        reader.open(page)
        reader.until(f"document.querySelectorAll('.page.open').length === {len(shown)}")
        assert reader.tab.locator("nav a[aria-current]").get_attribute("data-page") == page
        reader.until("[...document.querySelectorAll('.page.open .chart')].every(c => c.dataset.ready)")
        reader.tab.emulate_media(media="print")
        assert [one.get_attribute("data-page") for one in reader.tab.locator(".page:visible").all()] == shown
        assert reader.tab.locator(".side:visible, .controls:visible, .downloads:visible").count() == 0
        drawn = reader.tab.locator(".page.open .chart svg:visible, .page.open .chart canvas:visible")
        assert drawn.count() == reader.tab.locator(".page.open .chart").count() >= 1
        reader.tab.emulate_media(media="screen")


def test_no_chart_is_higher_than_a_printed_page(browser: Any, many: SampleRun) -> None:
    reader = Reader(browser, many, viewport={"width": 390, "height": 844})  # panels stand below each other
    reader.open("cka")
    heights = (
        "[...document.querySelectorAll('.page.open figure .chart svg')].map(s => s.getBoundingClientRect().height)"
    )
    assert max(reader.tab.evaluate(heights)) > 800
    reader.tab.emulate_media(media="print")
    assert 100 < max(reader.tab.evaluate(heights)) <= 19 / 2.54 * 96 + 1
    reader.context.close()


# One choice of encoders for the whole report


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    """Four encoders of two kinds, and verdicts."""
    run = sample_run(tmp_path_factory.mktemp("many"), ("dino", "mae", "moco", "simmim"), (4, 4, 4, 6))
    judged = [
        verdict("S1", "holds", parts=[part("CKA(dino, moco) − CKA(dino, mae)", 0.3, encoders=("dino", "moco"))]),
        verdict("S2", "fails", parts=[part("accuracy of mae", -0.2, encoders=("mae",))]),
        verdict("P1", "unclear"),
    ]
    claims = {"S1": finding("S1"), "S2": finding("S2"), "P1": finding("P1", paper="003")}
    write_report(run, verdicts=judged, findings=claims, kinds=KINDS)
    return run


KINDS = dict.fromkeys(("dino", "moco"), "joint-embedding") | dict.fromkeys(("mae", "simmim"), "reconstruction")
SIGNAL = "document.querySelector('.page.open figure .chart').view.signal('{}')"


@pytest.fixture
def visitor(browser: Any, many: SampleRun) -> Iterator[Reader]:
    reader = Reader(browser, many)
    yield reader
    assert reader.problems == []
    reader.context.close()


def test_pointing_at_an_encoder_highlights_it_everywhere_and_a_click_shows_it_alone(visitor: Reader) -> None:
    visitor.open("knn")
    legend = visitor.tab.locator(".page.open .legend button")
    assert legend.all_inner_texts() == ["dino", "mae", "moco", "simmim"]
    legend.nth(1).hover()
    visitor.until(f"{SIGNAL.format('pointed_encoder')} === 'mae'")
    assert "pointed" in visitor.tab.locator(".chooser li").nth(1).get_attribute("class")
    faint = """new Set([...document.querySelectorAll('.page.open figure .mark-line path')].map(
        p => [p.__data__.datum.series, getComputedStyle(p).opacity].join(' ')))"""
    visitor.until(f"[...{faint}].filter(text => !text.startsWith('mae') && text.endsWith(' 1')).length === 0")
    legend.nth(1).click()
    visitor.until(f"{SIGNAL.format('hidden_encoders')}.length === 3")
    lines = "[...document.querySelectorAll('.page.open figure .mark-line path')]"
    drawn = f"[...new Set({lines}.map(p => p.__data__.datum.series))]"
    visitor.until(f"{drawn}.join() === 'mae'")
    visitor.tab.locator('nav a[data-page="overview"]').click()
    visitor.tab.locator(".numbers tr.gone").nth(2).wait_for()
    assert visitor.tab.locator(".numbers tbody tr:not(.gone) .name").all_inner_texts() == ["mae"]
    visitor.tab.click("#everyone")
    visitor.until("document.querySelectorAll('.numbers tr.gone').length === 0")


def test_a_tick_hides_an_encoder(visitor: Reader) -> None:
    visitor.open("knn")
    visitor.tab.locator(".chooser input").nth(0).click()
    visitor.until(f"{SIGNAL.format('hidden_encoders')}.join() === 'dino'")
    assert b"dino" not in visitor.download("[data-figure='knn-depth']", 0)  # on paper as on the screen
    visitor.tab.locator(".chooser input").nth(0).click()
    visitor.until(f"{SIGNAL.format('hidden_encoders')}.length === 0")


def test_the_table_is_sorted_by_a_click_on_a_heading(visitor: Reader) -> None:
    visitor.open("overview")
    names = visitor.tab.locator(".numbers tbody .name")
    head = visitor.tab.locator(".numbers thead th").nth(2)
    head.locator("button").click()
    values = [
        float(v)
        for v in visitor.tab.locator(".numbers tbody td:nth-child(3)").evaluate_all("c => c.map(x => x.dataset.value)")
    ]
    assert values == sorted(values, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    assert names.all_inner_texts()[::-1][0] == "dino"
    visitor.tab.locator(".numbers thead button").first.click()
    assert names.all_inner_texts() == ["dino", "mae", "moco", "simmim"]


def test_a_small_picture_opens_its_page_and_the_map_has_all_encoders(visitor: Reader) -> None:
    visitor.open("overview")
    texts = visitor.tab.locator("[data-figure='overview-map'] svg text").all_text_contents()
    assert {"dino", "mae", "moco", "simmim"} <= set(texts)
    assert visitor.tab.locator("[data-multiple=knn] g path").count() == 4
    visitor.tab.click("[data-multiple=knn]")
    visitor.tab.locator('.page.open[data-page="knn"]').wait_for()


def test_a_pair_and_a_type_of_layer_are_chosen_by_their_small_matrices(visitor: Reader) -> None:
    visitor.open("cka")
    assert visitor.tab.locator(".pairs .tile").count() == 16
    assert visitor.tab.locator(".types .tile").count() == 7  # of the sample, "all" among them
    before = visitor.drawn()
    visitor.tab.locator(".pairs .tile[aria-label^='mae × simmim']").click()
    visitor.until(f"document.querySelector('.heat').dataset.ready > {before}")
    chosen = "[...document.querySelectorAll('.explorer select')].map(s => s.selectedOptions[0].text).join()"
    assert visitor.tab.evaluate(chosen) == "mae,simmim,block,all"
    visitor.tab.locator(".types .tile", has_text="qkv").click()
    visitor.until(f"{chosen} === 'mae,simmim,qkv,all'")
    visitor.tab.keyboard.press("ArrowLeft")
    assert "norm1" in visitor.tab.evaluate("document.activeElement.textContent")


# Several measures of the same pairs


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    """Three encoders, compared by three measures."""
    sites = {"dino": vit_sites(4), "mae": vit_sites(4), "moco": vit_sites(6)}
    results = {"similarity": similarity_result(sites)}
    run = SampleRun(tmp_path_factory.mktemp("measured"), request(list(sites), sites, ["similarity"]), results)
    write_report(run)
    return run


@pytest.fixture
def measurer(browser: Any, measured: SampleRun) -> Iterator[Reader]:
    reader = Reader(browser, measured, viewport={"width": 1400, "height": 900})
    yield reader
    assert reader.problems == []
    reader.context.close()


FIGURES = "[...document.querySelectorAll('.page.open figure')].filter(f => f.offsetParent).map(f => f.id).join()"


def test_one_selector_turns_the_linked_view_and_the_figures_to_a_measure(measurer: Reader, measured: SampleRun) -> None:
    measurer.open("similarity")
    own = "similarity-{0}-depth,similarity-{0}-closest,similarity-{0}-distance,similarity-{0}-distance-across"
    assert measurer.tab.evaluate(FIGURES) == own.format("procrustes")
    assert measurer.tab.locator(".measures .tile").all_inner_texts()[0].startswith("Procrustes similarity · mean 0.")
    measurer.choose(measure="shape distance (radians)", tokens="mean")
    assert measurer.tab.evaluate(FIGURES) == own.format("shape")
    where = {"measure": "shape", "tokens": "mean", "encoder_a": "dino", "encoder_b": "mae"}
    values = measured["similarity"].similarity.sel(where)
    title = "shape distance (radians)"
    told = measurer.hover("block.1", "block.3")[title]
    assert told.startswith(f"{float(values.sel(site_a='block.1', site_b='block.3')):.4f}")
    # Small means alike: the closest layer has the least value, and the brightest cell.
    closest = values.sel(site_a="block.1").sel(site_b=[f"block.{i}" for i in range(4)])
    assert f"Best match of block.1 in mae: {closest.idxmin().item()}" in measurer.tab.locator(".readout").inner_text()
    measurer.until("document.querySelector('#similarity-shape-depth .chart').dataset.ready")
    measurer.tab.locator(".measures .tile", has_text="RSA").click()
    measurer.until(f"{FIGURES} === '{own.format('rsa')}'")
    measurer.until("document.querySelector('#similarity-rsa-depth .chart').dataset.ready")
    assert measurer.tab.evaluate("document.querySelector('[name=measure]').value") == "rsa"


def test_what_is_folded_or_not_chosen_is_reached_by_search_and_downloads(measurer: Reader, measured: SampleRun) -> None:
    measurer.open("similarity")
    assert measurer.tab.evaluate("document.documentElement.scrollHeight") < 4 * 900
    measurer.tab.keyboard.press("/")
    measurer.tab.keyboard.type("rsa two encoders against distance")
    measurer.tab.keyboard.press("Enter")
    measurer.until("document.querySelector('#similarity-rsa-distance-across .chart').dataset.ready")
    assert measurer.tab.locator("#similarity-rsa-distance-across .chart svg").is_visible()
    table = pd.read_csv(io.BytesIO(measurer.download(".explorer", 2)), keep_default_na=False)
    assert list(table.columns[:4]) == ["measure", "tokens", "encoder_a", "site_a"]
    assert set(table.measure) == {"procrustes", "shape", "rsa"}
    row = table.query(
        "measure == 'rsa' and tokens == 'cls' and encoder_a == 'mae' and encoder_b == 'moco'"
        " and site_a == 'block.2' and site_b == 'block.5'"
    ).iloc[0]
    where = {"measure": "rsa", "tokens": "cls", "encoder_a": "mae", "encoder_b": "moco"}
    expected = measured["similarity"].similarity.sel(where).sel(site_a="block.2", site_b="block.5")
    assert float(row.similarity) == pytest.approx(float(expected), abs=1e-4)


def test_search_finds_figures_and_opens_them(visitor: Reader) -> None:
    visitor.open("overview")
    visitor.tab.keyboard.press("/")
    visitor.tab.keyboard.type("closest block")
    assert "Similarity with the closest block" in visitor.tab.locator("#hits").inner_text()
    visitor.tab.keyboard.press("Enter")
    visitor.tab.locator('.page.open[data-page="cka"]').wait_for()
    visitor.until("location.hash === '#/cka/cka-closest'")


def test_findings_are_filtered_and_opened(visitor: Reader) -> None:
    visitor.open("findings")
    shown = "[...document.querySelectorAll('.finding:not([hidden]) .finding-id')].map(e => e.textContent).join()"
    assert visitor.tab.evaluate(shown) == "S1,S2,P1"
    visitor.tab.select_option("select[name=verdict]", "fails")
    assert visitor.tab.evaluate(shown) == "S2"
    visitor.tab.select_option("select[name=verdict]", "")
    visitor.tab.select_option("select[name=paper]", "003")
    assert visitor.tab.evaluate(shown) == "P1"
    visitor.tab.select_option("select[name=paper]", "")
    visitor.tab.select_option("select[name=order]", "verdict")
    assert visitor.tab.evaluate(shown) == "S1,S2,P1"
    visitor.tab.locator("#finding-S1 > summary").click()
    assert visitor.tab.locator("#finding-S1 .forest").is_visible()
    assert "CKA(dino, moco)" in visitor.tab.locator("#finding-S1").inner_text()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_no_automatic_check_of_accessibility_fails(browser: Any, many: SampleRun, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="no axe-core: pip install 'sightline[dev]'")
    source = (Path(axe.__file__).parent / "axe.min.js").read_text("utf-8")
    reader = Reader(
        browser, many, viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    reader.open("overview")
    reader.tab.evaluate(source)
    if width < 600:
        reader.tab.click("#menu")
    told = []
    for page in ("overview", "findings", "cka", "knn", "provenance"):
        reader.tab.evaluate(f"location.hash = '#/{page}'")
        reader.until(f"document.querySelector('.page.open').dataset.page === '{page}'")
        reader.until("[...document.querySelectorAll('.page.open .chart')].every(c => c.dataset.ready)")
        found = reader.tab.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        told += [(page, one["id"], one["nodes"][0]["html"][:200]) for one in found]
    assert told == []
    reader.context.close()
