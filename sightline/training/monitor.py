"""What a training tells while it runs: `metrics.csv` and TensorBoard."""

import contextlib
import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sightline.core.errors import InputError
from sightline.core.extras import explaining
from sightline.core.files import explain, write_atomically


class Monitor:
    """Rows of numbers by step, in a CSV file that opens in pandas in one line and in TensorBoard."""

    def __init__(self, folder: Path, step: int) -> None:
        """Go on after `step`: later rows, of a training that was killed, are taken back."""
        self.path = folder / "metrics.csv"
        self.rows = [row for row in read_metrics(self.path) if int(row["step"]) <= step]
        self.columns = list(self.rows[0]) if self.rows else []
        self._rewrite()
        self.board: Any = _board(folder, step)

    def write(self, row: Mapping[str, float]) -> None:
        """Add a row; new columns are added to the file, absent ones stay empty."""
        texts = {key: _text(value) for key, value in row.items()}
        self.rows.append(texts)
        try:
            if set(row) <= set(self.columns):
                with open(self.path, "a", newline="") as file:
                    csv.DictWriter(file, self.columns, restval="").writerow(texts)
            else:
                self.columns += [key for key in row if key not in self.columns]
                self._rewrite()
            for key, value in row.items():
                if key != "step" and math.isfinite(value):
                    self.board.add_scalar(key, value, int(row["step"]))
        except OSError as error:
            raise InputError(explain(error, self.path)) from error

    def close(self) -> None:
        """Flush what TensorBoard has not written yet."""
        with contextlib.suppress(OSError):
            self.board.close()

    def _rewrite(self) -> None:
        if self.rows or self.path.exists():
            text = io.StringIO()
            writer = csv.DictWriter(text, self.columns, restval="")
            writer.writeheader()
            writer.writerows(self.rows)
            write_atomically(self.path, text.getvalue().encode())


def _board(run: Path, step: int) -> Any:
    with explaining():
        from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / "tensorboard"), purge_step=step + 1, filename_suffix=".sightline")


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Rows of an earlier part of the training; a line that was cut off by a kill is left out."""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
