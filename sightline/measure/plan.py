"""The plan of a pass: which analysis sees which sites of which encoders on which images, and what that costs."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal
from torch import Tensor

from sightline.core import progress
from sightline.core.errors import InputError, first_line, some
from sightline.core.provenance import fingerprint
from sightline.core.version import NUMBERS
from sightline.encoders.encoder import Encoder
from sightline.encoders.sites import select, unmatched
from sightline.encoders.watching import watch
from sightline.images.pipeline import batch_count
from sightline.images.sets import Images
from sightline.measure.contract import analysis
from sightline.measure.feature_cache import describe_encoder

KEPT = 1  # form of what is kept beside results; what was measured before there was any is measured again


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

    encoders: Mapping[str, Encoder]  # those that take part
    sites: Mapping[str, tuple[str, ...]]  # encoder → its sites
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]  # encoder → site → shape of one image's activation
    images: Images
    splits: tuple[str, ...]
    views: Mapping[str, tuple[str, ...]]  # split → views
    batch: int
    batches: int
    seed: int
    precision: str
    cache: Path  # a folder for memory-mapped files
    left_out: Mapping[str, str]  # encoders, or sites of theirs, that take no part, and why

    @property
    def stages(self) -> dict[str, tuple[int, ...]]:
        """Blocks of each stage of the encoders that have stages."""
        return {name: encoder.stages for name, encoder in self.encoders.items() if encoder.stages}


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
    chosen = {name: {key: _sites(encoder, name, sites) for key, encoder in encoders.items()} for name in configs}
    rowless: dict[str, dict[str, tuple[int, ...]]] = {key: {} for key in encoders}
    shapes = {
        key: probe(encoder, {s for of in chosen.values() for s in of[key]}, device, rowless[key])
        for key, encoder in encoders.items()
    }
    for pattern in sites or ():
        if not any(select(found, [pattern]) for found in shapes.values()):
            for key, found in rowless.items():
                if odd := select(found, [pattern]):
                    raise InputError(f"{_rowless(key, {odd[0]: found[odd[0]]})}; leave it out")
            raise InputError(f"No forward pass reaches a site that matches {pattern!r}; leave it out")
    plans = {}
    for name, config in configs.items():
        module = analysis(name)
        splits = _splits(images, module.SPLITS)
        if module.TARGETS:
            images.target_source()  # or an error that says that there are none
        for split in splits:
            if not len(images.indices(split)):
                raise InputError(f"The {split} split of {images.name} has no images; leave {name} out, or give some")
        reached = {key: tuple(site for site in of if site in shapes[key]) for key, of in chosen[name].items()}
        without = {key: {s: rowless[key][s] for s in of if s in rowless[key]} for key, of in chosen[name].items()}
        if sites and module.ANY_SITE and (idle := [key for key, of in reached.items() if not of]):
            never = chosen[name][idle[0]][0]
            if without[idle[0]]:
                raise InputError(f"{_rowless(idle[0], without[idle[0]])}; choose others")
            raise InputError(f"Encoder {idle[0]!r} never reaches site {never!r} in its forward pass; choose others")
        plans[name] = Plan(
            encoders={key: encoder for key, encoder in encoders.items() if reached[key]},
            sites={key: of for key, of in reached.items() if of},
            shapes=shapes,
            images=images,
            splits=splits,
            views={split: tuple(module.views(config, split)) for split in splits},
            batches=sum(batch_count(len(images.indices(split)), settings["batch"]) for split in splits),
            cache=cache,
            left_out={
                **{key: _why(chosen[name][key], module.SITES) for key, of in reached.items() if not of},
                **{f"{some(of)} of {key}": _rowless(key, of) for key, of in without.items() if of},
            },
            **settings,
        )
    return plans


def _splits(images: Images, wanted: Sequence[str]) -> tuple[str, ...]:
    """The splits an analysis asks for; `val` is welcome where there is one that does not stand in for `test`.

    Where the source has none of its own, train and test were made for k-NN and probes; others may use all images.
    """
    wanted = [split for split in wanted if split != "val" or {"val", "test"} <= set(images.splits)]
    return tuple(wanted if images.own_splits else dict.fromkeys([*images.common_splits, *wanted]))


def _sites(encoder: Encoder, name: str, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """The sites of an encoder that an analysis will see; the user's choice goes to those that can take any site."""
    module = analysis(name)
    usual_ones = patterns is None or not module.ANY_SITE
    usual = (*module.SITES, *(module.PROJECTION if encoder.family == "projected" else ()))
    sites = tuple(select(encoder.sites, usual if usual_ones or patterns is None else patterns))
    if not sites and encoder.family == "module" and module.ANY_SITE and usual_ones:
        sites = tuple(site for site in encoder.sites if site.count(".") <= 1)  # an unknown module: its larger parts
    if not sites and not usual_ones:
        raise InputError(
            f"Encoder {encoder.name!r} has none of the sites {', '.join(map(repr, patterns or ()))}; "
            f"choose from {', '.join(list(encoder.sites)[:8])}, … (`sightline list sites REF` shows all)"
        )
    return sites


def _why(found: Sequence[str], patterns: Sequence[str]) -> str:
    if found:  # such as heads that serve training only
        return f"its forward pass never reaches {found[0]}"
    return f"it has none of the sites {', '.join(patterns)}"


def _rowless(encoder: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """About sites that give something else than a row for each image."""
    site, shape = next(iter(shapes.items()))
    return f"Site {site!r} of encoder {encoder!r} gives a tensor of shape {shape} for 2 images, not a row for each"


def probe(
    encoder: Encoder,
    sites: Collection[str],
    device: torch.device | None = None,
    rowless: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Shapes of the sites that grey images reach, for the cost; a model that cannot run fails before the pass.

    What has no axis of images, such as a table of positions, is no activation: `rowless` is told its whole shape.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def see(site: str, activation: Tensor) -> None:
        if activation.shape[:1] == (2,):
            shapes[site] = tuple(activation.shape[1:])
        elif rowless is not None:
            rowless[site] = tuple(activation.shape)

    grey = torch.full((2, 3, *encoder.preprocess.size), 128, dtype=torch.uint8, device=device)
    wanted = [site for site in encoder.sites if site in sites]
    try:
        with torch.inference_mode(), watch(encoder.sites, wanted, see):
            encoder(encoder.preprocess.normalize(grey))
    except (RuntimeError, AssertionError, ValueError, TypeError, AttributeError) as error:
        height, width = encoder.preprocess.size
        raise InputError(
            f"Encoder {encoder.name!r} fails on an image of {height} × {width} pixels: {first_line(error)}; "
            f"{_what_to_do(encoder)}"
        ) from error
    return shapes


def _what_to_do(encoder: Encoder) -> str:
    """About an encoder that fails: images are float32, which weights of another precision cannot be multiplied with."""
    dtypes = dict.fromkeys(p.dtype for p in encoder.module.parameters() if p.is_floating_point())
    others = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype != torch.float32)
    if not others:
        return "check its preprocessing"
    return (
        f"its weights are {others}, and images are float32: convert the module with .float(), and choose the precision "
        "bf16 (--precision bf16) if it is for speed"
    )


def analysis_fingerprint(name: str, config: Any, plan: Plan) -> str:
    """Everything that a result depends on, as one hash."""
    return fingerprint(
        {
            "analysis": name,
            "version": NUMBERS,
            "kept": KEPT,
            "config": asdict(config),
            "encoders": {
                key: [describe_encoder(encoder), list(plan.sites[key])] for key, encoder in plan.encoders.items()
            },
            "images": {split: [plan.images.digest(split), plan.views[split]] for split in plan.splits},
            "settings": [plan.batch, plan.seed, plan.precision],
        }
    )


def announce(plans: Mapping[str, Plan], configs: Mapping[str, Any], shown: bool) -> None:
    """Say what the pass will take, and refuse to start what the disk cannot hold."""
    plan = next(iter(plans.values()))
    costs = [analysis(name).cost(configs[name], p) for name, p in plans.items()]
    disk = sum(cost.disk for cost in costs)
    where = next(p for p in (plan.cache, *plan.cache.absolute().parents) if p.exists())
    free = shutil.disk_usage(where).free
    if disk > free:
        raise InputError(
            f"The features need {decimal(disk)} on disk, but {str(where)!r} has {decimal(free)} "
            "free; lower --limit, choose fewer --sites, or set SIGHTLINE_CACHE to a folder with room"
        )
    if not shown:
        return
    splits = dict.fromkeys(split for p in plans.values() for split in p.splits)
    encoders = {key: encoder for p in plans.values() for key, encoder in p.encoders.items()}
    layers = {key: len({s for p in plans.values() for s in p.sites.get(key, ())}) for key in encoders}
    weights = sum(v.numel() * v.element_size() for e in encoders.values() for v in e.module.state_dict().values())
    progress.show_cost(
        {
            "images": ", ".join(f"{len(plan.images.indices(split))} {split}" for split in splits),
            "layers": ", ".join(f"{count} of {name}" for name, count in layers.items()),
            "analyses": ", ".join(plans),
            "memory": f"about {decimal(weights + sum(c.memory for c in costs) + _activations(plans))}",
            "disk": f"{decimal(disk)} of features",
        }
    )


def _activations(plans: Mapping[str, Plan]) -> int:
    """Activations live as long as their layer: about three of the largest one of an encoder, and the pixels."""
    plan = next(iter(plans.values()))
    # Attention maps are never whole in memory; an analysis may look at nothing else.
    seen = (shape for of in plan.shapes.values() for site, shape in of.items() if not site.endswith(".attn_map"))
    largest = max((torch.Size(shape).numel() for shape in seen), default=0)
    pixels = sum(3 * h * w for h, w in {encoder.preprocess.size for encoder in plan.encoders.values()})
    return plan.batch * 4 * (3 * largest + 2 * pixels)
