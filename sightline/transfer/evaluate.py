"""A classifier's decisions on a split, and how many of them are right."""

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sightline.core.processes import rank, world
from sightline.encoders.modules.mode import evaluating
from sightline.images.pipeline import batches
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images
from sightline.training.collectives import total
from sightline.transfer.classification import logits_of

BATCH = 256


@torch.no_grad()
def decisions(
    module: nn.Module,
    images: Images,
    split: str,
    *,
    preprocess: Preprocess,
    device: torch.device,
    batch: int = BATCH,
    workers: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> npt.NDArray[np.int64]:
    """The class that each image of a split is taken for; −1 where it cannot be read or is not in the share.

    `share` is the number of this process and that of all: each of them decides on some of the batches.
    """
    decided = np.full(len(images.indices(split)), -1)
    loader = batches(images, [preprocess], splits=[split], batch=batch, workers=workers, rank=share[0], world=share[1])
    with evaluating(module):
        for part in loader:
            scores = logits_of(module(preprocess.normalize(part.pixels[preprocess].to(device))))
            decided[part.rows] = scores.argmax(1).cpu()
    return decided


def right(decided: npt.NDArray[np.int64], truth: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each decision that was made on a labelled image is right.

    >>> right(np.array([3, 1, -1, 2]), np.array([3, 2, 0, -1]))
    array([ True, False])
    """
    result: npt.NDArray[np.bool_] = (decided == truth)[(decided >= 0) & (truth >= 0)]
    return result


def accuracy(
    module: nn.Module,
    images: Images,
    split: str,
    *,
    preprocess: Preprocess,
    device: torch.device,
    workers: int | None = None,
) -> float:
    """Share of the labelled images that the classifier gets right; the processes of a training share the images."""
    decided = decisions(
        module, images, split, preprocess=preprocess, device=device, workers=workers, share=(rank(), world())
    )
    mine = right(decided, images.labels_of(split))
    counts = torch.tensor([mine.sum(), len(mine)], dtype=torch.float64, device=device)
    hits, n = total(counts)
    return float(hits / n)
