"""Who am I among the processes that torchrun or Fabric started, what only one of them does, and what all of them share.

One process alone needs nothing of the kind: each function then gives back what it was given.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from sightline.core.errors import InputError

T = TypeVar("T")
Job = TypeVar("Job")
Outcome = TypeVar("Outcome")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def join(on_gpu: bool) -> None:
    """Join the others if torchrun started several of us and nobody has done so before."""
    if dist.is_available() and not _joined() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")


def leave() -> None:
    """There is nothing left to do together."""
    if _joined():
        dist.destroy_process_group()


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def world() -> int:
    return dist.get_world_size() if _joined() else 1


def rank() -> int:
    return dist.get_rank() if _joined() else 0


def barrier() -> None:
    if world() > 1:
        dist.barrier()


def agreed(choice: T) -> T:
    """What the first process chose: a folder named by the time, or a temporary one, would differ between them."""
    choices = [choice]
    if world() > 1:
        dist.broadcast_object_list(choices, src=0)  # the others wait here
    return choices[0]


def gathered(own: T) -> list[T]:
    """What each process has, in order of rank."""
    parts = [own] * world()
    if len(parts) > 1:
        dist.all_gather_object(parts, own)
    return parts


def by_first(work: Callable[[], T]) -> T | None:
    """What the first process makes, None in the others; if it fails, all of them fail with its sentence."""
    result, problem = None, ""
    if rank() == 0:
        try:
            result = work()
        except InputError as error:
            problem = str(error)
    if problem := agreed(problem):
        raise InputError(problem)
    return result


def shared(jobs: Sequence[Job], work: Callable[[Job], Outcome]) -> list[Outcome]:
    """What `work` makes of each job; the processes of a run share them, and all get all answers."""
    parts = gathered([work(job) for job in jobs[rank() :: world()]])
    return [parts[i % len(parts)][i // len(parts)] for i in range(len(jobs))]
