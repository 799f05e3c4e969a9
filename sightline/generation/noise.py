"""How pictures become noise, and how noise becomes pictures: flow matching and DDPM.

Flow matching (Lipman et al. 2023) with a network that predicts the picture, as in JiT (Li & He 2025):

    x_σ = (1 − σ) x + σ ε,      v = dx_σ/dσ = ε − x = (x_σ − x) / σ
    loss = ‖x̂ − x‖² / max(σ, 0.05)²,      σ = sigmoid(N(½, 1))

DDPM (Ho et al. 2020) as in the released code of RCDM, which is that of guided diffusion (Dhariwal & Nichol 2021):

    x_t = √ᾱ_t x + √(1 − ᾱ_t) ε,      loss = ‖ε̂ − ε‖² (mean) + L_vlb,      t uniform in 0 … 999

with the bound L_vlb on the likelihood, in bits, for the variance alone, which the network interpolates between the
smallest and the largest one (Nichol & Dhariwal 2021). Schedulers of diffusers draw samples.

Pictures are in [−1, 1]; B pictures.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.core.extras import explaining
from sightline.core.keyed_random import Keys

Network = Callable[[Tensor, Tensor], Tensor]  # noisy pictures (B, 3, h, w), times (B,) → (B, C, h, w)
SMALLEST = 0.05  # of σ in the weight of the loss
TIMES = 1000
LEVELS = (0.3, 0.5, 0.7, 0.9)  # σ at which errors are compared: with less noise the picture tells all itself


def diffusers() -> Any:
    """The library, which is an extra: imported where it is needed, with a sentence for those who have not got it."""
    with explaining():
        import diffusers as library
    return library


class Process(Protocol):
    """Noise, and the way back."""

    name: str
    outputs: int  # channels that the network has for each of a picture

    def losses(self, network: Network, pictures: Tensor, noise: Tensor, random: Tensor) -> Tensor:
        """Loss of each picture (B,), at a level of noise that follows from a random number (B,) in [0, 1)."""

    def errors(self, network: Network, pictures: Tensor, noise: Tensor, level: float) -> Tensor:
        """Squared error of the picture that the network sees behind noise of one level, weighted, (B,)."""

    def weight(self, level: float) -> float:
        """By what `errors` multiplies a squared distance of pictures."""

    def sample(self, network: Network, noise: Tensor, steps: int, generator: torch.Generator) -> Tensor:
        """Pictures from noise."""

    def scheduler(self) -> Any:
        """That of diffusers."""


def process_named(name: str) -> Process:
    if name not in PROCESSES:
        raise InputError(f"There is no process {name!r} of noise{nearest(name, PROCESSES)}")
    return PROCESSES[name]()


def normal_noise(keys: Keys, shape: tuple[int, ...]) -> Tensor:
    """Normal noise of each key, (len(keys), *shape): the same for an image whatever it is drawn together with."""
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(int(key) >> 1)) for key in keys])


class Flow:
    """Flow matching; the network predicts the picture, and is told 1000 σ."""

    name, outputs = "flow", 1

    def losses(self, network: Network, pictures: Tensor, noise: Tensor, random: Tensor) -> Tensor:
        """‖x̂ − x‖² / max(σ, 0.05)², the mean over the numbers of a picture."""
        normal = torch.special.ndtri(random.double().clamp(1e-9, 1 - 1e-9)).to(pictures.dtype)
        sigma = torch.sigmoid(0.5 + normal)
        wide = sigma.view(-1, 1, 1, 1)
        seen = network((1 - wide) * pictures + wide * noise, TIMES * sigma).float()
        return (seen - pictures).square().mean((1, 2, 3)) / sigma.clamp(min=SMALLEST).square()

    def errors(self, network: Network, pictures: Tensor, noise: Tensor, level: float) -> Tensor:
        """‖x̂ − x‖² / σ², the sum over the numbers of a picture."""
        times = torch.full((len(pictures),), TIMES * level, device=pictures.device)
        seen = network((1 - level) * pictures + level * noise, times).double()
        return (seen - pictures).square().sum((1, 2, 3)) * self.weight(level)

    def weight(self, level: float) -> float:
        """1 / σ²."""
        return 1 / level**2

    def scheduler(self) -> Any:
        """Heun's method."""
        return diffusers().FlowMatchHeunDiscreteScheduler(num_train_timesteps=TIMES)

    def sample(self, network: Network, noise: Tensor, steps: int, generator: torch.Generator) -> Tensor:
        """Heun's method, two evaluations a step; deterministic, so that the generator is not used."""
        scheduler = self.scheduler()
        # Steps of equal length. The scheduler's own next to last σ is 0.001, where x_σ − x̂ is what the network errs by,
        # and the correction of a step would divide it by σ.
        scheduler.sigma_min = 1 / steps
        scheduler.set_timesteps(steps, device=noise.device)
        pictures = noise
        for time in scheduler.timesteps:
            seen = network(pictures, time.expand(len(pictures))).float()
            velocity = (pictures - seen) * (TIMES / time)
            (pictures,) = scheduler.step(velocity, time, pictures, return_dict=False)
        return pictures


class DDPM:
    """1000 steps of linearly growing variance; the network predicts the noise, and its variance by a second half."""

    name, outputs = "ddpm", 2

    def __init__(self) -> None:
        beta = np.linspace(1e-4, 0.02, TIMES)
        kept = np.cumprod(1 - beta)
        before = np.append(1.0, kept[:-1])
        smallest = beta * (1 - before) / (1 - kept)
        self.kept = torch.from_numpy(kept)  # ᾱ
        self.large = torch.from_numpy(np.log(beta))
        # That of t = 0 is 0; its neighbour's stands in.
        self.small = torch.from_numpy(np.log(np.append(smallest[1], smallest[1:])))
        self.from_picture = torch.from_numpy(beta * np.sqrt(before) / (1 - kept))
        self.from_noisy = torch.from_numpy((1 - before) * np.sqrt(1 - beta) / (1 - kept))

    def losses(self, network: Network, pictures: Tensor, noise: Tensor, random: Tensor) -> Tensor:
        """Mean squared error of the noise, and the bound, through which only the variance learns."""
        times = (random * TIMES).long().clamp(max=TIMES - 1)
        noisy = self._noisy(pictures, noise, times)
        seen, share = network(noisy, times.float()).float().chunk(2, 1)
        return (seen - noise).square().mean((1, 2, 3)) + self._bound(pictures, noisy, seen.detach(), share, times)

    def errors(self, network: Network, pictures: Tensor, noise: Tensor, level: float) -> Tensor:
        """‖ε̂ − ε‖², at the time whose share of noise in x_t is nearest to the level."""
        times = torch.full((len(pictures),), self._time(level), device=pictures.device)
        seen = network(self._noisy(pictures, noise, times), times.float()).chunk(2, 1)[0].double()
        return (seen - noise).square().sum((1, 2, 3))

    def weight(self, level: float) -> float:
        """ᾱ / (1 − ᾱ): what an error of the picture is as one of the noise."""
        kept = float(self.kept[self._time(level)])
        return kept / (1 - kept)

    def scheduler(self) -> Any:
        """The steps of DDPM, fewer of them, with the variance that was learned."""
        return diffusers().DDPMScheduler(
            TIMES, variance_type="learned_range", clip_sample=True, timestep_spacing="linspace"
        )

    def sample(self, network: Network, noise: Tensor, steps: int, generator: torch.Generator) -> Tensor:
        """Ancestral sampling, one evaluation a step."""
        scheduler = self.scheduler()
        scheduler.set_timesteps(steps, device=noise.device)
        pictures = noise
        for time in scheduler.timesteps:
            seen = network(pictures, time.expand(len(pictures)).float()).float()
            (pictures, *_) = scheduler.step(seen, time, pictures, generator=generator, return_dict=False)
        return pictures

    def _time(self, level: float) -> int:
        """σ / (1 − σ) of flow matching is √((1 − ᾱ) / ᾱ) here."""
        ratio = ((1 - self.kept) / self.kept).sqrt()
        return int((ratio.log() - math.log(level / (1 - level))).abs().argmin())

    def _noisy(self, pictures: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        kept = self._at(self.kept, times)
        return kept.sqrt() * pictures + (1 - kept).sqrt() * noise

    def _bound(self, pictures: Tensor, noisy: Tensor, seen: Tensor, share: Tensor, times: Tensor) -> Tensor:
        """Bits per number that the step back costs, KL(q ‖ p), and at t = 0 the likelihood of the picture's bytes."""
        small, large = self._at(self.small, times), self._at(self.large, times)
        log_variance = small + (share + 1) / 2 * (large - small)
        kept = self._at(self.kept, times)
        guess = (noisy - (1 - kept).sqrt() * seen) / kept.sqrt()  # clipped in samples only
        to, of = self._at(self.from_picture, times), self._at(self.from_noisy, times)
        true, model = to * pictures + of * noisy, to * guess + of * noisy
        apart = (true - model).square() * torch.exp(-log_variance)
        divergence = 0.5 * (log_variance - small - 1 + torch.exp(small - log_variance) + apart)
        last = (times == 0).view(-1, 1, 1, 1)
        cost = torch.where(last, -_log_likelihood(pictures, model, 0.5 * log_variance), divergence)
        return cost.mean((1, 2, 3)) / math.log(2)

    @staticmethod
    def _at(table: Tensor, times: Tensor) -> Tensor:
        return table.to(times.device)[times].float().view(-1, 1, 1, 1)


def _log_likelihood(pictures: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """Of bytes, rescaled to [−1, 1], under a normal distribution that is cut into 256 intervals."""
    centred, inverse = pictures - mean, torch.exp(-log_deviation)
    above = torch.special.ndtr(inverse * (centred + 1 / 255))
    below = torch.special.ndtr(inverse * (centred - 1 / 255))
    middle = torch.where(pictures > 0.999, 1 - below, above - below)
    return torch.where(pictures < -0.999, above, middle).clamp(min=1e-12).log()


PROCESSES: dict[str, Callable[[], Process]] = {"flow": Flow, "ddpm": DDPM}
