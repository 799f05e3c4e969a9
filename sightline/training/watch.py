"""Watching a training that other code does: `sl.watch(module, images)`, in any loop or with another library's trainer.

RUN/metrics.csv        a row for each look; RUN/tensorboard the same
RUN/run.json           what is watched, on which images, with which reference
RUN/start.safetensors  the encoder as it was at the first look: all that CKA needs of it, see look.py
RUN/.sightline.json    what kind of folder it is, see core/folders.py
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save
from torch import nn

from sightline.core.errors import InputError, nearest
from sightline.core.extras import explaining
from sightline.core.files import write_atomically
from sightline.core.folders import begin, holds
from sightline.core.processes import by_first, rank
from sightline.core.progress import console
from sightline.core.provenance import provenance
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.images.loading import load_images
from sightline.images.preprocess import Preprocess
from sightline.images.sets import FEWEST, Images
from sightline.training.look import Grams, Look, attention_sites, cka_between, look_at
from sightline.training.monitor import Monitor
from sightline.training.watchers import (
    FeatureWatch,
    WatchedFeatures,
    WatchedImages,
    held_out_split,
    knn_accuracies,
    ranks,
    read_watched,
)

if TYPE_CHECKING:
    from sightline.training.watch_huggingface import HuggingFaceWatch
    from sightline.training.watch_lightning import LightningWatch


MEASURES = ("knn", "rank", "attention", "cka")
KIND = "watch"


def watch(
    encoder: Encoder | nn.Module,
    images: Images | str = "shapes",
    analyses: Sequence[str] | None = None,
    *,
    every: int = 1000,
    out: str | Path = "runs/watch",
    reference: Encoder | nn.Module | str | None = None,
    limit: int = 1024,
    batch: int = 32,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
) -> Watch:
    """Watch an encoder while your own code trains it; nothing is measured before the first step.

    What is returned is called in the loop, `watched(step)`, or handed to a trainer, `watched.lightning()` or
    `watched.huggingface()`. `analyses` are `knn`, `rank`, `attention` and `cka`, by default those that the encoder and
    the images allow; `cka` is that with the encoder at the first look and, if there is one, with `reference`. `limit`
    is the number of images of each split; `resume` goes on in the folder of a training that is resumed.
    """
    known, data = load_encoder(encoder), load_images(images)
    settings = _Settings(_chosen(analyses, known, data), every, limit, batch, seed)
    return Watch(known, data, settings, Path(out), reference, resume, overwrite, show_progress)


@dataclass(frozen=True)
class _Settings:
    analyses: tuple[str, ...]
    every: int
    limit: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"A training is watched every {self.every} steps, but a number from 1 on is expected")
        if min(self.batch, self.limit) < FEWEST:
            raise InputError(
                f"At least {FEWEST} images and as large a batch are needed; got {self.limit}, {self.batch}"
            )


def _chosen(analyses: Sequence[str] | None, encoder: Encoder, images: Images) -> tuple[str, ...]:
    """What is looked for; what was named and cannot be measured is an error."""
    named = [analyses] if isinstance(analyses, str) else analyses
    for name in named or ():
        if name not in MEASURES:
            raise InputError(
                f"A training cannot be watched by {name!r}{nearest(name, MEASURES)}; choose from {', '.join(MEASURES)}"
            )
    problems = {}
    if not FeatureWatch.knows_classes(images):
        problems["knn"] = f"{images.name} has no labels, no held-out split or no class in both"
    if not attention_sites(encoder):
        problems["attention"] = f"{encoder.name} has no attention between patches that can be placed"
    for name in named or ():
        if name in problems:
            raise InputError(f"{name} cannot be watched: {problems[name]}; leave it out")
    return tuple(name for name in named or MEASURES if name not in problems)


class Watch:
    """Looks at an encoder every so many steps of its training; made by `watch`."""

    def __init__(
        self,
        encoder: Encoder,
        images: Images,
        settings: _Settings,
        out: Path,
        reference: Encoder | nn.Module | str | None,
        resume: bool,
        overwrite: bool,
        show_progress: bool,
    ) -> None:
        self.encoder, self.images, self.settings, self.path = encoder, images, settings, out
        self.reference, self.resume, self.overwrite, self.show_progress = reference, resume, overwrite, show_progress
        self.last: int | None = None  # step of the last look
        self._eyes: _Eyes | None = None
        by_first(self._check_folder)

    def __call__(self, step: int) -> dict[str, float]:
        """After so many steps: the row of a look, if one is due, which the first call always is; else nothing.

        All processes of a training call it; the first one looks, and has the row.
        """
        if self.last is not None and step // self.settings.every <= self.last // self.settings.every:
            return {}
        self.last = step
        return by_first(lambda: self._look(step)) or {}

    def end(self, step: int) -> dict[str, float]:
        """The last look, unless this step has been seen, and the end of the watch."""
        row: dict[str, float] = {}
        if self.last != step:
            self.last = step
            row = by_first(lambda: self._look(step)) or {}
        self.close()
        return row

    def close(self) -> None:
        """Write what TensorBoard has not written yet; another look opens it again."""
        if self._eyes is not None:
            self._eyes.monitor.close()

    def lightning(self) -> LightningWatch:
        """The same as a callback of Lightning's Trainer."""
        with explaining():
            from sightline.training.watch_lightning import LightningWatch
        return LightningWatch(self)

    def huggingface(self) -> HuggingFaceWatch:
        """The same as a callback of the Trainer of transformers."""
        with explaining():
            from sightline.training.watch_huggingface import HuggingFaceWatch
        return HuggingFaceWatch(self)

    # -----------------------------------------------------------------------------------------------------------

    def _check_folder(self) -> None:
        """Before anything is trained: a folder that holds another watch is not written over."""
        if holds(self.path, KIND) and not self.resume and not self.overwrite:
            raise InputError(
                f"{str(self.path)!r} holds a watched training; choose another folder, or pass resume=True to go on "
                "with it, or overwrite=True to replace it"
            )

    def _look(self, step: int) -> dict[str, float]:
        if self._eyes is None:
            self._eyes = self._open(step)
        row = {"step": step, **self._eyes.row(self.encoder, self.settings.analyses)}
        self._eyes.monitor.write(row)
        if self.show_progress and rank() == 0:
            console().print(f"step {step}: {_in_words(row)}")
        return row

    def _open(self, step: int) -> _Eyes:
        """Read the images, look at what stays as it is, and begin the folder, or go on in it."""
        went_on = self.resume and (self.path / "run.json").is_file()
        with _same_random_numbers():
            images = self._read(self.encoder.preprocess, ("train", "held out"))
            reference = None if self.reference is None else load_encoder(self.reference)
            others: dict[str, Grams] = {}
            if "cka" in self.settings.analyses:
                others["start"] = self._start(images, went_on)
                if reference is not None:
                    others["reference"] = self._grams_of(reference)
        if not went_on:
            self._begin(others, reference)
        return _Eyes(images, others, Monitor(self.path, step - 1))

    def _read(self, preprocess: Preprocess, roles: Sequence[str]) -> dict[str, WatchedImages]:
        splits = {"train": "train", "held out": held_out_split(self.images)}
        how = self.settings
        return {
            role: read_watched(self.images, splits[role], preprocess, limit=how.limit, batch=how.batch, seed=how.seed)
            for role in roles
        }

    def _start(self, images: Mapping[str, WatchedImages], went_on: bool) -> Grams:
        """The encoder as it is now or, of a training that goes on, as it was at its first look."""
        if went_on:
            kept = load_file(self.path / "start.safetensors")
            sites = json.loads((self.path / "run.json").read_text())["sites"]
            return Grams(tuple(sites), tuple(kept[name] for name in sorted(kept)))
        return look_at(self.encoder, {"held out": images["held out"]}, cka=True).grams

    def _grams_of(self, other: Encoder) -> Grams:
        """Of an encoder that is looked at once, where the watched one is computed."""
        device = next(self.encoder.module.parameters()).device
        home = next(other.module.parameters(), torch.empty(0)).device
        other.module.to(device)
        try:
            return look_at(other, self._read(other.preprocess, ["held out"]), cka=True).grams
        finally:
            other.module.to(home)

    def _begin(self, others: Mapping[str, Grams], reference: Encoder | None) -> None:
        about: dict[str, object] = {
            "kind": KIND,
            "encoder": self.encoder.describe(),
            "reference": None if reference is None else reference.describe(),
            "images": self.images.describe(),
            "settings": asdict(self.settings),
        }
        begin(self.path, KIND, anew=self.overwrite)
        if start := others.get("start"):
            about["sites"] = list(start.sites)
            kept = {f"{number:05d}": grams for number, grams in enumerate(start.batches)}
            write_atomically(self.path / "start.safetensors", save(kept))
        write_atomically(self.path / "run.json", json.dumps(about | provenance(), indent=2).encode())


@dataclass(frozen=True)
class _Eyes:
    """What looking takes, once it has begun."""

    images: Mapping[str, WatchedImages]
    others: Mapping[str, Grams]  # start, reference
    monitor: Monitor

    def row(self, encoder: Encoder, analyses: Sequence[str]) -> dict[str, float]:
        """The numbers of one look."""
        begun = time.monotonic()
        look = look_at(encoder, self.images, attention="attention" in analyses, cka="cka" in analyses)
        row: dict[str, float] = _of_features(look, analyses)
        row |= _over_blocks("nmi", look.nmi)
        for name, grams in self.others.items():
            row |= _over_blocks(f"cka_{name}", cka_between(look.grams, grams))
        return row | {"seconds": round(time.monotonic() - begun, 3)}


def _of_features(look: Look, analyses: Sequence[str]) -> dict[str, float]:
    """k-NN accuracy and rank; NaN where a training has diverged and features are no longer finite."""
    train, held_out = look.features["train"], look.features["held out"]
    sound = [name for name in train.values if all(bool(f.values[name].isfinite().all()) for f in (train, held_out))]
    train, held_out = (WatchedFeatures({name: f.values[name] for name in sound}, f.labels) for f in (train, held_out))
    lost = [name for name in look.features["train"].values if name not in sound]
    numbers: dict[str, float] = {}
    if "knn" in analyses:
        numbers |= knn_accuracies(train, held_out) | {f"knn_{name}": math.nan for name in lost}
    if "rank" in analyses:
        numbers |= ranks(train) | {f"{kind}_{name}": math.nan for name in lost for kind in ("rank", "centred_rank")}
    return numbers


def _over_blocks(name: str, values: Mapping[str, float]) -> dict[str, float]:
    """The mean over blocks, and each of them."""
    if not values:
        return {}
    return {name: sum(values.values()) / len(values), **{f"{name}.{site}": value for site, value in values.items()}}


def _in_words(row: Mapping[str, float]) -> str:
    """The numbers of a row that are not of single blocks."""
    shown = {key: value for key, value in row.items() if "." not in key and key not in ("step", "seconds")}
    words = (
        f"{key.replace('_', ' ')} {value:.1%}" if key.startswith("knn") else f"{key.replace('_', ' ')} {value:.3g}"
        for key, value in shown.items()
    )
    return f"{', '.join(words)} ({row['seconds']:.1f} s)"


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Loading an encoder and starting worker processes draw random numbers, which a watched training must not miss."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
