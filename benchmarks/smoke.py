"""One tiny round of every benchmark, in forks of a process that has imported everything: do they run?

    python benchmarks/smoke.py [cka knn …]

A line of JSON for each: its name, exit status, seconds of processor time, and what it said.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import forks

HERE = Path(__file__).parent


def names() -> list[str]:
    """Every file here that can be run, but this one."""
    files = [file for file in sorted(HERE.glob("*.py")) if file != Path(__file__)]
    return [file.stem for file in files if '__name__ == "__main__"' in file.read_text()]


def run(name: str) -> None:
    """In the fork."""
    sys.argv = [str(HERE / f"{name}.py"), "--smoke"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Run them one after the other."""
    forks.import_all()
    home = Path(tempfile.mkdtemp(prefix="smoke-"))
    for name in sys.argv[1:] or names():
        log, before = home / f"{name}.log", os.times()
        status = forks.end(forks.forked(lambda name=name: run(name), home, log))
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        said = log.read_text(errors="replace") if log.is_file() else ""
        print(json.dumps({"name": name, "status": status, "seconds": round(seconds, 1), "said": said}), flush=True)
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
