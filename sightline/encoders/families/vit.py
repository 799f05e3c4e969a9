"""timm's VisionTransformer: ViT, DeiT, DINO, DINOv2 with registers, MAE, CLIP and SigLIP image towers, …"""

from collections.abc import Callable
from typing import Any

from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import nn

from sightline.encoders.sites import ATTENTION_POINTS, Anatomy, Tap, Tokens

# What the layer before the activation function of an MLP is called. A gated MLP has two: the gate is the one that
# the activation function sees.
FIRST_LAYERS = ("fc1", "fc1_g", "gate_proj", "up_proj")


def matches(module: nn.Module) -> bool:
    return isinstance(module, VisionTransformer)


def anatomy(module: VisionTransformer, size: tuple[int, int]) -> Anatomy:
    return timm_anatomy("vit", module, size, block_taps)


def block_taps(prefix: str, block: nn.Module) -> dict[str, Tap]:
    if isinstance(block, (Block, ResPostBlock)):
        taps = transformer_taps(
            prefix,
            block,
            norm1=block.norm1,
            attention=block.attn,
            qkv=Tap(block.attn.get_submodule("qkv")),
            norm2=block.norm2,
            mlp=block.mlp,
            post_norm=isinstance(block, ResPostBlock),
        )
        if getattr(block.attn, "window", 0):  # of ViTDet: a product for each window and none for the image
            return {site: tap for site, tap in taps.items() if tap.point not in ATTENTION_POINTS}
        return taps
    taps = {prefix: Tap(block)}
    if hasattr(block, "fused_attn"):  # attention and MLP side by side, computed by the block itself
        taps = {f"{prefix}.{point}": Tap(block, point) for point in ATTENTION_POINTS} | taps
    return taps


def timm_anatomy(
    family: str, module: Any, size: tuple[int, int], taps_of: Callable[[str, nn.Module], dict[str, Tap]]
) -> Anatomy:
    """Sites and token layout of those timm models that have `patch_embed`, `blocks`, `norm` and `head`."""
    embed, blocks = module.patch_embed, list(module.blocks)
    fixed = embed.img_size if embed.strict_img_size else None
    taps = {"embed": Tap(blocks[0], "input")}
    for number, block in enumerate(blocks):
        taps |= taps_of(f"block.{number}", block)
    if not isinstance(module.norm, nn.Identity):
        taps["norm"] = Tap(module.norm)
    heads = [head for name in ("head", "head_dist") if isinstance(head := getattr(module, name, None), nn.Linear)]
    taps |= {f"head.{number}": Tap(head) for number, head in enumerate(heads)}
    rows, columns = embed.dynamic_feat_size(fixed or size)
    return Anatomy(
        family=family,
        depth=len(blocks),
        taps=taps,
        tokens=Tokens(module.num_prefix_tokens, 0 if module.cls_token is not None else None, (rows, columns)),
        heads=getattr(getattr(blocks[0], "attn", blocks[0]), "num_heads", None),
        patch=embed.feat_ratio(),
        size=fixed,
    )


def transformer_taps(
    prefix: str,
    block: nn.Module,
    *,
    norm1: nn.Module,
    attention: nn.Module,
    qkv: Tap,
    norm2: nn.Module,
    mlp: nn.Module,
    post_norm: bool = False,
) -> dict[str, Tap]:
    """Sites of one block, in order of computation.

    Pre-norm: x + attention(norm1(x)), then x + mlp(norm2(x)).
    Post-norm: x + norm1(attention(x)), then x + norm2(mlp(x)).
    """
    attend = {"qkv": qkv} | {point: Tap(attention, point) for point in ATTENTION_POINTS}
    attend["attn"] = Tap(attention)
    first = next((getattr(mlp, name) for name in FIRST_LAYERS if hasattr(mlp, name)), None)
    feed = ({} if first is None else {"fc1": Tap(first)}) | {"mlp": Tap(mlp)}
    if post_norm:
        taps = attend | {"norm1": Tap(norm1), "mid": Tap(mlp, "input")} | feed | {"norm2": Tap(norm2)}
    else:
        taps = {"norm1": Tap(norm1)} | attend | {"mid": Tap(norm2, "input"), "norm2": Tap(norm2)} | feed
    return {f"{prefix}.{name}": tap for name, tap in taps.items()} | {prefix: Tap(block)}
