"""The contracts of what encoders come from: sources, formats of checkpoint files, and families of architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from sightline.core import plugins

if TYPE_CHECKING:
    from torch import nn

    from sightline.core.references import Reference
    from sightline.encoders.encoder import Encoder
    from sightline.encoders.files.reading import Checkpoint
    from sightline.encoders.layouts.layout import Layout
    from sightline.encoders.sites import Anatomy


class ModelSource(Protocol):
    """A file of `encoders/sources/`, or a module of another package."""

    EXAMPLE: str  # a reference

    @property
    def names(self) -> Callable[[], list[str]]:
        """What `sightline list encoders` shows."""

    @property
    def load(self) -> Callable[[Reference], Encoder]:
        """The encoder of a reference; ends in `build_encoder`."""


class Format(Protocol):
    """A file of `encoders/formats/`: how checkpoints of official code are known and read; each is a source as well."""

    TITLE: str  # its name in words: "MAE"
    EXAMPLE: str  # a reference

    @property
    def OPTIONS(self) -> tuple[str, ...]:  # noqa: N802
        """The options that a reference may have."""

    @property
    def recognizes(self) -> Callable[[Checkpoint], str]:
        """By what a file is surely of this format, "" if it need not be."""

    @property
    def layout(self) -> Callable[[Checkpoint, Mapping[str, str]], Layout]:
        """The encoder in a file; an InputError if it cannot be read as this format."""


class Family(Protocol):
    """A file of `encoders/families/`: architectures whose sites are found alike."""

    @property
    def matches(self) -> Callable[[nn.Module], bool]:
        """Whether a module is one of these."""

    @property
    def anatomy(self) -> Callable[[Any, tuple[int, int]], Anatomy]:
        """Token layout, depth, heads, and a `Tap` for every site in order of computation."""


def source(name: str) -> ModelSource:
    """The source that a reference names; a format is one whose names are files, and which is opened as all are."""
    defaults: dict[str, Any] = {}
    if name in plugins.names("formats"):
        from sightline.encoders.layouts.layout import open_file

        defaults = {"names": lambda: ["FILE"], "load": open_file}
    return cast(ModelSource, plugins.held_to(ModelSource, "sources", name, defaults))


def format_named(name: str) -> Format:
    return cast(Format, plugins.held_to(Format, "formats", name, {}))


def family(name: str) -> Family:
    return cast(Family, plugins.held_to(Family, "families", name, {}))
