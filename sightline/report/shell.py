"""The file around the pages: navigation, encoders and their colours, scripts, data. Pages of any kind go into it.

The page's security policy allows its own scripts, by their hashes, and no request to anywhere.
"""

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import vl_convert
from markupsafe import Markup

from sightline.core.contract import TOPICS
from sightline.report.figures import DARK, LIGHT, theme
from sightline.report.html import asset, clean, render, script_json
from sightline.report.packing import compressed

SCRIPTS = ("data.js", "encoders.js", "charts.js", "explorer.js", "viewer.js", "overview.js", "tables.js", "page.js")

# Shades of a hue for encoders of a kind, on paper and on a dark screen; the first of each go far apart.
HUES = (
    (("#0072b2", "#4aa3df", "#084a78", "#7dbdea", "#2b86c5"), ("#5aaeea", "#a6d8fb", "#3287c4", "#c9e6fc", "#7cc0f2")),
    (("#d55e00", "#f0954a", "#8f3f00", "#f3b27c", "#e37a25"), ("#f5894a", "#fbc39b", "#d0651f", "#fddcc5", "#f7a36f")),
    (("#009e73", "#52c3a0", "#00644a", "#86d6bd", "#1fae86"), ("#35c79c", "#90e3c9", "#16a079", "#bdf0df", "#62d6b2")),
    (("#7d4bb5", "#a986d6", "#523085", "#c5ade5", "#935fc9"), ("#b08ae6", "#d6c3f5", "#8b60cc", "#e6daf9", "#c3a5ee")),
    (("#c0619a", "#dd9cc4", "#8a3569", "#eabfd8", "#cc79ab"), ("#e79cc8", "#f5cfe4", "#c9719f", "#f9e1ee", "#eeb5d6")),
    (("#8a8a1f", "#b5b54f", "#5f5f12", "#cccc86", "#9f9f33"), ("#cccc66", "#e3e3a3", "#a9a93f", "#eeeec7", "#d8d884")),
)


class Page(Protocol):
    """What a page brings: its template, where the navigation has it, and its data."""

    @property
    def template(self) -> str:
        """The file in templates/."""

    @property
    def key(self) -> str:
        """Its address in the report."""

    @property
    def title(self) -> str:
        """In the navigation."""

    @property
    def topic(self) -> str:
        """One of TOPICS, or empty: it stands alone."""


@dataclass(frozen=True)
class Shown:
    """An encoder with the colours that it has in all figures."""

    name: str
    light: str
    dark: str
    kind: str  # such as its objective; encoders of a kind share a hue. Empty: not known


def shown_encoders(names: Sequence[str], kinds: Mapping[str, str] | None = None) -> list[Shown]:
    """Colours of encoders: a hue for each kind and shades within it; where no kind is known, a colour for each.

    >>> [e.light for e in shown_encoders(["a", "b", "c"], {"a": "x", "b": "y", "c": "x"})]
    ['#0072b2', '#d55e00', '#4aa3df']
    >>> [e.light for e in shown_encoders(["a", "b"])]
    ['#0072b2', '#d55e00']
    >>> many = shown_encoders("abcdefghij", {name: name for name in "abcdefghij"})
    >>> len({e.light for e in many}), len({e.dark for e in many})
    (10, 10)
    """
    known = {name: (kinds or {}).get(name, "") for name in names}
    if not any(known.values()):
        return [Shown(clean(n), LIGHT[i % len(LIGHT)], DARK[i % len(DARK)], "") for i, n in enumerate(names)]
    hues = {kind: i % len(HUES) for i, kind in enumerate(dict.fromkeys(known.values()))}
    used: dict[int, int] = {}  # by hue: where there are more kinds than hues, two share one and still differ in shade
    shown = []
    for name, kind in known.items():
        shade = used[hues[kind]] = used.get(hues[kind], -1) + 1
        light, dark = (shades[shade % len(shades)] for shades in HUES[hues[kind]])
        shown.append(Shown(clean(name), light, dark, clean(kind)))
    return shown


def assemble(
    title: str, pages: Sequence[Page], data: Mapping[str, Mapping[str, Any]], encoders: Sequence[Shown]
) -> str:
    """One HTML file from pages and, by their keys, the data that they are drawn from."""
    scripts = [_vega(), *map(asset, SCRIPTS)]
    colours = {"light": [e.light for e in encoders], "dark": [e.dark for e in encoders]}
    common = {
        "themes": {"light": theme(False, colours["light"]), "dark": theme(True, colours["dark"])},
        "encoders": [{"name": e.name, "light": e.light, "dark": e.dark, "kind": e.kind} for e in encoders],
    }
    return render(
        "page.html",
        title=title,
        hashes=[base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts],
        style=asset("report.css"),
        pages=pages,
        navigation=_navigation(pages),
        encoders=encoders,
        common=script_json(common),
        blocks={key: compressed(value) for key, value in data.items()},
        scripts=scripts,
    )


def _navigation(pages: Sequence[Page]) -> list[tuple[str, list[Page]]]:
    """Pages by the question that they belong to; those of no topic stand alone, where they are."""
    groups: list[tuple[str, list[Page]]] = []
    for page in pages:
        heading = TOPICS.get(page.topic, "")
        if not groups or groups[-1][0] != heading:
            groups.append((heading, []))
        groups[-1][1].append(page)
    return groups


@functools.cache
def _vega() -> Markup:
    """Vega, Vega-Lite and their loader as one script, from the renderer that also draws the static figures."""
    bundle = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return Markup(bundle.replace("\r", "").replace("</script", "<\\/script"))
