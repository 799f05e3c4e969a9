"""Similarity of two representations of the same images, beside CKA: whole arrays, and the parts for many layers.

With the columns of X and Y (images × features) centred,

    Procrustes    ‖XᵀY‖_* / (‖X‖_F ‖Y‖_F)            the cosine of X and the best rotation of Y
    shape         arccos of that, the angle: a metric, triangle inequality included
    SVCCA         mean_k ρ_k                          canonical correlations of the leading principal components
    PWCCA         Σ_k α_k ρ_k,  Σ_k α_k = 1           α_k ∝ Σ_j |⟨h_k, x_j⟩|, what the features have of variate h_k
    RSA           Spearman's correlation of the dissimilarities of all pairs of images
    mutual k-NN   mean over images of |N_k(x) ∩ N_k(y)| / k, neighbours by cosine

The first four need only the cross-moment XᵀY (D × D′), summed over blocks of images. Where there are fewer images than
features, X is replaced by its coordinates in the span of the images, X = R Q with Qᵀ's columns orthonormal: nothing of
this sees a rotation, and what is as wide as all tokens of an image becomes as narrow as the number of images.

Influences. All are smooth enough in the weights w of the images to tell how a value moves with them to first order.
For a maximum over rotations or directions these may be held fixed (envelope theorem): with Q the best rotation

    ∂/∂w_i ⟨Q, Σ w_i x_i y_iᵀ⟩ / (‖X‖ ‖Y‖) = x_iᵀ Q y_i / (‖X‖ ‖Y‖) − ½ s (‖x_i‖²/‖X‖² + ‖y_i‖²/‖Y‖²)

so that resampling images needs no further decomposition.

Sources: Williams et al. 2021, "Generalized Shape Metrics on Neural Representations"; Ding et al. 2021; Raghu et al.
2017 (SVCCA); Morcos et al. 2018 (PWCCA); Kriegeskorte et al. 2008 (RSA); Huh et al. 2024 (mutual k-NN).

Shapes: n images, D features (d after the reduction), r components, K canonical correlations, S layers, G groups.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata
from torch import Tensor

from sightline.core.arrays import as_tensor
from sightline.core.errors import InputError, nearest
from sightline.images.sets import FEWEST
from sightline.measure.estimators.cka import ratio
from sightline.measure.estimators.neighbours import BLOCK_NUMBERS, Rows
from sightline.measure.estimators.resampling import draw_groups, percentile_ends

BLOCK = 4096  # images that are read at a time
DISSIMILARITIES = ("euclidean", "cosine", "correlation")
WEIGHTS = ("both", "x", "y")
STORED, EXACT = (torch.finfo(kind).eps for kind in (torch.float32, torch.float64))  # features of a pass, and arrays
Read = Callable[[Tensor], Tensor]  # rows of the images → their features, (b, D)


# Whole arrays


def procrustes(x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike) -> float:
    """Orthogonal Procrustes similarity of two arrays (images, …): 1 up to rotation, scale and translation.

    The Procrustes distance of normalised arrays (Ding et al. 2021) is 2 − 2 · this. NaN where one is constant.

    >>> x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    >>> round(procrustes(x, 3 * x.flip(1) + 100), 6)
    1.0
    """
    return _of_arrays(x, y, "procrustes")


def angular_distance(x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike) -> float:
    """Angular shape metric (Williams et al. 2021): the angle between x and the best rotation of y, 0 to π/2.

    >>> x = torch.eye(4)[:, :2]
    >>> round(angular_distance(x, x[[1, 0, 2, 3]]), 6), round(angular_distance(x, x[[2, 3, 0, 1]]), 6)
    (0.0, 1.230959)
    """
    return math.acos(min(procrustes(x, y), 1.0))


def svcca(x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike, variance: float = 0.99) -> float:
    """Mean canonical correlation of the principal components that explain this share of the variance of each.

    With `variance=1` it is CCA itself, which no invertible linear map changes, and which is 1 whatever the features
    where these are as many as the images.

    >>> x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    >>> round(svcca(x, x @ torch.diag(torch.arange(1.0, 6)), variance=1), 6)
    1.0
    """
    return _of_arrays(x, y, "svcca", variance)


def pwcca(x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike, variance: float = 0.99, weights: str = "both") -> float:
    """Projection-weighted CCA: canonical correlations weighted by how much of the features they account for.

    `weights`: those of the features of x, as published, of y, or the mean of both, which is symmetric. NaN where both
    have more components together than there are images: several correlations are then 1, and their weights chance.

    >>> x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    >>> round(pwcca(x, x), 6)
    1.0
    """
    if weights not in WEIGHTS:
        raise InputError(f"PWCCA has no weights {weights!r}{nearest(weights, WEIGHTS)}")
    return _of_arrays(x, y, "pwcca", variance, weights)


def rsa(x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike, dissimilarity: str = "euclidean") -> float:
    """Representational similarity analysis: Spearman's correlation of the dissimilarities of all pairs of images.

    `dissimilarity`: euclidean, cosine, or correlation (1 − Pearson's over features); only the first one does not see a
    translation of the features, and the last one sees a rotation. It takes memory for all pairs of images.

    >>> x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    >>> round(rsa(x, 3 * x.flip(1) + 100), 6)
    1.0
    """
    check_choices(dissimilarity=dissimilarity)
    matrices = [centred_ranks(v, dissimilarity) for v in _same_images(x, y)]
    return float(ratio(rank_products(matrices, [torch.arange(len(matrices[0]), device="cpu")])[0])[0, 1])


def mutual_knn(x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike, k: int = 10) -> float:
    """Mutual k-NN alignment (Huh et al. 2024): the share of the k nearest images, by cosine, that both agree on.

    Unrelated features come out at k / (n − 1), so numbers compare only for the same number of images. NaN where all
    images of one of them have the same direction.

    >>> x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    >>> mutual_knn(x, 3 * x.flip(1))
    1.0
    """
    a, b = _same_images(x, y)
    check_choices(k=k)
    if k >= len(a):
        raise InputError(f"Mutual k-NN of {k} neighbours needs more than {k} images, not {len(a)}")
    near = [neighbours_of(v, k, _eps(given)) for v, given in ((a, x), (b, y))]
    return math.nan if near[0] is None or near[1] is None else float(overlap(near[0], near[1]).mean())


def check_choices(variance: float = 0.99, k: int = 10, dissimilarity: str = "euclidean") -> None:
    """Settings that cannot be are an InputError."""
    if not 0 < variance <= 1:
        raise InputError(f"Principal components explain a share of the variance above 0 and up to 1, not {variance}")
    if k < 1:
        raise InputError(f"Mutual k-NN needs at least one neighbour, not {k}")
    if dissimilarity not in DISSIMILARITIES:
        raise InputError(f"RSA has no dissimilarity {dissimilarity!r}{nearest(dissimilarity, DISSIMILARITIES)}")


def _same_images(x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike) -> tuple[Tensor, Tensor]:
    """As float64 (n, D)."""
    a, b = as_tensor(x), as_tensor(y)
    if a.ndim < 2 or b.ndim < 2 or len(a) != len(b) or len(a) < FEWEST:
        raise InputError(
            f"Similarity needs features (images, …) of the same images twice, at least {FEWEST} of them; "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    return a.flatten(1).double(), b.flatten(1).double()


def _eps(given: Tensor | npt.ArrayLike) -> float:
    """The rounding of an array's own numbers; whole ones have none before they become float64."""
    kind = as_tensor(given).dtype
    return torch.finfo(kind).eps if kind.is_floating_point else EXACT


def _of_arrays(
    x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike, measure: str, variance: float = 0.99, weights: str = "both"
) -> float:
    check_choices(variance=variance)
    a, b = (cloud_of(v.__getitem__, len(v), variance, EXACT) for v in _same_images(x, y))
    if a.constant or b.constant:
        return math.nan
    return compare(a, b, (measure,), weights=weights, influences=False)[measure].value


# Clouds of images, and their cross-moments


@dataclass(frozen=True, eq=False)
class Cloud:
    """Centred features of n images: their coordinates in memory if they are few, else read in blocks."""

    read: Read
    mean: Tensor  # (d,)
    images: int
    square: float  # ‖X‖²_F
    whitening: Tensor  # (d, r): X W has orthonormal columns, the principal components
    loadings: Tensor  # (D, r): Xᵀ X W, what each feature has of each component

    @property
    def constant(self) -> bool:
        """Whether all images are the same, but for rounding."""
        return self.whitening.shape[1] == 0

    def blocks(self, order: Tensor | None = None) -> Iterator[Tensor]:
        """The images, or those of `order`, some at a time."""
        rows = torch.arange(self.images, device="cpu") if order is None else order
        return (self.read(part) - self.mean for part in torch.split(rows, BLOCK))


def cloud_of(read: Read, images: int, variance: float, eps: float = STORED) -> Cloud:
    """The cloud of features that `read` gives of these images, and the components that explain the variance.

    Features that are not finite have a square that is not. `eps` is the rounding that the features come with.
    """
    parts = torch.split(torch.arange(images, device="cpu"), BLOCK)
    mean = torch.stack([read(part).double().sum(0) for part in parts]).sum(0) / images
    if images <= len(mean):
        whole = read(torch.arange(images, device="cpu")).double() - mean
        if not whole.isfinite().all():
            return Cloud(read, mean, images, math.nan, mean[:, None], mean[:, None])
        coordinates = torch.linalg.qr(whole.T, mode="r").R.T  # (n, n): of the same lengths and angles
        values, whitening = _components(coordinates.T @ coordinates, _rounding(mean, images, eps), variance)
        loadings = whole.T @ (coordinates @ whitening)
        square = float(values.sum())
        return Cloud(coordinates.__getitem__, coordinates.new_zeros(()), images, square, whitening, loadings)
    moment = mean.new_zeros(len(mean), len(mean))
    for rows in parts:
        centred = read(rows).double() - mean
        moment += centred.T @ centred
    if not moment.isfinite().all():
        return Cloud(read, mean, images, math.nan, mean[:, None], mean[:, None])
    values, whitening = _components(moment, _rounding(mean, images, eps), variance)
    return Cloud(lambda rows: read(rows).double(), mean, images, float(values.sum()), whitening, moment @ whitening)


def _rounding(mean: Tensor, images: int, eps: float) -> float:
    """What is left of constant features: about eps of each."""
    return images * float(mean.square().sum()) * (8 * eps) ** 2


def _components(moment: Tensor, rounding: float, variance: float) -> tuple[Tensor, Tensor]:
    """All eigenvalues of XᵀX, and its leading eigenvectors divided by the roots of theirs, (d, r)."""
    values, vectors = torch.linalg.eigh(moment)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    share = values.cumsum(0) / values.sum()
    count = int((share < variance * (1 - 1e-12)).sum()) + 1 if values.sum() > rounding else 0
    large = values[:count] > len(values) * torch.finfo(torch.float64).eps * values[0]
    return values, vectors[:, :count][:, large] / values[:count][large].sqrt()


class Compared(NamedTuple):
    """A number of a pair of layers, and its first-order change with the weight of each image, (n,)."""

    value: float
    influences: Tensor | None = None


def compare(
    a: Cloud,
    b: Cloud,
    measures: Collection[str],
    order: Tensor | None = None,
    weights: str = "both",
    influences: bool = True,
) -> dict[str, Compared]:
    """Procrustes, SVCCA and PWCCA of two clouds of the same images; `order` pairs image i of `a` with order[i] of `b`.

    Influences take another look at the images.
    """
    cross = sum(x.T @ y for x, y in zip(a.blocks(), b.blocks(order), strict=True))
    assert isinstance(cross, Tensor)
    parts: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {}
    if "procrustes" in measures:
        parts["procrustes"] = _rotation(a, b, cross, influences)
    if {"svcca", "pwcca"} & set(measures):
        parts |= {name: part for name, part in _canonical(a, b, cross, weights).items() if name in measures}
    if not influences:
        return {name: Compared(value) for name, (value, _) in parts.items()}
    by_measure: dict[str, list[Tensor]] = {name: [] for name in parts}
    for x, y in zip(a.blocks(), b.blocks(order), strict=True):
        for name, (_, of_images) in parts.items():
            by_measure[name].append(of_images(x, y))
    return {name: Compared(value, torch.cat(by_measure[name])) for name, (value, _) in parts.items()}


def _rotation(a: Cloud, b: Cloud, cross: Tensor, influences: bool) -> tuple[float, Callable[[Tensor, Tensor], Tensor]]:
    """Procrustes, and the influence of images."""
    norm = math.sqrt(a.square * b.square)
    if not influences:  # singular vectors take several times as long as the values
        return float(torch.linalg.svdvals(cross).sum()) / norm, lambda x, y: x
    u, values, v = torch.linalg.svd(cross, full_matrices=False)
    value, best = float(values.sum()) / norm, u @ v

    def of_images(x: Tensor, y: Tensor) -> Tensor:
        lengths = x.square().sum(1) / a.square + y.square().sum(1) / b.square
        moved: Tensor = ((x @ best) * y).sum(1) / norm - value / 2 * lengths
        return moved

    return value, of_images


def _canonical(
    a: Cloud, b: Cloud, cross: Tensor, by: str
) -> dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]]:
    """SVCCA and PWCCA, and the influence of images; components and weights are held fixed."""
    u, correlations, v = torch.linalg.svd(a.whitening.T @ cross @ b.whitening, full_matrices=False)
    shares = [(side / side.sum()) for side in ((a.loadings @ u).abs().sum(0), (b.loadings @ v.T).abs().sum(0))]
    projected = {"both": (shares[0] + shares[1]) / 2, "x": shares[0], "y": shares[1]}[by]
    left, right = a.whitening @ u, b.whitening @ v.T
    if len(u) + v.shape[1] > a.images and float(correlations.min()) < 1 - 1e-9:
        projected = torch.full_like(projected, math.nan)  # directions of equal correlation may be turned at will

    def part(weights: Tensor) -> tuple[float, Callable[[Tensor, Tensor], Tensor]]:
        def of_images(x: Tensor, y: Tensor) -> Tensor:
            h, g = x @ left, y @ right  # canonical variates, (b, K)
            moved: Tensor = (h * g - correlations / 2 * (h.square() + g.square())) @ weights
            return moved

        return float(correlations @ weights), of_images

    return {"svcca": part(torch.full_like(projected, 1 / len(projected))), "pwcca": part(projected)}


# Pairs of images, and neighbours


def centred_ranks(x: Tensor, dissimilarity: str) -> Tensor:
    """Ranks of the dissimilarities of all pairs of images, minus their mean, as float32 (n, n) with a zero diagonal.

    Up to 2,896 images these ranks, multiples of ½, are exact.
    """
    x = x.double() - (x.double().mean(1, keepdim=True) if dissimilarity == "correlation" else 0)
    there = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
    if dissimilarity != "euclidean":  # of vectors of length one, 1 − cosine is half of the squared distance
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        there, x = norms > 0, torch.where(norms > 0, x / norms, 0.0)
    x = x - x.mean(0)  # 1 − cosine itself would lose all digits where every direction is nearly the same
    gram = x @ x.T
    apart = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    apart = torch.where(there & there.T, apart, 2.0)  # zeros have a cosine of zero with everything
    n = len(x)
    upper = torch.triu_indices(n, n, 1, device=x.device)
    ranks = torch.from_numpy(rankdata(apart[upper[0], upper[1]].numpy(force=True)))
    matrix = torch.zeros(n, n, device=x.device)
    matrix[upper[0], upper[1]] = (ranks - (len(ranks) + 1) / 2).float().to(x.device)
    return matrix + matrix.T


def rank_products(
    matrices: Sequence[Tensor], groups: Sequence[Tensor], order: Tensor | None = None
) -> npt.NDArray[np.float64]:
    """Σ over the pairs (i, j) with i in a group, of the products of the ranks of two layers: (G, S, S).

    `order` pairs image i of one layer with order[i] of the other.
    """
    blocks = []
    for rows in groups:
        mine = torch.stack([matrix[rows].double().flatten() for matrix in matrices])
        other = mine
        if order is not None:
            other = torch.stack([matrix[order[rows]][:, order].double().flatten() for matrix in matrices])
        blocks.append((mine @ other.T).numpy(force=True))
    return np.stack(blocks)


def neighbours_of(x: Tensor, k: int, eps: float = STORED) -> Tensor | None:
    """The k nearest of the other images by cosine, (n, k), or None where all images have the same direction.

    `eps` is the rounding that the features come with.

    With u = c + v the features of length one about their mean c, an image i ranks the images j by ⟨u_i, u_j⟩ as by
    ⟨v_i, v_j⟩ + ½ (‖u_j‖² − ‖v_j‖²). That keeps its digits where all features are nearly c: then all cosines are nearly
    1, and their differences vanish in rounding, or in a step of `estimators.neighbours`.
    """
    unit = Rows(x).unit(slice(0, len(x)))
    there, mean = unit.any(1), unit.mean(0)
    apart = unit.sub_(mean)
    squares = torch.linalg.vector_norm(apart, dim=1).square()
    if float(squares.sum()) <= _rounding(mean, len(x), eps):
        return None
    nearest = []
    for rows in torch.arange(len(x), device=x.device).split(max(1, BLOCK_NUMBERS // len(x))):
        nearness = apart[rows] @ apart.T - (squares + ~there) / 2  # a zero counts as half a square less
        nearness[torch.arange(len(rows), device=x.device), rows] = -math.inf  # an image is no neighbour of its own
        nearest.append(nearness.topk(k).indices)
    return torch.cat(nearest)


def overlap(a: Tensor, b: Tensor, order: Tensor | None = None) -> Tensor:
    """The share of neighbours (n, k) that both layers agree on, of each image, (n,), in float64.

    `order` pairs image i of `a` with order[i] of `b`.
    """
    if order is not None:
        order = order.to(b.device)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        b = back[b[order]]
    return (a[:, :, None] == b[:, None, :]).any(2).double().mean(1)


# Intervals


def influence_of_ratio(sums: npt.NDArray[np.float64], degree: int) -> npt.NDArray[np.float64]:
    """Change of Σ_g A_ab / √(Σ_g A_aa · Σ_g A_bb) with the weight of each group of images, from A (G, S, S).

    `degree`: 2 for sums over pairs of images, where an image counts as either of them.
    """
    diagonal = np.diagonal(sums, axis1=1, axis2=2)  # (G, S)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, share, root = ratio(sums.sum(0)), diagonal / diagonal.sum(0), np.sqrt(diagonal.sum(0))
        both = share[:, :, None] + share[:, None, :]
        moved: npt.NDArray[np.float64] = degree * (sums / (root[:, None] * root) - value / 2 * both)
    return moved


def bootstrap_linear(
    values: npt.NDArray[np.float64],
    influences: npt.NDArray[np.float64],
    replicates: int,
    seed: int,
    device: torch.device | str = "cpu",
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """95 % percentile interval of values (…) over resampled groups, to first order, from influences (G, …).

    The replicates are made on the device. NaN of a single group.
    """
    groups = len(influences)
    if groups < 2:
        return np.full_like(values, np.nan), np.full_like(values, np.nan)
    draws = draw_groups(groups, replicates, seed, device) - 1
    flat = np.ascontiguousarray(influences.reshape(groups, -1))
    ends = []
    for start in range(0, flat.shape[1], BLOCK):  # all at once might not fit
        part = torch.from_numpy(flat[:, start : start + BLOCK]).to(draws)
        ends.append(torch.stack(percentile_ends(draws @ part, groups, 0.0)).numpy(force=True))
    low, high = np.concatenate(ends, 1)
    return values + low.reshape(values.shape), values + high.reshape(values.shape)
