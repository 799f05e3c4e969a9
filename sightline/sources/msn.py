"""Checkpoints of the official MSN: `msn:FILE`, with the options which (target, anchor), heads and size.

{'encoder', 'opt', 'prototypes', 'target_encoder', 'epoch', …}   training: anchor and target encoder
{'prototypes', 'target_encoder'}                                 released: the target encoder
"""

from __future__ import annotations

from collections.abc import Mapping

from sightline.encoder import Encoder, Reference
from sightline.layouts import Layout, open_layout
from sightline.reading import Checkpoint, tensors
from sightline.vit_layout import Official, Part, bare, by_size, choose, unwrapped, vit_layout

TITLE = "MSN"
EXAMPLE = "msn:vits16_800ep.pth.tar"
OPTIONS = ("which", "heads", "size")
ENCODERS = {"target": "target_encoder", "anchor": "encoder"}
# The official scale √(n/N) is the ratio of the sides of the grids, as in a resize by size.
OFFICIAL = Official(TITLE, {192: 3, 384: 6, 768: 12, 1024: 16}, "bilinear", by_size)


def names() -> list[str]:
    """Any file that the official code wrote."""
    return ["FILE"]


def load(reference: Reference) -> Encoder:
    """The encoder in a file, of a training the target encoder."""
    return open_layout(reference, layout, OPTIONS)


def recognizes(checkpoint: Checkpoint) -> str:
    """By what a file is surely MSN's."""
    if "prototypes" not in checkpoint.content or not tensors(checkpoint.content, ENCODERS["target"]):
        return ""
    trained = tensors(checkpoint.content, ENCODERS["anchor"])
    return f"it has prototypes{', encoder' if trained else ''} and target_encoder"


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    """The encoder in a checkpoint."""
    encoders = {which: unwrapped(tensors(checkpoint.content, key)) for which, key in ENCODERS.items()}
    which, notes = choose(options, encoders)
    if which is None:
        return vit_layout(checkpoint, bare(checkpoint), OFFICIAL, options)
    beside = ("prototypes",) if "prototypes" in checkpoint.content else ()
    part = Part(encoders[which], ENCODERS[which], True, beside, notes)
    return vit_layout(checkpoint, part, OFFICIAL, options)
