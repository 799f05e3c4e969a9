"""What many tests share: small encoders, small images."""

from __future__ import annotations

import os

import pytest
import torch

# One test process per core: threads of their own would only get in each other's way.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMALL = "timm:vit_tiny_patch16_224@random?size=32&patch_size=8&depth=2&embed_dim=48&num_heads=3"


@pytest.fixture
def small() -> str:
    """A reference to a ViT of two blocks on 32 pixels."""
    return SMALL
