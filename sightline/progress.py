"""What the terminal shows during a pass: its cost beforehand, then a bar with throughput and time left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["bar", "console", "readable", "show_cost"]


def console() -> Console:
    """Messages go to stderr, so that stdout stays free for data."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextlib.contextmanager
def bar(title: str, total: int, done: int = 0, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Give a function that moves the bar on by so many images."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console(), disable=not shown) as progress:
        task = progress.add_task(title, total=total, completed=done, rate="")

        def move(steps: int) -> None:
            progress.advance(task, steps)
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:.1f} images/s" if speed else "")

        yield move


def show_cost(rows: Mapping[str, str]) -> None:
    """What the pass is going to take, before it starts."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[dim]{name}[/dim]", value)
    console().print(table)


def readable(size: float) -> str:
    """Bytes for people.

    >>> readable(0), readable(2_500_000)
    ('0 B', '2.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
