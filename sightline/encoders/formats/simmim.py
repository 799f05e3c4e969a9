"""Checkpoints of the official SimMIM with a ViT: `simmim:FILE`, with the options size and heads.

{'model', 'optimizer', 'lr_scheduler', 'max_accuracy', 'epoch', 'config'}   training; model has encoder. and decoder.0.
{'model'}                                                                   released
{'model', …}                                                                fine-tuned: no encoder., with a classifier
"""

from collections.abc import Mapping
from functools import partial

from sightline.core.errors import InputError
from sightline.encoders.files.reading import Checkpoint, without_prefix
from sightline.encoders.layouts.beit import beit_layout, holds_beit
from sightline.encoders.layouts.layout import Layout
from sightline.encoders.layouts.vit import ModelState, bare, evaluation

TITLE = "SimMIM"
EXAMPLE = "simmim:simmim_pretrain__vit_base__img224__800ep.pth"
OPTIONS = ("size", "heads")


def recognizes(checkpoint: Checkpoint) -> str:
    """By what a file is surely SimMIM's; what it fine-tuned has the names and shapes of BEiT's."""
    state = bare(checkpoint).state
    if {"encoder.mask_token", "encoder.patch_embed.proj.weight"} <= set(state):
        return "it has encoder.mask_token"
    if (known := holds_beit(state)) and any(name.startswith("MODEL.VIT.") for name in checkpoint.arguments):
        return f"it has {known} and settings MODEL.VIT"
    return ""


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    part = _part(checkpoint)
    if any(name.startswith("layers.0.blocks.") for name in part.state):
        raise InputError(
            f"{str(checkpoint.path)!r} is SimMIM with a Swin Transformer, which Sightline does not read from official "
            "files; choose one with a ViT"
        )
    return beit_layout(checkpoint, part, options, TITLE, partial(evaluation, interpolation="bicubic"))


def _part(checkpoint: Checkpoint) -> ModelState:
    part = bare(checkpoint)
    encoder = without_prefix(part.state, "encoder.")
    if not encoder:
        return part
    beside = tuple(name for name in part.state if not name.startswith("encoder."))
    return ModelState(encoder, f"{part.where}, encoder.".removeprefix(", "), bool(beside), beside)
