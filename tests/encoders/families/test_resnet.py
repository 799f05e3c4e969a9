"""ResNets of timm and torchvision: the branch before the addition, the block after it."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet as tv

from sightline.encoders.loading import load_encoder
from sightline.encoders.sites import stage_numbers
from sightline.encoders.watching import capture

SMALL = "@random?num_classes=5"
MEMBERS = {
    "timm, basic": f"timm:resnet18{SMALL}",
    "timm, bottleneck": f"timm:resnet26{SMALL}",
    "timm, squeeze and excitation": f"timm:seresnet18{SMALL}",
    "timm, average pooling in the shortcut": f"timm:resnet26d{SMALL}",
    "timm, Res2Net": f"timm:res2net50_14w_8s{SMALL}",
    "torchvision, basic": "torchvision:resnet18@random?size=64",
    "torchvision, bottleneck": "torchvision:resnet50@random?size=64",
}
members = pytest.mark.parametrize("reference", MEMBERS.values(), ids=MEMBERS.keys())


def load(checks, reference):
    encoder = load_encoder(reference)
    checks.shake(encoder.module)
    return encoder, torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def blocks_of(module):
    return [block for name, stage in module.named_children() if name.startswith("layer") for block in stage]


@members
def test_looking(checks, reference):
    encoder, images = load(checks, reference)
    checks.all_of_it(encoder, images)
    assert (encoder.family, encoder.tokens, encoder.heads, encoder.patch) == ("resnet", None, None, None)
    assert encoder.depth == len(blocks_of(encoder.module))


@members
def test_relu_of_residual_plus_shortcut_is_the_block(checks, reference):
    """The addition and the ReLU are done in place, so a branch looked at too late would be the block itself."""
    encoder, images = load(checks, reference)
    acts = checks.look(encoder, images)
    stream = acts["embed"]
    for number, block in enumerate(blocks_of(encoder.module)):
        shortcut = stream
        if block.downsample is not None:
            with torch.no_grad():
                shortcut = block.downsample(stream.clone())
        residual = acts[f"block.{number}.residual"]
        assert residual.min() < 0  # a ReLU has not been here
        checks.close((residual + shortcut).relu(), acts[f"block.{number}"])
        stream = acts[f"block.{number}"]


@members
def test_reductions_inside_the_hook_see_what_copies_show(checks, reference):
    from sightline.encoders.watching import watch

    encoder, images = load(checks, reference)
    acts = checks.look(encoder, images)
    sums: dict[str, float] = {}
    with torch.no_grad(), watch(encoder.sites, list(encoder.sites), lambda s, x: sums.update({s: x.double().sum()})):
        encoder(images)
    assert sums == {site: value.double().sum() for site, value in acts.items()}


def test_stem_and_stages(checks):
    encoder, images = load(checks, MEMBERS["torchvision, basic"])
    acts, model = checks.look(encoder, images), encoder.module
    with torch.no_grad():
        stem = model.maxpool(model.relu(model.bn1(model.conv1(images))))
        stages = [stem]
        for name in ("layer1", "layer2", "layer3", "layer4"):
            stages.append(getattr(model, name)(stages[-1].clone()))
        scores = model.fc(stages[-1].mean((2, 3)))
    assert torch.equal(acts["embed"], stem)
    for number, stage in zip((1, 3, 5, 7), stages[1:], strict=True):
        assert torch.equal(acts[f"block.{number}"], stage)
    checks.close(acts["head.0"], scores)


def test_timm_intermediates(checks):
    encoder, images = load(checks, MEMBERS["timm, bottleneck"])
    acts = checks.look(encoder, images)
    with torch.no_grad():
        maps = encoder.module.forward_intermediates(images, intermediates_only=True)
    for number, stage in zip((1, 3, 5, 7), maps[1:], strict=True):
        assert torch.equal(acts[f"block.{number}"], stage)


def test_without_a_classifier_there_is_no_head():
    assert "head.0" not in load_encoder("timm:resnet18@random?num_classes=0").sites


def test_a_kept_activation_survives_what_happens_in_place():
    """A plain module: BatchNorm, then ReLU in place on its output."""
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval()
    encoder, images = load_encoder(module), torch.randn(2, 3, 4, 4)
    with torch.no_grad(), capture(encoder, ["1"]) as acts:
        encoder(images)
        expected = module[1](module[0](images))
    assert torch.equal(acts["1"], expected)
    assert acts["1"].min() < 0


def test_torchvision_modules_from_python():
    module = tv.ResNet(tv.BasicBlock, [1, 1, 1, 1])
    assert list(load_encoder(module).sites)[:3] == ["embed", "block.0.residual", "block.0"]


@pytest.mark.parametrize(
    ("reference", "stages"),
    [
        ("timm:resnet18@random", (2, 2, 2, 2)),
        ("torchvision:resnet50@random", (3, 4, 6, 3)),
        ("timm:convnext_atto@random", (2, 2, 6, 2)),
    ],
)
def test_blocks_have_their_stage(reference: str, stages: tuple[int, ...]) -> None:
    encoder = load_encoder(reference)
    assert encoder.stages == stages
    assert sum(stages) == encoder.depth
    last = f"block.{encoder.depth - 1}"
    assert stage_numbers(["embed", "block.0", f"block.{stages[0]}.residual", last, "head.0"], stages) == [0, 1, 2, 4, 0]
