"""A pass that was interrupted goes on: the sums it keeps on disk."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from sightline.core.files import write_atomically
from sightline.core.processes import rank, world
from sightline.measure.contract import Analysis

SAVE_EVERY = 30.0  # seconds between two savings of the sums of a pass
PAUSE = 50.0  # and as a multiple of the time that saving takes, where the sums are large


@dataclass(frozen=True)
class Reached:
    """How far an interrupted pass has come."""

    splits: tuple[str, ...]  # through which it goes, in this order
    batch: int = 0  # which comes next
    skipped: tuple[tuple[str, str], ...] = ()  # images that could not be read, and why


class Sums:
    """The sums of an interrupted pass on disk: with the same questions, or some of them, it goes on from there."""

    def __init__(self, folder: Path | None, questions: Mapping[str, str], metrics: Mapping[str, Analysis]) -> None:
        self.path = None if folder is None else sums_file(folder, rank(), world())
        self.questions, self.metrics, self.saved = dict(questions), metrics, time.monotonic()
        self.took = 0.0  # seconds to save them

    @property
    def due(self) -> bool:
        """Whether half a minute has passed since they were saved, or longer if that took long."""
        return time.monotonic() - self.saved >= max(SAVE_EVERY, PAUSE * self.took)

    def save(self, reached: Reached) -> None:
        """Write them, together with how far the pass has come."""
        if self.path is None:
            return
        from safetensors.torch import save

        began = time.monotonic()
        state = {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, metric in self.metrics.items()
            for key, value in _states(metric).items()
        }
        about = {"questions": json.dumps(self.questions), "reached": json.dumps(asdict(reached))}
        write_atomically(self.path, save(state, metadata=about))
        self.saved = time.monotonic()
        self.took = self.saved - began

    def reached(self) -> Reached | None:
        """How far the pass had come, if there are sums that belong to these questions."""
        return self._read(tensors=False)[0]

    def restore(self) -> Reached | None:
        """Put the sums back, and say how far the pass had come."""
        reached, tensors = self._read(tensors=True)
        if reached is not None:
            for name, metric in self.metrics.items():
                for key, value in _states(metric).items():
                    value.copy_(tensors[f"{name}.{key}"])
        return reached

    def _read(self, tensors: bool) -> tuple[Reached | None, dict[str, Tensor]]:
        if self.path is None or not self.path.is_file():
            return None, {}
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "pt") as file:
                about = file.metadata() or {}
                values = {name: file.get_tensor(name) for name in (file.keys() if tensors else ())}
            if not self.questions.items() <= json.loads(about["questions"]).items():
                return None, {}
            reached = json.loads(about["reached"])
            skipped = tuple((str(name), str(why)) for name, why in reached["skipped"])
            return Reached(tuple(reached["splits"]), int(reached["batch"]), skipped), values
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError):  # damaged: begin anew
            return None, {}

    def forget(self) -> None:
        """The results are written; the sums have served, and so have those of another number of processes."""
        if self.path is not None:
            for file in self.path.parent.glob("pass-*-of-*.safetensors"):
                file.unlink(missing_ok=True)


def sums_file(folder: Path, number: int, count: int) -> Path:
    """Where process `number` of `count` keeps its sums."""
    return folder / "cache" / f"pass-{number}-of-{count}.safetensors"


def _states(metric: Analysis) -> dict[str, Tensor]:
    """The states of an analysis, which are tensors and never lists."""
    return cast(dict[str, Tensor], metric.metric_state)
