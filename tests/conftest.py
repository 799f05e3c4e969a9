"""What many tests share: small encoders, small images."""

from __future__ import annotations

import os

import pytest
import torch
from support.references import SMALL

from sightline.core import bfloat16
from sightline.core.bfloat16_trial import product

# One test process per core: threads of their own would only get in each other's way.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Before anything is computed, so that instructions can still be limited where they kill; test processes inherit that.
BF16 = bfloat16.usable()
if BF16:
    product()  # oneDNN has read the limit now, whatever a test does to the environment


@pytest.fixture
def small() -> str:
    """A reference to a ViT of two blocks on 32 pixels."""
    return SMALL


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where products in bfloat16 kill the process whatever is set, only the tests that compute some are left out."""
    if item.get_closest_marker("bf16") and not BF16:
        pytest.skip("products in bfloat16 kill the process on this machine")
