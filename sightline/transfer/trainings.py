"""Runs that are made of trainings, one or more for each encoder: what they are asked, and where the trainings are.

RUN/trainings/ENCODER/…   a training each
RUN/results/, …           see core/run_folder.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sightline.core import ownership
from sightline.core.run_folder import Run, fingerprint, provenance
from sightline.core.version import NUMBERS
from sightline.encoders.encoder import Encoder
from sightline.images.sets import Images

__all__ = ["begin", "folder_of", "question"]


FOLDER = "trainings"


def question(
    kind: str,
    members: Mapping[str, Encoder],
    data: Images,
    settings: Mapping[str, Any],
    *,
    varies: Collection[str] = (),
    also: Any = None,
) -> tuple[dict[str, Any], str]:
    """What the run folder remembers, and the hash of all that the result depends on.

    `settings` are those of a recipe, of which those that vary between the trainings are left out; `also` is whatever
    else decides the result.
    """
    about = {
        "encoders": [encoder.describe() for encoder in members.values()],
        "images": data.describe(),
        "settings": {key: value for key, value in settings.items() if key not in {"encoder", "images", *varies}},
    }
    key = fingerprint([NUMBERS, about, also])
    return {"kind": kind, **about, "analyses": {kind: {"splits": ["test"]}}, **provenance()}, key


def begin(run: Run, anew: bool) -> None:
    """Write down what is asked; `anew` removes the trainings that are there."""
    assert run.path is not None
    if anew:
        ownership.replaceable(run.path)
    run.begin()
    if anew:
        ownership.remove(run.path, run.path / FOLDER)


def folder_of(out: Path, encoder: str) -> Path:
    """Where the trainings of an encoder are.

    >>> folder_of(Path("runs/x"), "vit (2)").as_posix()
    'runs/x/trainings/vit-2-'
    """
    return out / FOLDER / re.sub(r"[^\w.-]+", "-", encoder)
