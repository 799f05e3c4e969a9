"""Settings as words and tables: reading, layering, kinds."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from sightline.core.errors import InputError
from sightline.core.settings import make_settings, parse_settings


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("lr=1e-3", {"lr": 0.001}),
        ("depth=12", {"depth": 12}),
        ("compile=true", {"compile": True}),
        ("compile=True", {"compile": True}),
        ("compile=False", {"compile": False}),
        ("backbone=resnet18", {"backbone": "resnet18"}),
        ('backbone="resnet18"', {"backbone": "resnet18"}),
        ("images=shapes?size=16&train=64", {"images": "shapes?size=16&train=64"}),
        ("crop=[0.3, 1.0]", {"crop": [0.3, 1.0]}),
        (" lr = 0.5 ", {"lr": 0.5}),
        ("stem=", {"stem": ""}),
        ("moco_v3.temperature=0.1", {"moco_v3": {"temperature": 0.1}}),
    ],
)
def test_settings_are_read(word: str, expected: dict[str, Any]) -> None:
    found = parse_settings([word])
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_later_settings_override_earlier_ones() -> None:
    words = ["lr=1", "mae.crop=[0.1, 1.0]", "lr=2", "mae.mask_ratio=0.5"]
    assert parse_settings(words) == {"lr": 2, "mae": {"crop": [0.1, 1.0], "mask_ratio": 0.5}}


@pytest.mark.parametrize("word", ["lr", "=3", "", " = "])
def test_settings_have_a_key_and_a_value(word: str) -> None:
    with pytest.raises(InputError, match="key=value"):
        parse_settings([word])


def test_a_key_cannot_be_a_value_and_a_table() -> None:
    with pytest.raises(InputError):
        parse_settings(["mae=1", "mae.crop=2"])


@dataclass(frozen=True)
class Some:
    count: int = 1
    rate: float = 0.5
    seed: int = 0
    scales: tuple[float, ...] = ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": math.inf}, "rate is inf, but a finite number"),
        ({"rate": math.nan}, "rate is nan, but a finite number"),
        ({"rate": 10**400}, "rate is 1.*, but a finite number"),
        ({"scales": [1.0, -math.inf]}, "Each value of scales is -inf"),
        ({"count": math.inf}, "count is inf, but a whole number"),
    ],
)
def test_numbers_that_nothing_can_be_done_with(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_settings(Some, values)


def test_large_seeds_and_whole_numbers_as_others() -> None:
    assert make_settings(Some, {"seed": 2**62, "rate": 3, "count": 10**9}) == Some(10**9, 3.0, 2**62)


def test_a_value_that_is_nested_deeply() -> None:
    with pytest.raises(InputError, match="nested too deeply"):
        parse_settings(["lr=" + "[" * 100_000])
    assert parse_settings(["lr=" + "9" * 5000])["lr"] == "9" * 5000  # no number that Python reads
