"""Pre-training: an objective, a backbone and images become an encoder, `run:FOLDER`.

The folder is described in folder.py; RUN/tokenizer/ is, of BEiT, the training that came first.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric

from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.core.folders import begin
from sightline.core.keyed_random import id_keys, mix
from sightline.core.processes import by_first, rank
from sightline.core.schedules import points
from sightline.encoders.encoder import Encoder
from sightline.images.sets import Images
from sightline.training.backbones import build
from sightline.training.feed import Feed
from sightline.training.folder import check_unchanged, compile_blocks, kept_recipe, start, tell_skipped, training_folder
from sightline.training.launch import Launch
from sightline.training.loop import Loop
from sightline.training.objective import First, Objective
from sightline.training.optimization import Optimization
from sightline.training.recipe import PretrainingRecipe, make_recipe, read_recipe, recipe_names
from sightline.training.watchers import make_watchers


def pretrain(
    objective: str | None,
    images: str | Images | None,
    out: str | Path,
    recipe: str | Path | None,
    settings: Mapping[str, Any],
    launch: Launch,
) -> Encoder:
    """Train an encoder, see `sightline.api`; it is also `load_encoder(f"run:{out}")`."""
    out = Path(out)
    layers = [dict(settings)]
    if images is not None:
        layers.append({"images": images if isinstance(images, str) else images.name})
    wanted = _resolve(out, objective, recipe, layers, launch)
    fabric, data = start(wanted, images, launch)
    parts = _prepare(wanted, data, fabric, launch.workers)
    with training_folder(out, "pretrain", wanted, data, resume=launch.resume) as folder:
        last = _train(wanted, data, parts, folder.path, fabric, launch.show_progress)
        if launch.show_progress:
            tell_skipped(parts.feed)
    return folder.encoder(last)


def _resolve(
    out: Path, objective: str | None, recipe: str | Path | None, layers: list[dict[str, Any]], launch: Launch
) -> PretrainingRecipe:
    """The recipe that is asked for; of a folder that holds a training already only the same one can go on."""
    kept = kept_recipe(out, launch)
    if kept is not None:
        before = _remake(kept)
        given = [] if recipe is None else [read_recipe(recipe)]
        check_unchanged(out, before, _remake(before.values(), *given, *layers))
        if objective not in (None, before.objective):
            raise InputError(f"{str(out)!r} holds a training of {before.objective}, not of {objective}; name that one")
        return before
    if recipe is not None:
        base = read_recipe(recipe)
        objective = objective or base.get("objective")
    if objective is None and launch.resume:
        raise InputError(f"There is no training in {str(out)!r} that could go on; give the folder passed to -o")
    if objective is None:
        raise InputError(f"Name an objective to train: {', '.join(plugins.names('objectives'))}")
    if recipe is None:
        base = read_recipe(objective) if objective in recipe_names() else {}
    return make_recipe(objective, base, *layers)


def _remake(*layers: Mapping[str, Any]) -> PretrainingRecipe:
    """A recipe of the objective that its first layer names."""
    return make_recipe(str(layers[0].get("objective")), *layers)


def _classes(wanted: PretrainingRecipe, data: Images) -> int:
    if not wanted.plugin.LABELS:
        return 0
    if not (data.labels_of("train") >= 0).any():
        raise InputError(f"{wanted.objective} learns from labels, but {data.name} has none; choose another objective")
    return len(data.classes)


def random_start(objective: str, seed: int) -> int:
    """The seed of the first weights: encoders of one seed and different objectives begin apart.

    >>> random_start("mae", 0) == random_start("dino", 0), random_start("mae", 0) == random_start("mae", 0)
    (False, True)
    """
    return int(mix(id_keys(np.array([objective])), seed)[0] >> np.uint64(33))


class _Parts(NamedTuple):
    encoder: Encoder
    objective: Objective
    first: First | None
    feed: Feed


def _prepare(wanted: PretrainingRecipe, data: Images, fabric: Fabric, workers: int | None) -> _Parts:
    """Everything that a training consists of; settings that do not fit are found here, before anything is written."""
    start = random_start(wanted.objective, wanted.training.seed)
    encoder = build(wanted.backbone, classes := _classes(wanted, data), start)
    encoder = replace(encoder, classes=data.classes if classes else None)
    torch.manual_seed(start)
    first = wanted.plugin.first(wanted.config, wanted.backbone)
    torch.manual_seed(start)  # again: what comes first does not change what the objective draws
    objective = wanted.plugin.Objective(encoder.module, wanted.config, *([] if first is None else [first.objective]))
    policies = wanted.plugin.views(wanted.config, wanted.backbone)
    objective.check_views(policies)
    if wanted.training.compile:
        compile_blocks(objective)
    settings = wanted.optimization
    feed = Feed(
        data,
        policies,
        batch=settings.batch,
        epochs=settings.epochs,
        seed=wanted.training.seed,
        accumulate=settings.accumulate,
        mean=encoder.preprocess.mean,
        std=encoder.preprocess.std,
        device=fabric.device,
        workers=workers,
        pairs=objective.pairs,
        fewest=objective.fewest,
        targets=wanted.plugin.TARGETS,
    )
    return _Parts(encoder, objective, first, feed)


def _train(
    wanted: PretrainingRecipe, data: Images, parts: _Parts, out: Path, fabric: Fabric, show_progress: bool
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
        encoder=parts.encoder,
        watchers=make_watchers(
            wanted.training.watch,
            parts.objective,
            data,
            parts.encoder.preprocess,
            fabric.device,
            seed=wanted.training.seed,
            show_progress=show_progress,
        ),
        evaluate_every=wanted.training.evaluate_every,
        keep=points(wanted.training.keep, parts.feed.steps),
        log_every=wanted.training.log_every,
        **saving,
    ).run()


def _train_first(first: First, feed: Feed, out: Path, fabric: Fabric, title: str, saving: dict[str, Any]) -> None:
    """What the objective needs trained before it, in a folder of its own, by the same loop."""
    first.objective.requires_grad_(True)  # the objective that uses it has frozen it
    settings = Optimization(batch=feed.batch, epochs=first.epochs, lr=first.lr, weight_decay=0.0, warmup_epochs=0.1)
    views = feed.over(first.views, first.epochs)
    by_first(lambda: begin(out / first.name, "first"))
    Loop(first.objective, views, settings, out / first.name, fabric, title, **saving).run()
    first.objective.requires_grad_(False)
