"""Worker processes that read ahead, and end with their parent."""

import os
import signal
import threading
import warnings
from collections.abc import Generator
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from sightline.core.errors import InputError, counted
from sightline.core.processes import cores, world
from sightline.images.sets import Images

DESCRIPTORS = 8  # of the pipes to a worker process and of what it hands over
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reader(Protocol[T_co]):
    """Makes whole batches, in worker processes or in this one."""

    shared_memory: bool  # hand over tensors, which go through shared memory, instead of arrays, which are copied

    def __getitem__(self, number: int) -> T_co:
        """Batch of this number."""
        ...


def parallel(
    reader: Reader[T], numbers: range, images: Images, workers: int | None, largest: int
) -> Generator[T, None, None]:
    """The batches of these numbers in order, made in worker processes; `largest` is the size of one in bytes."""
    count = min(_default_workers(images) if workers is None else workers, len(numbers))
    if count <= 0:
        yield from (reader[number] for number in numbers)
        return
    reader.shared_memory = _shared_memory() > 8 * count * largest
    _check_descriptors(count)
    loader: DataLoader[T | Exception] = DataLoader(
        cast("Dataset[T | Exception]", _Told(reader)),
        batch_size=None,
        sampler=numbers,
        num_workers=count,
        collate_fn=_as_it_is,
        worker_init_fn=_leave_signals_to_the_parent,
        generator=torch.Generator(),  # or it would draw from the global one, and a pass would change later numbers
        # A fresh interpreter per worker would need an `if __name__ == "__main__"` in every user's script.
        multiprocessing_context="fork" if "fork" in get_all_start_methods() else None,
    )
    with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; workers use none of the parent's
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        iterator = iter(loader)
    try:
        for made in iterator:
            if isinstance(made, Exception):
                raise made
            yield made
    finally:
        del iterator  # ends the worker processes


class _Told(Generic[T]):
    """Hands over an error as it is: the loader would raise one whose text is a traceback."""

    def __init__(self, reader: Reader[T]) -> None:
        self.reader = reader

    def __getitem__(self, number: int) -> T | Exception:
        try:
            return self.reader[number]
        except (InputError, OSError, MemoryError) as error:
            return error


def _check_descriptors(count: int) -> None:
    """Say that there are too few file descriptors before the loader is half made."""
    taken: list[int] = []
    try:
        taken.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(DESCRIPTORS * (count + 1)))
    except OSError as error:
        raise InputError(
            f"There are too few file descriptors for {counted(count, 'process')} that read images; raise the limit, "
            "such as ulimit -n 1024, or read without them (--workers 0, in Python workers=0)"
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _default_workers(images: Images) -> int:
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", world()))  # torchrun says; otherwise all may be on one machine
    return 0 if images.in_memory else max(0, min(8, cores() // neighbours - 1))


def _shared_memory() -> int:
    """Free bytes for tensors between processes; small in containers, where running out kills the worker."""
    if not Path("/dev/shm").is_dir():
        return 0
    space = os.statvfs("/dev/shm")
    return space.f_bavail * space.f_frsize


def _as_it_is(read: Any) -> Any:
    return read


def _leave_signals_to_the_parent(_: int) -> None:
    """A job's signals reach all of its processes, but the parent needs its workers to finish a step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
