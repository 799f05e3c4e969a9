"""A process that does one step of a study: `python -m sightline.studies.worker`, the step as JSON on its input.

How it ended is one line of JSON on its output; what it has to say on the way goes to its errors.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sightline.studies.commands import Machine
from sightline.studies.folders import StepFolder
from sightline.studies.running import Ended, perform
from sightline.studies.steps import Step


def work_off(ticket: Mapping[str, Any]) -> dict[str, str]:
    """Do the step of a ticket (running.ticket) in this process; how it ended, as plain data."""
    reuse = {name: tuple(map(Path, runs)) for name, runs in ticket.get("reuse", {}).items()}
    placed = StepFolder(Step(**ticket["step"]), ticket["key"], Path(ticket["folder"]), reuse)
    folders = {name: Path(folder) for name, folder in ticket["folders"].items()}
    return asdict(perform(placed, folders, Machine(**ticket["machine"])))


def main() -> None:
    """Read, do, tell."""
    told = sys.stdout
    sys.stdout = sys.stderr  # nothing else may get in between
    try:
        ended = work_off(json.load(sys.stdin))
    except KeyboardInterrupt:
        ended = asdict(Ended("stopped", "2"))
    print(json.dumps(ended), file=told, flush=True)


if __name__ == "__main__":
    main()
