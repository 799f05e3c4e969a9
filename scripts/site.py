"""What the site has beside docs/: the reference, the tutorial with its outputs, a report, contributing, changes.

MkDocs calls the functions that are called like its events. `SIGHTLINE_SITE_DRAFT=1` leaves out what takes time: the
notebook is shown as it is written, and no report is made.
"""

from __future__ import annotations

import base64
import html
import inspect
import json
import os
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

import sightline as sl
from sightline.core import plugins
from sightline.measure.contract import AnalysisPlugin, analysis

ROOT = Path(__file__).parents[1]
DRAFT = bool(os.environ.get("SIGHTLINE_SITE_DRAFT"))
CONTRACTS = ("measure.contract", "measure.plan", "training.objective", "encoders.contract", "images.contract")


def on_config(config: Any) -> Any:
    """The pages of all analyses."""
    section = next(part for part in config.nav if "Analyses" in part)
    section["Analyses"] = [{name: f"analyses/{name}.md"} for name in sorted(plugins.built_in("analyses"))]
    return config


def on_files(files: Any, config: Any) -> Any:
    """The pages that are not in docs/, and a report."""
    analyses = [f"analyses.{name}" for name in plugins.built_in("analyses")]
    pages = {
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text("utf-8").replace("](docs/", "]("),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text("utf-8").replace("](docs/", "]("),
        "tutorial.md": tutorial(),
        "reference/index.md": public_names(),
        "reference/measures.md": modules("Measures", "Measures on arrays and tensors alone.", estimators()),
        "reference/analyses.md": modules("Analyses", "Functions and settings of the analyses.", analyses),
        "reference/contracts.md": modules("Contracts", "What a plugin must have.", CONTRACTS),
        "gallery/report.html": "A report stands here when the site is built." if DRAFT else report(),
    }
    for uri, content in (pages | pages_of_analyses()).items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links from docs/ to files of the repository lead to their pages of the site."""
    if page.file.src_uri != "tutorial.md":
        markdown = markdown.replace("](tutorial.ipynb)", "](tutorial.md)")
    return markdown.replace("](../CONTRIBUTING.md", "](contributing.md").replace("](../README.md", "](README.md")


# Analyses


def pages_of_analyses() -> dict[str, str]:
    """Pages of the analyses that have none in docs/analyses."""
    uris = {name: f"analyses/{name}.md" for name in plugins.built_in("analyses")}
    return {uri: page_of(analysis(name)) for name, uri in uris.items() if not (ROOT / "docs" / uri).is_file()}


def page_of(plugin: AnalysisPlugin) -> str:
    """What the file of an analysis says of itself, as a page."""
    return f"""\
# {plugin.TITLE}

**{plugin.QUESTION}**

## Formula

{textwrap.indent(plugin.FORMULA, "    ")}

## How to read it

{plugin.HOW_TO_READ}

## Protocol

<pre>{html.escape(inspect.getdoc(plugin) or "")}</pre>

## Sources

{plugin.SOURCE}
"""


# The reference


def public_names() -> str:
    """A page with all that `import sightline as sl` offers."""
    names = [name for name in sl.__all__ if not name.startswith("_")]
    entries = [f"::: sightline.{sl._HOME[name]}.{name}\n    options:\n      heading: sl.{name}\n" for name in names]
    return "\n".join(["# Public names\n", "    import sightline as sl\n", *entries])


def estimators() -> list[str]:
    """Modules with measures on arrays."""
    return [
        f"measure.estimators.{path.stem}" for path in sorted((ROOT / "sightline/measure/estimators").glob("[!_]*.py"))
    ]


def modules(title: str, about: str, names: Any) -> str:
    """A page with some modules of Sightline."""
    return "\n".join([f"# {title}\n", f"{about}\n", *(f"::: sightline.{name}\n" for name in names)])


# The tutorial


def tutorial() -> str:
    """The notebook as a page, with what its cells show."""
    path = ROOT / "docs" / "tutorial.ipynb"
    notebook = json.loads(path.read_text("utf-8")) if DRAFT else executed(path)
    cells = [_markdown(cell) for cell in notebook["cells"]]
    return "\n\n".join([*cells, "[This page as a notebook](tutorial.ipynb)"])


def executed(path: Path) -> Any:
    """The notebook with its outputs; charts become pictures, so that the page needs no script."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    pictures = nbformat.v4.new_code_cell('import altair as alt; _ = alt.renderers.enable("svg")')
    notebook.cells.insert(0, pictures)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    del notebook.cells[0]
    return notebook


def _markdown(cell: Any) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    shown = [_shown(output) for output in cell["outputs"]]
    return "\n\n".join([f"```python\n{source}\n```", *filter(None, shown)])


def _shown(output: Any) -> str:
    """An output as HTML: a picture, what a thing shows of itself, or its text."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        picture = base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
        return f'<img alt="The figure" src="data:image/svg+xml;base64,{picture}">'
    if "text/html" in data:
        return re.sub(r"\n\s*", " ", "".join(data["text/html"]))  # Markdown ends HTML at an empty line
    text = "".join(data.get("text/plain", ""))
    return f"<pre>{html.escape(text)}</pre>" if text else ""


# A report


def report() -> str:
    """A small comparison of the reference encoders; measured once, as long as nothing of it changes."""
    encoders = {name: sl.load_encoder(f"zoo:{name}") for name in ("moco_v3", "dino", "mae", "supervised")}
    analyses = ["cka", "knn", "attention", "spectra", "fourier", "diversity"]
    images = sl.load_images("shapes?size=48", limit=128)
    run = sl.analyze(encoders, images, analyses, out=ROOT / "runs" / "site", overwrite=True, show_progress=False)
    return sl.write_report(run).read_text("utf-8")
