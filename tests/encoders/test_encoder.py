"""Encoders around modules: what they are told, what they tell, and their modes."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from sightline.core.errors import InputError
from sightline.encoders.loading import load_encoder
from sightline.encoders.sites import Tokens
from sightline.images.preprocess import Preprocess

SMALL = "img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5"
VIT = f"timm:vit_tiny_patch16_224@random?{SMALL}"


def test_unknown_source():
    with pytest.raises(InputError, match="There is no source 'tim'; did you mean 'timm'"):
        load_encoder("tim:resnet18@random")


def test_an_encoder_passes_through_and_a_module_is_wrapped():
    encoder = load_encoder(VIT)
    again = load_encoder(encoder, name="other")
    assert (again.module is encoder.module, again.weights, again.name) == (True, encoder.weights, "other")
    mine = load_encoder(
        nn.Conv2d(3, 4, 8, 8), name="mine", preprocess=Preprocess((16, 16)), tokens=Tokens(0, None, (2, 2))
    )
    assert (mine.name, mine.reference, mine.preprocess.size) == ("mine", "module:Conv2d", (16, 16))
    assert mine.tokens == Tokens(0, None, (2, 2))


def test_another_preprocessing_for_an_encoder():
    encoder = load_encoder(VIT)
    other = replace(encoder.preprocess, mean=(0.1, 0.2, 0.3))
    changed = load_encoder(encoder, preprocess=other)
    assert (changed.preprocess, changed.tokens) == (other, encoder.tokens)
    assert encoder.preprocess != other
    assert load_encoder(encoder, tokens=Tokens(0, None, (2, 2))).tokens == Tokens(0, None, (2, 2))


def test_description_is_plain_data():
    about = json.loads(json.dumps(load_encoder(VIT).describe()))
    assert about["tokens"] == {"prefix": 1, "cls": 0, "grid": [4, 4]}
    assert (about["depth"], about["heads"], about["patch"], about["family"]) == (2, 4, 8, "vit")
    assert about["parameters"] == sum(p.numel() for p in load_encoder(VIT).module.parameters())
    assert about["preprocess"]["size"] == [32, 32]
    assert len(about["weights"]) == 64


def test_evaluating_gives_every_part_its_mode_back():
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    module[1].eval()
    encoder = load_encoder(module)
    with contextlib.suppress(KeyError), encoder.evaluating():
        assert not module.training
        assert not module[0].training
        raise KeyError
    assert (module.training, module[0].training, module[1].training) == (True, True, False)


def test_a_bare_module_sees_the_whole_image() -> None:
    """Without a word on preprocessing a large photo is resized, not looked at through a hole of 224 pixels."""
    encoder = load_encoder(torch.nn.Conv2d(3, 8, 16, 16))
    assert (encoder.preprocess.size, encoder.preprocess.resize) == ((224, 224), 224)
