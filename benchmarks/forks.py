"""Commands in forks of a process that has imported everything: a start costs some milliseconds, not some seconds.

A fork is to a command what a new process is: its own group, folder, empty input and output, signals as at the start,
random numbers of its own, what is left to do at the end done. It differs in two ways: nothing is imported, and sets of
strings have the order that they have in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vl_convert

import sightline as sl

# What a command does to files, of what Python tells: it is killed before the N-th of these.
FILE_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


def import_all() -> None:
    """Everything that a command would import; nothing is computed, so that nothing is remembered."""
    torch.set_num_threads(1)
    for found in pkgutil.walk_packages(sl.__path__, "sightline."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of what is not installed
                importlib.import_module(found.name)
    gc.freeze()  # pages of this process are not copied by the collector of a fork
    atexit.register(gc.unfreeze)


def import_as(said: Path) -> None:
    """What a fork has imported on its way, as `telling_imports` has written it down."""
    for name in json.loads(said.read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()


def telling_imports(said: Path) -> None:
    """In a fork: write down at its end what it has imported that this process has not."""
    before = set(sys.modules)
    atexit.register(lambda: said.write_text(json.dumps([name for name in sys.modules if name not in before])))


def remember_drawings(folder: Path) -> None:
    """Draw each figure only once, since a renderer takes seconds to start in each process; it has the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("vegalite_to_svg", "svg_to_pdf", "javascript_bundle"):
        setattr(vl_convert, name, _remembered(getattr(vl_convert, name), folder))


def _remembered(draw: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    @functools.wraps(draw)
    def drawn(*given: Any, **more: Any) -> Any:
        key = hashlib.sha256(json.dumps([draw.__name__, given, more], sort_keys=True).encode()).hexdigest()
        place = folder / key
        if not place.exists():
            made = draw(*given, **more)
            draft = place.with_suffix(f".{os.getpid()}")
            draft.write_bytes(made.encode() if isinstance(made, str) else made)
            draft.rename(place)
        content = place.read_bytes()
        return content if draw.__name__ == "svg_to_pdf" else content.decode()

    return drawn


def forked(work: Callable[[], None], folder: Path, log: Path | None = None) -> int:
    """Do something in a fork, in this folder, with what it says in a file; its process number."""
    if child := os.fork():
        return child
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        give = os.open(os.devnull, os.O_RDONLY)
        take = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(give, 0)
        for stream in (1, 2):
            os.dup2(take, stream)
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        random.seed()
        np.random.seed()  # PyTorch's numbers begin with a constant in a new process, too
        code = exit_status(work)
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def exit_status(work: Callable[[], None]) -> int:
    """What Python would end with."""
    try:
        work()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def command(words: list[str], folder: Path, log: Path, before: Callable[[], None] | None = None) -> int:
    """A command of Sightline in a fork; `before` is called in it first."""
    from sightline.cli import main

    def work() -> None:
        if before is not None:
            before()
        sys.argv = ["sightline", *words]
        main()

    return forked(work, folder, log)


def at_file_event(act: Callable[[int], None]) -> None:
    """Call `act` with a number before each change of a file system that this process makes in Python."""
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes and arguments[0] != os.devnull) or event in FILE_EVENTS:
            count += 1
            act(count)

    sys.addaudithook(hook)


def cpu_seconds(pid: int) -> float:
    """How long a process has computed, which does not depend on what else the machine does."""
    return time.clock_gettime((~pid << 3) | 2)  # the number that clock_getcpuclockid gives


def end(child: int) -> int:
    """Wait for a process; its status as the shell knows it, that of a signal negative."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill(child: int) -> None:
    """Kill a process and all that it has started."""
    for target in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):  # it does not lead a group yet
            target(child, signal.SIGKILL)
