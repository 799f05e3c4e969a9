"""The bootstrap of groups: which are drawn, and the ends of an interval from what the draws give.

With few groups the plain percentiles are too near to each other: the draws vary by (G − 1)/G of the variance, and the
normal has lighter tails than Student's t. So they are taken further out, at the tail α/2 = Φ(√(G/(G − 1)) t(0.025)).
Where so few groups ask for more than the draws reach: θ ± t(G − 1) · √(G/(G − 1)) · their standard deviation.

Source: Hesterberg 2015, "What Teachers Should Know about the Bootstrap" (expanded percentile interval).

Shapes: R replicates, G groups.
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor


def draw_groups(groups: int, replicates: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """How often each group is drawn, float64 (R, G); the same on every device."""
    random = np.random.Generator(np.random.Philox(seed))
    draws = random.multinomial(groups, np.full(groups, 1 / groups), size=replicates)
    return torch.from_numpy(draws).to(device, torch.float64)


@functools.cache
def tail_of(groups: int) -> float:
    """The share of the replicates beyond each end of a 95 % interval.

    >>> [round(tail_of(groups), 4) for groups in (8, 32, 10**6)]
    [0.0057, 0.0191, 0.025]
    """
    from scipy.stats import norm, t

    return float(norm.cdf(math.sqrt(groups / (groups - 1)) * t.ppf(0.025, groups - 1)))


@functools.cache
def errors_of(groups: int) -> float:
    """How many standard deviations of the replicates reach to either end of a 95 % interval of Student's t.

    >>> [round(errors_of(groups), 3) for groups in (2, 5, 10**6)]
    [17.969, 3.104, 1.96]
    """
    from scipy.stats import t

    return float(t.ppf(0.975, groups - 1)) * math.sqrt(groups / (groups - 1))


def percentile_ends(values: Tensor, groups: int, value: Tensor | float) -> tuple[Tensor, Tensor]:
    """Ends of the 95 % interval of a value (…) from replicates (R, …), on their device; NaN where one has no value.

    >>> low, high = percentile_ends(torch.arange(1001, dtype=torch.float64), 10**9, 500)
    >>> round(float(low), 3), round(float(high), 3)
    (25.0, 975.0)
    """
    if tail_of(groups) < 1 / (len(values) + 1):  # further out than any replicate: their standard deviation tells
        half = errors_of(groups) * values.std(0, correction=0)
        unknown = ~values.isfinite().all(0)
        return (value - half).masked_fill(unknown, math.nan), (value + half).masked_fill(unknown, math.nan)
    place = tail_of(groups) * (len(values) - 1)
    below, between = int(place), place - int(place)
    count = min(below + 2, len(values))
    last = values.movedim(0, -1)
    known = last.isfinite().all(-1)
    ends = []
    for largest in (False, True):  # a few of the smallest, and of the largest: sorting all takes three times as long
        few = last.topk(count, largest=largest).values
        ends.append(torch.lerp(few[..., below], few[..., count - 1], between).masked_fill_(~known, math.nan))
    return ends[0], ends[1]
