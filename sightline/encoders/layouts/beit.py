"""BEiT's ViT, which SimMIM has too: timm's Beit, whose names are the official ones.

timm's Beit computes what the official model does: k has no bias, a shared table of relative positions and those of the
blocks add up, a classifier sees fc_norm(mean of patches) or the CLS token of norm(x). The index of relative positions
is no weight; timm makes its own, to which the file's must be equal.

Images of another size need other tables (`positions.resize_table`). The official code first gives a copy of a shared
table to every block, to be fine-tuned apart; the bias is the same, and here it stays shared.

D width, H heads, patches on a grid of g × g, R = (2g − 1)² + 3 rows of a table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from typing import Any

import torch
from timm.models.beit import gen_relative_position_index
from torch import Tensor

from sightline.core.errors import InputError
from sightline.encoders.files.reading import Checkpoint, tensors
from sightline.encoders.layouts.layout import Layout, architecture, mlp_ratio, size_option
from sightline.encoders.layouts.vit import (
    ModelState,
    bare,
    choose,
    heads_option,
    kind,
    no_encoder,
    refuse_foreign,
    resized_positions,
    unwrapped,
)
from sightline.encoders.modules.positions import by_size, resize_table
from sightline.images.preprocess import Preprocess

TABLE, INDEX = "relative_position_bias_table", "relative_position_index"
SHARED, OWN = f"rel_pos_bias.{TABLE}", f"blocks.0.attn.{TABLE}"
BIASES = {"blocks.0.attn.q_bias", "blocks.0.attn.v_bias"}  # elsewhere q, k and v have one bias, qkv.bias
# Weights by which it is known, and their numbers of axes.
MARKS = {"cls_token": 3, "patch_embed.proj.weight": 4, "blocks.0.attn.qkv.weight": 2, "blocks.0.mlp.fc1.weight": 2}
WEIGHTS = re.compile(
    rf"cls_token|pos_embed|(rel_pos_bias|blocks\.\d+\.attn)\.{TABLE}|"
    r"blocks\.\d+\.(gamma_[12]|attn\.([qv]_bias|qkv\.weight))|"
    r"(patch_embed\.proj|blocks\.\d+\.(norm[12]|attn\.proj|mlp\.fc[12])|norm|fc_norm|head)\.(weight|bias)"
)
FOREIGN = ("blocks.", "dist_token", "norm_pre.")  # a weight here that is not known would compute something
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16}  # of each width, for a file without tables


def model_or_average(checkpoint: Checkpoint, options: Mapping[str, str]) -> ModelState:
    """The weights under `model`, or DeepSpeed's `module`, or with which=ema their moving average."""
    keys = {"model": "module" if "module" in checkpoint.content else "model", "ema": "model_ema"}
    which, notes = choose(options, {name: tensors(checkpoint.content, key) for name, key in keys.items()})
    if which is None:
        return bare(checkpoint)
    return ModelState(unwrapped(tensors(checkpoint.content, keys[which])), keys[which], notes=notes)


def holds_beit(state: Mapping[str, Tensor]) -> str:
    """By what the weights are those of BEiT's ViT: tables of relative positions, a shared one or one in each block, or
    biases for q and v alone, which a Beit with absolute positions has as well; "" if by nothing.
    """
    if not _has_marks(state):
        return ""
    if SHARED in state or OWN in state:
        return "relative positions"
    return "absolute positions, q_bias and v_bias" if {"pos_embed", *BIASES} <= set(state) else ""


def _has_marks(state: Mapping[str, Tensor]) -> bool:
    return all(mark in state and state[mark].ndim == axes for mark, axes in MARKS.items())


def beit_layout(
    checkpoint: Checkpoint,
    part: ModelState,
    options: Mapping[str, str],
    title: str,
    evaluation: Callable[[tuple[int, int]], Preprocess],
) -> Layout:
    """The layout of a Beit; `evaluation` is the official preprocessing for images of a size."""
    _check_names(checkpoint, part.state, title)
    state = {name: value for name, value in part.state.items() if WEIGHTS.fullmatch(name)}
    pooled = "fc_norm.weight" in state
    if pooled:  # the official model then has no norm over tokens
        state = {name: value for name, value in state.items() if not name.startswith("norm.")}
    width, patch = state["cls_token"].shape[-1], state["patch_embed.proj.weight"].shape[-1]
    grid = _grid(checkpoint, part.state)
    size = size_option(options) or (grid * patch, grid * patch)
    classes = state["head.weight"].shape[0] if "head.weight" in state else 0
    hidden = state["blocks.0.mlp.fc1.weight"].shape[0]
    measures: dict[str, Any] = {
        "embed_dim": width,
        "depth": len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        "num_heads": _heads(state, options, width, title),
        "mlp_ratio": mlp_ratio(hidden, width),
        "patch_size": patch,
        "img_size": f"({size[0]},{size[1]})",
        "num_classes": classes,
        "global_pool": "avg" if pooled else "token",
        "qkv_bias": "blocks.0.attn.q_bias" in state,
        "init_values": 0.1 if "blocks.0.gamma_1" in state else 0,
        "use_abs_pos_emb": "pos_embed" in state,
        "use_rel_pos_bias": OWN in state,
        "use_shared_rel_pos_bias": SHARED in state,
    }
    left_over = [name for name in part.state if name not in state and not name.endswith(INDEX)]
    return Layout(
        format=f"{title}, {kind(part, classes)}",
        architecture=architecture("beit_base_patch16_224", measures),
        state=_resized(state, grid, patch, size),
        preprocess=evaluation(size),
        part=part.where,
        left_over=(*left_over, *part.beside),
        notes=part.notes,
    )


def _check_names(checkpoint: Checkpoint, state: Mapping[str, Tensor], title: str) -> None:
    """Refuse what is no Beit: one with more in its blocks, or with more tokens, would compute something else."""
    if not _has_marks(state):
        raise no_encoder(checkpoint, title, f"a ViT with {', '.join(MARKS)}")
    refuse_foreign(
        checkpoint, {name: value for name, value in state.items() if not name.endswith(INDEX)}, title, FOREIGN, WEIGHTS
    )


def _heads(state: Mapping[str, Tensor], options: Mapping[str, str], width: int, title: str) -> int:
    """The columns of the tables, or what is known of the width."""
    tables = [state[name] for name in (SHARED, OWN) if name in state]
    known = {width: tables[0].shape[1]} if tables else HEADS
    heads = heads_option(options, "heads", width, known, title)
    if tables and heads != known[width]:
        raise InputError(f"heads={heads}, but the tables of relative positions have {known[width]}; leave it out")
    return heads


def _grid(checkpoint: Checkpoint, state: Mapping[str, Tensor]) -> int:
    """Patches on a side, from the rows of the tables or the number of positions, which must agree."""
    rows = {value.shape[0] if value.ndim == 2 else 0 for name, value in state.items() if name.endswith(TABLE)}
    tokens = {value.shape[1] if value.ndim == 3 else 0 for name, value in state.items() if name == "pos_embed"}
    grid = isqrt(max(tokens | {1}) - 1) if tokens else (isqrt(max(rows | {3}) - 3) + 1) // 2
    if not grid or rows - {(2 * grid - 1) ** 2 + 3} or tokens - {grid**2 + 1}:
        raise InputError(
            f"{str(checkpoint.path)!r} has no positions or relative positions of one square of patches, which would "
            "tell the size of its images; is it another kind of checkpoint?"
        )
    if not _in_official_order([value for name, value in state.items() if name.endswith(INDEX)], grid):
        raise InputError(
            f"{str(checkpoint.path)!r} has relative positions in an unknown order ({INDEX}), which Sightline cannot "
            "build; is it another kind of checkpoint?"
        )
    return grid


def _in_official_order(indices: Sequence[Tensor], grid: int) -> bool:
    if not all(index.shape == (grid**2 + 1, grid**2 + 1) for index in indices):
        return False
    official = gen_relative_position_index((grid, grid)) if indices else torch.empty(0)
    return all(bool((index == official).all()) for index in indices)


# Other sizes of image


def _resized(state: dict[str, Tensor], grid: int, patch: int, size: tuple[int, int]) -> dict[str, Tensor]:
    """The weights for images of a size; those of the file are for grid × grid patches."""
    new = (size[0] // patch, size[1] // patch)
    if size != (new[0] * patch, new[1] * patch):
        raise InputError(
            f"Images of {size[0]} × {size[1]} pixels cannot be cut into patches of {patch}; choose multiples for size"
        )
    if new == (grid, grid):
        return state
    resized = {name: resize_table(value, new) if name.endswith(TABLE) else value for name, value in state.items()}
    if "pos_embed" in state:
        resized["pos_embed"], _ = resized_positions(state["pos_embed"], patch, size, by_size)
    return resized
