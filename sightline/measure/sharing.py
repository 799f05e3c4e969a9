"""Passes that several processes of one machine share: long ones through small encoders, on the cores of a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from sightline.core import progress
from sightline.core.helpers import Helpers, LostError
from sightline.measure.contract import analysis
from sightline.measure.plan import AT_A_TIME
from sightline.measure.resume import sums_file

if TYPE_CHECKING:
    from sightline.encoders.encoder import Encoder
    from sightline.images.sets import Images


LONG = 10_000  # forward passes of an image that are worth the seconds that processes take to start
TRIES = 2  # of processes together, before one does the pass alone
FEW_WEIGHTS = 10**8  # of all encoders together, which every process has in memory

Outcome = TypeVar("Outcome")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def helpers_for(device: str) -> Helpers | None:
    """A process beside this one for each further thread of PyTorch; none on a GPU or if processes have joined."""
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    count = min(cores(), torch.get_num_threads(), AT_A_TIME)
    joined = not dist.is_available() or dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1
    return None if on_gpu or joined or count < 2 else Helpers(count - 1)


def worth_sharing(
    encoders: Collection[Encoder], images: Images, configs: Mapping[str, Any], out: Path, anew: bool = False
) -> bool:
    """Whether a pass is long, and its encoders so small that every process may have its own.

    Not if all its results are in `out` already, or if one process alone has begun it there, which can go on; unless it
    begins `anew`.
    """
    done = all((out / "results" / f"{name}.nc").is_file() for name in configs)
    if not anew and (done or sums_file(out, 0, 1).is_file()):
        return False
    views = {
        (split, view)
        for name, config in configs.items()
        for split in analysis(name).SPLITS
        if split in images.splits or (split == "test" and "val" in images.splits)  # which then stands in for it
        for view in analysis(name).views(config, split)
    }
    passes = len(encoders) * sum(len(images.indices(split)) for split, _ in views)
    weights = sum(one.numel() for encoder in encoders for one in encoder.module.parameters())
    return passes >= LONG and weights <= FEW_WEIGHTS


def share_pass(
    helpers: Helpers | None, work: str, about: Mapping[str, Any], one_pass: Callable[[], Outcome]
) -> Outcome:
    """The outcome of a pass, which helpers share by `work` (see `Helpers`), or alone if they are lost twice."""
    for try_ in range(TRIES if helpers is not None else 0):
        assert helpers is not None
        try:
            with helpers.taking_part(work, about):
                return one_pass()
        except LostError as error:
            going = "together" if try_ + 1 < TRIES else "alone"
            progress.console().print(f"A process that shared the images was lost ({error}); going on {going}")
    return one_pass()
