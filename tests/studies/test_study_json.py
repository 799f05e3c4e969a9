"""A study whose files are damaged is a sentence, or what is left of it, wherever the damage is."""

import json
from pathlib import Path
from typing import Any

import pytest

import sightline as sl
from sightline.core.errors import InputError

pytestmark = pytest.mark.unit

STEP = {
    "name": "pass",
    "command": "compare",
    "encoders": {"a": "zoo:mae"},
    "images": "shapes",
    "options": {"only": ["knn"]},
    "group": "pass",
    "key": "0" * 64,
    "folder": "pass-00000000",
}
WHOLE: dict[str, Any] = {
    "study": "mine",
    "steps_folder": "steps",
    "roles": [{"name": "a", "family": "reconstruction", "tuned_from": "b"}, {"name": "b", "family": "hybrid"}],
    "steps": [STEP],
    "findings": ["P3"],
}


@pytest.mark.parametrize("part", ["roles", "steps", "findings"])
@pytest.mark.parametrize("other", [{}, 3])
def test_a_part_that_is_missing_or_no_list(part: str, other: Any, tmp_path: Path) -> None:
    about = {key: value for key, value in WHOLE.items() if key != part} | ({part: other} if other else {})
    (tmp_path / "study.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"study.json' is damaged; run the same study again"):
        sl.open_study(tmp_path)


@pytest.mark.parametrize("text", ["null", "3", '{"step": null}', '{"step": 3}', '{"step": {"key": []}}', "{", "\udc80"])
def test_a_step_whose_run_json_is_something_else_is_not_done(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps(WHOLE))
    folder = tmp_path / "steps" / STEP["folder"]
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert [placed.done for placed in sl.open_study(tmp_path).steps] == [False]


def test_encoders_that_are_fine_tuned_from_each_other(tmp_path: Path) -> None:
    roles = [{**role, "tuned_from": other} for role, other in zip(WHOLE["roles"], "ba", strict=True)]
    (tmp_path / "study.json").write_text(json.dumps({**WHOLE, "roles": roles}))
    with pytest.raises(InputError, match="a from b from a: encoders cannot be fine-tuned in a circle"):
        sl.open_study(tmp_path)
