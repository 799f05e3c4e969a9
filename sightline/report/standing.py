"""Where the encoders stand: the table that ends a run and begins its report, the map of who is alike, conclusions.

What analyses declare (`key_numbers`, `likeness`) becomes at most eight columns and five sentences; none is known here
by its name. Verdicts on findings, if someone gives any, say more than the strongest contrasts and replace them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sightline.core import plugins
from sightline.core.contract import TOPICS
from sightline.core.errors import InputError, counted
from sightline.report.verdicts import DECIDED, counts, with_interval

if TYPE_CHECKING:
    from sightline.core.run_folder import Run
    from sightline.report.figures import KeyNumber, Likeness
    from sightline.studies.findings.contract import Finding, Verdict


COLUMNS = 8  # of the table
SENTENCES = 5  # of the conclusions


@dataclass(frozen=True)
class Column:
    """A headline number, and the analysis that its page belongs to."""

    analysis: str
    number: KeyNumber


@dataclass(frozen=True)
class Standing:
    """Encoders in their order, the columns in the order of topics, and how alike encoders are."""

    encoders: tuple[str, ...]
    columns: tuple[Column, ...]  # those of the table
    others: tuple[Column, ...]  # for which it has no room
    likeness: Likeness | None


def stand(run: Run) -> Standing:
    """What the results of a run declare; a result that fails to is left out with a warning, as its page will say."""
    declared: list[tuple[str, KeyNumber]] = []
    likenesses: list[Likeness] = []
    for name in sorted(run.names(), key=topic_place):
        try:
            module: Any = plugins.module_of(name)
            declared += [(name, number) for number in module.key_numbers(run[name])]
            if (likeness := module.likeness(run[name])) is not None:
                likenesses.append(likeness)
        except InputError:  # its plugin is gone
            continue
        except Exception as error:  # a plugin may be anyone's
            warnings.warn(f"{name!r} has no headline numbers: {type(error).__name__}: {error}", stacklevel=2)
    columns = [Column(*pair) for pair in declared]
    first = sorted(range(len(columns)), key=lambda i: (columns[i].number.place, i))[:COLUMNS]
    encoders = [str(entry["name"]) for entry in run.request.get("encoders", [])]
    known = {name for column in columns for name in column.number.values}
    return Standing(
        tuple(encoders or sorted(known)),
        tuple(columns[i] for i in sorted(first)),
        tuple(column for i, column in enumerate(columns) if i not in first),
        min(likenesses, key=lambda like: like.place, default=None),
    )


def topic_place(name: str) -> tuple[int, str]:
    """Where the page of a result comes: by topic, then by name."""
    try:
        topic = str(getattr(plugins.module_of(name), "TOPIC", "other"))
    except InputError:
        topic = "other"
    return [*TOPICS, topic].index(topic), name


# Conclusions


def conclusions(
    standing: Standing, verdicts: Sequence[Verdict] = (), findings: Mapping[str, Finding] | None = None
) -> list[str]:
    """At most five sentences: what holds, where findings are decided; else who is alike and where encoders differ."""
    alike, decided = _alike(standing.likeness), [verdict for verdict in verdicts if verdict.verdict in DECIDED]
    if decided:
        clear = [verdict for verdict in decided if verdict.verdict != "unclear"]
        clear.sort(key=lambda verdict: (DECIDED.index(verdict.verdict), verdict.p, verdict.finding))
        said = [_said(verdict, (findings or {}).get(verdict.finding)) for verdict in clear]
        return [_counted(decided), *said][: SENTENCES - len(alike)] + alike
    contrasts = [(bool(column.number.best), *_contrast(column.number)) for column in standing.columns]
    ordered = sorted(contrasts, key=lambda told: told[:2], reverse=True)  # what can be good or bad goes first
    return [*[sentence for _, strength, sentence in ordered if strength > 0][: SENTENCES - len(alike)], *alike]


def _counted(decided: Sequence[Verdict]) -> str:
    return f"Of {counted(len(decided), 'finding')} that these encoders can decide, {tally(decided)}."


def tally(verdicts: Sequence[Verdict]) -> str:
    """How many findings hold, fail, are unclear and are not measured, in words."""
    verbs = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "unclear": ("is unclear", "are unclear")}
    told = [
        f"{number} {verbs.get(word, ('is ' + word, 'are ' + word))[number > 1]}"
        for word, number in counts(verdicts).items()
    ]
    return " and ".join(filter(None, [", ".join(told[:-1]), *told[-1:]]))


def _said(verdict: Verdict, finding: Finding | None) -> str:
    """A verdict in one sentence: the claim, and the effect that decides."""
    if finding is None:
        return f"{verdict.finding} {verdict.verdict}: {verdict.sentence}"
    effect = with_interval(verdict.effect, verdict.low, verdict.high, verdict.percent)
    return f"{verdict.finding} {verdict.verdict}: {finding.claim.rstrip('.')}: {effect}."


def _contrast(number: KeyNumber) -> tuple[float, str]:
    """How clearly the extremes differ, in widths of their intervals; 0 where these overlap or are not known."""
    if len(number.values) < 2:
        return 0.0, ""
    top, bottom = (max, min) if number.best != "lowest" else (min, max)
    first, last = (pick(number.values, key=lambda name: number.values[name]) for pick in (top, bottom))
    ends = [number.ends.get(name) for name in (first, last)]
    if ends[0] is None or ends[1] is None:
        return 0.0, ""
    between = max(ends[0][0], ends[1][0]) - min(ends[0][1], ends[1][1])  # above 0: the intervals do not meet
    width = np.mean([high - low for low, high in (ends[0], ends[1])])
    words = ("highest", "lowest") if number.best != "lowest" else ("lowest", "highest")
    told = [f"{number.write(name)}, 95 % {number.write_ends(name)}" for name in (first, last)]
    what = number.about.partition(";")[0]
    sentence = f"{first} has the {words[0]} {what} ({told[0]}), {last} the {words[1]} ({told[1]})."
    return (
        abs(number.values[first] - number.values[last]) / max(float(width), 1e-12) if between > 0 else 0.0
    ), sentence


def extremes(likeness: Likeness) -> tuple[tuple[str, str, float], tuple[str, str, float]] | None:
    """The pairs that are most and least alike; None where fewer than two pairs are known."""
    rows, columns = np.triu_indices(len(likeness.encoders), 1)
    values = likeness.values[rows, columns]
    if np.isfinite(values).sum() < 2:
        return None
    pairs = [
        (likeness.encoders[rows[at]], likeness.encoders[columns[at]], float(values[at]))
        for at in (int(np.nanargmax(values)), int(np.nanargmin(values)))
    ]
    return pairs[0], pairs[1]


def _alike(likeness: Likeness | None) -> list[str]:
    """Pairs are told as the most and the least alike, never one by one."""
    if likeness is None or (pairs := extremes(likeness)) is None:
        return []
    most, least = (f"{a} and {b} ({likeness.name} {value:.2f})" for a, b, value in pairs)
    return [f"Most alike are {most}, least alike {least}, by the {likeness.about}."]


# The map


def classical_mds(distances: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
    """Points in the plane (n, 2) whose distances are as near as can be to those given, and the share they keep.

    Classical scaling (Torgerson): −½ J D² J = X Xᵀ, J = I − 1/n, and the two largest eigenvalues are kept. The share is
    that of the positive eigenvalues. Each axis points to where its farthest point is positive, so that a map is drawn
    the same way each time.

    >>> points, share = classical_mds(np.array([[0.0, 3.0, 5.0], [3.0, 0.0, 4.0], [5.0, 4.0, 0.0]]))
    >>> round(float(np.linalg.norm(points[0] - points[1])), 9), round(share, 9)
    (3.0, 1.0)
    """
    n = len(distances)
    centring = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-0.5 * centring @ (distances**2) @ centring)
    kept = np.argsort(values)[::-1][:2]
    points = np.zeros((n, 2))
    points[:, : len(kept)] = vectors[:, kept] * np.sqrt(np.clip(values[kept], 0, None))
    signs = np.sign(points[np.abs(points).argmax(0), range(2)])
    total = float(values.clip(0).sum())
    return points * np.where(signs == 0, 1, signs), float(values[kept].clip(0).sum()) / total if total > 0 else 1.0
