"""Text, data and assets within a page, escaped."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources

import numpy as np
import xarray as xr

__all__ = ["asset", "clean", "cleaned", "escaped", "in_words", "script_json"]


def asset(name: str) -> str:
    """The text of a file of assets/."""
    return (resources.files("sightline.report") / "assets" / name).read_text("utf-8")


def script_json(value: object) -> str:
    """JSON for a script element: no `<` can end it, no line separator can break it.

    >>> script_json({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def clean(text: object) -> str:
    """Text that is valid in HTML, XML and UTF-8: control characters and lone surrogates become visible marks.

    >>> clean("a\\x00b"), clean("\\udcff"), clean("é")
    ('a�b', '\\\\udcff', 'é')
    """
    valid = str(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff]", "�", valid)


def cleaned(result: xr.Dataset) -> xr.Dataset:
    """The same result with valid text in its names and reasons."""
    valid = np.vectorize(clean, otypes=[object])
    texts = {
        k: (v.dims, valid(v.values).astype(str)) for k, v in result.variables.items() if v.dtype.kind in "OU" and v.size
    }
    coords = {key: texts.pop(key) for key in list(texts) if key in result.coords}
    return result.assign_coords(coords).assign(texts)


def escaped(value: object) -> str:
    """Text within HTML or within the quotes of an attribute."""
    return html.escape(clean(value), quote=True)


def in_words(value: object, short: bool = True) -> str:
    """A JSON value as escaped words; `short` cuts hashes.

    >>> in_words({"prefix": 1, "grid": [14, 14]}), in_words({}), in_words(1234567), in_words("ab" * 16, short=False)
    ('prefix 1, grid 14, 14', '—', '1 234 567', '<span class="mono">abababababababababababababababab</span>')
    """
    if value is None or value == "" or value == [] or value == {}:
        return "—"
    match value:
        case bool():
            return "yes" if value else "no"
        case int() if abs(value) >= 10_000:
            return f"{value:,}".replace(",", " ")
        case float():
            return f"{value:.6g}"
        case Mapping():
            return ", ".join(f"{escaped(k)} {in_words(v, short)}" for k, v in value.items())
        case list() | tuple() if len(value) > 24:
            return f"{len(value)}: " + ", ".join(in_words(v, short) for v in value[:24]) + ", …"
        case list() | tuple():
            return ", ".join(in_words(v, short) for v in value)
        case str() if re.fullmatch(r"[0-9a-f]{32,}", value):
            cut = f' title="{value}">{value[:12]}…' if short else f">{value}"
            return f'<span class="mono"{cut}</span>'
    return escaped(value)
