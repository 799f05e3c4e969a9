"""The same checks over every source of encoders."""

import pytest

import sightline as sl
from sightline.core import plugins
from sightline.encoders.contract import source
from sightline.encoders.layouts.layout import open_file


@pytest.mark.parametrize("name", plugins.built_in("sources"))
def test_a_source_can_be_listed(name: str) -> None:
    module = source(name)
    assert module.__doc__
    assert module.EXAMPLE.startswith(f"{name}:")
    assert module.names()
    assert callable(module.load)


@pytest.mark.parametrize("name", plugins.built_in("formats"))
def test_a_format_is_a_source_that_all_formats_share(name: str) -> None:
    assert source(name).names() == ["FILE"]
    assert source(name).load is open_file


@pytest.mark.parametrize("name", plugins.built_in("sources"))
def test_an_unknown_id_is_one_sentence(name: str) -> None:
    with pytest.raises(sl.InputError) as caught:
        sl.load_encoder(f"{name}:./no-such-thing")
    assert "\n" not in str(caught.value)
