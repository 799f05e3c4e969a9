"""Ctrl-C and SIGTERM as a wish that is granted when a step is whole, so that what was computed can be saved."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):  # noqa: N818 — not an error
    """The work was asked to stop and has saved itself; `signal` says by which signal."""

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal


@contextlib.contextmanager
def signals(asked: list[int]) -> Iterator[None]:
    """Collect Ctrl-C and SIGTERM in `asked` while a step goes on; a second one stops the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
