"""Words that results share: why a value is absent, how an interval is named and written, whose a site is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import xarray as xr


NOT_FINITE = "the activations are not finite (NaN or infinity)"

ENDS = ("", "_low", "_high")  # a value and its interval, as the names of variables end
NOTHING = (math.nan, math.nan, math.nan)
NORMAL_95 = 1.959963984540054  # 95 % of a normal distribution lie within so many standard deviations

ABSENT = "this encoder has no such site"  # the reason that only fills axes, which hold the sites of all encoders


def interval(low: Any, high: Any, style: str = ".1%") -> str:
    """A 95 % interval in words; pandas does not know that its rows hold numbers, hence any type.

    >>> interval(0.25, 0.5), interval(0.25, 0.5, ".2f")
    ('95 % 25.0% – 50.0%', '95 % 0.25 – 0.50')
    """
    return f"95 % {low:{style}} – {high:{style}}"


def of_decoder(site: str) -> bool:
    """Whether a site belongs to the decoder behind an encoder.

    >>> of_decoder("decoder.block.0"), of_decoder("block.0")
    (True, False)
    """
    return site.startswith("decoder.")


def outside_decoder(sites: Iterable[str]) -> npt.NDArray[np.bool_]:
    """Which sites belong to no decoder."""
    return np.array([not of_decoder(str(site)) for site in sites], dtype=bool)


def sites_of(result: xr.Dataset) -> npt.NDArray[np.bool_]:
    """Which encoder has which site, (encoders, sites): where any reason is not that it has no such site."""
    has = np.zeros((result.sizes["encoder"], result.sizes["site"]), bool)
    for name, reason in result.data_vars.items():
        if str(name).endswith("reason") and {"encoder", "site"} <= set(reason.dims):
            there = reason.transpose("encoder", "site", ...).values != ABSENT
            has |= there.reshape(*has.shape, -1).any(-1)
    return has


def relative_depths(
    result: xr.Dataset, depths: npt.NDArray[np.int64] | npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.float64]:
    """Block of each site over the number of blocks, (encoders, sites), so that the last half are those from 0.5 on.

    Blocks of a decoder go on from 1; NaN where a site is in no block, or where an encoder does not have it. Where only
    some blocks were chosen, how many there are is known from `depths` (encoders,), or else from what the result says.
    """
    blocks = [re.match(r"(decoder\.)?block\.(\d+)(?:\.|$)", str(site)) for site in result.site.values]
    number = np.array([math.nan if block is None else float(block[2]) for block in blocks])
    decoder = np.array([bool(block and block[1]) for block in blocks], dtype=bool)
    has = sites_of(result) & ~np.isnan(number)
    depth = np.where(has & ~decoder, number + 1, 0.0).max(1, keepdims=True, initial=0.0)
    depth = np.maximum(depth, (said_depths(result) if depths is None else depths)[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(has, (number + decoder * depth) / depth, math.nan)


def said_depths(result: xr.Dataset) -> npt.NDArray[np.float64]:
    """The numbers of blocks of the encoders as the result says where it comes from; 0 where it does not say."""
    try:
        said = {about["name"]: about["depth"] for about in json.loads(result.attrs["provenance"])["encoders"]}
    except (KeyError, TypeError, ValueError):  # made by hand, or damaged
        said = {}
    known = (said.get(str(encoder)) for encoder in result.encoder.values)
    return np.array([float(depth) if isinstance(depth, int) else 0.0 for depth in known])
