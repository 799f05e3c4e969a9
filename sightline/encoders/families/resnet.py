"""ResNets of timm and of torchvision, with basic or bottleneck blocks, and their relatives (ResNeXt, SE-ResNet, …)."""

from timm.models.resnet import ResNet as TimmResNet
from torch import nn
from torchvision.models.resnet import ResNet as TorchvisionResNet

from sightline.encoders.sites import Anatomy, Tap

# The last layer of the residual branch: squeeze-and-excitation, else the last norm, else a convolution with its norm.
LAST_LAYERS = ("se", "bn3", "bn2", "conv3", "conv2")


def matches(module: nn.Module) -> bool:
    return isinstance(module, (TimmResNet, TorchvisionResNet))


def anatomy(module: nn.Module, size: tuple[int, int]) -> Anatomy:
    stages = [list(stage.children()) for name, stage in module.named_children() if name.startswith("layer")]
    blocks = [block for stage in stages for block in stage]
    taps = {"embed": Tap(blocks[0], "input")}
    for number, block in enumerate(blocks):
        last = next((getattr(block, name) for name in LAST_LAYERS if getattr(block, name, None) is not None), None)
        if last is not None:
            # Not the input of the last ReLU: the shortcut is added in place, so that input is the sum already.
            taps[f"block.{number}.residual"] = Tap(last)
        taps[f"block.{number}"] = Tap(block)
    if isinstance(classifier := getattr(module, "fc", None), nn.Linear):
        taps["head.0"] = Tap(classifier)
    return Anatomy("resnet", len(blocks), taps, stages=tuple(map(len, stages)))
