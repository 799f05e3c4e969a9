"""timm's models as transformers has them: the configuration, and the weights under the names of its files.

The names are those of published files, which every version of transformers reads. What transformers cannot compute is
an InputError that says what is in the way.

N patches, P prefix tokens (CLS, registers), D width, C channels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from timm.layers.layer_scale import LayerScale
from timm.layers.mlp import GlobalResponseNormMlp, Mlp
from timm.models.beit import Beit
from timm.models.convnext import ConvNeXt
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from sightline.core.errors import InputError, some
from sightline.encoders.encoder import Encoder

Table = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]  # timm's whole name, and what it becomes

PART = r"\.(weight|bias)"
BLOCK = r"blocks\.(\d+)\."
EMBEDDINGS: Table = (
    ("cls_token", "embeddings.cls_token"),
    ("reg_token", "embeddings.register_tokens"),
    ("pos_embed", "embeddings.position_embeddings"),
    (r"patch_embed\.proj" + PART, r"embeddings.patch_embeddings.projection.\1"),
)
ATTENTION: Table = (
    (BLOCK + r"attn\.q" + PART, r"encoder.layer.\1.attention.attention.query.\2"),
    (BLOCK + r"attn\.k" + PART, r"encoder.layer.\1.attention.attention.key.\2"),
    (BLOCK + r"attn\.v" + PART, r"encoder.layer.\1.attention.attention.value.\2"),
    (BLOCK + r"attn\.proj" + PART, r"encoder.layer.\1.attention.output.dense.\2"),
)
HEAD: Table = ((r"norm" + PART, r"layernorm.\1"), (r"head" + PART, r"classifier.\1"))
VIT: Table = (
    *EMBEDDINGS,
    *ATTENTION,
    *HEAD,
    (BLOCK + "norm1" + PART, r"encoder.layer.\1.layernorm_before.\2"),
    (BLOCK + "norm2" + PART, r"encoder.layer.\1.layernorm_after.\2"),
    (BLOCK + r"mlp\.fc1" + PART, r"encoder.layer.\1.intermediate.dense.\2"),
    (BLOCK + r"mlp\.fc2" + PART, r"encoder.layer.\1.output.dense.\2"),
)
DINOV2: Table = (
    *EMBEDDINGS,
    *ATTENTION,
    *HEAD,
    ("mask_token", "embeddings.mask_token"),
    (BLOCK + "(norm[12])" + PART, r"encoder.layer.\1.\2.\3"),
    (BLOCK + r"mlp\.(fc[12])" + PART, r"encoder.layer.\1.mlp.\2.\3"),
    (BLOCK + r"ls([12])\.gamma", r"encoder.layer.\1.layer_scale\2.lambda1"),
)
RELATIVE = "relative_position_bias_table"
BEIT: Table = (
    *VIT,
    (r"fc_norm" + PART, r"pooler.layernorm.\1"),
    (BLOCK + "gamma_([12])", r"encoder.layer.\1.lambda_\2"),
    (BLOCK + r"attn\.relative\w+", rf"encoder.layer.\1.attention.attention.relative_position_bias.{RELATIVE}"),
    (r"rel_pos_bias\.\w+", f"encoder.relative_position_bias.{RELATIVE}"),
)
STAGE = r"stages\.(\d+)\."
CONVNEXT: Table = (
    (r"stem\.0" + PART, r"embeddings.patch_embeddings.\1"),
    (r"stem\.1" + PART, r"embeddings.layernorm.\1"),
    (STAGE + r"downsample\.([01])" + PART, r"encoder.stages.\1.downsampling_layer.\2.\3"),
    (STAGE + BLOCK + "conv_dw" + PART, r"encoder.stages.\1.layers.\2.dwconv.\3"),
    (STAGE + BLOCK + "norm" + PART, r"encoder.stages.\1.layers.\2.layernorm.\3"),
    (STAGE + BLOCK + r"mlp\.fc([12])" + PART, r"encoder.stages.\1.layers.\2.pwconv\3.\4"),
    (STAGE + BLOCK + r"mlp\.grn" + PART, r"encoder.stages.\1.layers.\2.grn.\3"),
    (STAGE + BLOCK + "gamma", r"encoder.stages.\1.layers.\2.layer_scale_parameter"),
    (r"head\.norm" + PART, r"layernorm.\1"),
    (r"head\.fc" + PART, r"classifier.\1"),
)


def _residual(match: re.Match[str]) -> str:
    """A layer of a ResNet's block: timm counts stages and layers from one, transformers from zero."""
    stage, block, kind, number, part = match.groups()
    where = f"encoder.stages.{int(stage) - 1}.layers.{block}"
    if kind == "downsample.":
        return f"{where}.shortcut.{'normalization' if int(number) else 'convolution'}.{part}"
    return f"{where}.layer.{int(number) - 1}.{'convolution' if kind == 'conv' else 'normalization'}.{part}"


RESNET: Table = (
    (r"conv1\.(weight)", r"embedder.embedder.convolution.\1"),
    (r"bn1\.(\w+)", r"embedder.embedder.normalization.\1"),
    (r"layer([1-4])\.(\d+)\.(conv|bn)([123])\.(\w+)", _residual),
    (r"layer([1-4])\.(\d+)\.(downsample\.)([01])\.(\w+)", _residual),
    ("fc" + PART, r"classifier.1.\1"),
)


class Renamed(NamedTuple):
    """A model of transformers: its `config.json`, and the weights of its file."""

    config: dict[str, Any]
    state: dict[str, Tensor]
    pooled: bool  # whether, without a classifier, its `pooler_output` is what timm's model gives


class _Model(NamedTuple):
    kind: str  # as configurations call it: "vit"
    name: str  # as classes are called: "ViT"
    config: dict[str, Any]
    table: Table
    state: Mapping[str, Tensor]


def rename(encoder: Encoder) -> Renamed:
    """The model of transformers that computes what an encoder of timm computes."""
    match encoder.module:
        case VisionTransformer():
            model = _vit(encoder)
        case Beit():
            model = _beit(encoder)
        case ConvNeXt():
            model = _convnext(encoder)
        case ResNet():
            model = _resnet(encoder)
        case other:
            raise _refusal(encoder, f"{type(other).__name__} is none of timm's ViT, BEiT, ConvNeXt and ResNet")
    names = {name: _new_name(name, model.table) for name in model.state}
    if unplaced := [name for name, new in names.items() if not new]:
        raise _refusal(encoder, f"its {model.name} has no place for {some(unplaced)}")
    classifies = any(new.startswith("classifier.") for new in names.values())
    prefix = f"{model.kind}." if classifies else ""
    state = {
        new if new.startswith("classifier.") else f"{prefix}{new}": model.state[name] for name, new in names.items()
    }
    config = {
        "architectures": [model.name + ("ForImageClassification" if classifies else "Model")],
        "model_type": model.kind,
        **model.config,
    }
    if classifies:
        classes = encoder.classes or [f"LABEL_{number}" for number in range(encoder.module.num_classes)]
        config["id2label"] = dict(enumerate(classes))
        config["label2id"] = {name: number for number, name in enumerate(classes)}
    return Renamed(config, state, pooled=model.kind != "vit")


def _new_name(name: str, table: Table) -> str:
    """What a weight is called in transformers, "" if there is no such thing.

    >>> _new_name("blocks.3.norm1.bias", VIT), _new_name("layer4.0.bn2.weight", RESNET), _new_name("norm_pre.bias", VIT)
    ('encoder.layer.3.layernorm_before.bias', 'encoder.stages.3.layers.0.layer.1.normalization.weight', '')
    """
    for pattern, new in table:
        if match := re.fullmatch(pattern, name):
            return match.expand(new) if isinstance(new, str) else new(match)
    return ""


def _refuse(encoder: Encoder, obstacles: Mapping[str, bool]) -> None:
    for why, stands in obstacles.items():
        if stands:
            raise _refusal(encoder, why)


def _refusal(encoder: Encoder, why: str) -> InputError:
    return InputError(
        f"transformers has no model that computes what {encoder.name!r} does: {why}; convert it with --to timm"
    )


# ---------------------------------------------------------------------------------------------------------------
# Transformers


def _vit(encoder: Encoder) -> _Model:
    """ViT, or with layer scale DINOv2, whose classifier in transformers is another."""
    vit: Any = encoder.module
    plain = all(type(b) is Block and _plain(b.mlp) and isinstance(b.norm1, nn.LayerNorm) for b in vit.blocks)
    _refuse(
        encoder,
        {
            "its blocks are not those of a plain ViT": not plain,
            "it has no CLS token": vit.cls_token is None,
            "it has no position embedding": vit.pos_embed is None,
            f"its output is not its CLS token (global_pool={vit.global_pool!r})": vit.global_pool != "token",
        },
    )
    config = _config(encoder) | {"qkv_bias": vit.blocks[0].attn.qkv.bias is not None}
    state = dict(_split(vit.state_dict())) | _positions(vit)
    if not isinstance(vit.blocks[0].ls1, LayerScale):
        _refuse(encoder, {"it has registers, but no layer scale": vit.num_reg_tokens > 0})
        return _Model("vit", "ViT", config, VIT, state)
    ratio, rest = divmod(config.pop("intermediate_size"), vit.embed_dim)
    _refuse(
        encoder,
        {
            "it has both layer scale and a classifier": isinstance(vit.head, nn.Linear),
            "the width of its MLP is not a multiple of its own": rest > 0,
            "its images are not square": isinstance(config["image_size"], list),
        },
    )
    config["mlp_ratio"] = ratio
    if not vit.num_reg_tokens:
        return _Model("dinov2", "Dinov2", config | {"use_mask_token": False}, DINOV2, state)
    state["mask_token"] = torch.zeros(1, vit.embed_dim)  # unused, but transformers has no such model without it
    config["num_register_tokens"] = vit.num_reg_tokens
    return _Model("dinov2_with_registers", "Dinov2WithRegisters", config, DINOV2, state)


def _positions(vit: Any) -> dict[str, Tensor]:
    """Positions of CLS and patches; to registers transformers adds none, so theirs become part of them."""
    positions = vit.pos_embed.detach()  # (1, P + N, D), or without prefix tokens (1, N, D)
    own, patches = positions.tensor_split([positions.shape[1] - vit.patch_embed.num_patches], 1)
    if not own.shape[1]:
        own = torch.zeros(1, vit.num_prefix_tokens, vit.embed_dim)
    found = {"pos_embed": torch.cat([own[:, :1], patches], 1)}  # (1, 1 + N, D)
    return found if vit.reg_token is None else found | {"reg_token": vit.reg_token.detach() + own[:, 1:]}


def _beit(encoder: Encoder) -> _Model:
    """BEiT with shared or own tables of relative positions, and its mean pooling."""
    beit: Any = encoder.module
    first = beit.blocks[0]
    _refuse(
        encoder,
        {
            "its blocks are not those of BEiT": not all(_plain(block.mlp) for block in beit.blocks),
            "its queries and values have no bias": first.attn.q_bias is None,
            "its images are not square": encoder.preprocess.size[0] != encoder.preprocess.size[1],
        },
    )
    config = _config(encoder) | {
        "use_absolute_position_embeddings": beit.pos_embed is not None,
        "use_relative_position_bias": first.attn.relative_position_bias_table is not None,
        "use_shared_relative_position_bias": beit.rel_pos_bias is not None,
        "layer_scale_init_value": 0.0 if first.gamma_1 is None else 0.1,  # above zero: there is one
        "use_mean_pooling": beit.global_pool == "avg",
        "drop_path_rate": 0.0,
    }
    return _Model("beit", "Beit", config, BEIT, dict(_split(beit.state_dict())))


def _config(encoder: Encoder) -> dict[str, Any]:
    """What the configurations of all transformers have in common."""
    vit: Any = encoder.module
    first, patch, size = vit.blocks[0], vit.patch_embed.patch_size, encoder.preprocess.size
    built = tuple(vit.patch_embed.img_size or size)
    _refuse(
        encoder,
        {
            "its patches are not square": patch[0] != patch[1],
            f"its positions are for images of {built}, but its images are {size}": built != size,
        },
    )
    return {
        "hidden_size": vit.embed_dim,
        "num_hidden_layers": len(vit.blocks),
        "num_attention_heads": first.attn.num_heads,
        "intermediate_size": first.mlp.fc1.out_features,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": first.norm1.eps,
        "image_size": size[0] if size[0] == size[1] else list(size),
        "patch_size": patch[0],
        "num_channels": vit.in_chans,
    }


def _split(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Query, key and value apart."""
    for name, value in state.items():
        if ".attn.qkv." in name:
            yield from ((name.replace("qkv", letter), part) for letter, part in zip("qkv", value.chunk(3), strict=True))
        else:
            yield re.sub(r"attn\.([qv])_bias$", r"attn.\1.bias", name), value


def _plain(mlp: Any) -> bool:
    """Whether an MLP is two linear layers with the exact GELU between, or with ConvNeXt-V2's response norm as well."""
    if type(mlp) not in (Mlp, GlobalResponseNormMlp) or type(mlp.act).__name__ != "GELU":
        return False
    return getattr(mlp.act, "approximate", "none") == "none"


# ---------------------------------------------------------------------------------------------------------------
# Convolutional networks


def _convnext(encoder: Encoder) -> _Model:
    """ConvNeXt with layer scale, ConvNeXt-V2 with response norm."""
    convnext: Any = encoder.module
    blocks = [block for stage in convnext.stages for block in stage.blocks]
    second = isinstance(blocks[0].mlp, GlobalResponseNormMlp)
    _refuse(
        encoder,
        {
            "its blocks are not those of ConvNeXt": not all(_plain(block.mlp) for block in blocks),
            "it has both or neither of layer scale and response norm": (blocks[0].gamma is None) != second,
            "its norm comes before the pooling": not isinstance(convnext.norm_pre, nn.Identity),
            "its first stage has a stride": not isinstance(convnext.stages[0].downsample, nn.Identity),
        },
    )
    config = {
        "num_channels": convnext.in_chans,
        "patch_size": convnext.stem[0].kernel_size[0],
        "hidden_sizes": [stage.blocks[0].conv_dw.out_channels for stage in convnext.stages],
        "depths": [len(stage.blocks) for stage in convnext.stages],
        "hidden_act": "gelu",
        "layer_norm_eps": convnext.head.norm.eps,
    }
    state = {name: _as_linear(name, value) for name, value in convnext.state_dict().items()}
    kind, name = ("convnextv2", "ConvNextV2") if second else ("convnext", "ConvNext")
    return _Model(kind, name, config, CONVNEXT, state)


def _as_linear(name: str, value: Tensor) -> Tensor:
    """Convolutions of 1 × 1 as matrices, and the weights of the response norm as (1, 1, 1, C)."""
    if ".mlp.grn." in name:
        return value.view(1, 1, 1, -1)
    return value.flatten(1) if re.search(r"\.mlp\.fc[12]\.weight$", name) else value


def _resnet(encoder: Encoder) -> _Model:
    """ResNet with basic or bottleneck blocks; stride 2 is in the 3 × 3 convolution in both libraries."""
    resnet: Any = encoder.module
    stages = [list(getattr(resnet, f"layer{number}")) for number in range(1, 5)]
    stem = getattr(resnet.conv1, "kernel_size", None) == (7, 7) and isinstance(resnet.maxpool, nn.MaxPool2d)
    _refuse(
        encoder,
        {
            "it does not begin with a convolution of 7 × 7 and a pooling": not stem,
            "its blocks are not those of ResNet": not all(_is_residual(block) for stage in stages for block in stage),
        },
    )
    config = {
        "num_channels": resnet.in_chans,
        "embedding_size": resnet.conv1.out_channels,
        "hidden_sizes": [stage[0].conv1.out_channels * stage[0].expansion for stage in stages],
        "depths": [len(stage) for stage in stages],
        "layer_type": "bottleneck" if isinstance(stages[0][0], Bottleneck) else "basic",
        "hidden_act": "relu",
    }
    return _Model("resnet", "ResNet", config, RESNET, resnet.state_dict())


def _is_residual(block: Any) -> bool:
    """Whether a block is neither wider nor grouped (ResNeXt), nor has other functions."""
    if type(block) not in (BasicBlock, Bottleneck) or type(block.act1) is not nn.ReLU or block.conv2.groups > 1:
        return False
    last = block.conv3 if isinstance(block, Bottleneck) else block.conv2
    return bool(last.out_channels == block.conv1.out_channels * block.expansion)
