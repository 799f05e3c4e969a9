"""State dicts of timm itself: ViTs with registers, layer scale or without CLS, and ConvNeXts, by names and shapes.

N patches, P prefix tokens (CLS, registers), D width.
"""

import re
from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from sightline.core.errors import InputError, counted
from sightline.encoders.layouts.layout import Layout, architecture, mlp_ratio, size_option
from sightline.encoders.layouts.vit import ModelState, Official, evaluation, heads_option, kind

VIT = re.compile(
    r"cls_token|reg_token|pos_embed|blocks\.\d+\.ls[12]\.gamma|"
    r"(patch_embed\.proj|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])|norm|fc_norm|head)\.(weight|bias)"
)
CONVNEXT = re.compile(
    r"stages\.\d+\.blocks\.\d+\.gamma|"
    r"(stem\.[01]|stages\.\d+\.(downsample\.[01]|blocks\.\d+\.(conv_dw|norm|mlp\.(fc[12]|grn)))|head\.(norm|fc))"
    r"\.(weight|bias)"
)
# What belongs to an encoder: a weight here that is not known would compute something.
ENCODER = ("blocks.", "stages.", "stem.", "patch_embed.", "norm_pre.", "attn_pool.", "dist_token")


def holds_vit_of_timm(state: Mapping[str, Tensor]) -> bool:
    """Whether the weights are those of a ViT, be it one with tokens or layers that not every ViT has."""
    marks = {"pos_embed": 3, "patch_embed.proj.weight": 4, "blocks.0.attn.qkv.weight": 2, "blocks.0.mlp.fc1.weight": 2}
    return all(mark in state and state[mark].ndim == axes for mark, axes in marks.items())


def timm_vit_layout(part: ModelState, official: Official, options: Mapping[str, str]) -> Layout:
    """The layout of a ViT with timm's names; DINOv2's registers, which have another, get theirs."""
    state = dict(part.state)
    if "register_tokens" in state and "cls_token" in state:  # DINOv2 has a position for CLS, timm's registers none
        state["reg_token"] = state.pop("register_tokens")
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]
    state, left_over = _told_apart(state, VIT, official.title)
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    prefix = registers + ("cls_token" in state)
    rows, width = state["pos_embed"].shape[1:]
    only_patches = isqrt(rows) ** 2 == rows
    side = isqrt(rows if only_patches else max(rows - prefix, 0))
    if side < 1 or side**2 != (rows if only_patches else rows - prefix):
        raise InputError(
            f"The file has {counted(rows, 'position')}, not those of a square of patches; use timm:NAME@FILE"
        )
    patch = state["patch_embed.proj.weight"].shape[-1]
    classes = state["head.weight"].shape[0] if "head.weight" in state else 0
    measures: dict[str, Any] = {
        "embed_dim": width,
        "depth": len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        "num_heads": heads_option(options, "heads", width, official.heads, official.title),
        "patch_size": patch,
        "img_size": f"({side * patch},{side * patch})",
        "num_classes": classes,
        "mlp_ratio": mlp_ratio(state["blocks.0.mlp.fc1.weight"].shape[0], width),
        "class_token": "cls_token" in state,
        "reg_tokens": registers,
        "no_embed_class": only_patches,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "fc_norm": "fc_norm.weight" in state,
        "global_pool": "token" if "cls_token" in state and "fc_norm.weight" not in state else "avg",
    }
    return _layout("vit_base_patch16_224", measures, state, left_over, part, official, (side * patch, side * patch))


def holds_convnext(state: Mapping[str, Tensor]) -> bool:
    """Whether the weights are those of timm's ConvNeXt, of either version."""
    return "stem.0.weight" in state and "stages.0.blocks.0.conv_dw.weight" in state


def convnext_layout(part: ModelState, official: Official, options: Mapping[str, str]) -> Layout:
    """The layout of a ConvNeXt with timm's names."""
    state, left_over = _told_apart(part.state, CONVNEXT, official.title)
    stages = sorted({name.split(".")[1] for name in state if name.startswith("stages.")})
    blocks = [{name.split(".")[3] for name in state if name.startswith(f"stages.{s}.blocks.")} for s in stages]
    widths = [state[f"stages.{s}.blocks.0.conv_dw.bias"].shape[0] for s in stages]
    first = "stages.0.blocks.0"
    measures: dict[str, Any] = {
        "depths": f"({','.join(str(len(names)) for names in blocks)})",
        "dims": f"({','.join(map(str, widths))})",
        "patch_size": state["stem.0.weight"].shape[-1],
        "conv_mlp": state[f"{first}.mlp.fc1.weight"].ndim == 4,
        "num_classes": state["head.fc.weight"].shape[0] if "head.fc.weight" in state else 0,
    }
    name = "convnextv2_tiny" if f"{first}.mlp.grn.weight" in state else "convnext_tiny"
    return _layout(name, measures, state, left_over, part, official, size_option(options) or (224, 224))


def _told_apart(
    weights: Mapping[str, Tensor], known: re.Pattern[str], title: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights that are known, and the names of the others."""
    others = tuple(name for name in weights if not known.fullmatch(name))
    for name in others:
        if name.startswith(ENCODER):
            raise InputError(f"The file has {name}, which not every {title} has; name its architecture: timm:NAME@FILE")
    return {name: value for name, value in weights.items() if name not in others}, others


def _layout(
    name: str,
    measures: Mapping[str, Any],
    state: Mapping[str, Tensor],
    left_over: tuple[str, ...],
    part: ModelState,
    official: Official,
    size: tuple[int, int],
) -> Layout:
    return Layout(
        format=f"{official.title}, {kind(part, measures['num_classes'])}",
        architecture=architecture(name, measures),
        state=state,
        preprocess=evaluation(size, official.interpolation),
        part=part.where,
        left_over=left_over,
        notes=part.notes,
    )
