"""A masked auto-encoder as an encoder to look at: the ViT and its decoder, with all patches visible, in image order."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.encoders.files.weights import read_weights
from sightline.encoders.modules.masking import restore
from sightline.encoders.modules.vit import Vit, is_vit, patch_of, sincos, xavier


class Autoencoder(nn.Module):
    """Encoder and decoder with mask ratio 0: nothing is hidden, and nothing is shuffled."""

    def __init__(self, encoder: Any, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, images: Tensor) -> Tensor:  # (B, N, P)
        """Pixels of every patch."""
        pixels: Tensor = self.decoder(self.encoder.forward_features(images))
        return pixels


def load_decoder(encoder: nn.Module, folder: Path) -> Decoder:
    """The decoder that was trained with an encoder, as decoder.json describes it."""
    if not (folder / "decoder.safetensors").is_file():
        raise InputError(
            f"{str(folder)!r} has no decoder.safetensors: only MAE trains a decoder; leave decoder=true out"
        )
    if not is_vit(encoder):
        raise InputError("The decoder of FCMAE is a single convolutional block without sites; leave decoder=true out")
    described = folder / "decoder.json"
    try:
        about = json.loads(described.read_text())
        width, depth, heads = int(about["width"]), int(about["depth"]), int(about["heads"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"Cannot read {str(described)!r}; save the encoder and its decoder again") from error
    decoder = Decoder(encoder, width, depth, heads)
    state = read_weights(folder / "decoder.safetensors")
    own = decoder.state_dict()
    if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in state.items()}:
        raise InputError(f"The decoder in {str(folder)!r} is not the one that {str(described)!r} describes")
    decoder.load_state_dict({key: value.to(own[key].dtype) for key, value in state.items()})
    return decoder


class Decoder(nn.Module):
    """Blocks at a width of their own, over the tokens of all patches, that end in the pixels of each patch."""

    def __init__(self, vit: Vit, width: int, depth: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:  # not asked in Config: the decoder of a ConvNeXt has no heads
            raise InputError(
                f"A decoder_width of {width} cannot be split into {heads} decoder_heads; choose heads that divide it"
            )
        self.prefix: int = vit.num_prefix_tokens
        norm: Any = partial(nn.LayerNorm, eps=1e-6)
        self.embed = nn.Linear(vit.embed_dim, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.register_buffer("pos_embed", sincos(vit.patch_embed.grid_size, width, self.prefix))
        self.blocks = nn.Sequential(*(Block(width, heads, qkv_bias=True, norm_layer=norm) for _ in range(depth)))
        self.norm = norm(width)
        self.pred = nn.Linear(width, patch_of(vit) ** 2 * 3)
        nn.init.normal_(self.mask_token, std=0.02)
        xavier(self)

    def describe(self) -> dict[str, int]:
        """What is needed to build it again for its ViT, as decoder.json keeps it."""
        first: Any = self.blocks[0]
        heads = int(first.attn.num_heads)
        return {"width": self.embed.out_features, "depth": len(self.blocks), "heads": heads}

    def forward(
        self, tokens: Tensor, ids_restore: Tensor | None = None
    ) -> Tensor:  # (B, prefix + kept, D) -> (B, N, P)
        """Pixels of every patch; without `ids_restore` the tokens are those of all patches in image order."""
        x = self.embed(tokens)  # (B, prefix + kept, E)
        if ids_restore is not None:
            prefix, visible = x[:, : self.prefix], x[:, self.prefix :]
            x = torch.cat([prefix, restore(visible, self.mask_token, ids_restore)], 1)  # (B, T, E)
        x = self.norm(self.blocks(x + self.pos_embed))
        pixels: Tensor = self.pred(x[:, self.prefix :])
        return pixels
