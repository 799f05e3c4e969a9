"""One look at an encoder while it is trained: a single forward pass over images that stay in memory.

    features  the last layer, pooled: k-NN accuracy of held-out images, RankMe of training images
    nmi       of attention, a number for each block, mean over heads and held-out images
    grams     U-centred Gram matrices of every block on batches of held-out images, for CKA with another look

A look at an encoder that does not change, as it was at the start or a reference, is taken once: its Gram matrices are
all that CKA needs of it, a few megabytes whatever its size.

Shapes: n images of a batch, S layers, B images, D width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sightline.encoders.attention import AttentionProduct
from sightline.encoders.encoder import Encoder
from sightline.encoders.sites import select, token_view
from sightline.encoders.watching import watch
from sightline.images.sets import FEWEST
from sightline.measure.estimators.attention import distance_and_nmi
from sightline.measure.estimators.cka import centre, gram, products, ratio
from sightline.training.watchers import WatchedFeatures, WatchedImages

POOLINGS = {"cls": "cls", "gap": "mean"}  # our name → token view: the CLS token, and the mean of the patches
MAP = ".attn_map"


@dataclass(frozen=True)
class Grams:
    """Of each batch the U-centred Gram matrices of all layers."""

    sites: tuple[str, ...]
    batches: tuple[Tensor, ...]  # each float64 (S, n, n)


@dataclass(frozen=True)
class Look:
    """What a look has shown."""

    features: Mapping[str, WatchedFeatures]  # by role: train, held out
    nmi: Mapping[str, float]  # block → mean over heads and images
    grams: Grams


@dataclass
class _Batch:
    """What the hooks find in the forward pass of one batch."""

    activations: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # site → pooling → (B, D)
    nmi: dict[str, Tensor] = field(default_factory=dict)  # site → (B,)
    grams: dict[str, Tensor] = field(default_factory=dict)  # site → (n, n)


def layer_sites(encoder: Encoder) -> tuple[str, ...]:
    """The blocks of an encoder; of a module that no family knows, its larger parts."""
    return tuple(select(encoder.sites, ["block.*"])) or tuple(s for s in encoder.sites if s.count(".") <= 1)


def attention_sites(encoder: Encoder) -> tuple[str, ...]:
    """The attention maps whose patches are known, none of a CNN."""
    known = encoder.tokens is not None and math.prod(encoder.tokens.grid) > 1
    return tuple(select(encoder.sites, [f"block.*{MAP}"])) if known else ()


def look_at(
    encoder: Encoder, images: Mapping[str, WatchedImages], *, attention: bool = False, cka: bool = False
) -> Look:
    """Forward the images of every role, where the encoder is; `attention` and `cka` look at those held out."""
    with torch.no_grad(), encoder.evaluating():
        batches_of = {
            role: [_forward(encoder, pixels, role == "held out", attention, cka) for pixels in of.pixels]
            for role, of in images.items()
        }
    held_out = batches_of.get("held out", [])
    sites = tuple(site for site in layer_sites(encoder) if held_out and site in held_out[0].grams)
    maps = held_out[0].nmi if held_out else {}
    return Look(
        {role: WatchedFeatures(_features(batches_of[role]), of.labels) for role, of in images.items()},
        {site.removesuffix(MAP): float(torch.cat([batch.nmi[site] for batch in held_out]).mean()) for site in maps},
        Grams(
            sites, tuple(centre(torch.stack([b.grams[site] for site in sites])) for b in held_out if sites and b.grams)
        ),
    )


def _forward(encoder: Encoder, pixels: Tensor, held_out: bool, attention: bool, cka: bool) -> _Batch:
    weights = next(encoder.module.parameters())
    maps = attention_sites(encoder) if attention and held_out else ()
    layers = layer_sites(encoder)
    last = ("norm",) if "norm" in encoder.sites else layers if encoder.family == "module" else layers[-1:]
    compared = layers if cka and held_out and len(pixels) >= FEWEST else ()
    wanted = [site for site in encoder.sites if site in {*maps, *last, *compared}]
    reduced, tokens = _Batch(), encoder.tokens

    def see(site: str, activation: Any) -> None:
        if isinstance(activation, AttentionProduct):
            assert tokens is not None
            reduced.nmi[site] = distance_and_nmi(activation, tokens)[1].mean(1).cpu()
            return
        if site in last:
            reduced.activations[site] = _pooled(encoder, activation)
        whole = token_view(activation, "all", tokens)
        if site in compared and whole is not None:
            reduced.grams[site] = gram(whole.flatten(1)).cpu()

    with watch(encoder.sites, wanted, see), torch.autocast(weights.device.type, enabled=False):
        encoder(encoder.preprocess.normalize(pixels.to(weights.device)).to(weights.dtype))
    return reduced


def _pooled(encoder: Encoder, activation: Tensor) -> dict[str, Tensor]:
    """CLS and the mean of the patches, or the one vector that a layer has; copies in float32."""
    views = {name: token_view(activation, view, encoder.tokens) for name, view in POOLINGS.items()}
    if views["gap"] is None:
        views["gap"] = token_view(activation, "gap", encoder.tokens)
    return {name: vector.float().cpu() for name, vector in views.items() if vector is not None and vector.ndim == 2}


def _features(batches: Sequence[_Batch]) -> dict[str, Tensor]:
    """Of all batches, at the last site that has pooled features at all."""
    reached = [site for site, activations in batches[0].activations.items() if activations] if batches else []
    if not reached:
        return {}
    parts = [batch.activations[reached[-1]] for batch in batches]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def cka_between(one: Grams, other: Grams) -> dict[str, float]:
    """Minibatch CKA of each layer of `one` with the layer of `other` at the same relative depth."""
    hsic = _sum(products(a, others=b) * a.shape[-1] for a, b in zip(one.batches, other.batches, strict=True))
    own = tuple(_sum(a.flatten(1).square().sum(1) / (a.shape[-1] - 3) for a in grams.batches) for grams in (one, other))
    values = ratio(hsic, (own[0], own[1]))
    last = max(len(one.sites) - 1, 1)
    depths = np.rint(np.arange(len(one.sites)) * (len(other.sites) - 1) / last).astype(int)
    return {site: float(values[row, depths[row]]) for row, site in enumerate(one.sites)}


def _sum(parts: Any) -> Any:
    return sum(parts).numpy()
