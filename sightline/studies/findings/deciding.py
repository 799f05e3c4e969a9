"""From contrasts to verdicts, one finding at a time and many at once.

A part agrees if its 95 % interval lies on the claimed side. p of a finding follows from its parts P:

    p(holds) = max_P p(P, claimed side)            all must agree (intersection–union test, Berger 1982)
    p(fails) = min(1, |P| · min_P p(P, other side))      one is enough (Bonferroni)

Both are twice a one-sided p, so that p(holds) < 0.05 just if every interval lies on the claimed side. Of many findings
p is adjusted as by Holm 1979: with p₍₁₎ ≤ … ≤ p₍ₘ₎, adjusted p₍ᵢ₎ = max over j ≤ i of min(1, (m − j + 1) p₍ⱼ₎).
"""

import contextlib
import functools
import math
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import numpy as np

from sightline.core.contrast import Contrast, Estimate
from sightline.core.errors import InputError, counted, nearest, some
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.findings.contract import FAILS, HOLDS, NOT_MEASURED, UNCLEAR, Case, Finding, Part, Verdict

LEVEL = 0.05
DRAWS = 2000  # of `estimate`, for parts by bootstrap


# Parts


def above(
    label: str, effect: Estimate, threshold: float = 0.0, *, percent: bool = False, method: str = "jackknife"
) -> Part:
    """The claim that an effect is larger than its threshold."""
    _on_the_same_images(label, effect)
    contrast = (effect - threshold).contrast(method=method)
    agrees = True if contrast.low > 0 else False if contrast.high < 0 else None
    return Part(
        label,
        effect.value,
        contrast.low + threshold,
        contrast.high + threshold,
        contrast.p,
        agrees,
        p_claim=_towards(contrast, 1),
        p_other=_towards(contrast, -1),
        threshold=threshold,
        percent=percent,
        how=contrast.how,
    )


def below(
    label: str, effect: Estimate, threshold: float = 0.0, *, percent: bool = False, method: str = "jackknife"
) -> Part:
    """The claim that an effect is smaller than its threshold."""
    part = above(label, effect, threshold, percent=percent, method=method)
    agrees = None if part.agrees is None else not part.agrees
    return replace(part, agrees=agrees, p_claim=part.p_other, p_other=part.p_claim, below=True)


def within(label: str, effect: Estimate, margin: float, *, percent: bool = False, method: str = "jackknife") -> Part:
    """The claim that an effect is smaller than a margin, whatever its sign (two one-sided tests, Schuirmann 1987)."""
    _on_the_same_images(label, effect)
    over, under = ((effect - end).contrast(method=method) for end in (margin, -margin))
    low, high = over.low + margin, over.high + margin
    agrees = True if -margin < low and high < margin else False if low > margin or high < -margin else None
    return Part(
        label,
        effect.value,
        low,
        high,
        max(over.p, under.p),
        agrees,
        p_claim=max(_towards(over, -1), _towards(under, 1)),
        p_other=min(_towards(over, 1), _towards(under, -1)),
        threshold=margin,
        within=True,
        percent=percent,
        how=over.how,
    )


def _on_the_same_images(label: str, effect: Estimate) -> None:
    """Encoders that saw different images cannot be held against each other; counts alone are paired with nothing."""
    if len({factor.key for factor in effect.left_out if not factor.seeds and not factor.alone}) > 1:
        raise Missing(f"numbers on the same images: {label}")


def _towards(found: Contrast, side: int) -> float:
    """Twice the one-sided p of an effect to one side of zero, at most 1; 1 where nothing is known of it."""
    if math.isnan(found.p):
        return 1.0
    return found.p if found.value * side > 0 else 1.0


# One finding


def decide(finding: Finding, evidence: Evidence) -> Verdict:
    """The verdict of a finding; what is missing is part of it."""
    try:
        return judge(finding.id, finding.cases(evidence))
    except Missing as missing:
        return Verdict(
            finding.id,
            NOT_MEASURED,
            math.nan,
            math.nan,
            math.nan,
            math.nan,
            math.nan,
            f"Not measured; it needs {missing.needs}.",
            needs=missing.needs,
        )


def judge(finding: str, cases: Sequence[Case]) -> Verdict:
    """The verdict of cases; those that were not measured are left to the others of their side, and told."""
    measured: dict[int, tuple[Part, ...]] = {}
    missing: dict[str, str] = {}
    sides: dict[str, list[str]] = {}  # what the cases of each side lack, nothing where one of them was measured
    for number, case in enumerate(cases):
        try:
            parts_of_case = tuple(replace(part, encoders=case.encoders) for part in case.parts())
            if not parts_of_case:
                raise Missing(f"numbers of {' and '.join(case.encoders)} that it could be decided by")
        except Missing as error:
            missing[", ".join(case.encoders)] = error.needs
            sides.setdefault(case.side, [error.needs])
        else:
            measured[number], sides[case.side] = parts_of_case, []
    if lacking := [needs for of_side in sides.values() for needs in of_side]:
        raise Missing(lacking[0])
    if not measured:
        raise Missing("encoders of the roles that it speaks of")
    parts = tuple(part for of_case in measured.values() for part in of_case)
    verdict = _verdict(list(measured.values()))
    opposing = [part for part in parts if part.agrees is False]
    weakest = min(opposing if verdict == FAILS else parts, key=_strength)
    sentences = [_sentence(verdict, list(measured.values()), weakest), *_left_out(missing)]
    sentences += _told(cases[number].notes for number in measured if weakest in measured[number])
    sentences += _told(cases[number].warns for number in measured)
    sentence = " ".join(sentences)
    return Verdict(
        finding,
        verdict,
        weakest.value,
        weakest.low,
        weakest.high,
        _p(verdict, parts),
        weakest.threshold,
        sentence,
        parts,
        weakest.within,
        weakest.below,
        weakest.percent,
    )


def cases_of(
    evidence: Evidence,
    parts: Callable[..., Sequence[Part]],
    encoders: Iterable[tuple[str, ...]],
    notes: Callable[..., str] | None = None,
    otherwise: tuple[str, Callable[..., Sequence[Part]]] | None = None,
) -> list[Case]:
    """A case for each choice of encoders, whose names `parts` and `notes` are called with, after the evidence.

    `otherwise` is another way to read the finding, in words and as parts; what comes of it is told beside the verdict.
    """
    every = list(encoders)
    if otherwise is None:
        return [
            Case(names, partial(parts, evidence, *names), None if notes is None else partial(notes, evidence, *names))
            for names in every
        ]
    words, other = otherwise

    @functools.cache  # it is the same for all cases
    def told() -> str:
        verdict = judge("", cases_of(evidence, other, every))
        return f"{words} it {'is unclear' if verdict.verdict == UNCLEAR else verdict.verdict}: {verdict.sentence}"

    return [Case(names, partial(parts, evidence, *names), told) for names in every]


def _verdict(cases: Sequence[Sequence[Part]]) -> str:
    agreeing = [all(part.agrees is True for part in parts) for parts in cases]
    opposing = [any(part.agrees is False for part in parts) for parts in cases]
    return HOLDS if all(agreeing) else FAILS if any(opposing) and not any(agreeing) else UNCLEAR


def _p(verdict: str, parts: Sequence[Part]) -> float:
    if verdict == FAILS:
        different = {(part.label, part.value, part.p_other) for part in parts}
        return min(1.0, len(different) * min(part.p_other for part in parts))
    return max(part.p_claim for part in parts)


def _strength(part: Part) -> float:
    """How far a part speaks for the claim, in half widths of its interval; the weakest one decides."""
    if part.within:
        beyond = part.threshold - abs(part.value)
    else:
        beyond = (part.threshold - part.value) if part.below else part.value - part.threshold
    half = (part.high - part.low) / 2
    if math.isnan(half):
        return 0.0
    return beyond / half if half > 0 else math.copysign(math.inf, beyond) if beyond else 0.0


# In words


def written(part: Part) -> str:
    """A part as a sentence would have it.

    >>> from sightline.core.contrast import Estimate
    >>> written(above("accuracy of a − b", Estimate(0.0312, {}, {}, None, ""), percent=True))
    'accuracy of a − b = +3.1 points (no interval: nothing was resampled)'
    """
    numbers = (part.value, part.low, part.high)
    value, low, high = (f"{100 * one:+.1f}" if part.percent else f"{one:+.3g}" for one in numbers)
    unit = " points" if part.percent else ""
    if math.isnan(part.low):
        return f"{part.label} = {value}{unit} ({part.how})"
    return f"{part.label} = {value}{unit} (95 % {low} to {high})"


def _bound(part: Part) -> str:
    percent = part.percent and part.threshold != 0
    size = counted(100 * part.threshold, "point") if percent else f"{part.threshold:g}"
    return f"{'within ±' if part.within else 'below' if part.below else 'above'} {size}"


def _sentence(verdict: str, cases: Sequence[Sequence[Part]], weakest: Part) -> str:
    parts = list({part.label: part for of_case in cases for part in of_case}.values())
    if verdict == HOLDS:
        others = f", the weakest of {len(parts)} that all agree" if len(parts) > 1 else ""
        return f"{written(weakest)} is {_bound(weakest)}{others}."
    against = [part for part in parts if part.agrees is False]
    if verdict == FAILS:
        return f"{written(weakest)} is on the other side of what is claimed ({_bound(weakest)}){_others(against)}."
    open_, agreeing = ([part for part in parts if part.agrees is agrees] for agrees in (None, True))
    said = [
        f"{written(min(open_, key=_strength))} is not clearly {_bound(min(open_, key=_strength))}" if open_ else "",
        f"{written(min(against, key=_strength))} is on the other side{_others(against)}" if against else "",
        f"agreeing: {some([part.label for part in agreeing])}" if agreeing else "",
    ]
    return f"{'; '.join(filter(None, said))} ({len(agreeing)} of {len(parts)} agree)."


def _others(parts: Sequence[Part]) -> str:
    """Those that stand where the weakest of them stands."""
    weakest = min(parts, key=_strength)
    rest = [part.label for part in parts if part is not weakest]
    return f", and so {'is' if len(rest) == 1 else 'are'} {some(rest)}" if rest else ""


def _told(notes: Iterable[Callable[[], str] | None]) -> list[str]:
    """Each sentence once; what was not measured is not told."""
    sentences = []
    for note in notes:
        with contextlib.suppress(Missing):
            sentences.append("" if note is None else note())
    return list(dict.fromkeys(filter(None, sentences)))


def _left_out(missing: Mapping[str, str]) -> list[str]:
    return [f"Not measured of {some(list(missing))}: {next(iter(missing.values()))}."] if missing else []


# Many findings


def all_findings() -> dict[str, Finding]:
    """Every finding by its name, S1 … G7: the FINDINGS of the files beside this one, one file for each paper."""
    import sightline.studies.findings as here

    files = [entry.name for entry in pkgutil.iter_modules(here.__path__)]
    every = [one for file in files for one in getattr(import_module(f"{here.__name__}.{file}"), "FINDINGS", ())]
    order = "SPG"
    return {one.id: one for one in sorted(every, key=lambda one: (order.find(one.id[0]), int(one.id[1:])))}


def decide_all(evidence: Evidence, only: Collection[str] | None = None) -> list[Verdict]:
    """Verdicts of all findings, or of some, with p adjusted for their number."""
    findings = all_findings()
    if unknown := [name for name in only or () if name not in findings]:
        raise InputError(f"There is no finding {unknown[0]!r}{nearest(unknown[0], findings)}")
    return adjusted([finding.decide(evidence) for name, finding in findings.items() if only is None or name in only])


def adjusted(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The same with Holm's p beside the plain one, over those that were measured."""
    measured = [number for number, verdict in enumerate(verdicts) if verdict.verdict != NOT_MEASURED]
    after = dict(zip(measured, holm([verdicts[number].p for number in measured]), strict=True))
    return [replace(verdict, p_adjusted=after.get(number, math.nan)) for number, verdict in enumerate(verdicts)]


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p: as small as the level at which Holm's procedure would reject.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    steps = np.minimum(1.0, (len(values) - np.arange(len(values))) * values[order])
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(steps)
    return [float(one) for one in adjusted]


@dataclass(frozen=True)
class Chance:
    """How many verdicts there are, how many chance alone would give, and how many are left at the adjusted level."""

    measured: int
    holding: int
    failing: int
    holding_by_chance: float  # at most so many, on average, if no finding were true
    failing_by_chance: float  # at most so many, on average, if all were just not false
    holding_adjusted: int
    failing_adjusted: int
    sentence: str


def by_chance(verdicts: Iterable[Verdict]) -> Chance:
    """What intervals of so many findings at once are worth.

    At the border of a claim its interval lies on the claimed side with a probability of 2.5 %, and all intervals of a
    finding do so at most as often; one of k intervals lies on the other side with at most k · 2.5 %.
    """
    measured = [verdict for verdict in verdicts if verdict.verdict != NOT_MEASURED]
    holding, failing = ([one for one in measured if one.verdict == verdict] for verdict in (HOLDS, FAILS))
    sure, refuted = (sum(one.p_adjusted < LEVEL for one in of) for of in (holding, failing))
    expected = LEVEL / 2 * len(measured), sum(min(1.0, LEVEL / 2 * len(one.parts)) for one in measured)
    sentence = (
        f"{counted(len(measured), 'finding')} measured: {len(holding)} hold, of which chance alone would give at most "
        f"{expected[0]:.1f}, and {sure} at a level adjusted for their number (Holm); {len(failing)} fail "
        f"({refuted} at that level)."
        if measured
        else "No finding was measured."
    )
    return Chance(len(measured), len(holding), len(failing), *expected, sure, refuted, sentence)
