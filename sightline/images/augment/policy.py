"""A policy: how a view of an image is made."""

import math
from dataclasses import dataclass

from sightline.core.errors import InputError, nearest

Range = tuple[float, float]
RADII = {"bilinear": 1, "bicubic": 2}  # of the filters, in pixels


@dataclass(frozen=True)
class Policy:
    """How one view of an image is made: crop, flip, colours, grey, blur, solarisation, in this order.

    Probabilities are per image. `crop` is the range of the share of the area that a crop covers (None: the whole
    image, resized), as in torchvision's RandomResizedCrop; `jitter` is (brightness, contrast, saturation, hue) as in
    ColorJitter. RandAugment and erasing come last (erasure.py).

    With `fit` the image keeps its proportions instead: its longer side is that of the view times a factor from this
    range (large-scale jitter; (1, 1): the whole image), what sticks out is cut, what is missing to the right and below
    is grey.
    """

    size: int
    crop: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bicubic"  # or "bilinear"; both antialiased
    flip: float = 0.5
    jitter: tuple[float, float, float, float] | None = None
    jitter_probability: float = 0.8
    gray: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize: float = 0.0  # of pixels of at least 128/255
    randaugment: tuple[float, float] = (0.0, 0.0)  # magnitude and its standard deviation; magnitude 0: without
    erase: float = 0.0  # a rectangle becomes noise
    fit: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"The size of a view is {self.size}, but at least 1 pixel is needed")
        for name in ("flip", "jitter_probability", "gray", "blur", "solarize", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is a probability, so it must be in [0, 1], not {getattr(self, name)}")
        if self.interpolation not in RADII:
            raise InputError(f"There is no interpolation {self.interpolation!r}{nearest(self.interpolation, RADII)}")
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise InputError(f"crop is a range of shares of the area, 0 < low ≤ high ≤ 1, not {self.crop}")
        for name in ("ratio", "blur_sigma", "fit"):
            low, high = getattr(self, name) or (1.0, 1.0)
            if not 0 < low <= high < math.inf:
                raise InputError(f"{name} is a range, 0 < low ≤ high, not {(low, high)}")
        if not min(self.randaugment) >= 0:
            raise InputError(f"randaugment is a magnitude and its deviation, both at least 0, not {self.randaugment}")
        if self.jitter is not None and not (min(self.jitter) >= 0 and self.jitter[3] <= 0.5):
            raise InputError(f"jitter is four strengths of at least 0, that of the hue at most 0.5, not {self.jitter}")
