"""What all benchmarks share: their options, the machine, tools in turn, memory, and the bare forward beside a pass.

`--smoke` is one tiny round, which shows that a benchmark still runs; its numbers mean nothing. `--clock processor`
counts what this process computes, not what it waits, for a machine that others use, best with `--threads 1`.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import importlib
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import sightline as sl

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
TINY = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=12&num_heads=2"
Work = Callable[[], object]


def arguments(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that all have; a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--smoke", action="store_true", help="one tiny round: does it run?")
    return parser


def begin(parser: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Read the options, those of a smoke test over them, and say where and when it runs."""
    asked = parser.parse_args()
    if asked.smoke:
        vars(asked).update({"rounds": 1, "threads": 1, **smoke})
    torch.set_num_threads(asked.threads)
    load = os.getloadavg()[0]
    busy = f", load {load:.1f}: others use this machine" if load > 0.5 else ""
    print(f"{datetime.date.today()}, {processor()}, {asked.threads} threads, {asked.clock} time{busy}")
    print(f"sightline {sl.__version__}, torch {torch.__version__}")
    return asked


def processor() -> str:
    """Its name, and the instructions that PyTorch uses of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


@functools.cache
def peer(name: str) -> ModuleType | None:
    """The package of a peer, or none, with a word, where it is not installed; a file here may have the same name."""
    here = str(Path(__file__).parent)
    path, sys.path = sys.path, [folder for folder in sys.path if os.path.realpath(folder or ".") != here]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(f"{name} is left out: {error} (pip install 'sightline[bench]')")
        return None
    finally:
        sys.path = path


# Time


def in_turn(
    tools: Mapping[str, Work], rounds: int, clock: str, last: dict[str, Any] | None = None
) -> dict[str, list[float]]:
    """Seconds of each tool in each round: all run in each, in another order, so that a busy machine slows all.

    What each gives in the last round goes into `last`.
    """
    names, now = list(tools), CLOCKS[clock]
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = now()
            outcome = tools[name]()
            if number:  # the first round warms up
                taken[name].append(now() - began)
            if last is not None:
                last[name] = outcome
    return taken


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Median and range of the ratios, taken round by round.

    >>> ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    '3.00 (2.00 … 4.00)'
    """
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"


@dataclass
class Beside:
    """The bare forward pass beside a pass of Sightline: it stands where images are read, and goes before each batch.

    What passes from the end of one bare forward to the begin of the next is a step of Sightline. Its ratio is to the
    mean of the bare forwards on either side; the last step is not counted, since the end of the pass follows it. Every
    split has a whole number of batches.
    """

    encoders: Mapping[str, sl.Encoder]
    clock: str
    steps: list[float] = field(default_factory=list)  # seconds
    bares: list[float] = field(default_factory=list)
    around: float = 0.0  # seconds before the first step and after the last

    def measure(self, images: sl.Images, batch: int, **how: Any) -> Any:
        """Run the pass; gives the run."""
        now, marks = CLOCKS[self.clock], list[float]()
        bare = bare_pass({name: copy.deepcopy(encoder) for name, encoder in self.encoders.items()}, batch)
        # The image that is read first of each batch; positions are read in ascending order.
        orders = [images.order(split, 0) for split in images.splits]
        firsts = {int(order[at : at + batch].min()) for order in orders for at in range(0, len(order), batch)}
        begun = now()

        class Source:
            def __getattr__(self, name: str) -> Any:
                return getattr(images.source, name)

            def read(_, indices: Sequence[int]) -> Any:  # noqa: N805 — `self` is the benchmark
                if int(indices[0]) in firsts:
                    firsts.remove(int(indices[0]))
                    marks.append(now())
                    bare()
                    marks.append(now())
                return images.source.read(indices)

        timed = replace(images, source=Source())
        run = sl.analyze(self.encoders, timed, batch=batch, workers=0, show_progress=False, device="cpu", **how)
        ends = now()
        self.bares += [after - before for before, after in zip(marks[::2], marks[1::2], strict=True)]
        self.steps += [before - after for after, before in zip(marks[1::2], marks[2::2], strict=False)]
        self.around = (marks[0] - begun) + (ends - marks[-1]) - statistics.median(self.steps)
        return run

    def ratios(self) -> list[float]:
        """Of each step to the bare forward, in order of size; 1: the measurements cost nothing."""
        pairs = zip(self.steps, self.bares, self.bares[1:], strict=False)
        return sorted(2 * step / (before + after) for step, before, after in pairs)


def bare_pass(encoders: Mapping[str, sl.Encoder], batch: int) -> Work:
    """One batch through each encoder, as it comes from the images: normalised, and nothing else."""
    first = next(iter(encoders.values()))
    pixels = torch.randint(0, 256, (batch, 3, *first.preprocess.size), dtype=torch.uint8)

    def forward() -> None:
        with torch.inference_mode():
            for encoder in encoders.values():
                encoder(encoder.preprocess.normalize(pixels))

    for encoder in encoders.values():
        encoder.module.eval()
    return forward


# Memory


def resident() -> float:
    """Megabytes that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def peak(work: Work) -> float:
    """Megabytes that it takes at most, beyond what there is before: in a fork of its own, with one thread."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def measured() -> None:
        torch.set_num_threads(1)  # threads do not survive a fork
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
        before = resident()
        work()
        status = Path("/proc/self/status").read_text().splitlines()
        highest = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        writer.send(highest * 1024 / 1e6 - before)

    process = context.Process(target=measured)
    process.start()
    writer.close()
    try:
        value: float = reader.recv()
    finally:
        process.join()
    return value


@contextmanager
def sampled(every: float) -> Iterator[list[float]]:
    """Resident memory again and again while something runs."""
    seen, over = [resident()], threading.Event()

    def look() -> None:
        while not over.wait(every):
            seen.append(resident())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()
