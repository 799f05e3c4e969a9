"""From a result to its numbers over depth."""

import math

import numpy as np
import pytest
import xarray as xr

from sightline.core.results import ABSENT
from sightline.report.figures import accuracy_over_depth, depth_table, over_depth, present

SITES = ["embed", "block.0", "block.1", "block.2"]


def sample() -> xr.Dataset:
    """Encoder a has three blocks, the second without a number; b has two."""
    value = np.array([[0.1, 0.2, math.nan, 0.4], [0.5, 0.6, 0.7, math.nan]])
    reason = np.array([["", "", "constant", ""], ["", "", "", ABSENT]])
    both = ("encoder", "site")
    return xr.Dataset(
        {
            "rank": (both, value),
            "rank_low": (both, value - 0.25),
            "rank_high": (both, value + 0.05),
            "other": (both, 10 * value),
            "reason": (both, reason),
        },
        coords={
            "encoder": ["a", "b"],
            "site": SITES,
            "layer_type": ("site", ["embed", "block", "block", "block"]),
            "block": ("site", [-1, 0, 1, 2]),
        },
    )


def test_a_site_that_is_not_there_has_no_row() -> None:
    assert present(sample())[["encoder", "site"]].to_numpy().tolist()[-1] == ["b", "block.1"]
    assert len(present(sample())) == 7


def test_a_block_without_a_number_keeps_its_place_in_the_depth() -> None:
    table, axis = depth_table(sample(), "rank")
    assert axis == "relative depth"
    assert list(zip(table.series, table.site, table.depth, table.value, strict=True)) == [
        ("a", "block.0", 0.0, 0.2),
        ("a", "block.2", 1.0, 0.4),
        ("b", "block.0", 0.0, 0.6),
        ("b", "block.1", 1.0, 0.7),
    ]
    np.testing.assert_allclose(table.high - table.low, 0.3)


def test_with_the_embedding_depth_counts_the_blocks_passed() -> None:
    table, axis = depth_table(sample().sel(encoder=["a"]), "rank", types=("embed", "block"))
    assert (axis, table.depth.tolist(), table.value.tolist()) == ("blocks passed", [0, 1, 3], [0.1, 0.2, 0.4])


def test_several_variables_are_panels() -> None:
    (figure,) = over_depth(
        sample(), {"rank": "as it is", "other": "tenfold"}, title="t", caption="c", value_title="v", domain=None
    )
    assert figure.name == "depth"
    assert figure.table.groupby("what").value.sum().round(6).to_dict() == {"as it is": 1.9, "tenfold": 19.0}
    assert figure.chart.to_dict()["facet"]["field"] == "what"


@pytest.mark.parametrize(
    ("domain", "shown"), [((0, 1), [-0.1, 1]), ((-1, 0.5), [-1, 0.8]), ((0.3, 0.3), [-0.1, 0.8])]
)  # from 0.2 − 0.25 to 0.7 + 0.05
def test_the_axis_holds_all_points_and_their_intervals(domain: tuple[float, float], shown: list[float]) -> None:
    (figure,) = over_depth(sample(), "rank", title="t", caption="c", value_title="v", domain=domain)
    assert figure.chart.to_dict()["layer"][0]["encoding"]["y"]["scale"]["domain"] == shown


def test_rounding_adds_no_tenth() -> None:
    one = sample().assign(rank=lambda x: x["rank"] * 0 + 1 + 1e-12).drop_vars(["rank_low", "rank_high"])
    (figure,) = over_depth(one, "rank", title="t", caption="c", value_title="v")
    assert figure.chart.to_dict()["layer"][0]["encoding"]["y"]["scale"]["domain"] == [0, 1]


def test_no_number_no_figure() -> None:
    assert over_depth(sample().sel(site=["embed"]), "rank", title="t", caption="c", value_title="v") == []


def test_accuracies_keep_their_name_in_the_table() -> None:
    names = {f"rank{end}": f"accuracy{end}" for end in ("", "_low", "_high")}
    result = sample().rename(names).expand_dims(feature=["gap", "cls"]).assign_attrs(chance=0.5)
    (figure,) = accuracy_over_depth(result, "Accuracy", "c", "chance", lowest=0.4)
    assert figure.title == "Accuracy over depth"
    assert {"encoder", "feature", "accuracy", "accuracy_low", "accuracy_high", "depth"} <= set(figure.table)
    assert len(figure.table) == 2 * 4


def test_a_result_without_reasons_has_the_rows_with_numbers() -> None:
    table, axis = depth_table(sample().drop_vars("reason"), "rank")
    assert (axis, table.site.tolist()) == ("relative depth", ["block.0", "block.2", "block.0", "block.1"])
