"""Loading images by reference: `load_images("folder:/data/val")`."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sightline.core import plugins
from sightline.core.errors import InputError, counted, nearest
from sightline.core.files import naming_files
from sightline.core.references import take_apart
from sightline.images.contract import image_source
from sightline.images.sets import FEWEST, Images


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

    `labels`, `classes`, `ids` and `splits` go with arrays only; see `images/sources/arrays.py`.

    >>> load_images("shapes:conflict?size=32", limit=240).name
    'shapes:conflict?size=32'
    >>> load_images(np.zeros((8, 16, 16, 3), np.uint8), labels=list("abababab")).classes
    ('a', 'b')
    """
    _check_whole("limit", limit)
    _check_whole("seed", seed)
    given = {"labels": labels, "classes": classes, "ids": ids, "splits": splits}
    if isinstance(reference, str | Images | os.PathLike):
        if unused := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{' and '.join(unused)} can only be given with arrays of pixels, not with {reference!r}")
        with naming_files(str(reference)):
            images = reference if isinstance(reference, Images) else _load(os.fspath(reference))
    else:
        from sightline.images.sources.arrays import from_arrays

        images = from_arrays(reference, labels, classes, ids, splits)
    if (n := sum(map(len, images.splits.values()))) < FEWEST:
        raise InputError(f"{images.name} has {counted(n, 'image')}, but at least {FEWEST} are needed")
    return replace(images.sample(limit, seed), strict=strict or images.strict)


def _check_whole(name: str, value: Any) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if (not whole and not (value is None and name == "limit")) or (whole and not 0 <= value < 2**63):
        raise InputError(f"The {name} is {value!r}, but a whole number from 0 on is expected")


def _load(reference: str) -> Images:
    parts = take_apart(reference)
    if parts is None:
        hint = f"; did you mean 'folder:{reference}'?" if Path(reference).exists() else ""
        raise InputError(f"{reference!r} does not name images in the form source:where?option=value{hint}")
    source, where, options = parts
    if source not in plugins.names("datasets") and Path(reference).exists():
        raise InputError(f"There is no image source {source!r}; did you mean 'folder:{reference}'?")
    images = image_source(source).load(where, options)
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
