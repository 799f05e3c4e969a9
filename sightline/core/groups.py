"""What is kept beside a result so that its numbers can be had again from other images: sums over groups of images.

A recipe says how a variable follows from these sums. With a weight for each group, its number without a group of
images (one weight 0) and its number on images drawn anew (weights of a bootstrap) are computed as the number itself
was. Groups are the same for all encoders and layers, so that differences are on the same images.

    kept = Kept({"test": Axis("d1e0…", "groups of test images")})
    kept.add("accuracy", Mean("right", "images"), right=(("test", "encoder", "site"), sums), images=(("test",), counts))
    return kept.beside(result)            # what `compute` of an analysis gives; `split` takes it apart again

Shapes: W weightings, G groups, n cells (positions within a variable), S layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from sightline.core.errors import InputError, nearest
from sightline.core.results import relative_depths

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr

    Cells = Mapping[str, npt.NDArray[np.int64]]  # dimension → positions (n,)
    Numbers = npt.NDArray[np.float64]

__all__ = [
    "Alignment",
    "Axis",
    "Best",
    "Binned",
    "Kept",
    "LeftOut",
    "Mean",
    "Measured",
    "Pairs",
    "Picked",
    "Recipe",
    "Same",
    "Spread",
    "TopChoices",
    "pair_number",
    "split",
]


PREFIX = "kept_"


class Axis(NamedTuple):
    """Groups of images: equal keys are the same groups of the same images, whichever analysis or run kept them."""

    key: str
    words: str  # "groups of test images"


# ---------------------------------------------------------------------------------------------------------------
# Writing


@dataclass(frozen=True)
class Kept:
    """Collects recipes and their parts while a result is made."""

    axes: Mapping[str, Axis]  # dimension → which groups it counts
    recipes: dict[str, Recipe] = field(default_factory=dict)
    parts: dict[str, tuple[tuple[str, ...], npt.NDArray[Any]]] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)

    def add(self, variable: str, recipe: Recipe, /, **parts: tuple[tuple[str, ...], npt.NDArray[Any]]) -> None:
        """How a variable follows from these parts, and from those that were added before."""
        self.recipes[variable] = recipe
        self.parts.update(parts)

    def nothing(self, why: str, *variables: str) -> None:
        """Variables that images do not change, or that cannot be had again from sums, and why."""
        self.without.update(dict.fromkeys(variables, why))

    def beside(self, result: xr.Dataset) -> xr.Dataset:
        """The result with what is kept, under names that `split` knows."""
        recipes = {name: [type(recipe).__name__, dict(vars(recipe))] for name, recipe in self.recipes.items()}
        sizes = {dim: values.shape[dims.index(dim)] for dims, values in self.parts.values() for dim in dims}
        used = {dim: axis for dim, axis in self.axes.items() if dim in sizes}
        return result.assign({PREFIX + name: part for name, part in self.parts.items()}).assign_attrs(
            kept=json.dumps({"axes": used, "recipes": recipes, "without": self.without, "parts": list(self.parts)})
        )


def split(result: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset | None]:
    """The result as it is shown, and what is kept beside it."""
    if "kept" not in result.attrs:
        return result, None
    names = [PREFIX + name for name in json.loads(result.attrs["kept"])["parts"]]
    kept = result[names].rename({name: name.removeprefix(PREFIX) for name in names})
    kept = kept.drop_vars([name for name in kept.coords if not set(kept[name].dims) & set(kept.dims)])
    table = result.drop_vars(names)
    table.attrs = {name: value for name, value in result.attrs.items() if name != "kept"}
    return table, kept.assign_attrs({"kept": result.attrs["kept"]})


# ---------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Measured:
    """A result together with what is kept beside it."""

    name: str  # of the analysis
    table: xr.Dataset
    kept: xr.Dataset | None

    @cached_property
    def _about(self) -> dict[str, Any]:
        if self.kept is None:
            raise InputError(
                f"The result {self.name} keeps nothing that an interval of a difference could be computed from: it was "
                "measured by an earlier version; run the same command again to measure it again"
            )
        about: dict[str, Any] = json.loads(self.kept.attrs["kept"])
        return about

    @property
    def variables(self) -> list[str]:
        """Variables that can be contrasted."""
        about = self._about
        return [*about["recipes"], *about["without"]]

    def chosen(self, variable: str | None) -> str:
        """The variable that is meant: the only one, or one that is named."""
        known = self.variables
        if variable is None and len(known) == 1:
            return known[0]
        if variable is None:
            raise InputError(f"{self.name} has several numbers; name one, such as {self.name}.{known[0]}: {known}")
        if variable not in known:
            raise InputError(f"No contrasts of {self.name}.{variable} can be computed{nearest(variable, known)}")
        return variable

    def recipe(self, variable: str) -> Recipe | None:
        """How a variable follows from what is kept; None if images do not change it."""
        about = self._about
        if variable in about["without"]:
            return None
        kind, fields = about["recipes"][variable]
        recipe: Recipe = KINDS[kind](**fields)
        return recipe

    def why_without(self, variable: str) -> str:
        """Why images do not change a variable."""
        why: str = self._about["without"].get(variable, "")
        return why

    def axis(self, variable: str) -> tuple[str, Axis]:
        """The dimension of the groups of a variable, and which groups they are."""
        recipe, about = self.recipe(variable), self._about
        assert recipe is not None
        assert self.kept is not None
        part = recipe.first(self)
        dim = next(str(dim) for dim in self.kept[part].dims if dim in about["axes"])
        return dim, Axis(*about["axes"][dim])

    def groups(self, variable: str) -> int:
        """How many groups there are."""
        assert self.kept is not None
        return int(self.kept.sizes[self.axis(variable)[0]])

    def part(self, name: str, dim: str, cells: Cells) -> Numbers:
        """A part at these cells, (G, n), or (G, 1) where it is the same for all of them; further axes come last."""
        assert self.kept is not None
        array = self.kept[name]
        over = [str(d) for d in array.dims if d in cells]
        values = array.transpose(dim, *over, ...).values
        at: tuple[Any, ...] = (slice(None), *(cells[d] for d in over))
        return np.asarray(values[at] if over else values[:, None], np.float64)

    def values(self, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """The numbers of these cells when groups have these weights: (W, n)."""
        recipe = self.recipe(variable)
        assert recipe is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            return recipe.values(self, variable, cells, weights)

    def used(self, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """Which groups (G,) have images that these cells depend on."""
        recipe = self.recipe(variable)
        assert recipe is not None
        return recipe.used(self, variable, cells)


class Recipe(Protocol):
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
        """A part that has the axis of groups."""
        return self.sum

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
        dim, _ = of.axis(variable)
        found = (weights @ of.part(self.sum, dim, cells)) / (weights @ of.part(self.count, dim, cells))
        found = np.sqrt(found) if self.root else found
        if self.scale:
            assert of.kept is not None
            scale = of.kept[self.scale]
            found = found * scale.values[tuple(cells[str(d)] for d in scale.dims)]
        return found

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,)."""
        return _any(of.part(self.count, of.axis(variable)[0], cells))


@dataclass(frozen=True)
class Alignment:
    """Σ cross / √(Σ own · Σ other): CKA from the sums of HSIC."""

    cross: str
    own: str
    other: str

    def first(self, of: Measured) -> str:
        """A part that has the axis of groups."""
        return self.cross

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
        dim, _ = of.axis(variable)
        cross, own, other = (weights @ of.part(name, dim, cells) for name in (self.cross, self.own, self.other))
        return _aligned(cross, own, other)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,)."""
        return _any(of.part(self.own, of.axis(variable)[0], cells))


@dataclass(frozen=True)
class Pairs:
    """CKA of all pairs of layers, whose HSIC is kept once for each: `hsic` over `pair`, see `pair_number`.

    `layer` numbers the layers over encoder and site.
    """

    hsic: str
    layer: str

    def first(self, of: Measured) -> str:
        """A part that has the axis of groups."""
        return self.hsic

    def _layers(self, of: Measured, cells: Cells) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        assert of.kept is not None
        numbers = of.kept[self.layer].transpose("encoder", "site").values.astype(np.int64)
        a, b = (numbers[cells[f"encoder_{end}"], cells[f"site_{end}"]] for end in "ab")
        return a, b

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
        a, b = self._layers(of, cells)
        dim, _ = of.axis(variable)
        cross, own, other = (
            weights @ of.part(self.hsic, dim, {**cells, "pair": pair_number(*pair)})
            for pair in ((a, b), (a, a), (b, b))
        )
        return _aligned(cross, own, other)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,)."""
        a, _ = self._layers(of, cells)
        return _any(of.part(self.hsic, of.axis(variable)[0], {**cells, "pair": pair_number(a, a)}))


def pair_number(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where a pair of layers stands in the lower triangle of a symmetric matrix, row by row (`np.tril_indices`).

    >>> pair_number(np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1])).tolist()
    [0, 1, 2, 4]
    """
    row, column = np.maximum(a, b), np.minimum(a, b)
    found: npt.NDArray[np.int64] = row * (row + 1) // 2 + column
    return found


def _aligned(cross: Numbers, own: Numbers, other: Numbers) -> Numbers:
    found: Numbers = cross / (np.sqrt(own) * np.sqrt(other))
    return found


@dataclass(frozen=True)
class TopChoices:
    """Macro F1 or Cohen's κ of first choices, from how often each class is chosen and how often by both."""

    chosen: str  # (…, encoder, choice)
    both: str  # (…, encoder_a, encoder_b, choice)
    kappa: bool

    def first(self, of: Measured) -> str:
        """A part that has the axis of groups."""
        return self.both

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
        dim, _ = of.axis(variable)
        a, b = (of.part(self.chosen, dim, {"encoder": cells[f"encoder_{end}"]}) for end in "ab")
        n_a, n_b, both = (
            np.tensordot(weights, part, 1) for part in (a, b, of.part(self.both, dim, cells))
        )  # (W, n, C)
        if not self.kappa:
            found: Numbers = np.nanmean(2 * both / (n_a + n_b), -1)  # 0 / 0: a class that nobody chooses
            return found
        n = n_a.sum(-1)
        expected = (n_a * n_b).sum(-1) / n**2
        return np.where(expected < 1, (both.sum(-1) / n - expected) / (1 - expected), np.nan)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,)."""
        dim, _ = of.axis(variable)
        return _any(of.part(self.chosen, dim, {"encoder": cells["encoder_a"]}))


@dataclass(frozen=True)
class LeftOut:
    """The number without each group was computed and is kept; other weights change it as if it were linear in them."""

    left_out: str

    def first(self, of: Measured) -> str:
        """A part that has the axis of groups."""
        return self.left_out

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
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


# What follows from another variable


@dataclass(frozen=True)
class Picked:
    """Another variable at that position of `dim` whose name stands in the variable `at`."""

    of: str
    dim: str
    at: str

    def first(self, of: Measured) -> str:
        """A part that has the axis of groups."""
        return _recipe(of, self.of).first(of)

    def _cells(self, of: Measured, cells: Cells) -> Cells:
        labels = of.table[self.at]
        names = labels.values[tuple(cells[str(d)] for d in labels.dims)].astype(str)
        where = {str(name): at for at, name in enumerate(of.table[self.dim].values)}
        return {**cells, self.dim: np.array([where[name] for name in names], np.int64)}

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
        return of.values(self.of, self._cells(of, cells), weights)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,)."""
        return of.used(self.of, self._cells(of, cells))


@dataclass(frozen=True)
class Same:
    """Another variable where several of its dimensions have the position that this one has in `dim`."""

    of: str
    dim: str
    dims: Sequence[str]

    def first(self, of: Measured) -> str:
        """A part that has the axis of groups."""
        return _recipe(of, self.of).first(of)

    def _cells(self, cells: Cells) -> Cells:
        rest = {dim: positions for dim, positions in cells.items() if dim != self.dim}
        return rest | dict.fromkeys(self.dims, cells[self.dim])

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
        return of.values(self.of, self._cells(cells), weights)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,)."""
        return of.used(self.of, self._cells(cells))


@dataclass(frozen=True)
class Binned:
    """Mean of another variable over those of its cells whose number in the part `bins` is the position in `dim`."""

    of: str
    dim: str
    bins: str

    def first(self, of: Measured) -> str:
        """A part that has the axis of groups."""
        return _recipe(of, self.of).first(of)

    def _cells(self, of: Measured, cells: Cells, number: int) -> Cells:
        assert of.kept is not None
        at = {d: int(positions[number]) for d, positions in cells.items()}
        bins = of.kept[self.bins]
        known = bins.isel({d: p for d, p in at.items() if d in bins.dims})
        where = np.nonzero(known.values == at.pop(self.dim))
        inner = {str(d): positions for d, positions in zip(known.dims, where, strict=True)}
        return inner | {d: np.full(len(where[0]), p, np.int64) for d, p in at.items()}

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
        every = (self._cells(of, cells, number) for number in range(_count(cells)))
        return np.stack([np.nanmean(of.values(self.of, inner, weights), 1) for inner in every], 1)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,)."""
        return of.used(self.of, self._cells(of, cells, 0))


@dataclass(frozen=True)
class Spread:
    """Standard deviation of another variable over a dimension, where it has a number."""

    of: str
    dim: str

    def first(self, of: Measured) -> str:
        """A part that has the axis of groups."""
        return _recipe(of, self.of).first(of)

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
        size = of.table.sizes[self.dim]
        inner = {d: np.repeat(positions, size) for d, positions in cells.items()}
        inner[self.dim] = np.tile(np.arange(size), _count(cells))
        found = of.values(self.of, inner, weights).reshape(len(weights), -1, size)
        spread: Numbers = np.nanstd(found, -1)
        return spread

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,)."""
        return of.used(self.of, {**cells, self.dim: np.zeros(_count(cells), np.int64)})


@dataclass(frozen=True)
class Best:
    """The largest CKA of a layer with layers of its type in the other encoder, or the relative depth of that layer."""

    of: str
    depth: bool = False

    def first(self, of: Measured) -> str:
        """A part that has the axis of groups."""
        return _recipe(of, self.of).first(of)

    def values(self, of: Measured, variable: str, cells: Cells, weights: Numbers) -> Numbers:
        """(W, n)."""
        kinds = [of.table[f"layer_type_{end}"].values.astype(str) for end in "ab"]
        known = np.isfinite(of.table[self.of].transpose(*cells, "site_b").values)
        depths = relative_depths(of.table)
        found = []
        for number in range(_count(cells)):
            at = {d: int(positions[number]) for d, positions in cells.items()}
            sites = np.flatnonzero(known[tuple(at.values())] & (kinds[1] == kinds[0][at["site_a"]]))
            inner = {d: np.full(len(sites), p, np.int64) for d, p in at.items()} | {"site_b": sites}
            values = of.values(self.of, inner, weights)
            found.append(depths[at["encoder_b"], sites[values.argmax(1)]] if self.depth else values.max(1))
        return np.stack(found, 1)

    def used(self, of: Measured, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        """(G,)."""
        own = {**cells, "encoder_b": cells["encoder_a"], "site_b": cells["site_a"]}
        return of.used(self.of, own)


def _recipe(of: Measured, variable: str) -> Recipe:
    recipe = of.recipe(variable)
    assert recipe is not None
    return recipe


def _any(part: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which groups (G, …) have something that is not zero."""
    found: npt.NDArray[np.bool_] = (part.reshape(len(part), -1) != 0).any(1)
    return found


def _count(cells: Cells) -> int:
    return len(next(iter(cells.values())))


KINDS: Mapping[str, Any] = {
    kind.__name__: kind for kind in (Alignment, Best, Binned, LeftOut, Mean, Pairs, Picked, Same, Spread, TopChoices)
}
