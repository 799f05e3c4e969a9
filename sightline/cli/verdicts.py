"""How a study ends: what holds, what fails, what is unclear, in few lines; all of it in a table if asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from sightline.studies.findings.contract import Finding, Verdict


ROWS = 18  # findings that hold or fail and are told with their claim; others by their identifiers
PAPERS = {"Shekhar et al. 2022, 2023": "S", "Park et al. 2023": "P", "Grigg et al. 2021": "G"}
COLOURS = {"holds": "green", "fails": "red", "unclear": "yellow", "not measured": "dim"}


def show_verdicts(verdicts: Sequence[Verdict], findings: Mapping[str, Finding], verbose: bool = False) -> None:
    """How many of each paper, and which; what chance alone would give. `verbose`: each with its effect and claim."""
    from sightline.core.progress import terminal
    from sightline.studies.findings import by_chance

    out = terminal()
    if verbose:
        out.print(_all(verdicts, findings))
    out.print(_counts(verdicts))
    if not verbose:
        groups = {word: [verdict for verdict in verdicts if verdict.verdict == word] for word in COLOURS}
        rows = _shared(len(groups["holds"]), len(groups["fails"]))
        for (word, group), most in zip(groups.items(), (*rows, 0, 0), strict=True):
            _show_group(word, group, findings, most)
    out.print(by_chance(verdicts).sentence)


def _counts(verdicts: Sequence[Verdict]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("findings of")
    for word, colour in COLOURS.items():
        table.add_column({"holds": "hold", "fails": "fail"}.get(word, word), justify="right", style=colour)
    for title, initial in PAPERS.items():
        own = Counter(verdict.verdict for verdict in verdicts if verdict.finding.startswith(initial))
        if own:
            table.add_row(title, *(str(own[word]) for word in COLOURS))
    return table


def _shared(hold: int, fail: int) -> tuple[int, int]:
    """How many of those that hold and of those that fail are told: half of the rows each, and what the others leave.

    >>> _shared(11, 11), _shared(3, 40), _shared(2, 1)
    ((9, 9), (3, 15), (2, 1))
    """
    half = ROWS // 2
    return min(hold, max(half, ROWS - fail)), min(fail, max(half, ROWS - hold))


def _show_group(word: str, group: Sequence[Verdict], findings: Mapping[str, Finding], most: int) -> None:
    """The surest with claim and p, in the order of the findings; the others by their identifiers."""
    from rich.text import Text

    from sightline.core.progress import terminal
    from sightline.report.standing import tally

    if not group:
        return
    out, head = terminal(), Text(f"{tally(group)}:", style=f"bold {COLOURS[word]}")
    surest = sorted(group, key=lambda verdict: verdict.p)[:most]
    others = ", ".join(f"{one.finding}{_in_brackets(one.p)}" for one in group if one not in surest)
    if surest:
        out.print(head)
        for one in group:
            if one in surest:
                out.print(_line(one, findings[one.finding].claim.rstrip("."), out.width))
        head = Text("  and")
    if others:
        out.print(head.append(f" {others}", style="not bold"))


def _line(verdict: Verdict, claim: str, width: int) -> str:
    """Identifier, claim and p; a claim that is too long is cut."""
    room = max(20, min(width, 120) - len("  S10  ") - len("  p < 0.001"))
    return f"  {verdict.finding:<5}{claim if len(claim) <= room else claim[: room - 1] + '…':<{room}}  {_p(verdict.p)}"


def _p(p: float) -> str:
    return "" if math.isnan(p) else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _in_brackets(p: float) -> str:
    """Behind an identifier.

    >>> _in_brackets(0.00001), _in_brackets(0.25), _in_brackets(math.nan)
    (' (p < 0.001)', ' (0.250)', '')
    """
    text = _p(p).removeprefix("p = ")
    return f" ({text})" if text else ""


def _all(verdicts: Sequence[Verdict], findings: Mapping[str, Finding]) -> Table:
    """Every finding with its effect and its claim; in place of numbers that are not there, what it needs."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("finding", "verdict", "effect", "95 %", "p", "claim"):
        table.add_column(column, overflow="fold")
    for one in verdicts:
        numbers = ("", "") if not one.parts else (f"{one.effect:+.3g}", f"{one.low:+.3g} … {one.high:+.3g}")
        claim = findings[one.finding].claim + (f" (needs {one.needs})" if one.needs else "")
        table.add_row(one.finding, Text(one.verdict, style=COLOURS[one.verdict]), *numbers, _p(one.p), claim)
    return table
