"""The ResNets that DINO and MoCo-v3 have trained beside their ViTs: timm's ResNet, which has torchvision's names."""

import re
from collections.abc import Mapping

from torch import Tensor

from sightline.core.errors import InputError
from sightline.encoders.files.reading import Checkpoint, printable
from sightline.encoders.layouts.layout import Layout, architecture, size_option
from sightline.encoders.layouts.vit import ModelState, Official, evaluation, kind, vit_layout

STAGES = ("layer1", "layer2", "layer3", "layer4")
WEIGHTS = re.compile(r"(conv1|bn1|layer[1-4]\.\d+\.(conv[123]|bn[123]|downsample\.[01])|fc)\.[a-z_]+")


def holds_resnet(state: Mapping[str, Tensor]) -> bool:
    return "conv1.weight" in state and all(f"{stage}.0.conv1.weight" in state for stage in STAGES)


def resnet_layout(part: ModelState, official: Official, options: Mapping[str, str]) -> Layout:
    """The layout of a ResNet: blocks of each stage and classes, off the tensors."""
    if "heads" in options:
        raise InputError(f"heads={options['heads']} is for a ViT, but the file has a ResNet; leave it out")
    _refuse_foreign(part.state)
    state = {name: value for name, value in part.state.items() if WEIGHTS.fullmatch(name)}
    classes = state["fc.weight"].shape[0] if "fc.weight" in state else 0
    blocks = [len({name.split(".")[1] for name in state if name.startswith(f"{stage}.")}) for stage in STAGES]
    name = "resnet50" if "layer1.0.conv3.weight" in state else "resnet18"  # bottleneck or basic blocks
    return Layout(
        format=f"{official.title}, {kind(part, classes)}",
        architecture=architecture(name, {"layers": f"({','.join(map(str, blocks))})", "num_classes": classes}),
        state=state,
        preprocess=evaluation(size_option(options) or (224, 224), official.interpolation),
        part=part.where,
        left_over=(*(name for name in part.state if name not in state), *part.beside),
        notes=part.notes,
    )


def _refuse_foreign(state: Mapping[str, Tensor]) -> None:
    """Refuse blocks with more layers than those of a plain ResNet: they compute something else."""
    for name in state:
        if name.startswith(tuple(f"{stage}." for stage in STAGES)) and not WEIGHTS.fullmatch(name):
            raise InputError(
                f"The file has {printable(name, 60)}, which the blocks of a plain ResNet do not have (conv1 to conv3, "
                "bn1 to bn3 and downsample); name its architecture, timm:NAME@FILE"
            )


def vit_or_resnet_layout(
    checkpoint: Checkpoint, part: ModelState, official: Official, options: Mapping[str, str]
) -> Layout:
    if holds_resnet(part.state):
        return resnet_layout(part, official, options)
    return vit_layout(checkpoint, part, official, options)
