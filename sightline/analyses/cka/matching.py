"""Which layers of two encoders correspond: the closest one, that of the same depth, and similarity over distance."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from sightline.core.results import ABSENT, of_decoder
from sightline.encoders.sites import layer_type

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["layers_of_same_depth", "summaries"]


AXES = ("tokens", "encoder_a", "encoder_b", "site_a")


def summaries(result: xr.Dataset, name: str = "cka", distance: bool = False) -> xr.Dataset:
    """The closest layer, the layer at the same depth, and the mean over distance in depth, from `result[name]`.

    row_max, row_argmax       over the layers of B that have the layer type of the layer of A
    diagonal, diagonal_site   with the layer of B of the same type and relative depth; decoders with decoders
    distance_cka              mean over the pairs of blocks i of A and j of B that are `distance` apart in depth:
                              |i/(depth_A − 1) − j/(depth_B − 1)| · (smaller depth − 1), rounded, which is |i − j| in
                              encoders of one depth. A pair of one encoder counts once; decoders do not

    Of a measure that is itself a `distance` the closest layer has the smallest one. With another name than "cka" the
    last one is distance_NAME.
    """
    values = result[name].transpose(*AXES, "site_b")
    has = (result.reason != ABSENT).any("tokens").transpose("encoder", "site").values
    parts = [_closest(values, distance), _at_the_same_depth(values, has), _over_distance(values, has, name)]
    return xr.merge(parts, join="exact", compat="equals")


def _closest(values: xr.DataArray, distance: bool) -> xr.Dataset:
    sites = values.site_b.values.astype(str)
    kinds = np.array([layer_type(site) for site in sites])
    alike = np.where(kinds[:, None] == kinds, values.values, np.nan)
    best = np.where(np.isnan(alike), -np.inf, -alike if distance else alike).argmax(-1)
    maximum = np.take_along_axis(alike, best[..., None], -1)[..., 0]
    names = np.where(np.isfinite(maximum), sites[best], "")
    return xr.Dataset({"row_max": (AXES, maximum), "row_argmax": (AXES, names)}, _coords(values))


def _at_the_same_depth(values: xr.DataArray, has: npt.NDArray[np.bool_]) -> xr.Dataset:
    sites = values.site_b.values.astype(str)
    counterpart = np.broadcast_to(layers_of_same_depth(sites, has), values.shape[:4])  # of A, B and a site of A
    there = counterpart >= 0
    diagonal = np.take_along_axis(values.values, counterpart.clip(0)[..., None], -1)[..., 0]
    return xr.Dataset(
        {
            "diagonal": (AXES, np.where(there, diagonal, np.nan)),
            "diagonal_site": (AXES, np.where(there, sites[counterpart], "")),
        },
        _coords(values),
    )


def _over_distance(values: xr.DataArray, has: npt.NDArray[np.bool_], name: str) -> xr.Dataset:
    sites = values.site_b.values.astype(str)
    kinds = np.array([layer_type(site) for site in sites])
    blocks = [np.flatnonzero(row & np.char.startswith(sites, "block.") & (kinds == "block")) for row in has]
    steps = max([1, *map(len, blocks)])
    mean = np.full((*values.shape[:3], steps), np.nan)
    pairs = np.zeros(mean.shape, np.int64)
    relative = np.full(mean.shape[1:], np.nan)
    for a, b in itertools.product(range(len(has)), repeat=2):
        n, m = len(blocks[a]), len(blocks[b])
        last = min(n, m) - 1
        steps_apart = np.rint(_apart(n, m) * last / (max(n - 1, 1) * max(m - 1, 1)))
        part = values.values[:, a, b][:, blocks[a][:, None], blocks[b]]  # (T, blocks of A, blocks of B)
        known = np.isfinite(part) & ((a != b) | (blocks[a][:, None] <= blocks[b]))
        relative[a, b, : last + 1] = np.arange(last + 1) / max(last, 1)
        for step in range(last + 1):
            here = known & (steps_apart == step)
            pairs[:, a, b, step] = here.sum((1, 2))
            with np.errstate(invalid="ignore"):
                mean[:, a, b, step] = np.where(here, part, 0).sum((1, 2)) / pairs[:, a, b, step]
    apart = (*AXES[:3], "distance")
    return xr.Dataset(
        {f"distance_{name}": (apart, mean), "distance_pairs": (apart, pairs)},
        {**_coords(values), "distance": np.arange(steps), "relative_distance": (apart[1:], relative)},
    )


def _coords(values: xr.DataArray) -> dict[str, xr.DataArray]:
    return {axis: values[axis] for axis in AXES}


def _apart(a: int, b: int) -> npt.NDArray[np.int64]:
    """|i/(a − 1) − j/(b − 1)| of all layers i of a, j of b, times (a − 1)(b − 1), hence exact: (a, b)."""
    found: npt.NDArray[np.int64] = np.abs(np.arange(a)[:, None] * max(b - 1, 1) - np.arange(b) * max(a - 1, 1))
    return found


def layers_of_same_depth(sites: npt.NDArray[np.str_], has: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """For encoders A and B and a site of A, the site of B of its kind that is closest in relative depth, or −1."""
    kinds = np.array([("decoder." if of_decoder(site) else "") + layer_type(site) for site in sites])
    found = np.full((len(has), *has.shape), -1)
    for a, b in itertools.product(range(len(has)), repeat=2):
        for kind in np.unique(kinds):
            mine, others = (np.flatnonzero(has[e] & (kinds == kind)) for e in (a, b))
            if len(mine) and len(others):
                found[a, b, mine] = others[_apart(len(mine), len(others)).argmin(1)]
    return found
