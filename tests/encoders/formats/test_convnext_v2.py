"""ConvNeXt-V2's official checkpoints: sparse, dense and fine-tuned, every site equal to the official model's."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.encoders.encoder import Encoder
from sightline.encoders.files.reading import Checkpoint
from sightline.encoders.formats import convnext_v2
from sightline.encoders.formats.convnext_v2 import NO_NORM
from sightline.encoders.layouts.layout import Layout
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder
from sightline.encoders.watching import capture
from sightline.images.preprocess import Preprocess

DIMS, DEPTHS, CLASSES, SIZE = (4, 6, 8, 10), (1, 2, 1, 1), 5, 64


def sparse() -> dict[str, Tensor]:
    """Random weights of FCMAE's encoder under its names."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) * 0.3

    def norm(name: str, width: int) -> dict[str, Tensor]:
        return {f"{name}.weight": 1 + normal(width), f"{name}.bias": normal(width)}

    def linear(name: str, outputs: int, inputs: int) -> dict[str, Tensor]:
        return {f"{name}.weight": normal(outputs, inputs), f"{name}.bias": normal(outputs)}

    stem = "downsample_layers.0"
    state = {f"{stem}.0.weight": normal(DIMS[0], 3, 4, 4), f"{stem}.0.bias": normal(DIMS[0])} | norm(
        f"{stem}.1", DIMS[0]
    )
    for stage, (width, depth) in enumerate(zip(DIMS, DEPTHS, strict=True)):
        if stage:
            down, before = f"downsample_layers.{stage}", DIMS[stage - 1]
            state |= norm(f"{down}.0.ln", before)
            state |= {f"{down}.1.kernel": normal(4, before, width), f"{down}.1.bias": normal(1, width)}
        for block in range(depth):
            name = f"stages.{stage}.{block}"
            state |= {f"{name}.dwconv.kernel": normal(49, width), f"{name}.dwconv.bias": normal(1, width)}
            state |= norm(f"{name}.norm.ln", width)
            state |= linear(f"{name}.pwconv1.linear", 4 * width, width)
            state |= linear(f"{name}.pwconv2.linear", width, 4 * width)
            state |= {f"{name}.grn.gamma": normal(1, 4 * width), f"{name}.grn.beta": normal(1, 4 * width)}
    return state


def dense(classes: int = 0) -> dict[str, Tensor]:
    """The same weights as the official code has them after FCMAE, one by one."""
    state = {}
    for name, value in sparse().items():
        name = name.replace(".ln.", ".").replace(".linear.", ".")
        if name.endswith(".kernel"):
            side = round(len(value) ** 0.5)
            weight = torch.empty(value.shape[-1], value.shape[1] if value.ndim == 3 else 1, side, side)
            for row in range(side):
                for column in range(side):
                    weight[:, :, row, column] = value[column * side + row].reshape(-1, value.shape[-1]).T
            state[name.replace(".kernel", ".weight")] = weight
        elif "grn" in name:
            state[name] = value.view(1, 1, 1, -1)
        else:
            state[name] = value.flatten() if name.endswith("bias") else value
    if classes:
        random = torch.Generator().manual_seed(1)
        shapes = {"norm.weight": (10,), "norm.bias": (10,), "head.weight": (classes, 10), "head.bias": (classes,)}
        state |= {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return state


def activations(weights: dict[str, Tensor], images: Tensor) -> dict[str, Tensor]:
    """What the official model computes with sparse weights if nothing is hidden, in float64, by site."""
    state = {name: value.double() for name, value in weights.items()}

    def norm(name: str, x: Tensor) -> Tensor:  # over the last axis
        scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    x = F.conv2d(images.double(), state["downsample_layers.0.0.weight"], state["downsample_layers.0.0.bias"], stride=4)
    x = norm("downsample_layers.0.1", x.permute(0, 2, 3, 1))  # (B, h, w, C)
    found, number = {"embed": x}, 0
    for stage, depth in enumerate(DEPTHS):
        if stage:
            x = norm(f"downsample_layers.{stage}.0.ln", x)
            kernel = state[f"downsample_layers.{stage}.1.kernel"]
            places = [(row, column) for column in (0, 1) for row in (0, 1)]
            x = sum(x[:, row::2, column::2] @ kernel[at] for at, (row, column) in enumerate(places))
            x = x + state[f"downsample_layers.{stage}.1.bias"]
        for block in range(depth):
            name = f"stages.{stage}.{block}"
            padded, (height, width) = F.pad(x, (0, 0, 3, 3, 3, 3)), x.shape[1:3]
            kernel = state[f"{name}.dwconv.kernel"]
            places = [(row, column) for column in range(7) for row in range(7)]
            shifted = (
                padded[:, row : row + height, column : column + width] * kernel[at]
                for at, (row, column) in enumerate(places)
            )
            norm1 = norm(f"{name}.norm.ln", sum(shifted) + state[f"{name}.dwconv.bias"])
            fc1 = linear(f"{name}.pwconv1.linear", norm1)
            y = fc1 * (1 + torch.erf(fc1 / 2**0.5)) / 2
            size = y.square().sum((1, 2), keepdim=True).sqrt()
            y = (
                state[f"{name}.grn.gamma"] * (y * size / (size.mean(-1, keepdim=True) + 1e-6))
                + state[f"{name}.grn.beta"]
                + y
            )
            mlp = linear(f"{name}.pwconv2.linear", y)
            x = x + mlp
            sites = {".norm1": norm1, ".fc1": fc1, ".mlp": mlp, ".residual": mlp, "": x}
            found |= {f"block.{number}{site}": value for site, value in sites.items()}
            number += 1
    found = {site: value.permute(0, 3, 1, 2) for site, value in found.items()}
    found["norm"] = norm("norm", x.mean((1, 2)))
    if "head.weight" in state:
        found["head.0"] = linear("head", found["norm"])
    return found


def check(encoder: Encoder, weights: dict[str, Tensor]) -> None:
    images = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    wanted = activations(weights, images)
    with torch.no_grad(), capture(encoder, "**") as found:
        output = encoder(images)
    assert set(found) == set(wanted)
    found["norm"] = found["norm"].flatten(1)
    for site, value in found.items():
        torch.testing.assert_close(
            value.double(), wanted[site], rtol=1e-5, atol=1e-5, msg=lambda m, s=site: f"{s}: {m}"
        )
    assert torch.equal(output, found.get("head.0", found["norm"]))


UNTRAINED = {"norm.weight": torch.ones(10), "norm.bias": torch.zeros(10)}


def fcmae() -> dict[str, Tensor]:
    decoder = ("mask_token", "proj.weight", "decoder.0.dwconv.weight", "decoder.0.grn.gamma", "pred.weight")
    return {f"encoder.{name}": value for name, value in sparse().items()} | {name: torch.zeros(2) for name in decoder}


def saved(folder: Path, content: dict[str, Any]) -> Path:
    torch.save(content, folder / "some.pth")
    return folder / "some.pth"


@pytest.mark.parametrize("prefix", ["", "module."])
def test_sparse_kernels(tmp_path, prefix):
    state = {prefix + name: value for name, value in fcmae().items()}
    encoder = load_encoder(f"convnext_v2:{saved(tmp_path, {'model': state, 'args': Namespace(input_size=SIZE)})}")
    check(encoder, sparse() | UNTRAINED)
    assert (encoder.family, encoder.depth) == ("convnext", sum(DEPTHS))
    assert encoder.notes == [
        NO_NORM,
        "5 weights of the file are not part of the encoder and were left out: "
        "mask_token, proj.weight, decoder.0.dwconv.weight, …",
    ]
    assert encoder.preprocess == Preprocess((SIZE, SIZE), resize=73)


def test_released_encoder(tmp_path):
    encoder = load_encoder(f"convnext_v2:{saved(tmp_path, {'model': dense()})}")
    check(encoder, sparse() | UNTRAINED)
    assert encoder.notes == [NO_NORM]
    assert encoder.preprocess == Preprocess((224, 224), resize=256)


def test_fine_tuned_with_its_classifier(tmp_path):
    state = dense(CLASSES)
    average = {name: 0.9 * value for name, value in state.items()}
    path = saved(tmp_path, {"model": state, "model_ema": average, "args": Namespace(input_size=SIZE)})
    encoder = load_encoder(f"convnext_v2:{path}")
    head = {name: value for name, value in state.items() if name.startswith(("norm.", "head."))}
    check(encoder, sparse() | head)
    assert encoder.notes == ["the file also has ema; write which=ema for it"]
    check(
        load_encoder(f"convnext_v2:{path}?which=ema"), {name: 0.9 * value for name, value in (sparse() | head).items()}
    )


def test_saved_and_loaded_again(tmp_path):
    encoder = load_encoder(f"convnext_v2:{saved(tmp_path, {'model': dense(CLASSES)})}?size={SIZE}")
    again = load_encoder(f"run:{save_encoder(encoder, tmp_path / 'run')}")
    assert (again.weights, again.preprocess) == (encoder.weights, encoder.preprocess)
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(again(images), encoder(images))


def layout(state: dict[str, Tensor], **options: str) -> Layout:
    return convnext_v2.layout(Checkpoint(Path("some.pth"), "", {"model": state}, {}), options)


def test_what_it_is():
    found = layout(fcmae())
    assert (found.format, found.part) == ("ConvNeXt-V2, training checkpoint", "model, encoder.")
    assert layout(dense()).format == "ConvNeXt-V2, encoder only"
    assert layout(dense(CLASSES)).format == "ConvNeXt-V2, with classifier"
    wanted = "timm:convnextv2_tiny@random?depths=(1,2,1,1)&dims=(4,6,8,10)&patch_size=4&conv_mlp=False&num_classes=5"
    assert layout(dense(CLASSES)).architecture == wanted


@pytest.mark.parametrize(
    ("size", "resize"), [("224", 256), ("288", 329), ("96x64", (109, 73)), ("384", (384, 384)), ("512", (512, 512))]
)
def test_images_are_resized_as_in_the_official_evaluation(size, resize):
    """256 for 224; from 384 on the whole image is squeezed into the square."""
    preprocess = layout(dense(), size=size).preprocess
    assert (preprocess.resize, preprocess.interpolation) == (resize, "bicubic")


def test_recognized():
    for state in (fcmae(), dense(), dense(CLASSES)):
        given = Checkpoint(Path("some.pth"), "", {"model": state}, {})
        assert convnext_v2.recognizes(given) == "it has stages with dwconv and grn"
    assert convnext_v2.recognizes(Checkpoint(Path("some.pth"), "", {"model": first_version()}, {})) == ""
    assert convnext_v2.recognizes(Checkpoint(Path("some.pth"), "", {}, {})) == ""


def first_version() -> dict[str, Tensor]:
    return {name: value for name, value in dense().items() if "grn" not in name}


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in dense(CLASSES).items() if key != name}


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (first_version(), {}, "'some.pth' is a ConvNeXt of another version, without global response norm"),
        (dense() | {"stages.0.0.gamma": torch.zeros(4)}, {}, "'some.pth' is a ConvNeXt of another version"),
        (dense() | {"stages.0.0.scale": torch.zeros(4)}, {}, "has stages.0.blocks.0.scale"),
        ({"weight": torch.zeros(2)}, {}, "'some.pth' holds no encoder of ConvNeXt-V2"),
        (without("stages.2.0.dwconv.bias"), {}, "'some.pth' holds no encoder of ConvNeXt-V2"),
        (dense(), {"size": "31"}, "31 × 31 pixels are too small for a total stride of 32"),
        (dense(), {"which": "ema"}, "which=ema cannot be chosen: the file has model"),
    ],
)
def test_errors(state, options, message):
    with pytest.raises(InputError, match=message) as error:
        layout(state, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["norm.bias", "stages.1.1.grn.beta"])
def test_a_missing_weight(tmp_path, name):
    """Of a classifier also the norm before it."""
    with pytest.raises(InputError, match=r"read as ConvNeXt-V2, with classifier, lacks 1 of \d+ weights"):
        load_encoder(f"convnext_v2:{saved(tmp_path, {'model': without(name)})}")
