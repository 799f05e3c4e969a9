#!/usr/bin/env python
"""Keep what a study has found in docs/studies/NAME: verdicts, their parts, what was run, and a page that tells it.

    scripts/keep_study.py runs/papers embedded "The reference encoders on the embedded images"

docs/findings.md gets the verdicts as a table between its marks `<!-- measured: NAME -->` and `<!-- end of NAME -->`.
Weights and figures are not kept: `sightline figure` draws any figure from the folder of the study.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

import sightline as sl
from sightline.core.errors import duration
from sightline.core.files import write_atomically
from sightline.core.tables import csv
from sightline.studies.findings import Verdict, all_findings, by_chance
from sightline.studies.findings.contract import NOT_MEASURED, UNCLEAR
from sightline.studies.roles import Role
from sightline.studies.study import Study

DOCS = Path("docs")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |" for line in lines)


def effect(verdict: Verdict) -> str:
    """The weakest part with its interval, against its threshold."""
    if math.isnan(verdict.effect):
        return "–"
    scale, unit = (100, " points") if verdict.percent else (1, "")
    numbers = (verdict.effect, verdict.low, verdict.high)
    value, low, high = (f"{scale * one:+.3g}".replace("-", "−") for one in numbers)
    sign = "within ±" if verdict.within else "<" if verdict.below else ">"
    interval = "no interval" if math.isnan(verdict.low) else f"{low} … {high}"
    return f"{value}{unit} ({interval}); claimed {sign} {scale * verdict.threshold:g}"


def probability(p: float) -> str:
    """As tables have it."""
    return "–" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def decided(verdicts: Sequence[Verdict]) -> str:
    """The verdicts, one row each."""
    claims = all_findings()
    return table(
        ("", "claim", "verdict", "weakest effect (95 %)", "p", "adjusted"),
        (
            (
                one.finding,
                claims[one.finding].claim.rstrip("."),
                f"**{one.verdict}**",
                effect(one),
                probability(one.p),
                probability(one.p_adjusted),
            )
            for one in verdicts
        ),
    )


def counted(verdicts: Sequence[Verdict]) -> str:
    """How many of each, and what chance would give."""
    numbers = Counter(one.verdict for one in verdicts)
    rest = f"{numbers[UNCLEAR]} are unclear, {numbers[NOT_MEASURED]} were not measured."
    return f"{by_chance(verdicts).sentence} {rest}"


def page(study: Study, title: str, verdicts: Sequence[Verdict]) -> str:
    """The page of the study."""
    steps = [
        (placed.step.name, f"`{placed.step.command}`", duration(float(placed.about.get("seconds", math.nan))))
        for placed in study.steps
        if placed.done
    ]
    return "\n".join(
        (
            f"# {title}",
            "",
            f"What `sightline study {study.name}` measured. {counted(verdicts)} How each is decided, and what it "
            "cannot show: [findings](../../findings.md), [the encoders](../../zoo.md).",
            "",
            "Numbers: [verdicts.csv](verdicts.csv), and of every part [parts.csv](parts.csv).",
            "",
            "## Encoders",
            "",
            table(("name", "role"), ((role.name, what_it_is(role)) for role in study.roles)),
            "",
            "## Steps",
            "",
            table(("step", "command", "time"), steps),
            "",
            "## Verdicts",
            "",
            *(f"- **{one.finding} {one.verdict}.** {one.sentence}" for one in verdicts),
            "",
        )
    )


def what_it_is(role: Role) -> str:
    """Its role, and what a study varies: seed if it is not the first, size, window, λ."""
    varied = (
        f"seed {role.seed}" if role.seed else "",
        f"{role.size:.3g} M parameters" if role.size else "",
        f"window of {role.window} × {role.window} patches" if role.window else "",
        "" if role.weight is None else f"λ = {role.weight:g}",
    )
    return ", ".join(filter(None, (role.in_words(), *varied)))


def parts(verdicts: Path) -> bytes:
    """The parts of the verdicts in a JSON file as CSV, one row each."""
    rows = [{"finding": one["finding"], **part} for one in json.loads(verdicts.read_text()) for part in one["parts"]]
    table = pd.DataFrame(rows)
    return csv(table.assign(encoders=table.encoders.str.join(" ")))


def main(run: str, name: str, title: str) -> None:
    """Copy, and write the page and the table."""
    study, folder = sl.open_study(run), DOCS / "studies" / name
    verdicts = study.verdicts()
    text, begin, end = (
        (DOCS / "findings.md").read_text("utf-8"),
        f"<!-- measured: {name} -->",
        f"<!-- end of {name} -->",
    )
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"docs/findings.md must have {begin} and {end}, once each, where the verdicts belong")
    study.save(verdicts)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(study.path / "verdicts.csv", folder / "verdicts.csv")
    write_atomically(folder / "parts.csv", parts(study.path / "verdicts.json"))
    write_atomically(folder / "README.md", page(study, title, verdicts).encode())
    before, after = text.partition(begin)[0], text.partition(end)[2]
    link = f"[Sentences and steps](studies/{name}/README.md)."
    words = f"### {title}\n\n{counted(verdicts)} {link}\n\n{decided(verdicts)}"
    write_atomically(DOCS / "findings.md", f"{before}{begin}\n{words}\n{end}{after}".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
