"""References: `source:where?key=value&…`, one grammar for encoders, images and augmentation policies."""

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote_plus

from sightline.core import plugins
from sightline.core.errors import InputError


@dataclass(frozen=True)
class Reference:
    """`source:id[@weights][?option=value&…]`, taken apart."""

    source: str
    id: str
    weights: str | None
    options: dict[str, str]

    def __str__(self) -> str:
        options = "&".join(f"{key}={_quoted(value)}" for key, value in self.options.items())
        weights = "" if self.weights is None else f"@{self.weights}"
        return f"{self.source}:{self.id}{weights}{'?' if options else ''}{options}"


def _quoted(value: str) -> str:
    """The value of an option as it is written, so that it is read as it was."""
    return re.sub("[%&+]", lambda sign: quote(sign[0], safe=""), value)


def take_apart(text: str) -> tuple[str, str, dict[str, str]] | None:
    """Source, where and options of `source:where?key=value&…` as they are written; None if it begins otherwise.

    Options begin at the first question mark behind which there is nothing else, so that a path may have one, too.

    >>> take_apart("folder:/data/what?/val?names=shape-texture"), take_apart("shapes"), take_apart("/data")
    (('folder', '/data/what?/val', {'names': 'shape-texture'}), ('shapes', '', {}), None)
    """
    pair = r"\w+=[^&]*"
    match = re.fullmatch(rf"([A-Za-z][\w-]*)(?::(.*?))?(?:\?({pair}(?:&{pair})*)?)?", text, re.DOTALL)
    if match is None:
        return None
    source, where, query = match.groups(default="")
    options = (pair.partition("=") for pair in query.split("&") if pair)
    return source, where, {key: value for key, _, value in options}


def parse_reference(text: str) -> Reference:
    """Take a reference to an encoder apart; in its options, `+` is a space and `%2B` a plus.

    >>> parse_reference("timm:vit_tiny_patch16_224@random?img_size=64&seed=1")
    Reference(source='timm', id='vit_tiny_patch16_224', weights='random', options={'img_size': '64', 'seed': '1'})
    """
    source, where, options = take_apart(text) or ("", "", {})
    name, query, _ = where.partition("?")
    match = re.fullmatch(r"([^@]+)(?:@(.+))?", name, re.DOTALL)
    if match is None:
        sources = ", ".join(plugins.names("sources"))
        raise InputError(
            f"{text!r} is not an encoder reference; expected source:id[@weights][?option=value&…], "
            f"such as timm:resnet18@random (sources: {sources})"
        )
    if query:
        raise InputError(f"{text!r}: options after '?' are written option=value&option=value")
    return Reference(source, match[1], match[2], {key: unquote_plus(value) for key, value in options.items()})
