"""What is kept beside a result so that its numbers can be had again from other images: sums over groups of images.

kept      writing: sums, and the rules by which numbers follow from them
rules     the rules, one class each
measured  reading: the numbers again, with a weight for each group
"""

from sightline.core.groups.kept import Axis, Kept, split
from sightline.core.groups.measured import Measured
from sightline.core.groups.rules import (
    Alignment,
    Best,
    Binned,
    LeftOut,
    Mean,
    Pairs,
    Picked,
    Rule,
    Same,
    Spread,
    TopChoices,
    pair_number,
)

__all__ = [
    "Alignment",
    "Axis",
    "Best",
    "Binned",
    "Kept",
    "LeftOut",
    "Mean",
    "Measured",
    "Pairs",
    "Picked",
    "Rule",
    "Same",
    "Spread",
    "TopChoices",
    "pair_number",
    "split",
]
