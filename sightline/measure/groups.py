"""Groups of images, the same for all analyses and encoders: what is kept for contrasts is summed by them.

An image belongs to the group that its id says, within its split, so that neither batches nor processes matter, and
runs on the same images have the same groups. Groups differ by one image at most.

Shapes: G groups, B images of a batch, n of a split.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.groups import Axis
from sightline.core.keyed_random import id_keys, mix
from sightline.core.provenance import fingerprint
from sightline.images.pipeline import Batch
from sightline.images.sets import Images

GROUPS = 64  # a standard error with 63 degrees of freedom is known well enough
PURPOSE = 2  # another order than that of the batches


class ImageGroups:
    """Which group each image of some splits belongs to.

    >>> from sightline.images import load_images
    >>> groups = ImageGroups(load_images("shapes?train=4&val=0&test=160"), ["test"])
    >>> np.unique(np.bincount(groups.of("test"))).tolist()
    [2, 3]
    """

    def __init__(self, images: Images, splits: Sequence[str]) -> None:
        self._of = {split: _groups(images.ids[images.indices(split)]) for split in splits}
        few = max(map(len, self._of.values()), default=0) <= GROUPS
        words = f"{'' if few else 'groups of '}{' and '.join(splits)} images"
        self.axis = Axis(fingerprint([images.digest(split) for split in splits])[:16], words)

    def of(self, split: str) -> npt.NDArray[np.int64]:
        """The group of each row of a split, (n,)."""
        return self._of[split]

    def members(self, batch: Batch, device: torch.device) -> Tensor:
        """1 where an image of the batch is in a group, (G, B): a product with it sums by groups."""
        groups = torch.from_numpy(self.of(batch.split)[batch.rows.numpy(force=True)]).to(device)
        return (torch.arange(GROUPS, device=device)[:, None] == groups).double()

    def sums(self, split: str, rows: npt.NDArray[np.int64], values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
        """Sums of the values (n, …) of some rows of a split by groups, (G, …)."""
        sums = np.zeros((GROUPS, *values.shape[1:]))
        np.add.at(sums, self.of(split)[rows], values.astype(np.float64))
        return sums


def _groups(ids: npt.NDArray[np.str_]) -> npt.NDArray[np.int64]:
    """Groups of images by their ids, equally large but for one image."""
    place = np.empty(len(ids), np.int64)
    place[np.argsort(mix(id_keys(ids), PURPOSE), kind="stable")] = np.arange(len(ids))
    return place * min(GROUPS, len(ids)) // max(len(ids), 1)
