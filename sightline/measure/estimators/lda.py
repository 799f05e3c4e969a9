"""Linear discriminant analysis in closed form, from sums over patches that belong to several classes at once.

A patch x with the share s_c of class c counts s_c times in class c; patches of one class each are the usual case. With
weights n_c = Σ s_c, N = Σ n_c, class means μ_c = Σ s_c x / n_c and the covariance within classes

    S = 1/N Σ_patches Σ_c s_c (x − μ_c)(x − μ_c)ᵀ = 1/N Σ w x xᵀ − Σ_c n_c/N μ_c μ_cᵀ,        w = Σ_c s_c
    S_λ = (1 − λ) S + λ tr(S)/D · 1
    score_c(x) = μ_cᵀ S_λ⁻¹ x − ½ μ_cᵀ S_λ⁻¹ μ_c + log(n_c/N)

the largest score decides. Least squares on the same sums would give the frequent classes away to the background, which
is most of an image; here each class has its own mean, and its frequency enters as log(n_c/N) alone.

Source: Fisher 1936; Ledoit and Wolf 2004, "Honey, I Shrunk the Sample Covariance Matrix", for the form of S_λ, which is
also that of scikit-learn's `LinearDiscriminantAnalysis(solver="lsqr", shrinkage=λ)`.

Shapes: p patches, D width, C classes, R shrinkages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.core.arrays import Array, as_tensor, like
from sightline.core.results import NOT_FINITE

CONSTANT = 1e-12  # variances below this share of the squared mean are rounding: of features in float32


class PatchSums(NamedTuple):
    """What LDA needs of all patches, in float64; sums of parts add up."""

    squares: Tensor  # (D, D): Σ w x xᵀ
    values: Tensor  # (C, D): Σ s_c x
    weights: Tensor  # (C,): Σ s_c


@dataclass(frozen=True)
class Lda:
    """Fitted classifiers, one for each shrinkage, over the classes that have any weight."""

    weight: Tensor  # float64 (R, D, c)
    bias: Tensor  # float64 (R, c)
    classes: Tensor  # int64 (c,): which of the C classes
    mean: Tensor  # float64 (D,): of all patches
    covariance: Tensor  # float64 (D, D): of all patches


def add_patches(patches: Tensor, shares: Tensor) -> PatchSums:
    """Sums of patches (p, D) with shares (p, C).

    Products are taken about the mean of these patches, in float32, and moved to the origin in float64: features may
    have a constant part many times as large as what varies.
    """
    shares = shares.to(patches)
    weight, total = shares.sum(1), shares.double().sum(0)
    n = total.sum()
    about = (weight @ patches) / weight.sum().clamp(min=torch.finfo(patches.dtype).tiny)
    x = patches - about
    rest, origin = (weight @ x).double(), about.double()
    cross = torch.outer(origin, rest)
    squares = ((x * weight[:, None]).T @ x).double() + cross + cross.T + n * torch.outer(origin, origin)
    return PatchSums(squares, (shares.T @ x).double() + torch.outer(total, origin), total)


def fit_lda(sums: PatchSums, shrinkages: Sequence[float]) -> Lda | str:
    """The classifiers for each shrinkage, where the sums are; or why there are none."""
    squares, values, weights = (part.double() for part in sums)
    if not (squares.isfinite().all() and values.isfinite().all()):
        return NOT_FINITE
    classes = weights.nonzero()[:, 0]
    if len(classes) < 2:
        return "the training images have no two classes"
    n = weights.sum()
    mean = values.sum(0) / n
    covariance = squares / n - torch.outer(mean, mean)
    if float(covariance.trace()) <= CONSTANT * float(mean @ mean):
        return "the features are the same for all patches"
    prior = weights[classes] / n
    means = values[classes] / weights[classes, None] - mean  # about the mean of all, which changes no decision
    within = covariance - (means * prior[:, None]).T @ means
    spread, axes = torch.linalg.eigh(within)
    rates = torch.tensor(shrinkages, dtype=torch.float64, device=spread.device)[:, None]
    damped = (1 - rates) * spread.clamp(min=0) + rates * spread.mean()  # (R, D)
    turned = axes.T @ means.T  # (D, c)
    weight = axes @ (turned / damped[:, :, None])  # (R, D, c)
    bias = prior.log() - 0.5 * (turned.square() / damped[:, :, None]).sum(1) - mean @ weight
    return Lda(weight, bias, classes, mean, covariance)


def lda_scores(train: Array, labels: Array, test: Array, shrinkage: float = 1e-3) -> Array:
    """Scores of the classes 0 … C − 1 for each row of `test`, from training rows with one class each.

    They differ from scikit-learn's by a number that is the same for all classes of a row.

    >>> import numpy as np
    >>> train = np.array([[0.0, 0.0], [0.2, 1.0], [2.0, 0.0], [2.2, 1.0]])
    >>> lda_scores(train, np.array([0, 0, 1, 1]), np.array([[0.4, 0.0], [1.8, 1.0]])).argmax(1)
    array([0, 1])
    """
    x, y, z = (as_tensor(part) for part in (train, labels, test))
    shares = torch.nn.functional.one_hot(y.long())
    fitted = fit_lda(add_patches(x.double(), shares), (shrinkage,))
    if isinstance(fitted, str):
        raise ValueError(fitted)
    scores = torch.full((len(z), shares.shape[1]), -torch.inf, dtype=torch.float64, device=z.device)
    scores[:, fitted.classes] = z.double() @ fitted.weight[0] + fitted.bias[0]
    return like(test, scores)
