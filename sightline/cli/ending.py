"""How a command ends: the report is written, and the table of headline numbers and the conclusions are said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from sightline.core import plugins
from sightline.core.errors import some

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from sightline.core.run_folder import Run
    from sightline.report.standing import Standing
    from sightline.studies.findings.contract import Verdict

__all__ = ["finish", "first_process", "number_table", "report_of", "stoppable"]


def first_process() -> bool:
    """Whether this is the process that speaks; the others have nothing left to do together."""
    from sightline.core.processes import leave, rank

    first = rank() == 0
    leave()
    return first


@contextlib.contextmanager
def stoppable(hint: str = "") -> Iterator[None]:
    """What was asked to stop and has saved itself says how to go on, or what `hint` says, and ends."""
    from sightline.core.stopping import Stopped

    try:
        yield
    except Stopped as stop:
        if not first_process():
            raise SystemExit(0) from stop
        typer.echo(f"{str(stop).partition(';')[0]}; {hint}" if hint else stop)
        raise SystemExit(128 + stop.signal) from stop


def finish(run: Run, verbose: bool = False) -> None:
    """Only the first of several processes writes and speaks: a table, conclusions, and where the report is."""
    if not first_process():
        return
    from sightline.core import progress
    from sightline.report.standing import conclusions, stand

    progress.console().print("Drawing the report", style="dim")
    path, verdicts = report_of(run)
    standing = stand(run)
    terminal = console()
    if standing.columns:
        terminal.print(number_table(standing, terminal.width))
        terminal.print("* best of its column; 95 % intervals dimmed", style="dim")
    for sentence in conclusions(standing, verdicts):
        terminal.print(f"• {sentence}", markup=False)
    left_out = run.request.get("left_out", {})
    if verbose:
        _say_everything(run)
    elif left_out:
        terminal.print(f"Left out, in whole or in part: {some(left_out, most=4)}; --verbose says why", style="dim")
    typer.echo(f"Report: {path}")


def report_of(run: Run) -> tuple[Path, list[Verdict]]:
    """Write the report of a run, with the findings that its encoders can decide."""
    from sightline.report.page import write_report

    verdicts: list[Verdict] = []
    return write_report(run, verdicts=verdicts), verdicts


def console() -> Console:
    """For what is told at the end, on stdout."""
    from rich.console import Console

    return Console(highlight=False)


def number_table(standing: Standing, width: int) -> Table:
    """Encoders as rows, at most eight columns; intervals stand beside their numbers, or below where it is narrow."""
    from rich.table import Table
    from rich.text import Text

    beside = _width(standing) <= width
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("encoder", no_wrap=True, overflow="ellipsis", min_width=8)
    for column in standing.columns:
        table.add_column(column.number.title, justify="right", vertical="bottom")
    for name in standing.encoders:
        cells = [Text(name)]
        for column in standing.columns:
            number = column.number
            best = name == number.winner()
            text = Text(f"{number.write(name) or '–'}{'*' if best else ''}", style="bold green" if best else "")
            if ends := number.write_ends(name):
                text.append(f" {ends}" if beside else f"\n{ends}", style="dim not bold")
            cells.append(text)
        table.add_row(*cells)
    return table


def _width(standing: Standing) -> int:
    """Of the table with its intervals beside the numbers."""
    widths = [max((len(name) for name in standing.encoders), default=0)]
    for column in standing.columns:
        number = column.number
        rows = (f"{number.write(name)}* {number.write_ends(name)}" for name in standing.encoders)
        widths.append(max(max(map(len, rows), default=0), *map(len, number.title.split())))
    return sum(widths) + 2 * len(widths)


def _say_everything(run: Run) -> None:
    for name in run:
        module = plugins.module_of(name)
        typer.secho(module.TITLE, bold=True)
        for label, number, detail in module.headlines(run[name]):
            typer.echo(f"  {label}: {number} ({detail})")
    for name, why in run.request.get("left_out", {}).items():
        for reason in [why] if isinstance(why, str) else [f"{encoder}: {text}" for encoder, text in why.items()]:
            typer.secho(
                f"Left out of {name}: {reason}" if not isinstance(why, str) else f"Left out: {reason}", dim=True
            )
