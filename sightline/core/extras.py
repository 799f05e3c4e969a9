"""Libraries that a base installation leaves out: which extra brings them, and a sentence where one is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sightline.core.errors import InputError

__all__ = ["EXTRAS", "explaining"]


EXTRAS = {  # as they are imported
    "accelerate": "huggingface",
    "datasets": "huggingface",
    "diffusers": "generation",
    "faster_coco_eval": "training",
    "lightly": "training",
    "lightning": "training",
    "tensorboard": "training",
    "transformers": "huggingface",
}


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Where an import inside fails because an extra is not installed, say which one; other errors are as they were.

    >>> with explaining():
    ...     raise ModuleNotFoundError("No module named 'lightly'", name="lightly.models")
    Traceback (most recent call last):
    sightline.core.errors.InputError: This needs lightly, which is not installed; get it with \
`pip install 'sightline[training]'`
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        raise InputError(
            f"This needs {library}, which is not installed; get it with `pip install 'sightline[{EXTRAS[library]}]'`"
        ) from error
