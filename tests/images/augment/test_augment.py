"""Each operation against torchvision's on the same numbers, the numbers against torchvision's random classes."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from sightline.core.errors import InputError
from sightline.core.keyed_random import Keys, fold
from sightline.images.augment import batched, colours, policies
from sightline.images.augment.colours import augment, distort
from sightline.images.augment.crops import boxes, crop, crop_one, flips
from sightline.images.augment.policy import Policy

PLAIN: dict[str, Any] = {"crop": None, "flip": 0.0}
COLOURS = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
UNLIKELY = 1e-4


def keys_of(n: int, seed: int = 0) -> Keys:
    return fold(np.arange(n, dtype=np.uint64), seed)


def images(n: int, height: int = 20, width: int = 20, seed: int = 0) -> Tensor:
    """Noise over smooth colours, with some grey, black, white and pure pixels, where hues are special."""
    generator = torch.Generator().manual_seed(seed)
    smooth = TF.resize(torch.rand(n, 3, 4, 4, generator=generator), [height, width])
    x = (smooth + 0.2 * torch.randn(n, 3, height, width, generator=generator)).clamp(0, 1)
    x[:, :, 0, :5] = x[:, :1, 0, :5]
    corners = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3))).T  # (3, 8)
    x[:, :, 1, :8] = corners
    x[:, :, 2, :8] = 0.25 + 0.5 * corners
    return x


def as_bytes(x: Tensor) -> Tensor:
    return (x * 255).round().to(torch.uint8)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------------
# Operations


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width", "size"), [(20, 20, 20), (37, 23, 16), (24, 50, 11), (9, 12, 32)])
def test_crop_is_resized_crop(interpolation: str, height: int, width: int, size: int) -> None:
    policy = Policy(size, crop=(0.05, 1.0), interpolation=interpolation)
    x, keys = images(40, height, width), keys_of(40)
    where, mirrored = boxes(np.full(40, height), np.full(40, width), policy, keys), flips(policy, keys)
    where[0] = 0, 0, height, width
    where[1] = height - 1, 0, 1, 1
    where[2] = 0, 1, 1, width - 1
    assert mirrored.any()
    assert not mirrored.all()
    ours = crop(x, where, mirrored, policy)
    for row, box, flip, image in zip(ours, where.tolist(), mirrored, x, strict=True):
        mode = v2.InterpolationMode(interpolation)
        theirs = TF.resized_crop(image, *box, [size, size], mode, antialias=True).clamp(0, 1)
        close(row, theirs.flip(2) if flip else theirs)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crop_of_large_images_in_pieces(monkeypatch: pytest.MonkeyPatch, interpolation: str) -> None:
    policy = Policy(32, interpolation=interpolation)
    x, keys = images(6, 301, 199), keys_of(6)
    where, mirrored = boxes(np.full(6, 301), np.full(6, 199), policy, keys), np.zeros(6, bool)
    monkeypatch.setattr(batched, "CACHED", 2 * 3 * 301 * 199)
    mode = v2.InterpolationMode(interpolation)
    theirs = [TF.resized_crop(image, *box, [32, 32], mode) for image, box in zip(x, where.tolist(), strict=True)]
    close(crop(x, where, mirrored, policy), torch.stack(theirs).clamp(0, 1))


def test_bytes_and_floats_give_the_same_view() -> None:
    x = as_bytes(images(16))
    policy = policies.simclr(12)[0]
    close(augment(x, policy, keys_of(16)), augment(x.float() / 255, policy, keys_of(16)))
    assert augment(x, policy, keys_of(16)).dtype == torch.float32


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_one_image_is_cropped_as_a_batch_is(interpolation: str) -> None:
    policy = Policy(16, crop=(0.05, 1.0), interpolation=interpolation)
    x, keys = as_bytes(images(12, 60, 45)), keys_of(12)
    where, mirrored = boxes(np.full(12, 60), np.full(12, 45), policy, keys), flips(policy, keys)
    together = crop(x, where, mirrored, policy) * 255
    differences = []
    for image, box, flip, row in zip(x, where, mirrored, together, strict=True):
        array = image.permute(1, 2, 0).contiguous().numpy()
        array.flags.writeable = False  # as Pillow's arrays are
        one = crop_one(array, box, bool(flip), policy)
        assert one.flags.c_contiguous
        for like in (image, TF.to_pil_image(image)):
            theirs = TF.resized_crop(like, *box.tolist(), [16, 16], v2.InterpolationMode(interpolation))
            theirs = TF.pil_to_tensor(theirs) if like is not image else theirs
            assert np.abs(one - (theirs.flip(2) if flip else theirs).numpy().astype(float)).max() <= 1
        differences.append(np.abs(one - row.numpy()))
    # Bytes are rounded, and the cubic's overshoot cut off, after the rows and again after the columns.
    assert np.mean(differences) < 0.5
    assert np.max(differences) < (1.01 if interpolation == "bilinear" else 10)


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


def test_whole_policy_is_the_chain_of_operations() -> None:
    """A plain twin: torchvision's functions image by image, with the numbers that were drawn."""
    policy = Policy(18, jitter=(0.4, 0.5, 0.3, 0.1), gray=0.2, blur=0.5, blur_sigma=(0.1, 1.5), solarize=0.3)
    x, keys = as_bytes(images(150, 24, 30)), keys_of(150, seed=3)
    decisions = colours.decide(policy, keys)
    assert len(np.unique(decisions.orders, axis=0)) == 25  # all permutations, and none
    where, mirrored = boxes(np.full(150, 24), np.full(150, 30), policy, keys), flips(policy, keys)
    expected = []
    for i, image in enumerate(x.float() / 255):
        mode = v2.InterpolationMode.BICUBIC
        view = TF.resized_crop(image, *where[i].tolist(), [18, 18], mode, antialias=True).clamp(0, 1)
        view = TF.horizontal_flip(view) if mirrored[i] else view
        for number in decisions.orders[i]:
            if number >= 0:
                view = COLOURS[number](view, decisions.factors[i, number])
        if decisions.gray[i]:
            view = TF.rgb_to_grayscale(view, num_output_channels=3)
        if decisions.blur[i]:
            view = TF.gaussian_blur(view, [13, 13], [decisions.sigma[i]] * 2)
        if decisions.solarize[i]:
            view = TF.solarize(view, 128 / 255)
        expected.append(view)
    ours, theirs = augment(x, policy, keys), torch.stack(expected)
    # Where a pixel lies at the threshold within rounding, solarising may go either way.
    edge = (theirs - 127 / 255).abs() < 1e-5
    close(ours[~edge], theirs[~edge], 2e-5)
    assert edge.float().mean() < 1e-3


# ---------------------------------------------------------------------------------------------------------------
# What a view depends on


@pytest.mark.parametrize(
    "policy", [*policies.simclr(16), *policies.moco_v3(16), *policies.dino(16, 8, 1), *policies.reconstruction(16)]
)
def test_view_does_not_depend_on_neighbours(policy: Policy) -> None:
    x, keys = as_bytes(images(60, 24, 18)), keys_of(60)
    together = augment(x, policy, keys)
    shuffled = np.random.default_rng(0).permutation(60)
    close(augment(x[shuffled], policy, keys[shuffled]), together[shuffled], 1e-6)
    for i in range(0, 60, 7):
        close(augment(x[i : i + 1], policy, keys[i : i + 1]), together[i : i + 1], 1e-6)
    assert torch.equal(augment(x, policy, keys), together)
    assert not torch.allclose(augment(x, policy, keys_of(60, seed=1)), together)
    assert together.min() >= 0
    assert together.max() <= 1


def test_pieces_do_not_change_the_views(monkeypatch: pytest.MonkeyPatch) -> None:
    x, policy = as_bytes(images(50)), policies.simclr(16)[0]
    together = augment(x, policy, keys_of(50))
    monkeypatch.setattr(batched, "CACHED", 7 * 3 * 400)
    close(augment(x, policy, keys_of(50)), together, 1e-6)


def test_threads_do_not_change_the_views(monkeypatch: pytest.MonkeyPatch) -> None:
    x, policy, before = as_bytes(images(50)), policies.simclr(16)[0], torch.get_num_threads()
    monkeypatch.setattr(batched, "CACHED", 7 * 3 * 400)
    try:
        torch.set_num_threads(1)
        alone = augment(x, policy, keys_of(50))
        torch.set_num_threads(2)
        assert torch.equal(augment(x, policy, keys_of(50)), alone)
        with torch.inference_mode():
            assert torch.equal(augment(x, policy, keys_of(50)), alone)
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


def test_policy_of_nothing_is_a_resize() -> None:
    x = as_bytes(images(4, 30, 21))
    theirs = TF.resize(x.float() / 255, [14, 14], v2.InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)
    close(augment(x, Policy(14, **PLAIN), keys_of(4)), theirs)
    same = Policy(20, **PLAIN)
    close(augment(images(4), same, keys_of(4)), images(4), 1e-6)
    assert torch.equal(distort(images(4), same, keys_of(4)), images(4))


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


def test_no_images() -> None:
    assert augment(as_bytes(images(1))[:0], policies.simclr(8)[0], keys_of(0)).shape == (0, 3, 8, 8)


# ---------------------------------------------------------------------------------------------------------------
# Distributions


def theirs_drawn(transform: v2.Transform, n: int, shape: tuple[int, ...] = (3, 8, 8)) -> list[dict[str, Any]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [transform.make_params([torch.empty(shape)]) for _ in range(n)]


def same_distribution(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Few values: chi-square of the two histograms; many: Kolmogorov–Smirnov."""
    values = np.unique(np.concatenate([ours, theirs]))
    if len(values) == 1:
        return
    if len(values) > 30:
        assert stats.ks_2samp(ours, theirs).pvalue > UNLIKELY
        return
    table = np.array([[(x == value).sum() for value in values] for x in (ours, theirs)])
    rare = table.sum(axis=0) < 20
    table = np.column_stack([table[:, ~rare], *([table[:, rare].sum(axis=1)] if rare.any() else [])])
    assert stats.chi2_contingency(table).pvalue > UNLIKELY


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [
        (64, 64, (0.08, 1.0), (3 / 4, 4 / 3)),
        (48, 96, (0.4, 1.0), (3 / 4, 4 / 3)),  # many tries do not fit
        (100, 20, (0.9, 1.0), (3 / 4, 4 / 3)),  # none fits: too tall
        (20, 100, (0.9, 1.0), (3 / 4, 4 / 3)),  # too wide
        (31, 30, (1.0, 1.0), (1.5, 1.5)),  # too wide for any try, and the centre is between pixels
        (16, 16, (0.01, 0.05), (1 / 3, 3)),
    ],
)
def test_boxes_are_drawn_as_random_resized_crop_draws(height: int, width: int, scale: Any, ratio: Any) -> None:
    n = 4000
    params = theirs_drawn(v2.RandomResizedCrop(8, scale=scale, ratio=ratio), n, (3, height, width))
    theirs = np.array([[p[name] for name in ("top", "left", "height", "width")] for p in params])
    ours = boxes(np.full(n, height), np.full(n, width), Policy(8, crop=scale, ratio=ratio), keys_of(n))
    assert ours.dtype == np.int64
    assert (ours >= [0, 0, 1, 1]).all()
    assert (ours[:, :2] + ours[:, 2:] <= [height, width]).all()
    for column in range(4):
        same_distribution(ours[:, column], theirs[:, column])
    same_distribution(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3])  # area
    same_distribution(ours[:, 3] / ours[:, 2], theirs[:, 3] / theirs[:, 2])  # ratio
    free = (np.array([height, width]) - ours[:, 2:] + 1)[:, 0]
    same_distribution((ours[:, 0] + 0.5) / free, (theirs[:, 0] + 0.5) / (height - theirs[:, 2] + 1))  # position


def test_boxes_of_images_of_several_sizes() -> None:
    heights, widths, keys = np.array([10, 300, 7]), np.array([500, 20, 7]), keys_of(3)
    policy = Policy(8)
    together = boxes(heights, widths, policy, keys)
    for i in range(3):
        assert (boxes(heights[i : i + 1], widths[i : i + 1], policy, keys[i : i + 1])[0] == together[i]).all()
    whole = boxes(heights, widths, Policy(8, crop=None), keys)
    assert whole.tolist() == [[0, 0, 10, 500], [0, 0, 300, 20], [0, 0, 7, 7]]


def test_rates_are_the_probabilities() -> None:
    n, policy = (
        20_000,
        Policy(8, flip=0.5, jitter=(1, 1, 1, 0.1), jitter_probability=0.8, gray=0.2, blur=0.1, solarize=0.2),
    )
    decisions, keys = colours.decide(policy, keys_of(n)), keys_of(n)
    events = {
        "flip": (flips(policy, keys), 0.5),
        "jitter": ((decisions.orders >= 0).all(axis=1), 0.8),
        "gray": (decisions.gray, 0.2),
        "blur": (decisions.blur, 0.1),
        "solarize": (decisions.solarize, 0.2),
    }
    for happened, probability in events.values():
        assert stats.binomtest(int(happened.sum()), n, probability).pvalue > UNLIKELY
    for (a, _), (b, _) in itertools.combinations(events.values(), 2):  # and independent of each other
        assert stats.chi2_contingency(np.histogram2d(a, b, bins=2)[0]).pvalue > UNLIKELY
    for name in ("flip", "gray", "blur", "solarize"):
        never, always = (Policy(8, **{name: p}) for p in (0.0, 1.0))
        for chosen, expected in ((never, False), (always, True)):
            drawn = flips(chosen, keys) if name == "flip" else getattr(colours.decide(chosen, keys), name)
            assert (drawn == expected).all()


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


# ---------------------------------------------------------------------------------------------------------------
# Policies


def test_policies_have_the_values_of_the_papers() -> None:
    byol = {"jitter": (0.4, 0.4, 0.2, 0.1), "jitter_probability": 0.8, "gray": 0.2, "blur_sigma": (0.1, 2.0)}
    first, second = policies.moco_v3(224)
    assert first == Policy(224, (0.08, 1.0), interpolation="bilinear", blur=1.0, **byol)
    assert second == Policy(224, (0.08, 1.0), interpolation="bilinear", blur=0.1, solarize=0.2, **byol)
    views = policies.dino(224, 96, 8)
    assert views[0] == Policy(224, (0.4, 1.0), blur=1.0, **byol)
    assert views[1] == Policy(224, (0.4, 1.0), blur=0.1, solarize=0.2, **byol)
    assert views[2:] == (Policy(96, (0.05, 0.4), blur=0.5, **byol),) * 8
    assert policies.simclr(224) == (Policy(224, jitter=(0.8, 0.8, 0.8, 0.2), gray=0.2, blur=0.5),) * 2
    assert policies.reconstruction(224) == (Policy(224, (0.2, 1.0)),)
    assert policies.supervised(224) == (Policy(224, (0.08, 1.0)),)
    assert policies.policies("mae", 64) == policies.reconstruction(64)
    assert policies.policies("dino", 64) == policies.dino(64)
    assert policies.simclr(48, crop=(0.2, 1.0), blur_sigma=(0.1, 0.3))[0].blur_sigma == (0.1, 0.3)


def test_errors_say_what_to_do() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"size": 0}, "at least 1 pixel"),
        ({"gray": 1.5}, "gray is a probability"),
        ({"interpolation": "bicubik"}, "did you mean 'bicubic'"),
        ({"crop": (0.0, 1.0)}, "0 < low ≤ high ≤ 1"),
        ({"crop": (0.5, 0.2)}, "0 < low ≤ high ≤ 1"),
        ({"ratio": (2.0, 1.0)}, "ratio is a range"),
        ({"blur_sigma": (0.0, 1.0)}, "blur_sigma is a range"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, "hue at most 0.5"),
        ({"jitter": (0.4, -0.4, 0.4, 0.1)}, "at least 0"),
    ]
    for settings, message in wrong:
        with pytest.raises(InputError, match=message):
            Policy(**{"size": 8, **settings})
    with pytest.raises(InputError, match="did you mean 'simclr'"):
        policies.policies("simclr2", 8)
    with pytest.raises(InputError, match="one for each"):
        augment(images(3), Policy(8), keys_of(2))
    with pytest.raises(InputError, match=r"not \(2, 1, 4, 4\)"):
        augment(torch.zeros(2, 1, 4, 4), Policy(8), keys_of(2))
