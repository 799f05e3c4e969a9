"""Which numbers of a result are meant by words."""

import json
from typing import Any

import numpy as np
import pytest
import xarray as xr

from sightline.core.errors import InputError
from sightline.core.results import ABSENT, relative_depths
from sightline.core.selection import cells_of, depth_range

SITES = ["block.0", "block.0.qkv", "block.1", "block.1.qkv", "block.2", "block.3", "norm", "decoder.block.0"]
KINDS = ["block", "qkv", "block", "qkv", "block", "block", "norm", "block"]
STAGES = np.array([1, 1, 1, 1, 2, 2, 0, 0])
HAS = {"deep": [0, 1, 2, 3, 4, 5, 6, 7], "short": [0, 1, 2, 3, 6]}  # four blocks and a decoder, two blocks


def table() -> xr.Dataset:
    """Numbers over encoder, site and pooling; the position of a site is its number. Pairs have that of B behind it."""
    there = np.array([[site in has for site in range(len(SITES))] for has in HAS.values()])
    value = np.where(there, np.arange(len(SITES)), np.nan)
    pairs = np.arange(len(SITES))[:, None] + np.arange(len(SITES)) / 100 + np.zeros((2, 2, 1, 1))
    pairs = np.where(there[:, None, :, None] & there[None, :, None, :], pairs, np.nan)
    coords: dict[str, Any] = {
        "encoder": list(HAS),
        "site": SITES,
        "layer_type": ("site", KINDS),
        "feature": ["cls", "gap"],
    }
    for end in "ab":
        coords |= {f"encoder_{end}": list(HAS), f"site_{end}": SITES, f"layer_type_{end}": (f"site_{end}", KINDS)}
    return xr.Dataset(
        {
            "x": (("encoder", "site", "feature"), np.stack([value, value], -1)),
            "pair": (("encoder_a", "encoder_b", "site_a", "site_b"), pairs),
            "level": (("encoder", "frequency"), np.tile([0.1, 0.5, 0.9], (2, 1))),
            "reason": (("encoder", "site"), np.where(there, "", ABSENT)),
        },
        coords={**coords, "frequency": [0.1, 0.5, 0.9], "stage": (("encoder", "site"), STAGES * there)},
    )


def chosen(variable: str = "x", **where: Any) -> list[float]:
    cells, values = cells_of(table(), variable, where), table()[variable]
    return values.values[tuple(cells[str(dim)] for dim in values.dims)].round(4).tolist()


def test_relative_depths_count_blocks_of_each_encoder() -> None:
    expected = [[0, 0, 0.25, 0.25, 0.5, 0.75, np.nan, 1.0], [0, 0, 0.5, 0.5, *[np.nan] * 4]]
    np.testing.assert_array_equal(relative_depths(table()), expected)


def test_relative_depths_count_blocks_that_were_not_chosen() -> None:
    encoders = [{"name": name, "depth": depth} for name, depth in zip(HAS, (8, None), strict=True)]
    said = table().assign_attrs(provenance=json.dumps({"encoders": encoders}))
    expected = [[0, 0, 0.125, 0.125, 0.25, 0.375, np.nan, 1.0], [0, 0, 0.5, 0.5, *[np.nan] * 4]]
    np.testing.assert_array_equal(relative_depths(said), expected)
    damaged = table().assign_attrs(provenance='{"encoders": 3}')
    np.testing.assert_array_equal(relative_depths(damaged), relative_depths(table()))


@pytest.mark.parametrize(
    ("where", "sites"),
    [
        ({"encoder": "deep", "layer_type": "block"}, [0, 2, 4, 5]),
        ({"encoder": "short", "layer_type": "block"}, [0, 2]),
        ({"encoder": "deep", "depth": "first half"}, [0, 1, 2, 3]),
        ({"encoder": "short", "depth": "last half"}, [2, 3]),
        ({"encoder": "deep", "depth": (0, 0.75), "layer_type": "block"}, [0, 2, 4]),
        ({"encoder": "deep", "depth": "last quarter"}, [5]),
        ({"encoder": "deep", "site": "block.*"}, [0, 2, 4, 5]),
        ({"encoder": "deep", "site": "block.**"}, [0, 1, 2, 3, 4, 5]),
        ({"encoder": "deep", "site": ["norm", "block.2"]}, [4, 6]),
        ({"encoder": "deep", "site": "decoder.block.*"}, [7]),
        ({"encoder": ["deep", "short"], "site": "block.1"}, [2, 2]),
        ({"encoder": ["deep", "short"], "depth": "last half"}, [4, 5, 2, 3]),
        ({"encoder": "deep", "stage": 2}, [4, 5]),
        ({"encoder": slice(None), "site": "block.1"}, [2, 2]),
        ({"depth": (0.6, 1)}, [5]),  # only one encoder has such a block
        ({"encoder": "de?p", "site": "block.?"}, [0, 2, 4, 5]),
    ],
)
def test_layers_are_meant_by_type_depth_and_name(where: dict[str, Any], sites: list[int]) -> None:
    assert chosen(feature="cls", **where) == sites


def test_words_about_layers_mean_both_layers_of_a_pair() -> None:
    assert chosen("pair", encoder="deep", other="short", layer_type="block", depth="last half") == [4.02, 5.02]
    with pytest.raises(InputError, match="several values of encoder_b"):
        chosen("pair", encoder="deep", depth="last half")
    assert chosen("pair", encoder_a="short", encoder_b="deep", site_a="block.0", depth_b="last quarter") == [0.05]


def test_numbers_are_meant_by_value_and_range() -> None:
    assert chosen("level", encoder="deep", frequency=0.5) == [0.5]
    assert chosen("level", encoder="deep", frequency=slice(0.5, None)) == [0.5, 0.9]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"encoder": "deep"}, "several values of feature"),
        ({"feature": "cls"}, "several values of encoder"),
        ({"feature": "cls", "depth": "last half"}, "several values of encoder"),
        ({"feature": "cls", "stage": 1}, "several values of encoder"),
        ({"encoder": "dep", "feature": "cls"}, "No encoder is dep; did you mean 'deep'"),
        ({"encoder": "deep", "featur": "cls"}, "did you mean 'feature'"),
        ({"encoder": "deep", "feature": "cls", "depth": "last fifth"}, "is not a range of depths"),
        ({"encoder": "deep", "feature": "cls", "site": slice("block.1", None)}, "block.1.. is an open range"),
        ({"encoder": "deep", "feature": "cls", "stage": slice("one", 2)}, "'one' is not a number"),
        ({"encoder": "short", "feature": "cls", "site": "block.3"}, "x has no number for"),
        ({"encoder": "deep", "feature": "cls", "site": "norm", "layer_type": "qkv"}, "no layer matches all of it"),
    ],
)
def test_what_is_not_said_well_is_a_sentence(where: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        chosen(**where)


def test_a_range_of_depths_rises() -> None:
    assert depth_range([0.5, None]) == (0.5, 1.0)
    with pytest.raises(InputError, match="is not a range"):
        depth_range((0.5, 0.5))
