"""Checkpoints of the official MoCo-v3: `moco_v3:FILE`, with the options which (base, momentum), heads, size and head.

{'epoch', 'arch', 'state_dict', 'optimizer', 'scaler'}      training: module.base_encoder. and .momentum_encoder.
{'epoch', 'arch', 'state_dict', 'best_acc1', 'optimizer'}   linear probe, the classifier as module.head
{'model'}                                                   made with convert_to_deit.py: the encoder alone
"""

from collections.abc import Mapping

from sightline.encoders.files.reading import Checkpoint, tensors, without_prefix
from sightline.encoders.layouts.layout import Layout, with_head
from sightline.encoders.layouts.resnet import holds_resnet, vit_or_resnet_layout
from sightline.encoders.layouts.vit import ModelState, Official, bare, choose, holds_vit, unwrapped
from sightline.encoders.modules.projection import Trained, mlp_layers
from sightline.encoders.modules.vit import by_sincos, is_sincos

TITLE = "MoCo-v3"
EXAMPLE = "moco_v3:vit-b-300ep.pth.tar"
OPTIONS = ("which", "heads", "size", "head")
OFFICIAL = Official(TITLE, {384: 12, 768: 12, 1024: 16, 1280: 16}, "bilinear", by_sincos)


def recognizes(checkpoint: Checkpoint) -> str:
    state = unwrapped(tensors(checkpoint.content, "state_dict"))
    if all(any(name.startswith(f"{prefix}.") for name in state) for prefix in ("base_encoder", "momentum_encoder")):
        return "it has base_encoder and momentum_encoder"
    one = bare(checkpoint).state
    if holds_vit(one) and is_sincos(one["pos_embed"][:, 1:], column_first=False):
        return "its positions are MoCo-v3's sine-cosine, row first"
    return ""


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    """The encoder in a checkpoint, and its projector and predictor with `head=true`."""
    part = _part(checkpoint, options)
    encoder = vit_or_resnet_layout(checkpoint, part, OFFICIAL, options)
    return with_head(encoder, options, lambda: _head(checkpoint, part))


def _part(checkpoint: Checkpoint, options: Mapping[str, str]) -> ModelState:
    state = unwrapped(tensors(checkpoint.content, "state_dict"))
    encoders = {which: without_prefix(state, f"{which}_encoder.") for which in ("base", "momentum")}
    which, notes = choose(options, encoders)
    if which is None:
        return bare(checkpoint)
    predictor = tuple(name for name in state if name.startswith("predictor."))
    return ModelState(encoders[which], f"state_dict, {which}_encoder.", True, predictor, notes)


def _head(checkpoint: Checkpoint, part: ModelState) -> dict[str, tuple[Trained, ...]]:
    """The projector is the classifier of a ViT, or of a ResNet; the predictor sees the base encoder's alone."""
    prefix = "fc." if holds_resnet(part.state) else "head."
    projector = without_prefix(part.state, prefix)
    if "0.weight" not in projector:  # the file ends with the encoder, or with a classifier
        return {prefix: ()}
    layers = {prefix: mlp_layers(projector, "projector", "relu")}
    if part.where.endswith("base_encoder."):
        predictor = without_prefix(unwrapped(tensors(checkpoint.content, "state_dict")), "predictor.")
        layers["predictor."] = mlp_layers(predictor, "predictor", "relu")
    return layers
