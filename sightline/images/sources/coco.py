"""`coco:FILE.json?images=FOLDER`: images with boxes, masks and classes, as COCO annotates them.

    coco:/data/coco                               annotations/instances_train2017.json with train2017/, and val2017
    coco:annotations.json?images=/data/pictures   one file; train and test are made by cutting it in half
    coco:train.json?images=train&val=val.json&val_images=val   files for `train`, `val` and `test`

Without `images`, the file names are looked for beside the annotations. Classes are the categories by their ids.
Polygons and run lengths (compressed or not) are masks; if an annotation has none, there are boxes only. Crowds are
regions where nothing is learned and nothing is wrong. Images without objects are kept. Boxes are clipped to their
images; those of which nothing is left are dropped, with a note. An image is turned as its EXIF data say, unless it has
the size that the file gives it only as it is stored. `labels` has the class of the largest object, −1 without any.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from sightline.core.errors import InputError, counted, first_line
from sightline.core.extras import explaining
from sightline.images.contents import hashes
from sightline.images.decoding import LARGEST as DECODED
from sightline.images.decoding import decode, inside
from sightline.images.loading import read_options
from sightline.images.sets import Images, Item, halves
from sightline.images.targets import Targets

SPLITS = ("train", "val", "test")
LARGEST = 2**30  # pixels of an image, and any number of a box
MASKS = 2**32  # bytes of the masks of an image
FAR = 10  # sides of an image within which polygons lie: those of objects that are cut off may leave it
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "images": {"id": (int, str), "file_name": (str,), "width": (int, float), "height": (int, float)},
    "categories": {"id": (int,), "name": (str,)},
    "annotations": {"image_id": (int, str), "category_id": (int,), "bbox": (list,)},
}
OPTIONS = {"images": "", "val": "", "val_images": "", "test": "", "test_images": ""}


@dataclass(frozen=True)
class Annotated:
    """Decodes files, and the masks of what is in them."""

    files: NDArray[np.str_]  # (n,)
    sizes: NDArray[np.int64]  # (n, 2), height and width as annotated
    objects: Sequence[_Objects] = field(repr=False)  # of each image

    def read(self, indices: Sequence[int]) -> list[Item]:
        """Images at these positions, in the size that is annotated."""
        return [self._read(Path(str(self.files[i])), (int(self.sizes[i, 0]), int(self.sizes[i, 1]))) for i in indices]

    def contents(self, indices: Sequence[int]) -> bytes:
        names = [str(Path(str(self.files[i])).absolute()) for i in indices]
        if not names:
            return b""
        hash_of = hashes(Path(os.path.commonpath([os.path.dirname(name) for name in names])), names)
        return b"".join(hash_of[name] for name in names)

    def _read(self, file: Path, size: tuple[int, int]) -> Item:
        item = decode(file, whole=True)
        if item.image is None or item.image.shape[:2] == size:
            return item
        stored = decode(file, upright=False, whole=True)
        if stored.image is not None and stored.image.shape[:2] == size:
            return stored
        pixels = " × ".join(map(str, item.image.shape[1::-1]))
        return Item(None, f"it has {pixels} pixels, but is annotated with {size[1]} × {size[0]}")

    def targets(self, indices: Sequence[int]) -> list[Targets[NDArray[Any]]]:
        """The objects in these images; their masks are decoded here."""
        return [self._targets(int(i)) for i in indices]

    def _targets(self, index: int) -> Targets[NDArray[Any]]:
        known, size, masks = self.objects[index], tuple(self.sizes[index].tolist()), None
        if known.masks is not None:
            count, pixels = len(known.labels), size[0] * size[1]
            if count and (pixels > DECODED or count * pixels > MASKS):
                raise InputError(
                    f"{self.files[index]} has {counted(count, 'mask')} of {size[1]} × {size[0]} pixels, which take "
                    f"{decimal(count * pixels)}; make the image smaller, or leave it out"
                )
            masks = np.zeros((len(known.labels), *size), bool)
            for mask, segmentation in zip(masks, known.masks, strict=True):
                mask[:] = _decoded(segmentation, size)
        return Targets(known.labels, known.boxes, masks, None, known.crowd, known.areas)


@dataclass(frozen=True)
class _Objects:
    """What is annotated in one image."""

    labels: NDArray[np.int64]
    boxes: NDArray[np.float32]
    crowd: NDArray[np.bool_]
    areas: NDArray[np.float64]
    masks: tuple[Any, ...] | None  # polygons or run lengths, as they stand in the file


def _runs(text: str) -> list[int]:
    """Run lengths from COCO's text: five bits a letter, least first; from the fourth on relative to the last but one.

    >>> _runs("52203"), _runs("0")
    ([5, 2, 2, 2, 5], [0])
    """
    runs: list[int] = []
    value, shift = 0, 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64 or shift > 60:
            return []
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits & 16) << (shift - 4)
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value, shift = 0, 0
    return runs


def _decoded(segmentation: Any, size: tuple[int, ...]) -> NDArray[Any]:
    with explaining():
        from faster_coco_eval.core import mask

    pixels: NDArray[Any] = mask.decode([_run_lengths(segmentation, size)])[:, :, 0]
    return pixels.astype(bool)


def _run_lengths(segmentation: Any, size: tuple[int, ...]) -> Any:
    with explaining():
        from faster_coco_eval.core import mask

    if isinstance(segmentation, dict):
        runs = segmentation["counts"]
        runs = _runs(runs) if isinstance(runs, str) else runs
        if not all(type(run) is int and run >= 0 for run in runs) or sum(runs) != size[0] * size[1]:
            raise InputError(f"The run lengths of a mask do not fill an image of {size[1]} × {size[0]} pixels")
        segmentation = {"size": list(size), "counts": runs}  # what decodes them does not check them
    return mask.segmToRle(segmentation, size[1], size[0])


def load(where: str, options: Mapping[str, str]) -> Images:
    """All images of one or more annotation files."""
    chosen = read_options("coco", options, OPTIONS)
    path = Path(where).expanduser()
    if where and path.is_dir():
        files = _standard(path)
    else:
        files = {"train": (path, chosen["images"])}
        files |= {s: (Path(chosen[s]), chosen[f"{s}_images"]) for s in SPLITS[1:] if chosen[s]}
    parts = {split: _File(file, folder) for split, (file, folder) in files.items()}
    first = next(iter(parts.values()))
    for part in parts.values():
        if part.categories != first.categories:
            raise InputError(f"{part.path} has other categories than {first.path}; both need the same ids and names")
    notes = [note for part in parts.values() for note in part.notes]
    counts = [len(part.names) for part in parts.values()]
    prefix = [f"{split}/" if len(parts) > 1 else "" for split in parts]
    ids = np.array([f"{p}{name}" for p, part in zip(prefix, parts.values(), strict=True) for name in part.names])
    labels = np.array([label for part in parts.values() for label in part.largest], np.int64)
    ends = np.cumsum(counts)
    splits = {s: np.arange(end - n, end) for s, n, end in zip(parts, counts, ends, strict=True)}
    return Images(
        name=f"coco:{where}",
        source=Annotated(
            np.array([str(file) for part in parts.values() for file in part.files]),
            np.array([size for part in parts.values() for size in part.sizes], np.int64).reshape(-1, 2),
            [known for part in parts.values() for known in part.objects],
        ),
        ids=ids,
        labels=labels,
        classes=first.classes,
        splits=splits if len(parts) > 1 else halves(ids, labels),
        own_splits=len(parts) > 1,
        fingerprint=" ".join(part.digest for part in parts.values()),
        notes=notes,
    )


def _standard(root: Path) -> dict[str, tuple[Path, str]]:
    """COCO's own layout: annotations/instances_train2017.json beside train2017/."""
    splits = {}
    for split in SPLITS:
        for file in sorted((root / "annotations").glob(f"instances_{split}*.json")):
            splits[split] = (file, str(root / file.stem.removeprefix("instances_")))
    if not splits:
        raise InputError(
            f"There is no annotations/instances_*.json in the folder {str(root)!r}; name the file itself, "
            "coco:FILE.json?images=FOLDER"
        )
    return splits


class _File:
    """One file of annotations, checked."""

    def __init__(self, path: Path, folder: str) -> None:
        self.path = path.expanduser()
        content = self._content()
        self.folder = Path(folder).expanduser() if folder else self.path.parent
        self.categories = self._categories(content)
        self.classes = _names(self.categories)
        images = self._by_id(content, "images")
        if not images:
            raise InputError(f"There are no images in {str(self.path)!r}; give a file with annotated images")
        self.names = [str(image["file_name"]) for image in images.values()]
        sizes = [(image["height"], image["width"]) for image in images.values()]
        if odd := [s for s in sizes if not all(map(_is_number, s)) or min(s) < 1 or s[0] * s[1] > LARGEST]:
            raise InputError(f"{self.path.name}: an image of {odd[0][1]} × {odd[0][0]} pixels cannot be")
        self.sizes = [(int(height), int(width)) for height, width in sizes]
        self.files = self._find()
        self.dropped: Counter[str] = Counter()
        self.objects = self._objects(content, images)
        self.largest = [int(o.labels[o.areas.argmax()]) if len(o.labels) else -1 for o in self.objects]
        self.notes = [f"{self.path.name}: {counted(n, 'object')} {why}" for why, n in self.dropped.items()]

    def _content(self) -> dict[str, Any]:
        try:
            raw = self.path.read_bytes()
            content = json.loads(raw)
        except FileNotFoundError as error:
            raise InputError(
                f"There is no file {str(self.path)!r}; give annotations in COCO's format, coco:FILE.json?images=FOLDER"
            ) from error
        except RecursionError as error:
            raise InputError(f"Cannot read the annotations {str(self.path)!r}: it is nested too deeply") from error
        except (OSError, ValueError) as error:
            raise InputError(f"Cannot read the annotations {str(self.path)!r}: {first_line(error)}") from error
        self.digest = hashlib.sha256(raw).hexdigest()
        if not isinstance(content, dict):
            raise InputError(
                f"{str(self.path)!r} is not in COCO's format: it holds no object with images and annotations"
            )
        return content

    def _rows(self, content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
        rows, wanted = content.get(key), FIELDS[key]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(f"{str(self.path)!r} is not in COCO's format: it has no list of {key}")
        for row in rows:
            if missing := [name for name in wanted if name not in row]:
                raise InputError(
                    f"{str(self.path)!r}: {key} need {', '.join(wanted)}; {row.get('id', 'one')} has no {missing[0]}"
                )
            if odd := [name for name, kinds in wanted.items() if type(row[name]) not in kinds]:
                raise InputError(f"{str(self.path)!r}: {odd[0]} of one of the {key} is {reprlib.repr(row[odd[0]])}")
        return rows

    def _categories(self, content: Mapping[str, Any]) -> dict[int, str]:
        rows = self._by_id(content, "categories")
        if not rows:
            raise InputError(f"{str(self.path)!r} has no categories; they are the classes to be found")
        return {number: rows[number]["name"] for number in sorted(rows)}

    def _by_id(self, content: Mapping[str, Any], key: str) -> dict[Any, dict[str, Any]]:
        """Rows by their ids, which must differ: objects name their image and category by them."""
        rows = self._rows(content, key)
        times = Counter(row["id"] for row in rows)
        if twice := [number for number, n in times.items() if n > 1]:
            raise InputError(
                f"{str(self.path)!r} gives the id {twice[0]!r} to {times[twice[0]]} of its {key}; each needs its own"
            )
        return {row["id"]: row for row in rows}

    def _find(self) -> list[Path]:
        """Where the images are; missing ones are said before anything is read."""
        listed: dict[Path, set[str]] = {}

        def there(file: Path) -> bool:
            if file.parent not in listed:
                listed[file.parent] = set(os.listdir(file.parent)) if file.parent.is_dir() else set()
            return file.name in listed[file.parent]

        if out := [name for name in self.names if not inside(self.folder, name)]:
            raise InputError(
                f"{self.path.name}: the file_name {out[0]!r} leads out of the folder {str(self.folder)!r}; correct it, "
                "or give the folder that holds all images with ?images=FOLDER"
            )
        files = [self.folder / name for name in self.names]
        if missing := [file for file in files if not there(file)]:
            raise InputError(
                f"{len(missing)} of {counted(len(files), 'image')} of {self.path.name} cannot be found, such as "
                f"{str(missing[0])!r}; give their folder with ?images=FOLDER"
            )
        return files

    def _objects(self, content: Mapping[str, Any], images: Mapping[Any, Any]) -> list[_Objects]:
        rows = self._rows(content, "annotations")
        place = {number: i for i, number in enumerate(self.categories)}
        masked = all(row.get("segmentation") for row in rows)
        by_image: dict[Any, list[tuple[int, list[float], bool, float, Any]]] = {number: [] for number in images}
        sizes = dict(zip(images, self.sizes, strict=True))
        for row in rows:
            name = row.get("id", "one")
            if row["image_id"] not in images:
                raise InputError(
                    f"{self.path.name}: annotation {name} is of image {row['image_id']!r}, which is not there"
                )
            if row["category_id"] not in place:
                raise InputError(
                    f"{self.path.name}: annotation {name} is of category {row['category_id']!r}, which is not among "
                    "the categories; add it there"
                )
            size = sizes[row["image_id"]]
            self._check_mask(row.get("segmentation"), size, name)
            if (box := self._box(row["bbox"], size, name)) is not None:
                by_image[row["image_id"]].append(
                    (
                        place[row["category_id"]],
                        box,
                        bool(row.get("iscrowd", 0)),
                        _area(row, box, size),
                        row.get("segmentation"),
                    )
                )
        return [_packed(objects, masked) for objects in by_image.values()]

    def _box(self, given: Any, size: tuple[int, int], name: Any) -> list[float] | None:
        """Corners of a box within its image, None if nothing is left of it."""
        if len(given) != 4 or not all(map(_is_number, given)):
            raise InputError(f"{self.path.name}: the box of annotation {name} is {given!r}, not [x, y, width, height]")
        x, y, width, height = map(float, given)
        corners = [max(x, 0.0), max(y, 0.0), min(x + width, size[1]), min(y + height, size[0])]
        if width <= 0 or height <= 0:
            self.dropped["with a box of no area, left out"] += 1
        elif corners[2] <= corners[0] or corners[3] <= corners[1]:
            self.dropped["with a box outside its image, left out"] += 1
        else:
            return corners
        return None

    def _check_mask(self, segmentation: Any, size: tuple[int, int], name: Any) -> None:
        if not segmentation:
            return
        if not _is_mask(segmentation):
            raise InputError(
                f"{self.path.name}: the mask of annotation {name} is {reprlib.repr(segmentation)}, neither polygons "
                "nor run lengths"
            )
        lines = segmentation if isinstance(segmentation, list) else []
        if far := [value for line in lines for value in line if abs(value) > FAR * max(size)]:
            raise InputError(
                f"{self.path.name}: a polygon of annotation {name} reaches to {far[0]:g}, but its image has {size[1]} "
                f"× {size[0]} pixels, and at most {FAR} times that is taken; correct it"
            )
        if isinstance(segmentation, dict) and tuple(segmentation["size"]) != size:
            raise InputError(
                f"{self.path.name}: the mask of annotation {name} is of an image of {segmentation.get('size')} rows "
                f"and columns, but its own has {list(size)}"
            )


def _area(row: Mapping[str, Any], box: Sequence[float], size: tuple[int, int]) -> float:
    """As annotated, else that of the mask, else that of the box."""
    if _is_number(row.get("area")):
        return float(row["area"])
    if row.get("segmentation"):
        with explaining():
            from faster_coco_eval.core import mask
        return float(mask.area([_run_lengths(row["segmentation"], size)])[0])
    return (box[2] - box[0]) * (box[3] - box[1])


def _packed(found: Sequence[tuple[int, list[float], bool, float, Any]], masked: bool) -> _Objects:
    labels, boxes, crowd, areas, masks = zip(*found, strict=True) if found else ((),) * 5
    return _Objects(
        np.array(labels, np.int64),
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array(crowd, bool),
        np.array(areas, np.float64),
        tuple(masks) if masked else None,
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < LARGEST


def _is_mask(segmentation: Any) -> bool:
    """Polygons [[x, y, …], …], or run lengths with the size of the image."""
    if isinstance(segmentation, list):
        return all(isinstance(line, list) and len(line) >= 6 and all(map(_is_number, line)) for line in segmentation)
    if not isinstance(segmentation, dict) or not isinstance(segmentation.get("size"), list):
        return False
    return isinstance(segmentation.get("counts"), (list, str))


def _names(categories: Mapping[int, str]) -> tuple[str, ...]:
    """Names of the classes; two of the same name are told apart by their ids."""
    twice = {name for name, n in Counter(categories.values()).items() if n > 1}
    return tuple(f"{name} ({number})" if name in twice else name for number, name in categories.items())
