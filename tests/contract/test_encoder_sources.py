"""The same checks over every source of encoders."""

from __future__ import annotations

import pytest

import sightline as sl
from sightline.core import plugins


@pytest.mark.parametrize("name", plugins.built_in("sources"))
def test_a_source_can_be_listed(name: str) -> None:
    module = plugins.find("sources", name)
    assert module.__doc__.strip()
    assert module.EXAMPLE.startswith(f"{name}:")
    assert module.names()
    assert callable(module.load)


@pytest.mark.parametrize("name", plugins.built_in("sources"))
def test_an_unknown_id_is_one_sentence(name: str) -> None:
    with pytest.raises(sl.InputError) as caught:
        sl.load_encoder(f"{name}:./no-such-thing")
    assert "\n" not in str(caught.value)
