"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

EMBEDDED = "the embedded images `shapes`"

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; run the same command again to resume.")]
Batch = Annotated[int, typer.Option(help="Images per batch, at least 4; also the minibatch of CKA.")]
Limit = Annotated[int, typer.Option(help="At most this many images of each split, balanced over classes; 0: all.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto.")]
Precision = Annotated[str, typer.Option(help="float32 or bf16 (autocast).")]
Seed = Annotated[int, typer.Option(help="Seed of sampling, order and bootstrap.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes that decode images; by default, as many as the cores allow.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="At the end, print all headlines of all analyses, and what was left out.")
]
# Of trainings
TrainingFolder = Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; everything is written here.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="`key=value` overrides the recipe; may be repeated.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the training in the folder exactly where it stopped.")]
TrainingDevice = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Devices = Annotated[int | None, typer.Option(help="Processes (GPUs) per node; torchrun sets this itself.")]
Nodes = Annotated[int, typer.Option(help="Number of nodes that SLURM started.")]
StartOver = Annotated[bool, typer.Option("--overwrite", help="Start over in a folder that already holds a training.")]


def new_folder() -> Path:
    """Where results go that were given no folder; commands that start in the same second have folders of their own."""
    from datetime import datetime

    return Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{os.getpid()}"
