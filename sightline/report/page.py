"""Run folder → one HTML file that works from disk without a network, and its figures as files. Needs no model.

The page carries its data (packing.py). What comes from users (names of encoders, classes, folders, reasons) is escaped
by the templates, or travels as data and is set as text.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from sightline.core import plugins
from sightline.core.contract import TOPICS
from sightline.core.errors import InputError, counted, nearest
from sightline.core.files import write_atomically
from sightline.core.folders import refuse_links
from sightline.core.tables import csv
from sightline.report.attention_viewer import pack_viewer
from sightline.report.explorer import pack_explorer
from sightline.report.figures import Figure, Table, pdf_of, same_colours, specification, svg_of, theme
from sightline.report.gallery import Gallery, pack_gallery
from sightline.report.html import clean, cleaned, sentences
from sightline.report.overview import Multiple, NumberTable, map_figure, multiples, number_table
from sightline.report.packing import columns, shared_columns
from sightline.report.pictures import Pictures, pack_pictures, sheet_png
from sightline.report.provenance import Facts, asked, provenance_page
from sightline.report.shell import Page, Shown, assemble, shown_encoders
from sightline.report.standing import SENTENCES, Standing, conclusions, stand, topic_place
from sightline.report.verdicts import FindingsPage, findings_page

if TYPE_CHECKING:
    from sightline.core.run_folder import Run
    from sightline.studies.findings.contract import Finding, Verdict


ABOUT = {  # by kind of run
    "": "All were measured in one pass over the same images.",
    "detection": "A detector of the same kind was trained on each, and all were tested on the same images.",
    "segmenters": "A head of the same kind was trained on each, and all were tested on the same images.",
    "rcdm": "One diffusion model draws pictures from the representations of all, for the same images.",
    "reinit": "All were fine-tuned with the same settings and tested on the same images.",
}
CAPTION = 420  # letters of a caption that are shown at once


@dataclass(frozen=True)
class FigureText:
    """What the page says about a figure; its data is drawn by `stem`."""

    stem: str
    title: str
    caption: str
    analysis: str
    folder: str  # of the run, for whoever wants the numbers
    choice: str = ""  # one of several that are shown one at a time
    folded: bool = False  # drawn when a reader opens it

    @property
    def parts(self) -> tuple[str, str]:
        """The caption: its first sentences, and what is folded."""
        told = sentences(self.caption)
        most = max(1, sum(len(" ".join(told[: n + 1])) <= CAPTION for n in range(len(told))))
        return " ".join(told[:most]), " ".join(told[most:])


@dataclass(frozen=True)
class AnalysisPage:
    """What one analysis contributes."""

    template: ClassVar[str] = "analysis.html"
    key: str
    title: str
    topic: str
    question: str
    folder: str
    left_out: Mapping[str, str]  # encoders that the analysis could not look at, and why
    sentences: Sequence[str]  # in short
    more: Sequence[str]  # what else there is to say
    explorer: Mapping[str, Any] | None
    viewer: Mapping[str, Any] | None
    pictures: Pictures | None
    headlines: Sequence[tuple[str, str, str]]  # label, number, detail
    tables: Sequence[Table]
    gallery: Gallery | None
    figures: Sequence[FigureText]
    choices: Sequence[str]  # of figures that are shown one at a time, unless the linked view has the same choice
    chosen: str  # the first of them
    problem: str
    formula: str
    how_to_read: str
    source: str
    protocol: Facts


@dataclass(frozen=True)
class EncoderCard:
    """An encoder on the overview."""

    shown: Shown
    facts: Facts
    notes: object


@dataclass(frozen=True)
class Overview:
    """The first page: what was found, who is alike, the numbers, and where each analysis has its page."""

    template: ClassVar[str] = "overview.html"
    key: ClassVar[str] = "overview"
    title: ClassVar[str] = "Overview"
    topic: ClassVar[str] = ""
    heading: str
    about: str
    sentences: Sequence[str]
    findings: FindingsPage | None
    map: FigureText | None
    table: NumberTable | None
    topics: Sequence[tuple[str, Sequence[Multiple]]]  # a question, and what answers it
    absent: Facts  # analyses that were not measured, and why
    encoders: Sequence[EncoderCard]
    images: Facts


def write_report(
    run: Run,
    *,
    verdicts: Sequence[Verdict] = (),
    findings: Mapping[str, Finding] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """Write `report.html` and `figures/<analysis>-<name>.svg|pdf|csv` into the run folder; returns the page's path.

    verdicts, findings  what was decided from these results, and by its identifier what each finding claims
    kinds               what encoders are, such as their objectives: those of a kind share a hue
    """
    if run.path is None:
        raise InputError("The run is in memory only; give analyze() a folder, out=..., to get a report")
    refuse_links(run.path)
    names = [str(entry["name"]) for entry in run.request.get("encoders", [])]
    shown = shown_encoders(names, kinds)
    analyses, data = [], {}
    for name in sorted(run.names(), key=topic_place):
        page, data[name] = _analysis(run, name, shown)
        analyses.append(page)
    judged = findings_page(verdicts, findings or {}) if verdicts else None
    told = (verdicts, findings or {})
    first, data["overview"] = _overview(run, analyses, shown, judged, told)
    pages: list[Page] = [first, *([] if judged is None else [judged]), *analyses, provenance_page(run)]
    text = assemble(run.path.name, pages, data, shown)
    path = run.path / "report.html"
    write_atomically(path, text.encode("utf-8"))
    return path


# --- overview ---------------------------------------------------------------------------------------------------------


def _overview(
    run: Run,
    analyses: Sequence[AnalysisPage],
    shown: Sequence[Shown],
    judged: FindingsPage | None,
    told: tuple[Sequence[Verdict], Mapping[str, Finding]],
) -> tuple[Overview, dict[str, Any]]:
    assert run.path is not None
    encoders, names = run.request.get("encoders", []), [encoder.name for encoder in shown]
    images = dict(run.request.get("images", {}))
    if isinstance(images.get("classes"), list):
        images["number of classes"] = len(images["classes"])
    standing = stand(run)
    small, drawn = multiples(standing, [(page.key, page.title, page.question) for page in analyses])
    by_topic = {topic: [m for m, page in zip(small, analyses, strict=True) if page.topic == topic] for topic in TOPICS}
    data: dict[str, Any] = {"figures": {}, "multiples": drawn}
    table = number_table(standing)
    page = Overview(
        heading=" × ".join(names)
        if 0 < len(names) <= 3 and sum(map(len, names)) < 80
        else counted(len(names), "encoder"),
        about=ABOUT.get(run.request.get("kind", ""), ABOUT[""]),
        sentences=conclusions(standing, *told),
        findings=judged,
        map=_map(run.path, standing, shown, data["figures"]),
        table=table,
        topics=[(TOPICS[topic], members) for topic, members in by_topic.items() if members],
        absent={name: why for name, why in run.request.get("left_out", {}).items() if isinstance(why, str)},
        encoders=[_encoder(entry, own) for entry, own in zip(encoders, shown, strict=True)],
        images=images,
    )
    return page, data


def _map(run: Path, standing: Standing, shown: Sequence[Shown], data: dict[str, Any]) -> FigureText | None:
    figure = map_figure(standing.likeness, shown)
    if figure is None:
        return None
    stem = f"overview-{figure.name}"
    data[stem] = draw_figure(run, "overview", figure, shown)
    return FigureText(stem, figure.title, figure.caption, "", run.name)


def _encoder(entry: Mapping[str, Any], shown: Shown) -> EncoderCard:
    facts = {
        key: value for key, value in entry.items() if key not in {"name", "preprocess", "notes"} and value is not None
    }
    size, tokens = (entry.get("preprocess") or {}).get("size"), entry.get("tokens")
    if isinstance(size, Sequence):
        facts["input"] = " × ".join(map(str, size)) + " pixels"
    if isinstance(tokens, Mapping) and isinstance(tokens.get("grid"), Sequence):
        cls = "with" if tokens.get("cls") is not None else "without"
        grid = " × ".join(map(str, tokens["grid"]))
        facts["tokens"] = f"{grid} patches + {tokens.get('prefix', 0)}, {cls} class token"
    return EncoderCard(shown, facts, entry.get("notes"))


# --- one analysis -----------------------------------------------------------------------------------------------------


def _analysis(run: Run, name: str, shown: Sequence[Shown]) -> tuple[AnalysisPage, dict[str, Any]]:
    """The page of one analysis and its data; the files of its figures go into the folder."""
    assert run.path is not None
    result = cleaned(run[name])
    module, problem = _module(name)
    word = functools.partial(getattr, module)
    title = str(word("TITLE", name))
    explorer, viewer = pack_explorer(result, title), pack_viewer(result)
    data: dict[str, Any] = {"figures": {}, "explorer": explorer, "viewer": viewer}
    headlines: list[tuple[str, str, str]] = []
    said: list[str] = []
    tables: list[Table] = []
    figures: list[FigureText] = []
    try:
        headlines += word("headlines", lambda _: [])(result)
        said += word("summary", lambda _: [])(result)
        tables += word("tables", lambda _: [])(result)
        for figure in word("figures", lambda _: [])(result):
            stem = f"{name}-{figure.name}"
            drawn = draw_figure(run.path, name, figure, shown)
            if not (figure.linked and explorer):
                data["figures"][stem] = drawn
                more = {"choice": clean(figure.choice), "folded": figure.folded}
                figures.append(FigureText(stem, figure.title, figure.caption, name, run.path.name, **more))
    except InputError:
        raise
    except Exception as error:  # a plugin may be anyone's: the other pages are still worth having
        problem = f"The figures of {name!r} could not be drawn: {type(error).__name__}: {error}"
        warnings.warn(problem, stacklevel=2)
    left_out = run.request.get("left_out", {}).get(name)
    short = sentences(" ".join(said))
    choices = list(dict.fromkeys(figure.choice for figure in figures if figure.choice))
    offered = [measure["name"] for measure in explorer["measures"]] if explorer else []
    linked = set(choices) <= set(offered)
    page = AnalysisPage(
        key=name,
        title=title,
        topic=_topic(module),
        question=str(word("QUESTION", "")),
        folder=run.path.name,
        left_out=left_out if isinstance(left_out, Mapping) else {},
        sentences=short[:SENTENCES],
        more=said if len(short) > SENTENCES else [],
        explorer=explorer,
        viewer=viewer,
        pictures=_pictures(run.path, name, result),
        headlines=headlines,
        tables=tables,
        gallery=pack_gallery(result),
        figures=figures,
        choices=[] if linked else choices,
        chosen=(offered if linked else choices)[0] if choices else "",
        problem=problem,
        formula=word("FORMULA", "").strip(),
        how_to_read=word("HOW_TO_READ", "").strip(),
        source=word("SOURCE", "").strip(),
        protocol=_protocol(run, name, result),
    )
    return page, data


def _topic(module: object) -> str:
    topic = str(getattr(module, "TOPIC", "other"))
    return topic if topic in TOPICS else "other"


def _module(name: str) -> tuple[object, str]:
    try:
        return plugins.module_of(name), ""
    except InputError as error:
        return ModuleType(name), f"{error}: its results are in the run folder, but there is nothing to draw them with."


def _protocol(run: Run, name: str, result: xr.Dataset) -> Facts:
    """Settings and attributes of an analysis; attributes may be JSON strings."""
    rows = asked(run.request.get("analyses", {}).get(name) or {})
    for key, value in result.attrs.items():
        if key in {"analysis", "provenance"}:  # told by the title and on a page of its own
            continue
        try:
            rows[str(key)] = json.loads(value) if isinstance(value, str) and value[:1] in "[{" else value
        except ValueError:
            rows[str(key)] = value
    shown = ("viewer_", "gallery_", "picture_")
    sizes = {str(k): int(v) for k, v in result.sizes.items() if not str(k).startswith(shown)}
    values = {k: v.item() if isinstance(v, np.generic) else v for k, v in rows.items()}
    return values | {"size of the result": sizes}


def _pictures(run: Path, analysis: str, result: xr.Dataset) -> Pictures | None:
    """The pictures of a result; each sheet is a file, too."""
    pictures = pack_pictures(result)
    if pictures is not None:
        for number, pixels in enumerate(result.pictures.values):
            write_atomically(run / "figures" / f"{analysis}-pictures-{number + 1}.png", sheet_png(pixels))
    return pictures


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_figure(run: Path, analysis: str, figure: Figure, shown: Sequence[Shown]) -> dict[str, Any]:
    """Write the static files of a figure; returns what the page needs to draw it."""
    if not re.fullmatch(r"[\w-]+", figure.name):
        raise InputError(
            f"The figure name {figure.name!r} of {analysis!r} is a file name: use letters, digits, '-' and '_'"
        )
    table = figure.table.map(lambda v: clean(v) if isinstance(v, str) else v)
    spec = specification(figure.chart, [encoder.name for encoder in shown])
    svg = svg_of(spec, [encoder.light for encoder in shown])
    files = {"svg": svg.encode(), "pdf": pdf_of(svg), "csv": csv(table)}
    for suffix, content in files.items():
        write_atomically(run / "figures" / f"{analysis}-{figure.name}.{suffix}", content)
    datasets = {key: columns(pd.DataFrame(rows)) for key, rows in spec.pop("datasets").items()}
    fields = _encoder_fields(datasets, {encoder.name for encoder in shown})
    return {"spec": spec, "datasets": datasets, "table": shared_columns(columns(table), datasets), "fields": fields}


def _encoder_fields(datasets: Mapping[str, Mapping[str, Any]], encoders: set[str]) -> list[str]:
    """Columns that name encoders and nothing else: by them the reader's choice of encoders reaches the figure.

    >>> data = {"rows": 2, "names": ["series", "site"], "columns": [{"words": ["a"], "codes": [0, 0]}, [1, 2]]}
    >>> _encoder_fields({"d": data}, {"a", "b"})
    ['series']
    """
    shared: dict[str, bool] = {}
    for data in datasets.values():
        for name, column in zip(data["names"], data["columns"], strict=True):
            own = isinstance(column, dict) and set(column["words"]) - {None} <= encoders and column["words"] != [None]
            shared[name] = shared.get(name, True) and own
    return [name for name, own in shared.items() if own]


# For those who work in Python: `run.figure`, `run.report`


def chart(run: Run, analysis: str, figure: str | None = None) -> Any:
    """A figure of an analysis as a chart with the colours and fonts of the report; the first one unless it is named."""
    figures = {one.name: one for one in plugins.module_of(analysis).figures(cleaned(run[analysis]))}
    if not figures:
        raise InputError(f"There is nothing to draw of {analysis!r}: no number of it is known in this run")
    name = next(iter(figures)) if figure is None else figure
    if name not in figures:
        raise InputError(f"{analysis!r} has no figure {name!r}{nearest(name, figures)}")
    with alt.data_transformers.enable("default", max_rows=None), alt.theme.enable("none"):
        spec = figures[name].chart.to_dict()
    same_colours(spec, [clean(encoder["name"]) for encoder in run.request.get("encoders", [])])
    return alt.Chart.from_dict(spec | {"config": theme()})


def page_of(run: Run) -> Path:
    """The page of a run, written if it is not there or older than one of its results."""
    page = None if run.path is None else run.path / "report.html"
    if page is not None and page.is_file():
        changed = [run.file(name).stat().st_mtime_ns for name in run.names()]
        if page.stat().st_mtime_ns >= max(changed, default=0):
            return page
    return write_report(run)
