"""Weights: nothing is run, nothing is hidden, the hash tells every bit."""

import argparse
import os
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sightline.core.errors import InputError
from sightline.encoders.files.weights import (
    LargerModelError,
    check_finite,
    hash_weights,
    load_weights,
    no_larger_than,
    read_weights,
)
from sightline.encoders.loading import load_encoder

SMALL = "img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4"
VIT = f"timm:vit_tiny_patch16_224@random?{SMALL}&num_classes=5"
CONVNEXT = "timm:convnext_tiny@random?depths=(1,1,1,1)&dims=(8,8,8,8)&num_classes=5"


def state_of(reference):
    return {name: value.clone() for name, value in load_encoder(reference).module.state_dict().items()}


def from_file(path, options=SMALL, model="vit_tiny_patch16_224"):
    return load_encoder(f"timm:{model}@{path}?{options}")


# Reading


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": state, "arch": "vit"},
        lambda state: {"model": state, "args": argparse.Namespace(lr=0.1, name="run")},
        lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
    ],
    ids=["bare", "model", "state_dict", "Namespace", "DistributedDataParallel"],
)
def test_layouts(tmp_path, wrap):
    state = state_of(VIT)
    torch.save(wrap(state), tmp_path / "file.pth")
    found = read_weights(tmp_path / "file.pth")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert from_file(tmp_path / "file.pth").weights == load_encoder(VIT).weights


def test_safetensors(tmp_path):
    save_file(state_of(VIT), tmp_path / "file.safetensors")
    encoder = from_file(tmp_path / "file.safetensors")
    assert encoder.weights == load_encoder(VIT).weights
    assert encoder.notes == []


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_pickled_code_is_not_run(tmp_path, protocol):
    content = {"model": state_of(VIT), "args": Malicious(tmp_path / "hacked")}
    if protocol == "torch":
        torch.save(content, tmp_path / "file.pth")
    else:
        (tmp_path / "file.pth").write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match="nothing of it was executed: it asks for "):
        from_file(tmp_path / "file.pth")
    assert not (tmp_path / "hacked").exists()
    if protocol == "pickle":
        pickle.loads((tmp_path / "file.pth").read_bytes())
        assert (tmp_path / "hacked").exists()  # so the trap does work


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("file.pth", b"", "is empty"),
        ("file.pth", b"not a checkpoint at all", "is not a checkpoint"),
        ("file.safetensors", b"\x00" * 20, "is damaged, incomplete or more than a state dict"),
    ],
)
def test_broken_files(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=reason) as error:
        from_file(tmp_path / name)
    assert "\n" not in str(error.value)


def test_no_file_and_no_state_dict(tmp_path):
    with pytest.raises(InputError, match="There is no weights file"):
        from_file(tmp_path / "none.pth")
    torch.save({"epoch": 3, "names": ["a"]}, tmp_path / "file.pth")
    with pytest.raises(InputError, match="holds no state dict"):
        from_file(tmp_path / "file.pth")
    torch.save(torch.zeros(3), tmp_path / "file.pth")
    with pytest.raises(InputError, match="holds no state dict"):
        from_file(tmp_path / "file.pth")


# Fitting


def test_a_missing_weight_is_refused(tmp_path):
    state = state_of(VIT)
    del state["blocks.1.mlp.fc2.bias"]
    torch.save(state, tmp_path / "file.pth")
    with pytest.raises(InputError, match=r"it lacks 1 of 32 weights \(blocks\.1\.mlp\.fc2\.bias\)"):
        from_file(tmp_path / "file.pth")


@pytest.mark.parametrize("model", ["resnet18", "convnext_atto", "beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_a_checkpoint_of_another_model_is_refused(tmp_path, model):
    torch.save(state_of(VIT), tmp_path / "file.pth")
    options = "" if model in ("resnet18", "convnext_atto") else "?embed_dim=32&depth=2&num_heads=4"
    with pytest.raises(InputError, match="is it a checkpoint of another model"):
        load_encoder(f"timm:{model}@{tmp_path / 'file.pth'}{options}")


def test_another_width_is_refused(tmp_path):
    torch.save(state_of(VIT.replace("embed_dim=32", "embed_dim=64")), tmp_path / "file.pth")
    with pytest.raises(InputError, match=re.escape("the model wants (1, 1, 32)")):
        from_file(tmp_path / "file.pth")


def test_left_over_weights_are_told(tmp_path):
    torch.save(state_of(VIT) | {"decoder.weight": torch.zeros(3), "queue": torch.zeros(1)}, tmp_path / "file.pth")
    encoder = from_file(tmp_path / "file.pth")
    assert encoder.weights == load_encoder(VIT).weights
    assert len(encoder.notes) == 1
    assert encoder.notes[0].startswith("2 weights of the file are not part of the encoder")
    assert "decoder.weight, queue" in encoder.notes[0]


@pytest.mark.parametrize(
    ("reference", "head"),
    [
        (VIT, "head"),
        (CONVNEXT, "head.fc"),
        ("timm:resnet18@random?num_classes=5&channels=(8,8,8,8)", "fc"),
        ("torchvision:resnet18@random", "fc"),
    ],
)
@pytest.mark.parametrize("classes", [3, 0])
def test_classifier_of_another_size_or_none(tmp_path, reference, head, classes):
    state = state_of(reference)
    width = state[f"{head}.weight"].shape[1]
    state[f"{head}.weight"], state[f"{head}.bias"] = torch.randn(3, width), torch.randn(3)
    if classes == 0:
        del state[f"{head}.weight"], state[f"{head}.bias"]
    torch.save(state, tmp_path / "file.pth")
    name, _, options = reference.partition("@random")
    encoder = load_encoder(f"{name}@{tmp_path / 'file.pth'}{options}")
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert encoder(images).shape == (1, classes or width)
    assert encoder.notes == ([] if classes else ["the file has no classifier, so the encoder has none"])
    assert ("head.0" in encoder.sites) == bool(classes)
    if classes:
        assert torch.equal(encoder.module.get_submodule(head).weight, state[f"{head}.weight"])


def test_both_classifiers_of_a_distilled_model(tmp_path):
    reference = VIT.replace("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224")
    state = {name: value for name, value in state_of(reference).items() if not name.startswith("head")}
    torch.save(state, tmp_path / "file.pth")
    encoder = from_file(tmp_path / "file.pth", model="deit_tiny_distilled_patch16_224")
    assert not [site for site in encoder.sites if site.startswith("head")]
    assert encoder.notes == ["the file has no classifier, so the encoder has none"]


def test_position_embedding_is_resized_to_the_image(tmp_path):
    torch.save(state_of(VIT), tmp_path / "file.pth")
    encoder = from_file(tmp_path / "file.pth", SMALL.replace("img_size=32", "img_size=48"))
    assert encoder.tokens.grid == (6, 6)
    with torch.no_grad():
        assert encoder(torch.randn(1, 3, 48, 48)).shape == (1, 5)


def test_batch_norm_counters_may_be_missing():
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    state = {name: value for name, value in module.state_dict().items() if "num_batches" not in name}
    assert load_weights(module, state, "File") == []


@pytest.mark.parametrize(("layers", "width"), [(510, 1), (1, 10_000)])
def test_a_model_far_larger_than_its_weights_is_not_built(layers, width):
    """Beside one weight of one number 1,004 parameters and 67,108,868 numbers are the most."""
    built = []

    def build():
        built.extend(nn.Linear(width, width) for _ in range(layers))

    with no_larger_than({"w": torch.zeros(1)}, "File"), torch.device("meta"):
        nn.Linear(8000, 8000)
    with (
        pytest.raises(LargerModelError, match="File has 1 weight with 1 numbers, but a far larger model is described"),
        no_larger_than({"w": torch.zeros(1)}, "File"),
        torch.device("meta"),
    ):
        build()
    assert len(built) == (502 if layers > 1 else 0)
    with torch.device("meta"):
        build()  # nothing is counted any more


@pytest.mark.parametrize("measures", [{"a": {"depths": [1, 2, 3]}}, {"num_hidden_layers": 3}, {"width": 2**16 + 1}])
def test_measures_beyond_the_weights(measures):
    state = {"a": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(LargerModelError), no_larger_than(state, "File", measures):
        pass
    labels = {"cassette player": 482, "layers": 999}
    fitting = {"depths": [2, 1], "width": 2**16, "layer_norm_eps": 1e9, "text": "10000000", "label2id": labels}
    with no_larger_than(state, "File", fitting):
        pass


# Hash and soundness


def test_hash_tells_every_bit_type_shape_and_name_but_not_the_order():
    def linear(change=lambda state: state):
        module = nn.Linear(3, 2)
        state = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}
        module.load_state_dict(change(state))
        return module

    plain = hash_weights(linear())
    assert hash_weights(linear()) == plain
    assert hash_weights(linear(lambda state: dict(reversed(state.items())))) == plain
    least = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert hash_weights(linear(lambda state: state | {"bias": torch.stack([torch.tensor(1.0), least])})) != plain
    assert hash_weights(linear().double()) != plain
    assert hash_weights(linear().bfloat16()) != plain
    named = nn.Module()
    named.weight, named.bias2 = linear().weight, linear().bias
    assert hash_weights(named) != plain
    flat = nn.Module()
    flat.weight, flat.bias = nn.Parameter(linear().weight.detach().reshape(3, 2)), linear().bias
    assert hash_weights(flat) != plain


def test_hash_does_not_depend_on_the_order_of_registration():
    first, second = nn.Module(), nn.Module()
    first.a, first.b = nn.Linear(2, 2), nn.Linear(2, 2)
    second.b, second.a = first.b, first.a
    assert hash_weights(first) == hash_weights(second)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_refused(tmp_path, value):
    state = state_of(VIT)
    state["blocks.1.attn.qkv.weight"][3, 4] = value
    torch.save(state, tmp_path / "file.pth")
    with pytest.raises(InputError, match=r"NaN or infinite weights \(first in blocks\.1\.attn\.qkv\.weight\)"):
        from_file(tmp_path / "file.pth")
    module = nn.BatchNorm1d(2)
    check_finite(module, "mine")
    module.running_var[0] = value
    with pytest.raises(InputError, match=r"'mine' has NaN or infinite weights \(first in running_var\)"):
        load_encoder(module, name="mine")
