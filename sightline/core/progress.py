"""What the terminal shows during a pass: its cost beforehand, then a bar with throughput and time left.

Where output is no terminal, in a log file, there is a line at once, one as soon as the time that is left can be told,
and one now and then. What is computed deep inside, when the pass is over, is shown as well where `showing` says that
there is someone to see.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sightline.core.errors import visible

if TYPE_CHECKING:
    from rich.console import Console


FIRST, SELDOM = 3.0, 60.0  # seconds until the first line on how it goes, and at most between two lines
Name = TypeVar("Name")


_seen: ContextVar[bool] = ContextVar("seen", default=False)


def console() -> Console:
    """Messages go to stderr, so that stdout stays free for data."""
    return terminal(stderr=True)


def terminal(**options: Any) -> Console:
    """A terminal where names are names: no brackets, words or characters in them mean colours, pictures or commands."""
    from rich.console import Console
    from rich.text import Text

    class Terminal(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(visible(text), **how)

    return Terminal(highlight=False, markup=False, emoji=False, **options)


class Move(Protocol):
    """Moves a bar on by so many images, with a word about how it goes."""

    def __call__(self, images: int, note: str = "") -> None: ...


class Pace:
    """Lines on how far it is, for a log: soon at first, then more and more seldom."""

    def __init__(self, title: str, total: int, done: int = 0, unit: str = "") -> None:
        self.title, self.total, self.unit = title, total, f" {unit}" if unit else ""
        self.first = self.done = done
        self.began = self.last = time.monotonic()
        self.wait = FIRST

    def move(self, by: int) -> str | None:
        """What there is to say after so much more, if it is time to say something."""
        self.done += by
        now = time.monotonic()
        if now - self.last < self.wait or self.done >= self.total:
            return None
        self.last, self.wait = now, min(SELDOM, 3 * self.wait)
        left = (now - self.began) / (self.done - self.first) * (self.total - self.done)
        return f"{self.title}: {self.done} of {self.total}{self.unit}, about {duration(left)} left"


def duration(seconds: float) -> str:
    """How long in words, no more exact than it can be.

    >>> duration(0.3), duration(42), duration(200), duration(7300)
    ('1 s', '42 s', '3 min', '2.0 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


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
    terminal = console()
    if not _seen.get():
        yield lambda: None
    elif terminal.is_terminal:
        from rich.progress import Progress

        with Progress(console=terminal, transient=True) as progress, showing(False):  # a terminal has one bar at a time
            task = progress.add_task(visible(title).replace("[", "\\["), total=total)
            yield lambda: progress.advance(task)
    else:
        pace = Pace(title, total)
        yield lambda: _say(terminal, pace.move(1))


def _say(terminal: Console, line: str | None) -> None:
    if line:
        terminal.print(line, markup=False, soft_wrap=True)


def one_by_one(title: str, names: Iterable[Name]) -> Iterator[Name]:
    """Names in their order, and a line on which is being dealt with, where `showing` lets it be seen.

    The first line comes at once, others when some time has passed.
    """
    names = list(names)
    last = -SELDOM
    for number, name in enumerate(names):
        now = time.monotonic()
        if _seen.get() and now - last > FIRST:
            _say(console(), f"{title}: {name} ({number + 1} of {len(names)})")
            last = now
        yield name


@contextlib.contextmanager
def bar(title: str, total: int, done: int = 0, shown: bool = True) -> Iterator[Move]:
    """A bar over so many images, with throughput and time left; where output is no terminal, a line now and then."""
    if shown and not (terminal := console()).is_terminal:
        pace = Pace(title, total, done, "images")
        _say(terminal, f"{title}: {total - done} images; the time it takes is told after the first of them")
        yield lambda images, note="": _say(terminal, pace.move(images))
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left{task.fields[note]}"),
    )
    with Progress(*columns, console=console(), disable=not shown) as progress:
        task = progress.add_task(visible(title), total=total, completed=done, rate="", note="")

        def move(images: int, note: str = "") -> None:
            progress.advance(task, images)
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:.1f} images/s" if speed else "", note=f", {note}" if note else "")

        yield move


def show_cost(rows: Mapping[str, str]) -> None:
    """What the pass is going to take, before it starts."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), value)
    console().print(table)
