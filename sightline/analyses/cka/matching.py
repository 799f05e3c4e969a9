"""Which layers of two encoders correspond: the closest one, that of the same depth, and similarity over distance."""

import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xarray as xr

from sightline.core.results import of_decoder, relative_depths, said_depths, sites_of
from sightline.encoders.encoder import Encoder
from sightline.encoders.sites import block_numbers, layer_type

Numbers = npt.NDArray[np.int64]


AXES = ("tokens", "encoder_a", "encoder_b", "site_a")


def depths_of(encoders: Iterable[Encoder]) -> Numbers:
    """How many blocks each encoder has, and how many its decoder has, whichever of them were chosen: (encoders, 2)."""
    return np.array([(e.depth, max(_numbers([s for s in e.sites if of_decoder(s)]), default=-1) + 1) for e in encoders])


def summaries(
    result: xr.Dataset, name: str = "cka", distance: bool = False, depths: Numbers | None = None
) -> xr.Dataset:
    """The closest layer, the layer at the same depth, and the mean over distance in depth, from `result[name]`.

    row_max, row_argmax       over the layers of B that have the layer type of the layer of A
    row_depth                 block of that layer over the number of blocks of B
    diagonal, diagonal_site   with the layer of B of the same type and relative depth; decoders with decoders
    distance_cka              mean over the pairs of blocks i of A and j of B that are `distance` apart in depth:
                              |i/(depth_A − 1) − j/(depth_B − 1)| · (smaller depth − 1), rounded, which is |i − j| in
                              encoders of one depth. A pair of one encoder counts once; decoders do not

    Of a measure that is itself a `distance` the closest layer has the smallest one. With another name than "cka" the
    last one is distance_NAME. Depths are those of the encoders, also where only some blocks were chosen: `depths` as
    from `depths_of`, or else what the result says, or else as many blocks as its sites show.
    """
    values = result[name].transpose(*AXES, "site_b")
    has = sites_of(result)
    if depths is None:
        said = said_depths(result).astype(np.int64)
        depths = np.stack([said, np.zeros_like(said)], 1)
    parts = [
        _closest(values, distance, relative_depths(result, depths[:, 0])),
        _at_the_same_depth(values, has, depths),
        _over_distance(values, has, depths, name),
    ]
    return xr.merge(parts, join="exact", compat="equals")


def _closest(values: xr.DataArray, distance: bool, depths: npt.NDArray[np.float64]) -> xr.Dataset:
    sites = values.site_b.values.astype(str)
    kinds = np.array([layer_type(site) for site in sites])
    alike = np.where(kinds[:, None] == kinds, values.values, np.nan)
    best = np.where(np.isnan(alike), -np.inf, -alike if distance else alike).argmax(-1)
    maximum = np.take_along_axis(alike, best[..., None], -1)[..., 0]
    names = np.where(np.isfinite(maximum), sites[best], "")
    depth = np.where(np.isfinite(maximum), depths[np.arange(len(depths))[:, None], best], np.nan)  # of B and its layer
    variables = {"row_max": (AXES, maximum), "row_argmax": (AXES, names), "row_depth": (AXES, depth)}
    return xr.Dataset(variables, _coords(values))


def _at_the_same_depth(values: xr.DataArray, has: npt.NDArray[np.bool_], depths: Numbers) -> xr.Dataset:
    sites = values.site_b.values.astype(str)
    counterpart = np.broadcast_to(layers_of_same_depth(sites, has, depths), values.shape[:4])  # of A, B, a site of A
    there = counterpart >= 0
    diagonal = np.take_along_axis(values.values, counterpart.clip(0)[..., None], -1)[..., 0]
    return xr.Dataset(
        {
            "diagonal": (AXES, np.where(there, diagonal, np.nan)),
            "diagonal_site": (AXES, np.where(there, sites[counterpart], "")),
        },
        _coords(values),
    )


def _over_distance(values: xr.DataArray, has: npt.NDArray[np.bool_], depths: Numbers, name: str) -> xr.Dataset:
    sites = values.site_b.values.astype(str)
    numbers, distances = values.values, block_distances(sites, has, depths)
    steps = max(1, int(distances.max(initial=-1)) + 1)
    mean = np.full((*values.shape[:3], steps), np.nan)
    pairs = np.zeros(mean.shape, np.int64)
    for step in range(steps):
        here = np.isfinite(numbers) & (distances == step)
        pairs[..., step] = here.sum((-2, -1))
        with np.errstate(invalid="ignore"):
            mean[..., step] = np.where(here, numbers, 0).sum((-2, -1)) / pairs[..., step]
    counts = _counts(sites, has, depths)[:, 0]
    both = (distances >= 0).any((-2, -1))  # encoders that have blocks here
    last = np.where(both, np.minimum(counts[:, None], counts) - 1, -1)[..., None]
    relative = np.where(np.arange(steps) <= last, np.arange(steps) / np.maximum(last, 1), np.nan)
    apart = (*AXES[:3], "distance")
    return xr.Dataset(
        {f"distance_{name}": (apart, mean), "distance_pairs": (apart, pairs)},
        {**_coords(values), "distance": np.arange(steps), "relative_distance": (apart[1:], relative)},
    )


def _coords(values: xr.DataArray) -> dict[str, xr.DataArray]:
    return {axis: values[axis] for axis in AXES}


def block_distances(sites: npt.NDArray[np.str_], has: npt.NDArray[np.bool_], depths: Numbers) -> Numbers:
    """Distance in depth of all pairs of blocks, (A, B, sites, sites); −1 where one is no block, or counts elsewhere.

    `depths` as from `depths_of`, 0 where they are not known.
    """
    kinds = np.array([layer_type(site) for site in sites])
    blocks = [np.flatnonzero(row & (np.char.startswith(sites, "block.") & (kinds == "block"))) for row in has]
    numbers, counts = _numbers(sites), _counts(sites, has, depths)[:, 0].tolist()
    distances = np.full((len(has), *has.shape, len(sites)), -1)
    for a, b in itertools.product(range(len(has)), repeat=2):
        n, m = counts[a], counts[b]
        steps = _apart(numbers[blocks[a]], n, numbers[blocks[b]], m)
        apart = np.rint(steps * (min(n, m) - 1) / (max(n - 1, 1) * max(m - 1, 1))).astype(np.int64)
        once = (a != b) | (blocks[a][:, None] <= blocks[b])
        distances[a, b, blocks[a][:, None], blocks[b]] = np.where(once, apart, -1)
    return distances


def _apart(i: Numbers, n: int, j: Numbers, m: int) -> Numbers:
    """|i/(n − 1) − j/(m − 1)| of all layers i of n and j of m, times (n − 1)(m − 1), hence exact: (i, j)."""
    difference: Numbers = np.abs(i[:, None] * max(m - 1, 1) - j * max(n - 1, 1))
    return difference


def layers_of_same_depth(sites: npt.NDArray[np.str_], has: npt.NDArray[np.bool_], depths: Numbers) -> Numbers:
    """For encoders A and B and a site of A, the site of B of its kind that is closest in relative depth, or −1.

    The depth of a layer outside the blocks is its rank among those of its kind. `depths` as from `depths_of`.
    """
    decoder = np.array([of_decoder(site) for site in sites], dtype=int)
    kinds = np.array([("decoder." if of_decoder(site) else "") + layer_type(site) for site in sites])
    numbers, counts = _numbers(sites), _counts(sites, has, depths)

    def places(encoder: int, own: Numbers) -> tuple[Numbers, int]:
        """Where these layers of one kind are, and of how many places."""
        if (numbers[own] < 0).any():
            return np.arange(len(own)), len(own)
        return numbers[own], int(counts[encoder, decoder[own[0]]])

    matches = np.full((len(has), *has.shape), -1)
    for a, b in itertools.product(range(len(has)), repeat=2):
        for kind in np.unique(kinds):
            mine, others = (np.flatnonzero(has[e] & (kinds == kind)) for e in (a, b))
            if len(mine) and len(others):
                matches[a, b, mine] = others[_apart(*places(a, mine), *places(b, others)).argmin(1)]
    return matches


def _numbers(sites: Iterable[str]) -> Numbers:
    """The block of each site, from 0 in a decoder, too; −1 outside the blocks."""
    return np.array(block_numbers([str(site).removeprefix("decoder.") for site in sites]), np.int64)


def _counts(sites: npt.NDArray[np.str_], has: npt.NDArray[np.bool_], depths: Numbers) -> Numbers:
    """How many blocks each encoder and its decoder have, at least as many as their sites show: (encoders, 2)."""
    decoder = np.array([of_decoder(site) for site in sites], dtype=bool)
    shown = [np.where(has & (decoder == part), _numbers(sites) + 1, 0).max(1, initial=0) for part in (False, True)]
    counts: Numbers = np.maximum(np.stack(shown, 1), depths)
    return counts
