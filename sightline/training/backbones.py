"""Backbones to train: timm's ViT, Beit, ResNet and ConvNeXt-V2, by name or by measures.

A Beit is the ViT of BEiT and SimMIM: it has no absolute positions, but a bias for every relative position of two tokens
that is added to the scores of its attention, from a table that all blocks share or that each has, and layer scale.

B images, N patches on a grid of rows × columns, P prefix tokens (CLS, registers), T = P + N tokens, D width, H heads.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.models.convnext import ConvNeXt
from torch import nn

from sightline.core.errors import InputError, nearest
from sightline.encoders.encoder import Encoder
from sightline.encoders.layouts.layout import architecture
from sightline.encoders.loading import load_encoder
from sightline.encoders.modules.mode import evaluating
from sightline.encoders.modules.vit import check_window, features, initialise, is_vit
from sightline.images.preprocess import IMAGENET_MEAN, IMAGENET_STD


def freeze_head(backbone: nn.Module) -> None:
    """Do not train what comes after a backbone's tokens: no gradient arrives there, and DDP waits for all gradients."""
    for name in ("attn_pool", "fc_norm", "head"):
        part = getattr(backbone, name, None)
        if isinstance(part, nn.Module):
            part.requires_grad_(False)


# The names `vit` and `beit` are timm's ViT and Beit with measures of one's own.
NAMES = {"vit": "vit_tiny_patch16_224", "beit": "beit_base_patch16_224"}
VIT_OPTIONS = {
    "width": "embed_dim",
    "depth": "depth",
    "heads": "num_heads",
    "patch": "patch_size",
    "layer_scale": "init_values",
}
VIT_ONLY = ("depth", "heads", "layer_scale")  # where `width` may also be that of a CNN, `patch` that of a ConvNeXt
CHANNELS = {"resnet": "channels", "convnext": "dims"}  # what timm calls the channels of the four stages
CNNS = tuple(CHANNELS)
TABLES = ("shared", "blocks")
LEAST_STRIDE = 8  # of a ConvNeXt, with patch=1


@dataclass(frozen=True)
class Backbone:
    """Architecture to train. A measure that is 0 is the named model's own.

    >>> Backbone("vit", width=96, depth=12, heads=6, patch=8, size=48).reference()
    'timm:vit_tiny_patch16_224@random?size=48&embed_dim=96&depth=12&num_heads=6&patch_size=8&num_classes=0'
    """

    backbone: str = "vit"
    size: int = 224  # pixels of the images
    width: int = 0  # of a CNN: channels of its first stage; each further stage has twice as many
    depth: int = 0
    heads: int = 0
    patch: int = 0  # of a ConvNeXt: timm's patch_size; 1 for small images, which makes the stride 8 instead of 32
    stem: str = ""  # "small": a ResNet without the stride and pooling of its first layers
    drop_path: float = 0.0
    relative_positions: str = ""  # of a Beit: a table that is "shared" (as ""), or one in each of the "blocks"
    layer_scale: float = 0.0  # what the layer scale of a ViT begins with; 0: the named model's own, if it has any
    attention_window: int = 0  # odd k: a patch attends to the k × k patches around it (and to CLS); 0: to all
    init: str = ""  # "xavier": a ViT begins with Xavier weights and sine-cosine positions; "": with timm's own

    def __post_init__(self) -> None:
        if self.init not in ("", "xavier"):
            raise InputError(f"There is no init {self.init!r}; choose 'xavier', or '' for timm's own weights")
        if self.relative_positions and self.relative_positions not in TABLES:
            raise InputError(
                f"There are no relative_positions {self.relative_positions!r}{nearest(self.relative_positions, TABLES)}"
            )
        for key in ("width", "depth", "heads", "patch", "layer_scale", "attention_window"):
            if getattr(self, key) < 0:
                raise InputError(f"{key} is {getattr(self, key)}, but it cannot be negative")
        check_window(self.attention_window)
        if self.size < 1 or self.size % self.patch_side:
            raise InputError(
                f"Images of size {self.size} cannot be cut into patches of {self.patch_side}; choose a multiple"
            )
        if self.width and self.heads and self.width % self.heads:
            raise InputError(
                f"A width of {self.width} cannot be split into {self.heads} heads; choose heads that divide it"
            )

    @property
    def name(self) -> str:
        return NAMES.get(self.backbone, self.backbone)

    @property
    def patch_side(self) -> int:
        """Pixels of a patch, also where the name says it; 1 for an architecture without patches."""
        named = re.search(r"patch(\d+)", self.name)
        return self.patch or (int(named[1]) if named else 1)

    def reference(self, classes: int = 0, seed: int = 0) -> str:
        """The encoder reference that builds it anew."""
        name = self.name
        options: dict[str, Any] = {"size": self.size}
        if not name.startswith(CNNS):
            options |= {word: getattr(self, key) for key, word in VIT_OPTIONS.items() if getattr(self, key)}
        elif misplaced := [key for key in VIT_ONLY if getattr(self, key)]:
            raise InputError(
                f"{' and '.join(misplaced)} can be set for a ViT only, not for {name}; choose another name"
            )
        else:
            options |= {"patch_size": self.patch} if self.patch else {}
            if self.width:
                word = next(word for start, word in CHANNELS.items() if name.startswith(start))
                options[word] = "({},{},{},{})".format(*(self.width << stage for stage in range(4)))
        if name.startswith("beit"):
            own = self.relative_positions == "blocks"
            # As in the pre-training of BEiT and SimMIM: all tokens pass the final norm.
            options |= {"use_rel_pos_bias": own, "use_shared_rel_pos_bias": not own, "global_pool": "token"}
        elif self.relative_positions:
            raise InputError(f"relative_positions are those of a Beit, not of {name}; choose backbone=beit")
        if self.attention_window and name.startswith(CNNS):
            raise InputError(f"attention_window needs self-attention, which {name} does not have")
        if self.init and name.startswith(CNNS):
            raise InputError(f"init={self.init} is for a ViT, not for {name}; leave it out")
        options |= {"stem": self.stem} if self.stem else {}
        options |= {"drop_path_rate": self.drop_path} if self.drop_path else {}
        options |= {"attention_window": self.attention_window} if self.attention_window else {}
        options |= {"num_classes": classes} | ({"seed": seed} if seed else {})
        return architecture(name, options)


def build(backbone: Backbone, classes: int = 0, seed: int = 0) -> Encoder:
    encoder = load_encoder(backbone.reference(classes, seed), name=backbone.backbone)
    # As in the papers; timm's ViTs have 0.5, which would change the scale of losses on pixels.
    preprocess = replace(encoder.preprocess, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    if why := misfit(encoder.module, backbone.size):
        raise InputError(
            f"Images of {backbone.size} pixels cannot be used, since {why}; choose another size, or other measures of "
            "the backbone"
        )
    if backbone.init:
        if not is_vit(encoder.module):
            raise InputError(f"init={backbone.init} is for a plain ViT, not for {backbone.backbone}; leave it out")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            initialise(encoder.module)
    if backbone.name.startswith(CNNS):  # ResNets are 1.3 times as fast; files are written as ever
        encoder.module.to(memory_format=torch.channels_last)
    encoder.module.train()
    return replace(encoder, preprocess=preprocess)


@torch.no_grad()
def misfit(backbone: nn.Module, size: int) -> str:
    """Why images of this size cannot go through a backbone, as a clause; "" if they can.

    It is tried on one image: the total stride alone does not tell, since convolutions with padding, as those of a
    ResNet, also take images that are smaller. A ViT takes whatever can be cut into patches.
    """
    if is_vit(backbone):
        return ""
    with evaluating(backbone):
        try:
            features(backbone, torch.zeros(1, 3, size, size, device=next(backbone.parameters()).device))
        except (AssertionError, RuntimeError) as error:  # of timm, and of PyTorch
            kind = type(backbone).__name__
            stride = _total_stride(backbone)
            if size >= stride:
                return f"{kind} says: {str(error).splitlines()[0].rstrip('.')}"
            less = f" ({LEAST_STRIDE} with patch=1)" if isinstance(backbone, ConvNeXt) and size >= LEAST_STRIDE else ""
            return f"the total stride of {kind} is {stride}{less}"
    return ""


def _total_stride(backbone: nn.Module) -> int:
    """Pixels of an image for each place of the last map, 1 if the model does not say."""
    stages: Any = getattr(backbone, "feature_info", None) or [{}]
    return int(stages[-1].get("reduction", 1))
