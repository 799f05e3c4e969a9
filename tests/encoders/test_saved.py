"""Encoders in folders: saved and loaded again, rounded, changed or incomplete."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.files.weights import hash_weights
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder
from sightline.encoders.watching import capture

SMALL = "img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5"
VIT = f"timm:vit_tiny_patch16_224@random?{SMALL}"


@pytest.mark.parametrize(
    "reference",
    [
        VIT,
        f"{VIT}&reg_tokens=2&img_size=(32,48)",
        "timm:convnextv2_tiny@random?depths=(1,1,1,1)&dims=(8,8,8,8)&num_classes=0",
        "torchvision:shufflenet_v2_x0_5@random?size=64&seed=4",
    ],
)
def test_saved_encoders_come_back_the_same(tmp_path, reference):
    encoder = load_encoder(reference)
    with torch.no_grad():
        for parameter in encoder.module.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    folder = save_encoder(encoder, tmp_path / "deep" / "mine")
    again = load_encoder(f"run:{folder}")
    assert sorted(path.name for path in folder.iterdir()) == ["encoder.json", "encoder.safetensors"]
    assert again.weights == hash_weights(encoder.module)
    assert json.loads((folder / "encoder.json").read_text())["weights"] == again.weights
    assert (again.preprocess, again.tokens, again.depth) == (encoder.preprocess, encoder.tokens, encoder.depth)
    assert (again.name, again.family) == ("mine", encoder.family)
    assert list(again.sites) == list(encoder.sites)
    images = torch.randn(2, 3, *encoder.preprocess.size)
    with torch.no_grad():
        assert torch.equal(again(images), encoder(images))
    save_encoder(again, tmp_path / "twice")
    assert load_encoder(f"run:{tmp_path / 'twice'}").weights == again.weights


@pytest.mark.parametrize("architecture", ["run:{0}", "checkpoint:{0}", "timm:resnet18", "timm:resnet18@{0}/x.pth"])
def test_an_architecture_is_a_model_of_a_library_without_weights(tmp_path, architecture):
    about = save_encoder(load_encoder(VIT), tmp_path) / "encoder.json"
    named = architecture.format(tmp_path)
    about.write_text(json.dumps(json.loads(about.read_text()) | {"architecture": named}))
    with pytest.raises(InputError) as error:
        load_encoder(f"run:{tmp_path}")
    assert f"names the architecture '{named}', but a model of timm, torchvision, huggingface" in str(error.value)
    assert str(error.value).endswith("such as timm:resnet18@random; save it again")


def test_a_saved_classifier_of_another_size_can_be_looked_at(tmp_path):
    encoder = load_encoder(VIT)
    encoder.module.reset_classifier(3)
    again = load_encoder(f"run:{save_encoder(encoder, tmp_path)}")
    with torch.no_grad(), capture(again, ["head.0"]) as acts:
        output = again(torch.randn(1, 3, 32, 32))
    assert torch.equal(acts["head.0"], output)
    assert output.shape == (1, 3)


def test_modules_from_python_cannot_be_saved(tmp_path):
    with pytest.raises(InputError, match="cannot be rebuilt"):
        save_encoder(load_encoder(nn.Linear(2, 2)), tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_saving_where_a_file_stands(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a file stands where a folder is needed"):
        save_encoder(load_encoder(VIT), tmp_path / "file" / "mine")


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"architecture": "timm:x", "preprocess": {"size": 3}}'])
def test_folders_without_an_encoder(tmp_path, content):
    if content is not None:
        (tmp_path / "encoder.json").write_text(content)
    with pytest.raises(InputError, match=r"holds no encoder \(a readable encoder.json"):
        load_encoder(f"run:{tmp_path}")


def test_runs_take_no_weights_nor_options(tmp_path):
    folder = save_encoder(load_encoder(VIT), tmp_path / "mine")
    with pytest.raises(InputError, match="its own weights and settings"):
        load_encoder(f"run:{folder}@random")
    (folder / "encoder.safetensors").unlink()
    with pytest.raises(InputError, match="There is no weights file"):
        load_encoder(f"run:{folder}")


def test_weights_that_the_description_does_not_fit(tmp_path: Path) -> None:
    first, other = (load_encoder(f"timm:test_vit@random?seed={seed}") for seed in (0, 1))
    save_encoder(first, tmp_path / "first")
    save_encoder(other, tmp_path / "other")
    (tmp_path / "other" / "encoder.safetensors").replace(tmp_path / "first" / "encoder.safetensors")
    with pytest.raises(InputError, match=r"not those that its encoder\.json describes"):
        load_encoder(f"run:{tmp_path / 'first'}")


@torch.no_grad()
@pytest.mark.parametrize("reference", ["small", "timm:resnet18@random?size=32&stem=small"])
def test_rounded_weights_survive_saving(reference: str, small: str, tmp_path: Path) -> None:
    encoder = sl.load_encoder(small if reference == "small" else reference)
    save_encoder(encoder, tmp_path / "whole")
    save_encoder(encoder, tmp_path / "half", torch.bfloat16)
    sizes = [(tmp_path / name / "encoder.safetensors").stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.52 * sizes[0]
    assert sl.load_encoder(f"run:{tmp_path / 'whole'}").weights == encoder.weights
    again = sl.load_encoder(f"run:{tmp_path / 'half'}")
    assert again.weights != encoder.weights
    before, after = encoder.module.state_dict(), again.module.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        rounded = value.bfloat16().to(value.dtype) if value.is_floating_point() else value
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], rounded), name
    x = torch.randn(2, 3, 32, 32)
    encoder.module.load_state_dict(after)
    assert torch.equal(encoder.module.eval()(x), again.module.eval()(x))
    assert again.preprocess == encoder.preprocess


def test_weights_that_were_changed_are_noticed(small: str, tmp_path: Path) -> None:
    for seed, name in ((0, "one"), (1, "other")):
        save_encoder(sl.load_encoder(f"{small}&seed={seed}"), tmp_path / name, torch.bfloat16)
    (tmp_path / "other" / "encoder.safetensors").replace(tmp_path / "one" / "encoder.safetensors")
    with pytest.raises(InputError, match=r"not those that its encoder\.json describes"):
        sl.load_encoder(f"run:{tmp_path / 'one'}")
