"""`folder:PATH`: image files in a folder, classes by sub-folder.

    PATH/cat/1.jpg, PATH/dog/2.jpg              classes; train and test are made by cutting every class in half
    PATH/train/cat/1.jpg, PATH/val/cat/2.jpg    classes and splits (train, val, test)
    PATH/1.jpg, PATH/2.jpg                      no classes: labels are −1

`folder:PATH?names=shape-texture` reads a cue-conflict set, whose files are named by the class of the shape and that of
the texture, each with a number: `cat/cat4-truck3.png`, or `cat4-truck3.png` without the folder. The label is the shape,
the extra label `texture` the other; all images are test images.

Files may lie deeper within a class; hidden ones are ignored. The id of an image is its path below PATH.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sightline.core.errors import InputError, counted
from sightline.images.contents import hashes
from sightline.images.decoding import ENDINGS, decode
from sightline.images.loading import read_options
from sightline.images.sets import Images, Item, by_name, halves, split_name


@dataclass(frozen=True)
class Files:
    """Decodes files below a folder."""

    root: Path
    names: np.ndarray  # str (n,), relative

    def read(self, indices: Sequence[int]) -> list[Item]:
        return [decode(self.root / str(self.names[index])) for index in indices]

    def contents(self, indices: Sequence[int]) -> bytes:
        names = [str(self.names[index]) for index in indices]
        hash_of = hashes(self.root, names)
        return b"".join(hash_of[name] for name in names)


def load(where: str, options: Mapping[str, str]) -> Images:
    names = read_options("folder", options, {"names": "any"})["names"]
    if names not in ("any", "shape-texture"):
        raise InputError(f"The option names of folder is {names!r}, but only 'shape-texture' is known")
    root = Path(where).expanduser()
    if not where or not root.is_dir():
        raise InputError(f"There is no folder {where!r}; give an existing one, such as folder:/data/val")
    try:
        files = sorted(_files(root, root, set()))
    except OSError as error:
        raise InputError(f"The folder {error.filename} cannot be read: {(error.strerror or '').lower()}") from error
    if not files:
        endings = " ".join(sorted(ENDINGS))
        raise InputError(f"There are no images in the folder {where!r}; files with these endings are taken: {endings}")
    ids = np.array([name for name, _ in files])
    if names == "any":
        _check_strays(ids.tolist())
    of_split, of_class = _split_and_class([name.split("/")[:-1] for name, _ in files])
    splits, of_texture = by_name(of_split), [""] * len(ids)
    if names == "shape-texture":
        splits = {"test": np.arange(len(ids))}
        of_class, of_texture = _cues(ids.tolist())
    classes = sorted({*of_class, *of_texture} - {""})
    number = {name: i for i, name in enumerate(classes)}
    labels, texture = (np.array([number.get(name, -1) for name in of], np.int64) for of in (of_class, of_texture))
    return Images(
        name=f"folder:{where}",
        source=Files(root.absolute(), ids),
        ids=ids,
        labels=labels,
        classes=tuple(classes),
        splits=splits or halves(ids, labels),
        own_splits=bool(splits),
        extras={"texture": texture} if names == "shape-texture" else {},
        fingerprint=hashlib.sha256("\n".join(str(size) for _, size in files).encode()).hexdigest(),
    )


def _files(folder: Path, root: Path, above: set[str]) -> Iterator[tuple[str, int]]:
    """Relative path and size of every image; a link that leads back to a folder above it is not followed."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files(Path(entry.path), root, above | {real})
            elif Path(entry.name).suffix.lower() in ENDINGS and (entry.is_file() or not os.path.exists(entry.path)):
                # A broken link is listed, so that reading it reports its name; a pipe would keep its reader waiting.
                size = entry.stat().st_size if entry.is_file() else 0
                yield Path(entry.path).relative_to(root).as_posix(), size


def _check_strays(names: Sequence[str]) -> None:
    """Refuse a few images beside folders of splits, which would turn the splits into classes."""
    folders = [name.split("/")[:-1] for name in names]
    splits = {parts[0]: split_name(parts[0]) for parts in folders if len(parts) > 1 and split_name(parts[0])}
    strays = [name for name, parts in zip(names, folders, strict=True) if not parts or not split_name(parts[0])]
    if len(set(splits.values())) > 1 and strays:
        raise InputError(
            f"The file {strays[0]!r} lies beside the splits {' and '.join(splits)}, which hold a folder for each "
            f"class, so it belongs to none of them; move {counted(len(strays), 'such file')} into a split, or out"
        )


def _split_and_class(folders: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Split and class of each image from the folders above it; "" where there is none.

    The first level is splits only if every image lies in a folder that is named as one.

    >>> _split_and_class([["train", "cat"], ["val", "dog", "small"]])
    (['train', 'val'], ['cat', 'dog'])
    >>> _split_and_class([["train"], ["bus"]])
    (['', ''], ['train', 'bus'])
    """
    splits = [split_name(parts[0]) if parts else None for parts in folders]
    if None in splits:
        return [""] * len(folders), [parts[0] if parts else "" for parts in folders]
    return [s or "" for s in splits], [parts[1] if len(parts) > 1 else "" for parts in folders]


def _cues(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Shape and texture class of each image from its file name; a folder named as a class must be that of the shape.

    >>> _cues(["cat/cat4-truck3.png", "truck1-cat12.png"])
    (['cat', 'truck'], ['truck', 'cat'])
    """
    matches = [re.fullmatch(r"([^\d-][^-]*?)\d*-([^\d-][^-]*?)\d*", Path(name).stem) for name in names]
    for name, match in zip(names, matches, strict=True):
        if match is None:
            raise InputError(
                f"The file {name!r} is not named by shape and texture, each a word and a number, such as "
                "cat4-truck3.png; rename it, or leave out names=shape-texture"
            )
    shapes, textures = ([match[cue] for match in matches if match] for cue in (1, 2))
    for name, shape in zip(names, shapes, strict=True):
        if (folder := Path(name).parent.name) != shape and folder in {*shapes, *textures}:
            raise InputError(
                f"The file {name!r} lies in the folder of {folder!r}, but its name says the shape {shape!r}"
            )
    return shapes, textures
