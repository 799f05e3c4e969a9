"""Libraries that a base installation leaves out: which extra brings them, and a sentence where one is missing."""

import contextlib
from collections.abc import Iterator

from sightline.core.errors import InputError

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
    """Where an import inside fails because of what is installed, say what to install; other errors are as they were.

    >>> with explaining():
    ...     raise ModuleNotFoundError("No module named 'lightly'", name="lightly.models")
    Traceback (most recent call last):
    sightline.core.errors.InputError: This needs lightly, which is not installed; get it with \
`pip install 'sightline[training]'`

    torch of one place and torchvision of another, such as one built for a CPU and one for CUDA, do not work together:

    >>> with explaining():
    ...     raise RuntimeError("operator torchvision::nms does not exist")
    Traceback (most recent call last):
    sightline.core.errors.InputError: The installed torchvision does not fit the installed torch; install both again, \
from the same place
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
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        raise InputError(
            "The installed torchvision does not fit the installed torch; install both again, from the same place"
        ) from error
