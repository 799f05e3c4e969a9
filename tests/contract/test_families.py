"""The same checks over every family of encoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sightline as sl
from sightline.core import plugins
from sightline.encoders.sites import select


@pytest.mark.parametrize("name", plugins.names("families"))
def test_a_family_tells_its_own(name: str) -> None:
    module = plugins.find("families", name)
    assert module.__doc__.strip()
    assert not module.matches(torch.nn.Linear(2, 2))


def test_capture_leaves_the_output_unchanged(encoders: Any) -> None:
    for encoder in encoders.values():
        x = torch.randn(2, 3, *encoder.preprocess.size)
        with torch.inference_mode(), encoder.evaluating():
            plain = encoder(x)
            with sl.capture(encoder, ["**"]) as seen:
                assert torch.equal(encoder(x), plain)
        assert set(seen) == set(select(encoder.sites, ["**"]))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.module.modules())
