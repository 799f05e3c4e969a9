"""A made COCO file: categories, polygons, run lengths, crowds, empty images, EXIF, and every kind of mistake."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as reference
from support.damage import damaged, places

import sightline as sl
from sightline.core.errors import InputError

WIDTH, HEIGHT = 20, 12


def made(folder: Path) -> dict[str, Any]:
    """Six pictures and what is in them; written as FILE by `write`."""
    chance = np.random.default_rng(0)
    for number in range(6):
        pixels = chance.integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[2:7, 3:9] = 1
    rle = reference.encode(np.asfortranarray(mask))
    plain = {"size": [HEIGHT, WIDTH], "counts": [3 * HEIGHT + 2, 5, 7, 5, 7, 5, 7, 5, 7, 5, 7, 5, 11 * HEIGHT + 5]}
    polygon = [[1.0, 1.0, 10.5, 1.0, 10.5, 8.25, 4.0, 9.0], [12.0, 2.0, 16.0, 2.0, 14.0, 6.0]]
    packed = {"size": rle["size"], "counts": rle["counts"].decode()}
    return {
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
        "images": [
            {"id": 10 + n, "file_name": f"{n}.png", "width": WIDTH, "height": HEIGHT} for n in (0, 1, 2, 3, 4, 5)
        ],
        "annotations": [
            {"id": 1, "image_id": 10, "category_id": 7, "bbox": [1, 1, 15, 8], "area": 61.5, "segmentation": polygon},
            {"id": 2, "image_id": 10, "category_id": 3, "bbox": [3, 2, 6, 5], "area": 30, "segmentation": packed},
            {"id": 3, "image_id": 12, "category_id": 3, "bbox": [3, 2, 6, 5], "segmentation": plain, "iscrowd": 1},
        ],
    }


def write(folder: Path, content: Any, name: str = "annotations.json") -> str:
    (folder / name).write_text(json.dumps(content))
    return f"coco:{folder / name}"


def at(images: sl.Images, name: str) -> Any:
    return images.targets([images.ids.tolist().index(name)])[0]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # within pycocotools
def test_categories_masks_crowds_and_empty_images(tmp_path: Path) -> None:
    content = made(tmp_path)
    images = sl.load_images(write(tmp_path, content))
    assert images.classes == ("cat", "dog")  # by id
    assert len(images.ids) == 6  # those without objects, too
    assert sorted(map(len, images.splits.values())) == [3, 3]
    first, empty, crowd = (at(images, name) for name in ("0.png", "1.png", "2.png"))
    assert first.labels.tolist() == [1, 0]
    assert first.boxes.tolist() == [[1, 1, 16, 9], [3, 2, 9, 7]]
    assert first.areas.tolist() == [61.5, 30]
    assert first.crowd.tolist() == [False, False]
    polygon = content["annotations"][0]["segmentation"]
    expected = reference.decode(reference.merge(reference.frPyObjects(polygon, HEIGHT, WIDTH)))
    np.testing.assert_array_equal(first.masks[0], expected)
    for mask in (first.masks[1], crowd.masks[0]):
        assert mask[2:7, 3:9].all()
        assert mask.sum() == 30
    assert crowd.crowd.tolist() == [True]
    assert crowd.areas.tolist() == [30]  # counted, where it is not annotated
    assert empty.masks.shape == (0, HEIGHT, WIDTH)
    assert images.labels[images.ids.tolist().index("0.png")] == 1
    assert images.labels[images.ids.tolist().index("1.png")] == -1


def test_pixels_are_those_of_the_files(tmp_path: Path) -> None:
    images = sl.load_images(f"{write(tmp_path, made(tmp_path))}?images={tmp_path}")
    items = images.source.read(range(6))
    for name, item in zip(images.ids, items, strict=True):
        np.testing.assert_array_equal(item.image, np.asarray(Image.open(tmp_path / str(name))))


def test_exif_is_followed_where_the_annotations_do(tmp_path: Path) -> None:
    """A picture stored lying: annotated upright, annotated as it is stored, and annotated as neither."""
    content = made(tmp_path)
    stored = Image.fromarray(np.random.default_rng(1).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8))
    exif = stored.getexif()
    exif[0x0112] = 6
    stored.save(tmp_path / "1.png", exif=exif)

    def shape(width: int, height: int) -> Any:
        content["images"][1] |= {"width": width, "height": height}
        images = sl.load_images(write(tmp_path, content))
        return images.source.read([images.ids.tolist().index("1.png")])[0]

    np.testing.assert_array_equal(shape(WIDTH, HEIGHT).image, np.asarray(stored))
    np.testing.assert_array_equal(shape(HEIGHT, WIDTH).image, np.rot90(np.asarray(stored), -1))
    assert shape(9, 9).error == "it has 12 × 20 pixels, but is annotated with 9 × 9"


def test_the_layout_of_coco_and_files_for_splits(tmp_path: Path) -> None:
    for folder in ("annotations", "train2017", "val2017"):
        (tmp_path / folder).mkdir()
    for split in ("train", "val"):
        content = made(tmp_path / f"{split}2017")
        write(tmp_path / "annotations", content, f"instances_{split}2017.json")
    images = sl.load_images(f"coco:{tmp_path}")
    assert {split: len(where) for split, where in images.splits.items()} == {"train": 6, "val": 6}
    assert images.ids[0] == "train/0.png"
    named = sl.load_images(
        f"coco:{tmp_path}/annotations/instances_train2017.json?images={tmp_path}/train2017"
        f"&test={tmp_path}/annotations/instances_val2017.json&test_images={tmp_path}/val2017"
    )
    assert set(named.splits) == {"train", "test"}
    other = made(tmp_path / "val2017") | {"categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "wolf"}]}
    write(tmp_path / "annotations", other, "instances_val2017.json")
    with pytest.raises(InputError, match="has other categories than"):
        sl.load_images(f"coco:{tmp_path}")


def test_boxes_alone(tmp_path: Path) -> None:
    content = made(tmp_path)
    del content["annotations"][1]["segmentation"]
    assert at(sl.load_images(write(tmp_path, content)), "0.png").masks is None


def test_boxes_are_clipped_and_what_is_nothing_is_left_out_with_a_note(tmp_path: Path) -> None:
    content = made(tmp_path)
    content["annotations"][0]["bbox"] = [-4, 5, 10, 20]
    content["annotations"][1]["bbox"] = [3, 3, 0, 5]
    content["annotations"][2]["bbox"] = [30, 3, 4, 5]
    images = sl.load_images(write(tmp_path, content))
    assert at(images, "0.png").boxes.tolist() == [[0, 5, 6, 12]]
    assert at(images, "2.png").labels.tolist() == []
    assert list(images.notes) == [
        "annotations.json: 1 object with a box of no area, left out",
        "annotations.json: 1 object with a box outside its image, left out",
    ]


def test_two_categories_of_one_name(tmp_path: Path) -> None:
    content = made(tmp_path)
    content["categories"][0]["name"] = "cat"
    assert sl.load_images(write(tmp_path, content)).classes == ("cat (3)", "cat (7)")


def test_the_digest_changes_with_the_annotations(tmp_path: Path) -> None:
    content = made(tmp_path)
    before = sl.load_images(write(tmp_path, content)).digest()
    content["annotations"][0]["bbox"][0] = 2
    assert sl.load_images(write(tmp_path, content)).digest() != before


def test_the_digest_of_a_split_changes_with_the_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images = sl.load_images(write(tmp_path, made(tmp_path)))
    before = {split: images.digest(split) for split in images.splits}
    assert {split: sl.load_images(images.name).digest(split) for split in images.splits} == before
    Image.fromarray(np.zeros((HEIGHT, WIDTH, 3), np.uint8)).save(tmp_path / "0.png")
    touched = "train" if "0.png" in images.ids[images.indices("train")] else "test"
    for each in (images, sl.load_images(images.name)):
        assert [split for split in before if each.digest(split) != before[split]] == [touched]


def broken(content: dict[str, Any], what: str) -> dict[str, Any]:
    annotation = content["annotations"][1]
    match what:
        case "missing image":
            content["images"][2]["file_name"] = "no.png"
        case "unknown category":
            annotation["category_id"] = 99
        case "unknown image":
            annotation["image_id"] = 99
        case "mask of another size":
            annotation["segmentation"]["size"] = [HEIGHT, WIDTH + 1]
        case "far polygon":
            annotation["segmentation"] = [[1, 1, 5, 1, 5, -201]]
        case "no box":
            annotation["bbox"] = [1, 2, 3]
        case "no width":
            del content["images"][0]["width"]
        case "image twice":
            content["images"][1]["id"] = 10
        case "category twice":
            content["categories"][1]["id"] = 7
        case "out of the folder":
            content["images"][0]["file_name"] = "../secret.png"
        case "elsewhere":
            content["images"][0]["file_name"] = "/dev/stdin"
        case "no categories":
            content["categories"] = []
        case "no annotations":
            del content["annotations"]
    return content


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("missing image", r"1 of 6 images of annotations.json cannot be found, such as .*no.png'; give their folder"),
        ("unknown category", "annotation 2 is of category 99, which is not among the categories"),
        ("unknown image", "annotation 2 is of image 99, which is not there"),
        ("mask of another size", r"the mask of annotation 2 is of an image of \[12, 21\] rows and columns"),
        ("far polygon", "a polygon of annotation 2 reaches to -201, but its image has 20 × 12 pixels, and at most 10"),
        ("no box", r"the box of annotation 2 is \[1, 2, 3\], not \[x, y, width, height\]"),
        ("no width", "images need id, file_name, width, height; 10 has no width"),
        ("image twice", "gives the id 10 to 2 of its images; each needs its own"),
        ("category twice", "gives the id 7 to 2 of its categories; each needs its own"),
        ("out of the folder", "the file_name '../secret.png' leads out of the folder"),
        ("elsewhere", "the file_name '/dev/stdin' leads out of the folder"),
        ("no categories", "has no categories"),
        ("no annotations", "it has no list of annotations"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, what: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        sl.load_images(write(tmp_path, broken(made(tmp_path), what)))


def test_links_may_lead_out_of_the_folder_and_pipes_are_not_opened(tmp_path: Path) -> None:
    content = made(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "0.png").rename(tmp_path / "disk" / "0.png")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "0.png").symlink_to(tmp_path / "disk" / "0.png")
    (tmp_path / "1.png").unlink()
    os.mkfifo(tmp_path / "1.png")
    content["images"][0]["file_name"] = "inner/../inner/0.png"
    images = sl.load_images(write(tmp_path, content))
    first, second = images.source.read([0, 1])
    assert first.image is not None
    assert second.error == "it is a pipe or a device, not a file"


def test_huge_masks_are_a_sentence_and_their_area_needs_no_pixels(tmp_path: Path) -> None:
    content, side = made(tmp_path), 30_000
    content["images"][0] |= {"width": side, "height": side}
    content["annotations"][1]["segmentation"] = {"size": [side, side], "counts": [0, side * side]}
    content["annotations"][0]["segmentation"] = [[0, 0, side, 0, side, side]]
    for annotation in content["annotations"]:
        annotation.pop("area", None)
    images = sl.load_images(write(tmp_path, content))
    areas = images.source.objects[0].areas  # type: ignore[attr-defined]
    assert areas.tolist() == [pytest.approx(side * side / 2, rel=1e-4), side * side]
    with pytest.raises(InputError, match=r"0.png has 2 masks of 30000 × 30000 pixels, which take 1.8 GB; make the"):
        images.targets([0])
    assert images.targets([1])[0].masks is not None


def test_files_that_are_not_annotations(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no file"):
        sl.load_images(f"coco:{tmp_path}/no.json")
    with pytest.raises(InputError, match=r"no annotations/instances_\*.json in the folder"):
        sl.load_images(f"coco:{tmp_path}")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="Cannot read the annotations"):
        sl.load_images(f"coco:{tmp_path}/x.json")
    with pytest.raises(InputError, match="is not in COCO's format"):
        sl.load_images(write(tmp_path, []))


def test_any_field_of_any_other_kind_or_missing(tmp_path: Path) -> None:
    """A sentence, or what is left can be read."""
    whole, refused = made(tmp_path), 0
    for way in places(whole)[1:]:
        for content in damaged(whole, way):
            try:
                images = sl.load_images(write(tmp_path, content))
                images.targets(range(len(images.ids)))
            except InputError:
                refused += 1
    assert refused > 300


@pytest.mark.parametrize("counts", [[5], [-1, HEIGHT * WIDTH + 1], [HEIGHT * WIDTH, 10**9], "zzzz", "0" * 99, [0.5]])
def test_run_lengths_that_do_not_fill_the_image(counts: Any, tmp_path: Path) -> None:
    content = made(tmp_path)
    content["annotations"][2]["segmentation"]["counts"] = counts
    with pytest.raises(InputError, match="run lengths of a mask do not fill an image"):
        at(sl.load_images(write(tmp_path, content)), "2.png")
