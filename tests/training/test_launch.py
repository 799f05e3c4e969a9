"""What the functions that train have in common is said in one place, and shown by all of them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_type_hints

import pytest

from sightline.training.launch import Launch, Launched
from sightline.training.pretrain import pretrain
from sightline.transfer.finetune import finetune


def test_a_launch_has_the_same_fields_as_object_and_as_arguments() -> None:
    assert get_type_hints(Launch) == get_type_hints(Launched)


@pytest.mark.parametrize("train", [pretrain, finetune])
def test_help_shows_them_with_their_defaults(train: Any) -> None:
    shown = inspect.signature(train).parameters
    fields = dataclasses.fields(Launch)
    assert [(name, p.default) for name, p in shown.items()][-len(fields) :] == [(f.name, f.default) for f in fields]
    assert not [p for p in shown.values() if p.kind is p.VAR_KEYWORD]


@pytest.mark.parametrize("train", [pretrain, finetune])
def test_what_is_none_of_them_is_an_error(train: Any) -> None:
    with pytest.raises(TypeError, match="devics"):
        train(devics=2)
