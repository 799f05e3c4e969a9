"""Verdicts on findings, as a caller hands them over: the table of findings, and the page of each.

The report decides nothing and knows no finding: whoever writes a report gives what was decided
(`sightline.studies.findings`), and the words and figures that belong to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # what decides is above, and hands over
    from sightline.studies.findings.contract import Finding, Part, Verdict


VERDICTS = ("holds", "fails", "unclear", "not measured")
PAPERS = ("S", "P", "G")  # the letters of findings, in the order in which they are told
DECIDED = VERDICTS[:3]


def counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many of each there are, without those that there are none of."""
    number_of = {word: sum(verdict.verdict == word for verdict in verdicts) for word in VERDICTS}
    return {word: number for word, number in number_of.items() if number}


# What the page shows


@dataclass(frozen=True)
class Stretch:
    """A contrast with its interval on the axis of its finding; places are per cent of the width."""

    label: str
    text: str
    low: float
    at: float
    high: float
    bounds: Sequence[float]  # the threshold, or both where the claim is to lie within
    word: str  # agrees, disagrees or unclear


@dataclass(frozen=True)
class Beside:
    """The figure of the paper that is redrawn beside a finding, and the paper's numbers beside ours."""

    stem: str
    title: str
    caption: str
    folder: str  # of the study, for whoever wants the numbers
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()


@dataclass(frozen=True)
class FindingRow:
    """A finding, its verdict and all that stands behind it, as text."""

    id: str
    place: tuple[int, str, int]  # for sorting: S2 comes before S10, and papers as the findings have them
    paper: str
    where: str
    claim: str
    measure: str
    paper_says: str
    needs: str
    verdict: str
    sentence: str
    effect: str
    size: float | None  # for sorting: the effect beyond its threshold, in half-widths of its interval
    against: str  # the threshold, where all parts have the same
    p: str
    roles: Sequence[str]
    parts: Sequence[Stretch]
    beside: Beside | None


@dataclass(frozen=True)
class FindingsPage:
    """All findings, decided or not."""

    template: ClassVar[str] = "findings.html"
    key: ClassVar[str] = "findings"
    topic: ClassVar[str] = ""
    title: str
    heading: str
    lead: Sequence[str]  # sentences
    counts: Mapping[str, int]
    rows: Sequence[FindingRow]
    papers: Mapping[str, str]  # identifier → title
    roles: Sequence[str]


def findings_page(
    verdicts: Sequence[Verdict],
    findings: Mapping[str, Finding],
    *,
    title: str = "Findings",
    heading: str = "What published findings hold here?",
    lead: Sequence[str] = (),
    papers: Mapping[str, str] | None = None,
    roles: Mapping[str, str] | None = None,
    figures: Mapping[str, Beside] | None = None,
) -> FindingsPage:
    """The table of verdicts, each of which opens the finding.

    findings  by identifier; verdicts on others are told without their claim
    papers    titles of the papers
    roles     of the encoders, to choose findings by
    figures   identifier of a finding → what is drawn beside it
    """
    rows = [_row(verdict, findings.get(verdict.finding), roles or {}, figures or {}) for verdict in verdicts]
    rows.sort(key=lambda row: row.place)
    named = {paper: (papers or {}).get(paper, paper) for paper in dict.fromkeys(row.paper for row in rows) if paper}
    those = dict.fromkeys(role for row in rows for role in row.roles)
    return FindingsPage(title, heading, lead, counts(verdicts), rows, named, list(those))


def _row(
    verdict: Verdict, finding: Finding | None, roles: Mapping[str, str], figures: Mapping[str, Beside]
) -> FindingRow:
    known = math.isfinite(verdict.effect)
    width = (verdict.high - verdict.low) / 2 if math.isfinite(verdict.high - verdict.low) else math.nan
    beyond = (verdict.effect - verdict.threshold) / width if width > 0 else math.nan
    letters = verdict.finding.rstrip("0123456789")
    number = verdict.finding[len(letters) :]
    return FindingRow(
        id=verdict.finding,
        place=(next(i for i, one in enumerate([*PAPERS, letters]) if one == letters), letters, int(number or 0)),
        paper="" if finding is None else finding.paper,
        where="" if finding is None else finding.where,
        claim="" if finding is None else finding.claim.rstrip("."),
        measure="" if finding is None else finding.measure,
        paper_says="" if finding is None else finding.paper_says,
        needs=verdict.needs,
        verdict=verdict.verdict,
        sentence=verdict.sentence,
        effect=with_interval(verdict.effect, verdict.low, verdict.high, verdict.percent) if known else "",
        size=beyond if math.isfinite(beyond) else None,
        against=_against(verdict.parts),
        p=_p(verdict),
        roles=list(dict.fromkeys(roles[n] for part in verdict.parts for n in part.encoders if n in roles)),
        parts=_stretches(verdict.parts),
        beside=figures.get(verdict.finding),
    )


def with_interval(value: float, low: float, high: float, percent: bool) -> str:
    """An effect in words.

    >>> with_interval(0.123, 0.1, 0.15, True), with_interval(0.123, math.nan, math.nan, False)
    ('+12.3 points (95 % +10.0 to +15.0)', '+0.123')
    """
    style = "+.1f" if percent else "+.3g"
    texts = [format(number * (100 if percent else 1), style).replace("-", "−") for number in (value, low, high)]
    unit = " points" if percent else ""
    return f"{texts[0]}{unit}" + (f" (95 % {texts[1]} to {texts[2]})" if math.isfinite(low + high) else "")


def _p(verdict: Verdict) -> str:
    plain, adjusted = (
        "" if math.isnan(p) else "p < 0.001" if p < 0.001 else f"p = {p:.3f}" for p in (verdict.p, verdict.p_adjusted)
    )
    return f"{plain}; adjusted {adjusted}" if plain and adjusted else plain


def _against(parts: Sequence[Part]) -> str:
    """The threshold of all parts as the page adds it to a sentence; nothing if they have several."""
    known = {(part.threshold, part.within, part.percent) for part in parts}
    if len(known) != 1:
        return ""
    ((threshold, within, percent),) = known
    number = f"{threshold * (100 if percent else 1):.3g}".replace("-", "−")
    return f", {'±' if within else ''}{number}{' points' if percent and threshold else ''}"


def _stretches(parts: Sequence[Part]) -> list[Stretch]:
    """All on one axis, which shows intervals and thresholds whole."""
    bounds = [[-part.threshold, part.threshold] if part.within else [part.threshold] for part in parts]
    ends = [end for part in parts for end in (part.low, part.value, part.high)]
    ends = [end for end in [*ends, *(bound for both in bounds for bound in both)] if math.isfinite(end)]
    if not ends:
        return []
    room = 0.06 * ((max(ends) - min(ends)) or 1.0)
    lowest, highest = min(ends) - room, max(ends) + room

    def place(value: float) -> float:
        return round(100 * (value - lowest) / (highest - lowest), 2)

    return [
        Stretch(
            part.label,
            with_interval(part.value, part.low, part.high, part.percent),
            place(part.low if math.isfinite(part.low) else part.value),
            place(part.value),
            place(part.high if math.isfinite(part.high) else part.value),
            [place(bound) for bound in both],
            {True: "agrees", False: "disagrees", None: "unclear"}[part.agrees],
        )
        for part, both in zip(parts, bounds, strict=True)
        if math.isfinite(part.value)
    ]
