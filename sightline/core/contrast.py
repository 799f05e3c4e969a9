"""Differences of measured numbers on the same images, with their interval: is A more like B than like C?

    run.contrast("cka.diagonal", {"other": "dino"}, {"other": "mae"}, encoder="moco", tokens="all", layer_type="block")

A number is computed again without each group of images, from the sums that are kept beside the result (`groups/`).
How much that changes the *difference* of two numbers tells its standard error (delete-a-group jackknife), and with
several seeds of an encoder each of them is left out as well:

    SE² = Σ_f  (m_f − 1)/m_f · Σ_i (θ₍ᵢ₎ − θ̄)²      over what is resampled, f: images, seeds; m_f groups or seeds
    interval = θ ± t(ν) · SE,     ν = SE⁴ / Σ_f SE_f⁴/(m_f − 1)     (Satterthwaite 1946)

For what is not smooth, such as the place of a maximum, a bootstrap of the same groups and seeds: percentiles of the
draws or, where so few groups or seeds ask for more than they reach, θ ± t(ν) · their standard deviation.

Source: Efron & Stein 1981 (jackknife); Welch 1947; Hesterberg 2015 (percentiles for small samples).
"""

from __future__ import annotations

import itertools
import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sightline.core.errors import InputError, counted, nearest
from sightline.core.groups import Mean, TopChoices
from sightline.core.selection import ENCODERS, Where, cells_of, described

if TYPE_CHECKING:
    import pandas as pd

    from sightline.core.groups import Measured
    from sightline.core.run_folder import Run

    Numbers = npt.NDArray[np.float64]
    Statistic = Callable[..., Any]  # of numbers in order, over `axis`, such as np.mean or np.max


DRAWS = 2000
ROUNDING = 1e-12  # of a number: what varies less does not vary
METHODS = ("jackknife", "bootstrap")


class Factor(NamedTuple):
    """Something that is resampled: groups of images, or seeds. Equal keys are the same things, and hence paired."""

    key: str
    words: str
    seeds: bool = False
    alone: bool = False  # images that are known to be paired with no others


@dataclass(frozen=True)
class Contrast:
    """A number that was measured, mostly a difference, with its interval and the p of its being zero."""

    value: float
    low: float
    high: float
    p: float  # two-sided
    confidence: float  # of the interval, 0.95
    error: float  # standard error
    freedom: float  # degrees of freedom of the standard error
    what: str
    how: str
    n_groups: int  # of images
    n_seeds: int  # of all encoders that have several

    def __str__(self) -> str:
        chance = "p unknown" if math.isnan(self.p) else "p < 0.0001" if self.p < 1e-4 else f"p = {self.p:.2g}"
        ends = f"{self.confidence * 100:g} % {self.low:.4g} – {self.high:.4g}"
        return f"{self.what} = {self.value:.4g} ({ends}, {chance}; {self.how})"

    def table(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame([asdict(self)])


@dataclass(frozen=True, eq=False)
class Estimate:
    """A measured number that knows what it would be without some of the images or seeds; they add, subtract, divide."""

    value: float
    left_out: Mapping[Factor, Numbers]  # its value without each group or seed
    used: Mapping[Factor, npt.NDArray[np.bool_]]  # which of them it depends on at all
    draws: Numbers | None  # its values on groups and seeds drawn anew
    what: str
    why: str = ""  # it cannot be resampled
    of_images: bool = False  # a mean over images, whose error is not known where all of them agree

    def __add__(self, other: Estimate | float) -> Estimate:
        return _joined(operator.add, "+", self, other)

    def __sub__(self, other: Estimate | float) -> Estimate:
        return _joined(operator.sub, "−", self, other)

    def __mul__(self, other: Estimate | float) -> Estimate:
        return _joined(operator.mul, "·", self, other)

    def __truediv__(self, other: Estimate | float) -> Estimate:
        return _joined(operator.truediv, "/", self, other)

    def contrast(self, confidence: float = 0.95, method: str = "jackknife") -> Contrast:
        """This number with its interval; most useful of a difference."""
        if not 0 < confidence < 1:
            raise InputError(f"The confidence of an interval must be between 0 and 1, such as 0.95, not {confidence}")
        if method not in METHODS:
            raise InputError(f"There is no method {method!r}{nearest(method, METHODS)}")
        if method == "bootstrap" and self.draws is None and self.left_out:
            raise InputError("A bootstrap needs draws; give draws=2000 to `estimate`")
        error, freedom = self._error()
        counts = {factor: int(self.used[factor].sum()) for factor in self.left_out}
        ends = self._bootstrap if method == "bootstrap" and self.draws is not None else self._student
        low, high, p = ends(error, freedom, confidence)
        how = self._how(counts, method, error, freedom, low)
        return Contrast(
            self.value,
            low,
            high,
            p,
            confidence,
            error,
            freedom,
            self.what,
            how,
            n_groups=sum(n for factor, n in counts.items() if not factor.seeds),
            n_seeds=sum(n for factor, n in counts.items() if factor.seeds),
        )

    def _error(self) -> tuple[float, float]:
        """Standard error and its degrees of freedom."""
        parts = [(_square_error(values[self.used[f]]), self.used[f].sum() - 1) for f, values in self.left_out.items()]
        if not parts or any(math.isnan(square) for square, _ in parts):
            return math.nan, math.nan
        total, fourths = sum(square for square, _ in parts), sum(square**2 / free for square, free in parts)
        return math.sqrt(total), total**2 / fourths if fourths else float(max(free for _, free in parts))

    def _unknown(self, spread: float) -> bool:
        """Whether all images agree, so that no group changes their mean: how far others would is not known then.

        A difference that is 0 may be of the same thing twice, and other numbers, such as places, move in steps.
        """
        return self.value != 0 and self.of_images and spread <= ROUNDING * abs(self.value)

    def _student(self, error: float, freedom: float, confidence: float) -> tuple[float, float, float]:
        from scipy.stats import t

        if self._unknown(error):
            return math.nan, math.nan, math.nan
        if error == 0:  # no group changes it
            return self.value, self.value, 1.0 if self.value == 0 else 0.0
        half = float(t.ppf((1 + confidence) / 2, freedom)) * error
        return self.value - half, self.value + half, float(2 * t.sf(abs(self.value) / error, freedom))

    def _bootstrap(self, error: float, freedom: float, confidence: float) -> tuple[float, float, float]:
        """Percentiles, taken further out as far as few groups make the draws too narrow and the normal too light."""
        from scipy.stats import norm, t

        draws = self.draws
        if draws is None or math.isnan(freedom) or not np.isfinite(draws).all():
            return math.nan, math.nan, math.nan
        if self._unknown(float(np.ptp(draws))):
            return math.nan, math.nan, math.nan
        wider = math.sqrt((freedom + 1) / freedom)
        tail = float(norm.cdf(wider * t.ppf((1 - confidence) / 2, freedom)))
        if tail < 1 / (len(draws) + 1):  # further out than any draw, with a few groups or seeds: their error tells
            return self._student(wider * float(draws.std()), freedom, confidence)
        low, high = np.quantile(draws, [tail, 1 - tail])
        beyond = (1 + min((draws <= 0).sum(), (draws >= 0).sum())) / (len(draws) + 1)
        return float(low), float(high), min(1.0, float(2 * t.cdf(norm.ppf(beyond) / wider, freedom)))

    def _how(self, counts: Mapping[Factor, int], method: str, error: float, freedom: float, low: float) -> str:
        if self.why or not counts:
            return f"no interval: {self.why or 'nothing was resampled'}"
        over = " and ".join(f"{n} {factor.words}" for factor, n in counts.items())
        if few := [factor.words for factor, n in counts.items() if n < 2]:
            return f"no interval: there are fewer than two {few[0]}"
        if math.isnan(error):
            return f"no interval: without some of {over} there is no number"
        if math.isnan(low) and self._unknown(error):
            return f"no interval: the number is the same without any of {over}"
        if error == 0:
            return f"the same without any of {over}"
        if method == "bootstrap":
            return f"bootstrap over {over}, {counted(0 if self.draws is None else len(self.draws), 'draw')}"
        return f"jackknife over {over}, t with {freedom:.0f} degrees of freedom"


def _square_error(left_out: Numbers) -> float:
    m = len(left_out)
    return float((m - 1) / m * np.square(left_out - left_out.mean()).sum()) if m > 1 else math.nan


def _joined(act: Callable[[Any, Any], Any], sign: str, one: Estimate, other: Estimate | float) -> Estimate:
    """The same arithmetic on the values, on all values that leave something out, and on all draws."""
    if not isinstance(other, Estimate):
        other = Estimate(float(other), {}, {}, None, f"{other:g}")
    pair = (one, other)
    factors = list(dict.fromkeys(factor for part in pair for factor in part.left_out))
    left_out, used = {}, {}
    for factor in factors:
        left_out[factor] = np.asarray(act(*(part.left_out.get(factor, part.value) for part in pair)))
        used[factor] = np.logical_or.reduce([part.used[factor] for part in pair if factor in part.used])
    resampled = [part.draws if part.left_out else part.value for part in pair]
    draws = None if any(part is None for part in resampled) or not factors else np.asarray(act(*resampled))
    whats = [part.what if " − " not in part.what else f"({part.what})" for part in pair]
    what = one.what if sign == "−" and not other.left_out and other.value == 0 else f" {sign} ".join(whats)
    value, of_images = float(act(one.value, other.value)), one.of_images or other.of_images
    return Estimate(value, left_out, used, draws, what, one.why or other.why, of_images)


# From a result


def contrast(
    run: Run,
    name: str,
    this: Where,
    that: Where | float = 0.0,
    *,
    statistic: Statistic = np.mean,
    seeds: Mapping[str, Sequence[str]] | None = None,
    confidence: float = 0.95,
    method: str = "jackknife",
    draws: int = DRAWS,
    seed: int = 0,
    **both: Any,
) -> Contrast:
    """`this` minus `that` on the same images, with interval and p: `name` is a variable of a result, "knn.accuracy".

    `this` and `that` say which numbers are meant, `both` what holds for the two: encoder and other, site (also with *),
    layer_type, depth ("first quarter", "last half", (0, 0.75)), tokens, feature and whatever the result is labelled
    with; their mean is taken, or another `statistic`. `that` may be a plain number. `seeds` are encoders that differ in
    their seed only, by the name under which they are then chosen: {"mae": ["mae-0", "mae-1", "mae-2"]}.
    """
    more: dict[str, Any] = {"statistic": statistic, "seeds": seeds, "seed": seed, **both}
    more["draws"] = draws if method == "bootstrap" else 0
    first = estimate(run, name, this, **more)
    second: Estimate | float = estimate(run, name, that, **more) if isinstance(that, Mapping) else float(that)
    shared = f", {described(both)}" if both else ""
    difference = (first - second).contrast(confidence, method)
    right = described(that) if isinstance(that, Mapping) else f"{float(that):g}"
    minus = "" if right == "0" else f" − [{right}]" if isinstance(that, Mapping) else f" − {right}"
    return replace(difference, what=f"{name}{shared}: [{described(this)}]{minus}")


def estimate(
    run: Run,
    name: str,
    where: Where | None = None,
    *,
    statistic: Statistic = np.mean,
    seeds: Mapping[str, Sequence[str]] | None = None,
    draws: int = 0,
    seed: int = 0,
    **both: Any,
) -> Estimate:
    """The mean (or another `statistic`) of the numbers that are meant, ready to be added, subtracted and divided.

    For what is more than one difference: `(a - b) - (c - d)`, `a / b`, also of several results and runs; then
    `.contrast()` gives the interval. What was measured on the same images stays paired. `draws` are for a bootstrap.
    """
    analysis, _, variable = name.partition(".")
    measured = run.measured(analysis)
    variable = measured.chosen(variable or None)
    chosen = {**both, **(where or {})}
    named = {str(chosen[word]) for word in ENCODERS if isinstance(chosen.get(word), str)}
    members = {name: list(of) for name, of in (seeds or {}).items() if name in named}
    if empty := [name for name, of in members.items() if not of]:
        raise InputError(f"There are no seeds of {empty[0]!r}; name the encoders that are")
    parts = [_of_seed(chosen, dict(zip(members, of, strict=True))) for of in itertools.product(*members.values())]
    shape = tuple(map(len, members.values()))
    estimates = [_resampled(measured, variable, part, statistic, draws, seed) for part in parts]
    return _over_seeds(estimates, members, shape, f"{name} [{described(chosen)}]", draws, seed)


class _Resampled(NamedTuple):
    """A number of one choice of seeds."""

    value: float
    factor: Factor | None
    left_out: Numbers  # (G,)
    used: npt.NDArray[np.bool_]  # (G,)
    draws: Numbers  # (R,)
    why: str
    of_images: bool = False


def _of_seed(where: Where, members: Mapping[str, str]) -> Where:
    """The selection with the names of seeded encoders replaced by one member of each."""
    return {
        word: members.get(value, value) if word in ENCODERS and isinstance(value, str) else value
        for word, value in where.items()
    }


def _resampled(
    measured: Measured, variable: str, where: Where, statistic: Statistic, draws: int, seed: int
) -> _Resampled:
    cells = cells_of(measured.table, variable, where)
    array = measured.table.variables[variable]
    whole = np.asarray(array.values[tuple(cells[str(dim)] for dim in array.dims)], np.float64)
    value = float(statistic(whole, axis=-1))
    if (rule := measured.rule(variable)) is None:
        none: Numbers = np.zeros(0)
        return _Resampled(value, None, none, none.astype(bool), np.full(draws, value), measured.why_without(variable))
    key, words = measured.axis(variable)[1]
    factor, groups = Factor(key, words), measured.groups(variable)
    weights = np.concatenate([np.ones((1, groups)), 1 - np.eye(groups), _weights(factor, groups, draws, seed)])
    values = np.asarray(statistic(measured.values(variable, cells, weights), axis=-1), np.float64)
    # What is kept may be rounded, or belong to another estimate of the same number: its variation is what counts.
    values = values[1:] + (value - values[0])
    used, of_images = measured.used(variable, cells), isinstance(rule, Mean | TopChoices)
    return _Resampled(value, factor, values[:groups], used, values[groups:], "", of_images)


def _weights(factor: Factor, count: int, draws: int, seed: int) -> Numbers:
    """How often each group or seed is drawn, (R, count); the same for all numbers that depend on them."""
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(factor.key.encode())])))
    return random.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)


def drawn_seeds(factor: Factor, drawn: Numbers, seed: int = 0) -> Numbers:
    """Draws of each seed (…, n, R) → of their mean, with seeds drawn as well (…, R)."""
    count, draws = drawn.shape[-2:]
    weights = _weights(factor, count, draws, seed) / count  # (R, n)
    return np.asarray(np.einsum("...nr,rn->...r", drawn, weights))


def _over_seeds(
    found: Sequence[_Resampled],
    members: Mapping[str, Sequence[str]],
    shape: tuple[int, ...],
    what: str,
    draws: int,
    seed: int,
) -> Estimate:
    """The mean over seeds: without each group of images, without each seed, and on draws of both."""
    value = np.array([part.value for part in found]).reshape(shape)
    drawn = np.stack([part.draws for part in found]).reshape(*shape, draws)
    left_out: dict[Factor, Numbers] = {}
    used: dict[Factor, npt.NDArray[np.bool_]] = {}
    if (images := found[0].factor) is not None:
        left_out[images] = np.mean([part.left_out for part in found], axis=0)
        used[images] = np.logical_or.reduce([part.used for part in found])
    for axis, (name, of) in reversed(list(enumerate(members.items()))):
        factor = Factor(f"seeds of {name}: {', '.join(of)}", f"seeds of {name}", seeds=True)
        if len(of) > 1:
            rest = [np.delete(value, number, axis).mean() for number in range(len(of))]
            left_out[factor], used[factor] = np.array(rest), np.ones(len(of), bool)
        drawn = drawn_seeds(factor, drawn, seed)  # the last axis of seeds first
    return Estimate(
        float(value.mean()),
        left_out,
        used,
        drawn if draws else None,
        what,
        found[0].why if not left_out else "",
        found[0].of_images,
    )
