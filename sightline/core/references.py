"""References: `source:id[@weights][?option=value&…]`, one grammar for encoders and images."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from sightline.core import plugins
from sightline.core.errors import InputError

__all__ = ["Reference", "parse_reference"]


@dataclass(frozen=True)
class Reference:
    """`source:id[@weights][?option=value&…]`, taken apart."""

    source: str
    id: str
    weights: str | None
    options: dict[str, str]

    def __str__(self) -> str:
        options = "&".join(f"{key}={value}" for key, value in self.options.items())
        weights = "" if self.weights is None else f"@{self.weights}"
        return f"{self.source}:{self.id}{weights}{'?' if options else ''}{options}"


def parse_reference(text: str) -> Reference:
    """Take a reference apart.

    >>> parse_reference("timm:vit_tiny_patch16_224@random?img_size=64&seed=1")
    Reference(source='timm', id='vit_tiny_patch16_224', weights='random', options={'img_size': '64', 'seed': '1'})
    """
    match = re.fullmatch(r"([\w-]+):([^@?]+)(?:@([^?]+))?(?:\?(.*))?", text)
    if match is None:
        sources = ", ".join(plugins.names("sources"))
        raise InputError(
            f"{text!r} is not an encoder reference; expected source:id[@weights][?option=value&…], "
            f"such as timm:resnet18@random (sources: {sources})"
        )
    try:
        options = dict(parse_qsl(match[4] or "", keep_blank_values=True, strict_parsing=bool(match[4])))
    except ValueError as error:
        raise InputError(f"{text!r}: options after '?' are written option=value&option=value") from error
    return Reference(match[1], match[2], match[3], options)
