"""Writing: what is kept while a result is made.

A rule says how a variable follows from sums over groups of images. With a weight for each group, its number without a
group of images (one weight 0) and its number on images drawn again (weights of a bootstrap) are computed as the number
itself was. Groups are the same for all encoders and layers, so that differences are on the same images.

    kept = Kept({"test": Axis("d1e0…", "groups of test images")})
    kept.add("accuracy", Mean("right", "images"), right=(("test", "encoder", "site"), sums), images=(("test",), counts))
    return kept.beside(result)            # what `compute` of an analysis gives; `split` takes it apart again
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr

    from sightline.core.groups.rules import Rule


PREFIX = "kept_"


class Axis(NamedTuple):
    """Groups of images: equal keys are the same groups of the same images, whichever analysis or run kept them."""

    key: str
    words: str  # "groups of test images"


@dataclass(frozen=True)
class Kept:
    """Collects rules and their parts while a result is made."""

    axes: Mapping[str, Axis]  # dimension → which groups it counts
    rules: dict[str, Rule] = field(default_factory=dict)
    parts: dict[str, tuple[tuple[str, ...], npt.NDArray[Any]]] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)

    def add(self, variable: str, rule: Rule, /, **parts: tuple[tuple[str, ...], npt.NDArray[Any]]) -> None:
        """How a variable follows from these parts, and from those that were added before."""
        self.rules[variable] = rule
        self.parts.update(parts)

    def nothing(self, why: str, *variables: str) -> None:
        """Variables that images do not change, or that cannot be had again from sums, and why."""
        self.without.update(dict.fromkeys(variables, why))

    def beside(self, result: xr.Dataset) -> xr.Dataset:
        """The result with what is kept, under names that `split` knows."""
        rules = {name: [type(rule).__name__, dict(vars(rule))] for name, rule in self.rules.items()}
        sizes = {dim: values.shape[dims.index(dim)] for dims, values in self.parts.values() for dim in dims}
        used = {dim: axis for dim, axis in self.axes.items() if dim in sizes}
        return result.assign({PREFIX + name: part for name, part in self.parts.items()}).assign_attrs(
            kept=json.dumps({"axes": used, "rules": rules, "without": self.without, "parts": list(self.parts)})
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
