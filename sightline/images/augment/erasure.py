"""The last steps of a view, after crop and colours: RandAugment, then random erasing (Zhong et al. 2020).

Erasing has the distributions of timm's RandomErasing with `mode="pixel"`: with some probability, a rectangle of an
image becomes noise. Its area is uniform in [0.02, ⅓] of the image's, the logarithm of its height over its width in
±log 0.3; of ten tries the first that fits is taken. Every pixel is a normal number once the image is normalised.

Every random number is a hash of the image's key (see core/keyed_random.py). B images, H height, W width.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sightline.core.keyed_random import Keys, fold, uniform
from sightline.images.augment.crops import TRIES, Boxes
from sightline.images.augment.policy import Policy
from sightline.images.augment.randaugment import randaugment
from sightline.images.preprocess import IMAGENET_MEAN, IMAGENET_STD

AREA = (0.02, 1 / 3)
ASPECT = (math.log(0.3), -math.log(0.3))
_RECTANGLE, _NOISE = 9, 10  # policies.py and randaugment.py draw for purposes below them


def finish(
    x: Tensor, policy: Policy, keys: Keys, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
) -> Tensor:
    """RandAugment and erasing of images (B, 3, H, W) in [0, 1], in place; mean and std are those of the normalisation.

    >>> finish(torch.zeros(2, 3, 4, 4), Policy(4), np.arange(2, dtype=np.uint64)).sum().item()
    0.0
    """
    magnitude, deviation = policy.randaugment
    if magnitude:
        r, g, b = mean  # what comes in from outside is 0 for the encoder
        x = randaugment(x, magnitude, deviation, (r, g, b), keys)
    return erase(x, policy.erase, keys, mean, std) if policy.erase else x


def erased_boxes(probability: float, height: int, width: int, keys: Keys) -> Boxes:
    """Top, left, height and width of what is erased of each image, (B, 4); 0 × 0 where nothing is.

    >>> erased_boxes(1.0, 32, 32, np.arange(3, dtype=np.uint64)).shape
    (3, 4)
    """
    u = uniform(fold(keys, _RECTANGLE), 3 + 2 * TRIES)
    area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * u[:, 3 : 3 + TRIES])  # (B, TRIES)
    aspect = np.exp(ASPECT[0] + (ASPECT[1] - ASPECT[0]) * u[:, 3 + TRIES :])
    heights, widths = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (heights < height) & (widths < width)
    chosen = (u[:, 0] < probability) & fits.any(axis=1)
    first = np.arange(len(fits)), fits.argmax(axis=1)
    h, w = (np.where(chosen, sides[first], 0).astype(np.int64) for sides in (heights, widths))
    top, left = np.floor(u[:, 1] * (height - h + 1)), np.floor(u[:, 2] * (width - w + 1))
    return np.stack([top.astype(np.int64), left.astype(np.int64), h, w], axis=1)


def erase(x: Tensor, probability: float, keys: Keys, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Put noise into a rectangle of some images (B, 3, H, W), in place: mean + std · normal numbers."""
    where = erased_boxes(probability, x.shape[2], x.shape[3], keys)
    centre, width = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    for row in np.flatnonzero(where[:, 2] * where[:, 3]):
        top, left, h, w = where[row].tolist()
        u = torch.from_numpy(uniform(fold(keys[row : row + 1], _NOISE), 3 * h * w)).view(3, h, w)
        noise = centre + width * torch.special.ndtri(u.clamp_(min=1e-12))
        x[row, :, top : top + h, left : left + w] = noise.to(x)
    return x
