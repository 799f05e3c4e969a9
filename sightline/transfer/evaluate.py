"""A classifier's decisions on a split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from sightline.encoders.encoder import Encoder
from sightline.images.pipeline import Batch, batches
from sightline.images.sets import Images
from sightline.training.collectives import total
from sightline.transfer.classification import logits_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["_accuracy", "_right"]


@torch.no_grad()
def _right(
    tuned: Encoder, data: Images, batch: int, device: torch.device, workers: int | None
) -> npt.NDArray[np.bool_]:
    """Which of the labelled test images that can be read the classifier gets right."""
    truth, decided = data.labels_of("test"), np.full(len(data.indices("test")), -1)
    module = tuned.module.to(device).eval()
    for part in batches(data, [tuned.preprocess], splits=["test"], batch=batch, workers=workers):
        scores = logits_of(module(tuned.preprocess.normalize(part.pixels[tuned.preprocess].to(device))))
        decided[part.rows] = scores.argmax(1).cpu()
    right: npt.NDArray[np.bool_] = (decided == truth)[(decided >= 0) & (truth >= 0)]
    return right


@torch.no_grad()
def _accuracy(module: nn.Module, encoder: Encoder, found: Iterable[Batch], device: torch.device) -> float:
    """Share of the labelled images that the classifier gets right, over all processes; `encoder` prepares them."""
    counts = torch.zeros(2, dtype=torch.float64, device=device)  # right, of so many
    with replace(encoder, module=module).evaluating():
        for batch in found:
            labels = batch.labels.to(device)
            scores = logits_of(module(encoder.preprocess.normalize(batch.pixels[encoder.preprocess].to(device))))
            counts += torch.stack([(scores.argmax(1) == labels).sum(), (labels >= 0).sum()])
    right, n = total(counts)
    return float(right / n)
