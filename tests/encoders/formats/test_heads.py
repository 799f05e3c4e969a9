"""Projection heads of official files of MoCo-v3, DINO and MSN, written out in float64."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.official_vit import HEADS, SIDE, WIDTH, State, activations, check_sites, images, saved, sincos, vit
from torch import Tensor
from torchvision.models.resnet import BasicBlock, ResNet

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.watching import capture

HIDDEN, OUT, PROTOTYPES = 10, 6, 9
RANDOM = torch.Generator().manual_seed(3)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> State:
    return {f"{name}.weight": normal(outputs, inputs) * inputs**-0.5} | (
        {f"{name}.bias": normal(outputs)} if bias else {}
    )


def norm(name: str, width: int, affine: bool = True) -> State:
    """A batch normalisation in the middle of a training."""
    state = {f"{name}.weight": normal(width), f"{name}.bias": normal(width)} if affine else {}
    state |= {f"{name}.running_mean": normal(width), f"{name}.running_var": normal(width) ** 2 + 0.5}
    return state | {f"{name}.num_batches_tracked": torch.tensor(7)}


def apply(state: Mapping[str, Tensor], x: Tensor, linear: str, norm: str = "", activation: str = "") -> Tensor:
    """One layer: y = activation(norm(W x + b)), with the running statistics of the norm."""
    x = x @ state[f"{linear}.weight"].double().T + state.get(f"{linear}.bias", torch.zeros(1)).double()
    if norm:
        mean, variance = state[f"{norm}.running_mean"].double(), state[f"{norm}.running_var"].double()
        x = (x - mean) / (variance + 1e-5).sqrt()
        if f"{norm}.weight" in state:
            x = x * state[f"{norm}.weight"].double() + state[f"{norm}.bias"].double()
    if activation == "relu":
        return x.clamp(min=0)
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2 if activation == "gelu" else x


def products(x: Tensor, weight: Tensor, length: Tensor | float = 1.0) -> Tensor:
    """Of x, of length one, with the rows of a matrix, of the length given."""
    unit = x / x.norm(dim=1, keepdim=True)
    return unit @ (weight.double() / weight.double().norm(dim=1, keepdim=True) * length).T


# MoCo-v3


def moco_mlp(name: str, inputs: int, layers: int, last_norm: bool = True) -> State:
    """A Sequential of linear layers without bias, batch normalisations and ReLUs, as MoCo-v3 numbers them."""
    state: State = {}
    for number in range(layers):
        last = number == layers - 1
        state |= linear(f"{name}.{3 * number}", inputs if number == 0 else HIDDEN, OUT if last else HIDDEN, bias=False)
        state |= norm(f"{name}.{3 * number + 1}", OUT if last else HIDDEN, not last) if not last or last_norm else {}
    return state


def moco_file(projector: State, predictor: State, core: State) -> dict[str, Any]:
    state = {f"module.base_encoder.{name}": value for name, value in (core | projector).items()}
    other = vit(seed=2) | {"pos_embed": core["pos_embed"]} if "pos_embed" in core else core
    turned = {name: value.flip(0) if value.ndim else value for name, value in projector.items()}
    state |= {f"module.momentum_encoder.{name}": value for name, value in (other | turned).items()}
    state |= {f"module.{name}": value for name, value in predictor.items()}
    return {"epoch": 300, "arch": "vit_base", "state_dict": state, "optimizer": {"state": {}}, "scaler": {}}


BASE = vit(seed=1) | {"pos_embed": sincos(SIDE, SIDE, WIDTH, row_first=True)}
PROJECTOR, PREDICTOR = moco_mlp("head", WIDTH, 3), moco_mlp("predictor", OUT, 2)


def expected_moco(x: Tensor) -> State:
    """Three layers of the projector, two of the predictor."""
    sites = {}
    for number in range(5):
        state, name, at = (PROJECTOR, "head", number) if number < 3 else (PREDICTOR, "predictor", number - 3)
        activation = "" if number in (2, 4) else "relu"
        x = sites[f"head.{number}"] = apply(state, x, f"{name}.{3 * at}", f"{name}.{3 * at + 1}", activation)
    return sites


@pytest.mark.parametrize("source", ["moco_v3", "checkpoint"])
def test_moco_v3(source: str, tmp_path: Path) -> None:
    path = saved(moco_file(PROJECTOR, PREDICTOR, BASE), tmp_path)
    encoder = sl.load_encoder(f"{source}:{path}?heads={HEADS}&head=true")
    expected = activations(BASE, images())
    check_sites(encoder, expected | expected_moco(expected["norm"][:, 0]), images())
    assert encoder.notes[-1] == "head.0 to head.2 are the projector, head.3 and head.4 the predictor"
    assert not any("left out" in note for note in encoder.notes)


def test_the_momentum_encoder_of_moco_v3_has_no_predictor(tmp_path: Path) -> None:
    path = saved(moco_file(PROJECTOR, PREDICTOR, BASE), tmp_path)
    encoder = sl.load_encoder(f"moco_v3:{path}?heads={HEADS}&head=true&which=momentum")
    assert [site for site in encoder.sites if site.startswith("head.")] == ["head.0", "head.1", "head.2"]
    module: Any = encoder.module
    assert torch.equal(module.head[0].linear.weight, PROJECTOR["head.0.weight"].flip(0))
    assert (
        "10 weights of the file are not part of the encoder and were left out: predictor.0.weight" in encoder.notes[-1]
    )


@torch.no_grad()
def test_moco_v3_with_a_resnet(tmp_path: Path) -> None:
    """Its projector is fc and has two layers; its predictor ends without batch normalisation."""
    torch.manual_seed(0)
    model = ResNet(BasicBlock, [1, 1, 1, 1]).eval()
    core = {name: value for name, value in model.state_dict().items() if not name.startswith("fc.")}
    projector, predictor = moco_mlp("fc", 512, 2), moco_mlp("predictor", OUT, 2, last_norm=False)
    path = saved(moco_file(projector, predictor, core), tmp_path)
    encoder = sl.load_encoder(f"moco_v3:{path}?size=64&head=true")
    model.fc = torch.nn.Identity()
    x = model(images(64, 64)).double()
    with capture(encoder, "head.*") as sites:
        encoder(images(64, 64))
    for number in range(4):
        state, name, at = (projector, "fc", number) if number < 2 else (predictor, "predictor", number - 2)
        normed = f"{name}.{3 * at + 1}" if number < 3 else ""
        x = apply(state, x, f"{name}.{3 * at}", normed, "" if number in (1, 3) else "relu")
        torch.testing.assert_close(sites[f"head.{number}"].double(), x, rtol=1e-5, atol=1e-5)


# DINO


def dino_head(layers: int, batch_norm: bool) -> State:
    """`mlp` is a single linear layer, or a Sequential with GELUs; the last layer has lengths g and directions v."""
    state: State = linear("mlp", WIDTH, OUT) if layers == 1 else {}
    step = 3 if batch_norm else 2
    for number in range(layers if layers > 1 else 0):
        last = number == layers - 1
        inputs, outputs = WIDTH if number == 0 else HIDDEN, OUT if last else HIDDEN
        state |= linear(f"mlp.{step * number}", inputs, outputs)
        state |= norm(f"mlp.{step * number + 1}", outputs) if batch_norm and not last else {}
    state |= {"last_layer.weight_g": normal(PROTOTYPES, 1).abs() + 0.5, "last_layer.weight_v": normal(PROTOTYPES, OUT)}
    return state


def dino_file(teacher: State, student: State) -> dict[str, Any]:
    def side(core: State, head: State, prefix: str) -> State:
        named = {f"backbone.{name}": value for name, value in core.items()}
        named |= {f"head.{name}": value for name, value in head.items()}
        return {prefix + name: value for name, value in named.items()}

    return {"student": side(vit(seed=2), student, "module."), "teacher": side(vit(seed=1), teacher, ""), "epoch": 7}


@pytest.mark.parametrize("which", ["teacher", "student"])
@pytest.mark.parametrize(("layers", "batch_norm"), [(1, False), (2, False), (3, False), (3, True)])
def test_dino(layers: int, batch_norm: bool, which: str, tmp_path: Path) -> None:
    heads = {"teacher": dino_head(layers, batch_norm), "student": dino_head(layers, batch_norm)}
    path = saved(dino_file(**heads), tmp_path)
    encoder = sl.load_encoder(f"checkpoint:{path}?heads={HEADS}&head=true&which={which}")
    state, step = heads[which], 3 if batch_norm else 2
    expected = activations(vit(seed=1 if which == "teacher" else 2), images())
    x = expected["norm"][:, 0]
    for number in range(layers):
        last = number == layers - 1
        name = "mlp" if layers == 1 else f"mlp.{step * number}"
        normed = f"mlp.{step * number + 1}" if batch_norm and not last else ""
        x = expected[f"head.{number}"] = apply(state, x, name, normed, "" if last else "gelu")
    expected[f"head.{layers}"] = products(x, state["last_layer.weight_v"], state["last_layer.weight_g"].double())
    check_sites(encoder, expected, images())
    assert encoder.notes[-1].endswith(f"head.{layers} the prototypes")


# MSN


@pytest.mark.parametrize("which", ["target", "anchor"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_msn(batch_norm: bool, which: str, tmp_path: Path) -> None:
    def head() -> State:
        state = linear("fc.fc1", WIDTH, HIDDEN) | linear("fc.fc2", HIDDEN, HIDDEN) | linear("fc.fc3", HIDDEN, OUT)
        return state | (norm("fc.bn1", HIDDEN) | norm("fc.bn2", HIDDEN) if batch_norm else {})

    cores = {"target": vit(seed=1), "anchor": vit(seed=2)}
    heads = {"target": head(), "anchor": head()}
    named = {k: {f"module.{name}": x for name, x in (cores[k] | heads[k]).items()} for k in cores}
    content = {"encoder": named["anchor"], "target_encoder": named["target"], "prototypes": normal(PROTOTYPES, OUT)}
    encoder = sl.load_encoder(f"checkpoint:{saved(content, tmp_path)}?heads={HEADS}&head=true&which={which}")
    expected = activations(cores[which], images())
    x = expected["norm"][:, 0]
    for number in range(3):
        normed, activation = (f"fc.bn{number + 1}" if batch_norm else "", "gelu") if number < 2 else ("", "")
        x = expected[f"head.{number}"] = apply(heads[which], x, f"fc.fc{number + 1}", normed, activation)
    check_sites(encoder, expected | {"head.3": products(x, content["prototypes"])}, images())
    assert encoder.notes[-1] == "head.0 to head.2 are the projector, head.3 the prototypes"


# What there is not


@pytest.mark.parametrize(
    ("source", "names"), [("moco_v3", r"head\.\*"), ("dino", r"head\.mlp\.\*, "), ("msn", r"fc\.\*, prototypes\*")]
)
def test_a_file_without_a_head_says_so(source: str, names: str, tmp_path: Path) -> None:
    path = saved(vit(), tmp_path)
    with pytest.raises(InputError, match=rf"has no projection head \({names}.*leave head=true out"):
        sl.load_encoder(f"{source}:{path}?heads={HEADS}&head=true")
    with pytest.raises(InputError, match="head=yes is neither true nor false"):
        sl.load_encoder(f"{source}:{path}?heads={HEADS}&head=yes")


def test_a_classifier_is_no_projection_head(tmp_path: Path) -> None:
    path = saved({"model": vit(seed=1, classes=5) | {"pos_embed": BASE["pos_embed"]}}, tmp_path)
    with pytest.raises(InputError, match="has no projection head"):
        sl.load_encoder(f"moco_v3:{path}?heads={HEADS}&head=true")
