"""The commands. Each parses its words and calls one plain function; nothing heavy is imported before it is needed.

application   the Typer application, exit codes, errors as one sentence
options       what several commands share
saying        lines that cannot command the terminal
ending        the report and its headlines
compare       compare, dynamics, minibatch, demo
contrast      contrast
train         pretrain, finetune, reinit, detect, segment
generate      rcdm, imagine
study         study
verdicts      how a study ends
figure        figure
files         list, inspect, convert, report, export
arguments     encoders, analyses and sites as the user writes them
listing       what `sightline list` shows
"""

from __future__ import annotations

import os

# Threads of PyTorch that wait for each other spin for milliseconds, which on a busy machine takes the time of the one
# they wait for: there a batch takes a quarter less of the processor if they sleep after some microseconds.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from sightline.cli import compare, contrast, figure, files, generate, study, train  # noqa: F401 — they add commands
from sightline.cli.application import app, main

__all__ = ["app", "main"]
