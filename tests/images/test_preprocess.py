"""Preprocessing: torchvision's numbers, sizes that are not square, grey and float images."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from sightline.core.errors import InputError
from sightline.images.preprocess import Preprocess

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


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
@pytest.mark.parametrize("shape", [(3, 250), (250, 3), (40, 60)])
def test_of_a_long_strip_only_the_crop_is_made(monkeypatch, shape, interpolation):
    preprocess, image = Preprocess((24, 20), 32, interpolation), np.asarray(picture(*shape))
    whole = preprocess.crop(image).astype(int)
    monkeypatch.setattr("sightline.images.preprocess.LARGEST", 0)
    apart = np.abs(preprocess.crop(image) - whole)
    assert apart.max() < 9  # PIL may take rows before columns, and clips in between
    assert apart.mean() < 0.6
    monkeypatch.undo()
    assert preprocess.crop(np.zeros((1, 100_000, 3), np.uint8)).shape == (3, 24, 20)  # 32 × 3,200,000 as a whole


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": (0, 8)}, r"cropped to \(0, 8\)"),
        ({"size": (8, 8), "resize": 0}, r"resized to \(0, 0\)"),
        ({"size": (8.0, 8)}, r"cropped to \(8.0, 8\)"),
        ({"std": (0.2, 0.0, 0.2)}, r"the std \(0.2, 0.0, 0.2\); 3 finite numbers"),
        ({"std": (0.2, float("nan"), 0.2)}, "the std"),
        ({"mean": (float("nan"), 0.5, 0.5)}, "the mean"),
        ({"mean": (0.5,)}, "the mean"),
    ],
)
def test_preprocessing_that_gives_no_pixels_is_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        Preprocess(**wrong)
