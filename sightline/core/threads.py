"""Work side by side on the cores of a CPU, each piece in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

from sightline.core.stopping import work_over

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def side_by_side(work: Callable[[Item], Outcome], items: Sequence[Item], most: int | None = None) -> list[Outcome]:
    """What `work` makes of each item, in their order; at most so many at a time share PyTorch's threads evenly.

    Threads that share each of many short operations would wait for each other most of the time, and nearly always
    when something else runs on the machine.

    >>> side_by_side(lambda x: (x @ x).item(), [torch.ones(2), torch.ones(3)])
    [2.0, 3.0]
    """
    threads = torch.get_num_threads()
    places = min(threads, len(items), len(items) if most is None else most)
    if places < 2:
        return [work(item) for item in items]
    inference = torch.is_inference_mode_enabled()  # a property of the thread
    over = threading.Event()

    def one(item: Item) -> Outcome:
        work_over.set(over)
        with torch.inference_mode(inference):
            return work(item)

    # So is the number of threads of an operation; only threads to come begin with what was set last.
    try:
        with ThreadPoolExecutor(places, initializer=torch.set_num_threads, initargs=(threads // places,)) as pool:
            try:
                contexts = [copy_context() for _ in items]
                return list(pool.map(lambda context, item: context.run(one, item), contexts, items))
            except BaseException:
                over.set()
                raise
    finally:
        torch.set_num_threads(threads)
