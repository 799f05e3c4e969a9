"""CKA of all images at once as a stream: from sums as large as the layers are wide, however many images there are.

With features x, y (of widths p and q) about their means over all n images, and k = ‖x‖², l = ‖y‖² of an image,

    biased      HSIC(K, L) ∝ ‖Σ x yᵀ‖²_F
    unbiased    HSIC₁(K, L) · n(n−3) = ‖Σ x yᵀ‖²_F − n/(n−2) · Σ k l + Σ k · Σ l / ((n−1)(n−2))

The second is the textbook formula (estimators/cka.py): since K1 = 0, the zero diagonal leaves K̃1 = −k, so that
tr(K̃L̃) = ‖Σ x yᵀ‖² − Σ k l, 1ᵀK̃1 · 1ᵀL̃1 = Σ k · Σ l and 1ᵀK̃L̃1 = Σ k l.

The means are known only at the end. So all sums are about a fixed point, the mean of the first batch, and are moved to
the mean at the end: with d the way there, k becomes k − 2 d·x + ‖d‖², and Σ k l needs Σ k yᵀ besides. The first batch
is near enough that nothing cancels. Several processes have a point each, so that their sums stay apart until the end.

The mean over all ways to pair the images of x with those of y has a closed form, too: 0 for the unbiased HSIC, and
Σ k · Σ l / (n−1) for the biased one, which is what is left of it when two layers have nothing in common.

Source: Grigg et al. 2021, eq. 2 (full batch); Song et al. 2012 (unbiased).

Shapes: n images, S layers, W the sum of their widths, R parts (processes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.arrays import as_tensor
from sightline.core.errors import InputError
from sightline.images.sets import FEWEST
from sightline.measure.estimators.cka import ratio

Pairs = Sequence[tuple[int, int, int]]  # (a, first, end): layer a with each of the layers first … end − 1


class FullBatch:
    """Sums over batches that give the CKA of all images at once, for layers of these widths.

    `pairs` are those to compare, which must hold each layer with itself; all of them unless told. `sums` are those of
    an analysis, which keeps them as its states.

    >>> x = torch.randn(90, 8, generator=torch.Generator().manual_seed(0))
    >>> y = x[:, :5] + torch.randn(90, 5, generator=torch.Generator().manual_seed(1))
    >>> both = FullBatch([8, 5])
    >>> for rows in torch.arange(90).split(32):
    ...     both.add([x[rows], y[rows]])
    >>> both.cka().round(3).tolist(), both.cka(unbiased=False).round(3).tolist()
    ([[1.0, 0.383], [0.383, 1.0]], [[1.0, 0.426], [0.426, 1.0]])
    """

    def __init__(
        self, widths: Sequence[int], pairs: Pairs | None = None, sums: Mapping[str, Tensor] | None = None
    ) -> None:
        self.widths = list(widths)
        self.pairs = [(a, a, len(widths)) for a in range(len(widths))] if pairs is None else pairs
        self.sums = self.empty() if sums is None else sums

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the sums, after an axis of parts."""
        s, w = len(self.widths), sum(self.widths)
        products = sum(self.widths[a] * sum(self.widths[first:end]) for a, first, end in self.pairs)
        return {
            "count": (),
            "point": (w,),  # where all sums are taken about
            "total": (w,),  # Σ x
            "norms": (s,),  # Σ k
            "mixed": (s, w),  # Σ k x
            "squares": (s, s),  # Σ k l
            "products": (products,),  # Σ x yᵀ of each of the pairs
        }

    def empty(self) -> dict[str, Tensor]:
        """One part, without an image."""
        return {name: torch.zeros(1, *shape, dtype=torch.float64) for name, shape in self.shapes().items()}

    @cached_property
    def starts(self) -> list[int]:
        """Where each layer begins among the W features, and where the last one ends."""
        return [sum(self.widths[:a]) for a in range(len(self.widths) + 1)]

    def add(self, layers: Sequence[Tensor | npt.NDArray[np.float64]]) -> None:
        """Add a batch: the features of every layer, (n, …) each."""
        features = [as_tensor(layer).flatten(1) for layer in layers]
        if (widths := [layer.shape[1] for layer in features]) != self.widths:
            raise InputError(f"The layers are {widths} features wide, but {self.widths} are expected")
        x = torch.cat([layer.double() for layer in features], 1)  # (n, W)
        sums = {name: values[0] for name, values in self.sums.items()}
        if not sums["count"]:
            sums["point"].copy_(x.mean(0))
        x -= sums["point"]
        norms = self._by_layer(x.square())
        for name, more in {
            "count": x.new_tensor(len(x)),
            "total": x.sum(0),
            "norms": norms.sum(0),
            "mixed": norms.T @ x,
            "squares": norms.T @ norms,
        }.items():
            sums[name] += more
        for _, mine, others, products in self._blocks(sums["products"]):
            products.addmm_(x[:, mine].T, x[:, others])

    def cka(self, *, unbiased: bool = True) -> npt.NDArray[np.float64]:
        """CKA of all layers × all layers, (S, S); NaN where a layer says nothing, and for pairs that were left out."""
        return ratio(self.hsic(unbiased=unbiased)[0].numpy(force=True))

    def hsic(self, *, unbiased: bool = True) -> tuple[Tensor, Tensor]:
        """HSIC of all layers × all layers (S, S), but for a factor that all share, and its mean over all pairings."""
        parts = [
            {name: self.sums[name].reshape(-1, *shape)[r] for name, shape in self.shapes().items()}
            for r in range(self.sums["count"].numel())
        ]
        parts = [part for part in parts if part["count"]]
        n = torch.stack([part["count"] for part in parts]).sum() if parts else self.sums["count"].new_zeros(())
        if n < FEWEST:
            nothing = self.sums["norms"].new_full((len(self.widths), len(self.widths)), torch.nan)
            return nothing, nothing
        ways = self._ways(parts, n)
        squares, norms = self._about_the_mean(parts, ways)
        hsic = self._products(parts, ways)
        both = norms[:, None] * norms
        if not unbiased:
            return hsic, both / (n - 1)
        whole = hsic.diagonal().clone()
        hsic = hsic - n / (n - 2) * squares + both / ((n - 1) * (n - 2))
        # Where all pairs of images are equally alike, nothing but rounding is left.
        hsic.diagonal().mul_(hsic.diagonal() > 1e-12 * whole)
        return hsic, torch.zeros_like(hsic)

    @staticmethod
    def _ways(parts: Sequence[Mapping[str, Tensor]], n: Tensor) -> list[Tensor]:
        """From the point of each part to the mean of all images, (W,) each."""
        apart = [part["point"] - parts[0]["point"] for part in parts]
        moved = [part["count"] * a + part["total"] for part, a in zip(parts, apart, strict=True)]
        mean = torch.stack(moved).sum(0) / n
        return [mean - a for a in apart]

    def _about_the_mean(self, parts: Sequence[Mapping[str, Tensor]], ways: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Σ k l (S, S) and Σ k (S,) about the mean: k becomes k − 2 d·x + c with c = ‖d‖²."""
        squares, norms = (torch.zeros_like(parts[0][name]) for name in ("squares", "norms"))
        for part, d in zip(parts, ways, strict=True):
            n, k, c = part["count"], part["norms"], self._by_layer(d.square())
            along = self._by_layer(part["total"] * d)  # Σ d·x
            mixed = self._by_layer(part["mixed"] * d)  # Σ k d·y
            moved = k - 2 * along
            squares += part["squares"] - 2 * (mixed + mixed.T) + 4 * self._twice_along(part["products"], d)
            squares += moved[:, None] * c + c[:, None] * moved + n * c[:, None] * c
            norms += moved + n * c
        return squares, norms

    def _twice_along(self, products: Tensor, d: Tensor) -> Tensor:
        """Σ (d·x) (d·y) of all pairs, (S, S)."""
        return self._symmetric(
            [self._by_layer(d[b.mine] @ b.products * d[b.others], b.layers) for b in self._blocks(products)]
        )

    def _products(self, parts: Sequence[Mapping[str, Tensor]], ways: Sequence[Tensor]) -> Tensor:
        """‖Σ x yᵀ‖² about the mean of all pairs, (S, S)."""
        of_pairs = []
        for blocks in zip(*(self._blocks(part["products"]) for part in parts), strict=True):
            whole = torch.zeros_like(blocks[0].products)
            for (_, mine, others, products), part, d in zip(blocks, parts, ways, strict=True):
                total = part["total"]
                whole += products
                # Σ (x − d)(y − d)ᵀ = Σ x yᵀ + (n d − Σ x) dᵀ − d (Σ y)ᵀ
                left = torch.stack([part["count"] * d[mine] - total[mine], -d[mine]], 1)
                whole.addmm_(left, torch.stack([d[others], total[others]]))
            of_pairs.append(self._by_layer(whole.square_().sum(0), blocks[0].layers))
        return self._symmetric(of_pairs)

    def _symmetric(self, rows: Sequence[Tensor]) -> Tensor:
        """(S, S) from a row for each of the pairs; NaN where there is none."""
        full = rows[0].new_full((len(self.widths), len(self.widths)), torch.nan)
        for (a, first, end), row in zip(self.pairs, rows, strict=True):
            full[a, first:end] = full[first:end, a] = row
        return full

    def _by_layer(self, values: Tensor, layers: slice = slice(None)) -> Tensor:
        """Sums over the features of each of these layers, (…, W) → (…, S)."""
        return torch.stack([piece.sum(-1) for piece in torch.split(values, self.widths[layers], -1)], -1)

    def _blocks(self, products: Tensor) -> Iterator[_Block]:
        """What belongs to each of the pairs, as views into the sums."""
        begin = 0
        for a, first, end in self.pairs:
            mine, others = (slice(self.starts[i], self.starts[j]) for i, j in ((a, a + 1), (first, end)))
            rows, columns = mine.stop - mine.start, others.stop - others.start
            yield _Block(slice(first, end), mine, others, products[begin : begin + rows * columns].view(rows, columns))
            begin += rows * columns


class _Block(NamedTuple):
    layers: slice  # the others, among the S layers
    mine: slice  # among the W features
    others: slice
    products: Tensor  # Σ x yᵀ
