"""Folders that Sightline writes: which checkpoint of a training is the newest, and which epochs were kept."""

from __future__ import annotations

import re
from pathlib import Path

from sightline.core.errors import InputError
from sightline.core.files import read_json

LATEST = "latest.json"


def latest(run: Path) -> Path | None:
    """Folder of the newest whole checkpoint of a run, None before the first."""
    if not (run / LATEST).exists():
        return None
    name = read_json(run / LATEST, dict, "restore it or start over").get("checkpoint")
    if not re.fullmatch(r"\d{8,}", str(name)):  # and no way out of the folder
        raise InputError(f"Cannot read {str(run / LATEST)!r}: it names no checkpoint; restore it or start over")
    folder = run / "checkpoints" / str(name)
    if not (folder / "state.json").is_file():
        raise InputError(f"{str(run / LATEST)!r} names the checkpoint {folder.name}, which is not there; start over")
    return folder


def kept_steps(folder: Path) -> dict[int, Path]:
    """Where the encoder is at each step that a training was told to keep."""
    if not folder.is_dir():
        raise InputError(f"There is no run folder {str(folder)!r}; give that of a training, as given to its -o")
    kept = {int(path.name): path for path in sorted((folder / "steps").glob("[0-9]*")) if path.name.isdecimal()}
    if not kept:
        raise InputError(f"No steps are kept in {str(folder)!r}; train with --set keep=log, or keep=10 for ten points")
    return kept
