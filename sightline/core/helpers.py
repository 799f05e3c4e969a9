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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from sightline.core.errors import first_line
from sightline.core.processes import leave
from sightline.core.stopping import Stopped

__all__ = ["Helpers", "LostError"]


PATIENCE = 30.0  # seconds for a helper to save what it has and end
LONGEST = timedelta(hours=2)  # that a process waits for the others
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


class LostError(Exception):
    """A helper has ended, or could not be joined, before the work was done."""


class Helpers:
    """So many processes beside this one, started when they are first needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.processes: list[subprocess.Popen[str]] = []
        self.said: IO[str] | None = None  # what they have said, a file while there are any

    def start(self, work: str) -> None:
        """Begin to import what `work` needs, while this process has other things to do."""
        if self.processes:
            return
        self.said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 — see `close`
        try:
            for _ in range(self.count):
                self.processes.append(self._begin(work))
        except OSError as error:
            self.close()
            raise LostError(first_line(error)) from error

    @contextlib.contextmanager
    def taking_part(self, work: str, about: Mapping[str, Any]) -> Iterator[None]:
        """Let each helper call `work`, "module:function", with `about`, while this process does its part."""
        threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory(prefix="sightline-") as folder:
            try:
                self._join(work, about, Path(folder) / "meeting")
                torch.set_num_threads(max(1, threads // (self.count + 1)))
                yield
                self._expect("done")
            except BaseException as error:
                lost = isinstance(error, RuntimeError) and self._ended()
                why = self._last_words() or str(error)
                self.close()
                if lost:
                    raise LostError(why) from error
                raise
            finally:
                leave()
                torch.set_num_threads(threads)

    def close(self) -> None:
        """Let them save what they have, and end."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        self.processes = []
        if self.said is not None:
            self.said.close()
            self.said = None

    def _join(self, work: str, about: Mapping[str, Any], meeting: Path) -> None:
        self.start(work)
        for number, process in enumerate(self.processes, 1):
            job = {"work": work, "about": about, "meeting": str(meeting), "number": number, "of": self.count + 1}
            with contextlib.suppress(BrokenPipeError):  # it has ended, and will not say that it is ready
                assert process.stdin is not None
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
        self._expect("ready")
        try:
            _meet(meeting, 0, self.count + 1)
        except RuntimeError as error:
            raise LostError(first_line(error)) from error

    def _begin(self, work: str) -> subprocess.Popen[str]:
        threads = max(1, torch.get_num_threads() // (self.count + 1))
        return subprocess.Popen(
            [sys.executable, "-m", "sightline.core.helpers", str(os.getpid()), work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            start_new_session=True,  # Ctrl-C is for the first process, which tells the others
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            text=True,
        )

    def _expect(self, word: str) -> None:
        for process in self.processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != word:
                raise LostError(self._last_words() or f"it ended before it was {word}")

    def _ended(self) -> bool:
        """Whether one has; what tells of it, a closed connection, may be known a moment before."""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
                return True
        return False

    def _last_words(self) -> str:
        if self.said is None:
            return ""
        self.said.seek(0)
        return (self.said.read().strip().splitlines() or [""])[-1]


def _meet(meeting: Path, number: int, of: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=of, timeout=LONGEST)


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
        _meet(Path(job["meeting"]), job["number"], job["of"])
        try:
            work(job["about"])
        except Stopped:
            return
        leave()
        print("done", file=told, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
