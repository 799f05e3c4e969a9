"""BEiT's official checkpoints: every site equal to the official model's, all kinds of file, other sizes of image."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.official_beit import (
    CLASSES,
    GRID,
    HEADS,
    PATCH,
    SHARED,
    SIZE,
    WIDTH,
    check,
    finetuned,
    own,
    resized_table,
    weights,
)
from torch import Tensor
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.encoders.files.reading import Checkpoint
from sightline.encoders.formats import beit
from sightline.encoders.layouts.layout import recognized
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder

HALF, IMAGENET = (0.5, 0.5, 0.5), (0.485, 0.456, 0.406)


def pretrained() -> dict[str, Tensor]:
    return weights() | {"lm_head.weight": torch.randn(11, WIDTH), "lm_head.bias": torch.randn(11)}


def absolute() -> dict[str, Tensor]:
    """With absolute positions and no relative ones."""
    return without(pretrained(), "relative") | weights(shared=False, positions=True)


def second() -> dict[str, Tensor]:
    """BEiT-2 trains two more blocks on top of an earlier one."""
    more = {name.replace("blocks.", "cls_pt_layers."): value for name, value in weights().items() if "blocks." in name}
    return pretrained() | more


def checkpoint(content: dict[str, Any], **arguments: Any) -> Checkpoint:
    return Checkpoint(Path("some.pth"), "PyTorch (zip)", content, arguments)


def saved(folder: Path, content: dict[str, Any]) -> Path:
    torch.save(content, folder / "some.pth")
    return folder / "some.pth"


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(weights(), id="shared table"),
        pytest.param(weights(shared=False, per_block=True), id="tables of blocks"),
        pytest.param(weights(per_block=True, positions=True), id="all positions"),
        pytest.param(weights(shared=False, positions=True), id="absolute positions"),
        pytest.param(finetuned(), id="mean pooling"),
        pytest.param(weights(shared=False, per_block=True, classes=CLASSES), id="classifier on CLS"),
    ],
)
def test_every_site_is_the_official_models(tmp_path, state):
    """The tables, where there are any, tell the heads."""
    heads = "" if any("relative" in name for name in state) else f"?heads={HEADS}"
    encoder = load_encoder(f"beit:{saved(tmp_path, {'model': state})}{heads}")
    assert (encoder.family, encoder.depth, encoder.heads, encoder.patch) == ("beit", 2, HEADS, PATCH)
    assert encoder.preprocess.size == (SIZE, SIZE)
    check(encoder, state)


def without(state: dict[str, Tensor], *words: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not any(word in name for word in words)}


def test_without_layer_scale_and_biases(tmp_path):
    """Both are options of the official code; without them is as with ones and zeros."""
    full = weights()
    ones = {name: torch.ones(WIDTH) for name in full if "gamma" in name}
    zeros = {name: torch.zeros(WIDTH) for name in full if name.endswith(("q_bias", "v_bias"))}
    state = without(full, "gamma", "q_bias", "v_bias")
    check(load_encoder(f"beit:{saved(tmp_path, state)}"), full | ones | zeros)


def test_width_of_the_mlp(tmp_path):
    state = weights()
    for name in [name for name in state if "mlp" in name]:
        state[name] = state[name][:, :49] if name.endswith("fc2.weight") else state[name][:49]
    check(load_encoder(f"beit:{saved(tmp_path, state)}"), state)


def test_training_checkpoint(tmp_path):
    content = {"model": pretrained(), "optimizer": {"state": {}}, "epoch": 3, "args": Namespace(model="beit_base")}
    encoder = load_encoder(f"beit:{saved(tmp_path, content)}")
    check(encoder, weights())
    assert encoder.name == "some"
    assert encoder.notes == [
        "3 weights of the file are not part of the encoder and were left out: mask_token, lm_head.weight, lm_head.bias"
    ]


def test_which_model(tmp_path):
    """`module` is DeepSpeed's name of the model; the moving average is there on request."""
    average = {name: 0.9 * value if value.is_floating_point() else value for name, value in finetuned().items()}
    path = saved(tmp_path, {"module": finetuned(), "model_ema": average})
    encoder = load_encoder(f"beit:{path}")
    check(encoder, finetuned())
    assert "the file also has ema; write which=ema for it" in encoder.notes
    check(load_encoder(f"beit:{path}?which=ema"), average)


def test_prefix_of_several_devices(tmp_path):
    state = {f"module.{name}": value for name, value in finetuned().items()}
    check(load_encoder(f"beit:{saved(tmp_path, {'model': state})}"), finetuned())


def test_classifier_is_kept(tmp_path):
    encoder = load_encoder(f"beit:{saved(tmp_path, {'model': finetuned()})}")
    assert encoder(torch.zeros(1, 3, SIZE, SIZE)).shape == (1, CLASSES)
    assert "head.0" in encoder.sites
    assert "norm" not in encoder.sites  # of the mean of patches, which is no site


@pytest.mark.parametrize("size", ["", "?size=20", "?size=16x24"])
def test_saved_and_loaded_again(tmp_path, size):
    encoder = load_encoder(f"beit:{saved(tmp_path, {'model': finetuned()})}{size}")
    again = load_encoder(f"run:{save_encoder(encoder, tmp_path / 'run')}")
    assert (again.weights, again.preprocess, list(again.sites)) == (
        encoder.weights,
        encoder.preprocess,
        list(encoder.sites),
    )
    images = torch.randn(2, 3, *encoder.preprocess.size)
    assert torch.equal(again(images), encoder(images))


# Preprocessing


@pytest.mark.parametrize(
    ("content", "arguments", "options", "mean"),
    [
        ({"model": pretrained()}, {}, {}, HALF),
        ({"model": finetuned()}, {}, {}, HALF),
        ({"model": finetuned()}, {"imagenet_default_mean_and_std": False}, {}, HALF),
        ({"model": finetuned()}, {"imagenet_default_mean_and_std": True}, {}, IMAGENET),
        ({"model": finetuned()}, {}, {"imagenet_default_mean_and_std": "true"}, IMAGENET),
        ({"model": second()}, {}, {}, IMAGENET),
        ({"model": second()}, {"imagenet_default_mean_and_std": False}, {}, HALF),
    ],
)
def test_normalisation(content, arguments, options, mean):
    found = beit.layout(checkpoint(content, **arguments), options)
    assert found.preprocess.mean == mean
    assert found.preprocess.interpolation == "bicubic"
    unsure = "lm_head.weight" not in content["model"] and not arguments and not options
    assert any("BEiT-2 and SimMIM want ImageNet's mean" in note for note in found.notes) == unsure


def test_second_version():
    found = beit.layout(checkpoint({"model": second()}), {})
    assert found.format == "BEiT-2, training checkpoint"
    assert "cls_pt_layers.0.gamma_1" in found.left_over
    assert not any("index" in name for name in found.left_over)  # of the relative positions: no weights


@pytest.mark.parametrize(
    ("size", "resize"), [("224", 256), ("64", 73), ("224x112", (256, 128)), ("384", 384), ("384x448", (384, 448))]
)
def test_images_are_resized_as_in_the_official_evaluation(size, resize):
    """256 for 224, and no margin from 384 on."""
    assert beit.layout(checkpoint(weights()), {"size": size}).preprocess.resize == resize


# Other sizes of image


@pytest.mark.parametrize("size", [(16, 16), (20, 16), (8, 8)])
@pytest.mark.parametrize("positions", [False, True])
def test_sites_at_another_size(tmp_path, size, positions):
    """Equal to the official model with tables from FITPACK, the shared one cloned into every block."""
    state = weights(positions=positions)
    encoder = load_encoder(f"beit:{saved(tmp_path, {'model': state})}?size={size[0]}x{size[1]}")
    grid = (size[0] // PATCH, size[1] // PATCH)
    assert (encoder.preprocess.size, encoder.tokens.grid) == (size, grid)
    table = resized_table(state[SHARED], *grid)
    wanted = without(state, "rel_pos_bias") | {own(0): table, own(1): table}
    if positions:
        patches = state["pos_embed"][:, 1:].view(1, GRID, GRID, WIDTH).permute(0, 3, 1, 2)
        patches = F.interpolate(patches, size=grid, mode="bicubic", align_corners=False)
        wanted["pos_embed"] = torch.cat([state["pos_embed"][:, :1], patches.flatten(2).mT], 1)
    check(encoder, wanted)


def test_own_size_changes_nothing(tmp_path):
    path = saved(tmp_path, {"model": weights(per_block=True)})
    assert load_encoder(f"beit:{path}?size={SIZE}").weights == load_encoder(f"beit:{path}").weights


# What is told apart, and what is refused


@pytest.mark.parametrize(
    ("content", "arguments", "formats"),
    [
        ({"model": pretrained()}, {}, {"beit": "it has relative positions and lm_head"}),
        (
            {"model": finetuned()},
            {"model": "beit_large_patch16_224"},
            {"beit": "it has relative positions and was trained as beit_large_patch16_224"},
        ),
        ({"module": finetuned()}, {}, {}),
        ({"model": absolute()}, {}, {"beit": "it has absolute positions, q_bias and v_bias and lm_head"}),
        (
            {"model": without(absolute(), "lm_head")},
            {"model": "beit_base_patch16_224"},
            {"beit": "it has absolute positions, q_bias and v_bias and was trained as beit_base_patch16_224"},
        ),
        (
            {"model": without(absolute(), "lm_head")},
            {"MODEL.VIT.USE_APE": True},
            {"simmim": "it has absolute positions, q_bias and v_bias and settings MODEL.VIT"},
        ),
        ({"model": without(absolute(), "lm_head")}, {}, {}),
        ({"model": absolute()}, {"model": "eva_g_patch14"}, {}),  # its code comes from BEiT's, its images do not
        ({"model": without(absolute(), "q_bias", "v_bias")}, {}, {}),  # as DeiT III, whose qkv has one bias
        ({"model": finetuned()}, {"model": "vit_base"}, {}),
        (
            {"model": finetuned()},
            {"MODEL.TYPE": "vit", "MODEL.VIT.DEPTH": 2},
            {"simmim": "it has relative positions and settings MODEL.VIT"},
        ),
        (
            {"model": {f"encoder.{name}": value for name, value in weights().items()}},
            {},
            {"simmim": "it has encoder.mask_token"},
        ),
        ({"model": without(pretrained(), "relative")}, {}, {}),
        ({"lm_head.weight": torch.zeros(2, 2)}, {}, {}),
        ({"model": 3}, {}, {}),
        ({}, {}, {}),
    ],
)
def test_told_apart(content, arguments, formats):
    """What BEiT and SimMIM fine-tuned has the same names and shapes."""
    assert recognized(checkpoint(content, **arguments)) == formats


INDEX = SHARED.replace("bias_table", "index")


def shuffled() -> dict[str, Tensor]:
    return weights() | {INDEX: weights()[INDEX].mT}


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (finetuned(), {"which": "ema"}, "which=ema cannot be chosen"),
        (finetuned(), {"which": "teacher"}, "which=teacher cannot be chosen"),
        (finetuned(), {"heads": "4"}, "heads=4, but the tables of relative positions have 3; leave it out"),
        (finetuned(), {"heads": "5"}, "heads=5 cannot split a width of 24"),
        (finetuned(), {"size": "14"}, "14 × 14 pixels cannot be cut into patches of 4; choose multiples"),
        (finetuned(), {"size": "big"}, "size=big is not a size"),
        (finetuned(), {"imagenet_default_mean_and_std": "yes"}, "=yes is neither true nor false"),
        (without(weights(positions=True), "relative"), {}, "no official model of width 24"),
        (without(weights(), "relative"), {}, "has no positions or relative positions of one square"),
        (weights() | {SHARED: torch.zeros(27, HEADS)}, {}, "has no positions or relative positions of one square"),
        (weights() | {"pos_embed": torch.zeros(1, 17, WIDTH)}, {}, "relative positions of one square of patches"),
        (weights(per_block=True) | {SHARED: torch.zeros(28)}, {}, "relative positions of one square of patches"),
        (weights() | {"cls_token": torch.tensor(0.0)}, {}, "'some.pth' holds no encoder of BEiT"),
        (shuffled(), {}, r"in an unknown order \(relative_position_index\)"),
        (weights() | {INDEX: torch.zeros(2, 2, dtype=torch.long)}, {}, "in an unknown order"),
        (
            weights() | {"blocks.0.attn.qkv.bias": torch.zeros(3 * WIDTH)},
            {},
            "has blocks.0.attn.qkv.bias, which the ViT of BEiT does not have",
        ),
        ({"weight": torch.zeros(2)}, {}, "'some.pth' holds no encoder of BEiT"),
        (
            without(weights(), "index") | {SHARED: torch.zeros(12, HEADS)},
            {"size": "24"},
            "too small for a cubic spline",
        ),
    ],
)
def test_errors(state, options, message):
    with pytest.raises(InputError, match=message) as error:
        beit.layout(checkpoint({"model": state}), options)
    assert "\n" not in str(error.value)


def test_a_missing_weight_and_an_unknown_option(tmp_path):
    path = saved(tmp_path, {"model": without(weights(), "blocks.1.gamma_2")})
    with pytest.raises(InputError, match=r"read as BEiT, encoder only, lacks 1 of \d+ weights .*blocks.1.gamma_2"):
        load_encoder(f"beit:{path}")
    with pytest.raises(InputError, match="unknown option 'sise'; did you mean 'size'"):
        load_encoder(f"beit:{path}?sise=3")
