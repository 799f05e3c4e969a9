"""Regions of a detector on a CPU: sums of rows of channels against torchvision's kernel, interleaved in one run.

    python benchmarks/regions.py [--rounds 9] [--threads 1]

Regions alone, there and back, and the whole step of the detector of `detect.toml` (16 images, 12 × 12 patches), in
float32 and in bfloat16 autocast. Ratios are taken round by round; printed are medians, and the range in brackets.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sightline.training.recipe import read_recipe
from sightline.transfer.detection.detector import Detector, Heads
from sightline.transfer.detection.pyramid import SimplePyramid
from sightline.transfer.detection.regions import RegionPool

BATCH, WIDTH, GRID, CLASSES = 16, 96, 12, 16
FRAME = 16 * GRID
WAYS = {"torchvision": RegionPool._aligned, "sums": RegionPool._summed}
Step = Callable[[], object]


def boxes(generator: torch.Generator, count: int) -> Tensor:
    """Of sides from 8 to 68 pixels, inside the frame."""
    corner = torch.rand(count, 2, generator=generator) * (FRAME - 70)
    return torch.cat([corner, corner + 8 + 60 * torch.rand(count, 2, generator=generator)], 1)


def pooling(generator: torch.Generator) -> Step:
    """32 regions of each image, and the gradient of the maps."""
    pool = RegionPool((4, 8, 16), 7)
    maps = {str(s): torch.randn(BATCH, 48, FRAME // s, FRAME // s, generator=generator) for s in (4, 8, 16)}
    regions = [boxes(generator, 32) for _ in range(BATCH)]
    for x in maps.values():
        x.requires_grad_()
    return lambda: pool(maps, regions, [(FRAME, FRAME)] * BATCH).sum().backward()


def training(generator: torch.Generator, *, bf16: bool) -> Step:
    """Losses of a batch, and their gradients."""
    recipe = read_recipe("detect")
    heads = Heads(**{key: recipe[key] for key in Heads.__dataclass_fields__ if key in recipe})
    detector = Detector(SimplePyramid(WIDTH, heads.channels, heads.strides), CLASSES, heads).train()
    maps = torch.randn(BATCH, WIDTH, GRID, GRID, generator=generator)
    targets = []
    for _ in range(BATCH):
        own = boxes(generator, 4)
        masks = torch.zeros(4, FRAME, FRAME, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, own.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        targets.append({"boxes": own, "labels": torch.randint(0, CLASSES, (4,), generator=generator), "masks": masks})

    def step() -> None:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            losses = detector.losses([maps], (FRAME, FRAME), targets)
        torch.stack(list(losses.values())).sum().backward()

    return step


def seconds(step: Step, steps: int = 4) -> float:
    """Of one step."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{platform.processor() or platform.machine()}, {chosen.threads} threads, {datetime.date.today()}")
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    kinds = {
        "regions alone": pooling(generator),
        "step, float32": training(generator, bf16=False),
        "step, bfloat16": training(generator, bf16=True),
    }
    for name, step in kinds.items():
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(chosen.rounds + 1):  # the first one warms up
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                RegionPool._summed = WAYS[way]  # type: ignore[method-assign]
                times[way].append(seconds(step))
        ratios = [old / new for old, new in list(zip(*times.values(), strict=True))[1:]]
        milliseconds = {way: 1000 * statistics.median(own[1:]) for way, own in times.items()}
        print(
            f"{name:15} {' '.join(f'{way} {ms:.0f} ms' for way, ms in milliseconds.items())}: "
            f"{statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
