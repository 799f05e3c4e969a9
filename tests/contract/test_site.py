"""The site: every link leads somewhere, and it is built without a warning and without a network."""

import html
import json
import os
import re
import runpy
import subprocess
import sys
import unicodedata
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.documents import PAGES, ROOT

from sightline.core import plugins
from sightline.measure.contract import analysis

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", NOTEBOOK]


def text_of(page: Path) -> str:
    """Markdown without its code, where brackets mean something else."""
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = unicodedata.normalize("NFKD", re.sub(r"[`*]", "", title)).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.unit
@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, name = target.partition("#")
        there = (page.parent / unquote(path)).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}, which is not there"
        assert ROOT in there.parents, f"{page.name} links to {target}, outside of the repository"
        if name and there.suffix == ".md":
            assert name in anchors(there), f"{page.name} links to {target}, which has no such heading"


@pytest.mark.unit
def test_an_analysis_without_a_page_has_one_of_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="no MkDocs: pip install 'sightline[docs]' to test the site")
    own = runpy.run_path(str(ROOT / "scripts" / "site.py"))["pages_of_analyses"]
    every = {f"analyses/{name}.md" for name in plugins.built_in("analyses")}
    written = {f"analyses/{path.name}" for path in ROOT.glob("docs/analyses/*.md")}
    assert written <= every
    assert set(own()) == every - written
    monkeypatch.setitem(own.__globals__, "ROOT", tmp_path)
    pages = own()
    assert set(pages) == every
    fourier, page = analysis("fourier"), pages["analyses/fourier.md"]
    assert page.startswith(f"# Fourier\n\n**{fourier.QUESTION}**\n\n## Formula\n\n    F_k = Σ_rc")
    for part in (fourier.HOW_TO_READ, fourier.SOURCE, "<pre>Fourier: "):
        assert part in page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, as they are written: no notebook is run and no report is made."""
    pytest.importorskip("mkdocstrings", reason="no MkDocs: pip install 'sightline[docs]' to test the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    more = {"SIGHTLINE_SITE_DRAFT": "1", "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


@pytest.mark.processes
def test_the_site_is_whole(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert {"index.html", "tutorial.html", "watching.html", "layer.html", "contributing.html"} <= {
        p.name for p in pages
    }
    for page in pages:
        text = page.read_text("utf-8")
        for found in re.findall(r'(?:src|href)="([^"]+)"', text):
            target = html.unescape(found)
            if re.match(r"[a-z]+:", target) or page.name == "404.html":
                continue
            path = unquote(target.partition("#")[0])
            assert not path or (page.parent / path).exists(), f"{page.relative_to(site)} links to {target}"


@pytest.mark.processes
def test_the_site_fetches_nothing(site: Path) -> None:
    fetched = re.compile(r'<(?:script|img|iframe|source)[^>]+src="https?:|<link[^>]+href="https?:|@import|url\(https?:')
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not fetched.search(page.read_text("utf-8")), page.name


@pytest.mark.processes
def test_the_reference_has_every_public_name(site: Path) -> None:
    import sightline as sl

    text = (site / "reference" / "index.html").read_text("utf-8")
    for name in sl.__all__:
        assert f'id="sightline.{sl._HOME[name]}.{name}"' in text, name
    measures = (site / "reference" / "measures.html").read_text("utf-8")
    assert 'id="sightline.measure.estimators.cka.cka"' in measures
    assert "<blockquote>" not in measures  # examples are code
