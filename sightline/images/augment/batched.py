"""Work on a batch in pieces that stay in the cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ImageNumbers = NDArray[np.int64]  # numbers of images
CACHED = 2**19  # numbers of a piece of work that stays in a core's cache, 2 MB
