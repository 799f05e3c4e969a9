"""Operations on colours against torchvision's on the same numbers, the numbers against its random classes."""

import math

import numpy as np
import pytest
import torch
from support.augmentation import COLOURS, PLAIN, close, images, keys_of, same_distribution, theirs_drawn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from sightline.images.augment import colours
from sightline.images.augment.colours import augment, distort
from sightline.images.augment.policy import Policy


@pytest.mark.parametrize("number", range(4))
def test_colours_are_torchvisions(number: int) -> None:
    factors = [-0.5, -0.37, -0.2, -1 / 6, 0.0, 0.01, 0.1, 1 / 3, 0.5] if number == 3 else [0.0, 0.2, 0.9, 1.0, 1.3, 1.8]
    x = images(len(factors))
    ours = x.clone()
    colours.OPERATIONS[number](ours, torch.tensor(factors)[:, None, None, None])
    close(ours, torch.stack([COLOURS[number](image, f) for image, f in zip(x, factors, strict=True)]))
    assert ours.min() >= 0
    assert ours.max() <= 1


def test_grey_is_torchvisions() -> None:
    x = images(5)
    ours = distort(x, Policy(20, gray=1.0), keys_of(5))
    close(ours, TF.rgb_to_grayscale(x, num_output_channels=3))


@pytest.mark.parametrize(("height", "width", "largest"), [(20, 20, 2.0), (13, 26, 0.6), (5, 7, 2.0), (3, 12, 0.5)])
def test_blur_is_torchvisions(height: int, width: int, largest: float) -> None:
    sigma = torch.tensor([0.1, 0.3, largest])
    x = torch.rand(3, 3, height, width, generator=torch.Generator().manual_seed(0))
    radii = [min(math.ceil(4 * largest), length - 1) for length in (width, height)]
    theirs = [
        TF.gaussian_blur(image, [2 * r + 1 for r in radii], [float(s), float(s)])
        for image, s in zip(x, sigma, strict=True)
    ]
    close(colours.blur(x, sigma, largest), torch.stack(theirs))


def test_blur_of_a_pixel_is_the_pixel() -> None:
    x = torch.rand(2, 3, 1, 1)
    close(colours.blur(x, torch.tensor([0.1, 2.0]), 2.0), x)


def test_solarize_is_torchvisions() -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, -1, -1)
    theirs = TF.solarize(levels, 128).float() / 255
    close(augment(levels, Policy(16, solarize=1.0, **PLAIN), keys_of(1)), theirs)
    x = images(3)
    close(distort(x, Policy(20, solarize=1.0), keys_of(3)), TF.solarize(x, 128 / 255))


def test_what_an_operation_skips_is_not_changed() -> None:
    x, keys = images(40), keys_of(40)
    policy = Policy(20, jitter=(0.4, 0.4, 0.4, 0.1), jitter_probability=0.3, gray=0.3, blur=0.3, solarize=0.3)
    decisions = colours.decide(policy, keys)
    idle = ~(decisions.gray | decisions.blur | decisions.solarize | (decisions.orders >= 0).any(axis=1))
    assert idle.any()
    before = x.clone()
    ours = distort(x, policy, keys)
    assert torch.equal(x, before)
    assert torch.equal(ours[idle], x[idle])
    assert not (ours == x).all(dim=(1, 2, 3))[~idle].any()


def test_operation_of_strength_zero_is_left_out() -> None:
    orders = colours.decide(Policy(8, jitter=(0.4, 0.0, 0.4, 0.0), jitter_probability=1.0), keys_of(50)).orders
    assert np.isin(orders, (-1, 0, 2)).all()
    assert ((orders >= 0).sum(axis=1) == 2).all()


@pytest.mark.chance
@pytest.mark.parametrize("strengths", [(0.4, 0.4, 0.2, 0.1), (0.8, 1.5, 0.8, 0.2)])
def test_colours_are_drawn_as_color_jitter_draws(strengths: tuple[float, float, float, float]) -> None:
    n = 4000
    params = theirs_drawn(v2.ColorJitter(*strengths), n)
    decisions = colours.decide(Policy(8, jitter=strengths, jitter_probability=1.0), keys_of(n))
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    for number, name in enumerate(names):
        same_distribution(decisions.factors[:, number], np.array([p[name] for p in params]))
    code = np.array([1000, 100, 10, 1])
    same_distribution(decisions.orders @ code, np.stack([p["fn_idx"].numpy() for p in params]) @ code)
    correlation = np.corrcoef(np.column_stack([decisions.factors, decisions.sigma]).T) - np.eye(5)
    assert np.abs(correlation).max() < 4 / math.sqrt(n)


def test_sigma_is_drawn_as_gaussian_blur_draws() -> None:
    params = theirs_drawn(v2.GaussianBlur(9, (0.1, 2.0)), 4000)
    sigma = colours.decide(Policy(8, blur=1.0, blur_sigma=(0.1, 2.0)), keys_of(4000)).sigma
    same_distribution(sigma, np.array([p["sigma"][0] for p in params]))
