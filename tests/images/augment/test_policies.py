"""Whole policies against torchvision's chain, what a view depends on, and the values of the papers."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from support.augmentation import COLOURS, PLAIN, UNLIKELY, as_bytes, close, images, keys_of
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from sightline.core.errors import InputError
from sightline.images.augment import batched, colours, policies
from sightline.images.augment.colours import augment, distort
from sightline.images.augment.crops import boxes, flips
from sightline.images.augment.policy import Policy


def test_bytes_and_floats_give_the_same_view() -> None:
    x = as_bytes(images(16))
    policy = policies.simclr(12)[0]
    close(augment(x, policy, keys_of(16)), augment(x.float() / 255, policy, keys_of(16)))
    assert augment(x, policy, keys_of(16)).dtype == torch.float32


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


def test_no_images() -> None:
    assert augment(as_bytes(images(1))[:0], policies.simclr(8)[0], keys_of(0)).shape == (0, 3, 8, 8)


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
