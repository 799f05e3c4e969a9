"""`huggingface:ORG/NAME[?config=…&split=…&image=column&label=column]`: data sets of the Hugging Face hub.

A hub name is downloaded by the `datasets` library (and kept in its cache); a local folder written by `save_to_disk` is
opened in place. With `split`, only that split is taken, and cut in half.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sightline.core.errors import InputError, first_line, nearest
from sightline.core.extras import explaining
from sightline.images.decoding import OUTSIDE, decode, inside
from sightline.images.loading import read_options
from sightline.images.sets import Images, Item, by_name, halves, split_name
from sightline.images.sources.arrays import encode_parts
from sightline.images.sources.parquet import LABEL_NAMES


class Tables:
    """Decodes images from the splits of a data set, one after the other."""

    def __init__(self, tables: Sequence[Any], column: str, folder: Path | None = None) -> None:
        self.tables, self.column = list(tables), column
        self.folder = folder  # of a data set on this disk; its files must lie in there
        self.starts = np.cumsum([0, *map(len, tables)])

    def read(self, indices: Sequence[int]) -> list[Item]:
        return [self._read(index, int(np.searchsorted(self.starts, index, side="right")) - 1) for index in indices]

    def _read(self, index: int, table: int) -> Item:
        cell = self.tables[table][index - int(self.starts[table])][self.column] or {}
        if cell.get("bytes"):
            return decode(cell["bytes"])
        if not cell.get("path"):
            return Item(None, "the row has no image")
        if self.folder is not None and not inside(self.folder, cell["path"]):
            return Item(None, OUTSIDE.format(cell["path"]))
        return decode((self.folder or Path()) / cell["path"])


def load(where: str, options: Mapping[str, str]) -> Images:
    """A data set of the hub, or a folder written by `save_to_disk`."""
    with explaining():
        import datasets
    chosen = read_options("huggingface", options, {"config": "", "split": "", "image": "", "label": ""})
    tables, folder = _open(datasets, where, chosen["config"]), Path(where).expanduser().absolute()
    if chosen["split"]:
        if chosen["split"] not in tables:
            raise InputError(f"{where} has no split {chosen['split']!r}{nearest(chosen['split'], tables)}")
        tables = {chosen["split"]: tables[chosen["split"]]}
    features = next(iter(tables.values())).features
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    image = _column(where, chosen["image"], images, "of images")
    named = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    fit = [*named, *(name for name in LABEL_NAMES if name in features and name not in named)]
    label = _column(where, chosen["label"], list(features), "") if chosen["label"] else next(iter(fit), None)
    values = {name: _labels(table, label) for name, table in tables.items()}
    ids = np.array([f"{name}/{row:06d}" for name, table in tables.items() for row in range(len(table))], str)
    names = [split_name(name) or name for name, table in tables.items() for _ in range(len(table))]
    known = {name: getattr(table.features.get(label), "names", None) for name, table in tables.items()}
    labels, classes = encode_parts(values, known)
    undecoded = [table.cast_column(image, datasets.Image(decode=False)) for table in tables.values()]
    return Images(
        name=f"huggingface:{where}",
        source=Tables(
            [table.select_columns([image]) for table in undecoded], image, folder if folder.is_dir() else None
        ),
        ids=ids,
        labels=labels,
        classes=classes,
        splits=by_name(names) or halves(ids, labels),
        own_splits=bool(by_name(names)),
        fingerprint=" ".join(table._fingerprint for table in tables.values()),
    )


def _open(datasets: Any, where: str, config: str) -> dict[str, Any]:
    """Split name -> table."""
    path = Path(where).expanduser()
    if not path.exists() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", where):
        raise InputError(f"There is no folder {where!r}, and it is not a name on the hub, such as huggingface:ORG/NAME")
    if path.is_dir() and not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise InputError(
            f"{where!r} was not written by save_to_disk; did you mean 'folder:{where}' or 'parquet:{where}'?"
        )
    try:
        opened = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(where, config or None)
    except Exception as error:  # whatever the network, the hub or the data set's files lead to
        raise InputError(f"The images {where!r} cannot be loaded: {first_line(error)}") from error
    return dict(opened) if isinstance(opened, dict) else {"all": opened}


def _labels(table: Any, label: str | None) -> list[Any]:
    return list(table.select_columns([label])[:][label]) if label else [-1] * len(table)


def _column(where: str, wanted: str, fit: Sequence[str], kind: str) -> str:
    if wanted and wanted not in fit:
        raise InputError(f"{where} has no column {wanted!r} {kind}".rstrip() + nearest(wanted, fit))
    if not fit:
        raise InputError(f"{where} has no column {kind}")
    return wanted or fit[0]
