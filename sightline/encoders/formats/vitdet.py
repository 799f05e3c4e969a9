"""Checkpoints of detectron2's ViTDet: `vitdet:FILE`, with the options size, heads and window.

{'model'[, 'optimizer', 'scheduler', 'iteration', 'trainer']}   a detector, whose ViT is backbone.net.
{'model', '__author__', …}                                      the same as a pickle of arrays: released (.pkl)

The ViT has no CLS token, whose position is still there, and no final norm. Most blocks attend within windows, with
tables of relative positions of 2 · window − 1 rows; the others have tables for the whole image, which are the longest.

D width, d width of a head, N patches.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.encoders.files.reading import Checkpoint, without_prefix
from sightline.encoders.layouts.layout import Layout, architecture, mlp_ratio, size_option
from sightline.encoders.layouts.vit import (
    ModelState,
    bare,
    evaluation,
    heads_option,
    kind,
    no_encoder,
    refuse_foreign,
    resized_positions,
)
from sightline.encoders.modules.positions import by_size

TITLE = "ViTDet"
EXAMPLE = "vitdet:model_final_61ccd1.pkl"
OPTIONS = ("size", "heads", "window")
HEADS = {768: 12, 1024: 16, 1280: 16}
PATCHES = 64  # on a side of the image, where no table tells: 1024 pixels in patches of 16
MARKS = {"patch_embed.proj.weight": 4, "blocks.0.attn.qkv.weight": 2, "blocks.0.mlp.fc1.weight": 2}
WEIGHTS = re.compile(
    r"pos_embed|blocks\.\d+\.attn\.rel_pos_[hw]|"
    r"(patch_embed\.proj|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12]))\.(weight|bias)"
)
FOREIGN = ("blocks.", "patch_embed.", "cls_token", "norm.", "neck.", "head.")  # what would have to be computed with


def recognizes(checkpoint: Checkpoint) -> str:
    part = _part(checkpoint)
    others = any(name.startswith("neck.") or ".attn.pool" in name for name in part.state)  # SAM's ViT, MViT
    if not _holds_vit(part.state) or others:
        return ""
    if "blocks.0.attn.rel_pos_h" in part.state:
        return "it has a ViT with rel_pos_h and rel_pos_w"
    pyramid = any(name.startswith("backbone.simfp_") for name in part.beside)
    return "it has a ViT in backbone.net and a pyramid in backbone.simfp" if pyramid else ""


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    """The ViT in a checkpoint, for images of the size of its training or another."""
    part = _part(checkpoint)
    if not _holds_vit(part.state):
        raise no_encoder(checkpoint, TITLE, f"a ViT with {', '.join(MARKS)}")
    refuse_foreign(checkpoint, part.state, TITLE, FOREIGN, WEIGHTS)
    state = {name: value for name, value in part.state.items() if WEIGHTS.fullmatch(name)}
    width, _, _, patch = state["patch_embed.proj.weight"].shape
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    tables = [tuple(state.get(f"blocks.{i}.attn.rel_pos_{side}") for side in "hw") for i in range(depth)]
    relative = tables[0][0] is not None
    windows = _windows_of(tables, options) if relative else _windows_asked_for(depth, options)
    size = size_option(options) or _size(tables[windows.index(0)], patch)
    positions, size = resized_positions(_with_cls(state.get("pos_embed"), width), patch, size, by_size)
    if "pos_embed" in state:
        state["pos_embed"] = positions[:, 1:]
    for i in (i for i, window in enumerate(windows) if relative and not window):
        for side, pixels in zip("hw", size, strict=True):
            name = f"blocks.{i}.attn.rel_pos_{side}"
            state[name] = resized_table(state[name], pixels // patch)
    head = state["blocks.0.attn.rel_pos_h"].shape[1] if relative else 0
    hidden = state["blocks.0.mlp.fc1.weight"].shape[0]
    measures: dict[str, Any] = {
        "embed_dim": width,
        "depth": depth,
        "num_heads": width // head if head else heads_option(options, "heads", width, HEADS, TITLE),
        "patch_size": patch,
        "img_size": f"({size[0]},{size[1]})",
        "num_classes": 0,
        "class_token": False,
        "global_pool": "avg",
        "final_norm": False,
        "windows": f"({','.join(map(str, windows))},)",
        "rel_pos": relative,
    }
    measures |= {} if "pos_embed" in state else {"pos_embed": "none"}
    measures |= {} if hidden == 4 * width else {"mlp_ratio": mlp_ratio(hidden, width)}
    return Layout(
        format=f"{TITLE}, {kind(part, 0)}",
        architecture=architecture("vit_base_patch16_224", measures),
        state=state,
        preprocess=evaluation(size, "bilinear", margin=False),
        part=part.where,
        left_over=(*(name for name in part.state if name not in state), *part.beside),
        notes=part.notes,
    )


def resized_table(table: Tensor, patches: int) -> Tensor:  # (2s − 1, d) -> (2 · patches − 1, d)
    """A table of relative positions for another number of patches, by linear interpolation.

    >>> resized_table(torch.tensor([[0.0], [4.0], [8.0]]), 3).flatten()
    tensor([0.0000, 1.6000, 4.0000, 6.4000, 8.0000])
    """
    rows = 2 * patches - 1
    return table if len(table) == rows else F.interpolate(table.float().T.unsqueeze(0), size=rows, mode="linear")[0].T


def _part(checkpoint: Checkpoint) -> ModelState:
    """The ViT of a detector, of its backbone, or by itself."""
    part = bare(checkpoint)
    for prefix in ("backbone.net.", "net."):
        if state := without_prefix(part.state, prefix):
            beside = tuple(name for name in part.state if not name.startswith(prefix))
            where = f"{part.where}, {prefix}".removeprefix(", ")
            return replace(part, state=state, where=where, training=True, beside=beside)
    return part


def _holds_vit(state: Mapping[str, Tensor]) -> bool:
    return all(mark in state and state[mark].ndim == axes for mark, axes in MARKS.items())


def _windows_of(tables: Sequence[tuple[Tensor | None, ...]], options: Mapping[str, str]) -> list[int]:
    """Side of the windows of each block, 0 for the whole image, as the lengths of the tables tell it."""
    if "window" in options:
        raise InputError("The tables of relative positions in the file tell the windows; leave window out")
    sides = [(len(down) + 1) // 2 for down, across in tables if down is not None and across is not None]
    if len(sides) < len(tables):
        raise InputError(f"Only {len(sides)} of {len(tables)} blocks have relative positions; is the file damaged?")
    return [0 if side == max(sides) else side for side in sides]


def _windows_asked_for(depth: int, options: Mapping[str, str]) -> list[int]:
    """The same where no table tells it: officially the last block of each quarter sees the whole image."""
    text = options.get("window", "")
    if not text.isdecimal():
        raise InputError(
            "The file has no relative positions, whose tables would tell the windows of its attention; write "
            "?window=14, where all blocks but the last of each quarter have windows, or ?window=0 for none"
        )
    if int(text) and depth % 4:
        raise InputError(f"{depth} blocks have no quarters, so window={text} cannot be used; choose window=0")
    return [0 if (i + 1) % max(1, depth // 4) == 0 else int(text) for i in range(depth)]


def _size(tables: Sequence[Tensor | None], patch: int) -> tuple[int, int]:
    """Size in pixels of the images of the training: distances reach over all of their patches."""
    height, width = (patch * (PATCHES if table is None else (len(table) + 1) // 2) for table in tables)
    return height, width


def _with_cls(positions: Tensor | None, width: int) -> Tensor:  # (1, 1 + N, D)
    """Positions with the row of the CLS token in front, which not every pre-training leaves there."""
    if positions is None:
        return torch.zeros(1, 2, width)
    none = isqrt(positions.shape[1]) ** 2 == positions.shape[1]
    return torch.cat([torch.zeros_like(positions[:, :1]), positions], 1) if none else positions
