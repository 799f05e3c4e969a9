"""Samples: deterministic by seed, and what they share, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sightline.generation.denoiser import Denoiser, Model, Shape
from sightline.generation.samples import as_bytes, draw, nearest_images, orientation_share, shared_variance

KEYS = np.arange(3, dtype=np.uint64)


@pytest.fixture(scope="module", params=["flow", "ddpm"])
def model(request: pytest.FixtureRequest) -> Model:
    torch.manual_seed(0)
    denoiser = Denoiser(Shape(size=4, unshuffle=2, channels=(8,), layers=1, head_width=8, process=request.param), [5])
    torch.nn.init.normal_(denoiser.unet.conv_out.weight, std=0.3)
    return Model(denoiser.eval(), ({"name": "a"},))


def test_the_seed_decides(model: Model) -> None:
    told = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    first = draw(model, 0, told, KEYS, 2, steps=3, seed=1)
    assert first.shape == (3, 2, 3, 4, 4)
    assert torch.equal(first, draw(model, 0, told, KEYS, 2, steps=3, seed=1))
    assert not torch.equal(first, draw(model, 0, told, KEYS, 2, steps=3, seed=2))
    assert not torch.equal(first[:, 0], first[:, 1])
    if model.process.name == "flow":  # one source alone has the same pictures
        alone = draw(model, 0, told[1:2], KEYS[1:2], 2, steps=3, seed=1)
        torch.testing.assert_close(alone, first[1:2], rtol=0, atol=1e-4)  # other batches round otherwise


def test_shared_variance_is_the_intraclass_correlation() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=(300, 1, 2)) * [2.0, 1.0] + random.normal(size=(300, 6, 2))
    share, low, high = shared_variance(values)
    assert share == pytest.approx(5 / 7, abs=0.04)
    assert low < share < high
    assert high - low < 0.15
    noise = [shared_variance(np.random.default_rng(seed).normal(size=(100, 6, 2))) for seed in range(20)]
    assert np.mean([share for share, _, _ in noise]) == pytest.approx(0, abs=0.02)
    assert sum(low < 0 < high for _, low, high in noise) >= 16
    assert np.isnan(shared_variance(np.ones((5, 3, 1)))[0])


def test_orientation_by_pixels() -> None:
    sources = np.random.default_rng(0).normal(size=(40, 3, 4, 4))
    assert orientation_share(sources, np.repeat(sources[:, None], 3, 1))[0] == 1
    assert orientation_share(sources, np.repeat(sources[:, None, ..., ::-1], 3, 1))[0] == 0
    even = sources + sources[..., ::-1]
    share, low, high = orientation_share(sources, even[:, None])
    assert low < 0.5 < high
    assert share == pytest.approx(0.5, abs=0.25)


def test_nearest_images_are_found_mirrored_or_not() -> None:
    images = torch.rand(50, 3, 4, 4) * 2 - 1
    pictures = torch.cat([images[7:8], images[30:31].flip(-1)])
    rows, far = nearest_images(pictures, images, block=16)
    assert rows.tolist() == [7, 30]
    np.testing.assert_allclose(far, 0, atol=1e-6)


def test_bytes() -> None:
    assert as_bytes(torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1)).tolist() == [[[0, 128, 255]]]
