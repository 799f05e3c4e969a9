"""timm's VisionTransformer, Beit and Eva: what their sites show, against timm itself and against formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.encoders.watching import capture

TINY = "@random?img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5"
NO_PATCH = "@random?img_size=28&embed_dim=32&depth=2&num_heads=4&num_classes=5"
VITS = {
    "plain": f"timm:vit_tiny_patch16_224{TINY}",
    "registers": f"timm:vit_tiny_patch16_224{TINY}&reg_tokens=4",
    "no CLS": f"timm:vit_tiny_patch16_224{TINY}&class_token=False&global_pool=avg",
    "distilled": f"timm:deit_tiny_distilled_patch16_224{TINY}",
    "q/k norm": f"timm:vit_tiny_patch16_224{TINY}&qk_norm=True",
    "not square": f"timm:vit_tiny_patch16_224{TINY}&img_size=(32,48)",
    "any size": f"timm:vit_tiny_patch16_224{TINY}&dynamic_img_size=True",
    "norm in attention": f"timm:vit_tiny_patch16_224{TINY}&scale_attn_norm=True",
    "DINOv2": f"timm:vit_small_patch14_dinov2{NO_PATCH}",
    "DINOv2 giant with registers": f"timm:vit_giant_patch14_reg4_dinov2{NO_PATCH}",
    "CLIP": f"timm:vit_base_patch16_clip_224{TINY}",
    "SigLIP": f"timm:vit_base_patch16_siglip_224{TINY}",
    "post-norm": f"timm:vit_base_patch16_rpn_224{TINY}",
}
BEITS = {
    "BEiT, bias per block": f"timm:beit_base_patch16_224{TINY}",
    "BEiT, shared bias": f"timm:beit_base_patch16_224{TINY}&use_rel_pos_bias=False&use_shared_rel_pos_bias=True",
    "BEiT, not square": f"timm:beit_base_patch16_224{TINY}&img_size=(32,48)",
    "BEiT-v2": f"timm:beitv2_base_patch16_224{TINY}",
}
EVAS = {
    "EVA": f"timm:eva_large_patch14_196{NO_PATCH}",
    "EVA02": f"timm:eva02_tiny_patch14_224{NO_PATCH}",
    "EVA02, three projections": f"timm:eva02_base_patch14_224{NO_PATCH}&qkv_fused=False",
    "EVA02-CLIP": f"timm:eva02_base_patch16_clip_224{TINY}",
    "post-norm Eva": f"timm:eva02_tiny_patch14_224{NO_PATCH}&use_post_norm=True",
    "DINOv3": f"timm:vit_small_patch16_dinov3{TINY}",
    "DINOv3, SwiGLU": f"timm:vit_small_plus_patch16_dinov3{TINY}",
    "rope, register, no CLS": f"timm:vit_medium_patch16_rope_reg1_gap_256{TINY}",
    "mixed rope": f"timm:vit_small_patch16_rope_mixed_224{TINY}",
}
POST_NORM = {"post-norm", "post-norm Eva"}
ALL = VITS | BEITS | EVAS

members = pytest.mark.parametrize("reference", ALL.values(), ids=ALL.keys())


def scale(block: Any, number: int, x: Tensor) -> Tensor:
    """Layer scale: a module in VisionTransformer, a parameter in Beit and Eva, a norm in a post-norm block."""
    if hasattr(block, f"ls{number}"):
        return getattr(block, f"ls{number}")(x)
    if hasattr(block, f"gamma_{number}"):
        gamma = getattr(block, f"gamma_{number}")
        return x if gamma is None else gamma * x
    return getattr(block, f"norm{number}")(x)


def own_maps(encoder: Encoder, images: Tensor) -> list[Tensor]:
    """The attention maps that timm forms itself when it does not use fused attention."""
    maps: list[Tensor] = []
    layers = [encoder.sites[f"block.{number}.attn_map"].module for number in range(encoder.depth)]
    handles = [layer.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0])) for layer in layers]
    for layer in layers:
        layer.fused_attn = False
    with torch.no_grad():
        encoder(images)
    for layer, handle in zip(layers, handles, strict=True):
        handle.remove()
        layer.fused_attn = True
    return maps


@members
def test_looking(checks, reference):
    checks.all_of_it(*checks.load(reference))


@members
def test_attention(checks, reference):
    encoder, images = checks.load(reference)
    checks.attention_explains_the_layer(encoder, images, {"proj": "proj"})
    acts = checks.look(encoder, images)
    for number, own in enumerate(own_maps(encoder, images)):
        checks.close(acts[f"block.{number}.attn_map"], own)
        q, k = acts[f"block.{number}.q"], acts[f"block.{number}.k"]
        if encoder.family != "beit":  # which adds a bias; see below
            checks.close((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1), own)


@members
def test_stream(checks, reference):
    checks.the_stream_adds_up(*checks.load(reference), scale)


@members
def test_blocks_are_those_of_timm_and_not_normed(checks, reference):
    encoder, images = checks.load(reference)
    acts = checks.look(encoder, images)
    with torch.no_grad():
        final, maps = encoder.module.forward_intermediates(images, return_prefix_tokens=True, norm=False)
    rows, columns = encoder.tokens.grid
    for number, found in enumerate(maps):
        patches, prefix = found if isinstance(found, tuple) else (found, found.new_zeros(2, 0, 32))
        assert patches.shape[-2:] == (rows, columns)
        tokens = torch.cat([prefix, patches.flatten(2).mT], 1)
        assert prefix.shape[1] == encoder.tokens.prefix
        assert torch.equal(acts[f"block.{number}"], tokens)
    if "norm" in acts:
        assert torch.equal(acts["norm"], final)
        assert not torch.allclose(acts["norm"], acts["block.1"])


@pytest.mark.parametrize("reference", [ALL[n] for n in ("plain", "registers", "BEiT, bias per block", "EVA")])
def test_qkv_is_split_into_heads(checks, reference):
    checks.qkv_is_split_into_heads(*checks.load(reference))


def test_qkv_of_three_projections_has_their_biases(checks):
    encoder, images = checks.load(ALL["EVA02, three projections"])
    acts, layer = checks.look(encoder, images), encoder.module.blocks[0].attn
    with torch.no_grad():
        parts = [getattr(layer, name)(acts["block.0.norm1"]) for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(acts["block.0.qkv"], torch.cat(parts, -1))
    assert layer.q_proj.bias is not None


@pytest.mark.parametrize(
    ("name", "prefix", "cls", "grid"),
    [
        ("plain", 1, 0, (4, 4)),
        ("registers", 5, 0, (4, 4)),
        ("no CLS", 0, None, (4, 4)),
        ("distilled", 2, 0, (4, 4)),
        ("not square", 1, 0, (4, 6)),
        ("DINOv2 giant with registers", 5, 0, (2, 2)),
        ("SigLIP", 0, None, (4, 4)),
        ("BEiT, not square", 1, 0, (4, 6)),
        ("DINOv3", 5, 0, (4, 4)),
        ("rope, register, no CLS", 1, None, (4, 4)),
    ],
)
def test_tokens(name, prefix, cls, grid):
    tokens = load_encoder(ALL[name]).tokens
    assert (tokens.prefix, tokens.cls, tokens.grid) == (prefix, cls, grid)


def test_grid_follows_the_images_where_the_model_takes_any_size():
    module = load_encoder(ALL["any size"]).module
    from sightline.images.preprocess import Preprocess

    assert load_encoder(module, preprocess=Preprocess(size=(48, 64))).tokens.grid == (6, 8)


def test_heads_depth_patch_and_head():
    encoder = load_encoder(ALL["distilled"])
    assert (encoder.heads, encoder.depth, encoder.patch) == (4, 2, 8)
    assert [site for site in encoder.sites if site.startswith("head")] == ["head.0", "head.1"]
    assert "norm" not in load_encoder(ALL["no CLS"]).sites  # normed after pooling, so there are no normed tokens


def test_fc1_comes_before_the_activation_function(checks):
    encoder, images = checks.load(ALL["plain"])
    acts, mlp = checks.look(encoder, images), encoder.module.blocks[0].mlp
    with torch.no_grad():
        checks.close(mlp.fc2(nn.functional.gelu(acts["block.0.fc1"])), acts["block.0.mlp"])


def test_relative_position_bias_by_formula(checks):
    """index = (Δrow + g − 1)(2g − 1) + (Δcolumn + g − 1); the last three rows: CLS → token, token → CLS, CLS → CLS."""
    encoder, images = checks.load(ALL["BEiT, bias per block"])
    acts, g = checks.look(encoder, images), 4
    index = torch.empty(1 + g * g, 1 + g * g, dtype=torch.long)
    for a in range(g * g):
        for b in range(g * g):
            index[1 + a, 1 + b] = (a // g - b // g + g - 1) * (2 * g - 1) + a % g - b % g + g - 1
    size = (2 * g - 1) ** 2 + 3
    index[0, :], index[:, 0], index[0, 0] = size - 3, size - 2, size - 1
    for number, block in enumerate(encoder.module.blocks):
        bias = block.attn.relative_position_bias_table[index].permute(2, 0, 1).detach()  # (H, N, N)
        assert bias.abs().max() > 0.1
        q, k = acts[f"block.{number}.q"], acts[f"block.{number}.k"]
        checks.close((q @ k.mT / math.sqrt(8) + bias).softmax(-1), acts[f"block.{number}.attn_map"])


@pytest.mark.parametrize("name", ["plain", "q/k norm", "BEiT, shared bias", "EVA02", "DINOv3"])
def test_unfused_attention_is_seen_too_and_is_put_back(checks, name):
    encoder, images = checks.load(ALL[name])
    fused = checks.look(encoder, images)
    for block in encoder.module.blocks:
        block.attn.fused_attn = False
    with torch.no_grad():
        plain = encoder(images)
    acts = checks.look(encoder, images)
    for site, value in fused.items():
        checks.close(acts[site], value)
    assert not any(block.attn.fused_attn for block in encoder.module.blocks)
    with torch.no_grad(), capture(encoder, ["block.*", "block.*.qkv", "block.*.norm1"]):
        assert torch.equal(encoder(images), plain)  # without attention maps it is not even fused for a while


def test_unfused_stays_unfused_after_an_exception(checks):
    encoder, images = checks.load(ALL["plain"])
    encoder.module.blocks[1].attn.fused_attn = False
    with pytest.raises(RuntimeError), capture(encoder, ["block.*.attn_map"]):
        encoder(images[:, :2])
    assert not encoder.module.blocks[1].attn.fused_attn


def test_blocks_of_other_kinds(checks):
    encoder, images = checks.load(f"timm:vit_small_patch16_18x2_224{TINY}")  # two attention layers side by side
    assert list(encoder.sites) == ["embed", "block.0", "block.1", "norm", "head.0"]
    checks.all_of_it(encoder, images)


def test_attention_inside_the_block_itself(checks):
    from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

    module = VisionTransformer(224, 56, embed_dim=32, depth=2, num_heads=4, block_fn=ParallelScalingBlock).eval()
    encoder, images = checks.load(module)
    checks.all_of_it(encoder, images)
    acts = checks.look(encoder, images)
    for number, own in enumerate(own_maps(encoder, images)):
        checks.close(acts[f"block.{number}.attn_map"], own)


def test_two_attention_products_in_one_layer_are_refused(checks):
    from timm.models.vision_transformer import VisionTransformer

    module = VisionTransformer(224, 56, embed_dim=32, depth=2, num_heads=4, attn_layer="diff").eval()
    encoder, images = checks.load(module)
    with pytest.raises(InputError, match="more than one attention product"):
        checks.look(encoder, images, "block.0.attn_map")
    checks.look(encoder, images, "block.*")
