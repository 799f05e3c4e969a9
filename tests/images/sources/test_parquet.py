"""Parquet as Hugging Face writes it, and as others do."""

import json
import pickle
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sightline.core.errors import InputError
from sightline.images.loading import load_images
from sightline.images.sources import parquet


def png(value):
    stream = BytesIO()
    Image.new("RGB", (4, 4), (value, 0, 0)).save(stream, "png")
    return stream.getvalue()


def struct_table(values, labels=None, names=None, **columns):
    data = {"image": [{"bytes": png(v), "path": None} for v in values], "label": labels, **columns}
    table = pa.table({name: column for name, column in data.items() if column is not None})
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    return table


def reds(images, indices=None):
    items = images.source.read(range(len(images.ids)) if indices is None else indices)
    return [None if item.image is None else int(item.image[0, 0, 0]) for item in items]


def test_hugging_face_layout_with_names_and_splits(tmp_path):
    pq.write_table(struct_table([1, 2, 3], [0, 2, 1], ["a", "b", "c"]), tmp_path / "train-00000-of-00002.parquet")
    pq.write_table(struct_table([4, 5], [0, -1], ["a", "b", "c"]), tmp_path / "train-00001-of-00002.parquet")
    pq.write_table(struct_table([6, 7], [1, 1], ["a", "b", "c"]), tmp_path / "test-00000-of-00001.parquet")
    images = load_images(f"parquet:{tmp_path}")
    assert images.classes == ("a", "b", "c")
    by_id = dict(zip(images.ids.tolist(), zip(reds(images), images.labels.tolist(), strict=True), strict=True))
    assert by_id["train-00000-of-00002/000001"] == (2, 2)
    assert by_id["train-00001-of-00002/000001"] == (5, -1)
    assert {name: len(where) for name, where in images.splits.items()} == {"train": 5, "test": 2}
    assert sorted(reds(images, images.indices("test").tolist())) == [6, 7]


def test_a_number_means_what_its_own_file_says(tmp_path):
    pq.write_table(struct_table([1, 2, 3], [0, 1, None], ["a", "b"]), tmp_path / "train.parquet")
    pq.write_table(struct_table([4, 5, 6], [0, 2, -1], ["b", "c", "a"]), tmp_path / "val.parquet")
    images = load_images(f"parquet:{tmp_path}")
    assert (images.classes, images.labels.tolist()) == (("a", "b", "c"), [0, 1, -1, 1, 0, -1])
    pq.write_table(struct_table([4], [3], ["b", "c", "a"]), tmp_path / "val.parquet")
    with pytest.raises(InputError, match=r"The label 3 of .*val.parquet is not one of its classes: b, c, a$"):
        load_images(f"parquet:{tmp_path}")
    pq.write_table(struct_table([7], [0], ["b", "c", "a"]), tmp_path / "val.parquet")
    pq.write_table(struct_table([7], [0]), tmp_path / "test.parquet")
    with pytest.raises(InputError, match=r"test.parquet has no names of classes.*; write names as labels"):
        load_images(f"parquet:{tmp_path}")


def test_rows_of_nothing_are_bounded_by_the_size_of_the_file(tmp_path):
    nothing = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.nulls(1_000_000, nothing)}), tmp_path / "many.parquet")
    with pytest.raises(InputError, match=r"many.parquet has 1,000,000 rows in [\d,]+ bytes, which cannot be an image"):
        load_images(f"parquet:{tmp_path / 'many.parquet'}")
    pq.write_table(pa.table({"image": pa.nulls(9_000, nothing)}), tmp_path / "few.parquet")
    assert (tmp_path / "few.parquet").stat().st_size < 9_000
    assert len(load_images(f"parquet:{tmp_path / 'few.parquet'}").ids) == 9_000


def test_binary_column_and_string_labels_in_one_file(tmp_path):
    table = pa.table({"pic": [png(v) for v in range(6)], "kind": ["x", "y"] * 3, "note": ["n"] * 6})
    pq.write_table(table, tmp_path / "all.parquet")
    images = load_images(f"parquet:{tmp_path / 'all.parquet'}?label=kind")
    assert (images.classes, images.labels.tolist(), images.own_splits) == (("x", "y"), [0, 1] * 3, False)
    assert reds(images) == [0, 1, 2, 3, 4, 5]
    assert load_images(f"parquet:{tmp_path / 'all.parquet'}").labels.tolist() == [-1] * 6


@pytest.mark.parametrize("about", ["3", "{}", '{"info": 3}', '{"info": {"features": 3}}', "[" * 100_000, "\udcff"])
def test_notes_of_another_form_are_left_aside(tmp_path, about):
    table = struct_table([1, 2, 3, 4], list("bcad"))
    table = table.replace_schema_metadata({"huggingface": about.encode("utf-8", "surrogateescape")})
    pq.write_table(table, tmp_path / "a.parquet")
    assert load_images(f"parquet:{tmp_path}").classes == ("a", "b", "c", "d")


def test_any_order_over_many_row_groups_with_a_small_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "KEEP", 1)
    pq.write_table(struct_table(range(50), [0] * 50), tmp_path / "a.parquet", row_group_size=7)
    images = load_images(f"parquet:{tmp_path}")
    order = np.random.default_rng(0).permutation(50).tolist()
    assert reds(images, order) == order
    assert len(images.source._kept) == 1  # type: ignore[attr-defined]
    assert reds(pickle.loads(pickle.dumps(images)), order) == order


def test_a_row_group_is_read_once_while_it_is_kept(tmp_path, monkeypatch):
    pq.write_table(struct_table(range(40), [0] * 40), tmp_path / "a.parquet", row_group_size=20)
    images = load_images(f"parquet:{tmp_path}")
    reads = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda *a, **k: reads.append(a[1]) or original(*a, **k))
    for start in range(0, 40, 8):
        images.source.read(np.random.default_rng(start).permutation(40)[:8].tolist())
    assert sorted(reads) == [0, 1]


def test_missing_and_broken_cells_are_items_without_image(tmp_path):
    (tmp_path / "beside.png").write_bytes(png(9))
    cells = [
        {"bytes": png(3), "path": "x"},
        {"bytes": b"junk", "path": "y"},
        None,
        {"bytes": None, "path": "beside.png"},
    ]
    pq.write_table(pa.table({"image": cells, "label": [0, 1, None, 1]}), tmp_path / "a.parquet")
    images = load_images(f"parquet:{tmp_path}")
    assert reds(images) == [3, None, None, 9]
    assert images.labels.tolist() == [0, 1, -1, 1]
    assert [item.error for item in images.source.read([1, 2])] == [
        "it is not an image of a format that is read (JPEG, PNG, BMP, GIF, WEBP, TIFF, PPM, AVIF, JPEG2000)",
        "the row has no image",
    ]


def test_a_file_that_vanishes_is_a_reason_not_a_crash(tmp_path):
    pq.write_table(struct_table(range(4), [0] * 4), tmp_path / "a.parquet")
    images = load_images(f"parquet:{tmp_path}")
    (tmp_path / "a.parquet").unlink()
    assert all("a.parquet cannot be read" in item.error for item in images.source.read([0, 3]))


def test_digest_follows_the_data(tmp_path):
    digests = []
    for values in (range(4), range(4), range(5, 9)):
        pq.write_table(struct_table(values, [0] * 4), tmp_path / "a.parquet")
        digests.append(load_images(f"parquet:{tmp_path}").digest())
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("?image=imag", "no column 'imag' of image bytes; did you mean 'image'"),
        ("?label=labl", "no column 'labl'; did you mean 'label'"),
        ("?label=image", "whole numbers or names"),
        ("?colour=x", "parquet has no option 'colour'"),
    ],
)
def test_columns_that_do_not_exist(tmp_path, options, message):
    pq.write_table(struct_table(range(4), [0] * 4), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=message):
        load_images(f"parquet:{tmp_path}{options}")


def test_a_file_without_the_column_of_images(tmp_path):
    table = struct_table(range(4), [0] * 4)
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.rename_columns(["picture", *table.column_names[1:]]), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b\.parquet has no column 'image', which other files have"):
        load_images(f"parquet:{tmp_path}")


def test_labels_beyond_the_class_names(tmp_path):
    pq.write_table(struct_table(range(4), [0, 1, 2, None], ["a", "b"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="The label 2 is not one of the classes: a, b"):
        load_images(f"parquet:{tmp_path}")


def test_what_is_no_parquet_of_images(tmp_path):
    with pytest.raises(InputError, match=r"no \.parquet files"):
        load_images(f"parquet:{tmp_path}")
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        load_images(f"parquet:{tmp_path}")
    pq.write_table(pa.table({"text": ["a"] * 4}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="no column of image bytes; its columns are text"):
        load_images(f"parquet:{tmp_path}")
    pq.write_table(pa.table({"imagé": [b""] * 4}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes().replace("é".encode(), b"\xe3("))
    with pytest.raises(InputError, match="not a readable Parquet file: 'utf-8' codec"):
        load_images(f"parquet:{tmp_path}")
