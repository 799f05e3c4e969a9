"""A ViT with the decoder it was trained with: the sites of both, those of the decoder as `decoder.block.3`, …"""

from dataclasses import replace

from torch import nn

from sightline.encoders.families import eva, vit
from sightline.encoders.modules.mae_decoder import Autoencoder
from sightline.encoders.sites import Anatomy, Tap


def matches(module: nn.Module) -> bool:
    return isinstance(module, Autoencoder)


def anatomy(module: Autoencoder, size: tuple[int, int]) -> Anatomy:
    """Sites of encoder and decoder; the decoder's tokens are laid out as the encoder's."""
    family = eva if eva.matches(module.encoder) else vit
    known: Anatomy = family.anatomy(module.encoder, size)
    taps = {"decoder.embed": Tap(module.decoder.blocks[0], "input")}
    for number, block in enumerate(module.decoder.blocks):
        taps |= vit.block_taps(f"decoder.block.{number}", block)
    taps["decoder.norm"] = Tap(module.decoder.norm)
    inner = {name: tap for name, tap in known.taps.items() if not name.startswith("head.")}  # never called here
    return replace(known, family="autoencoder", taps=inner | taps)
