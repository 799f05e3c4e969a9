"""Small objectives of reconstruction, and batches of an endless set of images."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sightline.core.schedules import Progress
from sightline.training.backbones import Backbone, build
from sightline.training.objective import Views, objective_named

VIT = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4)
CONVNEXT = Backbone("convnextv2_atto", size=32, patch=1)  # total stride 8
SMALL_DECODER: dict[str, Any] = {"decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}
BATCH = 6


def make_views(n: int = BATCH, size: int = 16, classes: int = 3, start: int = 0) -> Views:
    """Some of the same endless batch: image i has the same pixels, label and key whatever the batch."""
    noise = [torch.randn(3, size, size, generator=torch.Generator().manual_seed(start + i)) for i in range(n)]
    pixels = torch.stack(noise) / 2 + torch.linspace(-4, 4, size)  # brighter to the right: something to be learnt
    labels = torch.tensor([(start + i) % classes if (start + i) not in (0, 4, 6, 7) else -1 for i in range(n)])
    return Views([pixels], labels, np.arange(start, start + n, dtype=np.uint64), Progress(0, 10, 5))


def make(name: str, backbone: Backbone = VIT, **settings: Any) -> Any:
    torch.manual_seed(0)
    plugin = objective_named(name)
    defaults: dict[str, dict[str, Any]] = {"supervised": {}, "mae": SMALL_DECODER, "simmim": {"mask_unit": 8}}
    module = build(backbone, classes=3 if name == "supervised" else 0).module
    return plugin.Objective(module, plugin.Config(**{**defaults[name], **settings}))


def naive_mae(images: Tensor, pred: Tensor, mask: Tensor, p: int, norm: bool) -> float:
    """Σ over hidden patches of the mean squared error, by loops."""
    columns, each = images.shape[-1] // p, []
    for b in range(len(images)):
        for n in range(mask.shape[1]):
            if mask[b, n]:
                y, x = n // columns * p, n % columns * p
                pixels = images[b, :, y : y + p, x : x + p].double().numpy()
                t = np.array([pixels[c, i, j] for i in range(p) for j in range(p) for c in range(3)])
                if norm:
                    t = (t - t.mean()) / math.sqrt(t.var(ddof=1) + 1e-6)
                each.append(((pred[b, n].detach().double().numpy() - t) ** 2).mean())
    return float(np.mean(each))


def naive_norm_target(images: Tensor, side: int) -> np.ndarray:
    x = images.double().numpy()
    target, reach = np.zeros_like(x), side // 2
    for b, c, row, column in np.ndindex(*x.shape):
        around = x[b, c, max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1]
        target[b, c, row, column] = (x[b, c, row, column] - around.mean()) / math.sqrt(around.var(ddof=1) + 1e-6)
    return target


def other_pixels(images: Tensor, mask: Tensor) -> Tensor:
    """The same images with noise where the mask (B, h, w) is true."""
    return torch.where(mask.unsqueeze(1), torch.randn(images.shape), images)


def scramble(module: nn.Module) -> None:
    """Biases and GRN that are not zero, so that they can be told from nothing."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1 and "norm.weight" not in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))


def naive_window(vit: Any, tokens: Tensor, places: Tensor, window: int) -> Tensor:
    """Blocks with softmax over the patches of a window and CLS, image by image; places (B, kept, 2)."""
    result = []
    for x, where in zip(tokens, places, strict=True):
        T, D = x.shape
        near = torch.ones(T, T, dtype=torch.bool)
        for i in range(T - 1):
            for j in range(T - 1):
                near[1 + i, 1 + j] = bool((where[i] - where[j]).abs().max() <= window // 2)
        for block in vit.blocks:
            q, k, v = block.attn.qkv(block.norm1(x)).reshape(T, 3, 2, D // 2).permute(1, 2, 0, 3)
            scores = (q @ k.transpose(1, 2) / math.sqrt(D // 2)).masked_fill(~near, -math.inf)
            x = x + block.attn.proj((scores.softmax(-1) @ v).transpose(0, 1).reshape(T, D))
            x = x + block.mlp(block.norm2(x))
        result.append(vit.norm(x))
    return torch.stack(result)
