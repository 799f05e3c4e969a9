"""`masks:PATH`: images with a class for every pixel, in the layouts of ADE20K, PASCAL VOC and Cityscapes.

    masks:ADEChallengeData2016   images/training/1.jpg, annotations/training/1.png; 0 is left out, classes are 1 to 150
    masks:VOCdevkit/VOC2012      JPEGImages, SegmentationClass, ImageSets/Segmentation/train.txt; 255 is left out
    masks:cityscapes             leftImg8bit/train/bonn/x_leftImg8bit.png, gtFine/train/bonn/x_gtFine_labelIds.png; the
                                 19 classes of the benchmark, everything else is left out
    masks:PATH                   images/train/x.jpg, masks/train/x.png; 0 is the background, 255 is left out

Masks are PNG files of the size of their images, whose numbers are the classes; of a palette its indices are read, never
its colours. Class names come from `classes.txt` (one in each line, without the background), from ADE20K's
`objectInfo150.txt`, or `?classes=20` says how many there are. `?zero=ignored`, `background` or `class` says what 0
stands for, `?ignored=254` which other number is left out. Images have no label of their own.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sightline.core.errors import InputError, counted, nearest
from sightline.core.files import read_text
from sightline.images.decoding import ENDINGS, decode, inside, open_image, reason, turn
from sightline.images.loading import read_options
from sightline.images.sets import Images, Item, by_name, halves, split_name
from sightline.images.targets import VOID, Targets

ZERO = {"ignored": VOID, "background": -1, "class": 0}  # what 0 becomes; 1 then becomes 0, or 1 after a class
VOC = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
CITYSCAPES = {  # id of a label → its name, in the order of the benchmark's classes
    7: "road",
    8: "sidewalk",
    11: "building",
    12: "wall",
    13: "fence",
    17: "pole",
    19: "traffic light",
    20: "traffic sign",
    21: "vegetation",
    22: "terrain",
    23: "sky",
    24: "person",
    25: "rider",
    26: "car",
    27: "truck",
    28: "bus",
    31: "train",
    32: "motorcycle",
    33: "bicycle",
}
OUTSIDE = -3
SCALED = {"L;2": 85, "L;4": 17}  # by what PIL multiplies grey values of 2 and 4 bits
SIDEWAYS = [Image.Transpose[name] for name in ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")]
LOOKED_AT = 16  # masks that are read before anything starts


class MaskedImage(NamedTuple):
    """An image and its mask, below the folder."""

    split: str
    image: str
    mask: str


class MaskLayout(NamedTuple):
    """What a folder holds."""

    pairs: list[MaskedImage]
    classes: tuple[str, ...]
    numbers: NDArray[np.int64]  # (256,), what each number of a mask becomes; OUTSIDE where it has no meaning


@dataclass(frozen=True)
class Masked:
    """Decodes images and their masks."""

    root: Path
    images: NDArray[np.str_]  # (n,), relative
    masks: NDArray[np.str_]
    numbers: NDArray[np.int64]  # (256,)
    classes: int

    def read(self, indices: Sequence[int]) -> list[Item]:
        return [decode(self.root / str(self.images[index]), whole=True) for index in indices]

    def targets(self, indices: Sequence[int]) -> list[Targets[NDArray[Any]]]:
        """The class of every pixel of the images at these positions."""
        nothing = np.empty(0, np.int64), np.empty((0, 4), np.float32)
        return [Targets(*nothing, None, self._map(str(self.images[i]), str(self.masks[i]))) for i in indices]

    def contents(self, indices: Sequence[int]) -> bytes:
        """Sizes and times of the files."""
        stats = [(self.root / str(of[index])).stat() for index in indices for of in (self.images, self.masks)]
        return "\n".join(f"{one.st_size} {one.st_mtime_ns}" for one in stats).encode()

    def _map(self, image: str, mask: str) -> NDArray[np.int64]:
        numbers = read_mask(self.root / mask)
        if numbers.shape != (size := upright_size(self.root / image)):
            raise InputError(
                f"The mask {mask} has {_by(numbers.shape)} pixels, but its image {image} has {_by(size)}; both must "
                "have the same size"
            )
        ends = int(numbers.min(initial=0)), int(numbers.max(initial=0))
        beyond = [end for end in ends if not 0 <= end < len(self.numbers)]
        channels: NDArray[np.int64] = np.full((1, 1), OUTSIDE) if beyond else self.numbers[numbers]
        if (channels == OUTSIDE).any():
            wrong = beyond[0] if beyond else int(numbers[channels == OUTSIDE][0])
            raise InputError(
                f"The mask {mask} has the number {wrong}, which is none of {counted(self.classes, 'class')}; name all "
                f"of them in classes.txt, or leave it out with ignored={wrong}"
            )
        return channels


def read_mask(file: Path) -> NDArray[Any]:
    """The numbers (H, W) of a mask: indices of a palette, or grey values of 1 to 16 bits."""
    try:
        with open_image(file) as image:
            stored = image.tile[0][3] if image.tile else None  # type: ignore[attr-defined]
            image.load()
    except Exception as error:  # PIL's readers raise whatever their parsing of broken bytes runs into
        raise InputError(f"The mask {file} cannot be read: {reason(file, error)}") from error
    if image.mode not in ("P", "L", "1", "I", "I;16", "I;16B"):
        raise InputError(
            f"The mask {file} has colours ({image.mode}), but one number for each pixel is expected; save it as a PNG "
            "of indices or of grey values"
        )
    step = SCALED.get(stored, 1) if isinstance(stored, str) else 1
    numbers: NDArray[Any] = np.asarray(image.convert("L") if image.mode == "1" else image)
    if image.mode == "1":
        return numbers // 255
    return numbers if step == 1 else numbers // step


def upright_size(file: Path) -> tuple[int, int]:
    """Height and width of an image as it is decoded, without decoding it."""
    try:
        with open_image(file) as image:
            turned = turn(image) in SIDEWAYS
            return (image.width, image.height) if turned else (image.height, image.width)
    except Exception:  # decoding it will say what is wrong
        return (0, 0)


def _by(size: Sequence[int]) -> str:
    return f"{size[1]} × {size[0]}"


def load(where: str, options: Mapping[str, str]) -> Images:
    chosen = read_options("masks", options, {"classes": 0, "zero": "", "ignored": 255})
    if chosen["zero"] not in ("", *ZERO):
        raise InputError(f"zero is {chosen['zero']!r}, but 0 can be {', '.join(ZERO)}{nearest(chosen['zero'], ZERO)}")
    root = Path(where).expanduser()
    if not where or not root.is_dir():
        raise InputError(
            f"There is no folder {where!r}; give an existing one, such as masks:/data/ADEChallengeData2016"
        )
    layout = next((make for there, make in LAYOUTS.items() if all((root / name).is_dir() for name in there)), None)
    if layout is None:
        known = "; ".join(" and ".join(names) for names in LAYOUTS)
        raise InputError(f"The folder {where!r} has none of the layouts that are known, by their folders: {known}")
    pairs, classes, numbers = layout(root, chosen)
    if not pairs:
        raise InputError(f"There are no images with masks in {where!r}; see docs/images.md for the layouts")
    images, masks = (np.array(names) for names in ([p.image for p in pairs], [p.mask for p in pairs]))
    source = Masked(root.absolute(), images, masks, numbers, len(classes))
    source.targets(np.linspace(0, len(pairs) - 1, min(LOOKED_AT, len(pairs))).astype(int).tolist())
    labels, splits = np.full(len(pairs), -1), by_name([pair.split for pair in pairs])
    sizes = [str((root / name).stat().st_size) for name in (*images.tolist(), *masks.tolist())]
    about = [*sizes, *classes, str(numbers.tolist())]
    return Images(
        name=f"masks:{where}",
        source=source,
        ids=images,
        labels=labels,
        classes=classes,
        splits=splits or halves(images, labels),
        own_splits=bool(splits),
        fingerprint=hashlib.sha256("\n".join(about).encode()).hexdigest(),
    )


# Layouts


def _numbers(classes: int, zero: str, ignored: int) -> NDArray[np.int64]:
    """What each number of a mask becomes.

    >>> _numbers(2, "background", 255)[[0, 1, 2, 3, 255]].tolist(), _numbers(2, "class", 255)[[0, 1, 2]].tolist()
    ([-1, 0, 1, -3, -2], [0, 1, -3])
    """
    table = np.full(max(256, classes + 1, ignored + 1), OUTSIDE)
    first = 0 if zero == "class" else 1
    table[0] = ZERO[zero]
    table[first : first + classes] = np.arange(classes)
    table[ignored] = VOID
    return table


def _ade(root: Path, chosen: Mapping[str, Any]) -> MaskLayout:
    names = _named(root, chosen, _ade_names(root))
    return MaskLayout(
        _mirrored(root, "images", "annotations"),
        names,
        _numbers(len(names), chosen["zero"] or "ignored", chosen["ignored"]),
    )


def _plain(root: Path, chosen: Mapping[str, Any]) -> MaskLayout:
    names = _named(root, chosen, ())
    pairs = _mirrored(root, "images", "masks")
    return MaskLayout(pairs, names, _numbers(len(names), chosen["zero"] or "background", chosen["ignored"]))


def _voc(root: Path, chosen: Mapping[str, Any]) -> MaskLayout:
    names = _named(root, chosen, VOC)
    pairs = []
    for split in ("train", "val", "test"):
        file = root / "ImageSets" / "Segmentation" / f"{split}.txt"
        if not file.is_file():
            continue
        for word in read_text(file, "list of images").split():
            mask = f"SegmentationClass/{word}.png"
            if not inside(root / "SegmentationClass", f"{word}.png"):
                raise InputError(f"{file} lists {word!r}, which leads out of {str(root)!r}; correct it")
            if (root / mask).is_file():  # those of test are not published
                pairs.append(MaskedImage(split, f"JPEGImages/{word}.jpg", mask))
    return MaskLayout(pairs, names, _numbers(len(names), chosen["zero"] or "background", chosen["ignored"]))


def _cityscapes(root: Path, chosen: Mapping[str, Any]) -> MaskLayout:
    if chosen["classes"] or chosen["zero"]:
        raise InputError("The classes of Cityscapes are those of the benchmark; leave out classes and zero")
    by_id, by_train_id = np.full(256, VOID), np.full(256, VOID)
    by_id[list(CITYSCAPES)] = by_train_id[: len(CITYSCAPES)] = np.arange(len(CITYSCAPES))
    pairs, own = [], False
    for image in sorted((root / "leftImg8bit").glob("*/*/*_leftImg8bit.png")):
        folder, stem = image.parent.relative_to(root / "leftImg8bit"), image.name.removesuffix("_leftImg8bit.png")
        mask = root / "gtFine" / folder / f"{stem}_gtFine_labelTrainIds.png"
        own = own or mask.is_file()
        if not mask.is_file():
            mask = mask.with_name(f"{stem}_gtFine_labelIds.png")
        split = split_name(folder.parts[0]) or ""
        if mask.is_file() and split != "test":  # whose labels are not published
            pairs.append(MaskedImage(split, image.relative_to(root).as_posix(), mask.relative_to(root).as_posix()))
    kinds = {pair.mask.rpartition("_")[2] for pair in pairs}
    if len(kinds) > 1:
        raise InputError(f"Some masks of {root} are labelIds and some labelTrainIds; keep one kind")
    return MaskLayout(pairs, tuple(CITYSCAPES.values()), by_train_id if own else by_id)


LAYOUTS: Mapping[tuple[str, ...], Callable[[Path, Mapping[str, Any]], MaskLayout]] = {
    ("leftImg8bit", "gtFine"): _cityscapes,
    ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"): _voc,
    ("images", "annotations"): _ade,
    ("images", "masks"): _plain,
}


def _mirrored(root: Path, images: str, masks: str) -> list[MaskedImage]:
    """Images with the mask of the same name in the other folder; a missing one is an error."""
    files = sorted(path for path in (root / images).rglob("*") if path.suffix.lower() in ENDINGS)
    pairs, missing = [], []
    for path in files:
        inner = path.relative_to(root / images)
        mask = (root / masks / inner).with_suffix(".png")
        split = split_name(inner.parts[0]) if len(inner.parts) > 1 else None
        pairs.append(MaskedImage(split or "", path.relative_to(root).as_posix(), mask.relative_to(root).as_posix()))
        if not mask.is_file():
            missing.append(pairs[-1])
    if missing:
        raise InputError(
            f"{counted(len(missing), 'image')} of {len(files)} in {root} have no mask, first {missing[0].image}, whose "
            f"mask would be {missing[0].mask}; add the masks, or take the images out"
        )
    return pairs


def _named(root: Path, chosen: Mapping[str, Any], own: Sequence[str]) -> tuple[str, ...]:
    """Names of the classes: of `classes.txt`, as many as are asked for, or those of the layout."""
    file = root / "classes.txt"
    if file.is_file():
        names = tuple(line.strip() for line in read_text(file, "names of classes").splitlines() if line.strip())
        if len(set(names)) < len(names):
            raise InputError(f"{file} names a class twice; each needs a name of its own")
        return names
    if chosen["classes"]:
        return tuple(f"class {number}" for number in range(1, chosen["classes"] + 1))
    if not own:
        raise InputError(
            f"The classes of {root} are not known; write them into classes.txt, one in each line, or say how many "
            "there are, ?classes=20"
        )
    return tuple(own)


def _ade_names(root: Path) -> tuple[str, ...]:
    """Of `objectInfo150.txt`: the first of the names in its last column; numbers where it is not there."""
    file = root / "objectInfo150.txt"
    if not file.is_file():
        return tuple(f"class {number}" for number in range(1, 151))
    rows = [line.split("\t") for line in read_text(file, "names of classes").splitlines()[1:] if line.strip()]
    names = [row[-1].split(",")[0].strip() for row in rows]
    times = Counter(names)
    return tuple(name if times[name] == 1 else f"{name} {n}" for n, name in enumerate(names, 1))
