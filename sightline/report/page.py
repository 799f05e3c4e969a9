"""Run folder → one HTML file that works from disk without a network, and its figures as files. Needs no model.

The page carries its data: tables as columns, matrices as base64 float32. What comes from users (names of encoders,
classes, folders, reasons) is escaped as HTML, or travels as JSON without `<` and is set as text. The page's security
policy allows its own scripts, by their hashes, and no request to anywhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd
import vl_convert
import xarray as xr

from sightline.core import ownership, plugins
from sightline.core.errors import InputError, counted
from sightline.report.attention_viewer import pack_viewer
from sightline.report.explorer import explorer_html, pack_explorer
from sightline.report.figures import DARK, LIGHT, Figure, same_colours, theme
from sightline.report.html import asset, clean, cleaned, escaped, in_words, script_json

if TYPE_CHECKING:
    from sightline.core.run_folder import Run

__all__ = ["write_report"]


SCRIPTS = ("charts.js", "explorer.js", "viewer.js", "page.js")
ABOUT = {  # by kind of run
    "": "All were measured in one pass over the same images.",
    "reinit": "All were fine-tuned with the same settings and tested on the same images.",
}
CARDS = 12  # of an analysis on the overview; the others are folded


class Page(NamedTuple):
    """What one analysis contributes: its page, and its question and headline numbers for the overview."""

    key: str
    title: str
    question: str
    body: str
    headlines: list[tuple[str, str, str]]  # label, number, detail


def write_report(run: Run) -> Path:
    """Write `report.html` and `figures/<analysis>-<name>.svg|pdf|csv` into the run folder; returns the page's path."""
    if run.path is None:
        raise InputError("The run is in memory only: give analyze() a folder, out=..., to get a report")
    data: dict[str, Any] = {
        "themes": {"light": theme(), "dark": theme(dark=True)}, "figures": {}, "explorers": {}, "viewers": {},
    }  # fmt: skip
    encoders = [clean(entry["name"]) for entry in run.request.get("encoders", [])]
    analyses = [_analysis(run, name, encoders, data) for name in run.names()]
    pages = [
        ("overview", "Overview", _overview(run, analyses)),
        *((page.key, page.title, page.body) for page in analyses),
        ("provenance", "Provenance", _provenance(run)),
    ]
    path = run.path / "report.html"
    ownership.write(run.path, path, _page(run.path.name, pages, data).encode("utf-8"))
    return path


# --- the page ---------------------------------------------------------------------------------------------------------


def _page(title: str, pages: Sequence[tuple[str, str, str]], data: Mapping[str, Any]) -> str:
    scripts = [_vega(), *map(asset, SCRIPTS)]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    return Template(asset("page.html")).substitute(
        title=escaped(f"{title} · Sightline"),
        hashes=" ".join(f"'sha256-{digest}'" for digest in hashes),
        style=asset("report.css"),
        nav="".join(
            f'<a href="#/{escaped(key)}" data-page="{escaped(key)}">{escaped(name)}</a>' for key, name, _ in pages
        ),
        pages="\n".join(
            f'<section class="page" data-page="{escaped(key)}" aria-label="{escaped(name)}">\n{body}\n</section>'
            for key, name, body in pages
        ),
        data=script_json(data),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and their loader as one script, from the renderer that also draws the static figures."""
    return (
        str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
        .replace("\r", "")
        .replace("</script", "<\\/script")
    )


def _facts(pairs: Iterable[tuple[str, object]], kind: str = "") -> str:
    rows = "".join(
        f"<dt>{escaped(str(k).replace('_', ' '))}</dt><dd>{in_words(v, short=kind != 'wide whole')}</dd>"
        for k, v in pairs
    )
    return f'<dl class="{kind}">{rows}</dl>'


# --- overview and provenance ------------------------------------------------------------------------------------------


def _overview(run: Run, analyses: Sequence[Page]) -> str:
    encoders = run.request.get("encoders", [])
    names = [str(e["name"]) for e in encoders]
    title = " × ".join(names) if 0 < len(names) <= 3 and sum(map(len, names)) < 80 else counted(len(names), "encoder")
    parts = [
        f"<h1>{escaped(title)}</h1>",
        '<p class="lede">What do these encoders learn, and where do they differ? '
        f"{ABOUT.get(run.request.get('kind', ''), ABOUT[''])}</p>",
    ]
    for page in analyses:
        cards = [
            f'<li class="card"><h3 class="long">{escaped(label)}</h3>'
            f'<div class="number">{escaped(number)}</div><p>{escaped(detail)}</p></li>'
            for label, number, detail in page.headlines
        ]
        parts.append(f'<h2><a class="onward" href="#/{escaped(page.key)}">{escaped(page.title)}</a></h2>')
        parts.append(f'<p class="soft">{escaped(page.question)}</p>')
        parts.append(_cards(cards[:CARDS]))
        if more := cards[CARDS:]:  # nine encoders have 36 pairs
            parts.append(f"<details><summary>{len(more)} more</summary>{_cards(more)}</details>")
    absent = {name: why for name, why in run.request.get("left_out", {}).items() if isinstance(why, str)}
    if absent:
        parts.append(f"<h2>Not measured</h2>{_facts(absent.items(), 'wide')}")
    shown = "".join(_encoder(entry, i) for i, entry in enumerate(encoders))
    parts.append(f'<h2>Encoders</h2><ul class="cards roomy">{shown}</ul>')
    images = dict(run.request.get("images", {}))
    if isinstance(images.get("classes"), list):
        images["number of classes"] = len(images["classes"])
    parts.append(f"<h2>Images</h2>{_facts(images.items(), 'wide')}")
    return "\n".join(parts)


def _cards(cards: Sequence[str]) -> str:
    return f'<ul class="cards">{"".join(cards)}</ul>' if cards else ""


def _encoder(entry: Mapping[str, Any], position: int) -> str:
    colours = f"--light: {LIGHT[position % len(LIGHT)]}; --dark: {DARK[position % len(DARK)]}"
    facts = {
        key: value for key, value in entry.items() if key not in {"name", "preprocess", "notes"} and value is not None
    }
    size, tokens = (entry.get("preprocess") or {}).get("size"), entry.get("tokens")
    if size:
        facts["input"] = " × ".join(map(str, size)) + " pixels"
    if isinstance(tokens, Mapping) and "grid" in tokens:
        cls = "with" if tokens.get("cls") is not None else "without"
        grid = " × ".join(map(str, tokens["grid"]))
        facts["tokens"] = f"{grid} patches + {tokens.get('prefix', 0)}, {cls} class token"
    name = f'<span class="swatch" style="{colours}"></span><span class="long">{escaped(entry["name"])}</span>'
    return f'<li class="card"><h3>{name}</h3>{_facts(facts.items())}{_notes(entry.get("notes"))}</li>'


def _notes(notes: object) -> str:
    return f"<p>{in_words(notes)}</p>" if notes else ""


def _provenance(run: Run) -> str:
    request = dict(run.request)
    skipped = request.pop("skipped", None) or []
    command = request.pop("command", None)
    encoders = request.pop("encoders", [])
    request["analyses"] = {name: _asked(settings) for name, settings in request.get("analyses", {}).items()}
    parts = ["<h1>Provenance</h1>", '<p class="lede">All that is needed to get these numbers again.</p>']
    if command:
        shown = " ".join(map(str, command)) if isinstance(command, (list, tuple)) else command
        parts.append(f"<h2>Command</h2><pre><code>{escaped(shown)}</code></pre>")
    plain = [(k, v) for k, v in request.items() if not isinstance(v, dict)]
    parts.append(f"<h2>Run</h2>{_facts([('folder', run.path.name if run.path else None), *plain], 'wide whole')}")
    for key, value in request.items():
        if isinstance(value, dict):
            parts.append(f"<h2>{escaped(key.replace('_', ' ').capitalize())}</h2>{_facts(value.items(), 'wide whole')}")
    parts += [f"<h2>Encoder {escaped(e['name'])}</h2>{_facts(e.items(), 'wide whole')}" for e in encoders]
    parts.append(f"<h2>Skipped images</h2>{_skipped(skipped)}")
    return "\n".join(parts)


def _skipped(skipped: Sequence[Sequence[str]]) -> str:
    if not skipped:
        return "<p>None.</p>"
    told = f"<p>Could not be read, and are in no number of this report: {len(skipped)}.</p>"
    rows = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(reason)}</dd>" for name, reason in skipped[:500])
    return f'{told}<dl class="wide">{rows}</dl>'


# --- one analysis -----------------------------------------------------------------------------------------------------


def _analysis(run: Run, name: str, encoders: Sequence[str], data: dict[str, Any]) -> Page:
    """The page of one analysis; its figures go into `data` and into the folder."""
    assert run.path is not None
    result = cleaned(run[name])
    module, problem = _module(name)
    word = functools.partial(getattr, module)
    title = str(word("TITLE", name))
    parts = [f"<h1>{escaped(title)}</h1>", f'<p class="lede">{escaped(word("QUESTION", ""))}</p>']
    parts += [
        f'<p class="note">{escaped(encoder)} is not here: {escaped(why)}.</p>'
        for encoder, why in _left_out(run, name).items()
    ]
    top = len(parts)
    explorer = pack_explorer(result, title)
    if explorer:
        data["explorers"][name] = explorer
        parts.append(explorer_html(name, explorer))
    viewer = pack_viewer(result)
    if viewer:
        data["viewers"][name] = viewer
        parts.append(Template(asset("viewer.html")).substitute(name=escaped(name)))
    headlines: list[tuple[str, str, str]] = []
    try:
        headlines = list(word("headlines", lambda _: [])(result))
        if sentences := list(word("summary", lambda _: [])(result)):
            parts.insert(top, "<h2>In short</h2>" + "".join(f"<p>{escaped(sentence)}</p>" for sentence in sentences))
        for figure in word("figures", lambda _: [])(result):
            data["figures"][f"{name}-{figure.name}"] = _figure(run.path, name, figure, encoders)
            parts.append(_figure_html(name, figure))
    except InputError:
        raise
    except Exception as error:  # a plugin may be anyone's: the other pages are still worth having
        problem = f"The figures of {name!r} could not be drawn: {type(error).__name__}: {error}"
        warnings.warn(problem, stacklevel=2)
    if problem:
        parts.append(f'<p class="note">{escaped(problem)}</p>')
    if word("FORMULA", ""):
        parts.append(f"<h2>Formula</h2><pre>{escaped(word('FORMULA', '').strip())}</pre>")
    if word("HOW_TO_READ", ""):
        parts.append(f"<h2>How to read it</h2><p>{escaped(word('HOW_TO_READ', '').strip())}</p>")
    if word("SOURCE", ""):
        parts.append(f"<h2>Source</h2><p>{escaped(word('SOURCE', '').strip())}</p>")
    parts.append(f"<h2>Protocol</h2>{_facts(_protocol(run, name, result), 'wide')}")
    return Page(name, title, str(word("QUESTION", "")), "\n".join(parts), headlines)


def _left_out(run: Run, name: str) -> Mapping[str, str]:
    """Encoders that this analysis could not look at, and why."""
    found = run.request.get("left_out", {}).get(name)
    return found if isinstance(found, Mapping) else {}


def _module(name: str) -> tuple[object, str]:
    try:
        return plugins.author(name), ""
    except InputError as error:
        return ModuleType(name), f"{error}: its results are in the run folder, but nothing here knows how to draw them."


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


def _protocol(run: Run, name: str, result: xr.Dataset) -> list[tuple[str, object]]:
    """Settings and attributes of an analysis; attributes may be JSON strings."""
    rows = _asked(run.request.get("analyses", {}).get(name) or {})
    for key, value in result.attrs.items():
        if key in {"analysis", "provenance"}:  # told by the title and on a page of its own
            continue
        try:
            rows[str(key)] = json.loads(value) if isinstance(value, str) and value[:1] in "[{" else value
        except ValueError:
            rows[str(key)] = value
    sizes = {str(k): int(v) for k, v in result.sizes.items() if not str(k).startswith("viewer_")}
    return [(k, v.item() if isinstance(v, np.generic) else v) for k, v in rows.items()] + [
        ("size of the result", sizes)
    ]


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


def _figure_html(analysis: str, figure: Figure) -> str:
    words = {"stem": f"{analysis}-{figure.name}", "title": figure.title, "caption": figure.caption}
    return Template(asset("figure.html")).substitute({key: escaped(text) for key, text in words.items()})
