"""The contract of an image source: a file of `images/sources/`, or a module of another package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, cast

from sightline.core import plugins

if TYPE_CHECKING:
    from sightline.images.sets import Images


class ImageSource(Protocol):
    """Loads a set of images from what stands behind its name, `folder:PATH?option=value`."""

    @property
    def load(self) -> Callable[[str, Mapping[str, str]], Images]:
        """Images with stable ids, labels, classes and splits; their `source` decodes them in worker processes."""


def image_source(name: str) -> ImageSource:
    return cast(ImageSource, plugins.held_to(ImageSource, "datasets", name, {}))
