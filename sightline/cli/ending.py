"""How a command ends: the report is written, and its headlines are said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from sightline.core import plugins

if TYPE_CHECKING:
    from sightline.core.run_folder import Run

__all__ = ["finish", "first_process", "stoppable"]


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


def finish(run: Run) -> None:
    """Only the first of several processes writes and speaks."""
    if not first_process():
        return
    from sightline.report.page import write_report

    path = write_report(run)
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
    typer.echo(f"Report: {path}")
