"""How numbers travel in a page: as few bytes as show the same picture.

Each page of a report has one block of JSON, compressed (zlib) and in base64, that is unpacked when the page is opened.
Tables are columns, numbers of six digits; a column that is there already is only named. Matrices of all pairs of layers
are whole numbers of 16 bits, four digits after the point or what fits, which is what a reader sees: neighbours are
subtracted from each other and the low bytes come before the high ones, since smooth numbers then compress well. The
folder of the run has all digits (results/, figures/*.csv).
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from sightline.report.html import clean

DIGITS = 6  # of a number in a table
PLACES = 4  # digits behind the point in a matrix
MISSING = -(2**15)  # stands for NaN


def compressed(value: object) -> Markup:
    """JSON for a script element that the page unpacks: base64 has no character that could end it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(base64.b64encode(zlib.compress(text.encode(), 9)).decode())


def columns(table: pd.DataFrame) -> dict[str, Any]:
    """A table as columns; numbers with six significant digits, repeated words once.

    >>> columns(pd.DataFrame({"x": [0.123456789, float("nan")], "y": ["a", "a"]}))["columns"]
    [[0.123457, None], {'words': ['a'], 'codes': [0, 0]}]
    """
    packed_columns: list[Any] = []
    for column in (table.iloc[:, i] for i in range(table.shape[1])):
        if pd.api.types.is_bool_dtype(column):
            packed_columns.append(column.tolist())
        elif pd.api.types.is_numeric_dtype(column):
            exact = pd.api.types.is_integer_dtype(column)
            numbers = (v if exact else _rounded(v) for v in column.tolist())
            packed_columns.append([v if np.isfinite(v) else None for v in numbers])
        else:
            texts = [None if v is None or v != v else str(v) for v in column.tolist()]
            words = {text: code for code, text in enumerate(dict.fromkeys(texts))}
            packed_columns.append({"words": list(words), "codes": [words[text] for text in texts]})
    return {"rows": len(table), "names": [clean(n) for n in table.columns], "columns": packed_columns}


def _rounded(value: float) -> float:
    number = float(f"{value:.{DIGITS}g}")
    return int(number) if number.is_integer() and abs(number) < 1e15 else number  # 1, not 1.0


def shared_columns(table: dict[str, Any], datasets: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The table of a figure, where columns of its datasets are named instead of written again.

    >>> shared_columns({"rows": 1, "names": ["b"], "columns": [[0.5]]}, {"d": {"rows": 1, "columns": [[2], [0.5]]}})
    {'rows': 1, 'names': ['b'], 'columns': [{'of': ['d', 1]}]}
    """
    there = {json.dumps(c): (name, i) for name, data in datasets.items() for i, c in enumerate(data["columns"])}
    shared = [{"of": list(there[text])} if (text := json.dumps(c)) in there else c for c in table["columns"]]
    return table | {"columns": shared}


def places_of(*arrays: np.ndarray[Any, Any]) -> int:
    """How many digits behind the point fit.

    >>> places_of(np.array([0.5, 0.75, np.nan])), places_of(np.array([2500.0]), np.array([1.0]))
    (4, 1)
    """
    largest = max(float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in arrays)
    return PLACES if largest == 0 else min(PLACES, math.floor(math.log10((2**15 - 1) / largest)))


def whole_numbers(values: np.ndarray[Any, Any], places: int) -> np.ndarray[Any, Any]:
    """Numbers in units of their last digit, as 16 bits hold them.

    >>> whole_numbers(np.array([0.50004, -0.1, np.nan]), 4).tolist()
    [5000, -1000, -32768]
    """
    known = np.isfinite(values)
    return np.where(known, np.rint(np.where(known, values, 0) * 10.0**places), MISSING).astype(np.int16)


def packed(numbers: np.ndarray[Any, Any]) -> str:
    """A row of whole numbers as compressed text."""
    steps = np.diff(numbers.view(np.uint16), prepend=np.uint16(0))  # wraps around, and so does the sum in the page
    content = steps.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes()
    return base64.b64encode(zlib.compress(content, 9)).decode()
