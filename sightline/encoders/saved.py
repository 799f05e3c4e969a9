"""Encoders in folders of ours: how they are written, and how they are read."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sightline.core.errors import InputError
from sightline.core.files import write_atomically
from sightline.core.references import Reference, parse_reference
from sightline.encoders.encoder import Encoder, anatomy, build_encoder
from sightline.encoders.files.reading import printable
from sightline.encoders.files.weights import hash_weights, load_weights, no_larger_than, read_weights
from sightline.encoders.layouts.layout import projected
from sightline.encoders.loading import load_encoder
from sightline.encoders.modules.positions import by_size
from sightline.encoders.modules.projection import parts_in_words, read_head
from sightline.encoders.modules.vit import RESIZES
from sightline.encoders.sources import timm
from sightline.images.preprocess import Preprocess

VALUES = {"decoder": ("true", "false"), "head": ("true", "false"), "window": ("none",)}  # of options
LIBRARIES = ("timm", "torchvision", "huggingface")  # that build an encoder without weights
WINDOW = "attention_window"


def save_encoder(encoder: Encoder, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write `encoder.safetensors` and `encoder.json`, which `load_encoder("run:FOLDER")` reads.

    `dtype=torch.bfloat16` halves the file; what is loaded are then the rounded weights.
    """
    from safetensors.torch import save

    if encoder.architecture is None:
        raise InputError(
            f"Encoder {encoder.name!r} was made from a Python module, which cannot be rebuilt from a file; "
            "save encoders that were loaded from a reference such as timm:NAME"
        )
    folder = Path(folder)
    state = {key: value.detach().cpu().contiguous() for key, value in encoder.module.state_dict().items()}
    stored = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
    about = {
        "architecture": encoder.architecture,
        "name": encoder.name,
        "preprocess": asdict(encoder.preprocess),
        "classes": encoder.classes,
        "weights": hash_weights({key: value.to(state[key].dtype) for key, value in stored.items()}),
    }
    if encoder.resize is not by_size:
        about["resize"] = next(name for name, rule in RESIZES.items() if rule is encoder.resize)
    write_atomically(folder / "encoder.safetensors", save(stored))
    write_atomically(folder / "encoder.json", json.dumps(about, indent=2).encode())
    return folder


def load_folder(folder: Path, name: str, reference: Reference) -> Encoder:
    """The encoder that `save_encoder` wrote into a folder; with decoder=true or head=true its decoder or head, too."""
    if reference.weights is not None or any(
        value not in VALUES.get(key, ()) for key, value in reference.options.items()
    ):
        raise InputError(
            f"{reference} comes with its own weights and settings; write {reference.source}:{reference.id}, and after "
            "it ?decoder=true for the decoder of MAE, ?head=true for the projection head of a joint-embedding "
            "objective, ?window=none for attention to all patches, or ?step=1200 for a step that the training has kept"
        )
    wanted = [key for key, value in reference.options.items() if value == "true"]
    if len(wanted) > 1:
        raise InputError(
            f"{reference}: decoder=true and head=true exclude each other; give the reference twice, once with each"
        )
    name += ", window lifted" if "window" in reference.options else ""
    encoder = _load(folder, name, reference)
    if not wanted:
        return encoder
    if wanted == ["decoder"]:
        both, notes = _with_decoder(encoder, folder), encoder.notes
    else:
        layers, state = read_head(folder)
        both = projected(encoder.module, layers, state, f"The projection head in {str(folder)!r}")
        notes = [*encoder.notes, parts_in_words(layers)]
    return build_encoder(both, reference=str(reference), name=name, preprocess=encoder.preprocess, notes=notes)


def _with_decoder(encoder: Encoder, folder: Path) -> nn.Module:
    from sightline.encoders.modules.mae_decoder import Autoencoder, load_decoder

    return Autoencoder(encoder.module, load_decoder(encoder.module, folder))


def _load(folder: Path, name: str, reference: Reference) -> Encoder:
    try:
        about = json.loads((folder / "encoder.json").read_text())
        architecture, preprocess = str(about["architecture"]), _preprocess(about["preprocess"])
        resize = RESIZES[about.get("resize", "by_size")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{str(folder)!r} holds no encoder (a readable encoder.json beside encoder.safetensors)"
        ) from error
    _check_architecture(architecture, folder)
    architecture, notes = _windowed(architecture, reference)
    state, origin = read_weights(folder / "encoder.safetensors"), f"Run {str(folder)!r}"
    if (built := parse_reference(architecture)).source == "timm":
        timm.check_size(state, built, origin)
    with no_larger_than(state, origin):
        encoder = load_encoder(architecture)
    notes += load_weights(encoder.module, state, origin)
    # Once more, because the classifier may have been replaced by one of another size.
    known = anatomy(encoder.module, preprocess.size)
    weights = hash_weights(encoder.module)
    if weights != about.get("weights"):
        raise InputError(f"The weights in {str(folder)!r} are not those that its encoder.json describes; save it again")
    return replace(
        encoder,
        name=name,
        preprocess=preprocess,
        tokens=known.tokens,
        weights=weights,
        reference=str(reference),
        sites=known.taps,
        classes=tuple(map(str, about["classes"])) if about.get("classes") else None,
        notes=[*encoder.notes, *notes],
        resize=resize,
    )


def _check_architecture(architecture: str, folder: Path) -> None:
    """Refuse what `save_encoder` does not write: another run, even this one itself, or a file of weights."""
    built = parse_reference(architecture)
    if built.source not in LIBRARIES or built.weights != "random":
        raise InputError(
            f"The encoder.json in {str(folder)!r} names the architecture {printable(architecture)!r}, but a model of "
            f"{', '.join(LIBRARIES)} without weights is expected, such as timm:resnet18@random; save it again"
        )


def _windowed(architecture: str, reference: Reference) -> tuple[str, list[str]]:
    """The architecture with the attention window of its training, unless that is to be lifted; and a note on it."""
    built = parse_reference(architecture)
    window = built.options.get(WINDOW)
    if window in (None, "0"):
        if "window" in reference.options:
            raise InputError(f"{reference} was trained without an {WINDOW}; leave window=none out")
        return architecture, []
    options = {key: value for key, value in built.options.items() if key != WINDOW}
    if "window" in reference.options:
        return str(replace(built, options=options)), [f"trained with {WINDOW}={window}, which is lifted"]
    note = f"patches attend to {window} × {window} around them, as in the training; ?window=none lifts that"
    return architecture, [note]


def _preprocess(fields: dict[str, Any]) -> Preprocess:
    """JSON has lists where Preprocess has tuples."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Preprocess(values["size"], values["resize"], values["interpolation"], values["mean"], values["std"])
