"""Processes of noise: closed forms, orders, and the schedulers of diffusers."""

import math

import numpy as np
import pytest
import torch

from sightline.core.errors import InputError
from sightline.generation.noise import DDPM, Flow, normal_noise, process_named

PICTURES = torch.linspace(-0.9, 0.9, 2 * 3 * 4 * 4).view(2, 3, 4, 4)
NOISE = normal_noise(np.arange(2, dtype=np.uint64), (3, 4, 4))


def test_noise_follows_the_key_alone() -> None:
    keys = np.array([7, 8, 9], np.uint64)
    assert torch.equal(normal_noise(keys, (3, 2, 2))[1:], normal_noise(keys[1:], (3, 2, 2)))
    many = normal_noise(np.arange(300, dtype=np.uint64) * 12345, (3, 8, 8))
    assert float(many.mean()) == pytest.approx(0, abs=0.02)
    assert float(many.std()) == pytest.approx(1, abs=0.02)


def test_flow_matching_is_the_loss_of_the_velocity() -> None:
    """‖x̂ − x‖² / σ² = ‖v̂ − v‖² with v = ε − x, and a zero picture costs ‖x‖² / σ²."""
    random = torch.tensor([0.5, 0.5])
    sigma = 1 / (1 + math.exp(-0.5))
    seen = {}

    def network(noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        seen["noisy"], seen["times"] = noisy, times
        return torch.zeros_like(noisy)

    losses = Flow().losses(network, PICTURES, NOISE, random)
    assert torch.allclose(seen["times"], torch.full((2,), 1000 * sigma))
    velocity = seen["noisy"] / sigma  # of x̂ = 0
    expected = (velocity - (NOISE - PICTURES)).square().mean((1, 2, 3))
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    errors = Flow().errors(network, PICTURES, NOISE, 0.5)
    torch.testing.assert_close(errors, PICTURES.double().square().sum((1, 2, 3)) / 0.25)


def test_a_network_that_knows_the_picture_draws_it() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = Flow().sample(lambda noisy, times: PICTURES, NOISE, 4, generator)
    torch.testing.assert_close(drawn, PICTURES, atol=1e-4, rtol=1e-4)
    process = DDPM()

    def network(noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        kept = process.kept[times.long()].float().view(-1, 1, 1, 1)
        noise = (noisy - kept.sqrt() * PICTURES) / (1 - kept).sqrt()
        return torch.cat([noise, torch.zeros_like(noise)], 1)

    drawn = process.sample(network, NOISE, 50, generator)
    torch.testing.assert_close(drawn, PICTURES, atol=0.02, rtol=0.02)


def test_heun_is_of_second_order() -> None:
    """x̂ = c x_σ makes dx/dσ = (1 − c) x / σ, whose solution from 1 to σ is σ^(1 − c): errors fall by four."""

    def end(steps: int) -> float:
        first = torch.ones(1, 3, 1, 1, dtype=torch.float32)
        c = 0.5
        scheduler = Flow().scheduler()
        scheduler.set_timesteps(steps)
        x = first
        for time in scheduler.timesteps[: 2 * (steps // 2)]:
            (x,) = scheduler.step((x - c * x) * (1000 / time), time, x, return_dict=False)
        sigma = float(scheduler.sigmas[2 * (steps // 2) - 1])
        return abs(float(x[0, 0, 0, 0]) - sigma ** (1 - c))

    assert end(17) < end(9) / 2.5


@pytest.mark.parametrize("steps", [4, 12, 50])
def test_what_a_network_errs_by_without_noise_is_not_blown_up(steps: int) -> None:
    """Pictures of independent normal numbers of deviation ½: the flow leads from ε to ε / 2, and x̂ has a closed form.

    A network that sees 3 % too little everywhere must not draw something else.
    """

    def network(noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        sigma = (times / 1000).view(-1, 1, 1, 1)
        return 0.97 * noisy * (1 - sigma) / 4 / ((1 - sigma).square() / 4 + sigma.square())

    drawn = Flow().sample(network, NOISE, steps, torch.Generator())
    assert float((drawn - NOISE / 2).abs().max()) < 0.2 * float(NOISE.abs().max() / 2)


def test_ddpm_is_the_process_of_diffusers() -> None:
    process = DDPM()
    scheduler = process.scheduler()
    torch.testing.assert_close(process.kept.float(), scheduler.alphas_cumprod, rtol=1e-4, atol=1e-6)
    times = torch.tensor([3, 900])
    torch.testing.assert_close(process._noisy(PICTURES, NOISE, times), scheduler.add_noise(PICTURES, NOISE, times))


@pytest.mark.parametrize("steps", [2, 12, 100])
def test_ddpm_draws_from_the_noisiest_time_on_as_the_released_code_does(steps: int) -> None:
    """`space_timesteps` of guided diffusion: evenly from 0 to 999, both included."""
    expected = [round(number * 999 / (steps - 1)) for number in range(steps)]
    seen: list[int] = []

    def network(noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        seen.append(int(times[0]))
        return torch.zeros(len(noisy), 6, *noisy.shape[2:])

    DDPM().sample(network, NOISE, steps, torch.Generator().manual_seed(0))
    assert seen == expected[::-1]


def test_the_bound_is_smallest_at_the_true_variance_and_trains_nothing_else() -> None:
    """With the noise known, KL is 0 at the smallest variance (share −1), and grows from there."""
    process = DDPM()
    random = torch.tensor([0.0025, 0.0055])

    def losses(share: float) -> torch.Tensor:
        told = torch.cat([NOISE, torch.full_like(NOISE, share)], 1)
        return process.losses(lambda noisy, times: told, PICTURES, NOISE, random)

    assert torch.allclose(losses(-1.0), torch.zeros(2), atol=1e-4)
    assert (losses(1.0) > losses(0.0)).all()
    seen = (NOISE * 0.9).requires_grad_()
    share = torch.zeros_like(NOISE).requires_grad_()
    process.losses(lambda noisy, times: torch.cat([seen, share], 1), PICTURES, NOISE, random).sum().backward()
    torch.testing.assert_close(seen.grad, 2 * (0.9 * NOISE - NOISE) / NOISE[0].numel())
    assert share.grad is not None
    assert share.grad.abs().min() > 0


def test_the_bound_does_not_clip_the_picture_that_is_guessed() -> None:
    """As in the training of guided diffusion (clip_denoised=False): late in the process a wrong guess is far outside.

    With the smallest variance the bound is (μ − μ̂)² / 2β̃ in bits, which is the error of the noise with a weight.
    """
    process, step = DDPM(), 900
    beta = np.linspace(1e-4, 0.02, 1000)
    kept = np.cumprod(1 - beta)
    weight = beta[step] / (2 * (1 - beta[step]) * (1 - kept[step - 1]))
    seen = NOISE + 0.3 * NOISE.flip(0)
    told = torch.cat([seen, torch.full_like(NOISE, -1.0)], 1)
    found = process.losses(lambda noisy, times: told, PICTURES, NOISE, torch.full((2,), (step + 0.5) / 1000))
    error = (seen - NOISE).square().mean((1, 2, 3))
    torch.testing.assert_close(found - error, error * weight / math.log(2), rtol=1e-3, atol=1e-6)


def test_errors_weigh_as_they_say() -> None:
    """The oracle's distance: a network that sees another picture errs by weight · distance, in either process."""
    other = PICTURES + 0.1
    distance = (other - PICTURES).double().square().sum((1, 2, 3))
    flow = Flow()
    torch.testing.assert_close(flow.errors(lambda *_: other, PICTURES, NOISE, 0.7), distance * flow.weight(0.7))
    ddpm = DDPM()

    def network(noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        kept = ddpm.kept[times.long()].float().view(-1, 1, 1, 1)
        return torch.cat([(noisy - kept.sqrt() * other) / (1 - kept).sqrt(), noisy], 1)

    errors = ddpm.errors(network, PICTURES, NOISE, 0.7)
    torch.testing.assert_close(errors, distance * ddpm.weight(0.7), rtol=1e-3, atol=1e-3)


def test_names() -> None:
    assert process_named("ddpm").outputs == 2
    with pytest.raises(InputError, match="no process 'flows' of noise; did you mean 'flow'"):
        process_named("flows")
