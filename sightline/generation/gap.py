"""Likelihood gap: given the representation of an image, is the image more likely than its transformed copy?

With e(x | h) the error of denoising x when the network is told h, the mean over levels of noise, and T a
transformation,

    gap = [e(Tx | h(x)) − e(x | h(x))] + [e(x | h(Tx)) − e(Tx | h(Tx))]

Both halves are needed: a network prefers one of the two pictures whatever it is told (grey ones are easy), and that
cancels. Noise is moved along with the pixels where T moves pixels only. A representation that does not see T has a gap
of 0; the floor has the representations of other images, and the ceiling a network that is told the image itself, which
errs by ‖Tx − x‖² where it should not. A paired comparison (a diffusion classifier, Li et al. 2023): it is significant
long before samples show the difference.

n images, D width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.keyed_random import Keys, fold, mix
from sightline.core.results import NORMAL_95
from sightline.generation.denoiser import Model
from sightline.generation.noise import LEVELS, normal_noise
from sightline.images.views import make_view
from sightline.measure.estimators.intervals import ratio_of, wilson

PLAIN = "plain"
BATCH = 64
NOISE, OTHERS = 0x6A9, 0x6AA


def transformed(name: str, pixels: Tensor) -> Tensor:
    """Images (n, 3, h, w), transformed: `colours` exchanges red, green and blue in turn, others are views by name.

    >>> transformed("colours", torch.arange(3.0).view(1, 3, 1, 1)).flatten().tolist()
    [2.0, 0.0, 1.0]
    """
    if name == "colours":
        return pixels.roll(1, -3)
    if name.partition(":")[0] in ("augment", "noise", PLAIN):
        raise InputError(f"{name!r} is no transformation of images; choose mirror, colours, …")
    return make_view(name, pixels)


def _moved(name: str, noise: Tensor) -> Tensor:
    """The noise as the transformation moves it, if it moves pixels and nothing else."""
    kind, _, amount = name.partition(":")
    exact = kind in ("mirror", "upside_down", "colours") or (kind == "rotation" and float(amount or 90) % 90 == 0)
    return transformed(name, noise) if exact else noise


@dataclass(frozen=True, eq=False)
class Gap:
    """Of each image, (n,): the gap, that with the representations of other images, and that of a network that knows."""

    gaps: npt.NDArray[np.float64]
    floor: npt.NDArray[np.float64]
    ceiling: npt.NDArray[np.float64]


@torch.no_grad()
def likelihood_gaps(
    model: Model,
    number: int,
    pictures: Mapping[str, Tensor],
    features: Mapping[str, Tensor],
    keys: Keys,
    levels: Sequence[float] = LEVELS,
    after_each: Callable[[], None] = lambda: None,
) -> dict[str, Gap]:
    """The gaps of encoder `number` for each transformation, after which `after_each` is called.

    pictures   in [−1, 1], (n, 3, size, size), as they are under `plain` and as each transformation makes them
    features   the representations of these
    keys       of the images: noise and the choice of other images depend on them alone
    """
    noise = normal_noise(fold(keys, NOISE), tuple(pictures[PLAIN].shape[1:]))
    other = others(keys)

    def error(which: str, told: Tensor, moved: Tensor) -> npt.NDArray[np.float64]:
        return _errors(model, number, pictures[which], told, moved, levels)

    h, gaps = features[PLAIN], {}
    own, floor = error(PLAIN, h, noise), error(PLAIN, h[other], noise)
    for name in (name for name in pictures if name != PLAIN):
        moved, told = _moved(name, noise), features[name]
        distance = (pictures[name] - pictures[PLAIN]).double().square().sum((1, 2, 3)).numpy(force=True)
        # Errors of the same picture are subtracted first: representations that are equal then give 0 exactly.
        gaps[name] = Gap(
            (error(name, h, moved) - error(name, told, moved)) + (error(PLAIN, told, noise) - own),
            (error(name, h[other], moved) - error(name, told[other], moved))
            + (error(PLAIN, told[other], noise) - floor),
            2 * distance * float(np.mean([model.process.weight(level) for level in levels])),
        )
        after_each()
    return gaps


def others(keys: Keys) -> npt.NDArray[np.int64]:
    """Another image for each, all of them once."""
    order = np.argsort(mix(keys, OTHERS), kind="stable")
    other = np.empty(len(keys), np.int64)
    other[order] = np.roll(order, 1)
    return other


def _errors(
    model: Model, number: int, pictures: Tensor, features: Tensor, noise: Tensor, levels: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Error of each picture, the mean over levels, (n,)."""
    found = []
    for start in range(0, len(pictures), BATCH):
        part = slice(start, start + BATCH)
        network = model.network(model.embed(number, features[part]))
        x, eps = pictures[part].to(model.device), noise[part].to(model.device)
        found.append(torch.stack([model.process.errors(network, x, eps, level) for level in levels]).mean(0))
    errors: npt.NDArray[np.float64] = torch.cat(found).numpy(force=True)
    return errors


def summarise(gap: Gap) -> dict[str, float]:
    """Numbers of a transformation: mean gap with interval and z, share of images with a gap above 0, share of the gap
    of a network that knows the image (`kept`); each also for the floor, and for the ceiling where it is not 1.

    `z_beyond` is that of the difference between gap and floor, image by image: in a set whose images are all lit from
    one side, the representation of any image tells the side, and the floor is above 0.
    """
    found: dict[str, float] = {}
    for end, values in (("", gap.gaps), ("_null", gap.floor)):
        n, mean = len(values), float(values.mean())
        error = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
        share = float((np.sign(values) / 2 + 0.5).mean())
        kept = ratio_of(values, gap.ceiling)
        numbers: dict[str, Any] = {
            "gap": (mean, mean - NORMAL_95 * error, mean + NORMAL_95 * error),
            "share": (share, *wilson(share * n, n)),
            "kept": kept,
        }
        for name, (value, low, high) in numbers.items():
            found[f"{name}{end}"] = value
            if not end:
                found |= {f"{name}_low": low, f"{name}_high": high}
        found[f"z{end}"] = _z(values)
    differs = float((np.sign(gap.ceiling) / 2 + 0.5).mean())
    beyond = _z(gap.gaps - gap.floor)
    return found | {"z_beyond": beyond, "gap_ceiling": float(gap.ceiling.mean()), "share_ceiling": differs}


def _z(values: npt.NDArray[np.float64]) -> float:
    """The mean over its standard error."""
    error, mean = float(values.std(ddof=1)) / math.sqrt(len(values)), float(values.mean())
    return mean / error if error > 0 else 0.0 if mean == 0 else math.nan
