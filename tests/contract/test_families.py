"""The same checks over every family of encoders."""

from typing import Any

import pytest
import torch
from support.references import HUGGINGFACE, SMALL
from torch import nn

import sightline as sl
from sightline.core import plugins
from sightline.encoders.encoder import anatomy
from sightline.encoders.modules.projection import Projected
from sightline.encoders.sites import select

FAMILIES = plugins.built_in("families")


def huggingface() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.ViTModel(transformers.ViTConfig(**HUGGINGFACE))
    return model


def own(family: str) -> nn.Module:
    """A small member; a new family needs one here."""
    if family == "huggingface":
        return huggingface()
    if family == "projected":
        return Projected(own("vit"), nn.Sequential(nn.Linear(48, 8)))
    references = {
        "autoencoder": "zoo:mae?decoder=true",
        "convnext": "timm:convnext_atto@random?depths=(1,1,2,1)&dims=(8,16,24,32)",
        "eva": "timm:beit_base_patch16_224@random?size=32&patch_size=8&depth=2&embed_dim=48&num_heads=3",
        "resnet": "torchvision:resnet18@random",
        "vit": SMALL,
    }
    return sl.load_encoder(references[family]).module


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_tells_its_own(name: str) -> None:
    """It knows a member, the members of no other family, and nothing else."""
    module = plugins.find("families", name)
    assert module.__doc__.strip()
    assert [family for family in FAMILIES if module.matches(own(family))] == [name]
    assert not module.matches(torch.nn.Linear(2, 2))
    assert not module.matches(nn.Sequential(own(name)))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sites_of_a_family_are_there_and_named_alike(name: str) -> None:
    module = own(name)
    found = anatomy(module, (48, 48) if name == "autoencoder" else (32, 32))
    assert {"embed", "block.0", f"block.{found.depth - 1}"} <= set(found.taps)
    assert found.depth > 0
    assert {id(tap.module) for tap in found.taps.values()} <= {id(part) for part in module.modules()}


def test_capture_leaves_the_output_unchanged(encoders: Any) -> None:
    for encoder in encoders.values():
        x = torch.randn(2, 3, *encoder.preprocess.size)
        with torch.inference_mode(), encoder.evaluating():
            plain = encoder(x)
            with sl.capture(encoder, ["**"]) as seen:
                assert torch.equal(encoder(x), plain)
        assert set(seen) == set(select(encoder.sites, ["**"]))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.module.modules())
