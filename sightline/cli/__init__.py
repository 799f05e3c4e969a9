"""The commands. Each is made from the signature of a plain function; nothing heavy is imported before it is needed.

application   the Typer application, exit codes, errors as one sentence, lines that cannot command the terminal
command       a command from a function's signature, help and docstring
ending        the report and its headlines
compare       compare, demo
contrast      contrast
train         pretrain, finetune, reinit, detect, segment, rcdm, imagine
study         study
verdicts      how a study ends
files         list, inspect, convert, report, export, figure
listing       what `sightline list` shows
"""

import os

# Threads of PyTorch that wait for each other spin for milliseconds, which on a busy machine takes the time of the one
# they wait for: there a batch takes a quarter less of the processor if they sleep after some microseconds.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from sightline.cli.application import app, main

# isort: off
from sightline.cli import compare, contrast, train, study, files  # noqa: F401 — the commands, in this order

__all__ = ["app", "main"]
