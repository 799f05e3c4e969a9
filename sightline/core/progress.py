"""What the terminal shows during a pass: its cost beforehand, then a bar with throughput and time left.

What is computed deep inside, when the pass is over, has bars as well where `showing` says that there is someone to see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["bar", "bar_of_steps", "console", "show_cost", "showing"]


_seen: ContextVar[bool] = ContextVar("seen", default=False)


def console() -> Console:
    """Messages go to stderr, so that stdout stays free for data."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


class Move(Protocol):
    """Moves a bar on by so many images, with a word about how it goes."""

    def __call__(self, images: int, note: str = "") -> None: ...


@contextlib.contextmanager
def showing(shown: bool) -> Iterator[None]:
    """Whether bars of steps are seen inside: not unless someone says so, and only on one of several processes."""
    before = _seen.set(shown)
    try:
        yield
    finally:
        _seen.reset(before)


@contextlib.contextmanager
def bar_of_steps(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar that is gone when all steps are done, where `showing` lets it be seen; call what it gives after each."""
    if _seen.get() and (terminal := console()).is_terminal:
        from rich.progress import Progress

        with Progress(console=terminal, transient=True) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)
    else:
        yield lambda: None


@contextlib.contextmanager
def bar(title: str, total: int, done: int = 0, shown: bool = True) -> Iterator[Move]:
    """A bar over so many images, with throughput and time left."""
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
        TextColumn("left{task.fields[note]}"),
    )
    with Progress(*columns, console=console(), disable=not shown) as progress:
        task = progress.add_task(title, total=total, completed=done, rate="", note="")

        def move(images: int, note: str = "") -> None:
            progress.advance(task, images)
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:.1f} images/s" if speed else "", note=f", {note}" if note else "")

        yield move


def show_cost(rows: Mapping[str, str]) -> None:
    """What the pass is going to take, before it starts."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[dim]{name}[/dim]", value)
    console().print(table)
