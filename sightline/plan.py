"""The plan of a pass: which analysis sees which sites of which encoders on which images, and what that costs."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sightline import __version__, plugins, progress
from sightline.encoder import Encoder
from sightline.errors import InputError, first_line
from sightline.features import describe_encoder
from sightline.images import Images, batch_count
from sightline.run import fingerprint
from sightline.sites import select, unmatched, watch

__all__ = ["Cost", "Key", "Plan", "announce", "make_plans", "module_of", "probe", "question"]


class Key(NamedTuple):
    """Whose activation: encoder, site and view."""

    encoder: str
    site: str
    view: str


class Cost(NamedTuple):
    """Bytes that an analysis takes."""

    memory: int
    disk: int


@dataclass(frozen=True)
class Plan:
    """What one analysis is going to see."""

    encoders: Mapping[str, Encoder]
    sites: Mapping[str, tuple[str, ...]]  # encoder → its sites
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]  # encoder → site → shape of one image's activation
    images: Images
    splits: tuple[str, ...]
    batch: int
    batches: int
    seed: int
    precision: str
    cache: Path  # a folder for memory-mapped files


def module_of(analysis: str) -> ModuleType:
    """The plugin of an analysis."""
    return plugins.find("analyses", analysis)


def make_plans(
    encoders: Mapping[str, Encoder],
    images: Images,
    configs: Mapping[str, Any],
    sites: Sequence[str] | None,
    settings: Mapping[str, Any],
    cache: Path,
    device: torch.device,
) -> dict[str, Plan]:
    """A plan per analysis; whatever does not fit together is found here, before the first batch."""
    everywhere = [site for encoder in encoders.values() for site in encoder.sites]
    if sites and (problem := unmatched(sites, everywhere)):
        raise InputError(problem)
    chosen = {
        name: {key: _sites(encoder, sites or module_of(name).SITES, bool(sites)) for key, encoder in encoders.items()}
        for name in configs
    }
    shapes = {
        key: probe(encoder, {s for of in chosen.values() for s in of[key]}, device) for key, encoder in encoders.items()
    }
    for pattern in sites or ():
        if not any(select(found, [pattern]) for found in shapes.values()):
            raise InputError(f"No forward pass reaches a site that matches {pattern!r}; leave it out")
    reached = {
        name: {key: _reached(encoders[key], found, shapes[key]) for key, found in of.items()}
        for name, of in chosen.items()
    }
    plans = {}
    for name in configs:
        # Where the source has no splits of its own, they were made for k-NN and probes; others may use all images.
        splits = tuple(module_of(name).SPLITS if images.own_splits else images.splits)
        for split in splits:
            if not len(images.indices(split)):
                raise InputError(f"The {split} split of {images.name} has no images; leave {name} out, or give some")
        count = sum(batch_count(len(images.indices(split)), settings["batch"]) for split in splits)
        plans[name] = Plan(encoders, reached[name], shapes, images, splits, batches=count, cache=cache, **settings)
    return plans


def _sites(encoder: Encoder, patterns: Sequence[str], chosen_by_user: bool) -> tuple[str, ...]:
    found = tuple(select(encoder.sites, patterns))
    if not found and encoder.family == "module" and not chosen_by_user:
        found = tuple(site for site in encoder.sites if site.count(".") <= 1)  # an unknown module: its larger parts
    if not found:
        raise InputError(
            f"Encoder {encoder.name!r} has none of the sites {', '.join(map(repr, patterns))}; "
            f"choose from {', '.join(list(encoder.sites)[:8])}, … (`sightline list sites REF` shows all)"
        )
    return found


def probe(encoder: Encoder, sites: Collection[str], device: torch.device | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of the sites that a grey image reaches, for the cost; a model that cannot run fails before the pass."""
    shapes: dict[str, tuple[int, ...]] = {}

    def see(site: str, activation: Tensor) -> None:
        shapes[site] = tuple(activation.shape[1:])

    grey = torch.full((1, 3, *encoder.preprocess.size), 128, dtype=torch.uint8, device=device)
    wanted = [site for site in encoder.sites if site in sites]
    try:
        with torch.inference_mode(), watch(encoder.sites, wanted, see):
            encoder(encoder.preprocess.normalize(grey))
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        height, width = encoder.preprocess.size
        raise InputError(
            f"Encoder {encoder.name!r} fails on an image of {height} × {width} pixels: {first_line(error)}; "
            "check its preprocessing"
        ) from error
    return shapes


def _reached(encoder: Encoder, sites: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Sites without those that the forward pass never reaches, such as heads that serve training only."""
    reached = tuple(site for site in sites if site in shapes)
    if not reached:
        raise InputError(f"Encoder {encoder.name!r} never reaches site {sites[0]!r} in its forward pass; choose others")
    return reached


def question(name: str, config: Any, plan: Plan) -> str:
    """Everything that a result depends on, as one hash."""
    return fingerprint(
        {
            "analysis": name,
            "version": __version__,
            "config": asdict(config),
            "encoders": {
                key: [describe_encoder(encoder), list(plan.sites[key])] for key, encoder in plan.encoders.items()
            },
            "images": {split: plan.images.digest(split) for split in plan.splits},
            "settings": [plan.batch, plan.seed, plan.precision],
        }
    )


def announce(plans: Mapping[str, Plan], configs: Mapping[str, Any], shown: bool) -> None:
    """Say what the pass will take, and refuse to start what the disk cannot hold."""
    plan = next(iter(plans.values()))
    costs = [module_of(name).cost(configs[name], p) for name, p in plans.items()]
    disk = sum(cost.disk for cost in costs)
    where = next(p for p in (plan.cache, *plan.cache.absolute().parents) if p.exists())
    free = shutil.disk_usage(where).free
    if disk > free:
        raise InputError(
            f"The features need {progress.readable(disk)} on disk, but {str(where)!r} has {progress.readable(free)} "
            "free; lower --limit, choose fewer --sites, or set SIGHTLINE_CACHE to a folder with room"
        )
    if not shown:
        return
    splits = dict.fromkeys(split for p in plans.values() for split in p.splits)
    layers = {key: len({s for p in plans.values() for s in p.sites[key]}) for key in plan.encoders}
    weights = sum(v.numel() * v.element_size() for e in plan.encoders.values() for v in e.module.state_dict().values())
    progress.show_cost(
        {
            "images": ", ".join(f"{len(plan.images.indices(split))} {split}" for split in splits),
            "layers": ", ".join(f"{count} of {name}" for name, count in layers.items()),
            "analyses": ", ".join(plans),
            "memory": f"about {progress.readable(weights + sum(c.memory for c in costs) + _activations(plans))}",
            "disk": f"{progress.readable(disk)} of features",
        }
    )


def _activations(plans: Mapping[str, Plan]) -> int:
    """Activations live as long as their layer: about three of the largest one, and the pixels."""
    plan = next(iter(plans.values()))
    largest = max(torch.Size(shape).numel() for shapes in plan.shapes.values() for shape in shapes.values())
    pixels = sum(3 * h * w for h, w in {encoder.preprocess.size for encoder in plan.encoders.values()})
    return plan.batch * 4 * (3 * largest + 2 * pixels)
