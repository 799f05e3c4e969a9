"""The folder of a training: whether it may begin or go on there, what is written down, and what is left at the end.

RUN/recipe.toml        every setting
RUN/run.json           what was trained on what, versions
RUN/metrics.csv        loss, schedules, accuracies by step; RUN/tensorboard the same
RUN/latest.json, RUN/checkpoints/   see checkpoints.py
RUN/.sightline.json    the list of these files, see core/ownership.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from lightning.fabric import Fabric
from torch import nn

from sightline.core import bfloat16, ownership
from sightline.core.errors import InputError, counted
from sightline.core.files import lock, write_atomically
from sightline.core.processes import by_first, rank
from sightline.core.progress import console
from sightline.core.run_folder import provenance
from sightline.core.settings import to_toml
from sightline.encoders.encoder import Encoder, build_encoder
from sightline.encoders.loading import load_encoder
from sightline.encoders.modules.projection import save_head
from sightline.encoders.saved import save_encoder
from sightline.images.loading import load_images
from sightline.images.sets import Images
from sightline.training.checkpoints import tensors_of
from sightline.training.feed import Feed
from sightline.training.loop import make_fabric
from sightline.training.objective import Objective
from sightline.training.recipe import Training, read_recipe

__all__ = ["Prepared", "compile_blocks", "export", "export_head", "kept_recipe", "processes", "train_in"]


KIND = "training"
STARTED = ("latest.json", "metrics.csv", "tokenizer")


class Recipe(Protocol):
    """What pre-training and fine-tuning have in common."""

    @property
    def objective(self) -> str: ...

    @property
    def training(self) -> Training: ...

    def values(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Recipe)


class Prepared(NamedTuple):
    """A training that can begin: settings that do not fit have been found, and nothing has been written yet."""

    feed: Feed
    train: Callable[[], Mapping[str, float]]  # gives the last row of the metrics, nothing if it was finished already
    encoder: Encoder | None = None  # what it begins with, where that is not made by it


def kept_recipe(
    out: Path,
    make: Callable[..., R],
    recipe: str | Path | None,
    layers: list[dict[str, Any]],
    resume: bool,
    anew: bool,
) -> R | None:
    """The recipe of the training in a folder that is to go on, unchanged; None where one may begin.

    `make` puts a recipe together from layers of settings, the first of which is that of the folder.
    """
    kept, there = out / "recipe.toml", ownership.holds(out, KIND)
    if resume and there and kept.is_file():
        before = make(read_recipe(kept))
        given = [] if recipe is None else [read_recipe(recipe)]
        after = make(before.values(), *given, *layers)
        changed = [key for key, value in after.values().items() if before.values().get(key) != value]
        if changed:
            raise InputError(
                f"{str(out)!r} was trained with another {' and '.join(changed)}; resume it without changes, "
                "or train into another folder"
            )
        return before
    if there and not anew and any((out / name).exists() for name in STARTED):
        goes_on = "pass --resume to go on" if kept.is_file() else "restore its recipe.toml to go on"
        raise InputError(f"{str(out)!r} holds a training already; {goes_on} or --overwrite to start anew")
    ownership.replaceable(out)
    return None


def train_in(
    out: Path,
    kind: str,
    wanted: Recipe,
    images: str | Images | None,
    prepare: Callable[[Images, Fabric], Prepared],
    *,
    resume: bool,
    device: str,
    devices: int | None,
    nodes: int,
    show_progress: bool,
) -> Encoder:
    """Train in a folder that no other process trains in meanwhile; gives the encoder that the folder then holds."""
    fabric = make_fabric(device, wanted.training.precision, *processes(devices, nodes))
    if rank() == 0 and show_progress:
        bfloat16.tell_if_slower(fabric.device, wanted.training.precision)
    data = load_images(images if isinstance(images, Images) else wanted.training.images)
    if wanted.training.limit:
        data = data.sample(wanted.training.limit, wanted.training.seed)
    ready = prepare(data, fabric)
    held = by_first(lambda: lock(out))
    try:
        by_first(lambda: _begin(out, kind, wanted, data, ready.encoder, resume))
        last = ready.train()
        if rank() == 0 and show_progress:
            _tell_skipped(ready.feed)
    finally:
        if held is not None:
            held.close()
    fabric.barrier()
    trained = load_encoder(f"run:{out}")
    if not last:
        trained = replace(trained, notes=[*trained.notes, f"The training in {str(out)!r} was already finished"])
    return trained


def processes(devices: int | None, nodes: int) -> tuple[int, int]:
    """Processes per node and nodes: torchrun says, otherwise the caller, otherwise one."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ.get("WORLD_SIZE", local)) // local
    return devices or 1, nodes


def _begin(out: Path, kind: str, wanted: Recipe, data: Images, encoder: Encoder | None, resume: bool) -> None:
    """Write down what is going to be trained; a resumed training must be of the same encoder on the same images."""
    about = {"kind": kind, "recipe": wanted.values(), "images": data.describe()}
    if encoder is not None:
        about["encoder"] = encoder.describe()
    if resume and (out / "run.json").is_file():
        old = json.loads((out / "run.json").read_text())
        if old["images"]["digest"] != data.digest():
            raise InputError(f"{data.name} has changed since {str(out)!r} was trained on it; train into another folder")
        if encoder is not None and old["encoder"]["weights"] != encoder.weights:
            raise InputError(
                f"The encoder {encoder.reference} has changed since {str(out)!r} began with it; "
                "train into another folder"
            )
        return
    ownership.begin(out, KIND, anew=not resume)
    ownership.write(out, out / "recipe.toml", to_toml(wanted.values()).encode())
    ownership.write(out, out / "run.json", json.dumps(about | provenance(), indent=2).encode())


def _tell_skipped(feed: Feed) -> None:
    if feed.skipped:
        example, reason = next(iter(feed.skipped.items()))
        images, were = counted(n := len(feed.skipped), "image"), "was" if n == 1 else "were"
        console().print(f"{images} could not be read and {were} left out, such as {example}: {reason}")


def export(folder: Path, encoder: Encoder, module: Any, name: str) -> None:
    """What `run:FOLDER` loads: the encoder of an objective, and the decoder and the head of those that have them."""
    from safetensors.torch import save

    built = build_encoder(
        module.encoder,
        reference=f"run:{name}",
        name=name,
        preprocess=encoder.preprocess,
        architecture=encoder.architecture,
        classes=encoder.classes,
    )
    save_encoder(built, folder)
    if hasattr(module, "decoder"):
        decoder = {key: value.cpu().contiguous() for key, value in tensors_of(module.decoder).items()}
        write_atomically(folder / "decoder.safetensors", save(decoder))
        if hasattr(module.decoder, "describe"):
            write_atomically(folder / "decoder.json", json.dumps(module.decoder.describe(), indent=2).encode())
    export_head(folder, module)


def export_head(folder: Path, module: Objective) -> None:
    """The projection head that belongs to the encoder of an objective, unless it has none or it is there already."""
    head = module.head_of(module.encoder)
    if head and not (folder / "head.json").is_file():
        save_head(head, folder)


def compile_blocks(module: nn.Module) -> None:
    """Blocks one by one through torch.compile: they are many, alike, and the rest of a step has little to gain."""
    for part in module.modules():
        if type(part).__name__ in ("Block", "BasicBlock", "Bottleneck", "ConvNeXtBlock"):
            part.compile()
