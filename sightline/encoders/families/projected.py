"""An encoder with its projection head: the sites of both, the layers of the head as `head.0`, `head.1`, …"""

from dataclasses import replace

from torch import nn

from sightline.encoders import encoder
from sightline.encoders.modules.projection import Projected
from sightline.encoders.sites import Anatomy, Tap


def matches(module: nn.Module) -> bool:
    return isinstance(module, Projected)


def anatomy(module: Projected, size: tuple[int, int]) -> Anatomy:
    """Sites of the encoder, then those of the head in the place of a classifier, which is not called here."""
    known = encoder.anatomy(module.encoder, size)
    taps = {name: tap for name, tap in known.taps.items() if not name.startswith("head.")}
    taps |= {f"head.{number}": Tap(layer) for number, layer in enumerate(module.head)}
    return replace(known, family="projected", taps=taps)
