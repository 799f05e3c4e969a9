"""Run folder → one HTML file that works from disk without a network, and its figures as files. Needs no model.

The page carries its data: tables as columns, matrices as base64 float32. What comes from users (names of encoders,
classes, folders, reasons) is escaped by the templates, or travels as JSON without `<` and is set as text. The page's
security policy allows its own scripts, by their hashes, and no request to anywhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
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
import vl_convert
import xarray as xr
from markupsafe import Markup

from sightline.core import ownership, plugins
from sightline.core.errors import InputError, counted
from sightline.report.attention_viewer import pack_viewer
from sightline.report.explorer import pack_explorer
from sightline.report.figures import DARK, LIGHT, Figure, Table, same_colours, theme
from sightline.report.gallery import Gallery, pack_gallery
from sightline.report.html import asset, clean, cleaned, render, script_json
from sightline.report.pictures import Pictures, pack_pictures, sheet_png

if TYPE_CHECKING:
    from sightline.core.run_folder import Run

__all__ = ["write_report"]


SCRIPTS = ("charts.js", "explorer.js", "viewer.js", "page.js")
ABOUT = {  # by kind of run
    "": "All were measured in one pass over the same images.",
    "detection": "A detector of the same kind was trained on each, and all were tested on the same images.",
    "segmenters": "A head of the same kind was trained on each, and all were tested on the same images.",
    "rcdm": "One diffusion model draws pictures from the representations of all, for the same images.",
    "reinit": "All were fine-tuned with the same settings and tested on the same images.",
}
CARDS = 12  # of an analysis on the overview; the others are folded
Facts = Mapping[str, object]  # name → a JSON value


@dataclass(frozen=True)
class FigureText:
    """What the page says about a figure; its data is drawn by `stem`."""

    stem: str
    title: str
    caption: str


@dataclass(frozen=True)
class AnalysisPage:
    """What one analysis contributes; its question and headline numbers stand on the overview as well."""

    template: ClassVar[str] = "analysis.html"
    key: str
    title: str
    question: str
    left_out: Mapping[str, str]  # encoders that the analysis could not look at, and why
    sentences: Sequence[str]
    explorer: Mapping[str, Any] | None
    viewer: Mapping[str, Any] | None
    pictures: Pictures | None
    headlines: Sequence[tuple[str, str, str]]  # label, number, detail
    tables: Sequence[Table]
    gallery: Gallery | None
    figures: Sequence[FigureText]
    problem: str
    formula: str
    how_to_read: str
    source: str
    protocol: Facts


@dataclass(frozen=True)
class EncoderCard:
    """An encoder on the overview, with the colours it has in all figures."""

    name: str
    light: str
    dark: str
    facts: Facts
    notes: object


@dataclass(frozen=True)
class Overview:
    """The first page."""

    template: ClassVar[str] = "overview.html"
    key: ClassVar[str] = "overview"
    title: ClassVar[str] = "Overview"
    cards: ClassVar[int] = CARDS
    heading: str
    about: str
    analyses: Sequence[AnalysisPage]
    absent: Facts  # analyses that were not measured, and why
    encoders: Sequence[EncoderCard]
    images: Facts


@dataclass(frozen=True)
class Provenance:
    """The last page."""

    template: ClassVar[str] = "provenance.html"
    key: ClassVar[str] = "provenance"
    title: ClassVar[str] = "Provenance"
    command: str
    parts: Sequence[tuple[str, Facts]]  # headings and what stands below
    skipped: Sequence[Sequence[str]]  # images that could not be read, and why


def write_report(run: Run) -> Path:
    """Write `report.html` and `figures/<analysis>-<name>.svg|pdf|csv` into the run folder; returns the page's path."""
    if run.path is None:
        raise InputError("The run is in memory only; give analyze() a folder, out=..., to get a report")
    data: dict[str, Any] = {
        "themes": {"light": theme(), "dark": theme(dark=True)}, "figures": {}, "explorers": {}, "viewers": {},
    }  # fmt: skip
    encoders = [clean(entry["name"]) for entry in run.request.get("encoders", [])]
    analyses = [_analysis(run, name, encoders, data) for name in run.names()]
    scripts = [_vega(), *map(asset, SCRIPTS)]
    page = render(
        "page.html",
        title=run.path.name,
        hashes=[base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts],
        style=asset("report.css"),
        pages=[_overview(run, analyses), *analyses, _provenance(run)],
        data=script_json(data),
        scripts=scripts,
    )
    path = run.path / "report.html"
    ownership.write(run.path, path, page.encode("utf-8"))
    return path


@functools.cache
def _vega() -> Markup:
    """Vega, Vega-Lite and their loader as one script, from the renderer that also draws the static figures."""
    bundle = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return Markup(bundle.replace("\r", "").replace("</script", "<\\/script"))


# --- overview and provenance ------------------------------------------------------------------------------------------


def _overview(run: Run, analyses: Sequence[AnalysisPage]) -> Overview:
    encoders = run.request.get("encoders", [])
    names = [str(e["name"]) for e in encoders]
    images = dict(run.request.get("images", {}))
    if isinstance(images.get("classes"), list):
        images["number of classes"] = len(images["classes"])
    return Overview(
        heading=" × ".join(names)
        if 0 < len(names) <= 3 and sum(map(len, names)) < 80
        else counted(len(names), "encoder"),
        about=ABOUT.get(run.request.get("kind", ""), ABOUT[""]),
        analyses=analyses,
        absent={name: why for name, why in run.request.get("left_out", {}).items() if isinstance(why, str)},
        encoders=[_encoder(entry, i) for i, entry in enumerate(encoders)],
        images=images,
    )


def _encoder(entry: Mapping[str, Any], position: int) -> EncoderCard:
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
    light, dark = (colours[position % len(colours)] for colours in (LIGHT, DARK))
    return EncoderCard(entry["name"], light, dark, facts, entry.get("notes"))


def _provenance(run: Run) -> Provenance:
    request = dict(run.request)
    skipped = request.pop("skipped", None) or []
    command = request.pop("command", None) or ""
    encoders = request.pop("encoders", [])
    request["analyses"] = {name: _asked(settings) for name, settings in request.get("analyses", {}).items()}
    grouped = {key.replace("_", " ").capitalize(): value for key, value in request.items() if isinstance(value, dict)}
    single = {key: value for key, value in request.items() if not isinstance(value, dict)}
    return Provenance(
        command=" ".join(map(str, command)) if isinstance(command, (list, tuple)) else command,
        parts=[
            ("Run", {"folder": run.path.name if run.path else None} | single),
            *grouped.items(),
            *((f"Encoder {entry['name']}", entry) for entry in encoders),
        ],
        skipped=[(pair[0], pair[-1]) for pair in skipped if pair],
    )


# --- one analysis -----------------------------------------------------------------------------------------------------


def _analysis(run: Run, name: str, encoders: Sequence[str], data: dict[str, Any]) -> AnalysisPage:
    """The page of one analysis; its figures go into `data` and into the folder."""
    assert run.path is not None
    result = cleaned(run[name])
    module, problem = _module(name)
    word = functools.partial(getattr, module)
    title = str(word("TITLE", name))
    packed = {"explorers": pack_explorer(result, title), "viewers": pack_viewer(result)}
    for kind, found in packed.items():
        if found:
            data[kind][name] = found
    headlines: list[tuple[str, str, str]] = []
    sentences: list[str] = []
    tables: list[Table] = []
    figures: list[FigureText] = []
    try:
        headlines += word("headlines", lambda _: [])(result)
        sentences += word("summary", lambda _: [])(result)
        tables += word("tables", lambda _: [])(result)
        for figure in word("figures", lambda _: [])(result):
            stem = f"{name}-{figure.name}"
            data["figures"][stem] = _figure(run.path, name, figure, encoders)
            figures.append(FigureText(stem, figure.title, figure.caption))
    except InputError:
        raise
    except Exception as error:  # a plugin may be anyone's: the other pages are still worth having
        problem = f"The figures of {name!r} could not be drawn: {type(error).__name__}: {error}"
        warnings.warn(problem, stacklevel=2)
    left_out = run.request.get("left_out", {}).get(name)
    return AnalysisPage(
        key=name,
        title=title,
        question=str(word("QUESTION", "")),
        left_out=left_out if isinstance(left_out, Mapping) else {},
        sentences=sentences,
        explorer=packed["explorers"],
        viewer=packed["viewers"],
        pictures=_pictures(run.path, name, result),
        headlines=headlines,
        tables=tables,
        gallery=pack_gallery(result),
        figures=figures,
        problem=problem,
        formula=word("FORMULA", "").strip(),
        how_to_read=word("HOW_TO_READ", "").strip(),
        source=word("SOURCE", "").strip(),
        protocol=_protocol(run, name, result),
    )


def _module(name: str) -> tuple[object, str]:
    try:
        return plugins.module_of(name), ""
    except InputError as error:
        return ModuleType(name), f"{error}: its results are in the run folder, but there is nothing to draw them with."


def _asked(settings: Mapping[str, Any]) -> dict[str, object]:
    """Settings of an analysis, flat, with the number of sites in place of their names.

    >>> _asked({"config": {"k": 20}, "splits": ["test"], "sites": {"dino": ["block.0", "block.1"]}})
    {'k': 20, 'splits': ['test'], 'number of sites': {'dino': 2}}
    """
    flat: dict[str, object] = dict(settings.get("config") or {})
    flat |= {key: value for key, value in settings.items() if key not in {"config", "sites", "name"}}
    if isinstance(settings.get("sites"), Mapping):
        flat["number of sites"] = {name: len(sites) for name, sites in settings["sites"].items()}
    return flat


def _protocol(run: Run, name: str, result: xr.Dataset) -> Facts:
    """Settings and attributes of an analysis; attributes may be JSON strings."""
    rows = _asked(run.request.get("analyses", {}).get(name) or {})
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
    found = pack_pictures(result)
    if found is not None:
        for number, pixels in enumerate(result.pictures.values):
            ownership.write(run, run / "figures" / f"{analysis}-pictures-{number + 1}.png", sheet_png(pixels))
    return found


# --- figures ----------------------------------------------------------------------------------------------------------


def _figure(run: Path, analysis: str, figure: Figure, encoders: Sequence[str]) -> dict[str, Any]:
    """Write the static files of a figure; returns what the page needs to draw it."""
    if not re.fullmatch(r"[\w-]+", figure.name):
        raise InputError(
            f"The figure name {figure.name!r} of {analysis!r} is a file name: use letters, digits, '-' and '_'"
        )
    table = figure.table.map(lambda v: clean(v) if isinstance(v, str) else v)
    with alt.data_transformers.enable("default", max_rows=None), alt.theme.enable("none"):
        spec = figure.chart.to_dict()
    same_colours(spec, encoders)
    spec["datasets"] = {
        key: [{k: clean(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows]
        for key, rows in spec.get("datasets", {}).items()
    }
    svg = vl_convert.vegalite_to_svg(spec, config=theme())
    files = {"svg": svg.encode(), "pdf": vl_convert.svg_to_pdf(svg), "csv": table.to_csv(index=False).encode()}
    for suffix, content in files.items():
        ownership.write(run, run / "figures" / f"{analysis}-{figure.name}.{suffix}", content)
    datasets = {key: _columns(pd.DataFrame(rows), digits=6) for key, rows in spec.pop("datasets").items()}
    return {"spec": spec, "datasets": datasets, "table": _columns(table, digits=8)}


def _columns(table: pd.DataFrame, digits: int) -> dict[str, Any]:
    """A table as columns; numbers with so many significant digits, repeated words once.

    >>> _columns(pd.DataFrame({"x": [0.123456789, float("nan")], "y": ["a", "a"]}), 3)["columns"]
    [[0.123, None], {'words': ['a'], 'codes': [0, 0]}]
    """
    columns: list[Any] = []
    for column in (table.iloc[:, i] for i in range(table.shape[1])):
        if pd.api.types.is_bool_dtype(column):
            columns.append(column.tolist())
        elif pd.api.types.is_numeric_dtype(column):
            exact = pd.api.types.is_integer_dtype(column)
            numbers = (v if exact else float(f"{v:.{digits}g}") for v in column.tolist())
            columns.append([v if np.isfinite(v) else None for v in numbers])
        else:
            texts = [None if v is None or v != v else str(v) for v in column.tolist()]
            words = {text: code for code, text in enumerate(dict.fromkeys(texts))}
            columns.append({"words": list(words), "codes": [words[text] for text in texts]})
    return {"rows": len(table), "names": [clean(n) for n in table.columns], "columns": columns}
