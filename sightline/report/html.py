"""Templates of the page, which escape by default, and the data and assets that go into them.

Whatever a template writes is made valid and escaped, unless it is `Markup`, which only our own assets and JSON for a
script element are.
"""

import functools
import json
import re
from collections.abc import Mapping
from importlib import resources

import jinja2
import numpy as np
import xarray as xr
from markupsafe import Markup


def render(template: str, **context: object) -> str:
    """A file of templates/, filled in; text in the context is escaped."""
    return _environment().get_template(template).render(context)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sightline.report"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["in_words"] = in_words
    environment.filters["python"] = repr  # text as Python would write it
    environment.tests["digest"] = lambda value: re.fullmatch("[0-9a-f]{32,}", str(value)) is not None
    return environment


def asset(name: str) -> Markup:
    return Markup((resources.files("sightline.report") / "assets" / name).read_text("utf-8"))


def script_json(value: object) -> Markup:
    """JSON for a script element: no `<` can end it, no line separator can break it.

    >>> print(script_json({"name": "</script>"}))
    {"name":"\\u003c/script>"}
    """
    return Markup(json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


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


def sentences(text: str) -> list[str]:
    """A text, cut after each sentence: a full stop, or the like, before a space and what may begin another.

    >>> sentences("CKA is 0.8 (95 % 0.7 – 0.9). See Fig. 1 of dino. MAE is not.")
    ['CKA is 0.8 (95 % 0.7 – 0.9).', 'See Fig. 1 of dino.', 'MAE is not.']
    """
    parts = re.split(r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!Fig\.)(?<!e\.g\.)(?<!i\.e\.)\s+(?=\S)", text.strip())
    return [part for part in parts if part]


def in_words(value: object) -> str:
    """A single JSON value in words; `words` in templates/words.html writes those that have parts.

    >>> in_words(True), in_words({}), in_words(1234567), in_words(0.1 + 0.2), in_words("CLS")
    ('yes', '—', '1 234 567', '0.3', 'CLS')
    """
    match value:
        case None | "":
            return "—"
        case list() | tuple() | Mapping() if not value:
            return "—"
        case bool():
            return "yes" if value else "no"
        case int() if abs(value) >= 10_000:
            return f"{value:,}".replace(",", " ")
        case float():
            return f"{value:.6g}"
    return str(value)
