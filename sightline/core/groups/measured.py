"""Reading: the numbers of a result again, with other weights of the groups."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.core.errors import InputError, nearest
from sightline.core.groups.kept import Axis
from sightline.core.groups.rules import RULES
from sightline.core.replicates import with_replicates
from sightline.core.results import relative_depths

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr

    from sightline.core.groups.rules import Cells, Numbers, Rule


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
                f"The result {self.name} keeps nothing that an interval of a difference could be computed from; "
                "its analysis has to keep sums by groups of images, see docs/contrasts.md"
            )
        about: dict[str, Any] = json.loads(self.kept.attrs["kept"])
        return about

    @property
    def variables(self) -> list[str]:
        about = self._about
        return [*about["rules"], *about["without"]]

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

    def rule(self, variable: str) -> Rule | None:
        """How a variable follows from what is kept; None if images do not change it."""
        about = self._about
        if variable in about["without"]:
            return None
        kind, fields = about["rules"][variable]
        rule: Rule = RULES[kind](**fields)
        return rule

    def why_without(self, variable: str) -> str:
        """Why images do not change a variable."""
        why: str = self._about["without"].get(variable, "")
        return why

    def axis(self, variable: str) -> tuple[str, Axis]:
        """The dimension of the groups of a variable, and which groups they are."""
        rule, about = self.rule(variable), self._about
        assert rule is not None
        assert self.kept is not None
        part = rule.first(self)
        dim = next(str(dim) for dim in self.kept[part].dims if dim in about["axes"])
        return dim, Axis(*about["axes"][dim])

    def groups(self, variable: str) -> int:
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
        rule = self.rule(variable)
        assert rule is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            return rule.values(self, variable, cells, weights)

    def used(self, variable: str, cells: Cells) -> npt.NDArray[np.bool_]:
        rule = self.rule(variable)
        assert rule is not None
        return rule.used(self, variable, cells)

    def replicates(self, variable: str) -> xr.DataArray:
        """All numbers of a variable, and what they are without each group of images, along the axis `left_out`."""
        array = self.table[variable]
        known = np.isfinite(array.values)
        groups = self.groups(variable)
        cells = dict(zip(map(str, array.dims), np.nonzero(known), strict=True))
        values = self.values(variable, cells, np.concatenate([np.ones((1, groups)), 1 - np.eye(groups)]))
        without = np.full((groups, *array.shape), np.nan)
        # What is kept may be rounded, or belong to another estimate of the same number: its variation is what counts.
        without[:, known] = array.values[known] + (values[1:] - values[0])
        unused = ~self.used(variable, cells) if known.any() else np.zeros(groups, bool)
        without[unused] = np.nan
        found = with_replicates(array, without, self.axis(variable)[1].words)
        return found.assign_coords(self._depths(array))

    def _depths(self, array: xr.DataArray) -> dict[str, tuple[tuple[str, str], Numbers]]:
        """The relative depth of each layer of each encoder, where the numbers have both axes."""
        pairs = [("depth", "encoder", "site")] + [(f"depth_{end}", f"encoder_{end}", f"site_{end}") for end in "ab"]
        there = [(name, (encoder, site)) for name, encoder, site in pairs if {encoder, site} <= set(array.dims)]
        return {name: (dims, relative_depths(self.table)) for name, dims in there}
