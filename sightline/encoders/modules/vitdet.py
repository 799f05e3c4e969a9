"""The attention of ViTDet: with relative positions of rows and columns, over the whole image or in windows of it.

With r and c the row and column of a patch, and R the vector of width d that a table has for a distance,

    softmax(q·k / √d + q·R_rows(r_q − r_k) + q·R_columns(c_q − c_k))

where q is not scaled in the second and third term. Windows of s × s patches lie side by side from the upper left
corner. Where they reach beyond the image there are empty patches, zero before q, k and v are made, to which the others
attend as well.

Source: Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection"; Li et al. 2022, "MViTv2".

B images, N patches on a grid of rows × columns, W windows of h × w patches (one window: the image), H heads, D width,
d = D / H.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.core.errors import InputError


def divide(module: nn.Module, windows: Sequence[int], relative: bool) -> None:
    """Give a ViT the attention of ViTDet: the side of the windows of each block, 0 where it sees the whole image."""
    if not isinstance(module, VisionTransformer) or module.num_prefix_tokens or len(windows) != len(module.blocks):
        raise InputError(f"windows={tuple(windows)} is for a ViT without CLS token, with a number for each block")
    for block, window in zip(module.blocks, windows, strict=True):
        part: Any = block
        part.attn = GridAttention(part.attn, module.patch_embed.grid_size, window, relative)
    module.windows = tuple(windows)  # type: ignore[assignment]


class GridAttention(nn.Module):
    """Attention of timm, where patches know how far they are from each other."""

    rel_pos_h: Tensor | None  # (2h − 1, d)
    rel_pos_w: Tensor | None  # (2w − 1, d)

    def __init__(self, attention: Any, grid: tuple[int, int], window: int, relative: bool) -> None:
        super().__init__()
        self.num_heads: int = attention.num_heads
        self.grid, self.window = tuple(grid), window
        self.qkv, self.proj = attention.qkv, attention.proj
        sides = (window, window) if window else self.grid
        for name, side in zip(("rel_pos_h", "rel_pos_w"), sides, strict=True):
            table = nn.Parameter(torch.zeros(2 * side - 1, attention.head_dim)) if relative else None
            self.register_parameter(name, table)

    def extra_repr(self) -> str:
        """What no weight tells."""
        return f"grid={self.grid}, window={self.window}, heads={self.num_heads}"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:  # (B, N, D)
        """The patches of the whole grid in their order, and nothing else."""
        B, N, D = x.shape
        rows, columns = self.grid
        if rows * columns != N or attn_mask is not None or is_causal:
            raise InputError(f"The attention of ViTDet takes all of {rows} × {columns} patches; load it with ?size=…")
        qkv = self.qkv(x).view(B, rows, columns, 3 * D)
        y = self._together(self._attend(self._apart(qkv))) if self.window else self._attend(qkv)
        result: Tensor = self.proj(y.reshape(B, N, D))
        return result

    def _apart(self, qkv: Tensor) -> Tensor:  # (B, rows, columns, 3D) -> (B·W, h, w, 3D)
        """Windows; an empty patch is where nothing is but the bias."""
        B, rows, columns, _ = qkv.shape
        side = self.window
        height, width = (-(-n // side) * side for n in (rows, columns))
        if (height, width) != (rows, columns):
            bias = torch.zeros_like(qkv[0, 0, 0]) if self.qkv.bias is None else self.qkv.bias.to(qkv.dtype)
            padded = bias.expand(B, height, width, -1).clone()
            padded[:, :rows, :columns] = qkv
            qkv = padded
        windows = qkv.reshape(B, height // side, side, width // side, side, -1).transpose(2, 3)
        return windows.reshape(-1, side, side, qkv.shape[-1])

    def _together(self, y: Tensor) -> Tensor:  # (B·W, h, w, D) -> (B, rows, columns, D)
        (rows, columns), side = self.grid, self.window
        down, across = (-(-n // side) for n in self.grid)
        whole = y.view(-1, down, across, side, side, y.shape[-1]).transpose(2, 3)
        return whole.reshape(-1, down * side, across * side, y.shape[-1])[:, :rows, :columns]

    def _attend(self, qkv: Tensor) -> Tensor:  # (B·W, h, w, 3D) -> (B·W, h, w, D)
        images, height, width, _ = qkv.shape
        q, k, v = qkv.reshape(images, height * width, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)  # (B·W, H, h·w, d)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(q, height, width))
        return y.transpose(1, 2).reshape(images, height, width, -1)

    def _bias(self, q: Tensor, height: int, width: int) -> Tensor | None:  # (B·W, H, h·w, h·w)
        if self.rel_pos_h is None or self.rel_pos_w is None:
            return None
        q = q.unflatten(2, (height, width))
        down = torch.einsum("...rcd,rkd->...rck", q, _by_distance(self.rel_pos_h, height))
        across = torch.einsum("...rcd,ckd->...rck", q, _by_distance(self.rel_pos_w, width))
        return (down.unsqueeze(-1) + across.unsqueeze(-2)).flatten(-2).flatten(2, 3)


def _by_distance(table: Tensor, n: int) -> Tensor:  # (2n − 1, d) -> (n, n, d)
    """Of each pair of rows (or columns) the vector for the distance from the second to the first."""
    at = torch.arange(n, device=table.device)
    return table[at[:, None] - at + n - 1]
