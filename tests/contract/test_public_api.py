"""What `import sightline as sl` promises."""

from __future__ import annotations

import pytest

import sightline as sl


def test_the_public_names_are_there() -> None:
    for name in sl.__all__:
        assert getattr(sl, name).__doc__
    assert sorted(sl.__all__) == sl.__all__
    assert set(sl.__all__) <= set(dir(sl))
    assert callable(sl.analyze)


def test_the_public_names_are_all_that_is_shown() -> None:
    shown = {name for name in dir(sl) if not name.startswith("_")}
    rooms = {"analyses", "api", "cli", "core", "encoders", "generation", "images", "measure", "report"}
    rooms |= {"studies", "training", "transfer"}
    others = {"TYPE_CHECKING", "Any", "annotations", "importlib"}
    assert shown - rooms - others == {name for name in sl.__all__ if not name.startswith("_")}


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'analyse'"):
        _ = sl.analyse
