"""Numbers with what they would be without each group of images, and the interval of anything computed from them.

Replicates are a number and, along the axis `left_out`, the same number without each group: position 0 leaves out
nothing. What is computed from them (differences, ratios, means over layers) keeps the axis, so that one function makes
the interval of all of it:

    x = run.replicates("knn").accuracy                          # (left_out, encoder, site, feature)
    interval(x.sel(encoder="dino") - x.sel(encoder="mae"))      # value, low, high, p

With θ the number, θ₍ⱼ₎ the number without group j of G, θ̄ the mean of the θ₍ⱼ₎ (delete-a-group jackknife):

    error² = (G − 1)/G Σⱼ (θ₍ⱼ₎ − θ̄)²        interval θ ± t₁₋α⸝₂(G − 1) · error

Groups of unequal size, with share wⱼ of the images and hⱼ = 1/wⱼ, have (Busing, Meijer & van der Leeden 1999)

    error² = 1/G Σⱼ (τⱼ − τ̄)² / (hⱼ − 1)     τⱼ = hⱼ θ − (hⱼ − 1) θ₍ⱼ₎,  τ̄ = their mean

Seeds are another axis: θ is then the mean over it, its groups those of the mean, and each axis of seeds adds the square
of σ/√n to the error (crossed random effects); degrees of freedom follow Satterthwaite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sightline.core.errors import InputError
from sightline.core.selection import depth_range

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr

    Squares: TypeAlias = tuple[xr.DataArray, xr.DataArray]  # squared error, degrees of freedom


AXIS = "left_out"
NOTHING = "nothing"  # the label of position 0
SHARE = "share"  # the coordinate along the axis that says how many of the images a group has, where groups differ
FEWEST = 8  # of the groups that images came with: with fewer an interval would be a guess
ROUNDING = 1e-12  # of a number: a smaller error is arithmetic


def with_replicates(
    value: xr.DataArray, without: npt.NDArray[Any], words: str, share: npt.NDArray[np.float64] | None = None
) -> xr.DataArray:
    """A number and what it is without each group, (G, *its own axes), along the axis `left_out`.

    `words` say what the groups are, "groups of test images": numbers of the same groups can be subtracted. A group that
    a number does not have is NaN.
    """
    import xarray as xr

    labels = [NOTHING, *(f"{words} {number}" for number in range(len(without)))]
    values = np.concatenate([np.asarray(value.values, np.float64)[None], without])
    found = xr.DataArray(values, dims=(AXIS, *value.dims), coords=value.coords, name=value.name, attrs=value.attrs)
    found = found.assign_coords({AXIS: labels})
    if share is not None:
        found = found.assign_coords({SHARE: (AXIS, np.concatenate([[np.nan], share]))})
    return found


def interval(x: xr.DataArray, over: str | Sequence[str] = AXIS, confidence: float = 0.95) -> xr.Dataset:
    """Value, low, high and p (against 0) of numbers with replicates, whatever was computed from them.

    `over` names the axis `left_out` and axes of seeds, over which the value is the mean.

    >>> import xarray as xr
    >>> right = np.array([1.0, 0.0, 1.0, 1.0])  # four images, each a group of its own
    >>> mean = xr.DataArray(right.mean(), name="accuracy")
    >>> x = with_replicates(mean, (right.sum() - right) / 3, "test images")
    >>> {name: round(float(number), 3) for name, number in interval(x).items()}
    {'value': 0.75, 'low': -0.046, 'high': 1.546, 'p': 0.058}
    """
    names = [over] if isinstance(over, str) else list(over)
    if not 0 < confidence < 1:
        raise InputError(f"The confidence of an interval must be between 0 and 1, such as 0.95, not {confidence}")
    if missing := [name for name in names if name not in x.dims]:
        given = ", ".join(map(str, x.dims)) or "none"
        raise InputError(
            f"An interval needs the axis {missing[0]!r}, but these numbers have {given}; compute them from "
            "run.replicates(…), and keep its axis left_out"
        )
    if AXIS in names and x.sizes[AXIS] < 2:
        raise InputError(
            "These numbers have no group of images in common, so that nothing can be left out of both; subtract "
            "numbers that were measured on the same images"
        )
    seeds = [name for name in names if name != AXIS]
    whole = x.isel({AXIS: 0}, drop=True) if AXIS in x.dims else x
    value = whole.mean(seeds, skipna=False)
    parts = [_over_groups(x.mean(seeds, skipna=False))] if AXIS in names else []
    parts += [
        _over_seeds(whole.mean([other for other in seeds if other != name], skipna=False), name) for name in seeds
    ]
    total, fourths, least = parts[0][0], parts[0][0] ** 2 / parts[0][1], parts[0][1]
    for square, free in parts[1:]:
        total, fourths, least = total + square, fourths + square**2 / free, least.where(least > free, free)
    moved = total > (ROUNDING * np.abs(value)) ** 2
    free = (total**2 / fourths.where(moved)).where(moved, least)
    error = (total**0.5).where(moved | total.isnull(), 0.0)
    groups = [f"{x.sizes[AXIS] - 1} {str(x[AXIS].values[1]).rpartition(' ')[0]}"] if AXIS in names else []
    how = " and ".join([*groups, *(f"{x.sizes[name]} of {name}" for name in seeds)])
    return _student(value, error, free, confidence).assign_attrs(how=f"jackknife over {how}, Student's t")


def _student(value: xr.DataArray, error: xr.DataArray, free: xr.DataArray, confidence: float) -> xr.Dataset:
    """Student's interval; where nothing changes the number, the interval is that point."""
    import xarray as xr
    from scipy.stats import t

    half = xr.apply_ufunc(lambda f, e: np.where(e == 0, 0.0, t.ppf((1 + confidence) / 2, f) * e), free, error)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = xr.apply_ufunc(
            lambda v, e, f: np.where(e == 0, (v == 0).astype(float), 2 * t.sf(np.abs(v) / e, f)), value, error, free
        )
    known = error.notnull()
    return xr.Dataset({"value": value, "low": value - half, "high": value + half, "p": p.where(known)})


def _over_groups(x: xr.DataArray) -> Squares:
    """The squared error from leaving out groups, and its degrees of freedom; NaN with a single group."""
    whole, without = x.isel({AXIS: 0}, drop=True), x.isel({AXIS: slice(1, None)})
    count = without.notnull().sum(AXIS)
    if SHARE in x.coords:
        inverse = 1 / without[SHARE].where(without.notnull())
        pseudo = inverse * whole - (inverse - 1) * without
        square = ((pseudo - pseudo.mean(AXIS)) ** 2 / (inverse - 1)).sum(AXIS, skipna=True) / count
    else:
        square = (count - 1) / count * ((without - without.mean(AXIS)) ** 2).sum(AXIS, skipna=True)
    enough = count >= (FEWEST if SHARE in x.coords else 2)
    return square.where(enough & whole.notnull()), (count - 1.0).where(count > 1)


def _over_seeds(x: xr.DataArray, axis: str) -> Squares:
    """The squared error of the mean over seeds, and its degrees of freedom."""
    count = x.sizes[axis]
    if count < 2:
        raise InputError(f"There is one value along {axis!r}, but an interval over it needs two; leave it out of over=")
    return x.var(axis, ddof=1, skipna=False) / count, x.isel({axis: 0}, drop=True) * 0 + (count - 1.0)


def depth(x: xr.DataArray, wanted: Any) -> xr.DataArray:
    """The layers at a relative depth, NaN elsewhere: "last half", "first quarter", (0.25, 0.5).

    `depth(run.replicates("attention").distance_mean, "last half").mean("site")` is a number of each encoder.
    """
    low, high = depth_range(wanted)
    known = [name for name in x.coords if str(name) == "depth" or str(name).startswith("depth_")]
    if not known:
        raise InputError("These numbers do not say how deep their layers are; take them from run.replicates(…)")
    for name in known:
        x = x.where((x[name] >= low) & (x[name] < high))
    return x
