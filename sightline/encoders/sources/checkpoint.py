"""Any checkpoint: `checkpoint:FILE` finds out which format it is of, says so, and takes that format's options.

Files of official code are known by their formats (`layouts.recognized`); those of Sightline, Hugging Face and timm by
the JSON file beside them; other ViTs, ResNets and ConvNeXts by the names and shapes of their weights.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sightline.core.errors import InputError, nearest, some
from sightline.core.references import Reference
from sightline.encoders.contract import format_named, source
from sightline.encoders.encoder import Encoder
from sightline.encoders.files.reading import Checkpoint, distinct, printable, read_checkpoint, tensors
from sightline.encoders.layouts.beit import holds_beit
from sightline.encoders.layouts.layout import Layout, build, find_layout, recognized
from sightline.encoders.layouts.resnet import holds_resnet, resnet_layout
from sightline.encoders.layouts.timm import convnext_layout, holds_convnext, holds_vit_of_timm, timm_vit_layout
from sightline.encoders.layouts.vit import Official, bare, holds_vit, vit_layout
from sightline.encoders.modules.positions import by_size
from sightline.encoders.sources import timm
from sightline.images.preprocess import Preprocess

EXAMPLE = "checkpoint:mae_pretrain_vit_base.pth"
VIT = Official("ViT", {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}, "bicubic", by_size)
# What some ViTs have besides, and plain ones have not.
BEYOND_PLAIN = {"reg_token", "register_tokens", "dist_token", "norm_pre.weight", "blocks.0.ls1.gamma"}
BEYOND_PLAIN |= {"blocks.0.attn.q_norm.weight"}
# Names of weights that only adapters have, and of the words that a text model knows.
ADAPTER = ("lora_", "lokr_", "hada_w", "adapter_")
WORDS = ("embed_tokens.", "wte.", "word_embeddings.", "tok_embeddings.", "token_embedding.", "shared.weight")
OPTIMIZER = ("optimizer", "opt", "optimizer_state_dict", "optimizers", "optimizer_states")


@dataclass(frozen=True)
class Recognized:
    """A format, by what a file is of it, and how the encoder in it is found."""

    title: str  # "MAE"
    why: str
    layout: Callable[[Checkpoint, Mapping[str, str]], Layout]
    options: tuple[str, ...]


def names() -> list[str]:
    """Any file of weights; also a folder of Sightline or Hugging Face."""
    return ["FILE"]


def load(reference: Reference) -> Encoder:
    """Recognise the file and load it as what it is."""
    if reference.weights is not None:
        raise InputError(f"{reference}: the file is the weights; write checkpoint:FILE?option=value")
    path = Path(reference.id).expanduser()
    described = described_beside(path)
    weights = None if described is None else described[0].weights
    if weights is not None and is_converted(read_checkpoint(Path(weights))):  # its header knows more
        described, path = None, Path(weights)
    if described is not None:
        other, why = described
        if path.is_file() and (kind := other_kind(read_checkpoint(path))):
            raise InputError(kind)
        encoder = source(other.source).load(replace(other, options=other.options | reference.options))
        if other.source == "timm":
            given = read_json(path.parent / "config.json" if path.is_file() else path / "config.json")
            official = timm.preprocess_of(encoder.module, official=True, given=given["pretrained_cfg"])
            encoder = replace(encoder, preprocess=official)
        notes = [f"recognised as {other.source}:{other.id}: {why}", *encoder.notes]
        return replace(encoder, reference=str(reference), notes=notes)
    checkpoint = read_checkpoint(path)
    match = recognize(checkpoint)
    for key in reference.options:
        if key not in match.options:
            raise InputError(
                f"{reference}, recognised as {match.title}, has an unknown option {key!r}{nearest(key, match.options)}"
            )
    layout = find_layout(match.layout, match.title, checkpoint, reference.options)
    return build(replace(layout, notes=(f"recognised as {layout.format}: {match.why}", *layout.notes)), reference)


# By what lies beside it


def described_beside(path: Path) -> tuple[Reference, str] | None:
    """The reference of a file, or a folder, that a JSON file beside it, or in it, describes; and by what."""
    folder = path if path.is_dir() else path.parent
    if (folder / "encoder.json").is_file() and path in (folder, folder / "encoder.safetensors"):
        return Reference("run", str(folder), None, {}), "encoder.json is beside it"
    if path == folder and (folder / "latest.json").is_file():
        return Reference("run", str(folder), None, {}), "it has latest.json"
    if path in (folder, folder / "model.safetensors", folder / "pytorch_model.bin"):
        config = read_json(folder / "config.json")
        if "model_type" in config:
            return Reference("huggingface", str(folder.resolve()), None, {}), f"config.json says {config['model_type']}"
        told = config.get("pretrained_cfg"), config.get("model_args", {})
        if isinstance(architecture := config.get("architecture"), str) and all(isinstance(x, dict) for x in told):
            options = {str(key): str(value) for key, value in told[1].items()}
            options |= {"num_classes": str(config["num_classes"])} if "num_classes" in config else {}
            file = path if path.is_file() else folder / "model.safetensors"
            return Reference("timm", architecture, str(file), options), f"config.json says {architecture}"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file; empty if there is none that can be read."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# By what is in it


def recognize(checkpoint: Checkpoint) -> Recognized:
    """Which format a checkpoint is of; none, or more than one, is an error that says what was found."""
    path = str(checkpoint.path)
    if is_converted(checkpoint):
        return Recognized("timm", "its header, written by sightline convert, names the architecture", _converted, ())
    formats = recognized(checkpoint)
    if len(formats) > 1:
        alike = " and ".join(f"{format_named(name).TITLE} ({why})" for name, why in formats.items())
        choices = " or ".join(f"{name}:{path}" for name in formats)
        raise InputError(f"{path!r} looks like {alike}; say which it is: {choices}")
    for name, why in formats.items():
        known = format_named(name)
        return Recognized(known.TITLE, why, known.layout, known.OPTIONS)
    state = bare(checkpoint).state
    if positions := holds_beit(state):
        raise InputError(
            f"{path!r} is a ViT with {positions}, of BEiT or of SimMIM, which normalise images differently; say which "
            f"it is: beit:{path} or simmim:{path}"
        )
    if (from_timm := _of_timm(state)) is not None:
        return from_timm
    raise InputError(
        other_kind(checkpoint)
        or f"{path!r} is not in a format that Sightline recognises ({_some(weights_in(checkpoint))}); name its format, "
        "such as mae:FILE, or its architecture, timm:NAME@FILE"
    )


def _of_timm(state: Mapping[str, Tensor]) -> Recognized | None:
    """Architectures whose names are those of timm, whoever has trained them."""
    if holds_vit_of_timm(state):
        plain = holds_vit(state) and BEYOND_PLAIN.isdisjoint(state)
        why = f"it has the weights of a {'plain ViT, as those of DINO, MSN, DeiT and timm' if plain else 'ViT of timm'}"
        return Recognized("ViT", why, _plain_vit if plain else _other_vit, ("heads", "size") if plain else ("heads",))
    if holds_resnet(state):
        return Recognized("ResNet", "it has conv1 and layer1 to layer4", _resnet, ("size",))
    if holds_convnext(state):
        return Recognized("ConvNeXt", "it has stages with conv_dw", _convnext, ("size",))
    return None


def is_converted(checkpoint: Checkpoint) -> bool:
    """Whether `sightline convert` wrote the file, with timm's names; its header has all that is needed to build it."""
    about = checkpoint.arguments
    architecture, config = str(about.get("architecture")), str(about.get("config"))
    # A header may say anything: only timm's models without weights are built from it.
    known = re.fullmatch(r"timm:[\w.]+@random(\?.*)?", architecture) is not None and "preprocess" in about
    return checkpoint.container == "safetensors" and known and '"model_args"' in config


def _converted(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    about = checkpoint.arguments
    fields = json.loads(about["preprocess"])
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Layout("timm, converted", about["architecture"], tensors(checkpoint.content), Preprocess(**values))


def _plain_vit(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    encoder = vit_layout(checkpoint, bare(checkpoint), VIT, options)
    return _with_note(encoder, f"; if it is DINO's or MSN's, write dino:{checkpoint.path} or msn:{checkpoint.path}")


def _other_vit(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    return _with_note(timm_vit_layout(bare(checkpoint), VIT, options))


def _resnet(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    return _with_note(resnet_layout(bare(checkpoint), replace(VIT, title="ResNet"), options))


def _convnext(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    return _with_note(convnext_layout(bare(checkpoint), replace(VIT, title="ConvNeXt"), options))


def _with_note(found: Layout, otherwise: str = "") -> Layout:
    heads = " and the usual number of heads" if "num_heads" in found.architecture else ""
    note = f"nothing in the file says who trained it; assuming ImageNet's mean and std, bicubic resizing{heads}"
    return replace(found, notes=(*found.notes, note + otherwise))


# What it is not


def other_kind(checkpoint: Checkpoint) -> str:
    """What a file is that holds no vision model, in a sentence; empty if it may hold one."""
    file, weights = repr(str(checkpoint.path)), weights_in(checkpoint)
    if not weights and checkpoint.content.keys() & {*OPTIMIZER, "param_groups"}:
        return f"{file} holds the state of an optimiser and no model; give the file of the model"
    if not weights:
        return f"{file} holds no state dict (a mapping of names to tensors), but {_some(checkpoint.content)}"
    if 2 * sum(any(mark in name for mark in ADAPTER) for name in weights) > len(weights):
        return (
            f"{file} is an adapter (LoRA), which holds only the change of another model's weights ({_some(weights)}); "
            "merge it into that model and give the whole"
        )
    words = [name for name in weights if any(mark in name for mark in WORDS)]
    if words and not any(value.ndim == 4 and value.shape[1] == 3 for value in weights.values()):
        return f"{file} is a text model, it embeds words ({_some(words)}) and no pixels; give a vision model"
    return ""


def weights_in(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors by their place in the file, except those of an optimiser."""
    held = distinct({key: value for key, value in checkpoint.content.items() if key not in OPTIMIZER})
    parts = {key: tensors(held, key) for key in held}
    nested = {f"{key}.{name}": value for key, part in parts.items() for name, value in part.items()}
    return tensors(checkpoint.content) | nested


def _some(names: Iterable[str]) -> str:
    return some(printable(str(name), 60) for name in names)
