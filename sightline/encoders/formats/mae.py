"""Checkpoints of the official MAE: `mae:FILE`, with the options heads, size, decoder and decoder_heads.

{'model', 'optimizer', 'epoch', 'scaler', 'args'}   training; model is encoder and decoder
{'model'}                                           released: the encoder alone
{'model', …}                                        fine-tuned (head, fc_norm instead of norm), or linear probe
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.encoders.files.reading import Checkpoint
from sightline.encoders.layouts.layout import Layout, load_exactly
from sightline.encoders.layouts.vit import (
    ModelState,
    Official,
    bare,
    evaluation,
    heads_option,
    holds_vit,
    resized_positions,
    vit_layout,
)
from sightline.encoders.modules.positions import by_size
from sightline.encoders.modules.vit import is_sincos

TITLE = "MAE"
EXAMPLE = "mae:mae_pretrain_vit_base.pth"
OPTIONS = ("heads", "size", "decoder", "decoder_heads")
OFFICIAL = Official(TITLE, {768: 12, 1024: 16, 1280: 16}, "bicubic", by_size)
DECODER_HEADS = {512: 16}
FINE_TUNING = {"finetune", "global_pool", "nb_classes"}  # arguments that together only MAE's fine-tuning has
# Names of the decoder's weights: theirs, and those of `objectives.mae.Decoder`.
DECODER = {
    "decoder_embed.": "embed.",
    "mask_token": "mask_token",
    "decoder_pos_embed": "pos_embed",
    "decoder_blocks.": "blocks.",
    "decoder_norm.": "norm.",
    "decoder_pred.": "pred.",
}


def recognizes(checkpoint: Checkpoint) -> str:
    state = bare(checkpoint).state
    if not holds_vit(state):
        return ""
    if "decoder_embed.weight" in state and "decoder_pred.weight" in state:
        return "it has a ViT with decoder_embed and decoder_pred"
    if is_sincos(state["pos_embed"][:, 1:], column_first=True):
        return "its positions are MAE's sine-cosine, column first"
    return "its arguments are those of MAE's fine-tuning" if set(checkpoint.arguments) >= FINE_TUNING else ""


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    """The encoder in a checkpoint, and its decoder with `decoder=true`."""
    part = bare(checkpoint)
    part = replace(part, training="decoder_embed.weight" in part.state)
    encoder = vit_layout(checkpoint, _with_plain_head(part), OFFICIAL, options)
    if max(size := encoder.preprocess.size) > 224:  # MAE evaluates larger images without a margin
        encoder = replace(encoder, preprocess=evaluation(size, OFFICIAL.interpolation, margin=False))
    return _with_decoder(encoder, part, options) if _wants_decoder(options) else encoder


def _with_plain_head(part: ModelState) -> ModelState:
    """Linear probes have a BatchNorm without parameters before the classifier; here the classifier takes it in.

    W (x − μ)/√(σ² + ε) + b  =  W' x + b − W' μ        W' = W/√(σ² + ε)
    """
    probe = [f"head.{name}" for name in ("0.running_mean", "0.running_var", "1.weight", "1.bias")]
    if not part.state.keys() >= set(probe):
        return part
    state = {name: value for name, value in part.state.items() if not name.startswith("head.")}
    mean, variance, weight, bias = (part.state[name].double() for name in probe)
    weight = weight * (variance + 1e-6).rsqrt()
    state |= {"head.weight": weight.float(), "head.bias": (bias - weight @ mean).float()}
    return replace(
        part, state=state, notes=(*part.notes, "the BatchNorm of the linear probe is part of the classifier")
    )


# The decoder


def _wants_decoder(options: Mapping[str, str]) -> bool:
    wanted = options.get("decoder", "false")
    if wanted not in ("true", "false"):
        raise InputError(f"decoder={wanted} is neither true nor false; write decoder=true to load the decoder, too")
    if "decoder_heads" in options and wanted == "false":
        raise InputError("decoder_heads is for the decoder; write decoder=true to load it")
    return wanted == "true"


def _with_decoder(found: Layout, part: ModelState, options: Mapping[str, str]) -> Layout:
    state = {
        ours + name.removeprefix(theirs): value
        for theirs, ours in DECODER.items()
        for name, value in part.state.items()
        if name.startswith(theirs)
    }
    if "embed.weight" not in state or "pos_embed" not in state or "pred.weight" not in state:
        raise InputError("The file has no decoder (decoder_embed, decoder_blocks, …); leave decoder=true out")
    width = state["embed.weight"].shape[0]
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    heads = heads_option(options, "decoder_heads", width, DECODER_HEADS, "MAE's decoder")
    patch = part.state["patch_embed.proj.weight"].shape[-1]
    state["pos_embed"], _ = resized_positions(state["pos_embed"], patch, found.preprocess.size, by_size)
    return replace(
        found,
        left_over=tuple(name for name in found.left_over if not name.startswith(tuple(DECODER))),
        decoder=partial(_decoder, width=width, depth=depth, heads=heads, state=state),
    )


def _decoder(vit: Any, width: int, depth: int, heads: int, state: Mapping[str, Tensor]) -> nn.Module:
    from sightline.encoders.modules.mae_decoder import Decoder

    decoder = Decoder(vit, width, depth, heads)
    load_exactly(decoder, state, "The decoder of the file")
    return decoder
