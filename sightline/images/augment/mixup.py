"""Mixup and CutMix: two images become one, and so do their labels.

    mixup     x = λ·x₁ + (1 − λ)·x₂                      λ ~ Beta(α, α)     Zhang et al. 2018
    CutMix    x = x₁ but for a box of x₂                 1 − λ the share of the box     Yun et al. 2019
    target    y = λ·y₁ + (1 − λ)·y₂                      y of label k: 1 − ε + ε/K at k, ε/K elsewhere (smoothing ε)

One λ for all images of a step, as in the papers' fine-tuning; where both are wanted, a coin decides. Partners are
neighbours in the batch, (0, 1), (2, 3), …: a batch is in random order, so that is as good as any pairing, and processes
that have even shares of a batch need nothing from each other.

The loss is the cross-entropy with such targets, of fine-tuning and of supervised pre-training:

    L = −Σ_b Σ_k y_bk · log softmax(f(x_b))_k / Σ_b Σ_k y_bk

B images, K classes.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Mix(NamedTuple):
    """How the images of a step are mixed with their partners."""

    share: float  # λ, of the image itself
    box: tuple[slice, slice] | None = None  # rows and columns that are the partner's; None: mixup


def draw_mix(mixup: float, cutmix: float, size: tuple[int, int], seed: int, step: int) -> Mix | None:
    """The mix of a step for images of (height, width), by the parameters α of both; 0 is without.

    >>> mix = draw_mix(0.8, 0.0, (48, 48), seed=0, step=3)
    >>> round(mix.share, 3), mix.box
    (0.504, None)
    >>> draw_mix(0.0, 0.0, (48, 48), seed=0, step=3) is None
    True
    """
    if not mixup and not cutmix:
        return None
    chance = np.random.default_rng((seed, step))  # made for this step alone, so that there is no state to keep
    cut = bool(cutmix) and (not mixup or chance.random() < 0.5)
    share = float(chance.beta(*(cutmix if cut else mixup,) * 2))
    if not cut:
        return Mix(share)
    rows, columns = (_interval(length, (1 - share) ** 0.5, chance.random()) for length in size)
    covered = (rows.stop - rows.start) * (columns.stop - columns.start)
    return Mix(1 - covered / (size[0] * size[1]), (rows, columns))


def _interval(length: int, share: float, where: float) -> slice:
    """A share of a length around a place in it, cut off at its ends."""
    half, centre = int(length * share) // 2, int(length * where)
    return slice(max(0, centre - half), min(length, centre + half))


def partners(x: Tensor) -> Tensor:  # (B, …) -> (B, …), B even
    """What each row is mixed with.

    >>> partners(torch.arange(4))
    tensor([1, 0, 3, 2])
    """
    return x.reshape(-1, 2, *x.shape[1:]).flip(1).reshape(x.shape)


def mix_pixels(x: Tensor, mix: Mix) -> Tensor:  # (B, 3, h, w) -> (B, 3, h, w)
    """Images mixed with their partners."""
    others = partners(x)
    if mix.box is None:
        return torch.lerp(others, x, mix.share)
    mixed = x.clone()
    mixed[(..., *mix.box)] = others[(..., *mix.box)]
    return mixed


def mixed_targets(labels: Tensor, classes: int, smoothing: float, mix: Mix | None) -> Tensor:  # (B,) -> (B, K)
    """Targets of a cross-entropy; the row of an image without a label (−1) is 0, so that it has no say.

    >>> mixed_targets(torch.tensor([0, 1]), 2, 0.0, Mix(0.75))
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]])
    """
    labelled = (labels >= 0).unsqueeze(1)
    sharp = torch.nn.functional.one_hot(labels.clamp(min=0), classes).float()
    targets = (sharp * (1 - smoothing) + smoothing / classes) * labelled
    return targets if mix is None else torch.lerp(partners(targets), targets, mix.share)
