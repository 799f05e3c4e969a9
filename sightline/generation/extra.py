"""diffusers, which is an extra: imported where it is needed, with a sentence for those who have not got it."""

from __future__ import annotations

from typing import Any

from sightline.core.errors import InputError

__all__ = ["diffusers"]


def diffusers() -> Any:
    """The library, if it is installed."""
    try:
        import diffusers as library
    except ImportError as error:
        raise InputError(
            "Pictures from representations need diffusers, which is not installed; get it with "
            "`pip install 'sightline[generation]'`"
        ) from error
    return library
