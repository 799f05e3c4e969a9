"""Encoders of torchvision: `torchvision:NAME`, `NAME@IMAGENET1K_V1`, `NAME@random?seed=1`, `NAME@file.pth`."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sightline.core.errors import InputError, first_line, nearest
from sightline.core.references import Reference
from sightline.encoders.encoder import Encoder, build_encoder
from sightline.encoders.files.weights import load_weights, read_weights
from sightline.images.preprocess import Preprocess

EXAMPLE = "torchvision:resnet50@IMAGENET1K_V2"


def names() -> list[str]:
    """All classification models, and the pretrained weights of each."""
    from torchvision import models

    plain = models.list_models(module=models)
    return sorted({*plain, *(f"{name}@{weights.name}" for name in plain for weights in models.get_model_weights(name))})


def load(reference: Reference) -> Encoder:
    """Build the model; weights are pretrained ones (the best by default), random ones from a seed, or a file's."""
    from torchvision import models

    if reference.id not in models.list_models(module=models):
        choices = models.list_models(module=models)
        raise InputError(f"torchvision has no model {reference.id!r}{nearest(reference.id, choices)}")
    available = models.get_model_weights(reference.id)
    official = _official(reference, available)
    size, seed = _options(reference)
    notes: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _create(reference, official)
    if official is None and reference.weights != "random":
        state = read_weights(Path(str(reference.weights)))
        notes = load_weights(module, state, f"Checkpoint {reference.weights!r}")
    return build_encoder(
        module.eval(),
        reference=str(reference),
        name=reference.id,
        preprocess=_preprocess(official or available.DEFAULT, size, official=reference.weights != "random"),
        architecture=str(Reference("torchvision", reference.id, "random", reference.options)),
        notes=notes,
    )


def _official(reference: Reference, available: Any) -> Any:
    """The pretrained weights that are asked for, None for random ones or a file."""
    if reference.weights is None:
        return available.DEFAULT
    if reference.weights == "random" or Path(reference.weights).suffix or Path(reference.weights).is_file():
        return None
    choices = [weights.name for weights in available]
    if reference.weights not in [*choices, "DEFAULT"]:
        raise InputError(
            f"torchvision has no weights {reference.weights!r} for {reference.id}"
            f"{nearest(reference.weights, [*choices, 'random'])} (or give a file)"
        )
    return available[reference.weights]


def _options(reference: Reference) -> tuple[int | None, int]:
    unknown = [key for key in reference.options if key not in ("size", "seed")]
    if unknown:
        raise InputError(f"{reference} has an unknown option {unknown[0]!r}{nearest(unknown[0], ['size', 'seed'])}")
    size, seed = reference.options.get("size"), reference.options.get("seed", "0")
    if not seed.isdecimal() or (size is not None and (not size.isdecimal() or int(size) < 1)):
        raise InputError(f"Options size and seed of {reference} must be whole numbers")
    return None if size is None else int(size), int(seed)


def _create(reference: Reference, official: Any) -> nn.Module:
    from torchvision import models

    try:
        module: nn.Module = models.get_model(reference.id, weights=official)
    except Exception as error:  # whatever the download raises
        raise InputError(
            f"Cannot get the weights of {reference}: {first_line(error)}; "
            "check the network, or give a file with @FILE, or @random"
        ) from error
    return module


def _preprocess(weights: Any, size: int | None, official: bool) -> Preprocess:
    """The evaluation transform that comes with the weights; random weights have no resize to keep to."""
    transform = weights.transforms()
    crop, resize = transform.crop_size[0], transform.resize_size[0]
    if size is not None:
        resize = round(resize * size / crop)
    crop = size or crop
    return Preprocess(
        size=(crop, crop),
        resize=resize if official else crop,
        interpolation=transform.interpolation.value,
        mean=tuple(transform.mean),
        std=tuple(transform.std),
    )
