"""The likelihood gap: signs, floors and ceilings that are known without training."""

import numpy as np
import pytest
import torch
from torch import nn

from sightline.core.errors import InputError
from sightline.generation.denoiser import Denoiser, Model, Shape
from sightline.generation.gap import Gap, likelihood_gaps, others, summarise, transformed

KEYS = np.arange(24, dtype=np.uint64)
PICTURES = torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
LEVELS = (0.5, 0.8)


@pytest.fixture(scope="module")
def model() -> Model:
    """One level without unshuffling: mirroring its kernels mirrors what it computes."""
    torch.manual_seed(1)
    denoiser = Denoiser(Shape(size=8, unshuffle=1, channels=(16,), layers=1, head_width=16), [192])
    nn.init.normal_(denoiser.unet.conv_out.weight, std=0.3)
    nn.init.normal_(denoiser.conditions[0].linear.weight, std=0.5)
    return Model(denoiser.eval(), ({"name": "pixels"},))


def gaps(model: Model, own: torch.Tensor, other: torch.Tensor, name: str = "mirror") -> Gap:
    pictures = {"plain": PICTURES, name: transformed(name, PICTURES)}
    return likelihood_gaps(model, 0, pictures, {"plain": own, name: other}, KEYS, LEVELS)[name]


def test_exchanged_conditions_change_the_sign(model: Model) -> None:
    own, other = PICTURES.flatten(1), PICTURES.flip(-1).flatten(1)
    there, back = gaps(model, own, other), gaps(model, other, own)
    assert np.abs(there.gaps).max() > 1
    np.testing.assert_allclose(there.gaps, -back.gaps, rtol=1e-6)


def test_mirrored_weights_change_the_sign(model: Model) -> None:
    own, other = PICTURES.flatten(1), PICTURES.flip(-1).flatten(1)
    before = gaps(model, own, other).gaps
    kernels = [part.weight for part in model.denoiser.unet.modules() if isinstance(part, nn.Conv2d)]
    with torch.no_grad():
        for weight in kernels:
            weight.copy_(weight.flip(-1))
        after = gaps(model, own, other).gaps
        for weight in kernels:
            weight.copy_(weight.flip(-1))
    np.testing.assert_allclose(after, -before, rtol=1e-3, atol=1e-3)


def test_a_constant_condition_has_no_gap(model: Model) -> None:
    constant = torch.ones(24, 192)
    found = gaps(model, constant, constant)
    np.testing.assert_array_equal(found.gaps, 0)
    numbers = summarise(found)
    assert (numbers["gap"], numbers["share"], numbers["z"], numbers["kept"]) == (0, 0.5, 0, 0)


class Knows(nn.Module):
    """Sees the picture that it is told."""

    shape = Shape(size=8, unshuffle=1, channels=(16,))

    def __init__(self) -> None:
        super().__init__()
        self.conditions = nn.ModuleList([nn.Identity()])
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, noisy: torch.Tensor, times: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.view_as(noisy)


@pytest.mark.parametrize("name", ["mirror", "colours"])
def test_who_knows_the_picture_reaches_the_ceiling(name: str) -> None:
    model = Model(Knows(), ())
    found = gaps(model, PICTURES.flatten(1), transformed(name, PICTURES).flatten(1), name)
    np.testing.assert_allclose(found.gaps, found.ceiling, rtol=1e-4)
    numbers = summarise(found)
    assert numbers["kept"] == pytest.approx(1, rel=1e-4)
    assert (numbers["share"], numbers["share_ceiling"]) == (1, 1)
    assert abs(numbers["z_null"]) < 3
    assert numbers["z"] > 10


def test_numbers_of_a_gap() -> None:
    values = np.array([1.0, 2.0, -1.0, 4.0])
    numbers = summarise(Gap(values, values - values.mean(), np.full(4, 3.0)))
    assert numbers["gap"] == 1.5
    assert numbers["share"] == 0.75
    assert numbers["kept"] == 0.5
    assert numbers["z"] == pytest.approx(1.5 / (values.std(ddof=1) / 2))
    assert numbers["z_null"] == pytest.approx(0, abs=1e-12)
    assert numbers["gap_high"] - numbers["gap"] == pytest.approx(1.959964 * values.std(ddof=1) / 2, rel=1e-5)


def test_others_are_others() -> None:
    other = others(KEYS)
    assert sorted(other.tolist()) == list(range(24))
    assert (other != np.arange(24)).all()
    order = np.random.default_rng(0).permutation(24)
    assert np.array_equal(KEYS[order][others(KEYS[order])], KEYS[other][order])


def test_a_view_that_is_no_transformation() -> None:
    with pytest.raises(InputError, match="'augment:simclr:0' is no transformation"):
        transformed("augment:simclr:0", PICTURES)
    with pytest.raises(InputError, match="miror"):
        transformed("miror", PICTURES)
