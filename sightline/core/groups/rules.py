"""How a variable follows from the sums that are kept, one class for each rule.

Shapes: W weightings, G groups, n cells (positions within a variable).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sightline.core.results import relative_depths

if TYPE_CHECKING:
    import numpy.typing as npt

    from sightline.core.groups.measured import Measured

    Cells = Mapping[str, npt.NDArray[np.int64]]  # dimension → positions (n,)
    Numbers = npt.NDArray[np.float64]


class Rule(Protocol):
    """How a variable follows from the parts that are kept."""

    def first(self, of: Measured, /) -> str:
        """A part that has the axis of groups."""
        ...

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers, /) -> Numbers:
        """(W, n)."""
        ...

    def used(self, of: Measured, variable: str, cells: Cells, /) -> npt.NDArray[np.bool_]:
        """(G,)."""
        ...


@dataclass(frozen=True)
class Mean:
    """Σ sum / Σ count over groups: means over images, accuracies, shares.

    `scale` is a part to multiply with; `root` takes the square root, of a mean of squares.
    """

    sum: str
    count: str
    scale: str = ""
    root: bool = False

    def first(self, of: Measured) -> str:
        return self.sum

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        dim, _ = of.axis(variable)
        means = (weights @ of.part(self.sum, dim, cells)) / (weights @ of.part(self.count, dim, cells))
        means = np.sqrt(means) if self.root else means
        if self.scale:
            assert of.kept is not None
            scale = of.kept[self.scale]
            means = means * scale.values[tuple(cells[str(d)] for d in scale.dims)]
        return means

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        return _any(of.part(self.count, of.axis(variable)[0], cells))


@dataclass(frozen=True)
class Alignment:
    """Σ cross / √(Σ own · Σ other): CKA from the sums of HSIC."""

    cross: str
    own: str
    other: str

    def first(self, of: Measured) -> str:
        return self.cross

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        dim, _ = of.axis(variable)
        cross, own, other = (weights @ of.part(name, dim, cells) for name in (self.cross, self.own, self.other))
        return _aligned(cross, own, other)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        return _any(of.part(self.own, of.axis(variable)[0], cells))


@dataclass(frozen=True)
class Pairs:
    """CKA of all pairs of layers, whose HSIC is kept once for each: `hsic` over `pair`, see `pair_number`.

    `layer` numbers the layers over encoder and site.
    """

    hsic: str
    layer: str

    def first(self, of: Measured) -> str:
        return self.hsic

    def _layers(self, of: Measured, cells: Cells) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        assert of.kept is not None
        numbers = of.kept[self.layer].transpose("encoder", "site").values.astype(np.int64)
        a, b = (numbers[cells[f"encoder_{end}"], cells[f"site_{end}"]] for end in "ab")
        return a, b

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        a, b = self._layers(of, cells)
        dim, _ = of.axis(variable)
        cross, own, other = (
            weights @ of.part(self.hsic, dim, {**cells, "pair": pair_number(*pair)})
            for pair in ((a, b), (a, a), (b, b))
        )
        return _aligned(cross, own, other)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        a, _ = self._layers(of, cells)
        return _any(of.part(self.hsic, of.axis(variable)[0], {**cells, "pair": pair_number(a, a)}))


def pair_number(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where a pair of layers stands in the lower triangle of a symmetric matrix, row by row (`np.tril_indices`).

    >>> pair_number(np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1])).tolist()
    [0, 1, 2, 4]
    """
    row, column = np.maximum(a, b), np.minimum(a, b)
    number: npt.NDArray[np.int64] = row * (row + 1) // 2 + column
    return number


def _aligned(cross: Numbers, own: Numbers, other: Numbers) -> Numbers:
    cosine: Numbers = cross / (np.sqrt(own) * np.sqrt(other))
    return cosine


@dataclass(frozen=True)
class TopChoices:
    """Macro F1 or Cohen's κ of first choices, from how often each class is chosen and how often by both."""

    chosen: str  # (…, encoder, choice)
    both: str  # (…, encoder_a, encoder_b, choice)
    kappa: bool

    def first(self, of: Measured) -> str:
        return self.both

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        dim, _ = of.axis(variable)
        a, b = (of.part(self.chosen, dim, {"encoder": cells[f"encoder_{end}"]}) for end in "ab")
        n_a, n_b, both = (
            np.tensordot(weights, part, 1) for part in (a, b, of.part(self.both, dim, cells))
        )  # (W, n, C)
        if not self.kappa:
            f1: Numbers = np.nanmean(2 * both / (n_a + n_b), -1)  # 0 / 0: a class that nobody chooses
            return f1
        n = n_a.sum(-1)
        expected = (n_a * n_b).sum(-1) / n**2
        return np.where(expected < 1, (both.sum(-1) / n - expected) / (1 - expected), np.nan)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        dim, _ = of.axis(variable)
        return _any(of.part(self.chosen, dim, {"encoder": cells["encoder_a"]}))


@dataclass(frozen=True)
class LeftOut:
    """The number without each group was computed and is kept; other weights change it as if it were linear in them."""

    left_out: str

    def first(self, of: Measured) -> str:
        return self.left_out

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        whole = _whole(of, variable, cells)
        share = whole - of.part(self.left_out, of.axis(variable)[0], cells)  # what each group gives, (G, n)
        return whole + (weights - 1) @ share

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,): a group without images changes nothing."""
        whole = _whole(of, variable, cells)
        left_out = of.part(self.left_out, of.axis(variable)[0], cells)
        return _any(np.abs(left_out - whole) > 1e-7 * np.abs(whole))  # what is kept may be rounded to float32


def _whole(of: Measured, variable: str, cells: Cells) -> Numbers:
    array = of.table[variable]
    return np.asarray(array.values[tuple(cells[str(d)] for d in array.dims)], np.float64)


@dataclass(frozen=True)
class _Derived:
    """What follows from another variable."""

    of: str

    def first(self, of: Measured) -> str:
        rule = of.rule(self.of)
        assert rule is not None
        return rule.first(of)


class _Elsewhere(_Derived, ABC):
    """The number of another variable at another place."""

    @abstractmethod
    def cells(self, of: Measured, cells: Cells) -> Cells:
        """Where the number is there."""

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        return of.values(self.of, self.cells(of, cells), weights)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        return of.used(self.of, self.cells(of, cells))


@dataclass(frozen=True)
class Picked(_Elsewhere):
    """Another variable at that position of `dim` whose name stands in the variable `at`."""

    dim: str
    at: str

    def cells(self, of: Measured, cells: Cells) -> Cells:
        """The same with the position of that name."""
        labels = of.table[self.at]
        names = labels.values[tuple(cells[str(d)] for d in labels.dims)].astype(str)
        where = {str(name): at for at, name in enumerate(of.table[self.dim].values)}
        return {**cells, self.dim: np.array([where[name] for name in names], np.int64)}


@dataclass(frozen=True)
class Same(_Elsewhere):
    """Another variable where several of its dimensions have the position that this one has in `dim`."""

    dim: str
    dims: Sequence[str]

    def cells(self, of: Measured, cells: Cells) -> Cells:
        """The same position in several dimensions."""
        rest = {dim: positions for dim, positions in cells.items() if dim != self.dim}
        return rest | dict.fromkeys(self.dims, cells[self.dim])


@dataclass(frozen=True)
class Binned(_Derived):
    """Mean of another variable over those of its cells whose number in the part `bins` is the position in `dim`."""

    dim: str
    bins: str

    def _cells(self, of: Measured, cells: Cells, number: int) -> Cells:
        assert of.kept is not None
        at = {d: int(positions[number]) for d, positions in cells.items()}
        bins = of.kept[self.bins]
        known = bins.isel({d: p for d, p in at.items() if d in bins.dims})
        where = np.nonzero(known.values == at.pop(self.dim))
        inner = {str(d): positions for d, positions in zip(known.dims, where, strict=True)}
        return inner | {d: np.full(len(where[0]), p, np.int64) for d, p in at.items()}

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        every = (self._cells(of, cells, number) for number in range(_count(cells)))
        return np.stack([np.nanmean(of.values(self.of, inner, weights), 1) for inner in every], 1)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        return of.used(self.of, self._cells(of, cells, 0))


@dataclass(frozen=True)
class Spread(_Derived):
    """Standard deviation of another variable over a dimension, where it has a number."""

    dim: str

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        size = of.table.sizes[self.dim]
        inner = {d: np.repeat(positions, size) for d, positions in cells.items()}
        inner[self.dim] = np.tile(np.arange(size), _count(cells))
        parts = of.values(self.of, inner, weights).reshape(len(weights), -1, size)
        spread: Numbers = np.nanstd(parts, -1)
        return spread

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        return of.used(self.of, {**cells, self.dim: np.zeros(_count(cells), np.int64)})


@dataclass(frozen=True)
class Best(_Derived):
    """The largest CKA of a layer with layers of its type in the other encoder, or the relative depth of that layer."""

    depth: bool = False

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        kinds = [of.table[f"layer_type_{end}"].values.astype(str) for end in "ab"]
        known = np.isfinite(of.table[self.of].transpose(*cells, "site_b").values)
        depths = relative_depths(of.table)
        columns = []
        for number in range(_count(cells)):
            at = {d: int(positions[number]) for d, positions in cells.items()}
            sites = np.flatnonzero(known[tuple(at.values())] & (kinds[1] == kinds[0][at["site_a"]]))
            inner = {d: np.full(len(sites), p, np.int64) for d, p in at.items()} | {"site_b": sites}
            values = of.values(self.of, inner, weights)
            columns.append(depths[at["encoder_b"], sites[values.argmax(1)]] if self.depth else values.max(1))
        return np.stack(columns, 1)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        own = {**cells, "encoder_b": cells["encoder_a"], "site_b": cells["site_a"]}
        return of.used(self.of, own)


def _any(part: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which groups (G, …) have something that is not zero."""
    used: npt.NDArray[np.bool_] = (part.reshape(len(part), -1) != 0).any(1)
    return used


def _count(cells: Cells) -> int:
    return len(next(iter(cells.values())))


RULES: Mapping[str, Any] = {
    kind.__name__: kind for kind in (Alignment, Best, Binned, LeftOut, Mean, Pairs, Picked, Same, Spread, TopChoices)
}
