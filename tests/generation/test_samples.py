"""Samples: deterministic by seed, which way they face, and the images nearest to them."""

import copy

import numpy as np
import pytest
import torch

from sightline.generation import samples
from sightline.generation.denoiser import Denoiser, Model, Shape
from sightline.generation.noise import normal_noise
from sightline.generation.samples import as_bytes, draw, nearest_images, orientation_share

KEYS = np.arange(3, dtype=np.uint64)


@pytest.fixture(scope="module", params=["flow", "ddpm"])
def model(request: pytest.FixtureRequest) -> Model:
    torch.manual_seed(0)
    denoiser = Denoiser(Shape(size=4, unshuffle=2, channels=(8,), layers=1, head_width=8, process=request.param), [5])
    torch.nn.init.normal_(denoiser.unet.conv_out.weight, std=0.3)
    return Model(denoiser.eval(), ({"name": "a"},))


def test_the_seed_decides(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    told = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    first = draw(model, 0, told, KEYS, 2, steps=3, seed=1)
    assert first.shape == (3, 2, 3, 4, 4)
    assert torch.equal(first, draw(model, 0, told, KEYS, 2, steps=3, seed=1))
    assert not torch.equal(first, draw(model, 0, told, KEYS, 2, steps=3, seed=2))
    assert not torch.equal(first[:, 0], first[:, 1])
    if model.process.name == "flow":  # one source alone has the same pictures
        # In float64: this network makes rounding, which other batches do differently, some hundred times as large.
        exact, told = Model(copy.deepcopy(model.denoiser).double(), model.encoders), told.double()
        monkeypatch.setattr(samples, "normal_noise", lambda *of: normal_noise(*of).double())
        together, alone = (draw(exact, 0, told[of], KEYS[of], 2, steps=3, seed=1) for of in (slice(3), slice(1, 2)))
        torch.testing.assert_close(together.float(), first, rtol=0, atol=1e-3)
        torch.testing.assert_close(alone, together[1:2], rtol=0, atol=1e-5)


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
