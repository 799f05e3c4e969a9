"""A softmax trained on pixels: scores of patches, interpolated to pixels, against the class of each pixel.

Features are standardised, z = (x − μ) / σ, which is what BatchNorm does to them; one linear layer gives the scores of
every patch, and those of a pixel are interpolated between the four patches around it. Interpolation is linear, so that
scores of a few pixels can be had without those of all others: each step sees some pixels of some images.

n images, P patches, D width, C classes, m pixels of an image.
"""

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from sightline.images.label_maps import channels, corners, seen

BATCH, AT_ONCE = 32, 64  # images of a step, and pixels of each
WEIGHT_DECAY = 1e-3


class _Rows(Protocol):
    """Features of images, in memory or on disk."""

    def __getitem__(self, rows: Any, /) -> Any: ...


class Pixels(NamedTuple):
    """Drawn pixels of images."""

    patches: NDArray[np.int64]  # (n, m, 4): the patches around each
    weights: NDArray[np.float32]  # (n, m, 4): of their scores
    labels: NDArray[np.int64]  # (n, m), −1: none


def draw_pixels(
    segmentation: NDArray[np.int64], windows: Any, grid: tuple[int, int], count: int, random: np.random.Generator
) -> Pixels:
    """Pixels of one image that are seen and have a class, drawn with replacement; without a class where none has."""
    rows, columns = windows
    part = channels(segmentation[np.ix_(seen(rows), seen(columns))])
    known = np.flatnonzero(part.ravel() >= 0)
    chosen = known[random.integers(0, len(known), count)] if len(known) else np.zeros(count, np.int64)
    y, x = np.divmod(chosen, part.shape[1])
    (top, bottom, down), (left, right, across) = (corners(w, n) for w, n in zip(windows, grid, strict=True))
    patches = [a[y] * grid[1] + b[x] for a in (top, bottom) for b in (left, right)]
    weights = [u * v for u in (1 - down[y], down[y]) for v in (1 - across[x], across[x])]
    labels = part.ravel()[chosen] if len(known) else np.full(count, -1)
    return Pixels(np.stack(patches, -1), np.stack(weights, -1).astype(np.float32), labels)


def stack_pixels(parts: list[Pixels]) -> Pixels:
    """Of several images, one after the other."""
    return Pixels(*(np.stack(part) for part in zip(*parts, strict=True)))


def fit_softmax(
    features: _Rows,
    pixels: Pixels,
    start: tuple[Tensor, Tensor],
    mean: Tensor,
    deviation: Tensor,
    *,
    steps: int,
    lr: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Weight (D, C) and bias (C,) of features as they are, from `start`; AdamW with a cosine.

    `features[rows]` gives (k, P · D) of these images. The problem is convex: where it starts only saves time. All is
    computed where `start` is; what is drawn does not depend on that.
    """
    device = start[0].device
    centre, scale = mean.float(), deviation.float().clamp(min=1e-6 * float(deviation.max()))
    # x W + b = z (σ W) + (b + μ W)
    weight = (start[0].double() * scale[:, None]).float().requires_grad_()
    bias = (start[1].double() + mean.double() @ start[0].double()).float().requires_grad_()
    patches, weights, labels = (torch.from_numpy(part).to(device) for part in pixels)
    usable = torch.from_numpy(np.flatnonzero((pixels.labels >= 0).any(1)))
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([weight, bias], lr=lr, weight_decay=WEIGHT_DECAY)
    order = torch.empty(0, dtype=torch.int64, device="cpu")
    with torch.enable_grad():
        for step in range(steps):
            if len(order) < min(BATCH, len(usable)):
                order = usable[torch.randperm(len(usable), generator=random, device="cpu")]
            chosen, order = order[:BATCH], order[BATCH:]
            x = torch.from_numpy(np.array(features[chosen.numpy()], np.float32)).to(device)
            scores = ((x.view(len(chosen), -1, len(centre)) - centre) / scale) @ weight + bias  # (k, P, C)
            drawn = torch.randperm(labels.shape[1], generator=random, device="cpu")[:AT_ONCE]
            some = (chosen[:, None].to(device), drawn.to(device))
            around = patches[some].flatten(1)[..., None].expand(-1, -1, scores.shape[2])
            corners = scores.gather(1, around).unflatten(1, (-1, 4))
            logits = (corners * weights[some][..., None]).sum(2)
            loss = F.cross_entropy(logits.flatten(0, 1), labels[some].flatten(), ignore_index=-1)
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    final = weight.detach() / scale[:, None]
    return final, bias.detach() - centre @ final
