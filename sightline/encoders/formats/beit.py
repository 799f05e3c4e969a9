"""Checkpoints of the official BEiT and BEiT-2: `beit:FILE`, with the options which (model, ema), size and heads.

{'model', 'optimizer', 'epoch', 'scaler', 'args'[, 'model_ema']}   training, with lm_head, and fine-tuning
{'module', …[, 'model_ema']}                                       the same with DeepSpeed
{'model'}                                                          released

Images are normalised with mean and standard deviation 0.5 unless the training had `--imagenet_default_mean_and_std`, as
all of BEiT-2 have. A file without arguments does not tell, so that this is an option, too.
"""

from collections.abc import Mapping
from dataclasses import replace

from sightline.core.errors import InputError
from sightline.encoders.files.reading import Checkpoint
from sightline.encoders.layouts.beit import beit_layout, holds_beit, model_or_average
from sightline.encoders.layouts.layout import Layout
from sightline.encoders.layouts.vit import evaluation
from sightline.images.preprocess import Preprocess

TITLE = "BEiT"
EXAMPLE = "beit:beit_base_patch16_224_pt22k.pth"
FLAG = "imagenet_default_mean_and_std"
OPTIONS = ("which", "size", "heads", FLAG)
HALF = (0.5, 0.5, 0.5)


def recognizes(checkpoint: Checkpoint) -> str:
    """By what a file is surely BEiT's; what it fine-tuned has the names and shapes of SimMIM's."""
    state = model_or_average(checkpoint, {}).state
    model = str(checkpoint.arguments.get("model", ""))
    if not (known := holds_beit(state)):
        return ""
    if "lm_head.weight" in state and (not model or model.startswith("beit")):  # EVA's code comes from BEiT's
        return f"it has {known} and lm_head"
    return f"it has {known} and was trained as {model}" if model.startswith("beit") else ""


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    part = model_or_average(checkpoint, options)
    part = replace(part, training="lm_head.weight" in part.state)
    second = any(name.startswith("cls_pt_layers.") for name in part.state)
    imagenet = _flag(checkpoint, options)
    if imagenet is None and not part.training:
        note = f"images are normalised with 0.5, as BEiT's are; BEiT-2 and SimMIM want ImageNet's mean: {FLAG}=true"
        part = replace(part, notes=(*part.notes, note))

    def preprocess(size: tuple[int, int]) -> Preprocess:
        official = evaluation(size, "bicubic", margin=min(size) < 384)
        return official if imagenet or (second and imagenet is None) else replace(official, mean=HALF, std=HALF)

    return beit_layout(checkpoint, part, options, "BEiT-2" if second else TITLE, preprocess)


def _flag(checkpoint: Checkpoint, options: Mapping[str, str]) -> bool | None:
    """Whether images are normalised as ImageNet's, where that is said."""
    text = options.get(FLAG)
    if text is None:
        return bool(checkpoint.arguments[FLAG]) if FLAG in checkpoint.arguments else None
    if text not in ("true", "false"):
        raise InputError(f"{FLAG}={text} is neither true nor false; write {FLAG}=true for ImageNet's mean")
    return text == "true"
