"""Input of every kind, changed at random: what a case of `fuzz.py` tries, from its kind and a random number."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import random
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
import torch
from PIL import Image
from safetensors.torch import save_file

import sightline as sl
from sightline.cli import main as command_line
from sightline.cli.compare import chosen_analyses
from sightline.core.errors import InputError
from sightline.core.settings import parse_settings
from sightline.encoders.files.inspect import describe, inspect
from sightline.encoders.files.reading import read_checkpoint, tensors
from sightline.encoders.sites import select
from sightline.images.loading import load_images
from sightline.studies.study import make_study
from sightline.training.backbones import build
from sightline.training.recipe import FOLDER, make_recipe, read_recipe

VIT = "timm:vit_tiny_patch16_224@random?size=32&patch_size=8&depth=1&embed_dim=24&num_heads=2"
IMAGES = "shapes?size=32&train=16&val=0&test=16"
ODD = ["", "\0", "\x1b[2J", "é", "\u202e", "\udcff", "\n", "9" * 12, "a" * 5000, "[" * 3000]
ODD += [*"?&=@:*%[{\"'\\0", "../", "/", "**", "-1", "inf", "nan", "1e999", "None", "true", "<b>", "$(id)"]
VALUES: list[Any] = [None, True, -1, 0, 3, 0.5, float("inf"), float("nan"), "", "text", [], {}, [1, "a"], {"a": 1}]
Case = Callable[[random.Random, Path], None]


# How things are changed


def changed_text(chance: random.Random, text: str) -> str:
    """Some letters gone, doubled, or replaced by something odd."""
    for _ in range(chance.randint(1, 3)):
        at, to = sorted(chance.randint(0, len(text)) for _ in range(2))
        what = chance.choice(
            ["", chance.choice(ODD), text[at:to] * chance.randint(2, 5), chr(chance.randint(0, 0x2FFF))]
        )
        text = text[:at] + what + text[to if chance.random() < 0.5 else at :]
    return text


def changed_bytes(chance: random.Random, content: bytes) -> bytes:
    """Some bytes replaced, or the end cut off."""
    data = bytearray(content)
    if chance.random() < 0.25:
        del data[chance.randrange(len(data)) :]
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(min(len(data), 2000)) if data else 0
        data[at : at + chance.choice((0, 1, 1, 1, 4))] = chance.randbytes(chance.choice((0, 1, 1, 4)))
    return bytes(data)


def changed_json(chance: random.Random, value: Any) -> Any:
    """One part missing, or of another kind."""
    value = copy.deepcopy(value)
    part, key, whole = None, None, {"": value}
    here: Any = whole
    while isinstance(here, (dict, list)) and here and (part is None or chance.random() < 0.8):
        part, key = here, chance.choice(list(here) if isinstance(here, dict) else range(len(here)))
        here = here[key]
    assert part is not None
    if chance.random() < 0.3:
        del part[key]
    else:
        part[key] = chance.choice(VALUES)
    return whole.get("")


# What is tried


def encoder_reference(chance: random.Random, _: Path) -> None:
    """A reference to an encoder."""
    sl.load_encoder(changed_text(chance, chance.choice([VIT, "zoo:mae", "torchvision:resnet18@random", "run:runs/x"])))


def image_reference(chance: random.Random, _: Path) -> None:
    """A reference to images."""
    known = [IMAGES, "shapes:conflict?size=32", "folder:/data/val?names=shape-texture", "coco:a.json", "parquet:a"]
    load_images(changed_text(chance, chance.choice(known)), limit=16)


def setting(chance: random.Random, _: Path) -> None:
    """A setting of an analysis, and the pass with it."""
    words = [
        "knn.k=5",
        "knn.temperature=0.07",
        "attention.viewer_images=2",
        "fourier.images=8",
        'cka.tokens=["all"]',
        "spectra.centred=false",
        "cka.unbiased=true",
    ]
    word = chance.choice(words)
    key, _, value = word.partition("=")
    value = chance.choice([changed_text(chance, value), str(chance.choice(VALUES)), json.dumps(chance.choice(VALUES))])
    _, chosen = chosen_analyses(None, (), parse_settings([f"{key}={value}"]))
    sl.analyze(VIT, IMAGES, chosen, batch=8, workers=0, show_progress=False)


def pattern(chance: random.Random, _: Path) -> None:
    """A pattern of sites."""
    sites = [f"block.{i}{part}" for i in range(12) for part in ("", ".qkv", ".attn_map", ".mlp")]
    text = "".join(chance.choice(["*", "**", "?", ".", "block", "a", "[", "(", "+", "qkv", "1"]) for _ in range(40))
    select(sites, [changed_text(chance, chance.choice([text, "block.*", "**.qkv"]))])


def recipe(chance: random.Random, folder: Path) -> None:
    """A recipe, changed as text or in one value, up to the encoder that it builds."""
    name = chance.choice(["mae", "moco_v3", "dino", "hybrid", "supervised"])
    text = (FOLDER / f"{name}.toml").read_text()
    if chance.random() < 0.6:
        (folder / "recipe.toml").write_text(changed_text(chance, text), "utf-8", "surrogateescape")
        values = read_recipe(folder / "recipe.toml")
    else:
        values = read_recipe(name)
        values[chance.choice(list(values))] = chance.choice(VALUES)
    build(make_recipe(str(values.get("objective", name)), values).backbone)


def arrays(chance: random.Random, _: Path) -> None:
    """Pixels, labels and splits from Python."""
    shape = chance.choice([(8, 9, 9, 3), (8, 3, 9, 9), (8, 9, 9), (8, 9), (0, 9, 9, 3), (8, 0, 9, 3), (8,)])
    pixels: Any = np.zeros(shape, chance.choice([np.uint8, np.float32, np.int64, object, "U3", bool]))
    given: dict[str, Any] = {"labels": list("abababab"), "limit": 4, "seed": 0, "splits": {"train": [0, 1, 2, 3]}}
    for _ in range(chance.randint(0, 2)):
        given[chance.choice([*given, "classes", "ids"])] = chance.choice([*VALUES, [1] * 8, np.zeros((8, 2)), object()])
    load_images(chance.choice([pixels, pixels.tolist(), torch.zeros(8, 3, 9, 9)]), **given)


def checkpoint(chance: random.Random, folder: Path) -> None:
    """A file of weights, of every format and protocol."""
    path = folder / "file.pth"
    state = {"norm.weight": torch.arange(6.0), "qkv.weight": torch.arange(12.0).view(3, 4)}
    content = {
        "model": state,
        "args": argparse.Namespace(lr=0.1, size=(3, 4)),
        "best": np.float64(1),
        "a": np.arange(3),
    }
    kind = chance.choice(["safetensors", "pickle", "old", "new", "inside", "inside"])
    if kind == "safetensors":
        save_file(state, path, metadata={"format": "pt"})
    elif kind == "pickle":
        plain = {name: value.numpy() for name, value in state.items()}
        path.write_bytes(pickle.dumps(content | {"model": plain}, chance.randint(0, 5)))
    else:
        torch.save(content, path, pickle_protocol=chance.randint(1, 5), _use_new_zipfile_serialization=kind != "old")
    if kind == "inside":  # the sums of the archive are right
        with zipfile.ZipFile(path) as whole:
            parts = {name: whole.read(name) for name in whole.namelist()}
        with zipfile.ZipFile(path, "w") as whole:
            for name, data in parts.items():
                whole.writestr(name, changed_bytes(chance, data) if name.endswith("data.pkl") else data)
    else:
        path.write_bytes(changed_bytes(chance, path.read_bytes()))
    found = read_checkpoint(path)
    for value in tensors(found.content, *(["model"] if "model" in found.content else [])).values():
        value.float().sum()  # what is read lies within the file
    describe(inspect(path))


def image_file(chance: random.Random, folder: Path) -> None:
    """Image files, some of which are damaged."""
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 24, 3), np.uint8)
        kind, stream = chance.choice(["JPEG", "PNG", "TIFF", "BMP", "GIF", "WEBP"]), io.BytesIO()
        Image.fromarray(pixels).save(stream, kind)
        data = stream.getvalue() if number % 2 else changed_bytes(chance, stream.getvalue())
        (folder / f"{number}.{kind.lower()}").write_bytes(data)
    images = load_images(f"folder:{folder}")
    images.source.read(list(range(len(images.ids))))


def coco(chance: random.Random, folder: Path) -> None:
    """Annotations in COCO's format."""
    for number in range(4):
        Image.new("RGB", (20, 24)).save(folder / f"{number}.png")
    about: dict[str, Any] = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 20, "height": 24} for i in range(4)],
        "annotations": [
            {
                "id": i,
                "image_id": i % 4,
                "category_id": 1,
                "bbox": [1, 2, 5, 6],
                "area": 30,
                "iscrowd": 0,
                "segmentation": [[1, 2, 6, 2, 6, 8]] if i % 2 else {"size": [24, 20], "counts": [24, 24, 432]},
            }
            for i in range(6)
        ],
        "categories": [{"id": 1, "name": "cat"}],
    }
    text = json.dumps(changed_json(chance, changed_json(chance, about)))
    (folder / "a.json").write_text(
        changed_text(chance, text) if chance.random() < 0.3 else text, errors="surrogateescape"
    )
    images = load_images(f"coco:{folder / 'a.json'}?images={folder}")
    images.targets(range(len(images.ids)))


def parquet(chance: random.Random, folder: Path) -> None:
    """Parquet files: damaged, or of other columns, types, names and splits."""
    images: list[Any] = [_encoded(chance, "PNG", number) for number in range(6)]
    labels: list[Any] = [number % 2 for number in range(6)]
    if chance.random() < 0.5:
        images[chance.randrange(6)] = None if chance.random() < 0.3 else changed_bytes(chance, images[0])
    if chance.random() < 0.5:
        labels = [chance.choice([None, -1, 2**40, 0]) for _ in range(6)]
    columns: dict[str, Any] = {
        chance.choice(["image", "img", "\x1b[2J"]): chance.choice(
            [images, [{"bytes": data, "path": "a.png"} for data in images], ["a"] * 6, list(range(6)), [[1.0]] * 6]
        ),
        chance.choice(["label", "labels", "class", "x"]): chance.choice(
            [labels, list("ababab"), [None] * 6, [0.5] * 6, [float("nan")] * 6, [[1]] * 6, images]
        ),
    }
    table = pa.table(columns)
    if chance.random() < 0.3:  # what Hugging Face writes beside it
        about = {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
        text = json.dumps(changed_json(chance, about))
        table = table.replace_schema_metadata({"huggingface": changed_text(chance, text).encode("utf-8", "replace")})
    for name in chance.choice([["train.parquet"], ["train.parquet", "test-00000-of-00002.parquet"]]):
        pq.write_table(table, folder / name, row_group_size=chance.choice([1, 3, 6]))
    if chance.random() < 0.6:
        path = folder / "train.parquet"
        data = bytearray(path.read_bytes())
        for _ in range(chance.randint(1, 6)):  # what is in it is said at its end
            data[-chance.randint(1, min(len(data), 1500))] = chance.randrange(256)
        path.write_bytes(data if chance.random() < 0.5 else changed_bytes(chance, bytes(data)))
    found = load_images(f"parquet:{folder}{chance.choice(['', '', '?label=x', '?image=img&label=class'])}")
    found.source.read(list(range(len(found.ids))))


def _encoded(chance: random.Random, kind: str, number: int, size: tuple[int, int] = (20, 24)) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def masks(chance: random.Random, folder: Path) -> None:
    """Images with a class for every pixel: damaged masks, other sizes, colours and numbers, odd names of classes."""
    for part in ("images", "masks"):
        (folder / part / "train").mkdir(parents=True)
    odd = chance.randrange(6)  # one mask at most, or the names
    for number in range(4):
        (folder / "images/train" / f"{number}.png").write_bytes(_encoded(chance, "PNG", number))
        shape = chance.choice([(20, 24), (20, 24), (24, 20), (1, 1)]) if number == odd else (20, 24)
        top, kind = chance.choice([(3, np.uint8), (256, np.uint8), (3, np.uint16), (3, np.int32), (3, np.float32)])
        values = np.random.default_rng(number).integers(0, top if number == odd else 3, shape)
        mask: Any = Image.fromarray(values.astype(kind if number == odd else np.uint8))
        if number == odd and mask.mode == "L":
            mask = mask.convert(chance.choice(["L", "P", "RGB", "1", "RGBA"]))
        stream = io.BytesIO()
        mask.save(stream, "TIFF" if mask.mode in "FI" else "PNG")
        data = stream.getvalue()
        data = changed_bytes(chance, data) if number == odd and chance.random() < 0.5 else data
        (folder / "masks/train" / f"{number}.png").write_bytes(data)
    names = changed_text(chance, "cat\ndog\n") if odd == 4 else "cat\ndog\n"
    if odd < 5:
        (folder / "classes.txt").write_bytes(names.encode("utf-8", "surrogateescape"))
    options = chance.choice(["", "?classes=2", "?zero=class", "?zero=ignored&ignored=2", "?classes=300"])
    images = load_images(f"masks:{folder}{changed_text(chance, options) if chance.random() < 0.3 else options}")
    images.source.read(list(range(len(images.ids))))
    images.targets(range(len(images.ids)))


STUDY = f"""
title = "Does fine-tuning change it?"
images = "{IMAGES}"
findings = ["S15", "P3"]
[matrix]
seed = [0, 1]
[step.mae]
command = "pretrain mae"
set = {{ seed = "{{seed}}", epochs = 1, batch = 8, size = 32, patch = 8, depth = 1, width = 24, heads = 2 }}
[step.tuned]
command = "finetune step:mae"
set = {{ seed = "{{seed}}", epochs = 1, batch = 8 }}
[step.cka]
command = "compare step:mae step:tuned other={VIT}"
only = ["knn"]
batch = 8
set = {{ "knn.k" = 3 }}
[role]
mae = {{ family = "reconstruction", method = "mae", seed = "{{seed}}" }}
tuned = {{ family = "reconstruction", method = "mae", tuned_from = "mae", seed = "{{seed}}" }}
"""


def study_file(chance: random.Random, folder: Path) -> None:
    """A study as a file, changed as text or in one value, up to its plan."""
    text = STUDY
    if chance.random() < 0.4:
        text = changed_text(chance, text)
    else:
        about: Any = tomllib.loads(text)
        for _ in range(chance.randint(1, 2)):
            about = changed_json(chance, about)
        with contextlib.suppress(TypeError, AttributeError):  # what TOML cannot say
            text = tomli_w.dumps(about)
    (folder / "study.toml").write_text(text, "utf-8", "surrogateescape")
    make_study(str(folder / "study.toml"), out=folder / "study")


def command(chance: random.Random, folder: Path) -> None:
    """The words of a command line."""
    run = str(MADE / "compare")
    known = [
        ["list", "encoders"],
        ["list", "sites", VIT],
        ["list", "findings"],
        ["inspect", run],
        ["export", run, "-o", "x"],
        ["contrast", run, "knn.accuracy", "--this", "encoder=a", "--that", "encoder=a"],
        ["figure", "001 Fig 1b", run],
        ["compare", VIT, "--images", IMAGES, "--only", "knn", "--limit", "4", "--batch", "4", "--workers", "0"],
        ["pretrain", "mae", "--images", IMAGES, "--set", "epochs=0"],
        ["study", "papers", "--steps", "x"],
        ["imagine", run, "a.png"],
    ]
    words = list(chance.choice(known))
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(words))
        word = changed_text(chance, words[at]).replace("\0", "0")  # which no command line can have
        words[at] = f".{word}" if word.startswith("/") and not word.startswith(str(MADE)) else word
        if chance.random() < 0.2:
            del words[at]
        if not words or chance.random() < 0.2:
            words.insert(at, chance.choice(["--set", "--only", "--limit", "-o", "--help", *ODD[2:]]))
    os.environ["COLUMNS"] = "80"
    sys.argv, said = ["sightline", *words], io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            command_line()
    except SystemExit as stop:
        if stop.code == 2:
            raise InputError(said.getvalue()) from stop
        if stop.code not in (0, None):
            raise AssertionError(f"exit status {stop.code} of {words}: {said.getvalue()[-500:]}") from stop


KINDS: dict[str, Case] = {
    "arrays": arrays,
    "command": command,
    "checkpoint": checkpoint,
    "coco": coco,
    "encoder": encoder_reference,
    "image": image_file,
    "images": image_reference,
    "masks": masks,
    "parquet": parquet,
    "pattern": pattern,
    "recipe": recipe,
    "setting": setting,
    "study": study_file,
}
MADE = Path(tempfile.mkdtemp(prefix="fuzz-made-"))


def make() -> None:
    """The run that words of command lines are about."""
    sl.analyze({"a": VIT}, IMAGES, ["knn"], batch=8, workers=0, show_progress=False, out=MADE / "compare")
