"""A masked auto-encoder as an encoder to look at: the ViT and its decoder, with all patches visible, in image order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sightline.backbones import is_vit
from sightline.errors import InputError
from sightline.objectives.mae import Decoder
from sightline.recipe import make_recipe, read_recipe
from sightline.weights import read_weights

__all__ = ["Autoencoder", "load_decoder"]


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
    """The decoder that was trained with an encoder; the recipe knows its number of heads, which no tensor tells."""
    if not (folder / "decoder.safetensors").is_file():
        raise InputError(
            f"{str(folder)!r} has no decoder.safetensors: only MAE trains a decoder; leave decoder=true out"
        )
    if not is_vit(encoder):
        raise InputError("The decoder of FCMAE is a single convolutional block without sites; leave decoder=true out")
    values = read_recipe(recipe)
    config: Any = make_recipe(str(values["objective"]), values).config
    config = config.part("mae") if hasattr(config, "part") else config  # of a hybrid, that of its part
    decoder = Decoder(encoder, config.decoder_width, config.decoder_depth, config.decoder_heads)
    state = read_weights(folder / "decoder.safetensors")
    own = decoder.state_dict()
    if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in state.items()}:
        raise InputError(f"The decoder in {str(folder)!r} is not the one that {str(recipe)!r} describes")
    decoder.load_state_dict({key: value.to(own[key].dtype) for key, value in state.items()})
    return decoder
