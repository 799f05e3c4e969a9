"""The forward pass of a ViT in steps, for losses that hide patches and analyses that look inside.

B images, N patches on a grid of rows × columns, P prefix tokens (CLS, registers), T = P + N tokens, D width.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any, TypeGuard

import torch
from timm.models.beit import Beit, gen_relative_position_index
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.encoders.modules.positions import Resize, by_scale, by_size, resize_table

Vit = VisionTransformer | Beit


def is_vit(module: nn.Module) -> TypeGuard[Vit]:
    """Whether it is cut into patches, so that its tokens can be masked."""
    # A distilled DeiT has a token that the steps below do not know, and ViTDet's attention needs all of the grid.
    known = getattr(module, "dist_token", None) is None and not hasattr(module, "windows")
    return isinstance(module, Vit) and known


def patch_of(vit: Vit) -> int:
    """Side of a patch in pixels."""
    height, width = vit.patch_embed.patch_size
    if height != width:
        raise InputError(f"Patches of {height} × {width} pixels are not supported here; they must be square")
    return int(height)


def grid_of(vit: Vit, images: Tensor) -> tuple[int, int]:
    """Rows and columns of patches of images (B, 3, h, w)."""
    patch = patch_of(vit)
    return images.shape[-2] // patch, images.shape[-1] // patch


def features(
    backbone: nn.Module, images: Tensor, keep: Tensor | None = None, resize: Resize = by_size
) -> Tensor:  # (B, 3, h, w) -> (B, D), the backbone's own pooling
    """Pooled features before any classifier; `keep` as in `encode`, `resize` as in `embed`."""
    if is_vit(backbone):
        tokens = embed(backbone, images, resize=resize)
        tokens = encode(backbone, tokens, grid_of(backbone, images), keep, cls_alone=_only_cls_counts(backbone))
        pooled: Tensor = backbone.forward_head(tokens, pre_logits=True)
        return pooled
    if keep is not None:
        raise InputError(f"Patches can be left out of a ViT only, not of {type(backbone).__name__}")
    timm_model: Any = backbone
    result: Tensor = timm_model.forward_head(timm_model.forward_features(images), pre_logits=True)
    return result


def embed(
    vit: Vit, images: Tensor, mask: Tensor | None = None, mask_token: Tensor | None = None, resize: Resize = by_size
) -> Tensor:  # (B, 3, h, w) -> (B, T, D)
    """Tokens with their positions, as they enter the first block, for any size of image.

    Where mask (B, N) is true, mask_token (1, 1, D) stands in the place of the patch's embedding. `resize` gives images
    of another size than the backbone's own their positions: each objective with small crops says how.
    """
    patches = vit.patch_embed.norm(vit.patch_embed.proj(images).flatten(2).transpose(1, 2))  # (B, N, D)
    if mask is not None and mask_token is not None:
        patches = torch.where(mask.unsqueeze(-1), mask_token.to(patches.dtype), patches)
    own = (vit.cls_token, getattr(vit, "reg_token", None))
    prefix = [token.expand(len(images), -1, -1) for token in own if token is not None]
    positions = _positions(vit, grid_of(vit, images), resize)
    if positions is None:
        tokens = torch.cat([*prefix, patches], 1)
    elif getattr(vit, "no_embed_class", False):
        tokens = torch.cat([*prefix, patches + positions], 1)
    else:
        tokens = torch.cat([*prefix, patches], 1) + positions
    result: Tensor = vit.pos_drop(tokens)
    if isinstance(vit, VisionTransformer):
        result = vit.norm_pre(result)
    return result


def _positions(vit: Vit, grid: tuple[int, int], resize: Resize) -> Tensor | None:
    own = tuple(vit.patch_embed.grid_size)
    if vit.pos_embed is None or grid == own:
        return vit.pos_embed
    prefix, patches = vit.pos_embed.tensor_split([vit.pos_embed.shape[1] - math.prod(own)], 1)
    resized = resize(patches.mT.reshape(1, -1, *own), grid)  # (1, D, rows, columns)
    return torch.cat([prefix, resized.flatten(2).mT], 1)


def _only_cls_counts(vit: Vit) -> bool:
    """Whether its features are the CLS token that leaves the last block."""
    return vit.global_pool == "token" and getattr(vit, "attn_pool", None) is None


def encode(
    vit: Vit, tokens: Tensor, grid: tuple[int, int], keep: Tensor | None = None, cls_alone: bool = False
) -> Tensor:  # (B, T, D) -> (B, T, D), or (B, P + kept, D), or (B, 1, D)
    """Blocks and final norm; `keep` (B, kept) names the patches that enter, in that order, all others are left out.

    With `cls_alone` nobody asks for the other tokens, and a last block that can do without them leaves them out.
    """
    prefix = vit.num_prefix_tokens
    rows = None
    if keep is not None:
        rows = torch.cat([torch.arange(prefix, device=keep.device).expand(len(keep), -1), keep + prefix], 1)
        tokens = tokens.gather(1, rows.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
    window = int(getattr(vit, "attention_window", 0))
    mask = _of_pairs(_neighbours(grid, window, prefix, tokens.device), rows) if window else None
    if mask is not None and rows is not None:
        mask = mask.unsqueeze(1)  # (B, 1, P + kept, P + kept)
    if isinstance(vit, Beit):
        tokens = _beit_blocks(vit, tokens, grid, rows, mask)
    else:
        *before, last = vit.blocks
        for block in before:
            tokens = block(tokens, attn_mask=mask)
        tokens = _cls_of_block(last, tokens, mask) if cls_alone and _may_be_cut(last) else last(tokens, attn_mask=mask)
    result: Tensor = vit.norm(tokens)
    return result


def _may_be_cut(block: nn.Module) -> TypeGuard[Block]:
    """Whether a block may be computed in part: hooks and compiled code are of the whole of it."""
    whole = block._forward_hooks or block._forward_pre_hooks or block._compiled_call_impl is not None
    return type(block) is Block and not whole


def _cls_of_block(block: Block, tokens: Tensor, mask: Tensor | None) -> Tensor:  # (B, T, D) -> (B, 1, D)
    """What a block makes of the CLS token: the MLP, two thirds of its work, has no need of the other tokens."""
    attended = block.attn(block.norm1(tokens), attn_mask=mask)[:, :1]
    cls = tokens[:, :1] + block.drop_path1(block.ls1(attended))
    result: Tensor = cls + block.drop_path2(block.ls2(block.mlp(block.norm2(cls))))
    return result


def _of_pairs(square: Tensor, rows: Tensor | None) -> Tensor:  # (T, T) -> (B, kept, kept)
    """What a matrix says of the pairs of those tokens that are kept, `rows` (B, kept); of all if it is None."""
    return square if rows is None else square[rows.unsqueeze(2), rows.unsqueeze(1)]


def _beit_blocks(
    beit: Beit, tokens: Tensor, grid: tuple[int, int], rows: Tensor | None, mask: Tensor | None
) -> Tensor:  # (B, T, D) -> (B, T, D)
    """The blocks of a Beit, with its relative positions for this grid and the tokens that are kept."""
    index = _of_pairs(_relative_index(grid, tokens.device), rows)
    smaller = grid != tuple(beit.patch_embed.grid_size)

    def bias(table: Tensor) -> Tensor:  # (R, H) -> (H, T, T), or (B, H, kept, kept)
        return F.embedding(index, resize_table(table, grid) if smaller else table).movedim(-1, -3).contiguous()

    shared = [] if beit.rel_pos_bias is None else [bias(beit.rel_pos_bias.relative_position_bias_table)]
    if mask is not None:
        shared.append(torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf))
    for block in beit.blocks:
        with _table_aside(block.attn) as table:
            terms = shared if table is None else [*shared, bias(table)]
            tokens = block(tokens, shared_rel_pos_bias=functools.reduce(torch.add, terms) if terms else None)
    return tokens


@contextlib.contextmanager
def _table_aside(attention: Any) -> Iterator[Tensor | None]:
    """Let a block go without its own table, which timm would read for all patches of its own grid."""
    table = attention.relative_position_bias_table
    attention.relative_position_bias_table = None
    try:
        yield table
    finally:
        attention.relative_position_bias_table = table


@functools.lru_cache(maxsize=8)
def _relative_index(grid: tuple[int, int], device: torch.device) -> Tensor:  # (T, T)
    """Which row of a table each pair of tokens has."""
    with torch.inference_mode(False):  # or a training could not use what an analysis has left here
        return gen_relative_position_index(grid, device)


def check_window(window: int) -> None:
    """A window around a patch has an odd side; 0 is none."""
    if window < 0 or (window and window % 2 == 0):
        raise InputError(f"attention_window is {window}; it must be odd, since a patch is its centre, or 0 for none")


def restrict(module: nn.Module, window: int) -> None:
    """Let the patches of a ViT attend to the window × window patches around them only, from now on and in every use."""
    check_window(window)
    if not is_vit(module):
        raise InputError(f"attention_window is for a ViT, not for {type(module).__name__}; leave it out")
    module.attention_window = window  # type: ignore[assignment]
    # Bound to the module, so that a copy has its own. Everything that calls the module comes through here.
    module.forward_features = MethodType(_forward_restricted, module)  # type: ignore[method-assign]


def _forward_restricted(vit: Vit, images: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """timm's `forward_features` with a window, in the steps that training takes."""
    size = tuple(images.shape[-2:])
    if attn_mask is not None or is_causal:
        raise InputError("A ViT with an attention_window has its own mask; give no other")
    if vit.patch_embed.strict_img_size and size != tuple(vit.patch_embed.img_size):
        raise InputError(
            f"Images of {size} pixels were given to a ViT for {tuple(vit.patch_embed.img_size)}; resize them"
        )
    return encode(vit, embed(vit, images), grid_of(vit, images))


def _neighbours(grid: tuple[int, int], window: int, prefix: int, device: torch.device) -> Tensor:
    """Who may attend to whom, (T, T): patches in a window around each other; prefix tokens and everyone."""
    rows, columns = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
    place = torch.stack([rows.flatten(), columns.flatten()], 1)
    near = (place[:, None] - place[None, :]).abs().amax(-1) <= window // 2
    mask = torch.ones(prefix + len(near), prefix + len(near), dtype=torch.bool, device=device)
    mask[prefix:, prefix:] = near
    return mask


def sincos(grid: Sequence[int], width: int, prefix: int = 0, column_first: bool = True) -> Tensor:  # (1, P + N, D)
    """Fixed positions [sin(xω), cos(xω), sin(yω), cos(yω)], ω = 10000^(−k/(D/4)), zeros for the prefix tokens.

    x is the column and y the row, as in MAE; MoCo-v3 has them the other way round (`column_first=False`).
    """
    if width % 4:
        raise InputError(f"Sine-cosine positions need a width that 4 divides, not {width}")
    omega = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    axes = (columns, rows) if column_first else (rows, columns)
    angles = [axis.flatten()[:, None] * omega for axis in axes]
    patches = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], 1)
    return torch.cat([torch.zeros(prefix, width, dtype=torch.float64), patches]).float().unsqueeze(0)


def is_sincos(patches: Tensor, column_first: bool) -> bool:  # (1, N, D)
    """Whether positions are the fixed sine-cosine ones: column first those of MAE, row first those of MoCo-v3."""
    _, n, width = patches.shape
    side = math.isqrt(n)
    if side < 2 or side**2 != n or width % 4:  # of one patch, both orders are the same
        return False
    # The official ones are computed in float32, ours in float64; the two orders are some 1 apart.
    return torch.allclose(patches.float().cpu(), sincos((side, side), width, 0, column_first), rtol=0, atol=1e-3)


def by_sincos(patches: Tensor, grid: tuple[int, int]) -> Tensor:  # (1, D, r, c) -> (1, D, rows, columns)
    """As MoCo-v3, whose positions are not learned but computed. Fine-tuned ones are resized as in DeiT."""
    if not is_sincos(patches.flatten(2).mT, column_first=False):
        return by_size(patches, grid)
    return sincos(grid, patches.shape[1], column_first=False).mT.reshape(1, -1, *grid).to(patches)


RESIZES: dict[str, Resize] = {"by_size": by_size, "by_scale": by_scale, "by_sincos": by_sincos}  # as files name them


@torch.no_grad()
def sincos_positions(vit: Vit, column_first: bool = True) -> None:
    """Give a ViT sine-cosine positions to begin with; a Beit has relative ones, which begin with 0."""
    if vit.pos_embed is None and isinstance(vit, Beit):
        return
    if vit.pos_embed is None:
        raise InputError("This ViT has no absolute positions that could be sine-cosine ones; choose another backbone")
    prefix = vit.pos_embed.shape[1] - vit.patch_embed.num_patches
    vit.pos_embed.copy_(sincos(vit.patch_embed.grid_size, vit.embed_dim, prefix, column_first))


def fix_positions(vit: Vit, column_first: bool = True) -> None:
    """Give a ViT sine-cosine positions that are not trained."""
    sincos_positions(vit, column_first)
    if vit.pos_embed is not None:
        vit.pos_embed.requires_grad_(False)


@torch.no_grad()
def xavier(module: nn.Module) -> None:
    """Initialise linear layers as MAE and MoCo-v3 do: Xavier uniform, biases zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


@torch.no_grad()
def initialise(vit: Vit) -> None:
    """Xavier weights, the patch projection as a linear layer among them, and sine-cosine positions.

    As MAE begins, and MoCo-v3 nearly so. timm's weights and positions have the standard deviation 0.02 at any width,
    and a ViT has to learn first where its patches are; it is the positions that make the difference
    (docs/pretraining.md).
    """
    xavier(vit)
    nn.init.xavier_uniform_(vit.patch_embed.proj.weight.flatten(1))
    sincos_positions(vit)
