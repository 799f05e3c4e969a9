"""Arrays of pixels from Python: `load_images(pixels, labels=labels, classes=…, ids=…, splits=…)`.

pixels: (n, H, W, 3), (n, 3, H, W) or (n, H, W), numpy or torch, uint8 or floats in [0, 1]; or a list of (H, W, 3)
arrays of different sizes. labels: numbers or names, one per image. splits: {"train": positions, …} or one name per
image.
"""

import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sightline.core.errors import InputError, first_line, some
from sightline.images.sets import Images, Item, halves, split_name


@dataclass(frozen=True)
class Arrays:
    """Images in memory."""

    pixels: Sequence[np.ndarray]  # uint8 (H, W, 3) each

    def read(self, indices: Sequence[int]) -> list[Item]:
        return [Item(self.pixels[index], None) for index in indices]


def load(where: str, options: Mapping[str, str]) -> Images:
    """Arrays have no reference."""
    raise InputError("arrays can only be given from Python: sightline.load_images(pixels, labels=labels)")


def from_arrays(
    pixels: Any,
    labels: Any = None,
    classes: Sequence[str] | None = None,
    ids: Sequence[str] | None = None,
    splits: Mapping[str, Sequence[int]] | Sequence[str] | None = None,
) -> Images:
    """Images from pixels and labels."""
    if not hasattr(pixels, "__iter__") or isinstance(pixels, (str, bytes, dict)) or getattr(pixels, "ndim", 4) < 1:
        raise InputError(f"Pixels are a {type(pixels).__name__}, but an array (n, H, W, 3) or a list is expected")
    for name, value in (("ids", ids), ("classes", classes), ("splits", splits)):
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence | Mapping | np.ndarray | None):
            raise InputError(f"The {name} are {reprlib.repr(value)}, but a list is expected")
    images = [_rgb(image) for image in pixels]
    n = len(images)
    names = np.array([f"{i:06d}" for i in range(n)]) if ids is None else np.array([str(i) for i in ids])
    if len(names) != n or len(set(names.tolist())) != n:
        raise InputError(f"{n} images need {n} different ids, but {len(set(names.tolist()))} were given")
    numbers, class_names = _labels(labels, classes, n)
    parts = _splits(splits, n)
    digest = hashlib.sha256()
    for image in images:
        digest.update(f"{image.shape}".encode())
        digest.update(image.tobytes())
    return Images(
        name="arrays",
        source=Arrays(images),
        ids=names,
        labels=numbers,
        classes=class_names,
        splits=parts or halves(names, numbers),
        own_splits=bool(parts),
        fingerprint=digest.hexdigest(),
        in_memory=True,
    )


def _rgb(image: Any) -> np.ndarray:
    """One image of any of the layouts as uint8 (H, W, 3)."""
    array = _array(image, "An image")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        raise InputError(f"An image has the shape {array.shape}, but (H, W, 3), (3, H, W) or (H, W) is expected")
    if array.dtype.kind == "f":
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise InputError("Images of floats must be in [0, 1], without normalisation; or give uint8")
        array = np.floor(array.astype(np.float64) * 255 + 0.5).astype(np.uint8)
    if array.dtype != np.uint8:
        raise InputError(f"Images are {array.dtype}, but uint8 or floats in [0, 1] are expected")
    return np.ascontiguousarray(np.repeat(array, 3, 2) if array.shape[2] == 1 else array[:, :, :3])


def _labels(labels: Any, classes: Sequence[str] | None, n: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers (n,) and class names; label values that are not 0 … C − 1 become the names."""
    if labels is None:
        return np.full(n, -1, np.int64), tuple(classes or ())
    values = _array(labels, "The labels")
    if values.shape != (n,):
        raise InputError(f"There are {n} images, but labels of shape {values.shape}; one label per image is expected")
    if values.dtype.kind not in "iuUO":
        raise InputError(f"Labels are {values.dtype}, but whole numbers or names are expected")
    if strange := [value for value in values.tolist() if not (value is None or type(value) in (int, str))]:
        raise InputError(f"The label {strange[0]!r} is neither a whole number nor a name")
    return encode_labels(values.tolist(), classes)


def _array(given: Any, what: str) -> np.ndarray:
    try:
        return np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise InputError(f"{what} cannot be made an array: {first_line(error)}") from error


def encode_labels(values: Sequence[Any], classes: Sequence[str] | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as numbers of classes; without classes, these are the sorted values. None and −1 have no class.

    >>> encode_labels([30, 7, None, 30], None)
    (array([ 1,  0, -1,  1]), ('7', '30'))
    >>> encode_labels([2, -1, "cat"], ["ant", "bee", "cat"])
    (array([ 2, -1,  2]), ('ant', 'bee', 'cat'))
    """
    distinct = sorted({v for v in values if v is not None and v != -1}, key=lambda v: (isinstance(v, str), v))
    class_names = [str(name) for name in (distinct if classes is None else classes)]
    place: dict[Any, int] = {value: i for i, value in enumerate(distinct)}
    if classes is not None:
        place = dict(enumerate(range(len(class_names)))) | {name: i for i, name in enumerate(class_names)}
    if strange := [value for value in distinct if value not in place]:
        raise InputError(f"The label {strange[0]!r} is not one of the classes: {some(class_names, most=12)}")
    return np.array([place.get(value, -1) for value in values], np.int64), tuple(class_names)


def encode_parts(
    values: Mapping[str, Sequence[Any]], names: Mapping[str, Sequence[str] | None]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels of several tables, one after the other; a number means what the table's own list of names says.

    >>> encode_parts({"train": [0, 1], "val": [0, 2, -1]}, {"train": ["ant", "bee"], "val": ["bee", "cat", "ant"]})
    (array([ 0,  1,  1,  0, -1]), ('ant', 'bee', 'cat'))
    """
    lists = list(dict.fromkeys(tuple(known) for known in names.values() if known is not None))
    if len(lists) < 2:
        return encode_labels([v for part in values.values() for v in part], lists[0] if lists else None)
    classes = list(dict.fromkeys(name for known in lists for name in known))
    return encode_labels([v for part, of in values.items() for v in _named(of, names[part], part)], classes)


def _named(values: Sequence[Any], names: Sequence[str] | None, part: str) -> list[Any]:
    """Names in the place of numbers; None and −1 have none."""
    if names is None:
        raise InputError(
            f"{part} has no names of classes, and the others have different ones, so its numbers may mean any of them; "
            "write names as labels, or load it by itself"
        )
    numbers = [value for value in values if isinstance(value, int) and value != -1]
    if strange := [number for number in numbers if not 0 <= number < len(names)]:
        raise InputError(f"The label {strange[0]!r} of {part} is not one of its classes: {some(names, most=12)}")
    return [names[value] if isinstance(value, int) and value != -1 else value for value in values]


def _splits(splits: Mapping[str, Sequence[int]] | Sequence[str] | None, n: int) -> dict[str, np.ndarray]:
    if splits is None:
        return {}
    if isinstance(splits, Mapping):
        parts = {split_name(name) or name: _positions(name, where) for name, where in splits.items()}
    else:
        names = [split_name(str(name)) or str(name) for name in splits]
        parts = {name: np.flatnonzero(np.array(names) == name) for name in dict.fromkeys(names)}
    every = np.concatenate([*parts.values(), np.empty(0, np.int64)])
    wrong = not isinstance(splits, Mapping) and len(splits) != n
    if wrong or (len(every) and (every.min() < 0 or every.max() >= n)) or len(np.unique(every)) != len(every):
        raise InputError(f"Splits may name each of the {n} images at most once")
    return parts


def _positions(name: str, where: Any) -> np.ndarray:
    positions = _array(where, f"The positions of {name}")
    if positions.ndim != 1 or (len(positions) and positions.dtype.kind not in "iu"):
        raise InputError(f"The positions of {name} are no list of whole numbers; write {{'train': [0, 1, …], …}}")
    return np.sort(positions.astype(np.int64))
