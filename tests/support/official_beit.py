"""The official model of BEiT and SimMIM as a plain function of weights with official names, and tiny such weights.

B images, N patches on a grid of rows × columns, T = 1 + N tokens, D width, H heads, d = D / H, R rows of a table.
"""

import numpy as np
import torch
from scipy.interpolate import RectBivariateSpline
from torch import Tensor
from torch.nn import functional as F

from sightline.encoders.encoder import Encoder
from sightline.encoders.watching import capture

WIDTH, HEADS, DEPTH, PATCH, GRID, CLASSES = 24, 3, 2, 4, 3, 5
SIZE = GRID * PATCH
SHARED = "rel_pos_bias.relative_position_bias_table"


def own(block: int) -> str:
    """Name of the table of a block."""
    return f"blocks.{block}.attn.relative_position_bias_table"


def weights(
    *, shared: bool = True, per_block: bool = False, positions: bool = False, classes: int = 0, pooled: bool = False
) -> dict[str, Tensor]:
    """Random weights; `pooled` is the classifier on the mean of patches, which has fc_norm in the place of norm."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=random) * std

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": 1 + normal(WIDTH), f"{name}.bias": normal(WIDTH)}

    def linear(name: str, outputs: int, inputs: int) -> dict[str, Tensor]:
        return {f"{name}.weight": normal(outputs, inputs), f"{name}.bias": normal(outputs)}

    def table(name: str) -> dict[str, Tensor]:
        bias = normal((2 * GRID - 1) ** 2 + 3, HEADS, std=1.0)
        return {name: bias, name.replace("bias_table", "index"): position_index(GRID, GRID)}

    state = {"cls_token": normal(1, 1, WIDTH), "mask_token": normal(1, 1, WIDTH)}
    state |= {"pos_embed": normal(1, 1 + GRID**2, WIDTH)} if positions else {}
    state |= {"patch_embed.proj.weight": normal(WIDTH, 3, PATCH, PATCH), "patch_embed.proj.bias": normal(WIDTH)}
    state |= table(SHARED) if shared else {}
    for i in range(DEPTH):
        block = f"blocks.{i}"
        state |= {f"{block}.gamma_1": normal(WIDTH), f"{block}.gamma_2": normal(WIDTH)} | norm(f"{block}.norm1")
        state |= {f"{block}.attn.q_bias": normal(WIDTH), f"{block}.attn.v_bias": normal(WIDTH)}
        state |= table(own(i)) if per_block else {}
        state |= {f"{block}.attn.qkv.weight": normal(3 * WIDTH, WIDTH)} | linear(f"{block}.attn.proj", WIDTH, WIDTH)
        state |= norm(f"{block}.norm2")
        state |= linear(f"{block}.mlp.fc1", 4 * WIDTH, WIDTH) | linear(f"{block}.mlp.fc2", WIDTH, 4 * WIDTH)
    state |= norm("fc_norm" if pooled else "norm")
    state |= linear("head", classes, WIDTH) if classes else {}
    return state


def finetuned() -> dict[str, Tensor]:
    """Weights of a fine-tuned model: a table in every block, mean pooling, a classifier."""
    state = weights(shared=False, per_block=True, classes=CLASSES, pooled=True)
    del state["mask_token"]
    return state


def position_index(rows: int, columns: int) -> Tensor:  # (T, T)
    """Which row of the table each pair of tokens has."""
    between = (2 * rows - 1) * (2 * columns - 1)
    index = torch.empty(1 + rows * columns, 1 + rows * columns, dtype=torch.long)
    for query in range(rows * columns):
        for key in range(rows * columns):
            down, right = query // columns - key // columns, query % columns - key % columns
            index[1 + query, 1 + key] = (down + rows - 1) * (2 * columns - 1) + (right + columns - 1)
    index[0, :], index[:, 0], index[0, 0] = between, between + 1, between + 2
    return index


def check(encoder: Encoder, weights: dict[str, Tensor]) -> None:
    """Every site of the encoder must be what the official model computes with these weights."""
    images = torch.randn(2, 3, *encoder.preprocess.size, generator=torch.Generator().manual_seed(1))
    wanted = activations(weights, images)
    with torch.no_grad(), capture(encoder, "**") as found:
        found["output"] = encoder(images)
    assert set(found) == set(wanted)
    for site, value in found.items():
        torch.testing.assert_close(
            value.double(), wanted[site], rtol=1e-5, atol=1e-5, msg=lambda m, s=site: f"{s}: {m}"
        )


def activations(
    weights: dict[str, Tensor],
    images: Tensor,
    mask: Tensor | None = None,
    kept: list[int] | None = None,
    window: int = 0,
) -> dict[str, Tensor]:
    """What the official model computes from images (B, 3, h, w), in float64, by site.

    In the place of patches where mask (B, N) is true stands the mask token. If only some patches are kept, the others
    do not exist. With a window patches attend to those at most half of it away, and to CLS.
    """
    state = {name: value.double() for name, value in weights.items()}
    patches = F.conv2d(images.double(), state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=PATCH)
    rows, columns = patches.shape[2:]
    index = position_index(rows, columns)
    forbidden = torch.zeros(index.shape, dtype=torch.float64)
    for i in range(rows * columns):
        for j in range(rows * columns):
            if window and max(abs(i // columns - j // columns), abs(i % columns - j % columns)) > window // 2:
                forbidden[1 + i, 1 + j] = -torch.inf
    tokens = patches.flatten(2).mT
    if mask is not None:
        tokens = torch.where(mask[:, :, None], state["mask_token"], tokens)
    x = torch.cat([state["cls_token"].expand(len(images), -1, -1), tokens], 1)  # (B, T, D)
    x = x + state.get("pos_embed", 0)
    if kept is not None:
        places = [0, *(1 + patch for patch in kept)]
        x, index, forbidden = x[:, places], index[places][:, places], forbidden[places][:, places]
    found = {"embed": x}
    for i in range(DEPTH):
        block = f"blocks.{i}"
        y = _norm(state, f"{block}.norm1", x)
        q_bias, v_bias = state[f"{block}.attn.q_bias"], state[f"{block}.attn.v_bias"]
        qkv = y @ state[f"{block}.attn.qkv.weight"].T + torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))  # (B, H, T, d)
        scores = (q * (WIDTH // HEADS) ** -0.5) @ k.mT + forbidden
        for name in (own(i), SHARED):
            if name in state:
                scores = scores + state[name][index].permute(2, 0, 1)
        attention = scores.softmax(-1)
        heads = attention @ v
        attn = _linear(state, f"{block}.attn.proj", heads.transpose(1, 2).flatten(2))
        mid = x + state[f"{block}.gamma_1"] * attn
        z = _norm(state, f"{block}.norm2", mid)
        fc1 = _linear(state, f"{block}.mlp.fc1", z)
        mlp = _linear(state, f"{block}.mlp.fc2", fc1 * (1 + torch.erf(fc1 / 2**0.5)) / 2)
        x = mid + state[f"{block}.gamma_2"] * mlp
        sites = {"norm1": y, "qkv": qkv, "q": q, "k": k, "v": v, "attn_map": attention, "heads": heads, "attn": attn}
        sites |= {"mid": mid, "norm2": z, "fc1": fc1, "mlp": mlp}
        found |= {f"block.{i}.{name}": value for name, value in sites.items()} | {f"block.{i}": x}
    if "norm.weight" in state:
        found["norm"] = _norm(state, "norm", x)
        pooled = found["norm"][:, 0]
    else:
        pooled = _norm(state, "fc_norm", x[:, 1:].mean(1))
    if "head.weight" in state:
        found["head.0"] = pooled = _linear(state, "head", pooled)
    return found | {"output": pooled}


def _norm(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def _linear(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def resized_table(table: Tensor, rows: int, columns: int) -> Tensor:  # (R, H) -> (R', H)
    """What the official code makes of a table: interp2d with kind="cubic" is FITPACK's spline, as here."""
    side = round((len(table) - 3) ** 0.5)
    where = [positions_of(side, 2 * n - 1) for n in (rows, columns)]
    new = [np.arange(1.0 - n, n) for n in (rows, columns)]
    maps = table[:-3].double().reshape(side, side, -1).numpy()
    spline = [RectBivariateSpline(*where, maps[..., head], kx=3, ky=3, s=0)(*new) for head in range(maps.shape[-1])]
    return torch.cat([torch.from_numpy(np.stack(spline, -1)).reshape(-1, maps.shape[-1]), table[-3:].double()])


def positions_of(old: int, new: int) -> list[float]:
    """Where the official code takes `old` relative positions to be, among `new` ones at whole numbers."""
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        q = (low + high) / 2
        low, high = (low, q) if sum(q**i for i in range(old // 2)) > new // 2 else (q, high)
    right = [sum(q**i for i in range(n + 1)) for n in range(old // 2)]
    return [-x for x in reversed(right)] + [0.0] + right
