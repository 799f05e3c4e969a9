"""Tiny trainings that are stopped and go on."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sightline as sl
from sightline.core.folders import latest
from sightline.training.loop import Loop

# An encoder, settings of a backbone and of a detector that are trained in no time.
ENCODER = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=2&embed_dim=16&num_heads=2&num_classes=0"
TINY_DETECTOR: dict[str, Any] = {
    "channels": 8,
    "strides": [4, 8, 16],
    "box_convolutions": 1,
    "box_width": 16,
    "mask_convolutions": 1,
    "mask_size": 4,
    "proposals": 12,
    "regions": 8,
    "detections": 5,
}
TINY_VIT: dict[str, Any] = {"backbone": "vit", "size": 16, "width": 16, "depth": 2, "heads": 2, "patch": 4}


@contextmanager
def stopped(after: int, of: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is trained within is told to stop after some steps, and says so; steps have to be logged one by one."""
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_told_to_stop", lambda loop: signal.SIGTERM if len(loop.monitor.rows) >= after else 0)
        with pytest.raises(sl.Stopped, match=f"after step {after} of {of}"):
            yield


def same_state(*runs: Path) -> bool:
    """Whether trainings have the same weights and the same optimiser, to the last bit."""
    folders = [folder for folder in map(latest, runs) if folder is not None]
    assert len(folders) == len(runs)
    for file in ("training.safetensors", "optimizer.safetensors"):
        first, *others = (load_file(folder / file) for folder in folders)
        for other in others:
            if first.keys() != other.keys() or not all(torch.equal(value, other[key]) for key, value in first.items()):
                return False
    return True
