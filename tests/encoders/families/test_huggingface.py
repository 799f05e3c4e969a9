"""Hugging Face ViTs: sites against the library's own hidden states and eager attention maps."""

import copy

import pytest
import torch

from sightline.encoders.encoder import build_encoder
from sightline.encoders.families.huggingface import find_trunk, forward_of
from sightline.encoders.loading import load_encoder
from sightline.encoders.watching import capture
from sightline.images.preprocess import Preprocess

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
RATIO = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}
# class, configuration class, its values, (prefix tokens, CLS, grid), heads of the head
MEMBERS = {
    "ViT": ("ViTModel", "ViTConfig", SIZES, (1, 0, (4, 4)), 0),
    "ViT, not square": ("ViTModel", "ViTConfig", SIZES | {"image_size": (32, 48)}, (1, 0, (4, 6)), 0),
    "ViT classifier": ("ViTForImageClassification", "ViTConfig", SIZES, (1, 0, (4, 4)), 1),
    "DeiT": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", SIZES, (2, 0, (4, 4)), 2),
    "DINOv2": ("Dinov2Model", "Dinov2Config", RATIO, (1, 0, (4, 4)), 0),
    "DINOv2 with registers": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        RATIO | {"use_swiglu_ffn": True, "num_register_tokens": 3},
        (4, 0, (4, 4)),
        1,
    ),
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig", SIZES | {"num_register_tokens": 4}, (5, 0, (4, 4)), 0),
    "MAE": ("ViTMAEModel", "ViTMAEConfig", SIZES, (1, 0, (4, 4)), 0),
    "MAE with decoder": ("ViTMAEForPreTraining", "ViTMAEConfig", SIZES | DECODER, (1, 0, (4, 4)), 0),
    "MSN": ("ViTMSNModel", "ViTMSNConfig", SIZES, (1, 0, (4, 4)), 0),
    "BEiT, bias per block": (
        "BeitForImageClassification",
        "BeitConfig",
        SIZES | {"use_relative_position_bias": True},
        (1, 0, (4, 4)),
        1,
    ),
    "BEiT, shared bias": (
        "BeitForMaskedImageModeling",
        "BeitConfig",
        SIZES | {"use_shared_relative_position_bias": True, "use_mask_token": True},
        (1, 0, (4, 4)),
        0,
    ),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", SIZES, (1, 0, (4, 4)), 0),
    "CLIP with projection": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", SIZES, (1, 0, (4, 4)), 1),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", SIZES, (0, None, (4, 4)), 0),
    "CLIP with text": ("CLIPModel", "CLIPConfig", {"vision_config": SIZES, "text_config": TEXT}, (1, 0, (4, 4)), 0),
    "SigLIP with text": (
        "SiglipModel",
        "SiglipConfig",
        {"vision_config": SIZES, "text_config": TEXT},
        (0, None, (4, 4)),
        0,
    ),
}
members = pytest.mark.parametrize("name", MEMBERS)


def load(checks, name):
    model, config, values, _, _ = MEMBERS[name]
    module = getattr(transformers, model)(getattr(transformers, config)(**values)).eval()
    checks.shake(module)
    size = values.get("image_size", 32)  # type: ignore[attr-defined]
    preprocess = Preprocess(size=(size, size) if isinstance(size, int) else size)
    encoder = build_encoder(module, reference="module:test", preprocess=preprocess, forward=forward_of(module))
    return encoder, checks.images(encoder)


def own_outputs(encoder, images, implementation):
    """Hidden states and attention maps that the library itself gives, of a copy of the model."""
    trunk = find_trunk(copy.deepcopy(encoder.module)).module
    trunk.set_attn_implementation(implementation)
    extra = {}
    if "MAE" in type(trunk).__name__:
        trunk.embeddings.config.mask_ratio = 0.0
        extra["noise"] = torch.arange(16.0).expand(len(images), -1)
    with torch.no_grad():
        return trunk(images, output_hidden_states=True, output_attentions=implementation == "eager", **extra)


def scale(block, number, x):
    for name in (f"layer_scale{number}", f"lambda_{number}"):
        if hasattr(block, name):
            factor = getattr(block, name)
            return factor(x) if isinstance(factor, torch.nn.Module) else factor * x
    return x


@members
def test_looking(checks, name):
    checks.all_of_it(*load(checks, name))


@members
def test_layout(checks, name):
    encoder, images = load(checks, name)
    _, _, _, (prefix, cls, grid), heads = MEMBERS[name]
    assert (encoder.tokens.prefix, encoder.tokens.cls, encoder.tokens.grid) == (prefix, cls, grid)
    assert (encoder.family, encoder.depth, encoder.heads, encoder.patch) == ("huggingface", 2, 4, 8)
    assert sum(site.startswith("head") for site in encoder.sites) == heads
    assert checks.look(encoder, images, "block.0")["block.0"].shape == (2, encoder.tokens.count, 32)


@members
def test_attention(checks, name):
    encoder, images = load(checks, name)
    layer = encoder.sites["block.0.attn"].module
    checks.attention_explains_the_layer(encoder, images, {"proj": "o_proj" if hasattr(layer, "o_proj") else "out_proj"})
    acts = checks.look(encoder, images)
    for number, own in enumerate(own_outputs(encoder, images, "eager").attentions):
        checks.close(acts[f"block.{number}.attn_map"], own)


@members
def test_stream(checks, name):
    checks.the_stream_adds_up(*load(checks, name), scale)


@members
def test_blocks_are_the_hidden_states(checks, name):
    encoder, images = load(checks, name)
    acts = checks.look(encoder, images)
    embed, *blocks = own_outputs(encoder, images, "sdpa").hidden_states
    assert torch.equal(acts["embed"], embed)
    for number, block in enumerate(blocks):
        assert torch.equal(acts[f"block.{number}"], block)
    if "norm" in acts and acts["norm"].ndim == 3:
        assert not torch.allclose(acts["norm"], acts["block.1"])


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "DINOv3"])  # rotary embedding
def test_qkv_is_split_into_heads(checks, name):
    checks.qkv_is_split_into_heads(*load(checks, name))


def test_mae_neither_masks_nor_shuffles(checks):
    """The tokens of MAE are in raster order: a plain ViT with the same weights has the same activations."""
    encoder, images = load(checks, "MAE with decoder")
    plain = transformers.ViTModel(transformers.ViTConfig(**SIZES), add_pooling_layer=False).eval()
    plain.load_state_dict(encoder.module.vit.state_dict())
    expected = checks.look(load_encoder(plain), images)
    acts = checks.look(encoder, images)
    for site in expected:
        checks.close(acts[site], expected[site])
    assert encoder.module.config.mask_ratio == 0.75  # put back
    with torch.no_grad():
        shuffled = encoder.module.vit(images).last_hidden_state
    assert shuffled.shape[1] < acts["norm"].shape[1]


def test_eager_attention_is_seen_too_and_is_put_back(checks):
    encoder, images = load(checks, "BEiT, bias per block")
    expected = checks.look(encoder, images)
    encoder.module.set_attn_implementation("eager")
    acts = checks.look(encoder, images)
    for site, value in expected.items():
        checks.close(acts[site], value)
    assert encoder.module.config._attn_implementation == "eager"


def test_clip_norms_only_the_cls_token(checks):
    encoder, images = load(checks, "CLIP")
    acts = checks.look(encoder, images)
    with torch.no_grad():
        assert torch.equal(acts["norm"], encoder.module.post_layernorm(acts["block.1"][:, 0]))


def test_fc1_of_a_gated_mlp_is_the_gate(checks):
    encoder, images = load(checks, "DINOv2 with registers")
    acts, mlp = checks.look(encoder, images), encoder.sites["block.0.mlp"].module
    with torch.no_grad():
        gate, value = acts["block.0.fc1"], mlp.up_proj(acts["block.0.norm2"])
        checks.close(mlp.down_proj(torch.nn.functional.silu(gate) * value), acts["block.0.mlp"])


def test_models_of_another_kind_show_their_own_names():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    encoder = load_encoder(transformers.ResNetModel(config).eval())
    assert encoder.family == "module"
    with torch.no_grad(), capture(encoder, ["encoder.stages.1"]) as acts:
        encoder(torch.randn(1, 3, 32, 32))
    assert acts["encoder.stages.1"].shape[:2] == (1, 8)
