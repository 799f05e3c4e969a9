"""Data sets saved by the datasets library; nothing is downloaded."""

import builtins
import pickle

import numpy as np
import pytest
from PIL import Image

from sightline.core.errors import InputError
from sightline.images.loading import load_images

datasets = pytest.importorskip("datasets")


def table(values, labels, names=("x", "y")):
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    pictures = [Image.fromarray(np.full((4, 4, 3), v, np.uint8)) for v in values]
    return datasets.Dataset.from_dict({"img": pictures, "label": labels}, features=features)


@pytest.fixture
def saved(tmp_path):
    splits = {"train": table([1, 2, 3, 4], [0, 1, 0, 1]), "validation": table([5, 6, 7, 8], [1, 1, 0, 0])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    return tmp_path / "set"


def test_a_saved_data_set(saved):
    images = load_images(f"huggingface:{saved}")
    assert (images.classes, images.labels.tolist()) == (("x", "y"), [0, 1, 0, 1, 1, 1, 0, 0])
    assert {name: where.tolist() for name, where in images.splits.items()} == {
        "train": [0, 1, 2, 3],
        "val": [4, 5, 6, 7],
    }
    assert images.ids[5] == "validation/000001"
    source = pickle.loads(pickle.dumps(images.source))
    assert [int(item.image[0, 0, 0]) for item in source.read([6, 0, 3])] == [7, 1, 4]


def test_a_number_means_what_its_own_split_says(tmp_path):
    splits = {"train": table([1, 2], [0, 1]), "test": table([3, 4, 5], [0, 1, 2], ["y", "z", "x"])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    images = load_images(f"huggingface:{tmp_path / 'set'}")
    assert (images.classes, images.labels.tolist()) == (("x", "y", "z"), [0, 1, 1, 2, 0])


def test_paths_stay_in_the_folder_of_the_data_set(saved):
    images = load_images(f"huggingface:{saved}")
    for name in ("train/1.png", "../secret.png"):
        Image.new("RGB", (4, 4), (9, 9, 9)).save(saved / name)
    paths = [str(saved / "train" / "1.png"), "train/1.png", "../secret.png"]
    rows = [{"img": {"bytes": None, "path": path}} for path in paths]
    images.source.tables = [rows]  # type: ignore[attr-defined]
    first, second, third = images.source.read([0, 1, 2])
    assert first.image.tolist() == second.image.tolist()
    assert third.error == "its path '../secret.png' leads out of the folder of its data set"


def test_one_split_is_cut_in_half(saved):
    images = load_images(f"huggingface:{saved}?split=validation&image=img&label=label")
    assert (len(images.indices("train")), len(images.indices("test")), images.own_splits) == (2, 2, False)


def test_a_single_table(tmp_path):
    table([1, 2, 3, 4], [0, 1, 1, 0]).select([3, 2, 1, 0]).save_to_disk(tmp_path / "one")
    images = load_images(f"huggingface:{tmp_path / 'one'}")
    assert [int(item.image[0, 0, 0]) for item in images.source.read(range(4))] == [4, 3, 2, 1]
    assert images.labels.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("?split=tran", "no split 'tran'; did you mean 'train'"),
        ("?image=imgs", "no column 'imgs' of images; did you mean 'img'"),
        ("?label=lable", "no column 'lable'; did you mean 'label'"),
    ],
)
def test_names_that_do_not_exist(saved, options, message):
    with pytest.raises(InputError, match=message):
        load_images(f"huggingface:{saved}{options}")


def test_other_folders_and_names(tmp_path):
    with pytest.raises(InputError, match="did you mean 'folder:"):
        load_images(f"huggingface:{tmp_path}")
    with pytest.raises(InputError, match="not a name on the hub"):
        load_images("huggingface:/nowhere/at/all")


def test_without_the_library_there_is_a_hint(saved, monkeypatch):
    original = builtins.__import__

    def no_datasets(name, *rest):
        if name == "datasets":
            raise ModuleNotFoundError(name=name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_datasets)
    with pytest.raises(InputError, match=r"pip install 'sightline\[huggingface\]'"):
        load_images(f"huggingface:{saved}")
