"""Checkpoints of the official ConvNeXt-V2: `convnext_v2:FILE`, with the options which (model, ema) and size.

{'model', 'optimizer', 'epoch', 'scaler', 'args'}                  FCMAE; model has a sparse encoder. and a decoder
{'model'}                                                          released: the encoder, dense
{'model', 'optimizer', 'epoch', 'scaler', 'args'[, 'model_ema']}   fine-tuned, with norm and head

A sparse convolution keeps its kernel as (k², in, out), or (k², channels) if it is depthwise, with the columns of the
kernel one after the other, and its bias as (1, out).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt

import torch
from torch import Tensor

from sightline.core.errors import InputError
from sightline.encoders.files.reading import Checkpoint, without_prefix
from sightline.encoders.layouts.beit import model_or_average
from sightline.encoders.layouts.layout import Layout, size_option
from sightline.encoders.layouts.timm import convnext_layout
from sightline.encoders.layouts.vit import ModelState, Official, evaluation, no_encoder
from sightline.encoders.modules.positions import by_size
from sightline.images.preprocess import Preprocess

TITLE = "ConvNeXt-V2"
EXAMPLE = "convnext_v2:convnextv2_base_1k_224_fcmae.pt"
OPTIONS = ("which", "size")
OFFICIAL = Official(TITLE, {}, "bicubic", by_size)
RENAMES = {  # official names, and timm's
    r"^downsample_layers\.0\.": "stem.",
    r"^downsample_layers\.(\d)\.": r"stages.\1.downsample.",
    r"^stages\.(\d)\.(\d+)\.": r"stages.\1.blocks.\2.",
    r"\.(ln|linear)\.": ".",
    r"\.kernel$": ".weight",
    r"\.dwconv\.": ".conv_dw.",
    r"\.pwconv": ".mlp.fc",
    r"\.grn\.gamma$": ".mlp.grn.weight",
    r"\.grn\.beta$": ".mlp.grn.bias",
    r"^norm\.": "head.norm.",
    r"^head\.(?=weight|bias)": "head.fc.",
}
# Weights by which it is known, under timm's names, and their numbers of axes.
MARKS = {"stem.0.weight": 4, "stages.0.blocks.0.mlp.fc1.weight": 2} | {
    f"stages.{stage}.blocks.0.conv_dw.bias": 1 for stage in range(4)
}
NO_NORM = "FCMAE trains no final norm: the site norm is the mean over all places, normed without weights"


def recognizes(checkpoint: Checkpoint) -> str:
    marks = {"stages.0.0.dwconv.bias", "stages.0.0.grn.gamma"}
    return "it has stages with dwconv and grn" if marks <= set(_part(checkpoint, {}).state) else ""


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    part = _part(checkpoint, options)
    official = {_name(name): name for name in part.state}
    state = {ours: _value(name, part.state[name]) for ours, name in official.items()}
    _check(checkpoint, state)
    notes = part.notes
    if "head.norm.weight" not in state and "head.fc.weight" not in state:
        width = len(state["stages.3.blocks.0.conv_dw.bias"])
        state |= {"head.norm.weight": torch.ones(width), "head.norm.bias": torch.zeros(width)}
        notes = (*notes, NO_NORM)
    encoder = convnext_layout(replace(part, state=state, notes=notes), OFFICIAL, options)
    return replace(
        encoder,
        preprocess=_preprocess(checkpoint, options, 8 * state["stem.0.weight"].shape[-1]),
        left_over=(*(official[name] for name in encoder.left_over), *part.beside),
    )


def _part(checkpoint: Checkpoint, options: Mapping[str, str]) -> ModelState:
    part = model_or_average(checkpoint, options)
    encoder = without_prefix(part.state, "encoder.")
    if not encoder:
        return part
    beside = tuple(name for name in part.state if not name.startswith("encoder."))
    return replace(
        part, state=encoder, where=f"{part.where}, encoder.".removeprefix(", "), training=True, beside=beside
    )


def _name(name: str) -> str:
    """timm's name of a weight.

    >>> _name("stages.2.5.pwconv1.linear.bias"), _name("downsample_layers.1.1.kernel")
    ('stages.2.blocks.5.mlp.fc1.bias', 'stages.1.downsample.1.weight')
    """
    for official, ours in RENAMES.items():
        name = re.sub(official, ours, name)
    return name


def _value(name: str, value: Tensor) -> Tensor:
    """The weight in the shape of a dense layer."""
    if name.endswith(".kernel") and value.ndim in (2, 3) and (side := isqrt(len(value))) ** 2 == len(value):
        value = value if value.ndim == 3 else value.unsqueeze(1)  # (k², in, out), depthwise (k², 1, channels)
        return value.permute(2, 1, 0).reshape(*value.shape[:0:-1], side, side).mT  # (out, in, k, k)
    return value.flatten() if name.endswith(("bias", "grn.gamma", "grn.beta")) else value


def _check(checkpoint: Checkpoint, state: Mapping[str, Tensor]) -> None:
    if not all(mark in state and state[mark].ndim == axes for mark, axes in MARKS.items()):
        raise no_encoder(checkpoint, TITLE, "downsample_layers, and four stages with dwconv, pwconv1 and pwconv2")
    if not any(".grn." in name for name in state) or any(name.endswith(".gamma") for name in state):
        raise InputError(
            f"{str(checkpoint.path)!r} is a ConvNeXt of another version, without global response norm (grn) or with "
            "layer scale (gamma); name its architecture: timm:convnext_base@FILE"
        )


def _preprocess(checkpoint: Checkpoint, options: Mapping[str, str], stride: int) -> Preprocess:
    """No tensor tells the size of the images; the arguments of a training do."""
    trained = checkpoint.arguments.get("input_size")
    side = trained if isinstance(trained, int) else 224
    size = size_option(options) or (side, side)
    if min(size) < stride:
        raise InputError(
            f"Images of {size[0]} × {size[1]} pixels are too small for a total stride of {stride}; choose a larger size"
        )
    if min(size) >= 384:  # the official evaluation then squeezes all of the image into the square
        return Preprocess(size, size)
    return evaluation(size, "bicubic")
