"""Ridge probe: a linear classifier in closed form, its penalty chosen by leave-one-out error on the training images.

One column of targets per class, y = +1 for its images and −1 for the others, and standardised features z = (x − μ) / σ
with mean and deviation of the training images, which is what BatchNorm without affine parameters does for them:

    minimise over W, b      1/n Σᵢ ‖yᵢ − b − Wᵀzᵢ‖² + λ ‖W‖²

With ZᵀZ = V S Vᵀ, u = Vᵀz and B = VᵀZᵀY, one eigendecomposition gives the whole path over λ:

    ŷᵢ = ȳ + Bᵀ (S + nλ)⁻¹ uᵢ                              fitted values; b = ȳ, since Z is centred
    Hᵢⱼ = 1/n + uᵢᵀ (S + nλ)⁻¹ uⱼ                          ŷ = H y: what each image takes from each
    yᵢ − ŷ₋ᵢ = (1 − Hᵢᵢ)⁻¹ (yᵢ − ŷᵢ)                      error of the fit that has not seen image i (Allen 1974)

The last line holds for a group of rows as well, with the block of H and the identity. So where an image gives several
rows (itself and its mirror image), all of them are left out at once, and none tells the probe about another.

A class that misses one image is the rarer for it, and b says so: with few images per class, left-out images would be
decided against their own class, below chance on features that know nothing. So decisions on them keep b = ȳ of all.

Shapes: n images, g views of each, D width, C classes, L penalties, m images of a block.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.arrays import as_tensor
from sightline.core.errors import InputError

PENALTIES = tuple(10.0 ** (exponent / 2) for exponent in range(-12, 7))  # 10⁻⁶ … 10³, of features of variance 1
BLOCK_NUMBERS = 2**20  # of a block of features in float64, 8 MiB
CONSTANT = 1e-6  # a feature whose deviation is less of its mean is constant up to float32 rounding


class Sliceable(Protocol):
    """Rows of features, in memory or on disk."""

    @property
    def shape(self) -> Any: ...

    def __getitem__(self, part: slice, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Ridge:
    """A fitted probe, on the device where it was fitted."""

    weight: Tensor  # float64 (D, C), of features as they are
    bias: Tensor  # float64 (C,)
    penalty: float  # the chosen λ
    errors: npt.NDArray[np.float64]  # (L,) mean squared leave-one-out error of an image for each penalty
    left_out_accuracy: float  # of images that the fit has not seen, at the chosen penalty

    def scores(self, features: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Scores of the classes, (n, D) → (n, C); the largest one decides."""
        scores: npt.NDArray[np.float64] = self._scores(features).numpy(force=True)
        return scores

    def decisions(self, features: Sliceable) -> npt.NDArray[np.int64]:
        """The class with the highest score for each row (n,), read in blocks; of equal ones the first."""
        size = max(64, BLOCK_NUMBERS // features.shape[1])
        starts = range(0, features.shape[0], size)
        decided = [self._scores(features[start : start + size]).argmax(1) for start in starts]
        classes: npt.NDArray[np.int64] = torch.cat(decided).numpy(force=True)
        return classes

    def _scores(self, features: npt.NDArray[Any]) -> Tensor:
        return as_tensor(features).to(self.weight) @ self.weight + self.bias


def fit_ridge(
    features: Sliceable | tuple[Sliceable, ...],
    labels: npt.NDArray[np.int64] | tuple[npt.NDArray[np.int64], ...],
    classes: int | None = None,
    penalties: Sequence[float] = PENALTIES,
    device: torch.device | str = "cpu",
) -> Ridge:
    """Fit a probe to features (n, D), finite, and labels (n,) in 0 … classes − 1.

    Tuples are views of the same images, row for row, each with its labels; the views of an image are left out together.
    Features are read in blocks three times, and memory does not grow with their number; all sums are in float64, on
    the device.

    >>> x = np.array([[0.0, 1.0], [0.2, 0.9], [1.0, 1.1], [1.2, 1.0]])
    >>> probe = fit_ridge(x, np.array([0, 0, 1, 1]))
    >>> probe.scores(np.array([[0.1, 1.0], [2.0, 1.0]])).argmax(1).tolist(), probe.left_out_accuracy
    ([0, 1], 1.0)
    """
    data = _Data(
        features if isinstance(features, tuple) else (features,),
        labels if isinstance(labels, tuple) else (labels,),
        torch.device(device),
    )
    classes = classes or 1 + max(int(part.max()) for part in data.labels)
    lambdas = torch.tensor(penalties, dtype=torch.float64, device=data.device)
    if not len(lambdas) or lambdas.min() <= 0:
        raise InputError(f"A ridge probe needs penalties above 0, not {list(penalties)}")
    mean, scale, gram, products, target = _sums(data, classes)
    values, vectors = torch.linalg.eigh(gram)
    path = _Path(
        mean=mean,
        basis=scale[:, None] * vectors,
        shrink=1 / (values.clamp(min=0)[:, None] + data.rows * lambdas),
        products=vectors.T @ products,
        target=target,
    )
    errors, right = path.left_out(data)
    best = int(errors.argmin())
    weight = path.basis @ (path.shrink[:, best, None] * path.products)
    return Ridge(weight, target - mean @ weight, float(lambdas[best]), errors, float(right[best]))


@dataclass(frozen=True)
class _Data:
    """Views of the same images, read together."""

    views: tuple[Sliceable, ...]
    labels: tuple[npt.NDArray[np.int64], ...]
    device: torch.device

    def __post_init__(self) -> None:
        shapes = {tuple(view.shape) for view in self.views}
        lengths = {len(part) for part in self.labels}
        if len(shapes) != 1 or lengths != {self.views[0].shape[0]} or len(self.labels) != len(self.views):
            raise InputError(
                f"A ridge probe got features of shape {' and '.join(map(str, sorted(shapes)))} with "
                f"{' and '.join(map(str, sorted(lengths)))} labels; one label for each row is expected"
            )
        if self.images < 2:
            raise InputError(f"A ridge probe needs at least 2 training images, not {self.images}")

    @property
    def images(self) -> int:
        return int(self.views[0].shape[0])

    @property
    def rows(self) -> int:
        """Number of rows of all views."""
        return self.images * len(self.views)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (m, g, D) in float64 and labels (m, g)."""
        size = max(64, BLOCK_NUMBERS // (len(self.views) * self.views[0].shape[1]))
        for start in range(0, self.images, size):
            part = slice(start, start + size)
            yield (
                torch.stack([as_tensor(view[part]).to(self.device, torch.float64) for view in self.views], 1),
                torch.stack([as_tensor(labels[part]).to(self.device, torch.int64) for labels in self.labels], 1),
            )


def _sums(data: _Data, classes: int) -> tuple[Tensor, ...]:
    """Mean μ (D,), 1/σ (D,; 0 where a feature is constant), ZᵀZ (D, D), ZᵀY (D, C) and ȳ (C,)."""
    mean, gram, products, shares = centred_sums(
        lambda: ((x.flatten(0, 1), _one_hot(codes.flatten(), classes)) for x, codes in data.blocks())
    )
    deviation = (gram.diagonal() / data.rows).sqrt()
    scale = torch.where(deviation > CONSTANT * mean.abs(), 1 / deviation, 0.0)
    # The −1 of Y adds nothing to the products, since the columns of Z sum to zero.
    return mean, scale, scale[:, None] * gram * scale, scale[:, None] * (2 * products), 2 * shares - 1


def centred_sums(blocks: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> tuple[Tensor, ...]:
    """Of rows x (m, D) with targets y (m, C), in blocks read twice: mean x, XᵀX and XᵀY of centred x, mean y.

    They are float64, and where they are is where the sums are.

    >>> x, y = (torch.tensor(part, dtype=torch.float64) for part in ([[0.0], [2.0]], [[1.0, 5.0], [3.0, 5.0]]))
    >>> [part.tolist() for part in centred_sums(lambda: [(x[:1], y[:1]), (x[1:], y[1:])])]
    [[1.0], [[2.0]], [[2.0, 0.0]], [2.0, 5.0]]
    """
    totals = [(len(x), x.sum(0)) for x, _ in blocks()]
    count = sum(rows for rows, _ in totals)
    mean = torch.stack([total for _, total in totals]).sum(0) / count
    sums: tuple[Tensor, ...] = ()
    for x, y in blocks():
        centred = x - mean
        if not sums:
            sums = tuple(x.new_zeros(shape) for shape in ((x.shape[1],) * 2, (x.shape[1], y.shape[1]), y.shape[1:]))
        gram, products, targets = sums
        gram.addmm_(centred.T, centred)
        products.addmm_(centred.T, y)
        targets += y.sum(0)
    gram, products, targets = sums
    return mean, gram, products, targets / count


def _one_hot(codes: Tensor, classes: int) -> Tensor:
    """(…) → (…, C); rows of an identity matrix would take C² numbers, too many for the classes of ImageNet-21k."""
    return (codes[..., None] == torch.arange(classes, device=codes.device)).double()


@dataclass(frozen=True, eq=False)
class _Path:
    """The fits of all penalties."""

    mean: Tensor  # (D,)
    basis: Tensor  # (D, D): centred features @ basis = u
    shrink: Tensor  # (D, L): 1 / (S + nλ)
    products: Tensor  # (D, C): B
    target: Tensor  # (C,): ȳ

    def left_out(self, data: _Data) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Mean squared error and accuracy for images that were left out, each (L,)."""
        width, count = self.shrink.shape
        sums = self.shrink.new_zeros(2, count)
        for x, codes in data.blocks():
            m, g = codes.shape
            u = (x - self.mean) @ self.basis  # (m, g, D)
            hat = (u[:, :, None] * u[:, None]).reshape(-1, width) @ self.shrink + 1 / data.rows
            # Small, and many: faster than solving.
            rest = torch.linalg.inv(torch.eye(g, dtype=u.dtype, device=u.device) - hat.T.reshape(count, m, g, g))
            y = 2 * _one_hot(codes, len(self.target)) - 1  # (m, g, C)
            rarer = (y.sum(1, keepdim=True) - g * self.target) / (data.rows - g)  # ȳ of all − ȳ of the others
            for number, shrink in enumerate(self.shrink.T):
                fitted = self.target + u.flatten(0, 1) @ (shrink[:, None] * self.products)
                error = rest[number] @ (y - fitted.view(y.shape))
                sums[0, number] += error.square().sum()
                sums[1, number] += ((y - error + rarer).argmax(-1) == codes).sum()
        errors, right = (sums / data.rows).numpy(force=True)
        return errors, right
