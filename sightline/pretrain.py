"""Pre-training: an objective, a backbone and images become an encoder, `run:FOLDER`.

RUN/recipe.toml        every setting
RUN/run.json           what was trained on what, versions
RUN/metrics.csv        loss, schedules, k-NN accuracy by step; RUN/tensorboard the same
RUN/latest.json, RUN/checkpoints/   see checkpoints.py
RUN/tokenizer/         of BEiT: the training that came first
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import nn

from sightline import plugins
from sightline.backbones import build
from sightline.checkpoints import tensors_of
from sightline.distributed import by_first, rank
from sightline.encoder import Encoder, build_encoder, load_encoder, save_encoder
from sightline.errors import InputError
from sightline.feeding import Feed
from sightline.files import lock, write_atomically
from sightline.images import Images, load_images
from sightline.objective import First
from sightline.online import OnlineKnn
from sightline.optimization import Optimization
from sightline.progress import console
from sightline.recipe import Recipe, make_recipe, read_recipe, recipe_names
from sightline.run import provenance
from sightline.training import Loop, make_fabric

__all__ = ["pretrain"]


def pretrain(
    objective: str | None = None,
    images: str | Images | None = None,
    out: str | Path = "runs/pretrain",
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    devices: int | None = None,
    nodes: int = 1,
    workers: int | None = None,
    show_progress: bool = True,
) -> Encoder:
    """Train an encoder; the result is also `load_encoder(f"run:{out}")`.

    `recipe` is the name of one of Sightline's or a file, by default the small one of the objective; `settings` override
    it: `pretrain("moco_v3", "shapes?size=48", "runs/moco", settings={"epochs": 5, "depth": 4})`.
    """
    out = Path(out)
    layers = [dict(settings or {})]
    if images is not None:
        layers.append({"images": images if isinstance(images, str) else images.name})
    wanted = _resolve(out, objective, recipe, layers, resume, overwrite)
    fabric = make_fabric(device, wanted.training.precision, *_processes(devices, nodes))
    data = load_images(images if isinstance(images, Images) else wanted.training.images)
    if wanted.training.limit:
        data = data.sample(wanted.training.limit, wanted.training.seed)
    parts = _prepare(wanted, data, fabric, workers)
    held = by_first(lambda: lock(out))
    try:
        by_first(lambda: _begin(out, wanted, data, resume))
        last = _train(wanted, data, parts, out, fabric, show_progress)
        if rank() == 0 and show_progress:
            _tell_skipped(parts.feed)
    finally:
        if held is not None:
            held.close()
    fabric.barrier()
    trained = load_encoder(f"run:{out}")
    if not last:
        trained.notes.append(f"The training in {str(out)!r} was already finished")
    return trained


# ---------------------------------------------------------------------------------------------------------------


def _resolve(
    out: Path, objective: str | None, recipe: str | Path | None, layers: list[dict[str, Any]], resume: bool, anew: bool
) -> Recipe:
    """The recipe that is asked for; of a folder that holds a training already only the same one can go on."""
    kept = out / "recipe.toml"
    if resume and kept.is_file():
        old = read_recipe(kept)
        before = make_recipe(str(old.get("objective")), old)
        if objective not in (None, before.objective):
            raise InputError(f"{str(out)!r} holds a training of {before.objective}, not of {objective}; name that one")
        given = [] if recipe is None else [read_recipe(recipe)]
        after = make_recipe(before.objective, before.values(), *given, *layers)
        changed = [key for key, value in after.values().items() if before.values().get(key) != value]
        if changed:
            raise InputError(
                f"{str(out)!r} was trained with another {' and '.join(changed)}; resume it without changes, "
                "or train into another folder"
            )
        return before
    started = [name for name in ("latest.json", "metrics.csv", "tokenizer") if (out / name).exists()]
    if out.exists() and (not out.is_dir() or _occupied(out)) and not (kept.is_file() and (anew or not started)):
        hint = "pass --resume to go on or --overwrite to start anew" if kept.is_file() else "choose a new folder"
        raise InputError(f"{str(out)!r} holds {'a training' if kept.is_file() else 'something else'} already; {hint}")
    if recipe is not None:
        base = read_recipe(recipe)
        objective = objective or base.get("objective")
    if objective is None:
        raise InputError(f"Say what to train: {', '.join(plugins.names('objectives'))}")
    plugins.find("objectives", objective)
    if recipe is None:
        base = read_recipe(objective) if objective in recipe_names() else {}
    return make_recipe(objective, base, *layers)


def _occupied(out: Path) -> bool:
    return any(path.name != ".lock" for path in out.iterdir())


def _begin(out: Path, wanted: Recipe, data: Images, resume: bool) -> None:
    """Write down what is going to be trained; a resumed training must be on the same images."""
    if resume and (out / "run.json").is_file():
        digest = json.loads((out / "run.json").read_text())["images"]["digest"]
        if digest != data.digest():
            raise InputError(f"{data.name} has changed since {str(out)!r} was trained on it; train into another folder")
        return
    if not resume and (out / "recipe.toml").is_file():  # --overwrite
        (out / "latest.json").unlink(missing_ok=True)
        for name in ("checkpoints", "tensorboard", "tokenizer"):
            shutil.rmtree(out / name, ignore_errors=True)
        (out / "metrics.csv").unlink(missing_ok=True)
    about = {"kind": "pretrain", "recipe": wanted.values(), "images": data.describe(), **provenance()}
    write_atomically(out / "recipe.toml", wanted.to_toml().encode())
    write_atomically(out / "run.json", json.dumps(about, indent=2).encode())


def _processes(devices: int | None, nodes: int) -> tuple[int, int]:
    """Processes per node and nodes: torchrun says, otherwise the caller, otherwise one."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ.get("WORLD_SIZE", local)) // local
    return devices or 1, nodes


def _classes(wanted: Recipe, data: Images) -> int:
    if not getattr(wanted.plugin, "LABELS", False):
        return 0
    if not (data.labels_of("train") >= 0).any():
        raise InputError(f"{wanted.objective} learns from labels, but {data.name} has none; choose another objective")
    return len(data.classes)


class _Parts(NamedTuple):
    encoder: Encoder
    objective: nn.Module
    first: First | None
    feed: Feed


def _prepare(wanted: Recipe, data: Images, fabric: Fabric, workers: int | None) -> _Parts:
    """Everything that a training consists of; settings that do not fit are found here, before anything is written."""
    encoder = build(wanted.backbone, classes := _classes(wanted, data), wanted.training.seed)
    encoder.classes = data.classes if classes else None
    torch.manual_seed(wanted.training.seed)
    first: First | None = getattr(wanted.plugin, "first", lambda *_: None)(wanted.config, wanted.backbone)
    torch.manual_seed(wanted.training.seed)  # again: λ = 0 of a hybrid and its part must draw the same weights
    objective = wanted.plugin.Objective(encoder.module, wanted.config, *([] if first is None else [first.objective]))
    if wanted.training.compile:
        _compile(objective)
    settings = wanted.optimization
    feed = Feed(
        data,
        wanted.plugin.views(wanted.config, wanted.backbone),
        batch=settings.batch,
        epochs=settings.epochs,
        seed=wanted.training.seed,
        accumulate=settings.accumulate,
        mean=encoder.preprocess.mean,
        std=encoder.preprocess.std,
        device=fabric.device,
        workers=workers,
    )
    return _Parts(encoder, objective, first, feed)


def _train(
    wanted: Recipe, data: Images, parts: _Parts, out: Path, fabric: Fabric, show_progress: bool
) -> dict[str, float]:
    """Train what comes first, then the objective itself; gives the last row of the metrics."""
    asked: list[int] = []  # signals to stop, for both
    saving: dict[str, Any] = {
        "save_minutes": wanted.training.save_minutes,
        "show_progress": show_progress,
        "asked": asked,
    }
    if parts.first is not None:
        _train_first(parts.first, parts.feed, out, fabric, f"{parts.first.name} of {wanted.objective}", saving)
    torch.manual_seed(wanted.training.seed + 1 + rank())  # drop path differs between processes
    return Loop(
        objective=parts.objective,
        feed=parts.feed,
        settings=wanted.optimization,
        folder=out,
        fabric=fabric,
        title=f"{wanted.objective} on {data.name}",
        evaluate=_evaluation(wanted, data, parts, fabric.device, show_progress),
        evaluate_every=wanted.training.evaluate_every,
        export=lambda folder: _export(folder, parts.encoder, parts.objective, out.name),
        log_every=wanted.training.log_every,
        **saving,
    ).run()


def _train_first(first: First, feed: Feed, out: Path, fabric: Fabric, title: str, saving: dict[str, Any]) -> None:
    """What the objective needs trained before it, in a folder of its own, by the same loop."""
    first.objective.requires_grad_(True)  # the objective that uses it has frozen it
    settings = Optimization(batch=feed.batch, epochs=first.epochs, lr=first.lr, weight_decay=0.0, warmup_epochs=0.1)
    views = feed.over(first.views, first.epochs)
    Loop(first.objective, views, settings, out / first.name, fabric, title, **saving).run()
    first.objective.requires_grad_(False)


def _tell_skipped(feed: Feed) -> None:
    if feed.skipped:
        example, reason = next(iter(feed.skipped.items()))
        console().print(f"{len(feed.skipped)} images could not be read and were left out, such as {example}: {reason}")


def _evaluation(
    wanted: Recipe, data: Images, parts: _Parts, device: torch.device, told: bool
) -> Callable[[], dict[str, float]] | None:
    """Online k-NN, if there are labels and a split that is held out; the work of the first process."""
    if not OnlineKnn.possible(data):
        if rank() == 0 and told:
            console().print(f"{data.name} has no labels or no held-out split, so there is no k-NN accuracy on the way")
        return None
    knn = by_first(lambda: OnlineKnn(data, parts.encoder.preprocess, device, wanted.training.seed))
    objective: Any = parts.objective
    return lambda: {} if knn is None else knn(objective.encoder)


def _export(folder: Path, encoder: Encoder, module: Any, name: str) -> None:
    """What `run:FOLDER` loads: the encoder, and the decoder of those that have one."""
    from safetensors.torch import save

    built = build_encoder(
        module.encoder,
        reference=f"run:{name}",
        name=name,
        preprocess=encoder.preprocess,
        architecture=encoder.architecture,
    )
    built.classes = encoder.classes
    save_encoder(built, folder)
    if hasattr(module, "decoder"):
        decoder = {key: value.cpu().contiguous() for key, value in tensors_of(module.decoder).items()}
        write_atomically(folder / "decoder.safetensors", save(decoder))


def _compile(module: nn.Module) -> None:
    """Blocks one by one: they are many, alike, and the rest of a step has little to gain."""
    for part in module.modules():
        if type(part).__name__ in ("Block", "BasicBlock", "Bottleneck", "ConvNeXtBlock"):
            part.compile()
