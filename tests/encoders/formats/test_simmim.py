"""SimMIM's official checkpoints; what they share with BEiT's is tested there."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.official_beit import CLASSES, DEPTH, HEADS, SHARED, SIZE, WIDTH, check, finetuned, weights
from torch import Tensor

from sightline.core.errors import InputError
from sightline.encoders.files.reading import Checkpoint, read_checkpoint
from sightline.encoders.formats import simmim
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder
from sightline.images.preprocess import Preprocess

SETTINGS = {"MODEL": {"TYPE": "vit", "VIT": {"DEPTH": DEPTH, "USE_RPB": False}}, "DATA": {"IMG_SIZE": SIZE}}


def trained(prefix: str = "") -> dict[str, Tensor]:
    decoder = {"decoder.0.weight": torch.randn(48, WIDTH, 1, 1), "decoder.0.bias": torch.randn(48)}
    state = {f"encoder.{name}": value for name, value in weights().items()} | decoder
    return {prefix + name: value for name, value in state.items()}


def swin() -> dict[str, Tensor]:
    names = ("mask_token", "patch_embed.proj.weight", "layers.0.blocks.0.attn.qkv.weight", "norm.weight")
    return {f"encoder.{name}": torch.zeros(2) for name in names}


@pytest.fixture
def cfg_node(monkeypatch) -> Any:
    """The class of SimMIM's settings as its files name it, there while they are written."""
    node = type("CfgNode", (dict,), {"__module__": "yacs.config"})
    package, module = ModuleType("yacs"), ModuleType("yacs.config")
    module.CfgNode = node  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "yacs", package)
    monkeypatch.setitem(sys.modules, "yacs.config", module)

    def nested(values: dict[str, Any]) -> Any:
        return node({key: nested(value) if isinstance(value, dict) else value for key, value in values.items()})

    return nested


@pytest.mark.parametrize("prefix", ["", "module."])
def test_training_checkpoint(tmp_path, cfg_node, monkeypatch, prefix):
    content = {"model": trained(prefix), "optimizer": {}, "lr_scheduler": {}, "max_accuracy": 0.0, "epoch": 3}
    torch.save(content | {"config": cfg_node(SETTINGS)}, tmp_path / "some.pth")
    monkeypatch.undo()
    assert "yacs" not in sys.modules
    encoder = load_encoder(f"simmim:{tmp_path / 'some.pth'}")
    check(encoder, weights())
    assert encoder.preprocess == Preprocess((SIZE, SIZE), resize=13)
    assert encoder.notes == [
        "3 weights of the file are not part of the encoder and were left out: "
        "mask_token, decoder.0.weight, decoder.0.bias"
    ]
    found = simmim.layout(read_checkpoint(tmp_path / "some.pth"), {})
    assert (found.format, found.part) == ("SimMIM, training checkpoint", "model, encoder.")


def test_fine_tuned_file(tmp_path, cfg_node, monkeypatch):
    """Without `encoder.`, as BEiT's; its settings say that it is SimMIM's."""
    torch.save({"model": finetuned(), "config": cfg_node(SETTINGS)}, tmp_path / "some.pth")
    monkeypatch.undo()
    encoder = load_encoder(f"simmim:{tmp_path / 'some.pth'}")
    check(encoder, finetuned())
    assert encoder(torch.zeros(1, 3, SIZE, SIZE)).shape == (1, CLASSES)
    given = read_checkpoint(tmp_path / "some.pth")
    assert simmim.recognizes(given) == "it has relative positions and settings MODEL.VIT"
    assert simmim.layout(given, {}).format == "SimMIM, with classifier"


def test_encoder_alone(tmp_path):
    torch.save(weights(), tmp_path / "some.pth")
    check(load_encoder(f"simmim:{tmp_path / 'some.pth'}"), weights())


def test_images_are_those_of_the_official_evaluation():
    """256 for 224, in this proportion at every size, and ImageNet's mean."""
    for size, resize in ((224, 256), (384, 438)):
        found = simmim.layout(Checkpoint(Path("some.pth"), "", trained(), {}), {"size": str(size)})
        assert found.preprocess == Preprocess((size, size), resize, "bicubic")


def test_saved_and_loaded_again(tmp_path):
    torch.save({"model": trained()}, tmp_path / "some.pth")
    encoder = load_encoder(f"simmim:{tmp_path / 'some.pth'}?size=20")
    again = load_encoder(f"run:{save_encoder(encoder, tmp_path / 'run')}")
    assert (again.weights, again.preprocess, again.tokens) == (encoder.weights, encoder.preprocess, encoder.tokens)
    images = torch.randn(2, 3, 20, 20)
    assert torch.equal(again(images), encoder(images))


def test_settings_of_a_swin_transformer_are_not_enough():
    """Swin's own code writes the same settings."""
    settings = {"MODEL.SWIN.DEPTHS": [2, 2], "MODEL.VIT.DEPTH": 12}
    supervised = {name.removeprefix("encoder."): value for name, value in swin().items()}
    assert simmim.recognizes(Checkpoint(Path("some.pth"), "", {"model": swin()}, settings))
    assert not simmim.recognizes(Checkpoint(Path("some.pth"), "", {"model": supervised}, settings))


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (swin(), {}, "'some.pth' is SimMIM with a Swin Transformer, .*; choose one with a ViT"),
        (trained(), {"heads": "4"}, f"heads=4, but the tables of relative positions have {HEADS}"),
        (trained(), {"size": "13"}, "cannot be cut into patches of 4"),
        ({"encoder.layer.0.weight": torch.zeros(2)}, {}, "'some.pth' holds no encoder of SimMIM"),
        (trained() | {f"encoder.{SHARED}": torch.zeros(30, HEADS)}, {}, "relative positions of one square of patches"),
    ],
)
def test_errors(state, options, message):
    with pytest.raises(InputError, match=message) as error:
        simmim.layout(Checkpoint(Path("some.pth"), "", {"model": state}, {}), options)
    assert "\n" not in str(error.value)
