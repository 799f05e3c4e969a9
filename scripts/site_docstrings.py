"""Docstrings for the site: examples become blocks of code, which Markdown would take for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Fences around the lines of an example, from `>>>` to the next empty line."""

    def on_object(self, *, obj: Any, **others: Any) -> None:
        """Of a module, class or function."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """The same text with its examples in fences.

    >>> print(fenced("One.\\n\\n>>> 1 + 1\\n2\\n\\nTwo.").replace("`" * 3, "---"))
    One.
    <BLANKLINE>
    ---pycon
    >>> 1 + 1
    2
    ---
    <BLANKLINE>
    Two.
    """
    example = r"^>>> .*\n?(?:.+\n?)*"
    return re.sub(example, lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", docstring, flags=re.MULTILINE)
