"""A pass that was interrupted goes on: the sums it keeps on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from torch import Tensor

from sightline.core.files import write_atomically
from sightline.core.processes import rank, world
from sightline.measure.contract import Analysis

__all__ = ["Sums"]


SAVE_EVERY = 30.0  # seconds between two savings of the sums of a pass


class Sums:
    """The sums of an interrupted pass on disk: with the same question, the pass goes on where it stopped."""

    def __init__(self, folder: Path | None, key: str, metrics: Mapping[str, Analysis]) -> None:
        self.path = None if folder is None else sums_file(folder, rank(), world())
        self.key, self.metrics, self.saved = key, metrics, time.monotonic()

    def save(self, number: int, skipped: Sequence[tuple[str, str]]) -> None:
        """Every half minute, together with the number of the next batch and the images that could not be read."""
        if self.path is None or time.monotonic() - self.saved < SAVE_EVERY:
            return
        from safetensors.torch import save

        state = {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, metric in self.metrics.items()
            for key, value in _states(metric).items()
        }
        about = {"question": self.key, "next": str(number), "skipped": json.dumps(skipped)}
        write_atomically(self.path, save(state, metadata=about))
        self.saved = time.monotonic()

    def restore(self) -> tuple[int, list[tuple[str, str]]]:
        """Put the sums back if they belong to this question; which batch comes next, and what was skipped so far."""
        if self.path is None or not self.path.is_file():
            return 0, []
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "pt") as file:
                about, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about.get("question") != self.key:
                return 0, []
            number, skipped = int(about["next"]), [(name, why) for name, why in json.loads(about["skipped"])]
        except (SafetensorError, OSError, KeyError, ValueError):  # damaged: begin anew
            return 0, []
        for name, metric in self.metrics.items():
            for key, value in _states(metric).items():
                value.copy_(tensors[f"{name}.{key}"])
        return number, skipped

    def forget(self) -> None:
        """The results are written; the sums have served."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def sums_file(folder: Path, number: int, count: int) -> Path:
    """Where process `number` of `count` keeps its sums."""
    return folder / "cache" / f"pass-{number}-of-{count}.safetensors"


def _states(metric: Analysis) -> dict[str, Tensor]:
    """The states of an analysis, which are tensors and never lists."""
    return cast(dict[str, Tensor], metric.metric_state)
