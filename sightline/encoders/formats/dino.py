"""Checkpoints of the official DINO: `dino:FILE`, with the options which (teacher, student), heads, size and head.

{'student', 'teacher', 'optimizer', 'epoch', 'args', 'dino_loss'}   training, each with backbone. and head.
a bare state dict                                                   released: the teacher's backbone alone
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sightline.encoders.files.reading import Checkpoint, tensors, without_prefix
from sightline.encoders.layouts.layout import Layout, with_head
from sightline.encoders.layouts.resnet import vit_or_resnet_layout
from sightline.encoders.layouts.vit import ModelState, Official, bare, choose, unwrapped
from sightline.encoders.modules.positions import by_scale
from sightline.encoders.modules.projection import Trained, mlp_layers, unit_layer

TITLE = "DINO"
EXAMPLE = "dino:dino_vitbase16_pretrain_full_checkpoint.pth"
OPTIONS = ("which", "heads", "size", "head")
OFFICIAL = Official(TITLE, {192: 3, 384: 6, 768: 12, 1024: 16}, "bicubic", by_scale)


def recognizes(checkpoint: Checkpoint) -> str:
    sides = [unwrapped(tensors(checkpoint.content, side)) for side in ("student", "teacher")]
    wanted = ("backbone.", "head.last_layer.")
    if all(any(name.startswith(prefix) for name in state) for state in sides for prefix in wanted):
        return "it has student and teacher, each with backbone and head.last_layer"
    return ""


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    """The encoder in a checkpoint, and its head with `head=true`."""
    side = _side(checkpoint, options)
    encoder = vit_or_resnet_layout(checkpoint, _backbone(side), OFFICIAL, options)
    return with_head(encoder, options, lambda: _head(without_prefix(side.state, "head.")))


def _side(checkpoint: Checkpoint, options: Mapping[str, str]) -> ModelState:
    """Teacher or student, each a backbone with a head; or what else the file holds."""
    sides = {side: unwrapped(tensors(checkpoint.content, side)) for side in ("teacher", "student")}
    which, notes = choose(options, sides)
    return bare(checkpoint) if which is None else ModelState(sides[which], which, True, notes=notes)


def _backbone(part: ModelState) -> ModelState:
    backbone = without_prefix(part.state, "backbone.")
    if not backbone:
        return part
    head = tuple(name for name in part.state if not name.startswith("backbone."))
    return replace(part, state=backbone, where=f"{part.where}, backbone.".removeprefix(", "), beside=head)


def _head(state: Mapping[str, Tensor]) -> dict[str, tuple[Trained, ...]]:
    """The projection to the bottleneck, and the weight-normed last layer, g v/‖v‖."""
    if not state.keys() >= {"last_layer.weight_g", "last_layer.weight_v"}:
        return {"head.mlp.": (), "head.last_layer.": ()}
    last = torch._weight_norm(state["last_layer.weight_v"].float(), state["last_layer.weight_g"].float())
    mlp = mlp_layers(without_prefix(state, "mlp."), "projector", "gelu")
    return {"head.mlp.": mlp, "head.last_layer.": (unit_layer(last),)}
