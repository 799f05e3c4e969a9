"""torchvision as a source. Its weights are put where the download would have put them, so nothing is downloaded."""

import socket

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import models

from sightline.core.errors import InputError
from sightline.encoders.loading import load_encoder
from sightline.encoders.sources.torchvision import _preprocess, names

SMALLEST = "shufflenet_v2_x0_5"


@pytest.fixture
def offline(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError("no network here")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    return tmp_path


def test_names():
    assert {"resnet50", "resnet50@IMAGENET1K_V1", "resnet50@IMAGENET1K_V2", "convnext_tiny"} <= set(names())


@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "convnext_tiny", "regnet_y_16gf"])
def test_preprocessing_is_that_of_the_weights(name):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 500, 3), dtype=np.uint8))
    for weights in models.get_model_weights(name):
        preprocess = _preprocess(weights, None, official=True)
        torch.testing.assert_close(preprocess([image])[0], weights.transforms()(image), rtol=0, atol=1e-6)


def test_default_and_named_weights(offline):
    """The file that the download would leave is found by its name; default is the best one."""
    weights = models.get_model_weights(SMALLEST).DEFAULT
    module = models.get_model(SMALLEST)
    folder = offline / "checkpoints"
    folder.mkdir()
    torch.save(module.state_dict(), folder / weights.url.rpartition("/")[2])
    plain, named = load_encoder(f"torchvision:{SMALLEST}"), load_encoder(f"torchvision:{SMALLEST}@{weights.name}")
    assert plain.weights == named.weights
    assert plain.preprocess == _preprocess(weights, None, official=True)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(plain(images), module.eval()(images))


def test_without_a_network(offline):
    with pytest.raises(InputError, match=r"Cannot get the weights of torchvision:resnet18: .*no network here"):
        load_encoder("torchvision:resnet18")


def test_random(offline):
    first = load_encoder(f"torchvision:{SMALLEST}@random?seed=1&size=64")
    assert first.weights == load_encoder(f"torchvision:{SMALLEST}@random?seed=1").weights
    assert first.weights != load_encoder(f"torchvision:{SMALLEST}@random").weights
    assert (first.preprocess.size, first.preprocess.resize) == ((64, 64), 64)
    assert not first.module.training


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("torchvision:resnet5", "torchvision has no model 'resnet5'; did you mean"),
        ("torchvision:fasterrcnn_resnet50_fpn", "torchvision has no model"),
        ("torchvision:resnet50@IMAGENET1K_V3", "did you mean 'IMAGENET1K_V"),
        ("torchvision:resnet50@random?sed=1", "unknown option 'sed'; did you mean 'seed'"),
        ("torchvision:resnet50@random?size=big", "must be whole numbers"),
        ("torchvision:resnet50@random?size=0", "must be whole numbers"),
        ("torchvision:resnet18@nowhere.pth", "There is no weights file"),
    ],
)
def test_errors(reference, message):
    with pytest.raises(InputError, match=message):
        load_encoder(reference)


def test_file(tmp_path):
    module = models.get_model(SMALLEST)
    torch.save({"model": module.state_dict()}, tmp_path / "file.pth")
    encoder = load_encoder(f"torchvision:{SMALLEST}@{tmp_path / 'file.pth'}")
    assert torch.equal(encoder.module.fc.weight, module.fc.weight)
    with pytest.raises(InputError, match="is it a checkpoint of another model"):
        load_encoder(f"torchvision:squeezenet1_1@{tmp_path / 'file.pth'}")
