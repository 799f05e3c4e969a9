"""Labelled images with stable ids and splits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sightline.core.errors import InputError, counted, nearest
from sightline.core.keyed_random import id_keys, mix
from sightline.core.notebook import card, shortened
from sightline.images.targets import VOID, Targets
from sightline.images.thumbnails import picture

SHOWN = 8  # images in a notebook
FEWEST = 4  # the unbiased HSIC divides by n(n − 3)
SPLIT_NAMES = {"training": "train", "validation": "val", "valid": "val", "dev": "val", "testing": "test"}


class Item(NamedTuple):
    """One decoded image, or the reason why there is none."""

    image: np.ndarray | None  # uint8 (H, W, 3)
    error: str | None


class Source(Protocol):
    """What a file of `images/sources/` hands over: pixels on demand; worker processes receive a pickled copy."""

    def read(self, indices: Sequence[int]) -> list[Item]:
        """Decode the images at these positions; never raises for a bad image."""
        ...


@runtime_checkable
class TargetSource(Source, Protocol):
    """A source that also knows what is to be found in its images."""

    def targets(self, indices: Sequence[int]) -> list[Targets[NDArray[Any]]]:
        """Boxes, masks and maps of the images at these positions, whether they can be decoded or not."""
        ...


@runtime_checkable
class FileSource(Source, Protocol):
    """A source whose files may change under the same names."""

    def contents(self, indices: Sequence[int]) -> bytes:
        """What changes when the files of the images at these positions change."""
        ...


@dataclass(frozen=True, repr=False)
class Images:
    """A set of images: `ids` and `labels` of all of them, `splits` say which positions belong to which split.

    >>> from sightline.images import load_images
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
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)  # further labels as `labels`, {"texture": (n,)}
    fingerprint: str = ""  # whatever else decides the pixels, so that `digest` notices when it changes
    beside: Mapping[str, str] = field(default_factory=dict)  # splits that `join` added, and their own fingerprint
    relatives: Mapping[str, str] = field(default_factory=dict)  # purpose -> reference of images of the same making
    in_memory: bool = False  # reading costs nothing, worker processes would only copy
    strict: bool = False  # a corrupt image is an error instead of being skipped
    notes: Sequence[str] = ()  # what the user should know

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

    def target_source(self) -> TargetSource:
        """The source, if it has targets."""
        if not isinstance(self.source, TargetSource):
            raise InputError(
                f"{self.name} has no boxes, masks or segmentation maps; give others, such as shapes:scenes"
            )
        return self.source

    def targets(self, positions: Sequence[int] | np.ndarray) -> list[Targets[NDArray[Any]]]:
        """What is to be found in the images at these positions: boxes, masks, segmentation maps.

        >>> from sightline.images import load_images
        >>> load_images("shapes:scenes").targets([3])[0].labels
        array([ 3,  9,  2,  1,  1, 13])
        """
        return self.target_source().targets([int(position) for position in positions])

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
        """sha256 over fingerprint, ids and labels of one split, or of all but those that were joined.

        That of a split covers the contents of its files, too; reading all splits of a large set would take long.
        """
        result = hashlib.sha256(self.beside.get(split or "", self.fingerprint).encode())
        for name in sorted(self.common_splits) if split is None else [split]:
            where = self.indices(name)
            result.update(f"\n{name if split is None else ''} {len(where)}\n".encode())
            result.update("\n".join(self.ids[where].tolist()).encode("utf-8", "surrogateescape"))
            result.update(self.labels[where].astype("<i8").tobytes())
            for extra, values in sorted(self.extras.items()) if name in self.beside else ():
                result.update(extra.encode() + values[where].astype("<i8").tobytes())
        if split is not None and isinstance(self.source, FileSource):
            result.update(self.source.contents([int(position) for position in self.indices(split)]))
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

    def __repr__(self) -> str:
        splits = ", ".join(f"{len(where)} {name}" for name, where in self.splits.items())
        return f"Images({self.name!r}, {splits}, {counted(len(self.classes), 'class')})"

    def _repr_html_(self) -> str:
        facts = {
            "splits": ", ".join(f"{len(where)} {name}" for name, where in self.splits.items()),
            "classes": shortened(self.classes),
            "notes": "; ".join(self.notes),
        }
        return card(f"Images {self.name}", facts, self._pictures())

    def _pictures(self) -> str:
        """A few images with their classes, of the split that is measured."""
        split = next((name for name in ("test", "val", *self.splits) if name in self.splits), None)
        chosen = [] if split is None else [int(position) for position in self.order(split, seed=0)[:SHOWN]]
        read = zip(chosen, self.source.read(chosen), strict=True)
        names = [*self.classes, ""]  # [-1]: without a label
        return "".join(picture(item.image, names[self.labels[at]]) for at, item in read if item.image is not None)

    def order(self, split: str, seed: int) -> np.ndarray:
        """Positions of a split in the shuffled order of the pass: class folders must not make one-class batches."""
        where = self.indices(split)
        return where[np.argsort(mix(id_keys(self.ids[where]), seed, 1), kind="stable")]


def join(images: Images, split: str, others: Images) -> Images:
    """The same images with one more split: the test images of another set, whose classes must be among theirs.

    Their labels, further ones and those of their targets too, are translated; further labels are −1 where there are
    none.

    >>> from sightline.images import load_images
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
    theirs = {name: translate[values[where]] for name, values in others.extras.items()}
    extras = {
        name: np.concatenate([images.extras.get(name, np.full(n, -1, values.dtype)), values])
        for name, values in theirs.items()
    }
    kind = JoinedTargets if any(isinstance(s.source, TargetSource) for s in (images, others)) else JoinedPixels
    kept = {name: np.concatenate([v, np.full(m, -1, v.dtype)]) for name, v in images.extras.items()}
    return replace(
        images,
        source=kind((images.source, others.source), n, where, translate),
        ids=np.concatenate([images.ids, np.char.add(f"{split}/", others.ids[where])]),
        labels=np.concatenate([images.labels, translate[others.labels[where]]]),
        splits={**images.splits, split: np.arange(n, n + m)},
        extras=kept | extras,
        beside={**images.beside, split: f"{others.name}\n{others.fingerprint}"},
        in_memory=images.in_memory and others.in_memory,
        strict=images.strict or others.strict,
    )


@dataclass(frozen=True)
class JoinedPixels:
    """Two sources behind one another; of the second one those images that were chosen."""

    sources: tuple[Source, Source]
    first: int  # images of the first source
    where: np.ndarray  # positions in the second one
    translate: np.ndarray  # from classes of the second one to those of the first

    def read(self, indices: Sequence[int]) -> list[Item]:
        """Each source reads its own images; the order is that of the indices."""
        parts = [iter(source.read(chosen)) if chosen else iter(()) for source, chosen in self.shares(indices)]
        return [next(parts[i >= self.first]) for i in indices]

    def contents(self, indices: Sequence[int]) -> bytes:
        """Of both, where they have files."""
        return b"".join(
            source.contents(chosen) for source, chosen in self.shares(indices) if isinstance(source, FileSource)
        )

    def shares(self, indices: Sequence[int]) -> list[tuple[Source, list[int]]]:
        """Each source with the positions in it."""
        own = [i for i in indices if i < self.first]
        others = [int(self.where[i - self.first]) for i in indices if i >= self.first]
        return list(zip(self.sources, (own, others), strict=True))


class JoinedTargets(JoinedPixels):
    """The same where one of them at least has targets; the others can be read, but not asked for theirs."""

    def targets(self, indices: Sequence[int]) -> list[Targets[NDArray[Any]]]:
        """Each source tells those of its own images, in classes of the first one."""
        own, others = (iter(_targets(source, chosen)) for source, chosen in self.shares(indices))
        return [self._translated(next(others)) if i >= self.first else next(own) for i in indices]

    def _translated(self, targets: Targets[NDArray[Any]]) -> Targets[NDArray[Any]]:
        maps = targets.segmentation
        if maps is not None:
            maps = np.where(maps == VOID, VOID, self.translate[maps.clip(min=-1)])
        return targets._replace(labels=self.translate[targets.labels], segmentation=maps)


def _targets(source: Source, chosen: list[int]) -> list[Targets[NDArray[Any]]]:
    if not chosen:
        return []
    if not isinstance(source, TargetSource):
        raise InputError("Some of the joined images have no boxes, masks or segmentation maps; give others")
    return source.targets(chosen)


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
    distinct = sorted(set(names) - {""}, key=lambda name: (["train", "val", "test", name].index(name), name))
    return {name: np.flatnonzero(np.array(names) == name) for name in distinct} if len(distinct) > 1 else {}
