#!/usr/bin/env python
"""Every number of all analyses and of a tiny training of each kind, kept to prove that a change leaves them the same.

    scripts/fixture.py make before                             # some minutes on one core; then change the code
    scripts/fixture.py make after
    scripts/fixture.py compare before after                    # exits with 1 unless all numbers are the same bit by bit
    scripts/fixture.py compare before after --without 'rcdm:reader*' --without-label judge=reader --tolerance 1e-6

`make` measures the sightline that Python imports, so PYTHONPATH chooses the tree; `--encoder mae=run:FOLDER` gives an
encoder by another reference, `--only analyses,detect` makes a part. It uses the public API alone and leaves out, with a
word, what a tree does not have. One thread computes everything: a sum has other bits with two.

FOLDER/knn.npz             a result: values/NAME arrays, dims/NAME their dimensions, labels/DIMENSION the coordinates
FOLDER/detect.metrics.npz  metrics.csv of the trainings, by training and column, without times
FOLDER/detect.weights.npz  of every tensor that the trainings have written, its SHA-256, sum and norm
FOLDER/about.json          versions, processor, seconds, and what was left out
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import json
import math
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
NAMES = ("supervised", "dino", "simclr", "moco_v3", "mae")
IMAGES, SCENES = "shapes?size=48", "shapes:scenes?size=96"
PACKAGES = ("diffusers", "numpy", "scikit-learn", "scipy", "sightline", "timm", "torch", "torchvision", "xarray")
TIMES = re.compile(r"second|time|memory")  # columns of metrics.csv that differ from run to run
TRAINED = {"batch": 32, "warmup_epochs": 0, "log_every": 1, "evaluate_every": 1, "seed": 0}
SMALL = TRAINED | {"limit": 128, "epochs": 2}
KEPT = {"keep": 3, "save_epochs": True}  # the start and two epochs, in this tree or in earlier ones
DENSE = TRAINED | {"batch": 16, "evaluate_every": 0}
Arrays = dict[str, np.ndarray[Any, Any]]


# What is made


def make(folder: Path, references: Mapping[str, str], limit: int, only: Sequence[str]) -> None:
    """Compute everything, and store each result as soon as it is there."""
    if any(os.environ.get(name) != "1" for name in THREADS):  # which libraries read when they are imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **dict.fromkeys(THREADS, "1")})
    os.environ.pop("SIGHTLINE_CACHE", None)
    import torch

    torch.set_num_threads(1)
    about: dict[str, Any] = {"seconds": {}, "left_out": {}}
    if (folder / "about.json").is_file():
        if not only:
            raise SystemExit(f"{str(folder)!r} holds a fixture; choose another folder, or make parts anew with --only")
        about = json.loads((folder / "about.json").read_text())
    about |= {"limit": limit, "encoders": dict(references), **machine()}
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fixture-") as trainings:
        parts = parts_of(references, limit, Path(trainings))
        if unknown := set(only) - set(parts):
            raise SystemExit(f"There is no part {', '.join(sorted(unknown))}; the parts are {', '.join(parts)}")
        for name, part in parts.items():
            if only and name not in only:
                continue
            start = time.perf_counter()
            about["left_out"].pop(name, None)
            try:
                for label, arrays in part():
                    np.savez_compressed(folder / f"{label}.npz", **arrays)  # type: ignore[arg-type]
            except Exception as error:
                about["left_out"][name] = f"{type(error).__name__}: {error}"
                print(f"{name}: left out, {error}", file=sys.stderr)
            about["seconds"][name] = round(time.perf_counter() - start, 1)
            print(f"{name}: {about['seconds'][name]} s", flush=True)
            (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    print(f"{folder}: {len([*folder.glob('*.npz')])} files in {time.perf_counter() - began:.0f} s")


Part = Callable[[], Iterator[tuple[str, Arrays]]]


def parts_of(references: Mapping[str, str], limit: int, trainings: Path) -> dict[str, Part]:
    """What is made, by name; each gives arrays by the name of their file."""
    import sightline as sl

    two = {name: references[name] for name in ("moco_v3", "mae") if name in references} or dict(references)
    place: dict[str, Any] = {"device": "cpu", "workers": 0, "show_progress": False}
    tuned = trainings / "finetune"

    def analyses() -> Iterator[tuple[str, Arrays]]:
        images = sl.load_images(IMAGES, limit=limit, seed=0)
        run = sl.analyze(dict(references), images, "all", batch=32, seed=0, **place)
        for name in run:
            yield name, arrays_of(run[name])

    def epochs() -> Iterator[tuple[str, Arrays]]:
        if not tuned.is_dir():
            yield from parts["finetune"]()
        try:
            encoders = {f"epoch {number}": sl.load_encoder(f"run:{tuned}?step={4 * number}") for number in range(3)}
        except sl.InputError:  # an earlier form of the same
            encoders = {f"epoch {number}": sl.load_encoder(f"run:{tuned}?epoch={number}") for number in range(3)}
        run = sl.analyze(encoders, sl.load_images(IMAGES, limit=64, seed=0), ["dynamics"], seed=0, **place)
        for name in run:
            yield name, arrays_of(run[name])

    def training(name: str, train: Callable[..., Any], *given: Any, **more: Any) -> Iterator[tuple[str, Arrays]]:
        out = trainings / name
        run = accepted(train, *given, out, **more, **place)
        if isinstance(run, Mapping):
            for one in run:
                yield name if len(run) == 1 else f"{name}.{one}", arrays_of(run[one])
        yield f"{name}.metrics", metrics_of(out)
        yield f"{name}.weights", weights_of(out)

    small = SMALL | {"depth": 4}
    drawn = {"samples": 2, "sources": 4, "compared": 16}
    parts: dict[str, Part] = {"analyses": analyses} | {
        name: functools.partial(training, name, *what, **more)
        for name, what, more in (
            ("pretrain_mae", (sl.pretrain, "mae", IMAGES), {"settings": small}),
            ("pretrain_dino", (sl.pretrain, "dino", IMAGES), {"settings": small}),
            ("finetune", (sl.finetune, two["moco_v3"], IMAGES), {"settings": SMALL | KEPT}),
            ("detect", (sl.detect, two, SCENES), {"settings": DENSE | {"limit": 96, "epochs": 12}}),
            ("segment", (sl.segment, two, SCENES), {"settings": DENSE | {"limit": 128, "epochs": 3}}),
            ("reinit", (sl.reinit, two, IMAGES), {"counts": [1, 3], "settings": SMALL}),
            ("rcdm", (sl.rcdm, two, IMAGES), {"settings": SMALL, **drawn}),
        )
    }
    return parts | {"epochs": epochs}


def accepted(call: Callable[..., Any], *given: Any, settings: Mapping[str, Any], **more: Any) -> Any:
    """Call with what this tree knows of the settings and arguments; the others are left out, with a word."""
    import sightline as sl

    while True:
        try:
            return call(*given, settings=settings, **more)
        except (TypeError, sl.InputError) as error:
            unknown = re.search(r"no setting '(\w+)'|unexpected keyword argument '(\w+)'", str(error))
            name = (unknown[1] or unknown[2]) if unknown else ""
            if name not in {*settings, *more}:
                raise
            print(f"{call.__name__}: without {name}, which it does not know", file=sys.stderr)
            settings = {key: value for key, value in settings.items() if key != name}
            more.pop(name, None)


def machine() -> dict[str, Any]:
    """What decides the bits besides the code."""
    import torch

    import sightline

    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"model name\s*: (.*)", cpu)
    return {
        "tree": str(Path(sightline.__file__).parent),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
    }


def arrays_of(dataset: Any) -> Arrays:
    """An `xarray.Dataset` as plain arrays; numbers among its attributes, too."""
    arrays: Arrays = {}
    for name, variable in dataset.variables.items():
        if name not in dataset.dims:
            arrays[f"values/{name}"] = plain(variable.values)
            arrays[f"dims/{name}"] = np.array([str(dim) for dim in variable.dims], str)
    for dim, size in dataset.sizes.items():
        labels = dataset[dim].values.tolist() if dim in dataset.variables else range(size)
        arrays[f"labels/{dim}"] = np.array([str(label) for label in labels], str)
    for name, value in dataset.attrs.items():
        if isinstance(value, (int, float, np.number)) or (isinstance(value, np.ndarray) and value.dtype.kind in "iuf"):
            arrays[f"values/attribute {name}"] = np.asarray(value)
            arrays[f"dims/attribute {name}"] = np.array([f"of {name}"] * np.ndim(value), str)
    return arrays


def plain(values: Any) -> np.ndarray[Any, Any]:
    """Numbers as they are, anything else as text."""
    return np.asarray(values) if np.asarray(values).dtype.kind in "biufc" else np.asarray(values).astype(str)


def metrics_of(out: Path) -> Arrays:
    """The numbers of each metrics.csv below a folder."""
    arrays: Arrays = {}
    for file in sorted(out.rglob("metrics.csv")):
        where = file.parent.relative_to(out).as_posix()
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        for column in rows[0] if rows else ():
            if not TIMES.search(column):
                name = column if where == "." else f"{where} {column}"
                arrays[f"values/{name}"] = np.array([float(row[column] or "nan") for row in rows])
                arrays[f"dims/{name}"] = np.array([f"row of {where}"], str)
    return arrays


def weights_of(out: Path) -> Arrays:
    """Every tensor in the safetensors files below a folder, by file and name; the number of a step is no part of it."""
    import torch
    from safetensors import safe_open

    names, hashes, sums, norms = [], [], [], []
    for file in sorted(out.rglob("*.safetensors")):
        where = re.sub(r"\bcheckpoints/\d{8}/", "", file.relative_to(out).as_posix())
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name).contiguous()
                names.append(f"{where}:{name}")
                hashes.append(hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest())
                sums.append(tensor.double().sum().item())
                norms.append(tensor.double().norm().item())
    columns = {"sha256": np.array(hashes, str), "sum": np.array(sums), "norm": np.array(norms)}
    arrays = {f"values/{name}": values for name, values in columns.items()}
    return arrays | {f"dims/{name}": np.array(["tensor"]) for name in columns} | {"labels/tensor": np.array(names, str)}


# What is compared


@dataclass(frozen=True)
class Row:
    """What there is to say about one variable."""

    result: str
    variable: str
    said: str
    distance: float  # 0: the same bits; inf: more than a difference between numbers

    @property
    def end(self) -> bool:
        """Whether it is an end of an interval."""
        return self.variable.endswith(("_low", "_high"))


def compare(before: Path, after: Path, without: Sequence[str], labels: Sequence[str]) -> Iterator[Row]:
    """Each variable of each result of either folder, without some, and without some labels of their dimensions."""
    for name in sorted({file.stem for folder in (before, after) for file in folder.glob("*.npz")}):
        if any(fnmatchcase(name, pattern) for pattern in without):
            continue
        sides = [lessen(read(folder / f"{name}.npz"), labels) for folder in (before, after)]
        if not all(sides):
            yield Row(name, "", f"missing in {'B' if sides[0] else 'A'}", math.inf)
            continue
        if name.endswith(".weights"):
            sides[1] = renamed(*sides)
        variables = dict.fromkeys(key[7:] for side in sides for key in side if key.startswith("values/"))
        for variable in variables:
            if not any(fnmatchcase(f"{name}:{variable}", pattern) for pattern in without):
                yield Row(name, variable, *difference(variable, *sides))


def read(file: Path) -> Arrays:
    """The arrays of a result, none where it is not there."""
    if not file.is_file():
        return {}
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def lessen(arrays: Arrays, labels: Sequence[str]) -> Arrays:
    """The arrays without labels, each DIMENSION=LABEL; a dimension of which one label is left goes as well."""
    for dim, label in (one.split("=", 1) for one in labels):
        if f"labels/{dim}" in arrays:
            stay = arrays[f"labels/{dim}"] != label
            for key in [key for key in arrays if key.startswith("values/")]:
                dims = arrays[f"dims/{key.removeprefix('values/')}"].tolist()
                if dim in dims:
                    axis = dims.index(dim)
                    arrays[key] = arrays[key].compress(stay, axis)
                    if stay.sum() == 1:
                        arrays[key] = arrays[key].squeeze(axis)
                        arrays[f"dims/{key.removeprefix('values/')}"] = np.array([*dims[:axis], *dims[axis + 1 :]], str)
            arrays[f"labels/{dim}"] = arrays[f"labels/{dim}"][stay]
    return arrays


def renamed(before: Arrays, after: Arrays) -> Arrays:
    """Tensors of the same bits in other files or by other names have those of before."""
    there = set(after["labels/tensor"].tolist())
    gone = {
        code: name
        for name, code in zip(before["labels/tensor"].tolist(), before["values/sha256"].tolist(), strict=True)
        if name not in there
    }
    known = set(before["labels/tensor"].tolist())
    now = [
        name if name in known else gone.pop(code, name)
        for name, code in zip(after["labels/tensor"].tolist(), after["values/sha256"].tolist(), strict=True)
    ]
    return after | {"labels/tensor": np.array(now, str)}


def difference(name: str, before: Arrays, after: Arrays) -> tuple[str, float]:
    """In words and as a number."""
    if f"values/{name}" not in before or f"values/{name}" not in after:
        return f"missing in {'A' if f'values/{name}' not in before else 'B'}", math.inf
    a, b = before[f"values/{name}"], after[f"values/{name}"]
    dims = [before[f"dims/{name}"].tolist(), after[f"dims/{name}"].tolist()]
    if sorted(dims[0]) != sorted(dims[1]) or len(set(dims[0])) < len(dims[0]):
        if dims[0] != dims[1]:
            return f"dimensions {dims[0]}, {dims[1]}", math.inf
    else:
        b = b.transpose([dims[1].index(dim) for dim in dims[0]])
    missing = []
    for axis, dim in enumerate(dims[0]):
        left, right = (
            side.get(f"labels/{dim}", np.arange(size).astype(str)).tolist()
            for side, size in ((before, a.shape[axis]), (after, b.shape[axis]))
        )
        if left == right:
            continue
        if len(set(left)) < len(left) or len(set(right)) < len(right):
            return f"other labels of {dim}", math.inf
        common = [label for label in left if label in set(right)]
        for side, labels in (("B", set(left) - set(right)), ("A", set(right) - set(left))):
            if labels:
                missing.append(f"{len(labels)} of {dim} missing in {side}, as {min(labels)}")
        a = a.take([left.index(label) for label in common], axis)
        b = b.take([right.index(label) for label in common], axis)
    said, distance = values_apart(a, b)
    return ("; ".join([said, *missing]), math.inf) if missing else (said, distance)


def values_apart(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[str, float]:
    """Two arrays of the same labels in the same order."""
    if "U" in (a.dtype.kind, b.dtype.kind):
        other = int((a.astype(str) != b.astype(str)).sum())
        return (f"{other} of {a.size} texts differ", math.inf) if other else ("equal", 0.0)
    if a.dtype.kind in "fc" or b.dtype.kind in "fc":
        holes = np.isnan(a) != np.isnan(b)
        if holes.any():
            return f"NaN pattern differs at {int(holes.sum())} of {holes.size}", math.inf
        a, b = a[~np.isnan(a)], b[~np.isnan(b)]
    if np.array_equal(a, b):
        return "equal", 0.0
    wide = complex if "c" in (a.dtype.kind, b.dtype.kind) else float
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a.astype(wide) - b.astype(wide)))
    largest = float(apart.max()) or math.ulp(0.0)  # integers that are the same as floats are not the same
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
    return f"largest difference {largest:.3g} (values up to {scale:.3g}, {int((apart > 0).sum())} differ)", largest


def show(rows: Sequence[Row], everything: bool) -> None:
    """The table: points first, ends of intervals after them; what is equal is counted, or listed as well."""
    for title, part in (
        ("Results", [row for row in rows if not row.end]),
        ("Ends of intervals", [row for row in rows if row.end]),
    ):
        listed = [row for row in part if everything or row.distance]
        print(f"{title}: {sum(not row.distance for row in part)} of {len(part)} variables are equal")
        widths = [max((len(text) for text in column), default=0) for column in zip(*map(cells, listed), strict=True)]
        for row in listed:
            print("  " + "  ".join(text.ljust(width) for text, width in zip(cells(row), widths, strict=True)).rstrip())


def cells(row: Row) -> tuple[str, str, str]:
    """A line of the table."""
    return row.result, row.variable, row.said


def warn_of_machines(before: Path, after: Path) -> None:
    """Other processors and versions may compute other bits."""
    abouts = [json.loads((folder / "about.json").read_text()) for folder in (before, after)]
    for key in ("limit", "encoders", "processor", "instructions", "versions", "left_out"):
        one, other = (about.get(key) for about in abouts)
        if key in ("encoders", "versions") and one and other:  # sightline's own version says which tree it is
            changed = sorted(name for name in {*one, *other} - {"sightline"} if one.get(name) != other.get(name))
            one, other = ({name: side.get(name) for name in changed} for side in (one, other))
        if one != other:
            print(f"Note: {key} is {one} in A, {other} in B")


def main() -> int:
    """Make or compare."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = words.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="compute and store everything")
    making.add_argument("folder", type=Path)
    making.add_argument("--encoder", action="append", default=[], metavar="NAME=REFERENCE", help="may be repeated")
    making.add_argument("--limit", type=int, default=256, help="images of each split for the analyses")
    making.add_argument("--only", help="parts, separated by commas")
    comparing = commands.add_parser("compare", help="a table of what differs; exits with 1 if anything does")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    comparing.add_argument("--tolerance", type=float, default=0.0, help="largest difference that counts as equal")
    comparing.add_argument("--interval-tolerance", type=float, help="that of ends of intervals; by default the same")
    comparing.add_argument("--without", action="append", default=[], metavar="RESULT[:VARIABLE]", help="may have a *")
    comparing.add_argument("--without-label", action="append", default=[], metavar="DIMENSION=LABEL")
    comparing.add_argument("--all", action="store_true", help="list what is equal, too")
    asked = words.parse_args()
    if asked.command == "make":
        given = dict(one.split("=", 1) for one in asked.encoder)
        references = {name: f"zoo:{name}" for name in NAMES} | given
        make(asked.folder, references, asked.limit, asked.only.split(",") if asked.only else [])
        return 0
    for folder in (asked.a, asked.b):
        if not (folder / "about.json").is_file():
            raise SystemExit(f"{str(folder)!r} is no fixture; make one with scripts/fixture.py make {folder}")
    warn_of_machines(asked.a, asked.b)
    rows = list(compare(asked.a, asked.b, asked.without, asked.without_label))
    show(rows, asked.all)
    ends = asked.tolerance if asked.interval_tolerance is None else asked.interval_tolerance
    apart = [row for row in rows if not row.distance <= (ends if row.end else asked.tolerance)]
    print(f"{len(apart)} of {len(rows)} differ by more than the tolerance" if apart else "All are equal")
    return 1 if apart or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
