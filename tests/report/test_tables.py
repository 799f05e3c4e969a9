"""Results as tables: which rows are there."""

import numpy as np
import xarray as xr

from sightline.core.results import ABSENT
from sightline.report.tables import tables


def test_rows_without_a_number_stay_if_there_is_a_reason() -> None:
    dims = ("encoder", "site")
    result = xr.Dataset(
        {
            "accuracy": (dims, [[0.5, np.nan], [np.nan, np.nan]]),
            "reason": (dims, [["", "the features are the same"], [ABSENT, ""]]),
        },
        coords={"encoder": ["a", "b"], "site": ["block.0", "block.1"]},
    )
    table = tables(result, "knn")["knn"]
    assert table[["encoder", "site"]].to_numpy().tolist() == [["a", "block.0"], ["a", "block.1"]]
    assert table.reason.tolist() == ["", "the features are the same"]


def test_words_alone_are_a_table_too() -> None:
    result = xr.Dataset(
        {"tau": (("k", "encoder"), np.ones((2, 2))), "reason": ("encoder", ["", "no such image"])},
        coords={"k": [5, 10], "encoder": ["a", "b"]},
    )
    found = tables(result, "agreement")
    assert list(found) == ["agreement", "agreement-reason"]
    assert found["agreement-reason"].reason.tolist() == ["", "no such image"]
