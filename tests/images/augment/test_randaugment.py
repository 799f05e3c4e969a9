"""RandAugment: every operation against Pillow as timm uses it, the distribution of what is drawn, and the batch."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from torchvision.transforms.v2 import functional as TF

from sightline.images.augment.randaugment import COLOURS, GEOMETRY, LAYERS, NAMES, draw, matrix, randaugment, warp

TIMM = {
    "auto_contrast": "AutoContrast",
    "equalize": "Equalize",
    "invert": "Invert",
    "posterize": "PosterizeIncreasing",
    "solarize": "SolarizeIncreasing",
    "solarize_add": "SolarizeAdd",
    "color": "ColorIncreasing",
    "contrast": "ContrastIncreasing",
    "brightness": "BrightnessIncreasing",
    "sharpness": "SharpnessIncreasing",
    "rotate": "Rotate",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}
GREY = (128 / 255,) * 3


@pytest.fixture(scope="module")
def bytes_() -> np.ndarray[Any, Any]:
    """Three images of 20 × 24: smooth, noisy, and one with a channel of a single value."""
    chance = np.random.default_rng(0)
    rows, columns = np.mgrid[:20, :24]
    smooth = np.stack([rows * 12, columns * 9 + 20, (rows + columns) * 3], -1)
    noisy = chance.integers(0, 256, (20, 24, 3))
    flat = np.stack([np.full((20, 24), 77), noisy[..., 1] // 3 + 30, np.where(rows < 10, 5, 200)], -1)
    return np.stack([smooth, noisy, flat]).astype(np.uint8)


def floats(images: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def one(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((len(x), 1, 1, 1), value)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("level", [3.7, 9.2, 9.9])
@pytest.mark.parametrize("name", TIMM)
def test_an_operation_is_that_of_timm_with_pillow(
    name: str, level: float, sign: int, bytes_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: sign * value)
    level_to_arg = auto_augment.LEVEL_TO_ARG[TIMM[name]]
    arguments = level_to_arg(level, {}) if level_to_arg else ()
    x = floats(bytes_)
    if name in GEOMETRY:
        found = warp(x, torch.tensor([matrix(name, sign * level / 10, (20, 24))]).expand(3, 2, 3), GREY)
    else:
        found = COLOURS[name](x.clone(), one(x, level / 10), one(x, sign))
    for image, result in zip(bytes_, found, strict=True):
        expected = auto_augment.NAME_TO_OP[TIMM[name]](
            Image.fromarray(image), *arguments, resample=Image.Resampling.BILINEAR, fillcolor=(128, 128, 128)
        )
        apart = np.abs(result.permute(1, 2, 0).numpy() * 255 - np.asarray(expected, np.float64))
        # Pillow rounds on the way; a pixel on the very border may fall on either side of it.
        assert np.quantile(apart, 0.99) < 2
        assert name in GEOMETRY or apart.max() < 2.5


def test_operations_are_those_of_torchvision(bytes_: Any) -> None:
    """Which does not round between, so that they agree to the last digits."""
    x, whole = floats(bytes_), torch.from_numpy(bytes_).permute(0, 3, 1, 2)
    up, down = 1 + 0.9 * 0.8, 1 - 0.9 * 0.8
    some = one(x, 0.8)
    for sign, factor in ((1.0, up), (-1.0, down)):
        for name, theirs in (
            ("color", TF.adjust_saturation),
            ("contrast", TF.adjust_contrast),
            ("brightness", TF.adjust_brightness),
            ("sharpness", TF.adjust_sharpness),
        ):
            torch.testing.assert_close(
                COLOURS[name](x.clone(), some, one(x, sign)), theirs(x, factor), rtol=1e-4, atol=1e-4
            )
    exact = {
        "equalize": TF.equalize(whole),
        "invert": TF.invert(whole),
        "posterize": TF.posterize(whole, 4 - int(0.8 * 4)),
        "solarize": TF.solarize(whole, 256 - int(0.8 * 256)),
    }
    for name, expected in exact.items():
        torch.testing.assert_close(COLOURS[name](x.clone(), some, some), expected.float() / 255, rtol=0, atol=1e-6)
    torch.testing.assert_close(COLOURS["auto_contrast"](x, some, some), TF.autocontrast(x), rtol=0, atol=1e-5)


def test_nothing_is_left_of_an_image_that_is_moved_away() -> None:
    x = torch.rand(1, 3, 8, 8)
    assert torch.equal(
        warp(x, torch.tensor([[[1.0, 0, 8], [0, 1.0, 0]]]), (0.1, 0.2, 0.3))[0, :, 3, 5], torch.tensor([0.1, 0.2, 0.3])
    )
    torch.testing.assert_close(warp(x, torch.tensor([[[1.0, 0, 0], [0, 1.0, 0]]]), GREY), x)


def test_the_batch_is_every_image_by_itself(bytes_: Any) -> None:
    x = floats(bytes_).repeat(40, 1, 1, 1)
    keys = np.arange(len(x), dtype=np.uint64)
    together = randaugment(x.clone(), 9.0, 0.5, GREY, keys)
    alone = torch.cat([randaugment(x[i : i + 1].clone(), 9.0, 0.5, GREY, keys[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(together, alone, rtol=0, atol=5e-6)
    layers = draw(9.0, 0.5, keys)
    untouched = torch.from_numpy(np.all([drawn.operation < 0 for drawn in layers], axis=0))
    assert torch.equal(together[untouched], x[untouched])
    assert together.min() >= 0
    assert together.max() <= 1
    # And by a plain walk through what was drawn.
    for i in range(len(x)):
        image = x[i : i + 1].clone()
        for drawn in layers:
            if drawn.operation[i] >= 0:
                name, strength, sign = NAMES[drawn.operation[i]], drawn.strength[i], drawn.sign[i]
                if name in GEOMETRY:
                    image = warp(image, torch.tensor([matrix(name, strength * sign, (20, 24))]), GREY)
                else:
                    image = COLOURS[name](image, one(image, strength), one(image, sign))
        torch.testing.assert_close(together[i], image[0], rtol=0, atol=5e-6)


def test_what_is_drawn_has_the_distribution_of_timm() -> None:
    from scipy import stats

    n = 30000
    layers = draw(9.0, 0.5, np.arange(n, dtype=np.uint64))
    assert len(layers) == LAYERS == 2
    assert len(NAMES) == 15
    assert set(TIMM.values()) == set(auto_augment._RAND_INCREASING_TRANSFORMS)
    for operation, strength, sign in layers:
        counts = np.bincount(operation + 1, minlength=16)
        assert counts[0] == pytest.approx(n / 2, abs=4 * (n / 4) ** 0.5)
        assert stats.chisquare(counts[1:]).pvalue > 0.001
        assert stats.kstest(strength[strength < 1], stats.truncnorm(-18, 2, 0.9, 0.05).cdf).pvalue > 0.001
        assert (strength == 1).mean() == pytest.approx(stats.norm.sf(2), abs=0.004)
        assert sign.mean() == pytest.approx(0, abs=0.025)
    one, other = (drawn.operation for drawn in layers)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.02
