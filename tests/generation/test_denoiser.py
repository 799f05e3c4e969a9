"""The denoiser: RCDM's conditioning in diffusers' own UNet, and its files."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline.core.errors import InputError
from sightline.generation.denoiser import Denoiser, Shape, load_model, save_model
from sightline.generation.noise import diffusers
from sightline.generation.training import make_recipe
from sightline.training.recipe import read_recipe

TINY = Shape(size=8, unshuffle=2, channels=(16, 32), layers=1, head_width=16)
ABOUT = [{"name": "a", "reference": "r", "weights": "w", "feature": "norm.cls"}, {"name": "b"}]


@pytest.fixture(scope="module")
def denoiser() -> Denoiser:
    torch.manual_seed(0)
    made = Denoiser(TINY, [5, 7])
    torch.nn.init.normal_(made.unet.conv_out.weight, std=0.1)
    made.conditions[0].mean.fill_(0.5)
    made.conditions[0].scale.fill_(2.0)
    return made


def test_it_begins_with_the_mean_picture() -> None:
    fresh = Denoiser(TINY, [5])
    noisy = torch.randn(2, 3, 8, 8)
    assert not fresh(noisy, torch.tensor([1.0, 2.0]), fresh.embed([torch.randn(2, 5)], torch.zeros(2).long())).any()


def test_the_published_network_is_that_of_adm() -> None:
    """As many weights as the UNet of the authors' code has, whose heads differ in width alone."""
    shape = make_recipe(read_recipe("rcdm_adm128"), {}, {}, {"encoders": ["a"]}).config.network
    with torch.device("meta"):
        made = Denoiser(shape, [768])
        assert made(torch.empty(2, 3, 128, 128), torch.zeros(2), torch.empty(2, 1024)).shape == (2, 6, 128, 128)
    assert sum(weights.numel() for weights in made.unet.parameters()) == 420_505_606
    assert sum(weights.numel() for weights in made.conditions.parameters()) == 769 * 1024


def test_the_condition_is_added_to_the_time_and_scales_and_shifts_the_norms(denoiser: Denoiser) -> None:
    unet = denoiser.unet
    assert isinstance(unet, diffusers().UNet2DModel)
    assert (unet.config.class_embed_type, unet.config.resnet_time_scale_shift) == ("identity", "scale_shift")
    block = unet.down_blocks[0].resnets[0]
    x, embedding = torch.randn(2, 16, 4, 4), torch.randn(2, 64)
    hidden = block.conv1(torch.nn.functional.silu(block.norm1(x)))
    scale, shift = block.time_emb_proj(torch.nn.functional.silu(embedding))[:, :, None, None].chunk(2, 1)
    hidden = block.conv2(torch.nn.functional.silu(block.norm2(hidden) * (1 + scale) + shift))
    torch.testing.assert_close(block(x, embedding), x + hidden, rtol=1e-4, atol=1e-5)


def test_each_picture_has_the_representation_of_one_encoder(denoiser: Denoiser) -> None:
    which = torch.tensor([1, 0, 1])
    first, second = torch.randn(1, 5), torch.randn(2, 7)
    embedded = denoiser.embed([first, second], which)
    torch.testing.assert_close(embedded[1:2], denoiser.conditions[0].linear((first - 0.5) / 2))
    torch.testing.assert_close(embedded[[0, 2]], denoiser.conditions[1].linear(second))
    denoiser.embed([torch.zeros(0, 5), torch.randn(3, 7)], torch.ones(3).long()).sum().backward()
    grad = denoiser.conditions[0].linear.weight.grad
    assert grad is not None  # it takes part without pictures, or processes would wait
    assert not grad.any()
    denoiser.zero_grad()


@pytest.mark.parametrize("process", ["flow", "ddpm"])
def test_the_files_are_those_of_diffusers(process: str, tmp_path: Path) -> None:
    made = Denoiser(Shape(size=8, unshuffle=2, channels=(16, 32), layers=1, head_width=16, process=process), [5, 7])
    torch.nn.init.normal_(made.unet.conv_out.weight, std=0.1)
    made.conditions[0].mean.fill_(0.5)
    save_model(tmp_path, made, ABOUT)
    model = load_model(tmp_path)
    noisy, times, features = torch.randn(2, 3, 8, 8), torch.tensor([10.0, 900.0]), torch.randn(2, 5)
    expected = made(noisy, times, made.conditions[0](features))
    with torch.no_grad():
        torch.testing.assert_close(model.network(model.embed(0, features))(noisy, times), expected)
        alone = diffusers().UNet2DModel.from_pretrained(tmp_path, low_cpu_mem_usage=False)
        small = torch.nn.functional.pixel_unshuffle(noisy, 2)
        seen = alone(small, times, class_labels=made.conditions[0](features)).sample
    part = torch.nn.functional.pixel_shuffle(seen.chunk(made.outputs, 1)[0], 2)
    torch.testing.assert_close(part, expected[:, :3])
    assert model.encoders[0]["feature"] == "norm.cls"
    name = {"flow": "FlowMatchHeunDiscreteScheduler", "ddpm": "DDPMScheduler"}[process]
    assert json.loads((tmp_path / "scheduler_config.json").read_text())["_class_name"] == name
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="Cannot read the diffusion model"):
        load_model(tmp_path)


def test_the_published_shape_has_attention_where_it_should() -> None:
    shape = Shape(128, 1, (256, 256, 512, 768, 1024), 2, (32, 16, 8), 128, "resnet", "ddpm")
    assert shape.places == (128, 64, 32, 16, 8)
    made = shape.unet(2)
    assert made["down_block_types"] == ("ResnetDownsampleBlock2D",) * 2 + ("AttnDownBlock2D",) * 3
    assert made["up_block_types"] == ("AttnUpBlock2D",) * 3 + ("ResnetUpsampleBlock2D",) * 2
    assert made["out_channels"] == 6


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": 25}, "Pictures of 25 pixels cannot be halved 1 times .* choose a multiple of 4"),
        ({"channels": ()}, "a number for each level"),
        ({"attention": (5,)}, r"No level has 5 places in a row; attention can be at \[12, 6\]"),
        ({"resample": "pool"}, "no way 'pool' to resample"),
        ({"process": "vp"}, "no process 'vp'"),
        ({"layers": 0}, "layers is 0, but at least 1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Shape(**settings)


def test_without_diffusers_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "diffusers":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r"not installed; get it with `pip install 'sightline\[generation\]'`"):
        diffusers()
