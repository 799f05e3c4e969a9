"""Random erasing against timm's, by its distributions; RandAugment and erasing in views, whatever the batch."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, kstest
from timm.data.random_erasing import RandomErasing

from sightline.core.errors import InputError
from sightline.core.keyed_random import fold
from sightline.images.augment.erasure import erase, erased_boxes, finish
from sightline.images.augment.policy import Policy
from sightline.images.augment.randaugment import randaugment
from sightline.images.loading import load_images
from sightline.images.preprocess import IMAGENET_MEAN, IMAGENET_STD
from sightline.images.views import make_view
from sightline.training.feed import Feed


def keys(n: int) -> Any:
    return fold(np.arange(n, dtype=np.uint64), 5)


def timms(n: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """Top, left, height and width of what timm erases of n images, one after the other."""
    random.seed(0)
    torch.manual_seed(0)
    found = np.zeros((n, 4), np.int64)
    for row in found:
        image = RandomErasing(1.0, mode="pixel", device="cpu")(torch.zeros(3, height, width))
        rows, columns = torch.nonzero(image[0]).unbind(1)
        if len(rows):
            top, left = int(rows.min()), int(columns.min())
            row[:] = top, left, int(rows.max()) - top + 1, int(columns.max()) - left + 1
    return found


@pytest.mark.parametrize(("height", "width"), [(32, 32), (12, 40)])
def test_rectangles_are_distributed_as_timms(height: int, width: int) -> None:
    theirs, ours = timms(3000, height, width), erased_boxes(1.0, height, width, keys(3000))
    assert (ours[:, 2] > 0).mean() == pytest.approx((theirs[:, 2] > 0).mean(), abs=0.01)
    assert (ours[:, 0] + ours[:, 2]).max() <= height
    assert (ours[:, 1] + ours[:, 3]).max() <= width
    for column in range(4):
        assert ks_2samp(ours[:, column], theirs[:, column]).statistic < 0.05
    area = [which[:, 2] * which[:, 3] / (height * width) for which in (ours, theirs)]
    assert ks_2samp(*area).statistic < 0.05


def test_the_probability_is_that_of_an_image() -> None:
    where = erased_boxes(0.25, 32, 32, keys(4000))
    assert (where[:, 2] > 0).mean() == pytest.approx(0.25, abs=0.02)
    assert not erased_boxes(0.0, 32, 32, keys(100))[:, 2:].any()


def test_what_is_erased_is_normal_noise_once_it_is_normalised() -> None:
    x = torch.full((200, 3, 32, 32), 0.3)
    erase(x, 1.0, keys(200), IMAGENET_MEAN, IMAGENET_STD)
    where = erased_boxes(1.0, 32, 32, keys(200))
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    inside = torch.zeros(200, 32, 32, dtype=torch.bool)
    for mask, (top, left, h, w) in zip(inside, where.tolist(), strict=True):
        mask[top : top + h, left : left + w] = True
    noise = ((x - mean) / std).permute(0, 2, 3, 1)[inside]  # (pixels, 3)
    assert (x.permute(0, 2, 3, 1)[~inside] == 0.3).all()
    assert kstest(noise.flatten().numpy(), "norm").statistic < 0.005
    assert np.abs(np.corrcoef(noise.T.numpy()) - np.eye(3)).max() < 0.03  # every channel has its own


def test_a_view_depends_on_its_image_alone() -> None:
    policy = Policy(16, randaugment=(9.0, 0.5), erase=0.5)
    pixels = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    together = finish(pixels.clone(), policy, keys(8))
    some = [5, 2, 7]
    assert torch.allclose(finish(pixels[some], policy, keys(8)[some]), together[some], atol=1e-6)
    changed = randaugment(pixels.clone(), 9.0, 0.5, IMAGENET_MEAN, keys(8))
    assert torch.allclose(together, erase(changed, 0.5, keys(8), IMAGENET_MEAN, IMAGENET_STD), atol=1e-6)


def test_a_feed_erases_after_everything_else() -> None:
    """With the mean and the standard deviation of the encoder, whatever these are."""
    images = load_images("shapes?size=16&train=64&val=8&test=8")
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    for policy in (Policy(16, erase=1.0), Policy(16, randaugment=(9.0, 0.5), erase=1.0)):
        plain, erased = (
            next(Feed(images, [which], batch=64, epochs=1, mean=mean, std=std).views())[0]
            for which in (Policy(16, randaugment=policy.randaugment), policy)
        )
        where = erased_boxes(1.0, 16, 16, fold(erased.keys, 2, 0))
        noise = []
        for before, after, (top, left, h, w) in zip(plain.pixels[0], erased.pixels[0], where.tolist(), strict=True):
            same = before == after
            noise.append(after[:, top : top + h, left : left + w].flatten())
            same[:, top : top + h, left : left + w] = True
            assert same.all()
        assert kstest(torch.cat(noise).numpy(), "norm").statistic < 0.02


def test_analyses_can_see_erased_copies() -> None:
    pixels = torch.full((4, 3, 16, 16), 128, dtype=torch.uint8)
    plain = make_view("augment:supervised:0", pixels, list("abcd"))
    erased = make_view("augment:supervised?erase=1:0", pixels, list("abcd"))
    assert (plain != erased).flatten(1).any(1).all()
    assert not torch.equal(make_view("augment:supervised?randaugment=[9, 0.5]:0", pixels, list("abcd")), plain)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"erase": 1.5}, "erase is a probability"), ({"randaugment": (-1.0, 0.5)}, "randaugment is a magnitude")],
)
def test_settings_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Policy(16, **settings)
