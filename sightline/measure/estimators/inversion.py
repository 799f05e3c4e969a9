"""Ridge regression from features to pixels in closed form, and how much of the pixels comes back.

Rows are images and their mirror images, features h and pixels y (P,) of each, centred by the means of the training
rows, the features divided by one number, the root of their mean variance, which keeps their own metric:

    minimise over W      1/n Σᵢ ‖yᵢ − ȳ − Wᵀzᵢ‖² + λ ‖W‖²,      z = (h − μ) / s,   s² = mean variance of the features

With ZᵀZ = V S Vᵀ and B = VᵀZᵀY, W = V (S + nλ)⁻¹ B for every λ. The error on the rows that choose λ needs their sums
alone, Gᵛ = UᵛᵀUᵛ and Cᵛ = UᵛᵀYᵛ with U = ZV, so that no prediction is made for any λ but the chosen one:

    E(λ) = Σ ‖y − ȳ‖² − 2 Σ_d s_d (B ∘ Cᵛ)_d + sᵀ [(B Bᵀ) ∘ Gᵛ] s,      s = 1 / (S + nλ)

Several sets of targets share the features and their sums; each chooses a λ of its own.

Shapes: m rows of a block, D width, P numbers of a picture, T sets of targets, L penalties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.measure.estimators.intervals import ratio_of, wilson
from sightline.measure.estimators.ridge import PENALTIES, centred_sums

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MEASURES", "Blocks", "Inverse", "Recovered", "fit_inverse", "odd_part"]


AS_GOOD = 1e-6  # penalties whose errors differ by less of them are as good; the largest one is taken
MEASURES = ("r2", "nearer", "odd")  # what `Recovered` tells

Array = np.ndarray[Any, np.dtype[np.float64]]
Blocks = Callable[[], Iterable[tuple[Array, Array]]]  # features (m, D) and targets (m, T·P), read several times


@dataclass(frozen=True, eq=False)
class Inverse:
    """Fitted maps from features to pictures."""

    mean: npt.NDArray[np.float64]  # (D,)
    weight: npt.NDArray[np.float64]  # (D, T·P), of centred features
    target: npt.NDArray[np.float64]  # (T·P,)
    penalties: tuple[float, ...]  # the λ of each set of targets

    def __call__(self, features: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Pictures of features, (m, D) → (m, T·P)."""
        pictures: npt.NDArray[np.float64] = (np.asarray(features, np.float64) - self.mean) @ self.weight + self.target
        return pictures


def fit_inverse(train: Blocks, chooses: Blocks, sets: int = 1, penalties: Sequence[float] = PENALTIES) -> Inverse:
    """Fit pictures to features in blocks; other rows choose the penalty of each of the `sets` of targets.

    >>> x = np.random.default_rng(0).normal(size=(40, 2))
    >>> y = x @ np.array([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]) + 5
    >>> fit = fit_inverse(lambda: [(x[:30], y[:30])], lambda: [(x[30:], y[30:])])
    >>> fit.penalties, bool(np.allclose(fit(x), y, atol=1e-4))
    ((1e-06,), True)
    """
    mean, gram, products, target = centred_sums(train)
    rows = sum(len(x) for x, _ in train())
    variance = gram.trace() / (rows * len(mean))
    values, vectors = np.linalg.eigh(gram / variance)
    basis = vectors / np.sqrt(variance)
    shrink = 1 / (np.maximum(values, 0)[:, None] + rows * np.asarray(penalties, np.float64))  # (D, L)
    pulled = (basis.T @ products).reshape(len(mean), sets, -1)  # B
    errors = _errors(chooses, mean, basis, shrink, pulled, target)
    best = [int(np.flatnonzero(of <= of.min() * (1 + AS_GOOD))[-1]) for of in errors]
    weight = basis @ (shrink[:, best, None] * pulled).reshape(len(mean), -1)
    return Inverse(mean, weight, target, tuple(float(penalties[which]) for which in best))


def _errors(
    rows: Blocks, mean: Array, basis: Array, shrink: Array, pulled: Array, target: Array
) -> npt.NDArray[np.float64]:
    """Squared error on these rows of each set of targets for each penalty, (T, L)."""
    gram, products, whole = np.zeros((len(mean), len(mean))), np.zeros(pulled.shape), np.zeros(pulled.shape[1])
    for x, y in rows():
        u, rest = (x - mean) @ basis, (y - target).reshape(len(x), *pulled.shape[1:])
        gram += u.T @ u
        products += np.tensordot(u, rest, (0, 0))
        whole += np.square(rest).sum((0, 2))
    errors = []
    for number, before in enumerate(whole):
        own = pulled[:, number]
        curved = (own @ own.T) * gram
        straight = (own * products[:, number]).sum(1)
        errors.append(before - 2 * straight @ shrink + (shrink * (curved @ shrink)).sum(0))
    return np.array(errors)


def odd_part(pictures: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What a picture (…, width) does not share with its mirror image, (x − mirror x) / 2.

    >>> odd_part(np.array([[1.0, 5.0, 3.0]])).tolist()
    [[-1.0, 0.0, 1.0]]
    """
    part: npt.NDArray[Any] = (pictures - pictures[..., ::-1]) / 2
    return part


class Recovered:
    """How much of pictures comes back in their reconstructions, added up in blocks, image by image.

    r2       1 − Σ ‖y − ŷ‖² / Σ ‖y − mean y‖²
    nearer   share of pictures whose reconstruction is nearer to them than to their mirror image; equally near: a half
    odd      Σ ⟨odd ŷ, odd y⟩ / Σ ‖odd y‖²: 0 where the features know nothing of left and right, 1 where they keep it

    >>> pictures = np.random.default_rng(0).normal(size=(9, 3, 4, 4))
    >>> whole = Recovered(pictures.mean(0))
    >>> whole.add(pictures, np.stack([pictures, pictures[..., ::-1]]))
    >>> [numbers[0] for numbers in whole.numbers().values()]
    [1.0, 1.0, 1.0]
    """

    def __init__(self, mean: npt.NDArray[np.float64]) -> None:
        self.mean = mean  # of the pictures and their mirror images, (3, h, w)
        self.parts: list[npt.NDArray[np.float64]] = []

    def add(self, pictures: npt.NDArray[Any], reconstructed: npt.NDArray[Any]) -> None:
        """A block of pictures (m, 3, h, w); reconstructions of them and of their mirror images, (2, m, 3, h, w)."""
        both = np.stack([pictures, pictures[..., ::-1]])
        odd, axes = odd_part(both), (2, 3, 4)
        common = (reconstructed * odd).sum(axes)  # ⟨ŷ, odd y⟩ = ⟨odd ŷ, odd y⟩: even and odd parts are orthogonal
        numbers = [
            np.square(both - reconstructed).sum(axes).sum(0),
            np.square(both - self.mean).sum(axes).sum(0),
            (np.sign(common) / 2 + 0.5).mean(0),
            common.sum(0),
            np.square(odd).sum(axes).sum(0),
        ]
        self.parts.append(np.stack(numbers))

    def images(self) -> npt.NDArray[np.float64]:
        """Of each image (n, 5): ‖y − ŷ‖², ‖y − mean y‖², whether it is nearer to itself, ⟨odd ŷ, odd y⟩, ‖odd y‖²."""
        return np.concatenate(self.parts, 1).T

    def numbers(self) -> dict[str, tuple[float, float, float]]:
        """The three measures with their 95 % intervals over images."""
        left, whole, nearer, common, odd = self.images().T
        error, low, high = ratio_of(left, whole)
        share = float(nearer.mean())
        return {
            "r2": (1 - error, 1 - high, 1 - low),
            "nearer": (share, *wilson(share * len(nearer), len(nearer))),
            "odd": ratio_of(common, odd),
        }
