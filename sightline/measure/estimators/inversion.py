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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.arrays import Array, as_tensor, like
from sightline.measure.estimators.intervals import ratio_of, wilson
from sightline.measure.estimators.ridge import PENALTIES, centred_sums

AS_GOOD = 1e-6  # penalties whose errors differ by less of them are as good; the largest one is taken
MEASURES = ("r2", "nearer", "odd")  # what `Recovered` tells

Blocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # features (m, D), targets (m, T·P); float64, read repeatedly


@dataclass(frozen=True, eq=False)
class Inverse:
    """Fitted maps from features to pictures, on the device where they were fitted."""

    mean: Tensor  # (D,)
    weight: Tensor  # (D, T·P), of centred features
    target: Tensor  # (T·P,)
    penalties: tuple[float, ...]  # the λ of each set of targets

    def __call__(self, features: Array) -> Array:
        """Pictures of features, (m, D) → (m, T·P)."""
        return like(features, (as_tensor(features).to(self.mean) - self.mean) @ self.weight + self.target)


def fit_inverse(train: Blocks, chooses: Blocks, sets: int = 1, penalties: Sequence[float] = PENALTIES) -> Inverse:
    """Fit pictures to features in blocks; other rows choose the penalty of each of the `sets` of targets.

    All is computed in float64, where the blocks are.

    >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> y = x @ torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]).double() + 5
    >>> fit = fit_inverse(lambda: [(x[:30], y[:30])], lambda: [(x[30:], y[30:])])
    >>> fit.penalties, torch.allclose(fit(x), y, atol=1e-4)
    ((1e-06,), True)
    """
    mean, gram, products, target = centred_sums(train)
    rows = sum(len(x) for x, _ in train())
    variance = gram.trace() / (rows * len(mean))
    values, vectors = torch.linalg.eigh(gram / variance)
    basis = vectors / variance.sqrt()
    shrink = 1 / (values.clamp(min=0)[:, None] + rows * values.new_tensor(penalties))  # (D, L)
    pulled = (basis.T @ products).reshape(len(mean), sets, -1)  # B
    errors = _errors(chooses, mean, basis, shrink, pulled, target)
    best = [int(np.flatnonzero(of <= of.min() * (1 + AS_GOOD))[-1]) for of in errors]
    weight = basis @ (shrink[:, best, None] * pulled).flatten(1)
    return Inverse(mean, weight, target, tuple(float(penalties[which]) for which in best))


def _errors(
    rows: Blocks, mean: Tensor, basis: Tensor, shrink: Tensor, pulled: Tensor, target: Tensor
) -> npt.NDArray[np.float64]:
    """Squared error on these rows of each set of targets for each penalty, (T, L)."""
    gram, products, whole = torch.zeros_like(basis), torch.zeros_like(pulled), torch.zeros_like(pulled[0, :, 0])
    for x, y in rows():
        u, rest = (x - mean) @ basis, y - target
        gram.addmm_(u.T, u)
        products += (u.T @ rest).view(pulled.shape)
        whole += rest.square().sum(0).view(pulled.shape[1:]).sum(1)
    errors = []
    for number, before in enumerate(whole):
        coefficients = pulled[:, number]
        curved = (coefficients @ coefficients.T) * gram
        straight = (coefficients * products[:, number]).sum(1)
        errors.append(before - 2 * straight @ shrink + (shrink * (curved @ shrink)).sum(0))
    squared: npt.NDArray[np.float64] = torch.stack(errors).numpy(force=True)
    return squared


def odd_part(pictures: Array) -> Array:
    """What a picture (…, width) does not share with its mirror image, (x − mirror x) / 2.

    >>> odd_part(np.array([[1.0, 5.0, 3.0]])).tolist()
    [[-1.0, 0.0, 1.0]]
    """
    x = as_tensor(pictures)
    return like(pictures, (x - x.flip(-1)) / 2)


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

    def __init__(self, mean: Tensor | npt.NDArray[np.float64]) -> None:
        self.mean = as_tensor(mean)  # of the pictures and their mirror images, (3, h, w)
        self.parts: list[Tensor] = []

    def add(self, pictures: Tensor | npt.NDArray[np.float64], reconstructed: Tensor | npt.NDArray[np.float64]) -> None:
        """A block of pictures (m, 3, h, w); reconstructions of them and of their mirror images, (2, m, 3, h, w)."""
        plain, made = as_tensor(pictures), as_tensor(reconstructed)
        both = torch.stack([plain, plain.flip(-1)])
        odd, axes = odd_part(both), (2, 3, 4)
        common = (made * odd).sum(axes)  # ⟨ŷ, odd y⟩ = ⟨odd ŷ, odd y⟩: even and odd parts are orthogonal
        numbers = [
            (both - made).square().sum(axes).sum(0),
            (both - self.mean).square().sum(axes).sum(0),
            (common.sign() / 2 + 0.5).mean(0),
            common.sum(0),
            odd.square().sum(axes).sum(0),
        ]
        self.parts.append(torch.stack(numbers))

    def images(self) -> npt.NDArray[np.float64]:
        """Of each image (n, 5): ‖y − ŷ‖², ‖y − mean y‖², whether it is nearer to itself, ⟨odd ŷ, odd y⟩, ‖odd y‖²."""
        by_image: npt.NDArray[np.float64] = torch.cat(self.parts, 1).T.numpy(force=True)
        return by_image

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
