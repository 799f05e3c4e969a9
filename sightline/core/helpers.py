"""Processes beside this one that take part in its work on a CPU, joined as torchrun would join them.

    helpers = Helpers(1)
    with helpers.taking_part("sightline.studies.worker:take_part", about):  # calls it there with plain data
        analyze(…)                                                          # here, as the first of two processes
    helpers.close()

Threads of one process would wait for Python's lock between any two operations, which are short in small encoders. The
helpers stay for the next work, since importing takes seconds, and end with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from sightline.core.errors import InputError, first_line
from sightline.core.processes import leave
from sightline.core.stopping import Stopped

PATIENCE = 30.0  # seconds for a helper to join, and to save what it has and end
LONGEST = timedelta(days=1)  # how long joined processes wait for each other; one that has ended is noticed at once
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


class LostError(Exception):
    """A helper has ended, or could not be joined, before the work was done."""


@dataclass(frozen=True)
class _Helper:
    process: subprocess.Popen[str]
    errors: IO[str]  # what it has to say

    def send(self, job: Mapping[str, Any] | str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and will not answer
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ends(self, seconds: float) -> bool:
        """Whether it has ended, or does so in this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        return False

    def why(self) -> str:
        """Why one that has ended did so."""
        if (code := self.process.poll()) is not None and code < 0:
            return f"signal {-code}"
        self.errors.seek(0)
        return (self.errors.read().strip().splitlines() or ["it said nothing"])[-1]

    def wait(self) -> None:
        """See it end, in time."""
        try:
            self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self.errors.close()


class Helpers:
    """So many processes beside this one, started when they are first needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.all: list[_Helper] = []
        self.stopped = False  # whether they were told to stop; told twice, they would not save what they have

    def start(self, work: str) -> None:
        """Begin to import what `work` needs, while this process has other things to do."""
        if self.all:
            return
        self.stopped = False
        try:
            for _ in range(self.count):
                self.all.append(_started(work, self.count + 1))
        except OSError as error:
            self.close()
            raise LostError(first_line(error)) from error

    @contextlib.contextmanager
    def taking_part(self, work: str, about: Mapping[str, Any]) -> Iterator[None]:
        """Let each helper call `work`, "module:function", with `about`, while this process does its part."""
        threads, done = torch.get_num_threads(), False
        with tempfile.TemporaryDirectory(prefix="sightline-") as folder, self._hearing_of_signals():
            try:
                self._join(work, about, Path(folder) / "meeting")
                torch.set_num_threads(max(1, threads // (self.count + 1)))
                yield
                self._expect("done")
                done = True
            except RuntimeError as error:  # of a connection that was closed, or one that has nothing to do with it
                if _of_connection(str(error)) or any(helper.ends(1.0) for helper in self.all):
                    self._lose(error)
                raise
            finally:
                leave()
                torch.set_num_threads(threads)
                if not done:
                    self.close()

    def close(self) -> None:
        """Let them save what they have, and end."""
        self._stop()
        for helper in self.all:
            helper.wait()
        self.all = []

    def _stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            for helper in self.all:
                helper.process.terminate()

    def _join(self, work: str, about: Mapping[str, Any], meeting: Path) -> None:
        self.start(work)
        for number, helper in enumerate(self.all, 1):
            place = {"meeting": str(meeting), "number": number, "of": self.count + 1}
            helper.send({"work": work, "about": about, **place})
        self._expect("ready")
        for helper in self.all:
            helper.send("meet")
        try:
            _meet(meeting, 0, self.count + 1)
        except RuntimeError as error:
            self._lose(error)

    def _expect(self, word: str) -> None:
        for helper in self.all:
            if (answer := helper.answer()) != word:
                self._lose(answer=answer)

    def _lose(self, error: RuntimeError | None = None, answer: str = "") -> NoReturn:
        """Tell why helpers are lost, in their own sentence if there is one.

        They lose the connection a while before they have ended, and lose it with each other, too: the one that was
        the first to end tells why.
        """
        if self.stopped:
            raise KeyboardInterrupt from error
        deadline = time.monotonic() + PATIENCE
        ended = [helper for helper in self.all if helper.ends(max(0.0, deadline - time.monotonic()))]
        for sentence in (answer, *(helper.answer() for helper in ended)):
            if sentence:
                raise InputError(json.loads(sentence)) from error
        reasons = sorted((helper.why() for helper in ended), key=_of_connection)
        raise LostError(*reasons[:1] or [first_line(error) if error else "it said nothing"]) from error

    @contextlib.contextmanager
    def _hearing_of_signals(self) -> Iterator[None]:
        """Tell the helpers of Ctrl-C and SIGTERM at once: this process may be waiting for them, and hear nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard, told = socket.socketpair()
        told.setblocking(False)

        def hear() -> None:
            while number := heard.recv(1):
                if number[0] in (signal.SIGINT, signal.SIGTERM):
                    self._stop()

        hearing = threading.Thread(target=hear, daemon=True)
        hearing.start()
        before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            told.close()
            hearing.join()
            heard.close()


def _started(work: str, processes: int) -> _Helper:
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 — closed when it has ended
    threads = max(1, torch.get_num_threads() // processes)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "sightline.core.helpers", str(os.getpid()), work],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,  # Ctrl-C is for the first process, which tells the others
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the modules that this process has
        },
        text=True,
    )
    return _Helper(process, errors)


def _of_connection(told: str) -> bool:
    return "/gloo/" in told


def _meet(meeting: Path, number: int, of: int) -> None:
    """Join, or fail soon: where another one ends before it has joined, this one hears nothing while it waits."""
    dist.distributed_c10d._world.group_count = 0  # else, after a failure, we would look for the others by another name
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=of, timeout=patience)
    dist.barrier()  # one that left at once would leave others waiting for its address
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # before torch 2.15
    set_timeout(LONGEST)


# A helper


def _end_with(parent: int) -> None:
    """Nobody else may write to the folder of a run when its process is gone and another one goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _imported(work: str) -> Callable[[Mapping[str, Any]], None]:
    module, _, name = work.partition(":")
    function: Callable[[Mapping[str, Any]], None] = getattr(importlib.import_module(module), name)
    return function


def main(parent: int, first: str) -> None:
    """Take part in what comes line by line on the input, until it ends or something fails; `first` is imported now."""
    _end_with(parent)
    told = sys.stdout
    sys.stdout = sys.stderr  # nothing else may get in between
    _imported(first)
    for line in sys.stdin:
        job = json.loads(line)
        work = _imported(job["work"])
        print("ready", file=told, flush=True)
        sys.stdin.readline()  # all are ready, which may take some of them long
        _meet(Path(job["meeting"]), job["number"], job["of"])
        try:
            work(job["about"])
        except Stopped:
            return
        except InputError as error:
            print(json.dumps(str(error)), file=told, flush=True)
            return
        finally:
            leave()  # a connection that is still open may abort the process when it ends
        print("done", file=told, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
