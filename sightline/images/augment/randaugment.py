"""RandAugment of whole batches (Cubuk et al. 2020), with the operations of timm's `rand-m9-mstd0.5-inc1`.

Two operations of fifteen are drawn for each image, and each is done with probability ½. Its level is a normal number
around the magnitude, within [0, 10], and says how strong it is; signs are a coin's. All images that have drawn an
operation are changed at once, those that are rotated, sheared and shifted together.

Images are floats in [0, 1]; what counts in bytes (posterize, equalize, thresholds) rounds to 255ths. Geometry is
bilinear, and what comes from outside of the image has the colour `fill`.

B images, n those of one operation, H height, W width.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from sightline.core.keyed_random import Keys, fold, uniform
from sightline.images.augment import colours

GEOMETRY = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
LAYERS, PROBABILITY = 2, 0.5
HIGHEST_LEVEL = 10.0
_PURPOSE = 8  # policies.py draws for purposes below it


class Operation(NamedTuple):
    """What is done to each image in one layer."""

    operation: NDArray[np.int64]  # (B,) place in NAMES, −1: nothing
    strength: NDArray[np.float64]  # (B,) level / 10
    sign: NDArray[np.float64]  # (B,) 1 or −1


def draw(magnitude: float, std: float, keys: Keys) -> list[Operation]:
    """The layers, for images with these keys.

    >>> draw(9.0, 0.5, np.arange(3, dtype=np.uint64))[0].strength.round(2)
    array([0.89, 0.89, 0.87])
    """
    layers = []
    for layer in range(LAYERS):
        which, happens, level, coin = uniform(fold(keys, _PURPOSE, layer), 4).T
        normal = torch.special.ndtri(torch.from_numpy(np.clip(level, 1e-12, None))).numpy()
        layers.append(
            Operation(
                operation=np.where(happens < PROBABILITY, np.floor(which * len(NAMES)), -1).astype(np.int64),
                strength=np.clip(magnitude + std * normal, 0, HIGHEST_LEVEL) / HIGHEST_LEVEL,
                sign=np.where(coin < 0.5, -1.0, 1.0),
            )
        )
    return layers


def randaugment(x: Tensor, magnitude: float, std: float, fill: tuple[float, float, float], keys: Keys) -> Tensor:
    """Change images (B, 3, H, W) in [0, 1] in place, and give them back."""
    size = (x.shape[2], x.shape[3])
    for operation, strength, sign in draw(magnitude, std, keys):
        groups = np.minimum(operation, len(COLOURS))  # geometry, which comes last, is one group
        for group in np.unique(groups[groups >= 0]).tolist():
            rows = np.flatnonzero(groups == group)
            where = torch.from_numpy(rows).to(x.device)
            part = x.index_select(0, where)
            if group < len(COLOURS):
                arguments = (torch.from_numpy(v[rows]).to(x)[:, None, None, None] for v in (strength, sign))
                new = COLOURS[NAMES[group]](part, *arguments)
            else:
                amounts = zip(operation[rows], (strength * sign)[rows], strict=True)
                new = warp(part, torch.tensor([matrix(NAMES[n], amount, size) for n, amount in amounts]), fill)
            x.index_copy_(0, where, new)
    return x


# Geometry


def matrix(name: str, amount: float, size: tuple[int, int]) -> list[list[float]]:
    """Where the pixel (x, y) of the result comes from, as Pillow's affine transform: amount in [−1, 1], size (H, W).

    >>> matrix("translate_x", 1.0, (20, 40))
    [[1.0, 0.0, 18.0], [0.0, 1.0, 0.0]]
    """
    height, width = size
    match name:
        case "rotate":
            angle = -np.deg2rad(30 * amount)
            c, s = float(np.cos(angle)), float(np.sin(angle))
            x, y = width / 2, height / 2
            return [[c, s, x - c * x - s * y], [-s, c, y + s * x - c * y]]
        case "shear_x":
            return [[1.0, 0.3 * amount, 0.0], [0.0, 1.0, 0.0]]
        case "shear_y":
            return [[1.0, 0.0, 0.0], [0.3 * amount, 1.0, 0.0]]
        case "translate_x":
            return [[1.0, 0.0, 0.45 * amount * width], [0.0, 1.0, 0.0]]
    return [[1.0, 0.0, 0.0], [0.0, 1.0, 0.45 * amount * height]]


def warp(x: Tensor, matrices: Tensor, fill: tuple[float, float, float]) -> Tensor:
    """Images moved by matrices (n, 2, 3) in pixels; borders are hard, as Pillow's are."""
    height, width = x.shape[2:]
    to_unit = torch.tensor([[2 / width, 0.0, -1.0], [0.0, 2 / height, -1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    square = torch.cat([matrices.double(), to_unit[2:].expand(len(matrices), 1, 3)], 1)
    theta = (to_unit @ square @ torch.linalg.inv(to_unit))[:, :2].to(x)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)  # (n, H, W, 2)
    moved = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    # Masks of zeros and ones in floats: comparing and selecting would take five times longer, here and below.
    inside = torch.maximum(grid[..., 0].abs(), grid[..., 1].abs()).le_(1).unsqueeze(1)
    colour = x.new_tensor(fill)[:, None, None]
    return moved.sub_(colour).mul_(inside).add_(colour)


# Colours: images, strength in [0, 1] and sign (n, 1, 1, 1) to images


def auto_contrast(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Every channel stretched to [0, 1]; one of a single value stays."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    flat = low == high
    return (x - low.masked_fill(flat, 0)) / (high - low).masked_fill(flat, 1)


def equalize(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Every channel with a flat histogram, by the table that Pillow makes of its cumulative sum."""
    n, pixels = 3 * len(x), x.shape[2] * x.shape[3]
    values = _bytes(x).long().reshape(n, pixels)
    last = values.amax(1, keepdim=True)
    values += 256 * torch.arange(n, device=x.device).unsqueeze(1)  # every channel has a table of its own
    histogram = torch.bincount(values.flatten(), minlength=256 * n).view(n, 256)
    step = (pixels - histogram.gather(1, last)) // 255  # (n, 1)
    before = histogram.cumsum(1) - histogram
    table = ((before + step // 2) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=x.device))
    return (table.to(x) / 255).flatten().index_select(0, values.flatten()).view(x.shape)


def invert(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """1 − x."""
    return 1 - x


def posterize(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """The highest 4 … 1 bits of each byte."""
    unit = 2.0 ** (4 + torch.floor(4 * strength).clamp(max=3))  # timm's 0 bits at the highest level are a black image
    return torch.floor(_bytes(x) / unit) * unit / 255


def solarize(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """1 − x from a threshold on, which falls from 256 to 0."""
    bright = _bytes(x).ge_(256 - torch.floor(256 * strength))
    return torch.addcmul(x, bright, 1 - 2 * x)


def solarize_add(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """The darker half made lighter, by up to 110 of 255."""
    dark = _bytes(x).lt_(128)
    return torch.addcmul(x, dark, torch.floor(110 * strength) / 255).clamp_(max=1)


def color(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Away from grey, or towards it."""
    return _in_place(colours.saturation, x, strength, sign)


def contrast(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Away from the mean grey, or towards it."""
    return _in_place(colours.contrast, x, strength, sign)


def brightness(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Away from black, or towards it."""
    return _in_place(colours.brightness, x, strength, sign)


def sharpness(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Away from the smoothed image, or towards it; the outermost pixels stay."""
    smooth = x.clone()
    rows = x[..., :-2, :] + x[..., 1:-1, :] + x[..., 2:, :]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]  # nine pixels
    smooth[..., 1:-1, 1:-1].mul_(4).add_(around).div_(13)
    return torch.lerp(smooth, x, _factor(strength, sign)).clamp_(0, 1)


def _factor(strength: Tensor, sign: Tensor) -> Tensor:
    return (1 + 0.9 * strength * sign).clamp(min=0.1)


def _bytes(x: Tensor) -> Tensor:
    return (x * 255).round_()


def _in_place(act: Callable[[Tensor, Tensor], None], x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    act(x, _factor(strength, sign))
    return x


COLOURS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    act.__name__: act
    for act in (
        auto_contrast,
        equalize,
        invert,
        posterize,
        solarize,
        solarize_add,
        color,
        contrast,
        brightness,
        sharpness,
    )
}
NAMES = (*COLOURS, *GEOMETRY)
