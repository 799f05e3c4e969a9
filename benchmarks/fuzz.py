"""Mutated input of every kind: a sentence or a right result each, never a traceback, a hang, a crash, or all memory.

    python benchmarks/fuzz.py [--cases 10000] [--kinds pattern,recipe] [--out runs/fuzz]
    python benchmarks/fuzz.py --kinds recipe --number 17        # one case again, with its traceback

A case follows from its kind and number alone. It runs in a fork of this process (forks.py), some after each other, and
may take 10 seconds of CPU time and 2 GB more than the process has, in a folder of its own, beside which nothing may
appear; one that ends its fork is found by what the fork has told before. One line of OUT/cases.jsonl is one case that
was not right; OUT/done.json says how many were tried, and running the script again goes on from there, so that it can
run in the background for as long as there is time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import forks
from fuzz_cases import KINDS, MADE, make

from sightline.core.errors import InputError

SECONDS, MEMORY = 10, 2 * 2**30
ADDRESSES = {"command": 2**40}  # the renderer of figures reserves far more addresses than it uses
TOGETHER = 25  # cases in a fork
SHARE = {"setting": 0.4}  # as many cases as others: they take longer


def outcomes(kind: str, numbers: list[int], seen: bool = False) -> list[tuple[str, str]]:
    """What comes of cases in one fork: a right result, a sentence, or what is wrong, and its last words.

    Where a case ends the fork, it is the last one that is told of.
    """
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
        child = forks.forked(lambda: _try(kind, numbers, Path(home), reader, writer), Path(home), _shown(seen))
        os.close(writer)
        with os.fdopen(reader) as stream:
            told = [json.loads(line) for line in stream if line.endswith("\n")]
        status = forks.end(child)
    found = [(word, rest) for word, rest in told]
    if len(found) < len(numbers):
        hung = -status in (signal.SIGPROF, signal.SIGALRM)
        found.append(("hang" if hung else f"end with status {status}", ""))
    return found


def _shown(seen: bool) -> Path | None:
    return Path("/dev/stderr") if seen else None


def _try(kind: str, numbers: list[int], home: Path, reader: int, writer: int) -> None:
    """In the fork."""
    os.close(reader)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    room = used + ADDRESSES.get(kind, MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in numbers:
        place = home / str(number) / "inside"
        place.mkdir(parents=True)
        os.chdir(place)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # which ends the process
        signal.alarm(60 * SECONDS)  # where it only waits
        answer = json.dumps(_case(kind, number, place)) + "\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(writer, answer.encode())


def _case(kind: str, number: int, place: Path) -> tuple[str, str]:
    try:
        KINDS[kind](random.Random(f"{kind} {number}"), place)
    except InputError as error:
        return "sentence", str(error)[:500]
    except MemoryError:
        return "memory", traceback.format_exc()[-3000:]
    except BaseException:
        return "traceback", traceback.format_exc()[-3000:]
    if [path.name for path in place.parent.iterdir()] != ["inside"] and kind != "command":  # it may have said ../
        return "files elsewhere", str(list(place.parent.iterdir()))
    return "right", ""


def main() -> None:
    """Go on until so many cases were tried."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--cases", type=int, default=10_000, help="in all, those of earlier times included")
    words.add_argument("--kinds", default=",".join(KINDS))
    words.add_argument("--number", type=int, help="try only this case of each kind, and show what it says")
    words.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    words.add_argument("--smoke", action="store_true", help="a case of each kind, to see whether the script still runs")
    asked = words.parse_args()
    if asked.smoke:  # no TemporaryDirectory, which the first fork that ends would remove
        asked.out = Path(tempfile.mkdtemp(prefix="fuzz-"))
    kinds, out = asked.kinds.split(","), asked.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(out / "cache")
    forks.import_all()
    forks.remember_drawings(out / "drawn")
    forks.end(forks.forked(lambda: (forks.telling_imports(MADE / "imported.json"), make())[0], MADE, out / "made.log"))
    forks.import_as(MADE / "imported.json")
    if asked.number is not None:
        for kind in kinds:
            print(kind, *outcomes(kind, [asked.number], seen=True)[0], sep="\n")
    else:
        wrong = go_on(kinds, len(kinds) if asked.smoke else asked.cases, 1 if asked.smoke else TOGETHER, out)
        if wrong:
            sys.exit(f"{wrong} cases were not right; {out / 'cases.jsonl'} has their last words")
    shutil.rmtree(MADE)
    if asked.smoke:
        shutil.rmtree(out)


def go_on(kinds: list[str], cases: int, together: int, out: Path) -> int:
    """Go on until so many cases were tried; how many were not right, those of earlier times included."""
    done_file, wrong_file = out / "done.json", out / "cases.jsonl"
    done: dict[str, dict[str, int]] = json.loads(done_file.read_text()) if done_file.exists() else {}
    while sum(sum(done.get(kind, {}).values()) for kind in kinds) < cases:
        kind = min(kinds, key=lambda name: sum(done.get(name, {}).values()) / SHARE.get(name, 1))
        counts = done.setdefault(kind, {})
        first = sum(counts.values())
        for number, (word, rest) in enumerate(outcomes(kind, list(range(first, first + together))), first):
            counts[word] = counts.get(word, 0) + 1
            if word not in ("right", "sentence"):
                told = {"kind": kind, "number": number, "what": word, "last words": rest[-2000:]}
                with wrong_file.open("a") as file:
                    file.write(json.dumps(told) + "\n")
                print(f"{kind} {number}: {word}: {rest.strip().splitlines()[-1:]}", flush=True)
        done_file.write_text(json.dumps(done, indent=1))
    for kind, counts in sorted(done.items()):
        print(f"{kind:14}{sum(counts.values()):7}  {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
    return sum(n for counts in done.values() for what, n in counts.items() if what not in ("right", "sentence"))


if __name__ == "__main__":
    main()
