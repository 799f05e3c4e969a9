"""Transformations of images by name: what an encoder may have learned to ignore.

| name | what it shows | amount, unless given |
|---|---|---|
| `mirror` | left and right exchanged | |
| `upside_down` | above and below exchanged | |
| `rotation:90` | turned to the left by so many degrees | 90 |
| `grey` | without colour, by the luma of ITU-R 601 | |
| `blur:0.02` | Gaussian blur, sigma as a share of the shorter side | 0.02 |
| `shift:0.1`, `shift:0.1,0.05` | moved to the right, and down, by shares of width and height | 0.1 |
| `scale:1.25` | enlarged about the centre; below 1: made smaller | 1.25 |

Amounts are shares of the image, so that encoders of different sizes see the same. What comes in from outside the image
is its mirror image: black borders would be what an encoder sees first of all. Multiples of 90 degrees of a square, and
shifts by whole pixels, move pixels without changing them; elsewhere they are interpolated bilinearly.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.core.errors import InputError, nearest
from sightline.images.augment import colours


def transform(name: str, pixels: Tensor) -> Tensor:
    """The images (B, 3, h, w), uint8 or floats in [0, 1], transformed; floats in [0, 1] where they are computed.

    >>> transform("shift:0.25", torch.arange(4.0).view(1, 1, 1, 4) / 4) * 4
    tensor([[[[0., 0., 1., 2.]]]])
    """
    kind, colon, text = name.partition(":")
    known = TRANSFORMATIONS.get(kind)
    if known is None:
        raise InputError(f"There is no transformation {name!r}{nearest(kind, TRANSFORMATIONS)}")
    try:
        amounts = tuple(map(float, text.split(","))) if colon else known.usual
    except ValueError:
        amounts = (math.nan,)
    low, high = known.within
    if not len(known.usual) <= len(amounts) <= known.most or not all(low <= amount <= high for amount in amounts):
        raise InputError(f"The transformation {name!r} is written {known.written}")
    return known.make(pixels, *amounts)


def _floats(pixels: Tensor) -> Tensor:
    return pixels / 255 if pixels.dtype == torch.uint8 else pixels.float()


def _rotated(pixels: Tensor, degrees: float) -> Tensor:
    height, width = pixels.shape[-2:]
    quarters, rest = divmod(degrees, 90)
    if rest == 0 and (height == width or quarters % 2 == 0):
        return pixels.rot90(int(quarters), (-2, -1))
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _moved(pixels, [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]])


def _grey(pixels: Tensor) -> Tensor:
    return colours.luma(_floats(pixels))[:, None].expand(-1, 3, -1, -1)


def _blurred(pixels: Tensor, share: float) -> Tensor:
    sigma = share * min(pixels.shape[-2:])
    return colours.blur(_floats(pixels), torch.full((len(pixels),), sigma, device=pixels.device), sigma)


def _shifted(pixels: Tensor, right: float, down: float = 0.0) -> Tensor:
    return _moved(pixels, [[1.0, 0.0, -2 * right], [0.0, 1.0, -2 * down]])


def _scaled(pixels: Tensor, factor: float) -> Tensor:
    if factor >= 1:
        return _moved(pixels, [[1 / factor, 0.0, 0.0], [0.0, 1 / factor, 0.0]])
    height, width = pixels.shape[-2:]
    small = (max(1, round(height * factor)), max(1, round(width * factor)))
    resized = F.interpolate(_floats(pixels), small, mode="bilinear", antialias=True)
    top, left = (height - small[0]) // 2, (width - small[1]) // 2
    return F.pad(resized, (left, width - small[1] - left, top, height - small[0] - top), mode="reflect")


def _moved(pixels: Tensor, matrix: list[list[float]]) -> Tensor:
    """Each pixel from where the matrix (2, 3) says, in coordinates from −1 to 1 along each side of the image."""
    x = _floats(pixels)
    grid = F.affine_grid(x.new_tensor(matrix).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


class _Kind(NamedTuple):
    make: Callable[..., Tensor]
    written: str
    usual: tuple[float, ...] = ()
    most: int = 0  # so many amounts
    within: tuple[float, float] = (-math.inf, math.inf)


TRANSFORMATIONS = {
    "mirror": _Kind(lambda pixels: pixels.flip(-1), "mirror, without an amount"),
    "upside_down": _Kind(lambda pixels: pixels.flip(-2), "upside_down, without an amount"),
    "rotation": _Kind(_rotated, "rotation:DEGREES, such as rotation:90", (90.0,), 1, (-360.0, 360.0)),
    "grey": _Kind(_grey, "grey, without an amount"),
    "blur": _Kind(_blurred, "blur:SHARE, with a share of the shorter side from 0.001 to 0.5", (0.02,), 1, (0.001, 0.5)),
    "shift": _Kind(_shifted, "shift:RIGHT or shift:RIGHT,DOWN, with shares from -1 to 1", (0.1,), 2, (-1.0, 1.0)),
    "scale": _Kind(_scaled, "scale:FACTOR, with a factor from 0.5 to 4", (1.25,), 1, (0.5, 4.0)),
}
