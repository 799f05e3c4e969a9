"""Headline numbers: one number of each encoder is a column of the table that ends a run and begins its report.

An analysis declares them (`key_numbers`), and how alike encoders are (`likeness`): terminal and report know none of
them by name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from sightline.core.results import ENDS, outside_decoder, sites_of

FIRST = 1  # place of what is shown before all others
At = Literal["last", "highest", "last third"]
Ends = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class KeyNumber:
    """A number of each encoder, by its name; encoders without one are left out."""

    title: str  # the head of a column: a few letters
    about: str  # what it is, in a phrase
    values: Mapping[str, float]
    ends: Ends = field(default_factory=dict)  # 95 % intervals, where they are known
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)  # over depth, or over whatever `over` says
    over: str = "blocks"
    style: str = ".2f"
    best: Literal["highest", "lowest", ""] = ""  # "": neither end is better
    place: int = 2  # where there are more than can be shown, small numbers go first

    def write(self, encoder: str) -> str:
        """The number in the digits that mean something.

        >>> KeyNumber("k-NN", "k-NN accuracy", {"dino": 0.734}, style=".1%").write("dino")
        '73.4%'
        """
        return self._written(self.values[encoder]) if encoder in self.values else ""

    def write_ends(self, encoder: str) -> str:
        """Its interval; the sign of per cent stands behind the number already.

        >>> KeyNumber("k-NN", "", {"dino": 0.734}, {"dino": (0.70, 0.771)}, style=".1%").write_ends("dino")
        '70.0–77.1'
        """
        if encoder not in self.ends:
            return ""
        low, high = (self._written(end).removesuffix("%") for end in self.ends[encoder])
        return f"{low}–{high}" if not high.startswith("−") else f"{low} to {high}"

    def _written(self, value: float) -> str:
        return format(value, self.style).replace("-", "−")

    def winners(self) -> set[str]:
        """The encoders with the best number, if there is such a thing and not all of them have it.

        >>> sorted(KeyNumber("k-NN", "", {"dino": 0.7, "mae": 0.5, "msn": 0.7}, best="highest").winners())
        ['dino', 'msn']
        """
        if not self.best or not self.values:
            return set()
        best = (max if self.best == "highest" else min)(self.values.values())
        winners = {name for name, value in self.values.items() if value == best}
        return winners if len(winners) < len(self.values) else set()


@dataclass(frozen=True)
class Likeness:
    """How alike each two encoders are: 1 is the same; `name` is the measure, `about` says of what."""

    name: str
    about: str
    encoders: tuple[str, ...]
    values: npt.NDArray[np.float64]  # (encoders, encoders), symmetric; NaN where it is not known
    place: int = 2


def key_number(
    result: xr.Dataset, variable: str, *, at: At, over: str = "site", types: Sequence[str] = ("block",), **words: Any
) -> list[KeyNumber]:
    """A number over encoder, site (or another axis, `over`) and others, where the others have one first choice.

    at      "last": of the last block that the encoder has; without a number there, it is left out. "highest": wherever
            it is highest, of all sites, blocks or not. "last third": the mean over the last third of the blocks that
            the encoder has; the mean of the ends of their intervals is at least as wide as the interval of that mean
    types   layer types that count as blocks
    words   title, about, style, best, place of the KeyNumber

    Of other axes, such as the feature, the first that an encoder has a number for is taken, or where it is highest.
    """
    numbers, on_path = result[variable], np.ones(result.sizes[over], bool)
    if over == "site":
        numbers = numbers.sel(site=outside_decoder(result.site.values))
        on_path = np.isin(numbers.layer_type.values.astype(str), list(types))
    rest = [str(dim) for dim in numbers.dims if dim not in ("encoder", over)]
    has = _places(result, numbers, over)
    names = [f"{variable}{end}" for end in ENDS if f"{variable}{end}" in result]
    values, ends, curves = {}, {}, {}
    for row, encoder in enumerate(map(str, numbers.encoder.values)):
        own = [result[n].sel(encoder=encoder).sel({over: numbers[over].values}).transpose(over, *rest) for n in names]
        parts = [part.values.reshape(part.sizes[over], -1) for part in own]
        picked = _pick(parts, on_path & has[row], at)
        if picked is None:
            continue
        (values[encoder], *both), curve = picked
        if len(both) == 2 and np.isfinite(both).all():
            ends[encoder] = (both[0], both[1])
        if len(curve) > 1:
            curves[encoder] = curve
    made = KeyNumber(**{"values": values, "ends": ends, "curves": curves, **words})
    return [made] if values else []


def _places(result: xr.Dataset, numbers: xr.DataArray, over: str) -> npt.NDArray[np.bool_]:
    """Which places each encoder has, (encoders, places): by the reasons, or where there are none by its numbers."""
    known = np.isfinite(numbers.transpose("encoder", over, ...).values)
    has: npt.NDArray[np.bool_] = known.reshape(*known.shape[:2], -1).any(-1)
    if over == "site":
        has |= sites_of(result)[:, outside_decoder(result.site.values)]
    return has


def _pick(
    parts: Sequence[npt.NDArray[np.float64]], on_path: npt.NDArray[np.bool_], at: At
) -> tuple[list[float], list[float]] | None:
    """Of a value and its ends, each (places, others): the number that is meant, and the curve it lies on."""
    values = parts[0]
    path = np.flatnonzero(on_path)
    if at == "highest":
        if not np.isfinite(values).any():
            return None
        place, column = (int(one) for one in np.unravel_index(np.nanargmax(values), values.shape))
        chosen = [place]
    else:
        known = np.isfinite(values[path])
        if not known.any():
            return None
        column = int(known.any(0).argmax())
        count = 1 if at == "last" else math.ceil(len(path) / 3)
        chosen = path[-count:][known[-count:, column]].tolist()
        if not chosen:
            return None
    curve = values[path, column]
    return [float(part[chosen, column].mean()) for part in parts], curve[np.isfinite(curve)].tolist()


def of_encoders(result: xr.Dataset, variable: str, **words: Any) -> list[KeyNumber]:
    """A number over encoders alone, with its interval if there is one."""
    parts = [result[f"{variable}{end}"].values for end in ENDS if f"{variable}{end}" in result]
    rows = dict(zip(map(str, result.encoder.values), np.stack(parts, 1), strict=True))
    known = {name: row for name, row in rows.items() if np.isfinite(row[0])}
    ends = {
        name: (float(row[1]), float(row[2])) for name, row in known.items() if np.isfinite(row).all() and len(row) == 3
    }
    made = KeyNumber(**{"values": {name: float(row[0]) for name, row in known.items()}, "ends": ends, **words})
    return [made] if known else []
