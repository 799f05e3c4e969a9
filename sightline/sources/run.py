"""Encoders that Sightline has trained or written: `run:FOLDER`, of a training the latest checkpoint.

`run:FOLDER?decoder=true` also loads the decoder that MAE has trained, and shows its layers as sites.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sightline.checkpoints import latest
from sightline.encoder import Encoder, Preprocess, Reference, anatomy, build_encoder, load_encoder
from sightline.errors import InputError
from sightline.weights import hash_weights, load_weights, read_weights

EXAMPLE = "run:runs/mine"


def names() -> list[str]:
    """Any folder that `sightline pretrain` or `save_encoder` wrote."""
    return ["FOLDER"]


def load(reference: Reference) -> Encoder:
    """Build the architecture that the folder names and load its weights."""
    folder = Path(reference.id).expanduser()
    return load_folder(latest(folder) or folder, folder.name, reference, folder / "recipe.toml")


def load_folder(folder: Path, name: str, reference: Reference, recipe: Path) -> Encoder:
    """The encoder that `save_encoder` wrote into a folder; with the option decoder=true its decoder, too."""
    unknown = [key for key in reference.options if key != "decoder"]
    if reference.weights is not None or unknown or reference.options.get("decoder", "true") not in ("true", "false"):
        raise InputError(
            f"{reference} comes with its own weights and settings; write {reference.source}:{reference.id}, "
            "and ?decoder=true after it for the decoder of MAE"
        )
    encoder = _load(folder, name, reference)
    if reference.options.get("decoder") != "true":
        return encoder
    from sightline.autoencoder import Autoencoder, load_decoder

    both = Autoencoder(encoder.module, load_decoder(encoder.module, folder, recipe))
    return build_encoder(both, reference=str(reference), name=name, preprocess=encoder.preprocess, notes=encoder.notes)


def _load(folder: Path, name: str, reference: Reference) -> Encoder:
    try:
        about = json.loads((folder / "encoder.json").read_text())
        architecture, preprocess = str(about["architecture"]), _preprocess(about["preprocess"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{str(folder)!r} holds no encoder (a readable encoder.json beside encoder.safetensors)"
        ) from error
    encoder = load_encoder(architecture)
    state = read_weights(folder / "encoder.safetensors")
    encoder.notes += load_weights(encoder.module, state, f"Run {str(folder)!r}")
    # Once more, because the classifier may have been replaced by one of another size.
    known = anatomy(encoder.module, preprocess.size)
    encoder.preprocess, encoder.sites, encoder.tokens = preprocess, known.taps, known.tokens
    encoder.weights, encoder.name, encoder.reference = hash_weights(encoder.module), name, str(reference)
    encoder.classes = tuple(map(str, about["classes"])) if about.get("classes") else None
    if encoder.weights != about.get("weights"):
        raise InputError(f"The weights in {str(folder)!r} are not those that its encoder.json describes; save it again")
    return encoder


def _preprocess(fields: dict[str, Any]) -> Preprocess:
    """JSON has lists where Preprocess has tuples."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Preprocess(values["size"], values["resize"], values["interpolation"], values["mean"], values["std"])
