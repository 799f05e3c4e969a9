"""Tables as text for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def csv(table: pd.DataFrame) -> bytes:
    """A table as text that no spreadsheet computes with: names that look like a formula begin with an apostrophe.

    >>> import pandas as pd
    >>> csv(pd.DataFrame({"encoder": ["=1+1", "mae"], "cka": [-0.5, 1.0]}))
    b"encoder,cka\\n'=1+1,-0.5\\nmae,1.0\\n"
    """
    texts = table.map(_harmless).rename(columns=_harmless)
    return texts.to_csv(index=False, lineterminator="\n").encode("utf-8", "backslashreplace")


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
