"""What is asked of a pass: which encoders, which analyses on which images, and what of it cannot be done, and why."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import nn

from sightline.core import plugins
from sightline.core.errors import InputError, counted, nearest
from sightline.core.provenance import provenance
from sightline.core.settings import make_settings
from sightline.encoders.encoder import Encoder, name_apart
from sightline.encoders.files.weights import hash_weights
from sightline.encoders.loading import load_encoder
from sightline.images.loading import load_images
from sightline.images.sets import FEWEST, Images, join
from sightline.measure.contract import Analysis, FurtherImages, analysis
from sightline.measure.plan import Plan


def check_labels(images: Images, splits: Sequence[str], title: str, name: str) -> None:
    """A classifier without classes would be a number without meaning: say so before the pass."""
    classes_of = {split: set(images.labels_of(split).tolist()) - {-1} for split in splits}
    for split, classes in classes_of.items():
        if len(classes) < (2 if split == "train" else 1):
            raise InputError(
                f"{title} needs labels of at least two classes, but the {split} split of {images.name} has "
                f"{counted(len(classes), 'labelled class') if classes else 'no labelled classes'}; "
                f"give images with class folders or labels, or leave {name} out (--only cka)"
            )
    for split, classes in classes_of.items():
        if not classes & classes_of["train"]:
            raise InputError(
                f"{title} would always be wrong on {images.name}: no class of the {split} split is in the train split; "
                f"give more images of each class, or leave {name} out (--only cka)"
            )


def named_encoders(
    encoders: Mapping[str, Encoder | str | nn.Module] | Sequence[Encoder | str | nn.Module] | Encoder | str,
) -> dict[str, Encoder]:
    """The encoders by name, each with the hash of the weights that it has now."""
    if isinstance(encoders, Mapping):
        loaded = [load_encoder(what, name=name) for name, what in encoders.items()]
    else:
        several = [encoders] if isinstance(encoders, (str, Encoder, nn.Module)) else encoders
        loaded = [load_encoder(what) for what in several]
    if not loaded:
        raise InputError("There is nothing to compare; give at least one encoder")
    # Again: a module may have been trained on since it was loaded, and a stale hash would find stale features.
    return name_apart(replace(encoder, weights=hash_weights(encoder.module)) for encoder in loaded)


def choose_analyses(
    analyses: Sequence[str] | Mapping[str, Any] | None, also: Sequence[str] | Mapping[str, Any] = ()
) -> tuple[dict[str, Any], set[str]]:
    """Analyses with their settings, and those of them that were named, which may not be left out."""
    if analyses is None or analyses == "all":
        given: Mapping[str, Any] = {}
        others = default_analyses() if analyses is None else list(plugins.usable("analyses", analysis))
    else:
        given, others = _with_settings(analyses), []
    given = {**given, **_with_settings(also)}
    chosen = {**dict.fromkeys(others), **given}
    if not chosen:
        raise InputError("No analysis is chosen; name at least one (`sightline list analyses`)")
    return {name: config_of(name, values) for name, values in chosen.items()}, set(given)


def config_of(name: str, given: Any = None) -> Any:
    """The settings of an analysis: its `Config`, or the values that differ from the usual ones by name.

    >>> config_of("knn", {"k": 10}).k
    10
    """
    config = analysis(name).Config
    if isinstance(given, config):
        return given
    values = {} if given is None else given
    if not isinstance(values, Mapping):
        raise InputError(f"The settings of {name} are its Config or a dictionary of values, not {given!r}")
    keys = [one.name for one in fields(config) if one.init]
    for key in values:
        if key not in keys:
            raise InputError(f"There is no setting {key!r} of {name}{nearest(str(key), keys)}")
    return make_settings(config, values)


def _with_settings(analyses: Sequence[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    names = [analyses] if isinstance(analyses, str) else analyses
    return names if isinstance(names, Mapping) else dict.fromkeys(names)


def default_analyses() -> list[str]:
    """Those that need no more than one forward pass of each image; the others run when they are named."""
    return [name for name, plugin in plugins.usable("analyses", analysis).items() if plugin.BY_DEFAULT]


def with_further(images: Images, given: Mapping[str, Images | str], configs: Mapping[str, Any]) -> Images:
    """The images with the further sets that analyses ask for beside them: those given, else their relatives."""
    wanted = {split: what for name in configs for split, what in analysis(name).IMAGES.items()}
    for split in given:
        if split not in wanted:
            raise InputError(_nobody_asks(split))
    references = {split: images.relatives[split] for split in wanted if split in images.relatives}
    for split, what in wanted.items():
        chosen = given.get(split, None if split in images.splits else references.get(split))
        if chosen is not None:
            images = join(images, split, _further(chosen, what, images))
    return images


def _further(chosen: Images | str, what: FurtherImages, images: Images) -> Images:
    others = load_images(chosen)
    for label in what.labels:
        if label not in others.extras:
            raise InputError(f"{others.name} has no {label} labels; {what.which}")
    count = len(images.indices("test")) if isinstance(chosen, str) else None  # as many as there are others
    return others.sample(count, seed=0)


def _nobody_asks(split: str) -> str:
    """For whom further images would be that no analysis of this pass wants."""
    analyses = plugins.usable("analyses", analysis)
    users = [name for name, plugin in analyses.items() if split in plugin.IMAGES]
    if not users:
        sets = dict.fromkeys(split for plugin in analyses.values() for split in plugin.IMAGES)
        return f"No analysis asks for images called {split!r}{nearest(split, sets)}"
    title = analyses[users[0]].IMAGES[split].title
    return f"{title} are used only by {' and '.join(users)}; add it (--also {users[0]})"


def lacking_images(configs: Mapping[str, Any], images: Images, named: Collection[str]) -> dict[str, str]:
    """Analyses that need a further set of images which is not there."""
    lacking = {
        name: f"{name} needs {what.what}; give them with --further {split}=IMAGES (further= in Python), or leave it out"
        for name in configs
        for split, what in analysis(name).IMAGES.items()
        if split not in images.splits
    }
    for name in named:
        if name in lacking:
            raise InputError(lacking[name])
    return lacking


def make_metrics(
    configs: Mapping[str, Any], plans: Mapping[str, Plan], device: torch.device, named: Collection[str]
) -> tuple[dict[str, Analysis], dict[str, str]]:
    """The analyses that these encoders and images allow, and why not the others; of those `named` that is an error."""
    metrics: dict[str, Analysis] = {}
    declined: dict[str, str] = {}
    for name, plan in plans.items():
        try:
            if not plan.encoders:
                reasons = "; ".join(f"{key}: {why}" for key, why in plan.left_out.items())
                raise InputError(f"{name} cannot be measured on these encoders ({reasons}); leave it out")
            metrics[name] = analysis(name).Analysis(configs[name], plan).to(device)
        except InputError as error:
            if name in named:
                raise
            declined[name] = str(error)
    if not metrics:
        raise InputError("; ".join(declined.values()))
    return metrics, declined


def left_out_of(plans: Mapping[str, Plan], declined: Mapping[str, str]) -> dict[str, Any]:
    """Analysis → why it was left out, or encoder → why that one was."""
    return {name: dict(plan.left_out) for name, plan in plans.items() if plan.left_out} | dict(declined)


def check_settings(batch: int, precision: str, seed: int) -> None:
    """Refuse settings that no pass can have."""
    if batch < FEWEST:
        raise InputError(f"The batch size is {batch}, but the unbiased CKA needs at least {FEWEST} images in a batch")
    if precision not in ("float32", "bf16"):
        raise InputError(f"There is no precision {precision!r}; choose float32 or bf16")
    if seed < 0:
        raise InputError(f"The seed is {seed}, but a whole number from 0 on is expected")


def describe_request(
    encoders: Mapping[str, Encoder],
    images: Images,
    plans: Mapping[str, Plan],
    configs: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What the run folder remembers of it."""
    return {
        "encoders": [encoder.describe() for encoder in encoders.values()],
        "images": images.describe(),
        "settings": dict(settings),
        "analyses": {
            name: {"config": asdict(configs[name]), "splits": list(plan.splits), "sites": plan.sites} | _beside(plan)
            for name, plan in plans.items()
        },
        **provenance(),
    }


def _beside(plan: Plan) -> dict[str, Any]:
    """Images that only this analysis sees."""
    return {
        split: {"images": about.partition("\n")[0], "count": len(plan.images.splits[split])}
        for split, about in plan.images.beside.items()
        if split in plan.splits
    }
