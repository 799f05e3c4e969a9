"""A run.json that is damaged is a sentence, wherever the damage is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from support.damage import damaged, places

import sightline as sl
from sightline.core.errors import InputError
from sightline.core.folders import begin
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


@pytest.mark.parametrize("part", list(WHOLE))
def test_any_field_of_any_other_type_or_missing(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence, or a report of what is left."""
    monkeypatch.setattr("sightline.report.shell._vega", lambda: Markup(""))  # megabytes that have no part in it
    begin(tmp_path, "comparison")
    for way in places(WHOLE)[1:]:
        for request in damaged(WHOLE, way) if way[0] == part else ():
            (tmp_path / "run.json").write_text(json.dumps(request))
            try:
                run = sl.open_run(tmp_path)
            except InputError:
                continue
            sl.write_report(run)


@pytest.mark.parametrize("text", ["", "3", "[]", "{", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass").hex()])
def test_what_is_no_table_at_all(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match="Cannot read"):
        sl.open_run(tmp_path)


@pytest.mark.parametrize("without", ["left_out", ""])
def test_going_on_changes_nothing(without: str, tmp_path: Path) -> None:
    request = {key: value for key, value in WHOLE.items() if key != without}
    first = plan_run(tmp_path / "run", request)
    first.begin()
    before = (tmp_path / "run" / "run.json").read_bytes()
    plan_run(tmp_path / "run", request).begin()
    assert (tmp_path / "run" / "run.json").read_bytes() == before
