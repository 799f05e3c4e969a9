"""The ViT of MAE, MoCo-v3, DINO and MSN, written out: made weights under official names, and what they compute.

B images, N patches, T = 1 + N tokens, D width, H heads, d = D/H.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sightline.encoders.encoder import Encoder
from sightline.encoders.watching import capture

State = dict[str, Tensor]
WIDTH, DEPTH, PATCH, SIDE, HEADS = 24, 3, 4, 4, 3
SIZE = PATCH * SIDE


def vit(seed: int = 0, classes: int = 0, pooled: bool = False, side: int = SIDE) -> State:
    """Random weights; with `pooled` the classifier sees the mean of patches through fc_norm, and there is no norm."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.2) -> Tensor:
        return torch.randn(shape, generator=random) * std

    def layer(name: str, *shape: int) -> State:
        return {f"{name}.weight": normal(*shape) + (len(shape) == 1), f"{name}.bias": normal(shape[0])}

    state = {"cls_token": normal(1, 1, WIDTH), "pos_embed": normal(1, 1 + side**2, WIDTH)}
    state |= layer("patch_embed.proj", WIDTH, 3, PATCH, PATCH)
    state |= blocks("blocks", WIDTH, layer)
    state |= layer("fc_norm" if pooled else "norm", WIDTH)
    return state | (layer("head", classes, WIDTH) if classes else {})


def blocks(name: str, width: int, layer: Any) -> State:
    """Weights of the blocks of an encoder or a decoder."""
    state: State = {}
    for i in range(DEPTH):
        state |= layer(f"{name}.{i}.norm1", width) | layer(f"{name}.{i}.attn.qkv", 3 * width, width)
        state |= layer(f"{name}.{i}.attn.proj", width, width) | layer(f"{name}.{i}.norm2", width)
        state |= layer(f"{name}.{i}.mlp.fc1", 4 * width, width) | layer(f"{name}.{i}.mlp.fc2", width, 4 * width)
    return state


def activations(state: Mapping[str, Tensor], images: Tensor, heads: int = HEADS) -> State:
    """All sites of the ViT, in float64."""
    state = {name: value.double() for name, value in state.items()}
    x = torch.cat([state["cls_token"].expand(len(images), -1, -1), patches(state, images.double())], 1)
    sites = {"embed": x + state["pos_embed"]}
    sites |= run_blocks(state, "blocks", sites["embed"], heads, "block")
    x = sites[f"block.{DEPTH - 1}"]
    if "fc_norm.weight" in state:
        feature = layer_norm(state, "fc_norm", x[:, 1:].mean(1))
    else:
        sites["norm"] = layer_norm(state, "norm", x)
        feature = sites["norm"][:, 0]
    return sites | ({"head.0": linear(state, "head", feature)} if "head.weight" in state else {})


def patches(state: State, images: Tensor) -> Tensor:  # (B, N, D)
    """Each patch times the kernel, patches row by row."""
    kernel, p = state["patch_embed.proj.weight"], state["patch_embed.proj.weight"].shape[-1]
    tokens = [
        torch.einsum("bcij,dcij->bd", images[:, :, top : top + p, left : left + p], kernel)
        for top in range(0, images.shape[2], p)
        for left in range(0, images.shape[3], p)
    ]
    return torch.stack(tokens, 1) + state["patch_embed.proj.bias"]


def run_blocks(state: State, name: str, x: Tensor, heads: int, site: str) -> State:
    """Sites of pre-norm blocks."""
    sites: State = {}
    for i in range(DEPTH):
        at, block = f"{site}.{i}", f"{name}.{i}"
        qkv = linear(state, f"{block}.attn.qkv", layer_norm(state, f"{block}.norm1", x))  # (B, T, 3D)
        q, k, v = (third.chunk(heads, -1) for third in qkv.chunk(3, -1))  # H times (B, T, d)
        scores = [torch.einsum("bqd,bkd->bqk", q[h], k[h]) / math.sqrt(q[h].shape[-1]) for h in range(heads)]
        attention = [each.exp() / each.exp().sum(-1, keepdim=True) for each in scores]
        mixed = torch.cat([attention[h] @ v[h] for h in range(heads)], -1)  # (B, T, D)
        mid = x + linear(state, f"{block}.attn.proj", mixed)
        hidden = linear(state, f"{block}.mlp.fc1", layer_norm(state, f"{block}.norm2", mid))
        gelu = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        x = mid + linear(state, f"{block}.mlp.fc2", gelu)
        sites |= {f"{at}.{part}": torch.stack(values, 1) for part, values in zip("qkv", (q, k, v), strict=True)}
        sites |= {f"{at}.attn_map": torch.stack(attention, 1), f"{at}.mid": mid, at: x}
    return sites


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def layer_norm(state: State, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return centred / spread * state[f"{name}.weight"] + state[f"{name}.bias"]


def sincos(rows: int, columns: int, width: int, row_first: bool) -> Tensor:  # (1, 1 + N, D)
    """Fixed positions, number by number."""
    table = torch.zeros(1 + rows * columns, width)
    quarter = width // 4
    for n in range(rows * columns):
        row, column = divmod(n, columns)
        for axis, at in enumerate((row, column) if row_first else (column, row)):
            for k in range(quarter):
                angle = at / 10000 ** (k / quarter)
                table[1 + n, 2 * axis * quarter + k] = math.sin(angle)
                table[1 + n, (2 * axis + 1) * quarter + k] = math.cos(angle)
    return table.unsqueeze(0)


def cubic(t: float) -> float:
    """The convolution kernel of bicubic interpolation, a = −0.75."""
    t, a = abs(t), -0.75
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def matrix(new: int, old: int, scale: float) -> Tensor:  # (new, old)
    """What bicubic interpolation does to one axis: row i is the new place i, at the old place (i + ½)/scale − ½."""
    weights = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        place = (i + 0.5) / scale - 0.5
        for tap in range(math.floor(place) - 1, math.floor(place) + 3):
            weights[i, min(max(tap, 0), old - 1)] += cubic(place - tap)
    return weights


def resized(positions: Tensor, rows: int, columns: int, more: float = 0.0) -> Tensor:  # (1, 1 + N, D)
    """Positions for another grid, number by number; DINO's scale is that of a grid 0.1 patches larger."""
    patches = positions[0, 1:].reshape(SIDE, SIDE, -1).double()
    down, across = (matrix(new, SIDE, (new + more) / SIDE) for new in (rows, columns))
    new = torch.einsum("ri,cj,ijd->rcd", down, across, patches).reshape(1, rows * columns, -1)
    return torch.cat([positions[:, :1].double(), new], 1)


def saved(content: Any, folder: Path, name: str = "file.pth") -> Path:
    torch.save(content, folder / name)
    return folder / name


def images(height: int = SIZE, width: int = SIZE) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def check_sites(encoder: Encoder, expected: Mapping[str, Tensor], pixels: Tensor) -> None:
    """Every expected site is there, and equal to 1e-5."""
    with capture(encoder, ["**"]) as sites:
        encoder(pixels)
    assert set(expected) <= set(sites)
    assert not {"norm", "head.0"} & (set(sites) - set(expected))
    for name, value in expected.items():
        torch.testing.assert_close(sites[name], value.float(), rtol=0, atol=1e-5, msg=lambda m, at=name: f"{at}: {m}")
