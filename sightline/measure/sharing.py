"""Passes that several processes of one machine share: long ones through small encoders, on the cores of a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from sightline.core import progress
from sightline.core.helpers import Helpers, LostError
from sightline.measure.contract import analysis
from sightline.measure.plan import AT_A_TIME

if TYPE_CHECKING:
    from sightline.encoders.encoder import Encoder
    from sightline.images.sets import Images

__all__ = ["cores", "helpers_for", "sharing", "worth_sharing"]


LONG = 10_000  # forward passes of an image that are worth the seconds that processes take to start
FEW_WEIGHTS = 10**8  # of all encoders together, which every process has in memory

Outcome = TypeVar("Outcome")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def helpers_for(device: str) -> Helpers | None:
    """A process beside this one for each further thread that PyTorch may use; none on a GPU or under torchrun."""
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    count = min(cores(), torch.get_num_threads(), AT_A_TIME)
    return None if on_gpu or count < 2 or int(os.environ.get("WORLD_SIZE", "1")) > 1 else Helpers(count - 1)


def worth_sharing(encoders: Collection[Encoder], images: Images, configs: Mapping[str, Any]) -> bool:
    """Whether a pass is long, and its encoders so small that every process may have its own."""
    views = {
        (split, view)
        for name, config in configs.items()
        for split in analysis(name).SPLITS
        if split in images.splits
        for view in analysis(name).views(config, split)
    }
    passes = len(encoders) * sum(len(images.indices(split)) for split, _ in views)
    weights = sum(one.numel() for encoder in encoders for one in encoder.module.parameters())
    return passes >= LONG and weights <= FEW_WEIGHTS


def sharing(helpers: Helpers | None, work: str, about: Mapping[str, Any], one_pass: Callable[[], Outcome]) -> Outcome:
    """The outcome of a pass, which helpers share by `work` (see `Helpers`), or alone if one of them is lost."""
    if helpers is not None:
        try:
            with helpers.taking_part(work, about):
                return one_pass()
        except LostError as error:
            progress.console().print(f"A process that shared the images was lost ({error}); going on without it")
    return one_pass()
