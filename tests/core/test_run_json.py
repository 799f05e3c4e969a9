"""A run.json that cannot be read is a sentence; going on changes nothing in it."""

import json
from pathlib import Path
from typing import Any

import pytest

import sightline as sl
from sightline.core.errors import InputError
from sightline.core.run_folder import plan_run

WHOLE: dict[str, Any] = {
    "encoders": [
        {
            "name": "a",
            "reference": "timm:a",
            "family": "vit",
            "depth": 2,
            "preprocess": {"size": [32, 32], "resize": 32},
            "tokens": {"prefix": 1, "cls": 0, "grid": [4, 4]},
            "notes": ["small"],
        }
    ],
    "images": {"name": "shapes", "splits": {"test": 8}, "classes": ["x", "y"], "digest": "0"},
    "settings": {"batch": 8, "seed": 0},
    "analyses": {"knn": {"config": {"k": 20}, "splits": ["test"], "sites": {"a": ["block.0"]}}},
    "left_out": {"attention": {"a": "it has none"}, "noise": "it needs labels"},
    "skipped": [["a.jpg", "cut"]],
    "versions": {"python": "3.12"},
    "timing": {"seconds": 1.0},
    "command": "sightline compare",
    "date": "2026-11-17",
    "machine": "Linux",
}


@pytest.mark.parametrize("text", ["", "3", "[]", "{", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass").hex()])
def test_what_is_no_table_at_all(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match="Cannot read"):
        sl.open_run(tmp_path)


@pytest.mark.parametrize("encoders", [3, ["a"], [{}], {"a": {}}])
def test_a_table_without_the_names_of_its_encoders(encoders: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(WHOLE | {"encoders": encoders}))
    with pytest.raises(InputError, match=r"run.json' is damaged; restore it from a copy"):
        sl.open_run(tmp_path)


@pytest.mark.parametrize("without", ["left_out", ""])
def test_going_on_changes_nothing(without: str, tmp_path: Path) -> None:
    request = {key: value for key, value in WHOLE.items() if key != without}
    first = plan_run(tmp_path / "run", request)
    first.begin()
    before = (tmp_path / "run" / "run.json").read_bytes()
    plan_run(tmp_path / "run", request).begin()
    assert (tmp_path / "run" / "run.json").read_bytes() == before
