"""What the words of a command mean: encoders, analyses with their settings, patterns of sites."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sightline.cli.saying import say
from sightline.core.errors import InputError
from sightline.core.references import parse_reference

if TYPE_CHECKING:
    from sightline.encoders.encoder import Encoder


def load_encoders(words: list[str]) -> dict[str, Encoder]:
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


def chosen_analyses(only: str | None, also: str | None, words: list[str]) -> tuple[Any, dict[str, Any]]:
    """The two choices of `analyze`: the analyses, and others or other settings besides."""
    from sightline.core.settings import parse_settings
    from sightline.measure.contract import analysis
    from sightline.measure.request import config_of

    if only is not None and also is not None:
        raise InputError("--only names all analyses, --also adds to the default ones; give only one of them")
    names, more = ([name.strip() for name in (text or "").split(",") if name.strip()] for text in (only, also))
    settings = parse_settings(words)
    for name in [*(names if names != ["all"] else []), *more, *settings]:
        analysis(name)
    for name in settings:
        if only is not None and names != ["all"] and name not in names:
            raise InputError(f"--set {name}.…: {name} is not an analysis of --only; add it there")
    chosen = {}
    for name in dict.fromkeys([*more, *settings]):
        if not isinstance(values := settings.get(name, {}), dict):
            raise InputError(f"--set {name}=…: write analysis.key=value, such as --set knn.k=10")
        chosen[name] = config_of(name, values)
    return None if only is None else "all" if names == ["all"] else names, chosen


def further_images(words: list[str]) -> dict[str, str]:
    """`conflict=folder:PATH`: images that an analysis asks for by this name.

    >>> further_images(["conflict=folder:/data/conflict?names=shape-texture"])
    {'conflict': 'folder:/data/conflict?names=shape-texture'}
    """
    pairs = [word.partition("=") for word in words]
    for word, (name, _, reference) in zip(words, pairs, strict=True):
        if not name.isidentifier() or not reference:
            raise InputError(f"--further {word}: write name=images, such as --further conflict=folder:PATH")
    return {name: reference for name, _, reference in pairs}


def spread_sites(words: list[str]) -> list[str]:
    """Let `--sites` take several patterns, the words after it that are neither options nor references.

    In the same way `--images` of `imagine` takes several files.

    >>> spread_sites(["compare", "timm:a", "--sites", "block.*", "block.*.qkv", "timm:b"])
    ['compare', 'timm:a', '--sites', 'block.*', '--sites', 'block.*.qkv', 'timm:b']
    >>> spread_sites(["imagine", "RUN", "--images", "a.jpg", "b.jpg", "--samples", "4"])
    ['imagine', 'RUN', '--images', 'a.jpg', '--images', 'b.jpg', '--samples', '4']
    """
    option, ends = ("--images", ()) if words[:1] == ["imagine"] else ("--sites", (":",))
    result: list[str] = []
    inside = False
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        if word == option:
            inside = True
            if following.startswith("-") or any(end in following for end in ends):
                example = "a.jpg b.jpg" if option == "--images" else "'block.*' 'block.*.qkv'"
                what = "file" if option == "--images" else "pattern"
                raise InputError(f"{option} needs at least one {what}, such as {option} {example}")
            continue
        if inside and (word.startswith("-") or any(end in word for end in ends)):
            inside = False
        result += [option, word] if inside else [word]
    return result
