"""Runs that are made of trainings, one or more for each encoder: what they are asked, and where the trainings are.

RUN/trainings/ENCODER/…   a training each
RUN/results/, …           see core/run_folder.py
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sightline.core.errors import InputError
from sightline.core.files import LOCK, file_name, read_json, replacing_folder
from sightline.core.groups import split
from sightline.core.processes import by_first
from sightline.core.provenance import fingerprint, provenance
from sightline.core.run_folder import Run, plan_run
from sightline.core.version import NUMBERS
from sightline.encoders.encoder import Encoder
from sightline.images.loading import load_images
from sightline.images.sets import Images
from sightline.training.folder import start
from sightline.training.launch import Launch
from sightline.training.recipe import read_recipe
from sightline.transfer.recipe import TransferRecipe

if TYPE_CHECKING:
    import xarray as xr
    from lightning.fabric import Fabric


FOLDER = "trainings"
NOT_YET = "it is not trained yet"  # the reason of numbers that are still missing

Key = TypeVar("Key")
Outcome = TypeVar("Outcome")
# Runs of the same command whose trainings of an encoder, by its name, are known to be the same as those that are asked
# for: the same settings, weights and images.
Reuse: TypeAlias = Mapping[str, Sequence[str | Path]]


@dataclass(frozen=True)
class Trainings:
    """What is asked for: trainings on several encoders, in the folder of one run."""

    members: Mapping[str, Encoder]
    data: Images
    recipe: TransferRecipe[Any]
    out: Path
    launch: Launch
    fabric: Fabric

    @property
    def each(self) -> Launch:
        """How each of them is started: it goes on where it stopped, unless the run has removed it."""
        return replace(self.launch, resume=True, overwrite=False)

    def question(self, kind: str, varies: Collection[str], also: Any) -> tuple[dict[str, Any], str]:
        """What the run folder remembers, and the hash of all that the result depends on."""
        settings = {k: v for k, v in self.recipe.values().items() if k not in {"encoder", "images", *varies}}
        about = {
            "encoders": [encoder.describe() for encoder in self.members.values()],
            "images": self.data.describe(),
            "settings": settings,
        }
        key = fingerprint([NUMBERS, about, also])
        return {"kind": kind, **about, "analyses": {kind: {"splits": ["test"]}}, **provenance()}, key


def prepare(
    make: Callable[..., TransferRecipe[Any]],
    members: Mapping[str, Encoder],
    images: str | Images | None,
    out: str | Path,
    recipe: str | Path,
    settings: Mapping[str, Any],
    launch: Launch,
) -> Trainings:
    """The recipe that all have in common, and the processes and images that they are made with."""
    base = make(read_recipe(recipe), settings)
    fabric, data = start(base, None if images is None else load_images(images), launch)
    return Trainings(members, data, base, Path(out), launch, fabric)


def train_each(
    kind: str,
    asked: Trainings,
    folders: Mapping[Key, Path],
    train: Callable[[Key, Path], Outcome],
    result: Callable[[Mapping[Key, Outcome]], xr.Dataset],
    *,
    reuse: Reuse | None = None,
    varies: Collection[str] = (),
    also: Any = None,
) -> Run:
    """Make one training after the other, each in its folder, and save the result as far as it is known after each.

    `train` is called by all processes, `result` by the first one. A run that is finished is opened, and the trainings
    that are finished are not made again, here or in the runs that `reuse` names. The settings in `varies` differ
    between the trainings; `also` is whatever else decides the result.
    """
    request, fingerprinted = asked.question(kind, varies, also)
    out, overwrite = asked.out, asked.launch.overwrite
    for folder, times in Counter(folders.values()).items():
        if times > 1:
            raise InputError(
                f"{times} trainings would be in one folder, {folder.relative_to(out).as_posix()!r}, since names of "
                "encoders differ in signs that folders do not have; give them other names"
            )
    run = plan_run(out, request, overwrite)
    if run.finished(kind, fingerprinted):
        return run
    asked.fabric.barrier()  # all have looked at the folder before one of them writes to it
    by_first(lambda: run.begin(anew=overwrite))
    outcomes: dict[Key, Outcome] = {}

    def save() -> None:
        done = {"fingerprint": fingerprinted} if len(outcomes) == len(folders) else {}
        run.save(kind, *split(result(outcomes).assign_attrs(done)))

    for key, folder in folders.items():
        by_first(functools.partial(_take_over, out, folder, reuse or {}))
        outcomes[key] = train(key, folder)
        by_first(save)
    return run


def _take_over(out: Path, folder: Path, reuse: Reuse) -> None:
    """The same training of another run, if it is finished there and not begun here."""
    runs = [run for name, runs in reuse.items() if folder_of(out, name) in (folder, *folder.parents) for run in runs]
    for run in runs:
        source = Path(run) / folder.relative_to(out)
        if finished(source) and not folder.exists():
            with contextlib.suppress(InputError), replacing_folder(folder) as copy:
                # The source may have gone just now: then this one is trained.
                ignore = shutil.ignore_patterns(LOCK)
                shutil.copytree(source, copy, copy_function=_link, ignore=ignore, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """A copy; of weights, which are replaced as a whole and never changed, the same file by another name."""
    if source.endswith(".safetensors"):
        with contextlib.suppress(OSError):  # a file system without such links
            os.link(source, target)
            return
    shutil.copy2(source, target)


def finished(training: Path) -> bool:
    """Whether a training has come to its end, which its run.json says."""
    try:
        return "results" in read_json(training / "run.json", dict, "")
    except InputError:
        return False


def folder_of(out: Path, encoder: str) -> Path:
    """Where the trainings of an encoder are.

    >>> folder_of(Path("runs/x"), "vit (2)").as_posix()
    'runs/x/trainings/vit-2-'
    """
    return out / FOLDER / file_name(encoder)
