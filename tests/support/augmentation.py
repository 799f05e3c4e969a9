"""Images for tests of augmentation, and how their distributions are compared."""

import itertools
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from sightline.core.keyed_random import Keys, fold

PLAIN: dict[str, Any] = {"crop": None, "flip": 0.0}
COLOURS = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
UNLIKELY = 1e-4


def keys_of(n: int, seed: int = 0) -> Keys:
    return fold(np.arange(n, dtype=np.uint64), seed)


def images(n: int, height: int = 20, width: int = 20, seed: int = 0) -> Tensor:
    """Noise over smooth colours, with some grey, black, white and pure pixels, where hues are special."""
    generator = torch.Generator().manual_seed(seed)
    smooth = TF.resize(torch.rand(n, 3, 4, 4, generator=generator), [height, width])
    x = (smooth + 0.2 * torch.randn(n, 3, height, width, generator=generator)).clamp(0, 1)
    x[:, :, 0, :5] = x[:, :1, 0, :5]
    corners = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3))).T  # (3, 8)
    x[:, :, 1, :8] = corners
    x[:, :, 2, :8] = 0.25 + 0.5 * corners
    return x


def as_bytes(x: Tensor) -> Tensor:
    return (x * 255).round().to(torch.uint8)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def theirs_drawn(transform: v2.Transform, n: int, shape: tuple[int, ...] = (3, 8, 8)) -> list[dict[str, Any]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [transform.make_params([torch.empty(shape)]) for _ in range(n)]


def same_distribution(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Few values: chi-square of the two histograms; many: Kolmogorov–Smirnov."""
    values = np.unique(np.concatenate([ours, theirs]))
    if len(values) == 1:
        return
    if len(values) > 30:
        assert stats.ks_2samp(ours, theirs).pvalue > UNLIKELY
        return
    table = np.array([[(x == value).sum() for value in values] for x in (ours, theirs)])
    rare = table.sum(axis=0) < 20
    table = np.column_stack([table[:, ~rare], *([table[:, rare].sum(axis=1)] if rare.any() else [])])
    assert stats.chi2_contingency(table).pvalue > UNLIKELY
