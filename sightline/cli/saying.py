"""What a command says: names of files and encoders are shown and cannot command the terminal."""

from typing import Any

import typer

from sightline.core.errors import visible


def say(text: object, **style: Any) -> None:
    """A line on stdout, or with err=True on stderr."""
    typer.secho(visible(str(text)), **style)
