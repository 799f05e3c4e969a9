"""Sites: named points of an encoder, the same names for every architecture.

| site | activation | shape |
|---|---|---|
| `embed` | what enters the first block | (B, N, D) or (B, C, h, w) |
| `block.3` | output of a block; in a CNN after the addition | (B, N, D) or (B, C, h, w) |
| `block.3.residual` | the residual branch before the addition (CNN) | (B, C, h, w) |
| `block.3.norm1`, `.norm2` | output of the norms | (B, N, D) |
| `block.3.qkv` | output of the linear layer, q, k and v side by side | (B, N, 3D) |
| `block.3.q`, `.k`, `.v` | what enters the product, after q/k norm and rotary embedding; q unscaled | (B, H, N, D/H) |
| `block.3.attn_map` | attention probabilities | (B, H, N, N) |
| `block.3.heads` | what each head gives, attention times values, before the projection | (B, H, N, D/H) |
| `block.3.attn` | output of the attention layer, before layer scale | (B, N, D) |
| `block.3.mid` | the stream after attention, before norm2 | (B, N, D) |
| `block.3.fc1` | output of the first fully connected layer, before its activation function | (B, N, 4D) |
| `block.3.mlp` | output of the MLP, before layer scale | (B, N, D) |
| `norm` | after the final norm; no other site is normed by it | (B, N, D) |
| `head.0` | output of a layer of the head: a classifier, or a projection layer with norm and activation | (B, C) |
| `decoder.embed`, `decoder.block.3`, … | of a masked auto-encoder with its decoder, all patches visible | as above |

B images, N tokens (prefix tokens first), D width, H heads, C channels or classes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sightline.core.errors import InputError, nearest
from sightline.core.patterns import site_pattern

ATTENTION_POINTS = ("q", "k", "v", "attn_map", "heads")  # what can be seen of an attention layer's product


@dataclass(frozen=True)
class Tokens:
    """Token layout: how many prefix tokens, which of them is CLS, and the patch grid (rows, columns)."""

    prefix: int
    cls: int | None
    grid: tuple[int, int]

    @property
    def count(self) -> int:
        """All tokens, prefix included."""
        return self.prefix + self.grid[0] * self.grid[1]


@dataclass(frozen=True, eq=False)
class Tap:
    """Where a site is: the `output` or `input` of a module, or a part of an attention layer (`q`, `attn_map`, …)."""

    module: nn.Module
    point: str = "output"
    channels_last: bool = False  # maps that the architecture keeps as (B, h, w, C); shown as (B, C, h, w)


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What a family knows about one of its modules."""

    family: str
    depth: int
    taps: Mapping[str, Tap]  # in order of computation
    tokens: Tokens | None = None  # None: a CNN, or unknown
    heads: int | None = None
    patch: int | None = None
    size: tuple[int, int] | None = None  # the one image size that the module takes; None: any
    forward: Callable[[Tensor], Any] | None = None  # how to send images through, where calling the module is not enough
    stages: tuple[int, ...] = ()  # blocks of each stage, where the resolution falls between them


# Names


def select(taps: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Sites that match any of the patterns, in order of computation; `*` does not cross a dot, `**` does.

    >>> select(["embed", "block.0", "block.0.qkv", "block.1", "block.1.qkv"], ["block.*"])
    ['block.0', 'block.1']
    >>> select(["embed", "block.0", "block.0.qkv"], ["block.**"])
    ['block.0', 'block.0.qkv']
    """
    expressions = [site_pattern(pattern) for pattern in patterns]
    return [name for name in taps if any(expression.fullmatch(name) for expression in expressions)]


def unmatched(patterns: Sequence[str], names: Iterable[str]) -> str | None:
    """The sentence for the first pattern that matches none of the names, or None."""
    names = list(names)
    for pattern in patterns:
        if not select(names, [pattern]):
            return f"No site matches {pattern!r}{nearest(pattern, names)} (`sightline list sites REF` shows all)"
    return None


BLOCK = re.compile(r"(decoder\.)?block\.(\d+)(?:\.(.+))?")


def layer_type(site: str) -> str:
    """The kind of layer a site belongs to, so that layers of one kind can be compared over depth.

    >>> [layer_type(s) for s in ("embed", "block.3", "block.3.qkv", "decoder.block.0.qkv", "head.0", "layer1.0.conv1")]
    ['embed', 'block', 'qkv', 'qkv', 'head', 'layer1.*.conv1']
    """
    if match := BLOCK.fullmatch(site):
        return match[3] or "block"
    if re.fullmatch(r"head\.\d+", site):
        return "head"
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site)


def block_numbers(sites: Sequence[str]) -> list[int]:
    """The block of each site, −1 outside the blocks; those of a decoder go on counting after the encoder's.

    >>> block_numbers(["embed", "block.0", "block.1.qkv", "norm", "decoder.block.0"])
    [-1, 0, 1, -1, 2]
    """
    matches = [BLOCK.fullmatch(site) for site in sites]
    depth = max((int(match[2]) + 1 for match in matches if match and not match[1]), default=0)
    return [-1 if match is None else int(match[2]) + (depth if match[1] else 0) for match in matches]


def stage_numbers(sites: Sequence[str], stages: Sequence[int]) -> list[int]:
    """The stage (block group) of each site, from 1; 0 outside the blocks of the encoder, or without stages.

    >>> stage_numbers(["embed", "block.0", "block.2.residual", "block.4", "head.0"], (2, 2, 1))
    [0, 1, 2, 3, 0]
    """
    of_block = [stage for stage, blocks in enumerate(stages, 1) for _ in range(blocks)]
    matches = [BLOCK.fullmatch(site) for site in sites]
    return [0 if m is None or m[1] or int(m[2]) >= len(of_block) else of_block[int(m[2])] for m in matches]


def entry_of(block: str) -> str:
    """The site of the stream that enters a block.

    >>> entry_of("block.3"), entry_of("block.0"), entry_of("decoder.block.0")
    ('block.2', 'embed', 'decoder.embed')
    """
    path, number = block.rsplit(".", 1)
    return f"{path}.{int(number) - 1}" if int(number) else f"{path.removesuffix('block')}embed"


def union_of_sites(sites: Mapping[str, Sequence[str]]) -> list[str]:
    """Sites of all encoders, each once, in order of computation.

    >>> union_of_sites({"vit": ["embed", "block.0", "block.1"], "cnn": ["block.0.residual", "block.0", "block.1"]})
    ['embed', 'block.0.residual', 'block.0', 'block.1']
    """
    merged: list[str] = []
    for names in sites.values():
        at = 0
        for number, name in enumerate(names):
            if name not in merged:  # right before the next site that both have, or after the last one
                later = [merged.index(other) for other in names[number + 1 :] if other in merged]
                merged.insert(later[0] if later else at, name)
            at = merged.index(name) + 1
    return merged


# Token views


def token_view(activation: Tensor, view: str, tokens: Tokens | None) -> Tensor | None:
    """A part of an activation: `all`, `cls`, `patches` (no prefix token), `mean` (of patches), `gap` (of all tokens).

    Gives (B, n, D) for `all` and `patches`, (B, D) for the others, None where there is no such thing (CLS in a
    CNN). Maps (B, C, h, w) count as h·w patches; attention heads (B, H, N, d) as N tokens of width H·d.
    """
    if activation.ndim == 4:
        activation = activation.flatten(2).transpose(1, 2) if tokens is None else activation.transpose(1, 2).flatten(2)
    if activation.ndim != 3 or (tokens is not None and activation.shape[1] != tokens.count):
        whole = activation.flatten(1)  # pooled vectors, or a layout that we know nothing about
        return {"all": whole.unsqueeze(1), "gap": whole if activation.ndim == 2 else None}.get(view)
    prefix, cls = (tokens.prefix, tokens.cls) if tokens is not None else (0, None)
    match view:
        case "all":
            return activation
        case "patches":
            return activation[:, prefix:]
        case "mean":
            return activation[:, prefix:].mean(1, dtype=torch.float32)
        case "gap":
            return activation.mean(1, dtype=torch.float32)
        case "cls":
            return None if cls is None else activation[:, cls]
    raise InputError(f"There is no token view {view!r}{nearest(view, ['all', 'cls', 'patches', 'mean', 'gap'])}")
