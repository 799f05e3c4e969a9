"""Noise of one frequency band: `noise:0.3` adds noise of radial frequencies 0.25π … 0.35π to the images.

    x ↦ x + s · F⁻¹(M_f ⊙ F(δ)) / RMS        δ white Gaussian noise, M_f = 1 where |ω| lies in [f − 0.05π, f + 0.05π]

ω = 2π (row/h, column/w) is in radians per pixel of the image that the encoder sees; π along an axis is the finest
stripe. The noise of every image has the same strength s, its root mean square over pixels and channels, in a range of
pixels of [0, 1]. The sum is not clipped: clipping would spread the noise over all frequencies.

δ is a hash of image id and seed (keyed_random.py), one noise per image, of which each band is a part. Only the Fourier
coefficients within the band are drawn.

`noise:0.3,0.1,sign` is the way of the code of Park & Kim 2022: δ = ±ε at every pixel, M_f a square ring, and no
division by the root mean square, so that rings of high frequency, which are larger, are stronger:

    x ↦ x + Re F⁻¹(M_f ⊙ F(δ))        M_f = 1 where both k_row and k_column lie in [−b, b − 1] and not in [−a, a − 1]
                                       a = ⌊(f − 0.05π) h / 2π⌋, b = ⌊(f + 0.05π) h / 2π⌋, by width for columns

with k the number of waves in the image. As a square of even side it reaches one step further below zero than above.

Source: Park & Kim 2022, "How Do Vision Transformers Work?"; Park et al. 2023, "What Do Self-Supervised Vision
Transformers Learn?", Figure 8.

Shapes: B images of h × w pixels, K coefficients in the band.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.keyed_random import Keys, fold, id_keys, uniform

STRENGTH = 0.1  # root mean square
HALF = 0.05  # half the width of a band, in units of π
PURPOSE, SIGNS = 11, 12  # of the random numbers
KINDS = ("gaussian", "sign")


def name_of(frequency: float, strength: float = STRENGTH, kind: str = "gaussian") -> str:
    """Name of the view.

    >>> name_of(0.3), name_of(0.3, 0.2), name_of(0.3, kind="sign")
    ('noise:0.3', 'noise:0.3,0.2', 'noise:0.3,0.1,sign')
    """
    if kind == "sign":
        return f"noise:{frequency:g},{strength:g},sign"
    return f"noise:{frequency:g}" + (f",{strength:g}" if strength != STRENGTH else "")


def view(name: str, pixels: Tensor, ids: Sequence[str], seed: int = 0) -> Tensor:
    """The images as `noise:FREQUENCY,STRENGTH` or `noise:FREQUENCY,STRENGTH,sign` shows them, float32, not clipped.

    Pixels (B, 3, h, w) are uint8, or floats in [0, 1].
    """
    number = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"
    match = re.fullmatch(rf"noise:{number}(?:,{number}(,sign)?)?", name)
    if match is None:
        raise InputError(f"The view {name!r} is not of the form noise:FREQUENCY,STRENGTH, such as noise:0.3")
    values = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
    size = (values.shape[-2], values.shape[-1])
    make = sign_noise if match[3] else band_noise
    noise = make(fold(id_keys(np.array(ids)), seed), size, float(match[1]), float(match[2] or STRENGTH))
    return values + noise.to(values.device)


def band_noise(keys: Keys, size: tuple[int, int], frequency: float, strength: float = STRENGTH) -> Tensor:
    """Noise (B, 3, h, w) of radial frequencies within 0.05π of `frequency` · π, one image for each key.

    >>> noise = band_noise(np.arange(2, dtype=np.uint64), (32, 48), 0.5)
    >>> noise.shape, noise.square().mean((1, 2, 3)).sqrt()
    (torch.Size([2, 3, 32, 48]), tensor([0.1000, 0.1000]))
    """
    height, width = size
    where = band(size, frequency)
    _check(size, frequency, "gaussian")
    half_plane = height * (width // 2 + 1)
    slots = (np.arange(3)[:, None] * half_plane + where).ravel().tolist()  # of each channel
    # Box–Muller: two uniform numbers are the length and the angle of a complex normal one.
    length, angle = (uniform(fold(keys, PURPOSE, part), slots) for part in range(2))
    normal = np.sqrt(-2 * np.log1p(-length)) * np.exp(2j * math.pi * angle)
    columns = where % (width // 2 + 1)
    # Of these columns irfft2 keeps the conjugate-symmetric part alone, which is half of the variance.
    edge = (columns == 0) | (2 * columns == width)
    normal = normal.reshape(len(keys), 3, -1) * np.where(edge, math.sqrt(2), 1)
    spectrum = torch.zeros(len(keys), 3, half_plane, dtype=torch.complex64, device="cpu")
    spectrum[:, :, torch.from_numpy(where)] = torch.from_numpy(normal.astype(np.complex64))
    noise = torch.fft.irfft2(spectrum.view(len(keys), 3, height, -1), s=size)
    rms = torch.linalg.vector_norm(noise, dim=(1, 2, 3), keepdim=True) / math.sqrt(3 * height * width)
    scaled: Tensor = noise * (strength / rms)
    return scaled


def sign_noise(keys: Keys, size: tuple[int, int], frequency: float, strength: float = STRENGTH) -> Tensor:
    """Noise (B, 3, h, w) of ± `strength` at every pixel, cut to a square ring of frequencies, one image for each key.

    >>> noise = sign_noise(np.arange(2, dtype=np.uint64), (32, 32), 0.5)
    >>> noise.shape, noise.square().mean((1, 2, 3)).sqrt()
    (torch.Size([2, 3, 32, 32]), tensor([0.0175, 0.0171]))
    """
    _check(size, frequency, "sign")
    drawn = uniform(fold(keys, SIGNS), list(range(3 * size[0] * size[1])))
    white = torch.from_numpy(np.where(drawn < 0.5, -strength, strength).astype(np.float32)).view(len(keys), 3, *size)
    kept = torch.from_numpy(square_ring(size, frequency).astype(np.float32))
    noise: Tensor = torch.fft.irfft2(torch.fft.rfft2(white) * kept, s=size)
    return noise


def has_frequencies(size: tuple[int, int], frequency: float, kind: str) -> bool:
    """Whether images of this size have any frequency in the band."""
    return bool(square_ring(size, frequency).any() if kind == "sign" else len(band(size, frequency)))


def _check(size: tuple[int, int], frequency: float, kind: str) -> None:
    if not has_frequencies(size, frequency, kind):
        raise InputError(
            f"Images of {size[0]} × {size[1]} pixels have no frequency within {HALF}π of {frequency:g}π; choose "
            "another frequency, or larger images"
        )


@lru_cache(maxsize=64)
def square_ring(size: tuple[int, int], frequency: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """What is left of each coefficient of `rfft2`, (h, w/2 + 1): 1 within the ring, ½ where it holds ω but not −ω.

    That is what the real part keeps of a ring that is not symmetric.
    """

    def square(to: float) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Which of all coefficients (h, w) lie in the square."""
        inside = []
        for length in size:
            half = min(max(math.floor(to * length / 2 + 1e-9), 0), length // 2)
            waves = np.fft.fftfreq(length, 1 / length)
            inside.append((waves >= -half) & (waves <= half - 1))
        return np.logical_and(inside[0][:, None], inside[1])

    ring = square(frequency + HALF) & ~square(frequency - HALF)
    opposite = np.roll(ring[::-1, ::-1], (1, 1), (0, 1))  # the coefficient of −ω
    both: np.ndarray[tuple[int, int], np.dtype[np.float64]] = (ring + opposite.astype(np.float64)) / 2
    return both[:, : size[1] // 2 + 1]


@lru_cache(maxsize=64)
def band(size: tuple[int, int], frequency: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Coefficients of the half plane of `rfft2` (h · (w/2 + 1), flattened) within the band; never the mean.

    >>> band((8, 8), 0.5).tolist()
    [2, 10, 30]
    """
    rows, columns = 2 * np.fft.fftfreq(size[0]), 2 * np.fft.rfftfreq(size[1])  # in units of π
    radius = np.hypot(rows[:, None], columns)
    within = (np.abs(radius - frequency) <= HALF + 1e-9) & (radius > 0)
    return np.flatnonzero(within)
