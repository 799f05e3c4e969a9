"""Checkpoints of DINO: student and teacher, with and without prefixes, its resize of positions, its ResNet."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from support.official_vit import HEADS, PATCH, SIDE, SIZE, State, activations, check_sites, images, resized, saved, vit
from torch.nn import functional as F
from torchvision.models.resnet import Bottleneck, ResNet

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.files.reading import read_checkpoint
from sightline.encoders.formats import dino
from sightline.encoders.watching import capture

TEACHER, STUDENT = vit(seed=1), vit(seed=2)


def side(backbone: State, prefix: str = "") -> State:
    """A backbone with DINO's head."""
    head = {
        "mlp.0.weight": torch.ones(6, 24),
        "mlp.0.bias": torch.ones(6),
        "last_layer.weight_g": torch.ones(9, 1),
        "last_layer.weight_v": torch.ones(9, 6),
    }
    named = {f"backbone.{name}": value for name, value in backbone.items()}
    named |= {f"head.{name}": value for name, value in head.items()}
    return {prefix + name: value for name, value in named.items()}


def training(teacher_prefix: str = "", teacher: State = TEACHER, student: State = STUDENT) -> dict[str, Any]:
    return {
        "student": side(student, "module."),
        "teacher": side(teacher, teacher_prefix),
        "optimizer": {"state": {}, "param_groups": []},
        "epoch": 7,
        "args": argparse.Namespace(arch="vit_small", patch_size=PATCH),
        "dino_loss": {"center": torch.zeros(1, 9)},
    }


@pytest.mark.parametrize("prefix", ["", "module."])  # with BatchNorm in the head the teacher is distributed, too
@pytest.mark.parametrize(
    ("which", "expected"), [("", TEACHER), ("&which=teacher", TEACHER), ("&which=student", STUDENT)]
)
def test_training_checkpoint(prefix: str, which: str, expected: State, tmp_path: Path) -> None:
    path = saved(training(prefix), tmp_path)
    encoder = sl.load_encoder(f"dino:{path}?heads={HEADS}{which}")
    check_sites(encoder, activations(expected, images()), images())
    other = "teacher" if "student" in which else "student"
    assert encoder.notes == [
        f"the file also has {other}; write which={other} for it",
        "4 weights of the file are not part of the encoder and were left out: head.mlp.0.weight, head.mlp.0.bias, "
        "head.last_layer.weight_g, …",
    ]
    checkpoint = read_checkpoint(path)
    assert dino.layout(checkpoint, {"heads": "3"}).part == "teacher, backbone."
    assert dino.layout(checkpoint, {"heads": "3"}).format == "DINO, training checkpoint"
    assert dino.recognizes(checkpoint) == "it has student and teacher, each with backbone and head.last_layer"


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "module.backbone."])
def test_backbone_alone(prefix: str, tmp_path: Path) -> None:
    path = saved({prefix + name: value for name, value in TEACHER.items()}, tmp_path)
    encoder = sl.load_encoder(f"dino:{path}?heads={HEADS}")
    check_sites(encoder, activations(TEACHER, images()), images())
    assert encoder.notes == []
    assert dino.recognizes(read_checkpoint(path)) == ""  # a bare ViT with learned positions may be anyone's
    assert dino.layout(read_checkpoint(path), {"heads": "3"}).format == "DINO, encoder only"


def test_official_preprocessing(tmp_path: Path) -> None:
    preprocess = sl.load_encoder(f"dino:{saved(TEACHER, tmp_path)}?heads=3&size=224").preprocess
    assert preprocess == sl.Preprocess((224, 224), 256, "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(("height", "width"), [(24, 24), (12, 12), (16, 24), (8, 32)])
def test_positions_are_resized_as_the_official_code_does(height: int, width: int, tmp_path: Path) -> None:
    path = saved(training(), tmp_path)
    size = f"{height}" if height == width else f"{height}x{width}"
    encoder = sl.load_encoder(f"dino:{path}?heads={HEADS}&size={size}")
    positions = resized(TEACHER["pos_embed"], height // PATCH, width // PATCH, more=0.1)
    expected = activations(TEACHER | {"pos_embed": positions}, images(height, width))
    check_sites(encoder, expected, images(height, width))
    assert encoder.tokens is not None
    assert encoder.tokens.grid == (height // PATCH, width // PATCH)
    assert encoder.preprocess.size == (height, width)


def test_the_resize_matters(tmp_path: Path) -> None:
    """A resize by size, as others have it, gives other positions."""
    by_size = F.interpolate(
        TEACHER["pos_embed"][:, 1:].reshape(1, SIDE, SIDE, -1).permute(0, 3, 1, 2), size=(6, 6), mode="bicubic"
    )
    ours = resized(TEACHER["pos_embed"], 6, 6, more=0.1)[:, 1:].float().reshape(1, 6, 6, -1).permute(0, 3, 1, 2)
    assert (by_size - ours).abs().max() > 0.01


def test_own_size_changes_nothing(tmp_path: Path) -> None:
    path = saved(training(), tmp_path)
    same = sl.load_encoder(f"dino:{path}?heads=3&size={SIZE}")
    assert same.weights == sl.load_encoder(f"dino:{path}?heads=3").weights


@torch.no_grad()
def test_resnet(tmp_path: Path) -> None:
    """DINO's ResNet-50 is torchvision's."""
    torch.manual_seed(0)
    model = ResNet(Bottleneck, [1, 2, 1, 1]).eval()
    for name, value in model.state_dict().items():
        if name.endswith(("running_mean", "running_var")):
            value.uniform_(0.5, 1.5)
    backbone = {name: value for name, value in model.state_dict().items() if not name.startswith("fc.")}
    encoder = sl.load_encoder(f"dino:{saved(training(teacher=backbone, student=backbone), tmp_path)}?size=64")
    own = sl.load_encoder(model)
    with capture(encoder, ["**"]) as sites, capture(own, ["**"]) as expected:
        encoder(images(64, 64))
        own(images(64, 64))
    assert set(sites) == set(expected) - {"head.0"}
    for name, value in sites.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)
    assert encoder.preprocess == sl.Preprocess((64, 64), 73, "bicubic")
    alone = saved(backbone, tmp_path, "alone.pth")
    assert sl.load_encoder(f"dino:{alone}").weights == encoder.weights
    with pytest.raises(InputError, match=r"heads=3 is for a ViT, but the file has a ResNet; leave it out"):
        sl.load_encoder(f"dino:{alone}?heads=3")


def test_which_is_a_choice_between_encoders_of_the_file(tmp_path: Path) -> None:
    path, alone = saved(training(), tmp_path), saved(TEACHER, tmp_path, "alone.pth")
    with pytest.raises(InputError, match=r"which=techer cannot be chosen: the file has teacher and student"):
        sl.load_encoder(f"dino:{path}?which=techer")
    with pytest.raises(InputError, match=r"which=student cannot be chosen: the file has one encoder; leave which out"):
        sl.load_encoder(f"dino:{alone}?which=student")


def test_a_missing_weight_is_an_error(tmp_path: Path) -> None:
    state = training()
    del state["teacher"]["backbone.blocks.1.attn.proj.bias"]
    with pytest.raises(InputError, match=r"lacks 1 of \d+ weights of the encoder \(blocks.1.attn.proj.bias\)"):
        sl.load_encoder(f"dino:{saved(state, tmp_path)}?heads=3")
