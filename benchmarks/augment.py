"""Views per second: batches augmented at once against torchvision image by image in worker processes.

    python benchmarks/augment.py [--sizes 64,32,224] [--policies simclr,moco_v3] [--rounds 5]

Ratios are to the faster of torchvision's two ways (Pillow images, tensors), round by round. Images are decoded, in
memory, of the size of the views. torchvision has as many worker processes of one thread as there are `--threads`,
started before the clock; batches at once are made with the threads in one process, and in as many workers as well.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from shared import arguments, begin, in_turn, ratio
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from sightline.images.augment.colours import augment
from sightline.images.augment.policies import policies
from sightline.images.augment.policy import Policy

BATCH = 256


def images(n: int, size: int) -> Tensor:
    """Smooth colours under noise."""
    generator = torch.Generator().manual_seed(0)
    smooth = TF.resize(torch.rand(n, 3, 8, 8, generator=generator), [size, size])
    noise = 0.1 * torch.randn(n, 3, size, size, generator=generator)
    return (smooth + noise).clamp(0, 1).mul(255).to(torch.uint8)


def transform_of(policy: Policy) -> v2.Transform:
    """The policy as torchvision's classes."""
    assert policy.crop is not None
    mode = v2.InterpolationMode(policy.interpolation)
    steps: list[Any] = [v2.RandomResizedCrop(policy.size, policy.crop, policy.ratio, mode, antialias=True)]
    steps.append(v2.RandomHorizontalFlip(policy.flip))
    if policy.jitter is not None:
        steps.append(v2.RandomApply([v2.ColorJitter(*policy.jitter)], policy.jitter_probability))
    if policy.gray:
        steps.append(v2.RandomGrayscale(policy.gray))
    if policy.blur:
        taps = 2 * min(math.ceil(4 * policy.blur_sigma[1]), policy.size - 1) + 1
        steps.append(v2.RandomApply([v2.GaussianBlur(taps, policy.blur_sigma)], policy.blur))
    if policy.solarize:
        steps.append(v2.RandomSolarize(128, policy.solarize))
    return v2.Compose([*steps, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


class PerImage(Dataset[tuple[Tensor, ...]]):
    def __init__(self, source: list[Any], views: tuple[Policy, ...]) -> None:
        self.source, self.transforms = source, [transform_of(view) for view in views]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        return tuple(transform(self.source[number]).as_subclass(Tensor) for transform in self.transforms)


class AtOnce(Dataset[tuple[Tensor, ...]]):
    def __init__(self, pixels: Tensor, views: tuple[Policy, ...]) -> None:
        self.pixels, self.views = pixels, views

    def __len__(self) -> int:
        return -(-len(self.pixels) // BATCH)

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        if number >= len(self):
            raise IndexError(number)
        part = self.pixels[number * BATCH : (number + 1) * BATCH]
        keys = np.arange(len(part), dtype=np.uint64) + np.uint64(number * BATCH + time.perf_counter_ns())
        return tuple(augment(part, view, keys + np.uint64(i << 60)) for i, view in enumerate(self.views))


def in_workers(dataset: Dataset[Any], batch: int | None) -> Iterable[Any]:
    return DataLoader(
        dataset,
        batch,
        num_workers=torch.get_num_threads(),
        persistent_workers=True,
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )


def made_by(batches: Iterable[Any]) -> int:
    return sum(len(view) for views in batches for view in views)


def measure(name: str, size: int, n: int, rounds: int) -> None:
    views, pixels = policies(name, size), images(n, size)
    batch = min(BATCH, n // 4)
    makers: dict[str, Iterable[Any]] = {
        "torchvision, Pillow": in_workers(PerImage([TF.to_pil_image(x) for x in pixels], views), batch),
        "torchvision, tensors": in_workers(PerImage(list(pixels), views), batch),
        "at once, workers": in_workers(AtOnce(pixels, views), None),
        "at once": AtOnce(pixels, views),
    }
    tools = {
        tool: lambda made=made: sum(len(view) for batch in made for view in batch) for tool, made in makers.items()
    }
    taken = in_turn(tools, rounds, "wall")
    print(f"\n{name}, {size} px, {len(views) * n} views in each of {rounds} rounds")
    faster = [min(pair) for pair in zip(*list(taken.values())[:2], strict=True)]
    for tool, values in taken.items():
        rate = len(views) * n / statistics.median(values)
        print(f"  {tool:<22}{rate:8.0f} views/s  × {ratio(faster, values)}", flush=True)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--sizes", default="64,32,224")
    parser.add_argument("--policies", default="simclr,moco_v3")
    asked = begin(parser, sizes="16", policies="simclr")
    for size in map(int, asked.sizes.split(",")):
        for name in asked.policies.split(","):
            measure(name, size, {16: 8, 32: 4096, 64: 2048}.get(size, 256), asked.rounds)


if __name__ == "__main__":
    main()
