"""A masked auto-encoder as an encoder to look at: the ViT and its decoder, with all patches visible, in image order."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sightline.backbones import is_vit
from sightline.errors import InputError
from sightline.objectives.mae import Decoder
from sightline.weights import read_weights

__all__ = ["Autoencoder", "load_decoder"]

PUBLISHED = {"decoder_width": 512, "decoder_depth": 8, "decoder_heads": 16}  # where a recipe says nothing else


class Autoencoder(nn.Module):
    """Encoder and decoder with mask ratio 0: nothing is hidden, and nothing is shuffled."""

    def __init__(self, encoder: Any, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, images: Tensor) -> Tensor:  # (B, N, P)
        """Pixels of every patch."""
        pixels: Tensor = self.decoder(self.encoder.forward_features(images))
        return pixels


def load_decoder(encoder: nn.Module, folder: Path, recipe: Path) -> Decoder:
    """The decoder that was trained with an encoder, as decoder.json describes it."""
    if not (folder / "decoder.safetensors").is_file():
        raise InputError(
            f"{str(folder)!r} has no decoder.safetensors: only MAE trains a decoder; leave decoder=true out"
        )
    if not is_vit(encoder):
        raise InputError("The decoder of FCMAE is a single convolutional block without sites; leave decoder=true out")
    decoder = Decoder(encoder, *_measures(folder / "decoder.json", recipe))
    state = read_weights(folder / "decoder.safetensors")
    own = decoder.state_dict()
    if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in state.items()}:
        described = folder / "decoder.json" if (folder / "decoder.json").is_file() else recipe
        raise InputError(f"The decoder in {str(folder)!r} is not the one that {str(described)!r} describes")
    decoder.load_state_dict({key: value.to(own[key].dtype) for key, value in state.items()})
    return decoder


def _measures(described: Path, recipe: Path) -> tuple[int, int, int]:
    """Width, depth and heads, which no tensor tells; of folders without decoder.json the recipe knows them."""
    if described.is_file():
        try:
            about = json.loads(described.read_text())
            return int(about["width"]), int(about["depth"]), int(about["heads"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"Cannot read {str(described)!r}; save the encoder and its decoder again") from error
    try:
        values = tomllib.loads(recipe.read_text(encoding="utf-8"))
        values = PUBLISHED | values.get("mae", values)  # of a hybrid, those of its part; only what was set is there
        return int(values["decoder_width"]), int(values["decoder_depth"]), int(values["decoder_heads"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(recipe)!r} does not say how the decoder beside it is built; train it again") from error
