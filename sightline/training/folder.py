"""The folder of a training: whether it may begin or go on there, what is written down, and what is left at the end.

RUN/recipe.toml        every setting
RUN/run.json           what was trained on what, versions
RUN/metrics.csv        loss, schedules, accuracies by step; RUN/tensorboard the same
RUN/latest.json, RUN/checkpoints/   see checkpoints.py
RUN/.sightline.json    what kind of folder it is, see core/folders.py
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lightning.fabric import Fabric
from torch import nn

from sightline.core.errors import InputError, counted
from sightline.core.files import LOCK, locked, read_json, write_atomically
from sightline.core.folders import begin, holds
from sightline.core.processes import barrier, by_first, rank
from sightline.core.progress import console
from sightline.core.provenance import provenance
from sightline.core.settings import to_toml
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.images.loading import load_images
from sightline.images.sets import Images
from sightline.training.feed import Feed
from sightline.training.launch import Launch
from sightline.training.loop import make_fabric
from sightline.training.recipe import Training, read_recipe

KIND = "training"
STARTED = ("latest.json", "metrics.csv", "tokenizer")


class Recipe(Protocol):
    """What pre-training and fine-tuning have in common."""

    @property
    def objective(self) -> str: ...

    @property
    def training(self) -> Training: ...

    def values(self) -> dict[str, Any]: ...


def kept_recipe(out: Path, launch: Launch) -> dict[str, Any] | None:
    """The settings of the training in a folder that is to go on; None where one may begin."""
    kept, there = out / "recipe.toml", holds(out, KIND)
    if launch.resume and there and kept.is_file():
        return read_recipe(kept)
    if there and not launch.overwrite and any((out / name).exists() for name in STARTED):
        goes_on = "pass --resume to continue" if kept.is_file() else "restore its recipe.toml to continue"
        raise InputError(f"{str(out)!r} holds a training already; {goes_on} or --overwrite to start over")
    return None


def check_unchanged(out: Path, before: Recipe, after: Recipe) -> None:
    """Only a training with the settings that it began with can go on."""
    changed = [key for key, value in after.values().items() if before.values().get(key) != value]
    if changed:
        raise InputError(
            f"{str(out)!r} was trained with another {' and '.join(changed)}; resume it without changes, "
            "or train into another folder"
        )


def start(wanted: Recipe, images: str | Images | None, launch: Launch) -> tuple[Fabric, Images]:
    """The processes of a training, and the images that it is given."""
    fabric = make_fabric(launch.device, wanted.training.precision, *launch.processes())
    if rank() == 0 and launch.show_progress and wanted.training.precision == "bf16" and fabric.device.type == "cpu":
        from sightline.core import bfloat16

        bfloat16.tell_if_slower()
    data = load_images(images if isinstance(images, Images) else wanted.training.images)
    if rank() == 0 and launch.show_progress:
        for note in data.notes:
            console().print(note)
    if wanted.training.limit:
        data = data.sample(wanted.training.limit, wanted.training.seed)
    if rank() == 0 and launch.show_progress and "train" in data.splits:
        console().print(_trained_on(data), markup=False)
    return fabric, data


def _trained_on(data: Images) -> str:
    """How many images there are to train on; where a source has no splits, that some are held out."""
    said = f"{data.name}: {counted(len(data.splits['train']), 'training image')}"
    if data.own_splits:
        return said
    held = counted(sum(len(where) for name, where in data.splits.items() if name != "train"), "image")
    return f"{said}; it has no splits, so {held} are held out. With folders or files named train and test you choose"


@dataclass(frozen=True)
class Folder:
    """The folder of a training that is under way or has ended."""

    path: Path

    def encoder(self, last: Mapping[str, float]) -> Encoder:
        """What the training has left, for one that ends in an encoder; `last` is empty if it was finished before."""
        barrier()  # the first process has written everything
        trained = load_encoder(f"run:{self.path}")
        if not last:
            trained = replace(
                trained, notes=[*trained.notes, f"The training in {str(self.path)!r} was already finished"]
            )
        return trained


@contextlib.contextmanager
def training_folder(
    out: Path, kind: str, wanted: Recipe, data: Images, *, resume: bool, begins_with: Encoder | None = None
) -> Iterator[Folder]:
    """A folder to train in that no other process trains in meanwhile, with what is going to be trained written down.

    Everything that may not fit has to be found before: from here on there are files. `begins_with` is the encoder that
    the training begins with, where it does not make that itself; a resumed training must be of the same encoder on the
    same images.
    """
    with contextlib.ExitStack() as stack:
        by_first(lambda: _lock(out, stack))
        by_first(lambda: _begin(out, kind, wanted, data, begins_with, resume))
        yield Folder(out)


def _lock(out: Path, stack: contextlib.ExitStack) -> None:
    if not stack.enter_context(locked(out / LOCK)):
        raise InputError(f"Another process is working in {str(out)!r}; wait for it or stop it")


def _begin(out: Path, kind: str, wanted: Recipe, data: Images, encoder: Encoder | None, resume: bool) -> None:
    """Write down what is going to be trained; a resumed training must be of the same encoder on the same images."""
    about = {"kind": kind, "recipe": wanted.values(), "images": data.describe()}
    if encoder is not None:
        about["encoder"] = encoder.describe()
    if resume and (out / "run.json").is_file():
        old = read_json(out / "run.json", dict, "restore it from a copy, or train into another folder")
        if old["images"]["digest"] != data.digest():
            raise InputError(f"{data.name} has changed since {str(out)!r} was trained on it; train into another folder")
        if encoder is not None and old["encoder"]["weights"] != encoder.weights:
            raise InputError(
                f"The encoder {encoder.reference} has changed since {str(out)!r} began with it; "
                "train into another folder"
            )
        return
    begin(out, KIND, anew=not resume)
    write_atomically(out / "recipe.toml", to_toml(wanted.values()).encode())
    write_atomically(out / "run.json", json.dumps(about | provenance(), indent=2).encode())


def tell_skipped(feed: Feed) -> None:
    """Which images could not be read, at the end of a training; said by the first process."""
    if rank() == 0 and feed.skipped:
        example, reason = next(iter(feed.skipped.items()))
        images, were = counted(n := len(feed.skipped), "image"), "was" if n == 1 else "were"
        console().print(f"{images} could not be read and {were} left out, such as {example}: {reason}")


def compile_blocks(module: nn.Module) -> None:
    """Blocks one by one through torch.compile: they are many, alike, and the rest of a step has little to gain."""
    for part in module.modules():
        if type(part).__name__ in ("Block", "BasicBlock", "Bottleneck", "ConvNeXtBlock"):
            part.compile()
