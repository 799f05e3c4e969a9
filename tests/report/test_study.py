"""The report of a study: verdicts first, each with what stands behind it."""

import base64
import html
import json
import math
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import altair as alt
import pandas as pd
import pytest
from support.browser import Reader, needs_browser
from support.verdicts import finding, part, verdict

from sightline.report.study import study_page
from sightline.report.verdicts import findings_page

EVIL = '</script><img src=x onerror="window.hacked=1">'
KINDS = {"dino": "joint-embedding", "moco": "joint-embedding", "mae": "reconstruction"}


def redrawn() -> Any:
    table = pd.DataFrame(
        {"depth": [0, 1, 0, 1], "value": [0.2, 0.5, 0.3, 0.4], "series": ["dino", "dino", "mae", "mae"]}
    )
    colour = alt.Color("series:N").scale(domain=["dino", "mae"], range="category")
    chart = (
        alt.Chart(table).mark_line().encode(x="depth:Q", y="value:Q", color=colour).properties(width=300, height=200)
    )
    paper = pd.DataFrame({"what": [EVIL], "paper": ["0.81"], "here": ["0.79"]})
    return SimpleNamespace(title="CKA over depth", caption=EVIL, chart=chart, table=table, paper=paper)


def write(folder: Path) -> str:
    parts = [
        part("CKA(dino, moco) − CKA(dino, mae)", 0.3, encoders=("dino", "moco")),
        part("seed 1", -0.05, 0.1, encoders=("mae",)),
    ]
    verdicts = [
        verdict("S1", "holds", parts=parts),
        verdict("S10", "fails", sentence=EVIL),
        verdict("S2", "unclear"),
        verdict("P1", "not measured", p=math.nan),
    ]
    findings = {id: finding(id) for id in ("S1", "S10", "S2")} | {"P1": finding("P1", paper="003", figure="")}
    path = study_page(
        folder,
        verdicts,
        findings,
        title=f"Study {EVIL}",
        figures={"001 Fig 1a": redrawn()},
        kinds=KINDS,
        papers={"001": "Shekhar et al.", "003": EVIL},
        steps={"passes": {"seconds": 12.5, "folder": EVIL}},
        notes=["One would hold by chance."],
        missing={"003 Fig 4": "a fine-tuned MAE"},
    )
    return path.read_text("utf-8")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("study"))


def test_each_paper_has_a_sentence_and_each_finding_its_verdict(text: str) -> None:
    assert "Shekhar et al.: of 3 findings 1 holds, 1 fails and 1 is unclear." in text
    assert ": none of 1 finding measured." in text
    assert "One would hold by chance." in text
    shown = re.findall(r'id="finding-(\w+)" .*? data-verdict="([\w ]+)" data-roles="(.*?)"', text)
    assert shown == [
        ("S1", "holds", "joint-embedding|reconstruction"),
        ("S2", "unclear", ""),
        ("S10", "fails", ""),
        ("P1", "not measured", ""),
    ]
    assert "a fine-tuned MAE" in text  # what the missing one needs
    assert '<a href="#/figures/drawn-paper-001-fig-1a" title="001 Fig 1a: ' in text
    assert text.count('id="drawn-paper-001-fig-1a"') == 1
    assert "Dashed: the threshold, 0. p = 0.010; adjusted p = 0.040" in text


def test_names_and_sentences_are_escaped(text: str) -> None:
    assert EVIL not in text
    assert text.count("&lt;/script&gt;&lt;img") >= 6


def test_the_figure_of_the_paper_is_drawn_once_and_its_numbers_stand_beside(text: str) -> None:
    block = re.search(r'data-block="findings">([^<]*)<', text)
    assert block is not None
    (figure,) = json.loads(zlib.decompress(base64.b64decode(block[1])))["figures"].items()
    assert figure[0] == "paper-001-fig-1a"
    assert figure[1]["fields"] == ["series"]
    assert text.count('data-figure="paper-001-fig-1a"') == 4  # of three findings, and on the page of all figures
    assert "<td>0.81</td><td>0.79</td>" in text


def test_all_figures_have_a_page_and_what_is_missing_is_told(text: str) -> None:
    page = text[text.index('<section class="page" data-page="figures" data-from="findings"') :]
    page = page[: page.index("</section>")]
    assert re.findall(r'<h2 class="paper">(.*?)</h2>|data-figure="(.*?)"', page) == [
        ("Shekhar et al.", ""),
        ("", "paper-001-fig-1a"),
    ]
    assert "<dt>003 Fig 4</dt><dd>a fine-tuned MAE</dd>" in page
    assert f"<h1>Study {html.escape(EVIL)}</h1>".replace("&quot;", "&#34;") in text


def test_figures_of_papers_say_how_to_get_their_numbers(tmp_path: Path) -> None:
    page = write(tmp_path)
    told = re.findall(r"pd\.read_csv\(&#39;(.*?)&#39;\)", page)
    assert told == [f"{tmp_path.name}/figures/paper-001-fig-1a.csv"] * 4
    table = pd.read_csv(tmp_path.parent / told[0])
    assert table.value.tolist() == [0.2, 0.5, 0.3, 0.4]
    assert f"sl.open_study(&#39;{tmp_path.name}&#39;).runs" in page


def test_effects_lie_on_one_axis_with_what_they_are_held_against() -> None:
    parts = [
        part("first", 0.5, 0.1),
        part("second", 0.0, 0.2),
        part("third", 0.1, 0.1, threshold=0.3, within=True, percent=True),
    ]
    (row,) = findings_page([verdict("S1", "unclear", parts=parts)], {}).rows
    low, high = -0.3 - 0.06 * 0.9, 0.6 + 0.06 * 0.9  # from the lower bound to the highest end, and some room
    for shown, given in zip(row.parts, parts, strict=True):
        places = [(end - low) / (high - low) * 100 for end in (given.low, given.value, given.high)]
        assert [shown.low, shown.at, shown.high] == pytest.approx(places, abs=0.01)
        bounds = [-0.3, 0.3] if given.within else [0.0]
        assert shown.bounds == pytest.approx([(end - low) / (high - low) * 100 for end in bounds], abs=0.01)
    assert [shown.word for shown in row.parts] == ["agrees", "unclear", "unclear"]
    assert row.parts[2].text == "+10.0 points (95 % +0.0 to +20.0)"
    assert row.against == ""  # they have several thresholds
    (row,) = findings_page([verdict("S1", "unclear", parts=parts[2:])], {}).rows
    assert row.against == ", ±30 points"


@needs_browser
def test_a_reader_opens_a_finding_on_a_phone(browser: Any, tmp_path: Path) -> None:
    write(tmp_path)
    reader = Reader(browser, SimpleNamespace(path=tmp_path), viewport={"width": 390, "height": 844})
    reader.open("findings")
    reader.tab.locator("#finding-S1 > summary").click()
    reader.until("document.querySelector('#finding-S1 .chart').dataset.ready")
    assert reader.tab.locator("#finding-S1 .chart svg .mark-line path").count() == 2
    assert reader.tab.evaluate("document.documentElement.scrollWidth") <= 390
    reader.tab.select_option("select[name=role]", "reconstruction")
    assert reader.tab.locator(".finding:visible .finding-id").all_inner_texts() == ["S1"]
    reader.open("figures")
    reader.until("document.querySelector('.page.open .chart').dataset.ready")
    assert reader.tab.locator(".page.open .chart svg .mark-line path").count() == 2
    reader.tab.locator(".page.open figure .table summary").click()
    reader.until("document.querySelectorAll('.page.open figure .table tbody tr').length === 4")
    assert reader.tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert reader.tab.evaluate("window.hacked") is None
    assert reader.problems == []
    reader.context.close()
