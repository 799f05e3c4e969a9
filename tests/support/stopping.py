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
