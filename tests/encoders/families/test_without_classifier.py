"""Models whose classifier was deleted, replaced or never built: they load, are looked into and measured."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import sightline as sl

SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
SMALL_CONVNEXT = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}
TORCHVISION_VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 3, "hidden_dim": 48, "mlp_dim": 96}

WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {  # how to build each, and where its classifier is
    "torchvision resnet": (torchvision.models.resnet18, "fc"),
    "torchvision vit": (lambda: torchvision.models.VisionTransformer(**TORCHVISION_VIT), "heads"),
    "torchvision swin": (lambda: torchvision.models.SwinTransformer([4, 4], 24, [1, 1], [2, 4], [4, 4]), "head"),
    "torchvision convnext": (torchvision.models.convnext_tiny, "classifier"),
    "timm vit": (lambda: timm.create_model("vit_tiny_patch16_224", **SMALL_VIT), "head"),
    "timm eva": (lambda: timm.create_model("beit_base_patch16_224", **SMALL_VIT), "head"),
    "timm resnet": (lambda: timm.create_model("resnet10t"), "fc"),
    "timm convnext": (lambda: timm.create_model("convnext_atto", **SMALL_CONVNEXT), "head"),
    "timm convnext, of its head": (lambda: timm.create_model("convnext_atto", **SMALL_CONVNEXT), "head.fc"),
}


class SegmentationEncoder(ResNet):
    """As in segmentation_models_pytorch: no classifier, and all maps."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, [1, 1, 1, 1])
        del self.fc, self.avgpool

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [x, self.relu(self.bn1(self.conv1(x)))]
        x = self.maxpool(maps[-1])
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
            maps.append(x)
        return maps


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "smp": SegmentationEncoder,
    "timm vit, no classes": lambda: timm.create_model("vit_tiny_patch16_224", num_classes=0, **SMALL_VIT),
    "timm convnext, no classes": lambda: timm.create_model("convnext_atto", num_classes=0, **SMALL_CONVNEXT),
    "timm resnet, features_only": lambda: timm.create_model("resnet10t", features_only=True),
    "timm vit, features_only": lambda: timm.create_model(
        "vit_tiny_patch16_224", features_only=True, **SMALL_VIT | {"depth": 4}
    ),
    "timm convnext, features_only": lambda: timm.create_model("convnext_atto", features_only=True, **SMALL_CONVNEXT),
}


def delete(module: nn.Module, path: str) -> nn.Module:
    parent, _, name = path.rpartition(".")
    delattr(module.get_submodule(parent), name)
    return module


def replaced(module: nn.Module, path: str) -> nn.Module:
    module.set_submodule(path, nn.Identity())
    return module


def headless(name: str) -> nn.Module:
    build, path = WHOLE[name]
    return delete(build(), path)


def load(module: nn.Module) -> sl.Encoder:
    return sl.load_encoder(module, preprocess=sl.Preprocess((32, 32), resize=32))


def measured(module: nn.Module) -> Any:
    images = sl.load_images("shapes?size=32").sample(16, 0)
    return sl.analyze({"it": load(module)}, images, ["cka", "knn"], show_progress=False)


@pytest.mark.parametrize("name", WHOLE)
def test_without_its_classifier_a_model_gives_the_features_of_the_whole(name: str) -> None:
    build, path = WHOLE[name]
    torch.manual_seed(0)
    whole = build().eval()
    encoder = load(whole)
    with torch.no_grad(), sl.capture(encoder, "**") as before:
        encoder(x := torch.rand(2, 3, 32, 32))
    bare = load(delete(whole, path))
    with torch.no_grad(), sl.capture(bare, "**") as after:
        output = bare(x)
    assert isinstance(output, Tensor)
    assert len(output) == 2
    lost = set(encoder.sites) - set(bare.sites)  # those of the classifier, and nothing else
    assert lost == {s for s in encoder.sites if s.startswith("head.") or s.split(".")[0] == path} | (
        {"norm"} if name == "timm convnext" else set()
    )
    assert after.keys() == before.keys() - lost
    assert all(torch.equal(after[site], before[site]) for site in after)
    with pytest.raises(AttributeError):  # and it is as the user left it
        whole.get_submodule(path)


@pytest.mark.parametrize("name", [*WHOLE, *OTHERS])
def test_models_without_a_classifier_are_measured(name: str) -> None:
    run = measured(headless(name) if name in WHOLE else OTHERS[name]())
    assert run["cka"].cka.notnull().any()
    assert run["knn"].accuracy.notnull().any()


@pytest.mark.parametrize("name", [name for name in WHOLE if "torchvision" not in name])
def test_an_identity_in_its_place_is_no_classifier(name: str) -> None:
    build, path = WHOLE[name]
    encoder = load(replaced(build(), path))
    assert not [site for site in encoder.sites if site.startswith("head.")]
    with torch.no_grad():
        assert len(encoder(torch.rand(2, 3, 32, 32))) == 2


def test_hooks_and_modes_of_the_module_are_those_of_the_call() -> None:
    module = headless("torchvision resnet")
    encoder, seen = load(module), []
    module.layer4.register_forward_hook(lambda *_: seen.append("layer4"))
    module.register_forward_hook(lambda *_: seen.append("whole"))
    with torch.no_grad(), encoder.evaluating():
        first = encoder(x := torch.rand(2, 3, 32, 32))
        assert torch.equal(encoder(x), first)
    assert seen == ["layer4", "whole"] * 2
    assert module.training
    assert not hasattr(module, "fc")
