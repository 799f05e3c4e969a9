"""Every figure of the papers has a name, says what it needs, and becomes a file."""

import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import altair as alt
import pytest
from support.figures import frames

from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.figures import all_figures, draw, find_figure
from sightline.studies.findings import all_findings

DOCS = Path(__file__).parents[3] / "docs"
MEASUREMENTS = [
    *(f"000 Fig {n}" for n in range(1, 7)),
    *(f"001 Fig {n}" for n in range(1, 19)),
    *(f"001 Table {n}" for n in ("2b", "6", "7")),
    *(f"003 Fig {n}" for n in (*range(1, 13), "C.1", "C.2", "D.1", "E.1", "E.2", "E.3", "F.1", "F.2", "F.3")),
    "003 Table G.1",
    *(f"004 Fig {n}" for n in range(1, 6)),
]


def test_every_measurement_of_the_documents_is_there() -> None:
    assert set(all_figures()) == set(MEASUREMENTS)
    assert len(MEASUREMENTS) == 54


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_what_is_missing_is_one_phrase(evidence: Evidence, name: str) -> None:
    """With nobody there, and with everybody but no results: what it needs, never another error."""
    for roles in ((), evidence.roles):
        with pytest.raises(Missing) as error:
            draw(name, Evidence(roles, ()))
        assert error.value.needs
        assert "\n" not in error.value.needs


def test_results_that_are_named_exist() -> None:
    known = {*plugins.names("analyses"), *plugins.names("studies")}
    assert {result for figure in all_figures().values() for result in figure.results} <= known


def test_findings_name_figures_that_can_be_drawn() -> None:
    for finding in all_findings().values():
        assert find_figure(finding.figure).parts, finding.id


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("001 Fig 1b", "001 Fig 1b"),
        ("001 fig. 1 B", "001 Fig 1b"),
        ("001, Figure 1b", "001 Fig 1b"),
        ("002 Fig 6", "000 Fig 6"),
        ("003 Fig e.2", "003 Fig E.2"),
        ("003 table G.1", "003 Table G.1"),
        ("003 Fig 1 middle", "003 Fig 1b"),
        ("004 Fig 5 right", "004 Fig 5b"),
        ("001 Fig 14", "001 Fig 14"),
    ],
)
def test_names_are_read_as_papers_are_cited(written: str, meant: str) -> None:
    assert find_figure(written).id == meant


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("Figure one", "names no figure"),
        ("001 Fig 99", "no measurement"),
        ("001 Fig 1z", "names no figure"),
        ("001 Fig 1c", "has no part 'c'"),
        ("000 Fig 5 middle", "has no part 'middle'"),
        ("004 Table 1", "no measurement"),
        ("003 Fig 3b", "has no parts"),
    ],
)
def test_other_names_are_one_sentence(written: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        find_figure(written)


def test_parts_that_cannot_be_drawn_are_left_out_and_told(evidence: Evidence) -> None:
    pre_trained = Evidence(tuple(role for role in evidence.roles if not role.tuned), evidence.runs)
    figure = draw("000 Fig 5", pre_trained)
    assert len(frames(figure.chart)) == 2
    assert list(figure.missing) == ["b", "c", "d", "f"]
    assert figure.missing["c"] == "a fine-tuned mae: add `--steps finetune`"
    assert "is not drawn: it needs a fine-tuned mae" in figure.caption
    assert set(figure.table.part) == {"a", "e"}


@pytest.mark.parametrize("name", ["000 Fig 4", "001 Table 6", "003 Fig 2", "003 Fig 8", "004 Fig 2"])
def test_files_are_valid_and_say_what_they_are(evidence: Evidence, name: str) -> None:
    figure = draw(name, evidence)
    svg = figure.svg()
    drawing = ET.fromstring(svg)
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    words = " ".join(text for text in drawing.itertext() if text.strip())
    assert f"{name}: {figure.title}" in words
    titles = [part.title for part in all_figures()[name].parts.values()]
    assert all(title in words for title in titles)
    pdf = figure.pdf()
    assert pdf.startswith(b"%PDF-")
    assert pdf.rstrip().endswith(b"%%EOF")
    assert re.fullmatch(r"[\w-]+", figure.name)


def test_the_papers_numbers_stand_in_the_files(evidence: Evidence) -> None:
    words = " ".join(ET.fromstring(draw("000 Fig 4", evidence).svg()).itertext())
    assert "0.9341 (DINO and MoCo v3) in the paper, here" in words
    words = " ".join(ET.fromstring(draw("001 Table 7", evidence).svg()).itertext())
    assert "paper 51.57" in words
    assert "in the paper, here" not in words  # they stand in the cells


def test_encoders_keep_their_colours_from_figure_to_figure(evidence: Evidence) -> None:
    strokes = []
    for name in ("003 Fig 3", "003 Fig C.1a"):
        spec = draw(name, evidence).svg()
        strokes.append(set(re.findall(r'stroke="(#[0-9a-f]{6})" stroke-width="2"', spec)))
    assert len(strokes[0]) == 2
    assert strokes[0] < strokes[1]


def test_the_inventory_of_the_docs_is_that_of_the_code() -> None:
    page = (DOCS / "figures.md").read_text("utf-8")
    rows = re.findall(r"^\| (00\d .+?) \| (.+?) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    expected = []
    for figure in all_figures().values():
        parts = "; ".join(f"({letter}) {part.title}" for letter, part in figure.parts.items() if letter)
        shows = f"{figure.title}: {parts}" if parts else figure.title
        expected.append((figure.id, shows, ", ".join(f"`{name}`" for name in figure.results), figure.roles))
    assert rows == expected


def test_letters_are_in_order() -> None:
    for figure in all_figures().values():
        letters = list(figure.parts)
        assert letters in ([""], ["b"]) or letters == list(itertools.islice("abcdefgh", len(letters)))


@pytest.mark.parametrize("name", [n for n, f in all_figures().items() if f.one_legend and len(f.parts) > 1])
def test_parts_that_share_a_scale_name_the_same_values(evidence: Evidence, name: str) -> None:
    """Vega would join two lists, and warn of it in the reader's console."""
    with alt.data_transformers.enable("default", max_rows=None):
        spec = draw(name, evidence).chart.to_dict()
    shared = {channel for channel, how in spec["resolve"]["scale"].items() if how == "shared"}
    found: dict[str, list[object]] = {channel: [] for channel in shared}

    def look(part: object) -> None:
        if isinstance(part, list):
            for one in part:
                look(one)
        elif isinstance(part, dict):
            for channel in shared & part.get("encoding", {}).keys():
                domain = (part["encoding"][channel].get("scale") or {}).get("domain")
                if isinstance(domain, list) and domain not in found[channel]:
                    found[channel].append(domain)
            look([value for key, value in part.items() if key != "datasets"])

    look(spec)
    assert [domains for domains in found.values() if len(domains) > 1] == []
