"""Made images, each filled with its number, and their batches."""

from dataclasses import replace

import numpy as np

from sightline.images.pipeline import batches
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images, Item

SMALL = Preprocess(size=(8, 8))


class Numbered:
    """Image i is filled with i; positions in `bad` are corrupt."""

    def __init__(self, bad=()):
        self.bad = set(bad)

    def read(self, indices):
        return [
            Item(None, "it is broken") if i in self.bad else Item(np.full((8, 8, 3), i, np.uint8), None)
            for i in indices
        ]


def numbered(n=100, classes=5, bad=(), **changes):
    labels = np.arange(n) % classes
    ids = np.array([f"{i:03d}.png" for i in range(n)])
    images = Images(
        name="numbered",
        source=Numbered(bad),
        ids=ids,
        labels=labels,
        classes=tuple("abcdefgh"[:classes]),
        splits={"train": np.arange(0, n - 30), "test": np.arange(n - 30, n)},
        extras={"twice": 2 * labels},
    )
    return replace(images, **changes)


def all_batches(images, **options):
    given = {"splits": ["train", "test"], "batch": 8, "seed": 0, "workers": 0} | options
    return list(batches(images, [SMALL], **given))
