"""Pictures of a representation: which way they face, and how far they are from the images of the training.

What varies between pictures that were drawn for one representation is not in it.

n sources, k pictures of each.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.keyed_random import Keys, fold
from sightline.generation.denoiser import Model
from sightline.generation.noise import normal_noise
from sightline.measure.estimators.intervals import wilson
from sightline.measure.estimators.inversion import odd_part

BATCH = 64
SAMPLE = 0x5A3


@torch.no_grad()
def draw(model: Model, number: int, features: Tensor, keys: Keys, samples: int, *, steps: int, seed: int = 0) -> Tensor:
    """Pictures of representations (n, D) of encoder `number`, in [−1, 1], (n, k, 3, size, size).

    The noise follows from the key of a source, the number of the picture and the seed: all encoders draw from the same.
    """
    shape = (3, model.size, model.size)
    noise = torch.stack([normal_noise(fold(keys, SAMPLE, seed, k), shape) for k in range(samples)], 1).flatten(0, 1)
    told = features.repeat_interleave(samples, 0)
    generator = torch.Generator(model.device).manual_seed(seed)
    found = []
    for start in range(0, len(noise), BATCH):
        part = slice(start, start + BATCH)
        network = model.network(model.embed(number, told[part]))
        found.append(model.process.sample(network, noise[part].to(model.device), steps, generator).cpu())
    return torch.cat(found).clamp(-1, 1).view(len(features), samples, *shape)


def interpolated(first: Tensor, last: Tensor, steps: int) -> Tensor:
    """Representations on the straight line between two of them (D,), both ends included, (steps, D).

    >>> interpolated(torch.zeros(2), torch.ones(2), 3).tolist()
    [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    """
    return torch.lerp(first, last, torch.linspace(0, 1, steps)[:, None])


def as_bytes(pictures: Tensor) -> npt.NDArray[np.uint8]:
    """Pictures (…, 3, h, w) in [−1, 1] as bytes (…, h, w, 3)."""
    values: npt.NDArray[np.uint8] = ((pictures + 1) * 127.5).round().clamp(0, 255).byte().movedim(-3, -1).numpy()
    return values


def nearest_images(
    pictures: Tensor, images: Tensor, block: int = 1024
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The row of the image that is nearest to each picture (its mirror image counts, too), and the distance of a pixel.

    Pictures (n, 3, h, w) and images (N, 3, h, w) in [−1, 1]; the distance is the root of the mean squared difference,
    on a scale on which black and white are 1 apart.

    >>> images = torch.stack([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)])
    >>> [part.tolist() for part in nearest_images(images[1:] - 0.5, images)]
    [[0], [0.25]]
    """
    flat = pictures.flatten(1).double()
    best = torch.full((len(flat),), torch.inf, dtype=torch.float64)
    rows = torch.zeros(len(flat), dtype=torch.int64)
    for start in range(0, len(images), block):
        part = images[start : start + block]
        both = torch.stack([part, part.flip(-1)]).flatten(2).double()
        distances, where = torch.cdist(flat.expand(2, -1, -1), both).amin(0).min(1)
        closer = distances < best
        best, rows = torch.where(closer, distances, best), torch.where(closer, where + start, rows)
    return rows.numpy(), (best / (2 * flat.shape[1] ** 0.5)).numpy()


def orientation_share(sources: npt.NDArray[Any], pictures: npt.NDArray[Any]) -> tuple[float, float, float]:
    """Share of pictures (n, k, 3, h, w) that are nearer to their source (n, 3, h, w) than to its mirror image.

    The 95 % interval is Wilson's, as if the pictures of a source were one decision.

    >>> one = np.arange(12.0).reshape(1, 3, 2, 2)
    >>> orientation_share(one, np.stack([one, one[..., ::-1]], 1))[0]
    0.5
    """
    share = facing_share(sources, pictures)
    return float(share.mean()), *wilson(float(share.sum()), len(share))


def facing_share(sources: npt.NDArray[Any], pictures: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The same of each source, (n,)."""
    common = (pictures * odd_part(sources)[:, None]).sum((2, 3, 4))
    found: npt.NDArray[np.float64] = (np.sign(common) / 2 + 0.5).mean(1)
    return found
