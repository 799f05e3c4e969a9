"""What helpers do in tests (core/helpers.py): they import it by its name."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sightline.core import processes
from sightline.core.errors import InputError


def tell(about: Mapping[str, Any]) -> None:
    """Write down who this process is, and what all have."""
    found = {
        "pid": os.getpid(),
        "who": [processes.rank(), processes.world()],
        "gathered": processes.gathered(about["value"] + processes.rank()),
        "threads": torch.get_num_threads(),
    }
    Path(about["folder"], f"{processes.rank()}.json").write_text(json.dumps(found))


def fail(about: Mapping[str, Any]) -> None:
    """Fail with this sentence."""
    raise ValueError(about["sentence"])


def fail_slowly(about: Mapping[str, Any]) -> None:
    """Lose the connection and fail with this sentence a while later, as a process does that takes long to end."""
    processes.leave()
    time.sleep(3)
    raise ValueError(about["sentence"])


def refuse(about: Mapping[str, Any]) -> None:
    """Refuse with this sentence, as of bad input."""
    raise InputError(about["sentence"])


def refuse_last(about: Mapping[str, Any]) -> None:
    """The last process refuses, the others wait for it."""
    if processes.rank() == processes.world() - 1:
        refuse(about)
    processes.barrier()


def stay(about: Mapping[str, Any]) -> None:
    """Write down who this process is, and do not end."""
    Path(about["folder"], "pid").write_text(str(os.getpid()))
    time.sleep(600)
