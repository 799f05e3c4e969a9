"""diffusers, which is an extra: imported where it is needed, with a sentence for those who have not got it."""

from __future__ import annotations

from typing import Any

from sightline.core.extras import explaining


def diffusers() -> Any:
    with explaining():
        import diffusers as library
    return library
