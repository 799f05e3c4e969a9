"""Folders of files: layouts, names, and what cannot be used."""

import os
import pickle

import pytest
from support.image_files import RAMP, write

from sightline.core.errors import InputError
from sightline.images.contents import hashes
from sightline.images.loading import load_images

# ---- layouts


def test_classes_are_sub_folders(tmp_path):
    for name in (
        "dog/2.PNG",
        "dog/a/1.jpeg",
        "cat/9.png",
        "cat/10.png",
        "cat/.hidden.png",
        ".git/x.png",
        "cat/notes.txt",
    ):
        write(tmp_path / name, format="png")
    images = load_images(f"folder:{tmp_path}")
    assert images.ids.tolist() == ["cat/10.png", "cat/9.png", "dog/2.PNG", "dog/a/1.jpeg"]
    assert (images.classes, images.labels.tolist()) == (("cat", "dog"), [0, 0, 1, 1])
    assert not images.own_splits
    assert sorted(images.labels_of("train")) == sorted(images.labels_of("test")) == [0, 1]


def test_first_level_may_be_splits(tmp_path):
    for name in ("train/cat/1.png", "train/dog/1.png", "validation/dog/1.png", "Test/cat/5.png"):
        write(tmp_path / name)
    images = load_images(f"folder:{tmp_path}")
    assert {name: images.ids[where].tolist() for name, where in images.splits.items()} == {
        "train": ["train/cat/1.png", "train/dog/1.png"],
        "val": ["validation/dog/1.png"],
        "test": ["Test/cat/5.png"],
    }
    assert (images.classes, images.own_splits) == (("cat", "dog"), True)


@pytest.mark.parametrize("stray", ["readme.png", "extra/1.png"])
def test_an_image_beside_splits_is_named(tmp_path, stray):
    for name in ("train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/dog/1.png", stray):
        write(tmp_path / name)
    with pytest.raises(InputError, match=f"The file '{stray}' lies beside the splits train and val.* 1 such file into"):
        load_images(f"folder:{tmp_path}")


@pytest.mark.parametrize("broken", [True, False])
def test_pipes_are_not_waited_for_and_broken_links_are_reported(tmp_path, broken):
    for i in range(5):
        write(tmp_path / f"cat/{i}.png")
    os.mkfifo(tmp_path / "pipe")
    if broken:
        (tmp_path / "cat/x.png").symlink_to(tmp_path / "nowhere.png")
    else:
        os.mkfifo(tmp_path / "cat/x.png")
        (tmp_path / "cat/y.png").symlink_to(tmp_path / "pipe")
    images = load_images(f"folder:{tmp_path}")
    assert [name for name in images.ids if not name[-5].isdigit()] == ["cat/x.png"] * broken
    assert images.digest("train")
    assert hashes(tmp_path, ["pipe"]) == {"pipe": bytes(16)}


def test_a_class_may_be_called_train(tmp_path):
    for name in ("train/1.png", "train/2.png", "bus/1.png", "bus/2.png"):
        write(tmp_path / name)
    assert load_images(f"folder:{tmp_path}").classes == ("bus", "train")


def test_a_single_split_is_cut_in_half(tmp_path):
    for i in range(6):
        write(tmp_path / f"train/cat/{i}.png")
    images = load_images(f"folder:{tmp_path}")
    assert (sorted(images.splits), images.own_splits, images.classes) == (["test", "train"], False, ("cat",))


def test_a_flat_folder_has_no_labels(tmp_path):
    for i in range(5):
        write(tmp_path / f"{i}.png")
    images = load_images(f"folder:{tmp_path}")
    assert (images.labels.tolist(), images.classes) == ([-1] * 5, ())


def test_links_are_followed_but_not_in_circles(tmp_path):
    for i in range(4):
        write(tmp_path / f"data/cat/{i}.png")
    (tmp_path / "data/dog").symlink_to(tmp_path / "data/cat")
    (tmp_path / "data/cat/again").symlink_to(tmp_path / "data")
    images = load_images(f"folder:{tmp_path / 'data'}")
    assert [name for name in images.ids if "again" not in name] == [
        f"{c}/{i}.png" for c in ("cat", "dog") for i in range(4)
    ]
    assert len(images.ids) < 40


def test_digest_is_that_of_the_data_not_of_the_place(tmp_path):
    for root in ("a", "b"):
        for i in range(4):
            write(tmp_path / root / f"cat/{i}.png")
    first, second = (load_images(f"folder:{tmp_path / root}") for root in ("a", "b"))
    assert first.digest() == second.digest()
    write(tmp_path / "b/cat/0.png", RAMP[::-1, ::2].copy())
    assert load_images(f"folder:{tmp_path / 'b'}").digest() != first.digest()


def test_paths_may_hold_question_marks_and_colons(tmp_path):
    for i in range(4):
        write(tmp_path / f"what?: a=b/cat ü/{i}.png")
    images = load_images(f"folder:{tmp_path / 'what?: a=b'}")
    assert images.ids[0] == "cat ü/0.png"
    assert pickle.loads(pickle.dumps(images.source)).read([1])[0].image.shape == (8, 8, 3)


def test_what_cannot_be_used_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no images in the folder .*\.jpeg"):
        load_images(f"folder:{tmp_path / 'empty'}")
    write(tmp_path / "few/1.png")
    with pytest.raises(InputError, match="has 1 image, but at least 4"):
        load_images(f"folder:{tmp_path / 'few'}")
    with pytest.raises(InputError, match="folder has no option 'size'"):
        load_images(f"folder:{tmp_path}?size=3")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything; run the tests as another user")
def test_a_folder_without_permission(tmp_path):
    write(tmp_path / "cat/1.png")
    (tmp_path / "cat").chmod(0)
    with pytest.raises(InputError, match="cannot be read: permission denied"):
        load_images(f"folder:{tmp_path}")
    (tmp_path / "cat").chmod(0o700)


# ---- cue-conflict sets


def test_names_of_shape_and_texture(tmp_path):
    for name in (
        "cat/cat4-truck3.png",
        "cat/cat10-bear1.png",
        "truck/truck1-cat12.png",
        "polar bear/polar bear1-cat2.png",
    ):
        write(tmp_path / name)
    images = load_images(f"folder:{tmp_path}?names=shape-texture")
    assert images.classes == ("bear", "cat", "polar bear", "truck")
    assert images.ids.tolist()[0] == "cat/cat10-bear1.png"
    assert images.labels.tolist() == [1, 1, 2, 3]
    assert images.extras["texture"].tolist() == [0, 3, 1, 1]
    assert {name: len(where) for name, where in images.splits.items()} == {"test": 4}
    assert images.own_splits
    assert not load_images(f"folder:{tmp_path}").extras


def test_flat_names_and_folders_that_are_no_classes(tmp_path):
    for name in ("dog-cat.png", "all/dog1-cat2.png", "all/cat1-dog1.png", "test/dog2-dog3.png"):
        write(tmp_path / name)
    images = load_images(f"folder:{tmp_path}?names=shape-texture")
    assert images.labels.tolist() == [0, 1, 1, 1]
    assert images.extras["texture"].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cat4.png", "is not named by shape and texture"),
        ("cat4-truck3-dog1.png", "is not named by shape and texture"),
        ("4-truck3.png", "such as cat4-truck3.png"),
        ("dog/cat1-dog2.png", "lies in the folder of 'dog', but its name says the shape 'cat'"),
    ],
)
def test_other_names_are_one_sentence(tmp_path, name, message):
    write(tmp_path / name)
    with pytest.raises(InputError, match=message):
        load_images(f"folder:{tmp_path}?names=shape-texture")


def test_other_ways_to_read_names_are_one_sentence(tmp_path):
    with pytest.raises(InputError, match="only 'shape-texture' is known"):
        load_images(f"folder:{tmp_path}?names=texture-shape")


@pytest.mark.parametrize("source", ["", "folder:", "coco:", "parquet:"])
def test_what_is_too_long_for_a_name(source: str) -> None:
    with pytest.raises(InputError):
        load_images(source + "a" * 5000)
