"""timm's ConvNeXt and ConvNeXt-V2, with linear layers on (B, h, w, C) or with 1 × 1 convolutions."""

import pytest
import torch

from sightline.encoders.loading import load_encoder

SMALL = "@random?depths=(1,1,2,1)&dims=(8,16,24,32)&num_classes=5"
MEMBERS = {
    "ConvNeXt": f"timm:convnext_tiny{SMALL}",
    "ConvNeXt-V2": f"timm:convnextv2_tiny{SMALL}",
    "ConvNeXt-V2, convolutions": f"timm:convnextv2_tiny{SMALL}&conv_mlp=True",
    "norm before pooling": f"timm:convnext_tiny{SMALL}&head_norm_first=True",
    "hidden layer in the head": f"timm:convnext_tiny{SMALL}&head_hidden_size=12",
}
members = pytest.mark.parametrize("reference", MEMBERS.values(), ids=MEMBERS.keys())


def load(checks, reference):
    encoder = load_encoder(reference)
    checks.shake(encoder.module)
    return encoder, torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


@members
def test_looking(checks, reference):
    encoder, images = load(checks, reference)
    checks.all_of_it(encoder, images)
    assert (encoder.family, encoder.depth, encoder.tokens) == ("convnext", 5, None)
    assert (encoder.heads, encoder.patch) == (None, None)


@members
def test_all_maps_are_channels_first(checks, reference):
    encoder, images = load(checks, reference)
    acts = checks.look(encoder, images)
    for number, (width, rows, columns) in enumerate([(8, 16, 24), (16, 8, 12), (24, 4, 6), (24, 4, 6), (32, 2, 3)]):
        for name in ("", ".norm1", ".mlp", ".residual"):
            assert acts[f"block.{number}{name}"].shape == (2, width, rows, columns)
        assert acts[f"block.{number}.fc1"].shape == (2, 4 * width, rows, columns)


@members
def test_block_is_input_plus_scaled_mlp(checks, reference):
    encoder, images = load(checks, reference)
    acts = checks.look(encoder, images)
    stages = [(stage, block) for stage in encoder.module.stages for block in stage.blocks]
    stream = acts["embed"]
    for number, (stage, block) in enumerate(stages):
        site = f"block.{number}"
        if number and block is stage.blocks[0]:
            with torch.no_grad():
                stream = stage.downsample(stream)
        gamma = 1.0 if block.gamma is None else block.gamma.detach().view(1, -1, 1, 1)
        checks.close(gamma * acts[f"{site}.mlp"], acts[f"{site}.residual"])
        checks.close(stream + acts[f"{site}.residual"], acts[site])
        stream = acts[site]


def test_fc1_comes_before_the_activation_function(checks):
    encoder, images = load(checks, MEMBERS["ConvNeXt"])
    acts, mlp = checks.look(encoder, images), encoder.module.stages[2].blocks[1].mlp
    with torch.no_grad():
        expected = mlp.fc2(torch.nn.functional.gelu(acts["block.3.fc1"].permute(0, 2, 3, 1)))
    checks.close(expected.permute(0, 3, 1, 2), acts["block.3.mlp"])


def test_stages_of_timm(checks):
    encoder, images = load(checks, MEMBERS["ConvNeXt-V2"])
    acts = checks.look(encoder, images)
    with torch.no_grad():
        stages = encoder.module.forward_intermediates(images, intermediates_only=True)
    for number, stage in zip((0, 1, 3, 4), stages, strict=True):
        assert torch.equal(acts[f"block.{number}"], stage)


def test_norm_and_head(checks):
    encoder, images = load(checks, MEMBERS["ConvNeXt"])
    acts = checks.look(encoder, images)
    pooled = acts["block.4"].mean((2, 3))
    norm = encoder.module.head.norm
    expected = torch.nn.functional.layer_norm(pooled, (32,), norm.weight, norm.bias, norm.eps).detach()
    checks.close(acts["norm"].flatten(1), expected)
    with torch.no_grad():
        checks.close(encoder.module.head.fc(expected), acts["head.0"])
    first, _ = load(checks, MEMBERS["norm before pooling"])
    assert checks.look(first, images)["norm"].shape == (2, 32, 2, 3)
    hidden, _ = load(checks, MEMBERS["hidden layer in the head"])
    acts = checks.look(hidden, images)
    assert (acts["head.0"].shape, acts["head.1"].shape) == ((2, 12), (2, 5))
