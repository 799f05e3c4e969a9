"""Labelled images with stable ids and splits, and the batches in which a pass sees them.

B images of a batch, h × w pixels that an encoder wants.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sightline import plugins
from sightline.errors import InputError, counted, nearest

if TYPE_CHECKING:
    from sightline.encoder import Preprocess

__all__ = [
    "Batch",
    "Images",
    "Item",
    "Reader",
    "Source",
    "batch_count",
    "batches",
    "id_keys",
    "join",
    "load_images",
    "mix",
    "parallel",
    "read_options",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
FEWEST = 4  # the unbiased HSIC divides by n(n − 3)
SPLIT_NAMES = {"training": "train", "validation": "val", "valid": "val", "dev": "val", "testing": "test"}


class Item(NamedTuple):
    """One decoded image, or the reason why there is none."""

    image: np.ndarray | None  # uint8 (H, W, 3)
    error: str | None


class Source(Protocol):
    """What a file of `datasets/` hands over: pixels on demand; worker processes receive a pickled copy."""

    def read(self, indices: Sequence[int]) -> list[Item]:
        """Decode the images at these positions; never raises for a bad image."""
        ...


@dataclass(frozen=True)
class Images:
    """A set of images: `ids` and `labels` of all of them, `splits` say which positions belong to which split.

    >>> images = load_images("shapes?train=64&val=0&test=32")
    >>> {split: len(positions) for split, positions in images.splits.items()}
    {'train': 64, 'test': 32}
    >>> [int(n) for n in np.bincount(images.sample(24, seed=0).labels_of("test"), minlength=16)]
    [1, 1, 2, 1, 1, 2, 1, 1, 1, 2, 2, 2, 2, 1, 2, 2]
    """

    name: str  # the reference it was loaded from
    source: Source
    ids: np.ndarray  # str (n,)
    labels: np.ndarray  # int64 (n,), index into classes, -1 without a label
    classes: tuple[str, ...]
    splits: Mapping[str, np.ndarray]  # name -> sorted positions into ids
    own_splits: bool = True  # False: the source had none, and `halves` made train and test
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)  # further labels, {"texture": int64 (n,)}
    fingerprint: str = ""  # whatever else decides the pixels, so that `digest` notices when it changes
    beside: Mapping[str, str] = field(default_factory=dict)  # splits that `join` added, and their own fingerprint
    in_memory: bool = False  # reading costs nothing, worker processes would only copy
    strict: bool = False  # a corrupt image is an error instead of being skipped

    @property
    def common_splits(self) -> tuple[str, ...]:
        """The splits without those that were joined for a purpose of their own."""
        return tuple(name for name in self.splits if name not in self.beside)

    def indices(self, split: str) -> np.ndarray:
        """Sorted positions of a split; `test` falls back to `val` where there is no test split."""
        name = "val" if split == "test" and "test" not in self.splits else split
        if name not in self.splits:
            raise InputError(f"{self.name} has no split {split!r}{nearest(split, self.splits)}")
        return self.splits[name]

    def labels_of(self, split: str) -> np.ndarray:
        """Labels of a split, in the order of `indices`."""
        labels: np.ndarray = self.labels[self.indices(split)]
        return labels

    def sample(self, limit: int | None, seed: int) -> Images:
        """At most `limit` images of every split, as balanced over the classes as they allow, without replacement.

        A class gives min(its size, t) images, or one more where `limit` is not met exactly; a larger limit keeps
        the images of a smaller one.
        """
        if limit is None:
            return self
        if limit < FEWEST:
            raise InputError(f"The limit of images per split is {limit}, but at least {FEWEST} are needed")
        return replace(self, splits={name: self._balanced(where, limit, seed) for name, where in self.splits.items()})

    def _balanced(self, where: np.ndarray, limit: int, seed: int) -> np.ndarray:
        keys = mix(id_keys(self.ids[where]), seed)
        labels = self.labels[where]
        by_class = np.lexsort((keys, labels))
        ordered = labels[by_class]
        starts = np.searchsorted(ordered, ordered)  # where each image's class begins
        turn = np.empty(len(where), np.int64)
        turn[by_class] = np.arange(len(where)) - starts
        # Classes take turns; who comes first in the last, incomplete turn is drawn, or low class numbers would gain.
        first = np.lexsort((mix(labels.astype(np.uint64), seed), turn))[:limit]
        return np.sort(where[first])

    def digest(self, split: str | None = None) -> str:
        """sha256 over fingerprint, ids and labels of one split, or of all but those that were joined."""
        result = hashlib.sha256(self.beside.get(split or "", self.fingerprint).encode())
        for name in sorted(self.common_splits) if split is None else [split]:
            where = self.indices(name)
            result.update(f"\n{name if split is None else ''} {len(where)}\n".encode())
            result.update("\n".join(self.ids[where].tolist()).encode("utf-8", "surrogateescape"))
            result.update(self.labels[where].astype("<i8").tobytes())
            for extra, values in sorted(self.extras.items()) if name in self.beside else ():
                result.update(extra.encode() + values[where].astype("<i8").tobytes())
        return result.hexdigest()

    def describe(self) -> dict[str, object]:
        """What a run records about its images; JSON-able."""
        return {
            "name": self.name,
            "splits": {name: len(self.splits[name]) for name in self.common_splits},
            "own_splits": self.own_splits,
            "classes": list(self.classes),
            "digest": self.digest(),
        }

    def order(self, split: str, seed: int) -> np.ndarray:
        """Positions of a split in the shuffled order of the pass: class folders must not make one-class batches."""
        where = self.indices(split)
        return where[np.argsort(mix(id_keys(self.ids[where]), seed, 1), kind="stable")]


def join(images: Images, split: str, others: Images) -> Images:
    """The same images with one more split: the test images of another set, whose classes must be among theirs.

    Their textures, which are classes as well, are translated; extra labels are −1 where there are none.

    >>> both = join(load_images("shapes?train=4&val=0&test=4"), "conflict", load_images("shapes:conflict?test=32"))
    >>> {name: len(positions) for name, positions in both.splits.items()}
    {'train': 4, 'test': 4, 'conflict': 32}
    """
    if missing := [name for name in others.classes if name not in images.classes]:
        raise InputError(
            f"The class {missing[0]!r} of {others.name} is not among those of {images.name}"
            f"{nearest(missing[0], images.classes)}; both need the same class names"
        )
    where = others.indices("test")
    translate = np.array([*(images.classes.index(name) for name in others.classes), -1])  # [-1]: without a label
    n, m = len(images.ids), len(where)
    theirs = {name: translate[v[where]] if name == "texture" else v[where] for name, v in others.extras.items()}
    extras = {
        name: np.concatenate([images.extras.get(name, np.full(n, -1, values.dtype)), values])
        for name, values in theirs.items()
    }
    kept = {name: np.concatenate([v, np.full(m, -1, v.dtype)]) for name, v in images.extras.items()}
    return replace(
        images,
        source=Joined((images.source, others.source), n, where),
        ids=np.concatenate([images.ids, np.char.add(f"{split}/", others.ids[where])]),
        labels=np.concatenate([images.labels, translate[others.labels[where]]]),
        splits={**images.splits, split: np.arange(n, n + m)},
        extras=kept | extras,
        beside={**images.beside, split: f"{others.name}\n{others.fingerprint}"},
        in_memory=images.in_memory and others.in_memory,
        strict=images.strict or others.strict,
    )


@dataclass(frozen=True)
class Joined:
    """Two sources behind one another; of the second one those images that were chosen."""

    sources: tuple[Source, Source]
    first: int  # images of the first source
    where: np.ndarray  # positions in the second one

    def read(self, indices: Sequence[int]) -> list[Item]:
        """Each source reads its own images; the order is that of the indices."""
        own = [i for i in indices if i < self.first]
        others = [int(self.where[i - self.first]) for i in indices if i >= self.first]
        parts = [iter(s.read(p)) if p else iter(()) for s, p in zip(self.sources, (own, others), strict=True)]
        return [next(parts[i >= self.first]) for i in indices]


@dataclass(frozen=True)
class Batch:
    """Images of one split on their way to the encoders."""

    split: str
    number: int  # within the pass over all splits, the same whatever the number of processes
    rows: Tensor  # int64 (B,), row of each image within images.indices(split)
    ids: tuple[str, ...]
    labels: Tensor  # int64 (B,)
    extras: Mapping[str, Tensor]
    pixels: Mapping[Preprocess, Tensor]  # uint8 (B, 3, h, w); encoders of the same geometry share the memory
    skipped: tuple[tuple[str, str], ...]  # id and reason of each image that could not be decoded


def load_images(
    reference: str | Images | np.ndarray | Tensor | Sequence[np.ndarray],
    *,
    labels: Sequence[int] | Sequence[str] | np.ndarray | Tensor | None = None,
    classes: Sequence[str] | None = None,
    ids: Sequence[str] | None = None,
    splits: Mapping[str, Sequence[int]] | Sequence[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    strict: bool = False,
) -> Images:
    """Load `source:where?option=value`, or arrays of pixels with their labels, and draw a balanced sample of it.

    `labels`, `classes`, `ids` and `splits` go with arrays only; see `sightline.datasets.arrays`.

    >>> load_images("shapes:conflict?size=32", limit=240).name
    'shapes:conflict?size=32'
    >>> load_images(np.zeros((8, 16, 16, 3), np.uint8), labels=list("abababab")).classes
    ('a', 'b')
    """
    given = {"labels": labels, "classes": classes, "ids": ids, "splits": splits}
    if isinstance(reference, str | Images | os.PathLike):
        if unused := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{' and '.join(unused)} can only be given with arrays of pixels, not with {reference!r}")
        images = reference if isinstance(reference, Images) else _load(os.fspath(reference))
    else:
        from sightline.datasets.arrays import from_arrays

        images = from_arrays(reference, labels, classes, ids, splits)
    if (n := sum(map(len, images.splits.values()))) < FEWEST:
        raise InputError(f"{images.name} has {counted(n, 'image')}, but at least {FEWEST} are needed")
    return replace(images.sample(limit, seed), strict=strict or images.strict)


def _load(reference: str) -> Images:
    pairs = r"\w+=[^&?]*(?:&\w+=[^&?]*)*"
    match = re.fullmatch(rf"([A-Za-z]\w*)(?::(.*?))?(?:\?({pairs})?)?", reference, re.DOTALL)
    if match is None:
        hint = f"; did you mean 'folder:{reference}'?" if Path(reference).exists() else ""
        raise InputError(f"{reference!r} does not name images in the form source:where?option=value{hint}")
    source, where, options = match.groups(default="")
    if source not in plugins.names("datasets") and Path(reference).exists():
        raise InputError(f"There is no dataset {source!r}; did you mean 'folder:{reference}'?")
    plugin = plugins.find("datasets", source)
    images: Images = plugin.load(where, dict(pair.split("=", 1) for pair in options.split("&") if pair))
    return replace(images, name=reference)


def read_options(source: str, options: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a reference over their defaults, whole numbers as such; an unknown one is an error.

    >>> read_options("shapes", {"size": "32"}, {"size": 64, "seed": 0})
    {'size': 32, 'seed': 0}
    """
    result = dict(defaults)
    for name, value in options.items():
        if name not in defaults:
            raise InputError(f"{source} has no option {name!r}{nearest(name, defaults)}")
        if isinstance(defaults[name], int) and not re.fullmatch(r"\d{1,9}", value):
            raise InputError(f"The option {name} of {source} is {value!r}, but a whole number is expected")
        result[name] = int(value) if isinstance(defaults[name], int) else value
    return result


def halves(ids: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Train and test for a source without splits: every class is cut in half by the hash of its ids.

    Classes with an odd number of images take turns in who gets the odd one, so that the halves differ by one at most.
    """
    ordered = np.lexsort((id_keys(ids), labels))
    return {"train": np.sort(ordered[0::2]), "test": np.sort(ordered[1::2])}


def split_name(name: str) -> str | None:
    """Our name of a split folder or file, None for other names.

    >>> split_name("Validation"), split_name("test"), split_name("cats")
    ('val', 'test', None)
    """
    name = SPLIT_NAMES.get(name.lower(), name.lower())
    return name if name in ("train", "val", "test") else None


def by_name(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Splits from the split name of each image; a single name is no split, since nothing would be left to test on.

    >>> {name: where.tolist() for name, where in by_name(["test", "train", "train"]).items()}
    {'train': [1, 2], 'test': [0]}
    """
    known = sorted(set(names) - {""}, key=lambda name: (["train", "val", "test", name].index(name), name))
    return {name: np.flatnonzero(np.array(names) == name) for name in known} if len(known) > 1 else {}


def mix(keys: np.ndarray, *numbers: int) -> np.ndarray:
    """Mix numbers into uint64 keys; integer arithmetic only, hence the same on every machine.

    The finaliser of splitmix64 (Steele, Lea & Flood 2014), once per number.
    """
    result = keys.astype(np.uint64)
    for number in (*numbers, len(numbers)):
        step = (int(number) + 1) * 0x9E3779B97F4A7C15 % 2**64
        result = result + np.uint64(step)
        result = (result ^ (result >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        result = (result ^ (result >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result = result ^ (result >> np.uint64(31))
    return result


def id_keys(ids: np.ndarray) -> np.ndarray:
    """uint64 keys of ids, from sha256: Python's own hash differs from process to process."""
    digests = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8] for name in ids.tolist()]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def batch_count(n: int, batch: int) -> int:
    """Number of batches of a split of n images: ⌈n/batch⌉, fewer where that would make one of less than 4 images.

    >>> batch_count(100, 32), batch_count(32, 32), batch_count(5, 4)
    (4, 1, 1)
    """
    if batch < FEWEST:
        return -(-n // batch)
    return min(-(-n // batch), max(1, n // FEWEST))


def batches(
    images: Images,
    preprocesses: Collection[Preprocess],
    *,
    splits: Sequence[str],
    batch: int,
    seed: int = 0,
    workers: int | None = None,
    rank: int = 0,
    world: int = 1,
    start: int = 0,
) -> Generator[Batch, None, None]:
    """Batches of the splits, one split after the other; rank r sees the batches r, r + world, … from `start` on.

    The sizes of the batches of a split differ by one at most, so that the last one is not short. Decoding, resizing and
    cropping happen in worker processes, which end with the iterator, also when it is left early.
    """
    if batch < 1:
        raise InputError(f"The batch size is {batch}, but at least 1 is needed")
    cuts = [
        (split, part)
        for split in splits
        for part in np.array_split(images.order(split, seed), max(1, batch_count(len(images.indices(split)), batch)))
        if len(part)
    ]
    mine = [number for number in range(start, len(cuts)) if number % world == rank]
    bare = {p: replace(p, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)) for p in preprocesses}
    geometries = list(dict.fromkeys(bare.values()))
    jobs = [cuts[number][1] for number in mine]
    largest = max((len(job) for job in jobs), default=0) * sum(3 * g.size[0] * g.size[1] for g in geometries)
    reader = _Reader(images.source, jobs, geometries)
    for number, read in zip(mine, parallel(reader, range(len(jobs)), images, workers, largest), strict=True):
        split, where = cuts[number]
        skipped = tuple((str(images.ids[where[i]]), reason) for i, reason in read.errors)
        if skipped and images.strict:
            raise InputError(f"{images.name}: {skipped[0][0]} cannot be read: {skipped[0][1]}")
        pixels = dict(zip(geometries, map(torch.as_tensor, read.pixels), strict=True))
        kept = where[read.kept]
        yield Batch(
            split=split,
            number=number,
            rows=torch.from_numpy(np.searchsorted(images.indices(split), kept)),
            ids=tuple(images.ids[kept].tolist()),
            labels=torch.from_numpy(images.labels[kept]),
            extras={name: torch.from_numpy(values[kept]) for name, values in images.extras.items()},
            pixels={preprocess: pixels[geometry] for preprocess, geometry in bare.items()},
            skipped=skipped,
        )


class _Read(NamedTuple):
    kept: list[int]
    errors: list[tuple[int, str]]
    pixels: list[Any]  # one (B, 3, h, w) per geometry


class _Reader:
    """Decodes whole batches; what a worker process runs."""

    def __init__(self, source: Source, jobs: list[np.ndarray], geometries: list[Preprocess]) -> None:
        self.source, self.jobs, self.geometries = source, jobs, geometries
        self.shared_memory = False

    def __getitem__(self, number: int) -> _Read:
        job = self.jobs[number]
        ascending = np.argsort(job)  # neighbours in a file are read together
        items = dict(zip(ascending.tolist(), self.source.read(job[ascending].tolist()), strict=True))
        found = {i: image for i in range(len(job)) if (image := items[i].image) is not None}
        errors = [(i, items[i].error or "unknown reason") for i in range(len(job)) if i not in found]
        pixels = [self._crop(geometry, found.values()) for geometry in self.geometries]
        return _Read(list(found), errors, [torch.from_numpy(p) for p in pixels] if self.shared_memory else pixels)

    def _crop(self, geometry: Preprocess, found: Collection[np.ndarray]) -> np.ndarray:
        result = np.empty((len(found), 3, *geometry.size), np.uint8)
        for row, image in zip(result, found, strict=True):
            row[...] = geometry.crop(image)
        return result


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
    loader: DataLoader[T] = DataLoader(
        cast("Dataset[T]", reader),
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
        yield from iterator
    finally:
        del iterator  # ends the worker processes


def _default_workers(images: Images) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 0 if images.in_memory else max(0, min(8, cores // neighbours - 1))


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
