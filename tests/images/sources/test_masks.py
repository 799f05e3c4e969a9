"""Images with a class for every pixel: the layouts, what numbers mean, and what can be wrong with them."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.image_files import plain_png

import sightline as sl
from sightline.core.errors import InputError
from sightline.images.sources.masks import read_mask
from sightline.images.targets import VOID, move

NUMBERS = np.arange(6 * 8).reshape(6, 8) % 4


def image(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (9, 99, 199)).save(file)


def mask(file: Path, numbers: Any = NUMBERS) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(numbers, np.uint8)).save(file)


def pairs(root: Path, masks: str, splits: tuple[str, ...]) -> None:
    for split in splits:
        for n in range(2):
            image(root / "images" / split / f"{n}.jpg")
            mask(root / masks / split / f"{n}.png")


def segmentation(images: sl.Images, position: int = 0) -> np.ndarray:
    found = images.targets([position])[0].segmentation
    assert found is not None
    return found


def test_ade20k_leaves_0_out_and_counts_classes_from_1(tmp_path: Path) -> None:
    pairs(tmp_path, "annotations", ("training", "validation"))
    images = sl.load_images(f"masks:{tmp_path}")
    assert {split: len(where) for split, where in images.splits.items()} == {"train": 2, "val": 2}
    assert len(images.classes) == 150
    np.testing.assert_array_equal(segmentation(images), np.where(NUMBERS == 0, VOID, NUMBERS - 1))
    assert images.source.read([0])[0].image.shape == (6, 8, 3)
    assert (images.labels == -1).all()
    (tmp_path / "objectInfo150.txt").write_text(
        "Idx\tRatio\tName\n1\t0.1\twall\n2\t0.1\tbuilding, edifice\n3\t0\tsky\n"
    )
    assert sl.load_images(f"masks:{tmp_path}").classes == ("wall", "building", "sky")


def grey_png(numbers: np.ndarray, bits: int) -> bytes:
    """A PNG of grey values of few bits, which PIL reads and does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", numbers.shape[1], numbers.shape[0], bits, 0, 0, 0, 0)
    spread = (numbers[..., None] >> np.arange(bits)[::-1]) & 1  # most significant first
    rows = np.packbits(spread.reshape(len(numbers), -1).astype(np.uint8), axis=1)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_values_of_few_bits_are_their_numbers(tmp_path: Path, bits: int) -> None:
    numbers = np.arange(6 * 8).reshape(6, 8) % 2**bits
    (tmp_path / "m.png").write_bytes(grey_png(numbers, bits))
    np.testing.assert_array_equal(read_mask(tmp_path / "m.png"), numbers)


def test_voc_reads_the_indices_of_a_palette_and_leaves_borders_out(tmp_path: Path) -> None:
    border = NUMBERS.copy()
    border[0, 0] = 255
    lists = {"train": ["a", "b"], "val": ["c", "d"]}
    for split, names in lists.items():
        file = tmp_path / "ImageSets" / "Segmentation" / f"{split}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(names))
        for name in names:
            image(tmp_path / "JPEGImages" / f"{name}.jpg")
            picture = Image.frombytes("P", (8, 6), border.astype(np.uint8).tobytes())
            # Colours that say nothing about the indices.
            picture.putpalette([(7 * i + 50) % 256 for i in range(768)])
            (tmp_path / "SegmentationClass").mkdir(exist_ok=True)
            picture.save(tmp_path / "SegmentationClass" / f"{name}.png")
    images = sl.load_images(f"masks:{tmp_path}")
    assert images.classes[0] == "aeroplane"
    assert images.ids[images.indices("val")].tolist() == ["JPEGImages/c.jpg", "JPEGImages/d.jpg"]
    np.testing.assert_array_equal(segmentation(images), np.where(border == 255, VOID, NUMBERS - 1))


@pytest.mark.parametrize(("kind", "number"), [("labelIds", 24), ("labelTrainIds", 11)])
def test_cityscapes_has_the_19_classes_of_the_benchmark(tmp_path: Path, kind: str, number: int) -> None:
    for split in ("train", "val", "test"):
        for n in range(2):
            image(tmp_path / "leftImg8bit" / split / "bonn" / f"bonn_{n}_leftImg8bit.png")
            numbers = np.full((6, 8), number)
            numbers[0] = 4 if kind == "labelIds" else 255  # static, which is no class of the benchmark
            mask(tmp_path / "gtFine" / split / "bonn" / f"bonn_{n}_gtFine_{kind}.png", numbers)
    images = sl.load_images(f"masks:{tmp_path}")
    assert list(images.splits) == ["train", "val"]
    found = segmentation(images)
    assert images.classes[found[1, 0]] == "person"
    assert (found[0] == VOID).all()


def test_a_plain_folder_has_a_background(tmp_path: Path) -> None:
    pairs(tmp_path, "masks", ("train", "val", "test"))
    with pytest.raises(InputError, match=r"are not known; write them into classes.txt"):
        sl.load_images(f"masks:{tmp_path}")
    np.testing.assert_array_equal(segmentation(sl.load_images(f"masks:{tmp_path}?classes=3")), NUMBERS - 1)
    as_class = sl.load_images(f"masks:{tmp_path}?classes=4&zero=class&ignored=3")
    np.testing.assert_array_equal(segmentation(as_class), np.where(NUMBERS == 3, VOID, NUMBERS))
    (tmp_path / "classes.txt").write_text("one\ntwo\nthree\n")
    images = sl.load_images(f"masks:{tmp_path}")
    assert images.classes == ("one", "two", "three")
    before = images.digest("train")
    mask(tmp_path / "masks" / "train" / "0.png", NUMBERS[::-1])
    assert sl.load_images(f"masks:{tmp_path}").digest("train") != before


def test_a_crop_takes_the_pixels_of_the_map_that_lie_under_it(tmp_path: Path) -> None:
    pairs(tmp_path, "annotations", ("training", "validation"))
    one = sl.load_images(f"masks:{tmp_path}").targets([0])[0]
    moved = move(one, np.array([1, 2, 4, 4]), True, 8).segmentation
    whole = np.where(NUMBERS == 0, VOID, NUMBERS - 1)
    np.testing.assert_array_equal(moved, whole[1:5, 2:6].repeat(2, 0).repeat(2, 1)[:, ::-1])


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    pairs(tmp_path, "masks", ("train", "test"))
    where = f"masks:{tmp_path}?classes="
    with pytest.raises(InputError, match=r"has the number 3, which is none of 2 classes; name all .* ignored=3"):
        sl.load_images(f"{where}2")
    (tmp_path / "classes.txt").write_bytes(b"cat\nk\xe4fer\n")
    with pytest.raises(InputError, match=r"Cannot read the names of classes .*classes.txt': it is no text in UTF-8"):
        sl.load_images(f"{where}3")
    (tmp_path / "classes.txt").unlink()
    with pytest.raises(InputError, match="0 can be ignored, background, class"):
        sl.load_images(f"{where}3&zero=nothing")
    mask(tmp_path / "masks" / "test" / "1.png", NUMBERS[:, :4])
    with pytest.raises(InputError, match=r"has 4 × 6 pixels, but its image images/test/1.jpg has 8 × 6"):
        sl.load_images(f"{where}3")
    Image.fromarray(np.full((6, 8), -1, np.int32)).save(tmp_path / "masks" / "test" / "1.png", "TIFF")
    with pytest.raises(InputError, match="has the number -1, which is none of 3 classes"):
        sl.load_images(f"{where}3")
    (tmp_path / "masks" / "test" / "1.png").write_bytes(plain_png(30_000, 30_000, 1, 0, bytes(3751 * 30_000)))
    with pytest.raises(InputError, match=r"1.png cannot be read: it has more pixels than PIL accepts"):
        sl.load_images(f"{where}3")
    (tmp_path / "masks" / "test" / "1.png").write_bytes(plain_png(9_000, 9_000, 1, 0, bytes(1126 * 9_000)))
    with pytest.raises(InputError, match=r"1.png cannot be read: it has 9000 × 9000 pixels, but at most 67 million"):
        sl.load_images(f"{where}3")
    image(tmp_path / "masks" / "test" / "1.png")
    with pytest.raises(InputError, match=r"has colours \(RGB\), but one number for each pixel"):
        sl.load_images(f"{where}3")
    (tmp_path / "masks" / "test" / "1.png").unlink()
    with pytest.raises(InputError, match=r"1 image of 4 .* no mask, first images/test/1.jpg"):
        sl.load_images(f"{where}3")
    with pytest.raises(InputError, match="none of the layouts"):
        sl.load_images(f"masks:{tmp_path / 'masks'}")


def test_names_of_voc_stay_in_its_folders(tmp_path: Path) -> None:
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (tmp_path / folder).mkdir(parents=True)
    mask(tmp_path / "x.png")
    (tmp_path / "ImageSets" / "Segmentation" / "train.txt").write_text("../x\n")
    with pytest.raises(InputError, match=r"train.txt lists '../x', which leads out of"):
        sl.load_images(f"masks:{tmp_path}")
