"""timm's Beit and Eva: BEiT, BEiT-v2, EVA, EVA02, DINOv3 and other ViTs with rotary position embedding."""

from timm.models.beit import Beit
from timm.models.eva import Eva, EvaBlockPostNorm
from torch import nn

from sightline.encoders.families.vit import timm_anatomy, transformer_taps
from sightline.encoders.sites import Anatomy, Tap


def matches(module: nn.Module) -> bool:
    return isinstance(module, (Beit, Eva))


def anatomy(module: Beit | Eva, size: tuple[int, int]) -> Anatomy:
    return timm_anatomy("beit" if isinstance(module, Beit) else "eva", module, size, _block_taps)


def _block_taps(prefix: str, block: nn.Module) -> dict[str, Tap]:
    attention = block.get_submodule("attn")
    return transformer_taps(
        prefix,
        block,
        norm1=block.get_submodule("norm1"),
        attention=attention,
        # Not the output of `attention.qkv`: the weight of that module may be used without calling it, with a bias
        # that belongs to the attention layer, or there are three modules.
        qkv=Tap(attention, "qkv"),
        norm2=block.get_submodule("norm2"),
        mlp=block.get_submodule("mlp"),
        post_norm=isinstance(block, EvaBlockPostNorm),
    )
