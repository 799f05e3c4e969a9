"""Clouds of tokens, their silhouettes and t-SNE of them, on whole arrays.

N tokens of an image, n tokens of several, D width.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.arrays import Array, as_tensor, like
from sightline.core.errors import InputError

AXES = 3
PERPLEXITY, ITERATIONS = 20, 500


def token_clouds(before: Array, after: Array) -> Array:
    """Coordinates of tokens before and after attention in the SVD basis of both: two (N, D) → float64 (2, N, 3).

    The origin is the mean of all tokens; the first token lies on the positive side of every axis. Axes beyond the
    width or the number of tokens are zero; tokens that are not finite give NaN.

    >>> before = np.array([[0.0, 1.0], [0.0, -1.0]])
    >>> token_clouds(before, before + np.array([6.0, 0.0])).round(6)[..., :2].tolist()
    [[[3.0, 1.0], [3.0, -1.0]], [[-3.0, 1.0], [-3.0, -1.0]]]
    """
    x, y = as_tensor(before), as_tensor(after)
    if x.ndim != 2 or x.shape != y.shape:
        raise InputError(f"A cloud is tokens (N, D) twice; got {tuple(x.shape)} and {tuple(y.shape)}")
    return like(before, _clouds(torch.cat([x, y]).double()))


def _clouds(x: Tensor) -> Tensor:
    """Coordinates of the two halves of float64 tokens (2 N, D) → (2, N, 3)."""
    x = x - x.mean(0)
    if not x.isfinite().all():
        return torch.full((2, len(x) // 2, AXES), math.nan, dtype=x.dtype, device=x.device)
    if len(x) <= x.shape[1]:  # the smaller Gram matrix: X Xᵀ = U Σ² Uᵀ, or Xᵀ X = V Σ² Vᵀ
        squares, vectors = torch.linalg.eigh(x @ x.T)
        points = vectors * squares.clamp(min=0).sqrt()
    else:
        points = x @ torch.linalg.eigh(x.T @ x).eigenvectors
    points = torch.nn.functional.pad(points.flip(1), (0, AXES))[:, :AXES]
    return (points * torch.where(points[0] < 0, -1.0, 1.0)).reshape(2, -1, AXES)


def silhouette(tokens: Array, groups: Array) -> float:
    """Mean silhouette of tokens (n, D) in groups (n,), by Euclidean distance; a token alone in its group counts as 0.

    >>> tokens = np.array([[0.0], [1.0], [10.0], [11.0]])
    >>> round(silhouette(tokens, np.array([0, 0, 1, 1])), 4), round(silhouette(tokens, np.array([0, 1, 0, 1])), 4)
    (0.8997, -0.45)
    """
    x = as_tensor(tokens).detach()
    of = groups if isinstance(groups, Tensor) else torch.as_tensor(np.unique(groups, return_inverse=True)[1])
    if x.ndim != 2 or of.shape != x.shape[:1] or len(torch.unique(of)) < 2:
        raise InputError(
            f"A silhouette needs tokens (n, D) and the group of each, at least two groups; got {tuple(x.shape)} and "
            f"{tuple(of.shape)}"
        )
    return float(silhouettes(distances_of(x), of).mean())


def distances_of(x: Tensor) -> Tensor:
    """Euclidean distances of all pairs, (n, D) → float64 (n, n); zero where nothing but rounding is left."""
    x = x.double()
    x = x - x.mean(0)
    squares = x.square().sum(1)
    both = squares[:, None] + squares
    distances = both - 2 * (x @ x.T)
    return distances.masked_fill_(distances < 1e-14 * both, 0.0).fill_diagonal_(0.0).sqrt_()


def silhouettes(distances: Tensor, groups: Tensor) -> npt.NDArray[Any]:
    """Silhouette of each token (n,) from distances (n, n)."""
    from sklearn.metrics import silhouette_samples

    if len(torch.unique(groups)) == len(groups):  # each is alone in its group, which scikit-learn refuses
        return np.zeros(len(groups))
    if not distances.isfinite().all():
        return np.full(len(groups), np.nan)
    square, of = distances.numpy(force=True), groups.numpy(force=True)
    widths: npt.NDArray[Any] = silhouette_samples(square, of, metric="precomputed")
    return widths


def silhouettes_left_out(distances: Tensor, images: Tensor, groups: Tensor, out: Tensor) -> npt.NDArray[np.float64]:
    """Mean silhouette of tokens in groups (n,) without some of their images: those of each row of `out` (G, I).

    `images` (n,) is the image of each token, from 0 on. NaN where fewer than two groups are left.

    >>> x = torch.tensor([[0.0], [1.0], [10.0], [11.0], [30.0], [31.0]])
    >>> of = torch.arange(6) // 2
    >>> out = torch.tensor([[False, False, False], [False, False, True]])
    >>> silhouettes_left_out(distances_of(x), of, of, out).round(4).tolist() == [
    ...     round(silhouette(x, of), 4), round(silhouette(x[:4], of[:4]), 4)]
    True
    """
    _, of = torch.unique(groups, return_inverse=True)
    member = torch.nn.functional.one_hot(of).double()  # (n, C)
    stays = ~out[:, images]  # (G, n)
    sums = torch.tensordot(distances, stays.T.double()[:, :, None] * member[:, None], 1).transpose(0, 1)  # (G, n, C)
    count = stays.double() @ member  # (G, C)
    alone = torch.gather(count, 1, of.expand(len(out), -1)) <= 1
    mine = member.bool()
    within = (sums * member).sum(-1) / (torch.gather(count, 1, of.expand(len(out), -1)) - 1)
    others = (sums / count[:, None]).masked_fill(mine | (count[:, None] == 0), math.inf).amin(-1)
    scores = ((others - within) / torch.maximum(others, within)).masked_fill(alone, 0.0)
    scores = scores.nan_to_num(nan=0.0)  # tokens that coincide with those of their group and of another one
    mean = torch.where(stays, scores, 0.0).sum(1) / stays.sum(1)
    rest: npt.NDArray[np.float64] = torch.where((count > 0).sum(1) > 1, mean, math.nan).numpy(force=True)
    return rest


def embed(x: Tensor, seed: int) -> npt.NDArray[Any]:
    """t-SNE of tokens, (n, D) → (n, 2), on one thread: several add up in any order, and no picture would come twice."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        perplexity = min(PERPLEXITY, (len(x) - 1) / 3)
        maker = TSNE(perplexity=perplexity, init="pca", max_iter=ITERATIONS, random_state=seed)
        points: npt.NDArray[Any] = maker.fit_transform(x.numpy())
    return points
