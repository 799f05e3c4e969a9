"""timm's ConvNeXt and ConvNeXt-V2."""

from typing import Any

from timm.models.convnext import ConvNeXt
from torch import nn

from sightline.encoders.sites import Anatomy, Tap


def matches(module: nn.Module) -> bool:
    return isinstance(module, ConvNeXt)


def anatomy(module: Any, size: tuple[int, int]) -> Anatomy:
    blocks = [block for stage in module.stages for block in stage.blocks]
    taps = {"embed": Tap(blocks[0], "input")}
    for number, block in enumerate(blocks):
        taps |= _block_taps(f"block.{number}", block)
    head: Any = getattr(module, "head", None)  # which may have been deleted, or a part of it
    norm_first = not isinstance(module.norm_pre, nn.Identity)  # before the pooling, elsewhere after it
    if (norm := module.norm_pre if norm_first else getattr(head, "norm", None)) is not None:
        taps["norm"] = Tap(norm)
    layers = (getattr(getattr(head, "pre_logits", None), "fc", None), getattr(head, "fc", None))
    taps |= {
        f"head.{number}": Tap(layer)
        for number, layer in enumerate(layer for layer in layers if isinstance(layer, nn.Linear))
    }
    return Anatomy("convnext", len(blocks), taps, stages=tuple(len(stage.blocks) for stage in module.stages))


def _block_taps(prefix: str, block: Any) -> dict[str, Tap]:
    """x + γ·mlp(norm(conv(x))); norm and MLP work on (B, h, w, C) unless the MLP is made of convolutions."""
    last = not block.use_conv_mlp
    return {
        f"{prefix}.norm1": Tap(block.norm, channels_last=last),
        f"{prefix}.fc1": Tap(block.mlp.fc1, channels_last=last),
        f"{prefix}.mlp": Tap(block.mlp, channels_last=last),
        f"{prefix}.residual": Tap(block.drop_path, "input"),
        prefix: Tap(block),
    }
