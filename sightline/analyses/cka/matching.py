"""Which layers of two encoders correspond: the closest one, that of the same depth, and similarity over distance."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from sightline.core.results import of_decoder, relative_depths, sites_of
from sightline.encoders.sites import layer_type

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["block_distances", "layers_of_same_depth", "summaries"]


AXES = ("tokens", "encoder_a", "encoder_b", "site_a")


def summaries(result: xr.Dataset, name: str = "cka", distance: bool = False) -> xr.Dataset:
    """The closest layer, the layer at the same depth, and the mean over distance in depth, from `result[name]`.

    row_max, row_argmax       over the layers of B that have the layer type of the layer of A
    row_depth                 block of that layer over the number of blocks of B
    diagonal, diagonal_site   with the layer of B of the same type and relative depth; decoders with decoders
    distance_cka              mean over the pairs of blocks i of A and j of B that are `distance` apart in depth:
                              |i/(depth_A − 1) − j/(depth_B − 1)| · (smaller depth − 1), rounded, which is |i − j| in
                              encoders of one depth. A pair of one encoder counts once; decoders do not

    Of a measure that is itself a `distance` the closest layer has the smallest one. With another name than "cka" the
    last one is distance_NAME.
    """
    values = result[name].transpose(*AXES, "site_b")
    has = sites_of(result)
    parts = [
        _closest(values, distance, relative_depths(result)),
        _at_the_same_depth(values, has),
        _over_distance(values, has, name),
    ]
    return xr.merge(parts, join="exact", compat="equals")


def _closest(values: xr.DataArray, distance: bool, depths: npt.NDArray[np.float64]) -> xr.Dataset:
    sites = values.site_b.values.astype(str)
    kinds = np.array([layer_type(site) for site in sites])
    alike = np.where(kinds[:, None] == kinds, values.values, np.nan)
    best = np.where(np.isnan(alike), -np.inf, -alike if distance else alike).argmax(-1)
    maximum = np.take_along_axis(alike, best[..., None], -1)[..., 0]
    names = np.where(np.isfinite(maximum), sites[best], "")
    known = np.where(np.isfinite(maximum), depths[np.arange(len(depths))[:, None], best], np.nan)  # of B and its layer
    found = {"row_max": (AXES, maximum), "row_argmax": (AXES, names), "row_depth": (AXES, known)}
    return xr.Dataset(found, _coords(values))


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
    numbers, distances = values.values, block_distances(values.site_b.values.astype(str), has)
    steps = max(1, int(distances.max(initial=-1)) + 1)
    mean = np.full((*values.shape[:3], steps), np.nan)
    pairs = np.zeros(mean.shape, np.int64)
    for step in range(steps):
        here = np.isfinite(numbers) & (distances == step)
        pairs[..., step] = here.sum((-2, -1))
        with np.errstate(invalid="ignore"):
            mean[..., step] = np.where(here, numbers, 0).sum((-2, -1)) / pairs[..., step]
    last = distances.max((-2, -1))[..., None]
    relative = np.where(np.arange(steps) <= last, np.arange(steps) / np.maximum(last, 1), np.nan)
    apart = (*AXES[:3], "distance")
    return xr.Dataset(
        {f"distance_{name}": (apart, mean), "distance_pairs": (apart, pairs)},
        {**_coords(values), "distance": np.arange(steps), "relative_distance": (apart[1:], relative)},
    )


def _coords(values: xr.DataArray) -> dict[str, xr.DataArray]:
    return {axis: values[axis] for axis in AXES}


def block_distances(sites: npt.NDArray[np.str_], has: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Distance in depth of all pairs of blocks, (A, B, sites, sites); −1 where one is no block, or counts elsewhere."""
    kinds = np.array([layer_type(site) for site in sites])
    blocks = [np.flatnonzero(row & (np.char.startswith(sites, "block.") & (kinds == "block"))) for row in has]
    found = np.full((len(has), *has.shape, len(sites)), -1)
    for a, b in itertools.product(range(len(has)), repeat=2):
        n, m = len(blocks[a]), len(blocks[b])
        apart = np.rint(_apart(n, m) * (min(n, m) - 1) / (max(n - 1, 1) * max(m - 1, 1))).astype(np.int64)
        once = (a != b) | (blocks[a][:, None] <= blocks[b])
        found[a, b, blocks[a][:, None], blocks[b]] = np.where(once, apart, -1)
    return found


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
