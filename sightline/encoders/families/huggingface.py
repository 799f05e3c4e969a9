"""Hugging Face ViTs: ViT, DeiT, DINOv2 (with registers), DINOv3, MAE, MSN, BEiT, vision towers of CLIP and SigLIP.

They are recognised by what they consist of, since the classes are near-copies of each other under many names.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sightline.encoders.families.vit import transformer_taps
from sightline.encoders.sites import Anatomy, Tap, Tokens

LAYERS = ("layers", "encoder.layers", "encoder.layer", "model.layer")
NORM1 = ("layernorm_before", "layer_norm1", "norm1")
NORM2 = ("layernorm_after", "layer_norm2", "norm2")
ATTENTION = ("attention", "self_attn")
FINAL_NORM = ("layernorm", "post_layernorm", "norm")
CLS = ("cls_token", "class_embedding")
OTHER_PREFIXES = ("distillation_token", "register_tokens")
HEADS = ("classifier", "cls_classifier", "distillation_classifier", "visual_projection")


class Trunk(NamedTuple):
    """The vision transformer inside a model: without decoder, text tower or classifier."""

    name: str  # where it is in the model, "" if it is the model itself
    module: Any
    embeddings: Any
    patch: nn.Conv2d
    layers: list[nn.Module]


class Classified(nn.Module):
    """A model with a linear classifier on what it pools itself, else on CLS, else on the mean of the patches."""

    def __init__(self, model: nn.Module, classes: int) -> None:
        super().__init__()
        trunk = find_trunk(model)
        assert trunk is not None, "asked of a model without a vision transformer"
        self.model, self.config = model, model.config
        self.classifier = nn.Linear(trunk.module.config.hidden_size, classes)

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, h, w) -> (B, K)
        """Scores of the classes."""
        trunk = find_trunk(self.model)  # found anew, since a copy of this module has another one
        assert trunk is not None
        said = (forward_of(self.model) or self.model)(images)
        pooled = getattr(said, "pooler_output", None)
        if pooled is None:
            prefix, cls = _prefix(trunk.embeddings)
            tokens = said.last_hidden_state  # (B, T, D)
            pooled = tokens[:, prefix:].mean(1) if cls is None else tokens[:, cls]
        scores: Tensor = self.classifier(pooled)
        return scores


def matches(module: nn.Module) -> bool:
    return find_trunk(module) is not None


def find_trunk(module: nn.Module) -> Trunk | None:
    """The first part of a model that cuts images into patches and has layers with all that we look at."""
    if not hasattr(module, "config"):
        return None
    for name, part in module.named_modules():
        embeddings, blocks = getattr(part, "embeddings", None), _first(part, LAYERS)
        if not isinstance(embeddings, nn.Module) or not isinstance(blocks, nn.ModuleList):
            continue
        patch = next((p for p in embeddings.modules() if isinstance(p, nn.Conv2d)), None)
        layers = list(blocks)
        if patch is not None and layers and all(_is_layer(layer) for layer in layers):
            return Trunk(name, part, embeddings, patch, layers)
    return None


def _is_layer(layer: nn.Module) -> bool:
    attention = _first(layer, ATTENTION)
    parts = (
        _first(layer, NORM1),
        _first(layer, NORM2),
        getattr(layer, "mlp", None),
        getattr(attention, "q_proj", None),
    )
    return all(isinstance(part, nn.Module) for part in parts)


def _first(module: nn.Module, names: tuple[str, ...]) -> Any:
    """The first of several alternative attributes, which may be paths such as `encoder.layer`, or None."""
    for name in names:
        value: Any = module
        for step in name.split("."):
            value = getattr(value, step, None)
        if value is not None:
            return value
    return None


def anatomy(module: nn.Module, size: tuple[int, int]) -> Anatomy:
    """Sites and token layout of the vision transformer inside a model."""
    trunk = find_trunk(module)
    assert trunk is not None, "asked of a module that does not match"
    taps = {"embed": Tap(trunk.layers[0], "input")}
    for number, layer in enumerate(trunk.layers):
        attention = _first(layer, ATTENTION)
        taps |= transformer_taps(
            f"block.{number}",
            layer,
            norm1=_first(layer, NORM1),
            attention=attention,
            qkv=Tap(attention, "qkv"),
            norm2=_first(layer, NORM2),
            mlp=layer.get_submodule("mlp"),
        )
    # The norm of BEiT's masked image model is outside of the trunk, whose own norm is empty.
    norms = [n for n in (_first(trunk.module, FINAL_NORM), _first(module, FINAL_NORM)) if isinstance(n, nn.LayerNorm)]
    if norms:
        taps["norm"] = Tap(norms[0])
    heads = [getattr(module, name, None) for name in HEADS] if not _is_part(module, trunk) else []
    taps |= {f"head.{number}": Tap(head) for number, head in enumerate(h for h in heads if isinstance(h, nn.Linear))}
    fixed = image_size(trunk)
    rows, columns = (have // patch for have, patch in zip(fixed or size, trunk.patch.stride, strict=True))
    prefix, cls = _prefix(trunk.embeddings)
    return Anatomy(
        family="huggingface",
        depth=len(trunk.layers),
        taps=taps,
        tokens=Tokens(prefix, cls, (rows, columns)),
        heads=trunk.module.config.num_attention_heads,
        patch=trunk.patch.stride[0],
        size=fixed,
        forward=forward_of(module),
    )


def _prefix(embeddings: nn.Module) -> tuple[int, int | None]:
    """Number of prefix tokens and which one is CLS; it comes first wherever there is one."""
    has_cls = _first(embeddings, CLS) is not None
    others = (getattr(embeddings, name, None) for name in OTHER_PREFIXES)
    return has_cls + sum(token.shape[-2] for token in others if token is not None), 0 if has_cls else None


def image_size(trunk: Trunk) -> tuple[int, int] | None:
    """The one image size (height, width) that the model takes, or None if it adapts its position embedding."""
    if "interpolate_pos_encoding" not in inspect.signature(trunk.module.forward).parameters:
        return None
    size = trunk.module.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def forward_of(module: nn.Module) -> Callable[[Tensor], Any] | None:
    """How to send images through, where calling the module does something else.

    MAE would mask most patches, and shuffle the tokens even if it masks none; its decoder is no part of the encoder.
    A model with a text tower wants text as well.
    """
    trunk = find_trunk(module)
    if trunk is None or isinstance(module, Classified):
        return None
    if hasattr(trunk.embeddings, "random_masking"):
        return _unmasked(trunk)
    return trunk.module if _is_part(module, trunk) else None


def forward_at_any_size(module: nn.Module) -> Callable[[Tensor], Any]:
    """How to send images of another size than its own through the vision transformer inside a model."""
    trunk = find_trunk(module)
    assert trunk is not None, "asked of a module that does not match"
    words = {} if image_size(trunk) is None else {"interpolate_pos_encoding": True}
    if hasattr(trunk.embeddings, "random_masking"):
        return _unmasked(trunk, **words)
    return functools.partial(trunk.module, **words)


def _is_part(module: nn.Module, trunk: Trunk) -> bool:
    """Whether the model is more than a vision encoder, so that only its trunk is used."""
    if isinstance(module, Classified):
        return False
    return hasattr(trunk.embeddings, "random_masking") or hasattr(module, "text_model")


def _unmasked(trunk: Trunk, **words: Any) -> Callable[[Tensor], Any]:
    config = trunk.embeddings.config

    def forward(images: Tensor) -> Any:
        rows, columns = (have // patch for have, patch in zip(images.shape[-2:], trunk.patch.stride, strict=True))
        # Tokens are sorted by this noise.
        noise = torch.arange(rows * columns, device=images.device, dtype=torch.float32).expand(len(images), -1)
        before = config.mask_ratio
        config.mask_ratio = 0.0
        try:
            return trunk.module(images, noise=noise, **words)
        finally:
            config.mask_ratio = before

    return forward
