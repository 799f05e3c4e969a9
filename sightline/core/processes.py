"""Who am I among the processes, and what only one of them does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from sightline.core.errors import InputError

__all__ = ["Process", "barrier", "by_first", "rank", "shared", "world"]


class Process(NamedTuple):
    """This process among those that torchrun started."""

    rank: int
    world: int


Job = TypeVar("Job")
Answer = TypeVar("Answer")


def shared(jobs: Sequence[Job], work: Callable[[Job], Answer]) -> list[Answer]:
    """What `work` makes of each job; the processes of a run share them, and all get all answers."""
    count = world()
    own = [work(job) for job in jobs[rank() :: count]]
    if count == 1:
        return own
    parts: list[Any] = [None] * count
    torch.distributed.all_gather_object(parts, own)
    return [parts[i % count][i // count] for i in range(len(jobs))]


T = TypeVar("T")


def world() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def barrier() -> None:
    """Wait until all processes are here."""
    if world() > 1:
        dist.barrier()


def by_first(work: Callable[[], T]) -> T | None:
    """What the first process makes, None in the others; if it fails, all of them fail with its sentence."""
    result, problem = None, ""
    if rank() == 0:
        try:
            result = work()
        except InputError as error:
            problem = str(error)
    if world() > 1:
        said = [problem]
        dist.broadcast_object_list(said)  # the others wait here
        problem = said[0]
    if problem:
        raise InputError(problem)
    return result
