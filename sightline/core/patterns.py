"""Patterns of names of sites: `block.*`, `**.norm1`."""

import functools
import re


@functools.lru_cache(maxsize=256)
def site_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern of names as an expression; `*` does not cross a dot, `**` does.

    >>> [bool(site_pattern("block.*").fullmatch(site)) for site in ("block.0", "block.0.qkv")]
    [True, False]
    """
    words = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    parts = re.split(r"(\*\*|\*|\?)", re.sub(r"\*{3,}", "**", pattern))
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts), re.DOTALL)
