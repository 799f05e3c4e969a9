"""The report of a study: verdicts on published findings first, and what each depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pandas as pd

from sightline.core import ownership
from sightline.core.errors import counted
from sightline.report.figures import Figure
from sightline.report.page import draw_figure
from sightline.report.shell import assemble, shown_encoders
from sightline.report.standing import listed
from sightline.report.verdicts import VERDICTS, counts, findings_page

if TYPE_CHECKING:
    from sightline.studies.findings.contract import Finding, Verdict

__all__ = ["Redrawn", "study_page"]


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
    def paper(self) -> pd.DataFrame | None:
        """The numbers that the paper prints, if it prints any."""


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
    papers: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
    steps: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write `report.html` into the folder of a study, and return its path.

    out       the folder; it has to be one of Sightline's already (`ownership.begin`)
    verdicts  of `decide_all`, those that were not measured as well
    findings  by their identifiers
    figures   by the identifiers of the papers, "001 Fig 1b": what is redrawn beside the findings that name it
    papers    their titles, by the number that findings name them by
    kinds     encoders in the order of the study, each with its role in words; those of a role share a hue
    steps     what was run: name → facts about it, any JSON
    notes     sentences that belong to all verdicts, such as how many would hold by chance
    """
    shown = shown_encoders(list(kinds or {}), kinds)
    stems, drawn = {}, {}
    for name, figure in (figures or {}).items():
        stem = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
        table = figure.paper if figure.paper is not None else pd.DataFrame()
        made = Figure(stem, figure.title, figure.caption, figure.chart, table)
        drawn[f"paper-{stem}"] = draw_figure(out, "paper", made, shown) | {
            "title": figure.title,
            "caption": figure.caption,
        }
        stems[name] = f"paper-{stem}"
    beside = {id: stems[finding.figure] for id, finding in findings.items() if finding.figure in stems}
    page = findings_page(
        verdicts,
        findings,
        title="Verdicts",
        heading=title,
        lead=[*_by_paper(verdicts, findings, papers or {}), *notes],
        papers=papers,
        roles=kinds,
        figures=beside,
    )
    facts = StudyFacts(dict(kinds or {}), steps or {}, notes)
    path = out / "report.html"
    text = assemble(title, [page, facts], {"findings": {"figures": drawn}}, shown)
    ownership.write(out, path, text.encode("utf-8"))
    return path


def _by_paper(verdicts: Sequence[Verdict], findings: Mapping[str, Finding], papers: Mapping[str, str]) -> list[str]:
    """A sentence for each paper: how many of its findings hold, fail, are unclear, are not measured."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.finding in findings:
            groups.setdefault(findings[verdict.finding].paper, []).append(verdict)
    said = {word: word if word in VERDICTS[:2] else f"are {word}" for word in VERDICTS}
    found = []
    for paper, own in groups.items():
        told = listed([f"{number} {said[word]}" for word, number in counts(own).items()])
        found.append(f"{papers.get(paper, paper)}: of {counted(len(own), 'finding')} {told}.")
    return found
