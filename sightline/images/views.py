"""Views: transformations of the batch that an analysis may ask for; each is made once per batch and encoder.

| view | what it shows |
|---|---|
| `plain` | the images as they are |
| `mirror`, `rotation:90`, `grey`, … | a transformation by its name, see transformations.py |
| `augment:simclr:0` | copy 0 of the images, augmented by a policy of augment/policies.py, at the size of the pixels |
| `augment:simclr?blur=0&jitter=[0.4, 0.4, 0.4, 0.1]:1` | copy 1, with settings of `augment.Policy` of one's own |
| `noise:…` | noise of a frequency band added, see noise.py |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from sightline.core.errors import InputError, nearest
from sightline.core.keyed_random import fold, id_keys
from sightline.core.references import take_apart
from sightline.core.settings import make_settings, parse_settings
from sightline.images.augment.colours import augment
from sightline.images.augment.erasure import finish
from sightline.images.augment.policies import policies
from sightline.images.augment.policy import Policy
from sightline.images.transformations import TRANSFORMATIONS, transform

__all__ = ["make_view", "policies_of"]


_AUGMENT = 0xA06  # so that the numbers are not those of a training with the same seed


def make_view(name: str, pixels: Tensor, ids: Sequence[str] = (), seed: int = 0) -> Tensor:
    """The batch of pixels (B, 3, h, w) as the view `name` shows it; what is random in it depends on ids and seed alone.

    >>> import torch
    >>> make_view("mirror", torch.arange(3).view(1, 1, 1, 3)).flatten().tolist()
    [2, 1, 0]
    >>> make_view("augment:simclr:0", torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ["a", "b"]).shape
    torch.Size([2, 3, 8, 8])
    """
    kind, _, settings = name.partition(":")
    if kind == "augment":
        policy, _, copy = settings.rpartition(":")
        if not policy or not copy.isdecimal():
            raise InputError(f"The view {name!r} is written augment:POLICY:COPY, such as augment:simclr:0")
        return _augmented(pixels, policy, int(copy), ids, seed)
    if kind == "noise":
        from sightline.images import noise

        return noise.view(name, pixels, ids, seed)
    if kind in TRANSFORMATIONS:
        return transform(name, pixels)
    if name != "plain":
        names = ["plain", *TRANSFORMATIONS, "augment:simclr:0", "noise:0.3"]
        raise InputError(f"There is no view {name!r}{nearest(name, names)}")
    return pixels


def policies_of(text: str, size: int) -> tuple[Policy, ...]:
    """The policies of the copies that a name stands for, with settings of `augment.Policy` after a question mark.

    >>> [(view.blur, view.solarize) for view in policies_of("moco_v3?blur=0.5&crop=[0.5, 1]", 32)]
    [(0.5, 0.0), (0.5, 0.2)]
    """
    name, _, settings = take_apart(text) or (text, "", {})
    known = {field.name for field in dataclasses.fields(Policy)} - {"size"}
    written = f"Augmentation {text!r}: settings are written NAME?key=value&key=value"
    if "?" in name:
        raise InputError(written)
    for key in settings:
        if key not in known:
            raise InputError(f"{written}, and {key!r} is not one{nearest(key, known)}")
    own = parse_settings([f"{key}={value}" for key, value in settings.items()])
    return tuple(make_settings(Policy, dataclasses.asdict(view) | own) for view in policies(name, size))


def _augmented(pixels: Tensor, policy: str, copy: int, ids: Sequence[str], seed: int) -> Tensor:
    """One augmented copy; copies take the views of a policy in turn, and all policies the same random numbers."""
    height, width = pixels.shape[-2:]
    views = policies_of(policy, max(height, width))
    view, keys = views[copy % len(views)], fold(id_keys(np.array(ids, dtype=object)), seed, _AUGMENT, copy)
    made = finish(augment(pixels, view, keys), view, keys)
    # A policy makes squares; elsewhere, too, a crop takes the shape of the view, whatever its own.
    return made if height == width else F.interpolate(made, (height, width), mode="bilinear", antialias=True)
