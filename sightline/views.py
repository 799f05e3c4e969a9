"""Views: transformations of the batch that an analysis may ask for; each is made once per batch and encoder."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sightline.errors import InputError, nearest

__all__ = ["make_view"]

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda pixels: pixels,
    "mirror": lambda pixels: pixels.flip(-1),
}


def make_view(name: str, pixels: Tensor) -> Tensor:
    """The batch of pixels (B, 3, h, w) as the view `name` shows it.

    >>> import torch
    >>> make_view("mirror", torch.arange(3).view(1, 1, 1, 3)).flatten().tolist()
    [2, 1, 0]
    """
    if name not in VIEWS:
        raise InputError(f"There is no view {name!r}{nearest(name, VIEWS)}")
    return VIEWS[name](pixels)
