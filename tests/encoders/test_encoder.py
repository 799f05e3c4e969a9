"""References, preprocessing, encoders around modules, and saving."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import transforms

from sightline.core.errors import InputError
from sightline.core.references import parse_reference
from sightline.encoders.files.weights import hash_weights
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder
from sightline.encoders.sites import Tokens
from sightline.encoders.watching import capture
from sightline.images.preprocess import Preprocess

SMALL = "img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5"
VIT = f"timm:vit_tiny_patch16_224@random?{SMALL}"


# ---------------------------------------------------------------------------------------------------------------
# References


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("timm:resnet18", ("timm", "resnet18", None, {})),
        ("timm:vit_small_patch16_224.dino", ("timm", "vit_small_patch16_224.dino", None, {})),
        ("timm:a@random", ("timm", "a", "random", {})),
        ("timm:a@/data/x.pth?img_size=(32,48)", ("timm", "a", "/data/x.pth", {"img_size": "(32,48)"})),
        ("huggingface:org/name@random?seed=3", ("huggingface", "org/name", "random", {"seed": "3"})),
        ("run:../runs/mine", ("run", "../runs/mine", None, {})),
        ("timm:a?x=1&y=", ("timm", "a", None, {"x": "1", "y": ""})),
    ],
)
def test_references(text, parts):
    reference = parse_reference(text)
    assert (reference.source, reference.id, reference.weights, reference.options) == parts
    assert str(reference) == text


@pytest.mark.parametrize("text", ["", "resnet18", "timm:", ":x", "timm:x@", "timm: @"])
def test_text_that_is_no_reference(text):
    if text == "timm: @":
        text = "timm:a@?"
    with pytest.raises(InputError, match="is not an encoder reference"):
        parse_reference(text)


def test_options_without_a_value():
    with pytest.raises(InputError, match="option=value"):
        parse_reference("timm:a?seed")


def test_unknown_source():
    with pytest.raises(InputError, match="There is no source 'tim'; did you mean 'timm'"):
        load_encoder("tim:resnet18@random")


# ---------------------------------------------------------------------------------------------------------------
# Preprocessing


def picture(height, width):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("shape", [(90, 120), (120, 90), (97, 131), (5, 7), (1, 1), (300, 20), (64, 64)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
@pytest.mark.parametrize("resize", [73, 64, (80, 70)])
def test_preprocessing_is_that_of_torchvision(shape, interpolation, resize):
    mode = transforms.InterpolationMode(interpolation)
    preprocess = Preprocess((64, 64), resize, interpolation, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    reference = transforms.Compose(
        [
            transforms.Resize(resize, mode),
            transforms.CenterCrop(64),
            transforms.ToTensor(),
            transforms.Normalize(preprocess.mean, preprocess.std),
        ]
    )
    image = picture(*shape)
    torch.testing.assert_close(preprocess([image])[0], reference(image), rtol=0, atol=1e-6)
    array = np.asarray(image)
    assert torch.equal(preprocess([array]), preprocess([image]))
    assert preprocess.crop(array).dtype == np.uint8


def test_crops_that_are_not_square():
    image = picture(50, 40)
    expected = transforms.CenterCrop((20, 30))(transforms.Resize(36)(image))
    assert np.array_equal(Preprocess((20, 30), 36, "bilinear").crop(np.asarray(image)).transpose(1, 2, 0), expected)


def test_no_resize_still_enlarges_what_is_too_small():
    preprocess = Preprocess((32, 32))
    image = np.asarray(picture(50, 40))
    assert np.array_equal(preprocess.crop(image), image[9:41, 4:36].transpose(2, 0, 1))
    assert preprocess.crop(np.asarray(picture(10, 40))).shape == (3, 32, 32)


def test_grey_and_transparent_images_become_rgb():
    preprocess = Preprocess((8, 8), 8)
    assert preprocess([picture(9, 9).convert("L"), picture(9, 9).convert("RGBA")]).shape == (2, 3, 8, 8)


def test_floats_are_taken_as_they_are():
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    preprocess = Preprocess((4, 4))
    torch.testing.assert_close(preprocess.normalize(pixels), preprocess.normalize(pixels.float() / 255))


# ---------------------------------------------------------------------------------------------------------------
# Encoders


def test_an_encoder_passes_through_and_a_module_is_wrapped():
    encoder = load_encoder(VIT)
    again = load_encoder(encoder, name="other")
    assert (again.module is encoder.module, again.weights, again.name) == (True, encoder.weights, "other")
    mine = load_encoder(
        nn.Conv2d(3, 4, 8, 8), name="mine", preprocess=Preprocess((16, 16)), tokens=Tokens(0, None, (2, 2))
    )
    assert (mine.name, mine.reference, mine.preprocess.size) == ("mine", "module:Conv2d", (16, 16))
    assert mine.tokens == Tokens(0, None, (2, 2))


def test_another_preprocessing_for_an_encoder():
    encoder = load_encoder(VIT)
    other = replace(encoder.preprocess, mean=(0.1, 0.2, 0.3))
    changed = load_encoder(encoder, preprocess=other)
    assert (changed.preprocess, changed.tokens) == (other, encoder.tokens)
    assert encoder.preprocess != other
    assert load_encoder(encoder, tokens=Tokens(0, None, (2, 2))).tokens == Tokens(0, None, (2, 2))


def test_description_is_plain_data():
    about = json.loads(json.dumps(load_encoder(VIT).describe()))
    assert about["tokens"] == {"prefix": 1, "cls": 0, "grid": [4, 4]}
    assert (about["depth"], about["heads"], about["patch"], about["family"]) == (2, 4, 8, "vit")
    assert about["parameters"] == sum(p.numel() for p in load_encoder(VIT).module.parameters())
    assert about["preprocess"]["size"] == [32, 32]
    assert len(about["weights"]) == 64


def test_evaluating_gives_every_part_its_mode_back():
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    module[1].eval()
    encoder = load_encoder(module)
    with contextlib.suppress(KeyError), encoder.evaluating():
        assert not module.training
        assert not module[0].training
        raise KeyError
    assert (module.training, module[0].training, module[1].training) == (True, True, False)


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


def test_a_saved_classifier_of_another_size_can_be_looked_at(tmp_path):
    encoder = load_encoder(VIT)
    encoder.module.reset_classifier(3)
    again = load_encoder(f"run:{save_encoder(encoder, tmp_path)}")
    with torch.no_grad(), capture(again, ["head.0"]) as acts:
        output = again(torch.randn(1, 3, 32, 32))
    assert torch.equal(acts["head.0"], output)
    assert output.shape == (1, 3)


def test_modules_from_python_cannot_be_saved(tmp_path):
    with pytest.raises(InputError, match="cannot be built anew"):
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


def test_a_bare_module_sees_the_whole_image() -> None:
    """Without a word on preprocessing a large photo is resized, not looked at through a hole of 224 pixels."""
    encoder = load_encoder(torch.nn.Conv2d(3, 8, 16, 16))
    assert (encoder.preprocess.size, encoder.preprocess.resize) == ((224, 224), 224)


def test_weights_that_the_description_does_not_fit(tmp_path: Path) -> None:
    first, other = (load_encoder(f"timm:test_vit@random?seed={seed}") for seed in (0, 1))
    save_encoder(first, tmp_path / "first")
    save_encoder(other, tmp_path / "other")
    (tmp_path / "other" / "encoder.safetensors").replace(tmp_path / "first" / "encoder.safetensors")
    with pytest.raises(InputError, match=r"not those that its encoder\.json describes"):
        load_encoder(f"run:{tmp_path / 'first'}")
