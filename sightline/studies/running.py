"""Running the steps of a study: those that are ready, here, in processes of their own or on other machines.

A step that fails stops only what needs it. One whose process was killed is done again, and goes on where it was.
Several of these may run over the same folder of steps: each step is locked by one of them.
"""

import contextlib
import graphlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sightline.core.errors import InputError, first_line
from sightline.core.processes import cores
from sightline.core.stopping import Stopped, signals
from sightline.studies.commands import Machine, command_of
from sightline.studies.folders import StepFolder, do

TRIES = 3  # of a step whose process was killed
PATIENCE = 0.5  # seconds between two looks


@dataclass(frozen=True)
class Ended:
    """How the work at a step ended."""

    state: str  # done, busy (someone else is at it), failed, stopped (it was asked to, and has saved itself), lost
    why: str = ""


@dataclass
class Outcome:
    """How the steps of a study ended."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # step → why
    left: dict[str, str] = field(default_factory=dict)  # step → the failed step that it needs


class Job(Protocol):
    """The work at one step."""

    def ended(self) -> Ended | None:
        """How it ended, None as long as it goes on."""
        ...

    def stop(self) -> None:
        """Ask it to save itself and stop."""
        ...


class Executor(Protocol):
    """Where steps are run."""

    @property
    def places(self) -> int:
        """How many at a time."""
        ...

    def start(self, placed: StepFolder, folders: Mapping[str, Path]) -> Job:
        """Begin a step whose needs are done."""
        ...

    def close(self) -> None:
        """Nothing more will be started."""
        ...


def perform(placed: StepFolder, folders: Mapping[str, Path], machine: Machine) -> Ended:
    """Do one step in this process; how it ended, never an exception but that of a second Ctrl-C."""
    try:
        command = command_of(placed.step)
        return Ended("done" if do(placed, folders, command.run, machine) else "busy")
    except Stopped as stop:
        return Ended("stopped", str(stop.signal))
    except InputError as error:
        return Ended("failed", str(error))
    except Exception as error:  # a step must not take the others with it
        traceback.print_exc()
        return Ended("failed", f"{type(error).__name__}: {first_line(error)}")


def run_steps(
    steps: Sequence[StepFolder], executor: Executor, tell: Callable[[str, StepFolder, Ended | None], None]
) -> Outcome:
    """Run what is not done, each step after those it needs; `tell` hears when one begins, waits for someone, ends."""
    asked: list[int] = []
    with contextlib.ExitStack() as stack:
        if not isinstance(executor, Here):  # steps in this process listen for themselves
            stack.enter_context(signals(asked))
        stack.callback(executor.close)
        return _Round(steps, executor, tell, asked).run()


class _Round:
    """One run over the steps of a study."""

    def __init__(
        self,
        steps: Sequence[StepFolder],
        executor: Executor,
        tell: Callable[[str, StepFolder, Ended | None], None],
        asked: list[int],
    ) -> None:
        self.steps = {placed.step.name: placed for placed in steps}
        self.folders = {name: placed.folder for name, placed in self.steps.items()}
        self.executor, self.tell, self.asked = executor, tell, asked
        self.order = graphlib.TopologicalSorter({name: placed.step.needs for name, placed in self.steps.items()})
        self.outcome = Outcome()
        self.waiting: list[str] = []
        self.running: dict[str, Job] = {}
        self.tries: dict[str, int] = {}
        self.told: set[str] = set()  # steps that someone else is at

    def run(self) -> Outcome:
        self.order.prepare()
        while self.order.is_active():
            self.waiting += self.order.get_ready()
            moved = [self._begin(name) for name in list(self.waiting)]
            moved += [self._look(name, job) for name, job in list(self.running.items())]
            if self.asked:
                self._stop(self.asked[-1])
            if not any(moved):
                time.sleep(PATIENCE)
        return self.outcome

    def _begin(self, name: str) -> bool:
        """Start a step if it can be; whether anything has changed."""
        placed = self.steps[name]
        broken = [need for need in placed.step.needs if need in self.outcome.failed or need in self.outcome.left]
        if broken:
            self.outcome.left[name] = self.outcome.left.get(broken[0], broken[0])
        elif placed.done:
            self.outcome.done.append(name)
        elif len(self.running) >= self.executor.places:
            return False
        elif placed.running:
            if name not in self.told:
                self.told.add(name)
                self.tell("waits", placed, None)
            return False
        else:
            self.tell("begins", placed, None)
            self.running[name] = self.executor.start(placed, self.folders)
            self.waiting.remove(name)
            return True
        self.waiting.remove(name)
        self.order.done(name)
        return True

    def _look(self, name: str, job: Job) -> bool:
        """See whether a step has ended."""
        ended = job.ended()
        if ended is None:
            return False
        placed = self.steps[name]
        del self.running[name]
        if ended.state == "stopped":
            self._stop(int(ended.why or signal.SIGTERM))
        if ended.state == "lost":
            self.tries[name] = self.tries.get(name, 1) + 1
            if self.tries[name] > TRIES:
                ended = Ended("failed", f"its process ended {TRIES} times before it was done ({ended.why})")
        if ended.state in ("busy", "lost"):
            self.waiting.append(name)
        elif ended.state == "failed":
            self.outcome.failed[name] = ended.why
            self.order.done(name)
        else:
            self.outcome.done.append(name)
            self.order.done(name)
        self.tell("ends", placed, ended)
        return True

    def _stop(self, number: int) -> None:
        """Let all that runs save itself, then stop."""
        for job in self.running.values():
            job.stop()
        while any(job.ended() is None for job in self.running.values()):
            time.sleep(PATIENCE)
        raise Stopped(number, "Stopped")


# Where steps are run


@dataclass(frozen=True)
class _Over:
    """Work that has ended already."""

    how: Ended

    def ended(self) -> Ended:
        return self.how

    def stop(self) -> None:
        """It has ended."""


@dataclass(frozen=True)
class Here:
    """One step after the other in this process, with its bars."""

    machine: Machine
    places: int = 1

    def start(self, placed: StepFolder, folders: Mapping[str, Path]) -> Job:
        return _Over(perform(placed, folders, self.machine))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Processes:
    """Several steps at a time, each in a process of its own, which writes to a log beside the step's folder."""

    machine: Machine
    places: int

    def start(self, placed: StepFolder, folders: Mapping[str, Path]) -> Job:
        """Start a Python that does it."""
        threads = max(1, cores() // self.places)
        job = json.dumps(ticket(placed, folders, self.machine))
        placed.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(placed.beside("log"), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sightline.studies.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is passed on by us, once
                env={"OMP_NUM_THREADS": str(threads), **os.environ},
                text=True,
            )
        assert process.stdin is not None
        process.stdin.write(job)
        process.stdin.close()
        return _Process(process)

    def close(self) -> None:
        """They end by themselves."""


@dataclass(frozen=True)
class _Process:
    process: subprocess.Popen[str]

    def ended(self) -> Ended | None:
        if self.process.poll() is None:
            return None
        assert self.process.stdout is not None
        told = "" if self.process.stdout.closed else self.process.stdout.read().strip()
        self.process.stdout.close()
        try:
            return Ended(**json.loads(told.splitlines()[-1]))
        except (ValueError, IndexError, TypeError):
            code = self.process.returncode
            return Ended("lost", f"signal {-code}" if code < 0 else f"exit code {code}")

    def stop(self) -> None:
        self.process.terminate()


def ticket(placed: StepFolder, folders: Mapping[str, Path], machine: Machine) -> dict[str, Any]:
    """A step as plain data, for a process elsewhere."""
    return {
        "step": asdict(placed.step),
        "key": placed.key,
        "folder": str(placed.folder.absolute()),
        "folders": {name: str(folders[name].absolute()) for name in placed.step.needs},
        "reuse": {name: [str(run.absolute()) for run in runs] for name, runs in placed.reuse.items()},
        "machine": asdict(machine),
    }
