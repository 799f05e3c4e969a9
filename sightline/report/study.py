"""The report of a study: verdicts on published findings first, and what each depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pandas as pd

from sightline.core.errors import counted
from sightline.core.files import write_atomically
from sightline.core.folders import refuse_links
from sightline.report.figures import Figure
from sightline.report.page import draw_figure
from sightline.report.shell import Page, assemble, shown_encoders
from sightline.report.standing import tally
from sightline.report.verdicts import Beside, findings_page

if TYPE_CHECKING:
    from sightline.studies.findings.contract import Finding, Verdict


class Redrawn(Protocol):
    """A figure of a paper, drawn from the study's results."""

    @property
    def title(self) -> str:
        """In a few words."""

    @property
    def caption(self) -> str:
        """What the reader should see."""

    @property
    def chart(self) -> Any:
        """An Altair chart."""

    @property
    def table(self) -> pd.DataFrame:
        """The numbers behind it."""

    @property
    def paper(self) -> pd.DataFrame | None:
        """The numbers that the paper prints, if it prints any."""


@dataclass(frozen=True)
class FiguresPage:
    """All figures of the papers that the results can draw, and what the others would need."""

    template: ClassVar[str] = "paper_figures.html"
    key: ClassVar[str] = "figures"
    title: ClassVar[str] = "Figures"
    topic: ClassVar[str] = ""
    drawn_from: ClassVar[str] = "findings"  # the page whose data it shares
    papers: Sequence[tuple[str, Sequence[Beside]]]  # a title, and its figures
    missing: Mapping[str, str]


@dataclass(frozen=True)
class StudyFacts:
    """The last page: what was run, and with which encoders."""

    template: ClassVar[str] = "study.html"
    key: ClassVar[str] = "steps"
    title: ClassVar[str] = "Steps"
    topic: ClassVar[str] = ""
    encoders: Mapping[str, str]
    steps: Mapping[str, object]
    notes: Sequence[str]


def study_page(
    out: Path,
    verdicts: Sequence[Verdict],
    findings: Mapping[str, Finding],
    *,
    title: str,
    figures: Mapping[str, Redrawn] | None = None,
    missing: Mapping[str, str] | None = None,
    papers: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
    together: Mapping[str, Sequence[str]] | None = None,
    steps: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write `report.html` into the folder of a study, and return its path.

    out       the folder
    verdicts  of `decide_all`, those that were not measured as well
    findings  by their identifiers
    figures   by the identifiers of the papers, "001 Fig 1b": all have a page, and stand beside findings that name them
    missing   figures that cannot be drawn, and what they would need
    papers    their titles, by the number that findings name them by
    kinds     encoders in the order of the study, each with its role in words; those of a role share a hue
    together  encoders of several seeds: the name that verdicts have for all of them → the names of the seeds
    steps     what was run: name → facts about it, any JSON
    notes     sentences that belong to all verdicts, such as how many would hold by chance
    """
    refuse_links(out)
    shown = shown_encoders(list(kinds or {}), kinds)
    those, drawn = dict[str, Beside](), {}
    for name, figure in (figures or {}).items():
        stem = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
        made = Figure(stem, figure.title, figure.caption, figure.chart, figure.table)
        drawn[f"paper-{stem}"] = draw_figure(out, "paper", made, shown)
        shown_in_it = "paper" in figure.table and bool(
            figure.table.paper.notna().all()
        )  # a table has them in its cells
        printed = pd.DataFrame() if figure.paper is None or shown_in_it else figure.paper
        rows = printed.astype(str).to_numpy().tolist()
        head = [str(word) for word in printed.columns]
        those[name] = Beside(f"paper-{stem}", f"{name}: {figure.title}", figure.caption, out.name, head, rows)
    beside = {id: those[finding.figure] for id, finding in findings.items() if finding.figure in those}
    page = findings_page(
        verdicts,
        findings,
        title="Verdicts",
        heading=title,
        lead=[*_by_paper(verdicts, findings, papers or {}), *notes],
        papers=papers,
        roles=_with_seeds(kinds or {}, together or {}),
        figures=beside,
    )
    pages: list[Page] = [page]
    if those or missing:
        pages.append(FiguresPage(_grouped(those, papers or {}), missing or {}))
    pages.append(StudyFacts(dict(kinds or {}), steps or {}, notes))
    path = out / "report.html"
    text = assemble(title, pages, {"findings": {"figures": drawn}}, shown)
    write_atomically(path, text.encode("utf-8"))
    return path


def _with_seeds(kinds: Mapping[str, str], together: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Roles also under the name that several seeds have in common.

    >>> _with_seeds({"mae-0": "reconstruction", "mae-1": "reconstruction"}, {"mae": ["mae-0", "mae-1"]})["mae"]
    'reconstruction'
    """
    return {**kinds, **{one: kinds[seeds[0]] for one, seeds in together.items() if seeds[0] in kinds}}


def _grouped(figures: Mapping[str, Beside], papers: Mapping[str, str]) -> list[tuple[str, list[Beside]]]:
    """Figures by their paper, whose number their names begin with."""
    groups: dict[str, list[Beside]] = {}
    for name, figure in figures.items():
        groups.setdefault(name.partition(" ")[0], []).append(figure)
    return [(papers.get(paper, paper), own) for paper, own in groups.items()]


def _by_paper(verdicts: Sequence[Verdict], findings: Mapping[str, Finding], papers: Mapping[str, str]) -> list[str]:
    """A sentence for each paper: how many of its findings hold, fail, are unclear, are not measured."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.finding in findings:
            groups.setdefault(findings[verdict.finding].paper, []).append(verdict)
    return [f"{papers.get(paper, paper)}: {_told(own)}." for paper, own in groups.items()]


def _told(verdicts: Sequence[Verdict]) -> str:
    if all(verdict.verdict == "not measured" for verdict in verdicts):
        return f"none of {counted(len(verdicts), 'finding')} measured"
    return f"of {counted(len(verdicts), 'finding')} {tally(verdicts)}"
