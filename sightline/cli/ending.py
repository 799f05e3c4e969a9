"""How a command ends: the report is written, and the table of headline numbers and the conclusions are said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sightline.cli.application import say
from sightline.core import plugins
from sightline.core.errors import InputError, some, visible

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from sightline.core.run_folder import Run
    from sightline.report.standing import Standing
    from sightline.studies.findings.contract import Verdict
    from sightline.studies.roles import Role
else:
    Run = Any  # commands read the signature of `finish`

PADDING = {"beside": 2, "below": 1, "": 1}  # between the columns of the table
REASONS = 3  # why something was left out is told at once if it is no more


def finish(
    run: Run, *, verbose: Annotated[bool, "Print all headlines of all analyses, and what was left out."] = False
) -> None:
    """Write the report and say what came of a run: a table, conclusions, and where the report is."""
    from sightline.core import progress
    from sightline.report.standing import conclusions, stand
    from sightline.studies.findings import all_findings

    progress.console().print("Drawing the report", style="dim")
    path, verdicts = report_of(run)
    standing = stand(run)
    terminal = progress.terminal()
    if standing.columns:
        terminal.print(number_table(standing, terminal.width))
        if legend := _legend(standing, terminal.width):
            terminal.print(legend, style="dim")
    for sentence in conclusions(standing, verdicts, all_findings() if verdicts else {}):
        terminal.print(f"• {sentence}", markup=False)
    if verbose:
        _say_headlines(run)
    reasons = _left_out(run)
    for reason in reasons if verbose or len(reasons) <= REASONS else []:
        terminal.print(reason, style="dim", markup=False)
    if not verbose and len(reasons) > REASONS:
        names = some(run.request["left_out"], most=4)
        terminal.print(f"Left out, in whole or in part: {names}; --verbose says why", style="dim", markup=False)
    say(f"Report: {path}")


def report_of(run: Run) -> tuple[Path, list[Verdict]]:
    """Write the report of a run, with the published findings that its encoders can decide."""
    from sightline.report.page import write_report
    from sightline.studies.findings import all_findings

    roles = _roles(run)
    verdicts = _verdicts(run, roles)
    kinds = {name: role.family for name, role in roles.items()}
    return write_report(run, verdicts=verdicts, findings=all_findings() if verdicts else {}, kinds=kinds), verdicts


def _roles(run: Run) -> dict[str, Role]:
    """What encoders are, as far as their references tell it."""
    from sightline.studies.roles import known_roles

    references = {str(entry["name"]): str(entry.get("reference", "")) for entry in run.request.get("encoders", [])}
    return {name: role for name, role in known_roles(references).items() if role is not None}


def _verdicts(run: Run, roles: Mapping[str, Role]) -> list[Verdict]:
    """What published findings become of these results; those that these encoders cannot decide are left out."""
    from sightline.studies.evidence import Evidence
    from sightline.studies.findings import decide_all

    if len(roles) < 2 or run.path is None:
        return []
    try:
        verdicts = decide_all(Evidence(tuple(roles.values()), (run,)))
    except InputError:  # a result that keeps nothing beside it
        return []
    return [verdict for verdict in verdicts if verdict.verdict != "not measured"]


def number_table(standing: Standing, width: int) -> Table:
    """Encoders as rows, at most eight columns; intervals stand beside their numbers.

    Where it is narrow they stand below, or are left to the report.
    """
    from rich.table import Table
    from rich.text import Text

    where = _place_of_intervals(standing, width)
    table = Table(box=None, pad_edge=False, padding=(0, PADDING[where], 0, 0), header_style="bold")
    table.add_column("encoder", no_wrap=True, overflow="ellipsis", min_width=8)
    for column in standing.columns:
        table.add_column(column.number.title, justify="right", min_width=max(map(len, column.number.title.split())))
    for name in standing.encoders:
        cells = [Text(visible(name))]
        for column in standing.columns:
            number = column.number
            best = name in number.winners()
            text = Text(f"{number.write(name) or '–'}{'*' if best else ''}", style="bold green" if best else "")
            if where and (ends := number.write_ends(name)):
                text.append((" " if where == "beside" else "\n") + ends, style="dim not bold")
            cells.append(text)
        table.add_row(*cells)
    return table


def _legend(standing: Standing, width: int) -> str:
    """What the marks mean that the table has."""
    numbers = [column.number for column in standing.columns]
    said = ["* best of its column"] if any(number.winners() for number in numbers) else []
    if any(number.ends for number in numbers):
        said.append(
            "dimmed: 95 % intervals" if _place_of_intervals(standing, width) else "95 % intervals: in the report"
        )
    return "; ".join(said)


def _place_of_intervals(standing: Standing, width: int) -> Literal["beside", "below", ""]:
    """Where they stand so that the table is not too wide; "": nowhere."""
    places: tuple[Literal["beside", "below"], ...] = ("beside", "below")
    return next((where for where in places if _width(standing, where) <= width), "")


def _width(standing: Standing, where: Literal["beside", "below"]) -> int:
    """Of the table with its intervals beside the numbers, or below them."""
    widths = [max((len(name) for name in standing.encoders), default=0)]
    for column in standing.columns:
        number = column.number
        cells = [(f"{number.write(name)}*", number.write_ends(name)) for name in standing.encoders]
        parts = [" ".join(cell) for cell in cells] if where == "beside" else [part for cell in cells for part in cell]
        widths.append(max(max(map(len, parts), default=0), *map(len, number.title.split())))
    return sum(widths) + PADDING[where] * len(widths)


def _say_headlines(run: Run) -> None:
    for name in run:
        module = plugins.module_of(name)
        say(module.TITLE, bold=True)
        for label, number, detail in module.headlines(run[name]):
            say(f"  {label}: {number} ({detail})")


def _left_out(run: Run) -> list[str]:
    """Why analyses, or encoders of an analysis, were left out: a line each."""
    found = []
    for name, why in run.request.get("left_out", {}).items():
        if isinstance(why, str):
            found.append(f"Left out: {why}")
        else:
            found += [f"Left out of {name}: {encoder}: {reason}" for encoder, reason in why.items()]
    return found
