"""Parquet as Hugging Face writes it, and as others do."""

import errno
import json
import os
import pickle
import resource
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
    original = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda *a, **k: reads.extend(k["row_groups"]) or original(*a, **k)
    )
    for start in range(0, 40, 8):
        images.source.read(np.random.default_rng(start).permutation(40)[:8].tolist())
    assert sorted(reads) == [0, 1]


MB = 10**6
ONCE = {"compression": "zstd"}  # the dictionary holds each value once


POOLS = []  # as long as the process lives, as may what was allocated there


@pytest.fixture
def memory():
    """What Arrow takes at most, from the first time that it is asked."""
    usual, own = pa.default_memory_pool(), []

    def most():
        if not own:
            own.append(pa.proxy_memory_pool(usual))
            POOLS.extend(own)
            pa.set_memory_pool(own[0])
        return own[0].max_memory() or 0

    yield most
    pa.set_memory_pool(usual)


@pytest.mark.parametrize("struct", [False, True])
@pytest.mark.parametrize("options", [{}, ONCE, {"compression": "zstd", "use_dictionary": False}])
def test_a_value_in_every_row_does_not_take_memory_for_every_row(tmp_path, memory, monkeypatch, struct, options):
    monkeypatch.setattr(parquet, "KEEP", 16 * MB)
    chunk = bytes(MB)
    cells = pa.array([chunk] if options.get("use_dictionary", True) else [b"%d" % i + chunk for i in range(2)])
    cells = cells.take(pa.array(np.arange(150) % len(cells)))
    if struct:
        cells = pa.StructArray.from_arrays([cells, pa.nulls(len(cells), pa.string())], ["bytes", "path"])
    pq.write_table(pa.table({"image": cells}), tmp_path / "a.parquet", **options)
    del cells
    assert (tmp_path / "a.parquet").stat().st_size < MB / 5
    images = load_images(f"parquet:{tmp_path / 'a.parquet'}")
    memory()
    items = images.source.read(range(150))
    assert {item.error for item in items} == {items[0].error}
    assert "takes more than 16.0 MB of memory and " in items[0].error
    assert memory() < 30 * MB


def test_a_label_in_every_row_does_not_either(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(parquet, "KEEP", 16 * MB)
    names = pa.array(["x" * MB]).take(pa.array(np.zeros(150, int)))
    pq.write_table(pa.table({"image": [png(1)] * 150, "label": names}), tmp_path / "a.parquet", **ONCE)
    del names
    memory()
    with pytest.raises(InputError, match=r"a.parquet holds no labels: the column 'label' takes more than 16.0 MB"):
        load_images(f"parquet:{tmp_path / 'a.parquet'}")
    assert memory() < 30 * MB


def test_a_row_group_of_images_may_be_larger_than_what_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "KEEP", 1000)
    noise = [np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8) for i in range(40)]
    cells = []
    for pixels in noise:
        stream = BytesIO()
        Image.fromarray(pixels).save(stream, "bmp")
        cells.append(stream.getvalue())
    pq.write_table(pa.table({"image": cells}), tmp_path / "a.parquet")
    images = load_images(f"parquet:{tmp_path / 'a.parquet'}")
    items = images.source.read(range(40))
    assert all(np.array_equal(item.image, pixels) for item, pixels in zip(items, noise, strict=True))


def test_more_files_than_file_descriptors(tmp_path):
    for number in range(30):
        pq.write_table(struct_table([number] * 4, [0, 1] * 2), tmp_path / f"{number:02d}.parquet")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, limits[1]))
    try:
        assert reds(load_images(f"parquet:{tmp_path}")) == [n for n in range(30) for _ in range(4)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_few_file_descriptors_do_not_make_a_file_unreadable(tmp_path, monkeypatch):
    pq.write_table(struct_table([1] * 4, [0, 1] * 2), tmp_path / "a.parquet")
    images = load_images(f"parquet:{tmp_path}")

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(pq, "ParquetFile", refuse)
    for read in (lambda: load_images(f"parquet:{tmp_path}"), lambda: images.source.read([0])):
        with pytest.raises(InputError, match="Too many files are open"):
            read()


def test_paths_stay_in_the_folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(png(7))
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(tmp_path / "data" / "pipe.png")
    paths = ["link.png", "../secret.png", str(tmp_path / "secret.png"), "pipe.png", "no.png"]
    pq.write_table(pa.table({"image": [{"bytes": None, "path": p} for p in paths]}), tmp_path / "data" / "a.parquet")
    images = load_images(f"parquet:{tmp_path / 'data'}")
    assert reds(images) == [7, None, None, None, None]
    assert [item.error for item in images.source.read([1, 2, 3, 4])] == [
        "its path '../secret.png' leads out of the folder of its data set",
        f"its path {paths[2]!r} leads out of the folder of its data set",
        "it is a pipe or a device, not a file",
        "the row has no image",
    ]


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
