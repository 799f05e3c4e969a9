"""How things show themselves in a notebook: a card with facts, escaped, in the colours of the page around it."""

from collections.abc import Mapping, Sequence
from html import escape

STYLE = "margin:.3em 0;padding:.6em .9em;border:1px solid #8884;border-radius:6px;max-width:60em;overflow-x:auto"
CELL = "text-align:left;padding:.1em 1em .1em 0;vertical-align:top;border:0"


def card(title: str, facts: Mapping[str, object], *parts: str) -> str:
    """A heading, facts below it that are not empty, and further parts, which are HTML already.

    >>> card("Encoder a<b", {"depth": 12, "heads": None}).count("<tr>"), "a&lt;b" in card("Encoder a<b", {})
    (1, True)
    """
    known = [(name, str(value)) for name, value in facts.items() if value not in (None, "", [], {})]
    table = rows([], known)
    return f'<div style="{STYLE}"><b>{escape(title)}</b>{table}{"".join(parts)}</div>'


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table; its first column is what the others are about."""
    cells = [(head, "th", ""), *((row, "td", "opacity:.7") for row in body)]
    lines = [
        "".join(f'<{tag} style="{CELL};{first if at == 0 else ""}">{escape(c)}</{tag}>' for at, c in enumerate(row))
        for row, tag, first in cells
        if row
    ]
    inner = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="border-collapse:collapse;border:0;margin:.3em 0">{inner}</table>'


def fold(title: str, content: str) -> str:
    return f'<details style="margin:.2em 0"><summary>{escape(title)}</summary>{content}</details>'


def shortened(names: Sequence[str], most: int = 8) -> str:
    """Names in a line, the first few of many.

    >>> shortened(["cat", "dog"]), shortened([str(n) for n in range(20)], 3)
    ('cat, dog', '0, 1, 2, … (20)')
    """
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])}, … ({len(names)})"
