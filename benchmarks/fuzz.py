"""Mutated input of every kind: a sentence or a right result each, never a traceback, a hang, a crash, or all memory.

    python benchmarks/fuzz.py [--cases 10000] [--kinds pattern,recipe] [--out runs/fuzz]
    python benchmarks/fuzz.py --kinds recipe --number 17        # one case again, with its traceback

A case follows from its kind and number alone. Each runs in a fork of this process, which may take 10 seconds of CPU
time and 2 GB more than the process has, and in a folder of its own, beside which nothing may appear. One line of
OUT/cases.jsonl is one case that was not right; OUT/done.json says how many were tried, and running the script again
goes on from there, so that it can run in the background for as long as there is time.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

import sightline as sl
from sightline.cli.arguments import chosen_analyses
from sightline.core.errors import InputError
from sightline.core.stopping import Stopped
from sightline.encoders.files.inspect import describe, inspect
from sightline.encoders.files.reading import read_checkpoint, tensors
from sightline.encoders.sites import select
from sightline.images.loading import load_images
from sightline.report.page import write_report
from sightline.training.backbones import build
from sightline.training.recipe import FOLDER, make_recipe, read_recipe

VIT = "timm:vit_tiny_patch16_224@random?size=32&patch_size=8&depth=1&embed_dim=24&num_heads=2"
IMAGES = "shapes?size=32&train=16&val=0&test=16"
TRAINING = {"epochs": 1, "batch": 8, "depth": 1, "width": 24, "heads": 2, "patch": 8, "size": 32, "save_minutes": 0}
SECONDS, MEMORY = 10, 2 * 2**30
ADDRESSES = {"run": 2**40}  # the renderer of figures reserves far more addresses than it uses
ODD = [
    "", "\0", "\x1b[2J", "../", "/", "?", "&", "=", "@", ":", "*", "**", "é", "\u202e", "\udcff", "9" * 400, "a" * 5000,
    "%", "[", "{", '"', "'", "\\", "\n", "-1", "inf", "nan", "1e999", "0", "None", "true", "[" * 3000, "<b>", "$(id)",
]  # fmt: skip
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    2**70,
    0.5,
    float("inf"),
    float("nan"),
    "",
    "text",
    [],
    {},
    [1, "a"],
    {"a": 1},
]
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


def changed_file(chance: random.Random, path: Path) -> None:
    """A file of a run, as JSON or as bytes."""
    if path.suffix == ".json" and chance.random() < 0.7:
        path.write_text(json.dumps(changed_json(chance, json.loads(path.read_text()))))
    else:
        path.write_bytes(changed_bytes(chance, path.read_bytes()))


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
    words = ["knn.k=5", "knn.temperature=0.07", "attention.viewer_images=2", "fourier.images=8", 'cka.tokens=["all"]',
             "spectra.centred=false", "cka.unbiased=true"]  # fmt: skip
    word = chance.choice(words)
    key, _, value = word.partition("=")
    value = chance.choice([changed_text(chance, value), str(chance.choice(VALUES)), json.dumps(chance.choice(VALUES))])
    _, chosen = chosen_analyses(None, None, [f"{key}={value}"])
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


def run_folder(chance: random.Random, folder: Path) -> None:
    """A run whose run.json or result is damaged, and its report."""
    shutil.copytree(MADE / "compare", folder / "run")
    files = [
        folder / "run" / name for name in ("run.json", "run.json", "run.json", "results/knn.nc", ".sightline.json")
    ]
    changed_file(chance, chance.choice(files))
    write_report(sl.open_run(folder / "run"))


def training_folder(chance: random.Random, folder: Path) -> None:
    """A training that stopped, one of whose files is damaged, and goes on."""
    shutil.copytree(MADE / "training", folder / "run")
    files = [
        p for p in (folder / "run").rglob("*") if p.is_file() and p.stat().st_size and "tensorboard" not in p.parts
    ]
    changed_file(chance, chance.choice(sorted(files)))
    train(folder / "run", resume=True)


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
    if chance.random() < 0.2:
        save_file(state, path, metadata={"format": "pt"})
    else:
        old, protocol = chance.random() < 0.4, chance.randint(1, 5)
        torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not old)
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
            {"id": i, "image_id": i % 4, "category_id": 1, "bbox": [1, 2, 5, 6], "area": 30, "iscrowd": 0,
             "segmentation": [[1, 2, 6, 2, 6, 8]] if i % 2 else {"size": [24, 20], "counts": [24, 24, 432]}}
            for i in range(6)
        ],
        "categories": [{"id": 1, "name": "cat"}],
    }  # fmt: skip
    text = json.dumps(changed_json(chance, changed_json(chance, about)))
    (folder / "a.json").write_text(
        changed_text(chance, text) if chance.random() < 0.3 else text, errors="surrogateescape"
    )
    images = load_images(f"coco:{folder / 'a.json'}?images={folder}")
    images.targets(range(len(images.ids)))


KINDS: dict[str, Case] = {
    "arrays": arrays,
    "checkpoint": checkpoint,
    "coco": coco,
    "encoder": encoder_reference,
    "image": image_file,
    "images": image_reference,
    "pattern": pattern,
    "recipe": recipe,
    "run": run_folder,
    "setting": setting,
    "training": training_folder,
}
MADE = Path(tempfile.mkdtemp(prefix="fuzz-made-"))


def make() -> None:
    """The run and the training that are damaged; reports are drawn in forks only, since drawing starts threads."""
    sl.analyze({"a": VIT}, IMAGES, ["knn"], batch=8, workers=0, show_progress=False, out=MADE / "compare")
    from sightline.training.loop import Loop

    told = Loop._told_to_stop
    Loop._told_to_stop = lambda loop: signal.SIGTERM  # type: ignore[method-assign]
    try:
        train(MADE / "training")
    except Stopped:
        pass
    finally:
        Loop._told_to_stop = told  # type: ignore[method-assign]


def train(folder: Path, **how: Any) -> None:
    """A training of two steps."""
    sl.pretrain("mae", IMAGES, folder, settings=TRAINING, workers=0, show_progress=False, **how)


# How it is tried


def outcome(kind: str, number: int, seen: bool = False) -> tuple[str, str]:
    """What comes of a case: a right result, a sentence, or what is wrong, and its last words."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
        child = os.fork()
        if not child:
            os.close(reader)
            _try(kind, number, Path(home), writer, seen)
        os.close(writer)
        with os.fdopen(reader) as stream:
            word, _, rest = stream.read().partition("\n")
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        hung = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM)
        return ("hang" if hung else f"crash by signal {os.WTERMSIG(status)}"), rest
    return word or f"exit status {os.waitstatus_to_exitcode(status)}", rest


def _try(kind: str, number: int, home: Path, writer: int, seen: bool) -> None:
    """In the fork; never comes back."""
    word, rest = "right", ""
    try:
        os.chdir(home)
        (home / "inside").mkdir()
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        signal.alarm(60 * SECONDS)  # where it only waits
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        room = used + ADDRESSES.get(kind, MEMORY)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        if not seen:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        KINDS[kind](random.Random(f"{kind} {number}"), home / "inside")
        if [path.name for path in home.iterdir()] != ["inside"]:
            word = "files elsewhere"
    except InputError as error:
        word, rest = "sentence", str(error)
    except MemoryError:
        word, rest = "memory", traceback.format_exc()
    except BaseException:
        word, rest = "traceback", traceback.format_exc()
    finally:
        os.write(writer, f"{word}\n{rest[-6000:]}".encode("utf-8", "backslashreplace"))
        os._exit(0)


def main() -> None:
    """Go on until so many cases were tried."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--cases", type=int, default=10_000, help="in all, those of earlier times included")
    words.add_argument("--kinds", default=",".join(KINDS))
    words.add_argument("--number", type=int, help="try only this case of each kind, and show what it says")
    words.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    asked = words.parse_args()
    torch.set_num_threads(1)
    kinds = asked.kinds.split(",")
    make()
    if asked.number is not None:
        for kind in kinds:
            print(kind, *outcome(kind, asked.number, seen=True), sep="\n")
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    done_file, wrong_file = asked.out / "done.json", asked.out / "cases.jsonl"
    done: dict[str, dict[str, int]] = json.loads(done_file.read_text()) if done_file.exists() else {}
    while sum(sum(done.get(kind, {}).values()) for kind in kinds) < asked.cases:
        kind = min(kinds, key=lambda name: sum(done.get(name, {}).values()))
        counts = done.setdefault(kind, {})
        number = sum(counts.values())
        word, rest = outcome(kind, number)
        counts[word] = counts.get(word, 0) + 1
        done_file.write_text(json.dumps(done, indent=1))
        if word not in ("right", "sentence"):
            with wrong_file.open("a") as file:
                file.write(
                    json.dumps({"kind": kind, "number": number, "what": word, "last words": rest[-2000:]}) + "\n"
                )
            print(f"{kind} {number}: {word}: {rest.strip().splitlines()[-1:]}", flush=True)
    shutil.rmtree(MADE)
    for kind, counts in sorted(done.items()):
        print(f"{kind:12}{sum(counts.values()):7}  {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")


if __name__ == "__main__":
    main()
