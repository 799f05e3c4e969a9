"""Words that results share: why a value is absent, and how the ends of an interval are named."""

from __future__ import annotations

import math

__all__ = ["ABSENT", "ENDS", "NOTHING", "NOT_FINITE"]


NOT_FINITE = "the activations are not finite (NaN or infinity)"

ENDS = ("", "_low", "_high")  # a value and its interval, as the names of variables end
NOTHING = (math.nan, math.nan, math.nan)

ABSENT = "this encoder has no such site"  # the reason that only fills axes, which hold the sites of all encoders
