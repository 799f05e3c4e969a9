"""Views: transformations of the batch that an analysis may ask for; each is made once per batch and encoder.

| view | what it shows |
|---|---|
| `plain` | the images as they are |
| `mirror`, `rotation:90`, `grey`, … | a transformation by its name, see transformations.py |
| `augment:simclr:0` | copy 0 of the images, augmented by a policy of augment/policies.py, at the size of the pixels |
| `augment:simclr?blur=0&jitter=[0.4, 0.4, 0.4, 0.1]:1` | copy 1, with settings of `augment.Policy` of one's own |
| `noise:…` | noise of a frequency band added, see noise.py |
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from sightline.core.errors import InputError, nearest
from sightline.core.keyed_random import Keys, fold, id_keys
from sightline.core.references import take_apart
from sightline.core.settings import make_settings, parse_settings
from sightline.images.augment.colours import augment
from sightline.images.augment.crops import boxes, flips
from sightline.images.augment.erasure import finish
from sightline.images.augment.policies import policies
from sightline.images.augment.policy import Policy
from sightline.images.targets import Targets, arrays, move, tensors
from sightline.images.transformations import TRANSFORMATIONS, transform

IN_PLACE = ("grey", "blur")  # transformations that leave everything where it is
_AUGMENT = 0xA06  # so that the numbers are not those of a training with the same seed


def make_view(name: str, pixels: Tensor, ids: Sequence[str] = (), seed: int = 0) -> Tensor:
    """The batch of pixels (B, 3, h, w) as the view `name` shows it; what is random in it depends on ids and seed alone.

    >>> import torch
    >>> make_view("mirror", torch.arange(3).view(1, 1, 1, 3)).flatten().tolist()
    [2, 1, 0]
    >>> make_view("augment:simclr:0", torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ["a", "b"]).shape
    torch.Size([2, 3, 8, 8])
    """
    kind = name.partition(":")[0]
    if kind == "augment":
        return _augmented(pixels, *_drawn(name, pixels.shape[-2:], ids, seed))
    if kind == "noise":
        from sightline.images import noise

        return noise.view(name, pixels, ids, seed)
    if kind in TRANSFORMATIONS:
        return transform(name, pixels)
    _check(name)
    return pixels


def move_targets(
    name: str, targets: Sequence[Targets[Tensor]], size: tuple[int, int], ids: Sequence[str] = (), seed: int = 0
) -> list[Targets[Tensor]]:
    """The targets of the images of a batch, of h × w pixels, where the view `name` shows them; see `Batch.targets`.

    >>> import torch
    >>> one = Targets(torch.tensor([7]), torch.tensor([[0.0, 1.0, 2.0, 4.0]]))
    >>> move_targets("mirror", [one], (8, 8))[0].boxes
    tensor([[6., 1., 8., 4.]])
    """
    kind = name.partition(":")[0]
    if kind in ("plain", "noise", *IN_PLACE):
        return list(targets)
    where, mirrored = np.tile([0, 0, *size], (len(targets), 1)), np.ones(len(targets), bool)
    if kind == "augment":
        policy, keys = _drawn(name, size, ids, seed)
        if policy.randaugment[0]:
            raise InputError(
                f"The view {name!r} turns and shears images, but not their boxes and masks; choose another"
            )
        heights, widths = (np.full(len(targets), length) for length in size)
        where, mirrored = boxes(heights, widths, policy, keys), flips(policy, keys)
    elif kind != "mirror":
        _check(name)
        raise InputError(f"The view {name!r} moves images, but not their boxes and masks; choose another")
    moves = zip(targets, where, mirrored.tolist(), strict=True)
    return [tensors(move(arrays(one), box, flip, size, size)) for one, box, flip in moves]


def _check(name: str) -> None:
    if name != "plain" and name.partition(":")[0] not in TRANSFORMATIONS:
        names = ["plain", *TRANSFORMATIONS, "augment:simclr:0", "noise:0.3"]
        raise InputError(f"There is no view {name!r}{nearest(name, names)}")


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


def _drawn(name: str, size: Sequence[int], ids: Sequence[str], seed: int) -> tuple[Policy, Keys]:
    """What a copy is made by; copies take the views of a policy in turn, and all policies the same random numbers."""
    policy, _, copy = name.partition(":")[2].rpartition(":")
    if not policy or not copy.isdecimal():
        raise InputError(f"The view {name!r} is written augment:POLICY:COPY, such as augment:simclr:0")
    views = policies_of(policy, max(size))
    return views[int(copy) % len(views)], fold(id_keys(np.array(ids, dtype=object)), seed, _AUGMENT, int(copy))


def _augmented(pixels: Tensor, view: Policy, keys: Keys) -> Tensor:
    height, width = pixels.shape[-2:]
    made = finish(augment(pixels, view, keys), view, keys)
    # A policy makes squares; elsewhere, too, a crop takes the shape of the view, whatever its own.
    return made if height == width else F.interpolate(made, (height, width), mode="bilinear", antialias=True)
