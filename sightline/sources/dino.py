"""Checkpoints of the official DINO: `dino:FILE`, with the options which (teacher, student), heads and size.

{'student', 'teacher', 'optimizer', 'epoch', 'args', 'dino_loss'}   training, each with backbone. and head.
a bare state dict                                                   released: the teacher's backbone alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sightline.encoder import Encoder, Reference
from sightline.layouts import Layout, open_layout
from sightline.positions import by_scale
from sightline.reading import Checkpoint, tensors, without_prefix
from sightline.resnet_layout import vit_or_resnet_layout
from sightline.vit_layout import Official, Part, bare, choose, unwrapped

TITLE = "DINO"
EXAMPLE = "dino:dino_vitbase16_pretrain_full_checkpoint.pth"
OPTIONS = ("which", "heads", "size")
OFFICIAL = Official(TITLE, {192: 3, 384: 6, 768: 12, 1024: 16}, "bicubic", by_scale)


def names() -> list[str]:
    """Any file that the official code wrote."""
    return ["FILE"]


def load(reference: Reference) -> Encoder:
    """The encoder in a file, of a training the teacher."""
    return open_layout(reference, layout, OPTIONS)


def recognizes(checkpoint: Checkpoint) -> str:
    """By what a file is surely DINO's."""
    sides = [unwrapped(tensors(checkpoint.content, side)) for side in ("student", "teacher")]
    wanted = ("backbone.", "head.last_layer.")
    if all(any(name.startswith(prefix) for name in state) for state in sides for prefix in wanted):
        return "it has student and teacher, each with backbone and head.last_layer"
    return ""


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    """The encoder in a checkpoint."""
    return vit_or_resnet_layout(checkpoint, _part(checkpoint, options), OFFICIAL, options)


def _part(checkpoint: Checkpoint, options: Mapping[str, str]) -> Part:
    sides = {side: unwrapped(tensors(checkpoint.content, side)) for side in ("teacher", "student")}
    which, notes = choose(options, sides)
    part = bare(checkpoint) if which is None else Part(sides[which], which, True, notes=notes)
    backbone = without_prefix(part.state, "backbone.")
    if not backbone:
        return part
    head = tuple(name for name in part.state if not name.startswith("backbone."))
    return replace(part, state=backbone, where=f"{part.where}, backbone.".removeprefix(", "), beside=head)
