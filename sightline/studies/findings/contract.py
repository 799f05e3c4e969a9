"""A published finding, and what a study's results make of it.

A finding is an inequality between measured numbers, once for each choice of encoders with the roles that it names (a
case). Its verdict follows from the intervals alone:

    holds          in every case every interval lies on the claimed side
    fails          in at least one case an interval lies on the other side, and no case holds
    unclear        anything else: an interval crosses the threshold, there is none, or encoders disagree
    not measured   roles or results are missing, of all cases or of one of the kinds of encoders that are spoken of in
                   turn, and `needs` says which
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import isnan
from typing import TYPE_CHECKING

from sightline.core.notebook import card, fold, rows

if TYPE_CHECKING:
    from sightline.studies.evidence import Evidence


HOLDS, FAILS, UNCLEAR, NOT_MEASURED = VERDICTS = ("holds", "fails", "unclear", "not measured")


@dataclass(frozen=True)
class Part:
    """One contrast of one case. The claim is that it lies above its threshold, below it, or within ± its threshold."""

    label: str  # "CKA(moco, dino) − CKA(moco, mae)"
    value: float
    low: float  # 95 %
    high: float
    p: float  # two-sided, of the value being the threshold; below 0.05 just if the interval does not touch it
    agrees: bool | None  # the interval lies on the claimed side, on the other one, or neither
    p_claim: float  # of there being no such effect, or one to the other side; below 0.05 just if it agrees
    p_other: float  # the same of the other side
    threshold: float = 0.0
    within: bool = False  # the claim is −threshold < effect < threshold
    below: bool = False  # the claim is effect < threshold
    percent: bool = False  # a share or an accuracy, to be written in percentage points
    how: str = ""  # how the interval was computed, or why there is none
    encoders: tuple[str, ...] = ()  # of the case


@dataclass(frozen=True)
class Case:
    """The parts of a finding for one choice of encoders; they must all agree. They are computed when asked for."""

    encoders: tuple[str, ...]
    parts: Callable[[], Sequence[Part]]  # may raise Missing
    # Sentences on what does not decide; they may raise Missing. Notes are told of the weakest case, warnings of all.
    notes: Callable[[], str] | None = None
    warns: Callable[[], str] | None = None
    side: str = ""  # of findings that speak of several kinds of encoders in turn: of each some case has to be measured


@dataclass(frozen=True)
class Verdict:
    """What the results make of a finding."""

    finding: str  # "S1"
    verdict: str  # one of VERDICTS
    effect: float  # of the weakest part, which decides
    low: float
    high: float
    p: float  # of the verdict `fails` that it is by chance; of all others of `holds`
    threshold: float
    sentence: str
    parts: tuple[Part, ...] = ()
    within: bool = False  # of the weakest part
    below: bool = False
    percent: bool = False
    needs: str = ""  # of what is not measured
    p_adjusted: float = float("nan")  # Holm's, over all findings that are decided together

    def _repr_html_(self) -> str:
        claimed = f"within ± {self.threshold:g}" if self.within else f"{'<' if self.below else '>'} {self.threshold:g}"
        decided = self.verdict != NOT_MEASURED
        facts = {
            "": self.sentence,
            "effect": f"{_numbers(self)}, claimed {claimed}" if decided else "",
            "p": f"{self.p:.2g}" + ("" if isnan(self.p_adjusted) else f" (Holm's: {self.p_adjusted:.2g})")
            if decided
            else "",
            "needs": self.needs,
        }
        agrees = {True: "as claimed", False: "the other way", None: "unclear"}
        parts = rows([], [[part.label, _numbers(part), agrees[part.agrees]] for part in self.parts])
        return card(f"{self.finding}: {self.verdict}", facts, fold("What it rests on", parts) if self.parts else "")


def _numbers(what: Verdict | Part) -> str:
    value = what.effect if isinstance(what, Verdict) else what.value
    return f"{value:.3g} (95 % {what.low:.3g} – {what.high:.3g})"


@dataclass(frozen=True)
class Finding:
    """A published finding; its words stand in a TOML file beside the module that decides it."""

    id: str  # "S1"
    paper: str  # "001"
    where: str  # "Fig 1a; 000 Fig 1"
    claim: str  # in our words
    measure: str  # the inequality that decides it
    figure: str  # what is redrawn beside it, "001 Fig 1a"
    step: str  # what has to be run: passes, finetune, dynamics, reinit, detect, segment, rcdm, …; several with commas
    analyses: tuple[str, ...]  # of the pass
    cases: Callable[[Evidence], Sequence[Case]]  # one for each choice of encoders; may raise Missing
    paper_says: str = ""  # the numbers that the paper prints for it

    def decide(self, evidence: Evidence) -> Verdict:
        from sightline.studies.findings.deciding import decide

        return decide(self, evidence)


def findings_of(paper: str, cases: Mapping[str, Callable[[Evidence], Sequence[Case]]]) -> tuple[Finding, ...]:
    """The findings whose words stand in PAPER.toml, with the cases that decide each."""
    words = tomllib.loads((files("sightline.studies.findings") / f"{paper}.toml").read_text("utf-8"))
    return tuple(
        Finding(id, **row | {"analyses": tuple(row["analyses"])}, cases=cases[id]) for id, row in words.items()
    )
