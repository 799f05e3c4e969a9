"""Which numbers of a result are meant: encoders, layers, layer types, depths, token views, by name.

    {"encoder": "mae", "depth": "last half", "layer_type": "block", "feature": "cls"}

Layers and heads that are not named are all meant; whatever else there are several of has to be named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sightline.core.errors import InputError, nearest
from sightline.core.patterns import site_pattern
from sightline.core.results import ABSENT, of_decoder, relative_depths

if TYPE_CHECKING:
    import xarray as xr

    Mask = npt.NDArray[np.bool_]


Where = Mapping[str, Any]

PARTS = {"quarter": 4, "third": 3, "half": 2}
ENCODERS = ("encoder", "encoder_a", "encoder_b", "other")
ALL_MEANT = re.compile(r"(other_)?site(_[ab])?|head")  # dimensions that need not be named
OF_A_LAYER = ("site", "layer_type", "block", "depth")  # in a result of pairs these words mean both layers of a pair


def cells_of(table: xr.Dataset, variable: str, where: Where) -> dict[str, npt.NDArray[np.int64]]:
    """Positions (n,) in each dimension of the variable, of the numbers that are meant and known, in order."""
    values = table.variables[variable]  # without its coordinates, which take longer to gather than the rest
    dims = [str(dim) for dim in values.dims]
    mask, named = np.ones(values.shape, bool), set()
    for word, wanted in where.items():
        for key in _keys(table, dims, word):
            masks = _matches(table, dims, key, wanted, word)
            mask &= _spread(masks, dims)
            named |= set(masks)
    for dim in dims:
        if dim.startswith("site") or dim == "other_site":
            mask &= _spread({dim: _not_of_a_decoder(table, dim, where)}, dims)
    _check_named(table, variable, mask, dims, named)
    known = mask & np.isfinite(values.values)
    if not known.any():
        raise InputError(f"{variable} has no number for {described(where)}: {_why_not(table, table[variable], mask)}")
    return dict(zip(dims, np.nonzero(known), strict=True))


def described(where: Where) -> str:
    """A selection in words.

    >>> described({"encoder": "mae", "site": ["block.0", "block.1"], "depth": (0, 0.75)})
    'encoder=mae, site=block.0|block.1, depth=0..0.75'
    """
    return ", ".join(f"{word}={_words(word, wanted)}" for word, wanted in where.items()) or "everything"


def _words(word: str, wanted: Any) -> str:
    if isinstance(wanted, slice):
        return f"{'' if wanted.start is None else wanted.start}..{'' if wanted.stop is None else wanted.stop}"
    if word.startswith("depth") and isinstance(wanted, tuple | list):
        return "..".join(map(str, wanted))
    return "|".join(map(str, wanted)) if isinstance(wanted, list | tuple | set) else str(wanted)


# Words


def _keys(table: xr.Dataset, dims: list[str], word: str) -> list[str]:
    """What a word means in this variable: itself, or, where layers come in pairs, the layers of A, of B, or both."""
    sides = [end for end in "ab" if f"encoder_{end}" in dims]
    if word == "other" and "other" not in dims and "b" in sides:
        return ["encoder_b"]
    if word == "encoder" and "encoder" not in dims and "a" in sides:
        return ["encoder_a"]
    if word in OF_A_LAYER and "site" not in dims:
        keys = [f"{word}_{end}" for end in "ab" if f"site_{end}" in dims]
        if keys:
            return keys
    known = _known(table, dims)
    if word not in known:
        raise InputError(f"There is nothing called {word!r} to choose by{nearest(word, known)}")
    return [word]


def _known(table: xr.Dataset, dims: list[str]) -> list[str]:
    """All words that choose among the numbers of a variable."""
    over = {str(name): table.variables[name].dims for name in table.coords}
    coords = [name for name, of in over.items() if of and set(of) <= set(dims)]
    of_layers = [f"{word}{end}" for end in ("", "_a", "_b") if f"site{end}" in dims for word in OF_A_LAYER]
    return list(dict.fromkeys([*coords, *of_layers, *dims]))


def _matches(table: xr.Dataset, dims: list[str], key: str, wanted: Any, word: str) -> dict[tuple[str, ...], Mask]:
    """The dimensions that a word is about, and which positions it means there."""
    if re.fullmatch(r"depth(_[ab])?", key):
        end = key.removeprefix("depth")
        low, high = depth_range(wanted)
        depths = relative_depths(table)
        with np.errstate(invalid="ignore"):
            whose = f"encoder{end}" if f"encoder{end}" in dims else "encoder"
            return {(whose, f"site{end}"): (depths >= low) & (depths < high)}
    own = key if key in table.coords else key.removesuffix("_a").removesuffix("_b")
    coord = table.variables[own] if own in table.coords else None
    values = np.arange(table.sizes[key]) if coord is None else coord.values
    equal = _equal(values, wanted)
    if not equal.any():
        names = [str(value) for value in dict.fromkeys(np.ravel(values).tolist())]
        raise InputError(f"No {word} is {_words(word, wanted)}{nearest(_words(word, wanted), names)}")
    over = (key,) if coord is None else tuple(str(dim) + key.removeprefix(own) for dim in coord.dims)
    return {over: equal}


def _equal(values: npt.NDArray[Any], wanted: Any) -> Mask:
    """Which values are meant: by name, by a pattern of sites, as one of several, or as numbers of a range."""
    if isinstance(wanted, slice):
        return _inside(values, wanted)
    if isinstance(wanted, list | tuple | set | np.ndarray):
        any_of: Mask = np.logical_or.reduce([np.zeros(values.shape, bool), *(_equal(values, one) for one in wanted)])
        return any_of
    if values.dtype.kind in "fiu":
        close: Mask = np.isclose(values, _number(wanted))
        return close
    if isinstance(wanted, str) and ("*" in wanted or "?" in wanted):
        pattern = site_pattern(wanted)
        return np.array([bool(pattern.fullmatch(str(value))) for value in values.ravel()]).reshape(values.shape)
    same: Mask = values.astype(str) == str(wanted)
    return same


def _inside(values: npt.NDArray[Any], wanted: slice) -> Mask:
    """Which values lie in a range, ends included; numbers have no limit at an end that is left open."""
    if wanted.start is wanted.stop is None:
        return np.ones(values.shape, bool)
    if values.dtype.kind in "fiu":
        low = -np.inf if wanted.start is None else _number(wanted.start)
        high = np.inf if wanted.stop is None else _number(wanted.stop)
    elif wanted.start is None or wanted.stop is None:
        raise InputError(f"{_words('', wanted)} is an open range, which only numbers have; name those that are meant")
    else:
        low, high = wanted.start, wanted.stop
    inside: Mask = (values >= low) & (values <= high)
    return inside


def _number(wanted: Any) -> float:
    try:
        return float(wanted)
    except (TypeError, ValueError) as error:
        raise InputError(f"{wanted!r} is not a number, but only numbers can be chosen there") from error


def depth_range(wanted: Any) -> tuple[float, float]:
    """The range of relative depths, from (included) and to (not included), that a name or a pair means.

    >>> depth_range("first quarter"), depth_range("last half"), depth_range((0.25, 0.5))
    ((0.0, 0.25), (0.5, 1.0), (0.25, 0.5))
    """
    if isinstance(wanted, str):
        end, _, part = wanted.partition(" ")
        if end in ("first", "last") and part in PARTS:
            share = 1 / PARTS[part]
            return (0.0, share) if end == "first" else ((PARTS[part] - 1) / PARTS[part], 1.0)
    elif isinstance(wanted, tuple | list | slice):
        pair = (wanted.start, wanted.stop) if isinstance(wanted, slice) else tuple(wanted)
        if len(pair) == 2:
            low, high = (default if end is None else float(end) for end, default in zip(pair, (0.0, 1.0), strict=True))
            if low < high:
                return low, high
    raise InputError(
        f"{wanted!r} is not a range of depths; write first or last and quarter, third or half, or a pair from 0 to 1"
    )


# What was not said


def _not_of_a_decoder(table: xr.Dataset, dim: str, where: Where) -> Mask:
    """Layers of a decoder are meant only if they are named."""
    wanted = [where[word] for word in (dim, "site") if word in where]
    asked = [
        str(one)
        for some in wanted
        for one in (some if isinstance(some, Iterable) and not isinstance(some, str) else [some])
    ]
    sites = [str(site) for site in table[dim].values]
    if any(of_decoder(one) or one == "**" for one in asked):
        return np.ones(len(sites), bool)
    return np.array([not of_decoder(site) for site in sites], bool)


def _check_named(table: xr.Dataset, variable: str, mask: Mask, dims: list[str], named: set[tuple[str, ...]]) -> None:
    """Refuse a mean over things that nobody asked to be mixed, such as encoders or token views."""
    # A depth or a stage is of a layer of an encoder, but says nothing about which encoder.
    said = {dim for group in named for dim in group if len(group) == 1 or dim not in ENCODERS}
    for axis, dim in enumerate(dims):
        left = np.asarray(mask.any(tuple(other for other in range(mask.ndim) if other != axis)))
        if left.sum() > 1 and dim not in said and not ALL_MEANT.fullmatch(dim):
            names = [str(name) for name in (table[dim].values if dim in table.coords else range(len(left)))]
            raise InputError(
                f"{variable} has several values of {dim} ({', '.join(names[:6])}{', …' if len(names) > 6 else ''}); "
                f"name one, or a list of those to take the mean of"
            )


def _why_not(table: xr.Dataset, values: xr.DataArray, mask: Mask) -> str:
    """The first reason that the result gives for one of these numbers."""
    if not mask.any():
        return "no layer matches all of it"
    cell = dict(zip(values.dims, (axis[0] for axis in np.nonzero(mask)), strict=True))
    for name, reason in table.data_vars.items():
        own = {dim.removesuffix("_a"): at for dim, at in ((str(d), p) for d, p in cell.items())}
        if str(name).endswith("reason") and set(map(str, reason.dims)) <= {*map(str, cell), *own}:
            at = {d: cell.get(d, own.get(str(d))) for d in reason.dims}
            if (why := str(reason.isel(at).values)) not in ("", ABSENT):
                return why
    return "there is none"


def _spread(found: Mapping[Any, Mask], dims: list[str]) -> Mask:
    """Masks over some dimensions as one over all, by broadcasting."""
    whole: Mask = np.ones([1] * len(dims), bool)
    for key, mask in found.items():
        own = (key,) if isinstance(key, str) else key
        order = sorted(range(len(own)), key=lambda i, own=own: dims.index(own[i]))  # type: ignore[misc]
        shape = [mask.shape[own.index(dim)] if dim in own else 1 for dim in dims]
        whole = whole & mask.transpose(order).reshape(shape)
    return whole
