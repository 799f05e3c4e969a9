"""The same checks over every source of images."""

import pytest

import sightline as sl
from sightline.core import plugins


@pytest.mark.parametrize("name", plugins.built_in("datasets"))
def test_a_dataset_can_be_listed(name: str) -> None:
    module = plugins.find("datasets", name)
    assert module.__doc__.strip()
    assert callable(module.load)
    with pytest.raises(sl.InputError) as caught:
        sl.load_images(f"{name}:no-such-thing")
    assert "\n" not in str(caught.value)
