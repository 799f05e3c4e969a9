"""What the words of a command mean: encoders, analyses with their settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sightline.cli.saying import say
from sightline.core.errors import InputError
from sightline.core.references import parse_reference

if TYPE_CHECKING:
    from sightline.encoders.encoder import Encoder


def load_encoders(words: Sequence[str]) -> dict[str, Encoder]:
    """`name=source:id` or `source:id`; names that occur twice get a number."""
    from sightline.encoders.encoder import name_apart
    from sightline.encoders.loading import load_encoder
    from sightline.encoders.sources.run import every_step

    given = [re.fullmatch(r"(?:([^:?@=]+)=)?(.+)", word, re.DOTALL) for word in words]
    encoders = [
        load_encoder(str(reference), name=name)
        for match in given
        if match
        for name, reference in every_step(match[1], parse_reference(match[2]))
    ]
    for encoder in encoders:
        for note in encoder.notes:
            say(f"{encoder.name}: {note}", err=True)
    return name_apart(encoders)


def chosen_analyses(
    only: Sequence[str] | None, also: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> tuple[Sequence[str] | str | None, dict[str, Any]]:
    """The two choices of `analyze`: the analyses, and others or other settings besides."""
    from sightline.measure.contract import analysis
    from sightline.measure.request import config_of

    if only is not None and also:
        raise InputError("--only names all analyses, --also adds to the default ones; give only one of them")
    names = [] if only is None or list(only) == ["all"] else only
    for name in [*names, *also, *settings]:
        analysis(name)
    for name in settings:
        if names and name not in names:
            raise InputError(f"--set {name}.…: {name} is not an analysis of --only; add it there")
    chosen = {name: config_of(name, settings.get(name, {})) for name in [*also, *settings]}
    return "all" if only and not names else only, chosen
