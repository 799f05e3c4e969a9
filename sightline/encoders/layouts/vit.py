"""The ViT that MAE, MoCo-v3, DINO and MSN share: timm's VisionTransformer under timm's names.

Width, depth, patch, image size and classes are read off the tensors. No tensor gives the number of heads, how positions
are resized and what images the model wants to see: that is what an `Official` knows.

N patches on a grid of rows × columns, D width.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from sightline.core.errors import InputError, some
from sightline.encoders.files.reading import Checkpoint, printable, tensors, without_prefix
from sightline.encoders.layouts.layout import Layout, architecture, mlp_ratio, size_option
from sightline.encoders.modules.positions import Resize
from sightline.images.preprocess import Preprocess

# Weights by which a ViT is known, and their numbers of axes.
MARKS = {"cls_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "blocks.0.attn.qkv.weight": 2}
WEIGHTS = re.compile(
    r"cls_token|pos_embed|"
    r"(patch_embed\.proj|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])|norm|fc_norm|head)\.(weight|bias)"
)
# What a plain ViT does not have, and would have to compute with.
FOREIGN = ("blocks.", "dist_token", "reg_token", "register_tokens", "norm_pre.")


@dataclass(frozen=True)
class Official:
    """What the official code of a format knows and its files do not say."""

    title: str
    heads: Mapping[int, int]  # of each width
    interpolation: str  # of images in the evaluation
    resize: Resize  # of positions


@dataclass(frozen=True, eq=False)
class ModelState:
    """An encoder's state dict in a checkpoint, and what lies beside it."""

    state: Mapping[str, Tensor]
    where: str = ""  # "teacher, backbone."
    training: bool = False  # whether it comes with what it was trained with
    beside: tuple[str, ...] = ()  # weights that belong to it, but not to the encoder
    notes: tuple[str, ...] = ()


# Where the encoder is


def bare(checkpoint: Checkpoint) -> ModelState:
    """A file that holds one model: under `model`, under `state_dict` or by itself, with or without `module.`"""
    for key in ("model", "state_dict"):
        if state := tensors(checkpoint.content, key):
            return ModelState(unwrapped(state), key)
    return ModelState(unwrapped(tensors(checkpoint.content)))


def unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the prefix of DistributedDataParallel.

    >>> list(unwrapped({"module.norm.weight": torch.ones(1)}))
    ['norm.weight']
    """
    return without_prefix(state, "module.") or dict(state)


def holds_vit(state: Mapping[str, Tensor]) -> bool:
    """Whether the weights are those of a ViT with CLS token and absolute positions."""
    known = all(mark in state and state[mark].ndim == axes for mark, axes in MARKS.items())
    return known and state["pos_embed"].shape[1] > 1


def no_encoder(checkpoint: Checkpoint, title: str, wanted: str) -> InputError:
    """The sentence for a file in which the format has nothing to load."""
    names = [printable(str(name), 60) for name in checkpoint.content]
    return InputError(
        f"{str(checkpoint.path)!r} holds no encoder of {title} ({wanted}), but {some(names, most=4)}; "
        "is it another kind of checkpoint?"
    )


def refuse_foreign(
    checkpoint: Checkpoint, state: Mapping[str, Tensor], title: str, foreign: tuple[str, ...], known: re.Pattern[str]
) -> None:
    """Refuse an encoder with weights under the prefixes `foreign` that the format does not know: it computes more."""
    for name in state:
        if name.startswith(foreign) and not known.fullmatch(name):
            raise InputError(
                f"{str(checkpoint.path)!r} has {printable(name, 60)}, which the ViT of {title} does not have; "
                "is it another kind of checkpoint?"
            )


# What it is


def vit_layout(checkpoint: Checkpoint, part: ModelState, official: Official, options: Mapping[str, str]) -> Layout:
    """The layout of a ViT: its measures, weights and preprocessing."""
    _check_names(checkpoint, part.state, official.title)
    state = {name: value for name, value in part.state.items() if WEIGHTS.fullmatch(name)}
    if "fc_norm.weight" in state:  # the norm of the mean of all patches; that of the tokens is not used then
        state = {name: value for name, value in state.items() if not name.startswith("norm.")}
    width, patch = state["cls_token"].shape[-1], state["patch_embed.proj.weight"].shape[-1]
    state["pos_embed"], size = resized_positions(state["pos_embed"], patch, size_option(options), official.resize)
    classes = state["head.weight"].shape[0] if "head.weight" in state else 0
    hidden = state["blocks.0.mlp.fc1.weight"].shape[0] if "blocks.0.mlp.fc1.weight" in state else 4 * width
    measures: dict[str, Any] = {
        "embed_dim": width,
        "depth": len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        "num_heads": heads_option(options, "heads", width, official.heads, official.title),
        "patch_size": patch,
        "img_size": f"({size[0]},{size[1]})",
        "num_classes": classes,
        "global_pool": "avg" if "fc_norm.weight" in state else "token",
    } | ({} if hidden == 4 * width else {"mlp_ratio": mlp_ratio(hidden, width)})
    return Layout(
        format=f"{official.title}, {kind(part, classes)}",
        architecture=architecture("vit_base_patch16_224", measures),
        state=state,
        preprocess=evaluation(size, official.interpolation),
        part=part.where,
        left_over=(*(name for name in part.state if name not in state), *part.beside),
        notes=part.notes,
        resize=official.resize,
    )


def _check_names(checkpoint: Checkpoint, state: Mapping[str, Tensor], title: str) -> None:
    """Refuse what is no plain ViT: one with more layers or tokens would compute something else."""
    if any(name.startswith(("patch_embed.proj.0.", "patch_embed.stem.")) for name in state):
        raise InputError(
            f"{str(checkpoint.path)!r} is a ViT with a convolutional stem, which Sightline cannot build; "
            "choose a model with a patch embedding"
        )
    if not holds_vit(state):
        raise no_encoder(checkpoint, title, f"a ViT with {', '.join(MARKS)}")
    refuse_foreign(checkpoint, state, title, FOREIGN, WEIGHTS)


def kind(part: ModelState, classes: int) -> str:
    """What kind of file it is, in words."""
    return "training checkpoint" if part.training else "with classifier" if classes else "encoder only"


def evaluation(size: tuple[int, int], interpolation: str, margin: bool = True) -> Preprocess:
    """ImageNet's evaluation: 224 pixels out of 256, and any other size in this proportion, or without a margin.

    >>> evaluation((224, 224), "bicubic").resize, evaluation((64, 96), "bicubic").resize
    (256, (73, 109))
    """
    height, width = (side * 256 // 224 if margin else side for side in size)
    return Preprocess(size, height if height == width else (height, width), interpolation)


def resized_positions(
    positions: Tensor, patch: int, size: tuple[int, int] | None, resize: Resize
) -> tuple[Tensor, tuple[int, int]]:  # (1, 1 + N, D), and the size of the images
    """Positions for images of a size, their own if none is asked for."""
    n = positions.shape[1] - 1
    side = isqrt(n)
    size = size or (side * patch, side * patch)
    rows, columns = size[0] // patch, size[1] // patch
    if size != (rows * patch, columns * patch):
        raise InputError(
            f"Images of {size[0]} × {size[1]} pixels cannot be cut into patches of {patch}; choose multiples for size"
        )
    if rows * columns == n and (rows == columns or side**2 != n):
        return positions, size
    if side**2 != n:
        raise InputError(
            f"The file has positions of {n} patches, which are not a square; write ?size=HEIGHTxWIDTH with the size in "
            "pixels of the images that it was trained on"
        )
    patches = positions[:, 1:].float().reshape(1, side, side, -1).permute(0, 3, 1, 2)  # (1, D, side, side)
    resized = resize(patches, (rows, columns)).flatten(2).transpose(1, 2)  # (1, N, D)
    return torch.cat([positions[:, :1].float(), resized], 1), size


# Options


def heads_option(options: Mapping[str, str], option: str, width: int, known: Mapping[int, int], title: str) -> int:
    """Number of heads: the option's, or that of the official model of this width.

    >>> heads_option({}, "heads", 384, {384: 12}, "MoCo-v3"), heads_option({"heads": "6"}, "heads", 384, {}, "MAE")
    (12, 6)
    """
    if option not in options:
        if width not in known:
            sizes = ", ".join(f"{heads} at width {size}" for size, heads in known.items())
            raise InputError(
                f"No tensor gives the number of heads, and {title} has no official model of width {width} "
                f"({sizes}); write ?{option}=NUMBER"
            )
        return known[width]
    text = options[option]
    if not text.isdecimal() or int(text) < 1 or width % int(text):
        raise InputError(f"{option}={text} cannot split a width of {width}; give a number that divides it")
    return int(text)


def choose(
    options: Mapping[str, str], encoders: Mapping[str, Mapping[str, Tensor]]
) -> tuple[str | None, tuple[str, ...]]:
    """Which of the encoders of a training checkpoint, and a note on the others; None if the file has none of them.

    The first is the one that the official evaluation takes.
    """
    present = [name for name, state in encoders.items() if state]
    which = options.get("which", present[0] if present else None)
    if which is not None and which not in present:
        has = f"the file has {' and '.join(present)}" if present else "the file has one encoder; leave which out"
        raise InputError(f"which={which} cannot be chosen: {has}")
    return which, tuple(f"the file also has {name}; write which={name} for it" for name in present if name != which)
