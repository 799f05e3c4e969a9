"""Regions of a detector on a CPU: sums of rows of channels against torchvision's kernel.

    python benchmarks/regions.py [--rounds 9] [--bf16]

Regions alone, there and back, and the whole step of the detector of `detect.toml` (16 images, 12 × 12 patches), in
float32, and with `--bf16` in bfloat16 autocast, which kills the process on some CPUs.
"""

from __future__ import annotations

import statistics

import torch
from shared import Work, arguments, begin, in_turn, ratio
from torch import Tensor

from sightline.training.recipe import read_recipe
from sightline.transfer.detection.detector import Detector, Heads
from sightline.transfer.detection.pyramid import SimplePyramid
from sightline.transfer.detection.regions import RegionPool

WIDTH, GRID, CLASSES = 96, 12, 16
FRAME = 16 * GRID
WAYS = {"torchvision": RegionPool._aligned, "sums": RegionPool._summed}


def boxes(generator: torch.Generator, count: int) -> Tensor:
    """Of sides from 8 to 68 pixels, inside the frame."""
    corner = torch.rand(count, 2, generator=generator) * (FRAME - 70)
    return torch.cat([corner, corner + 8 + 60 * torch.rand(count, 2, generator=generator)], 1)


def pooling(generator: torch.Generator, batch: int) -> Work:
    """32 regions of each image, and the gradient of the maps."""
    pool = RegionPool((4, 8, 16), 7)
    maps = {str(s): torch.randn(batch, 48, FRAME // s, FRAME // s, generator=generator) for s in (4, 8, 16)}
    regions = [boxes(generator, 32) for _ in range(batch)]
    for x in maps.values():
        x.requires_grad_()
    return lambda: pool(maps, regions, [(FRAME, FRAME)] * batch).sum().backward()


def training(generator: torch.Generator, batch: int, *, bf16: bool) -> Work:
    """Losses of a batch, and their gradients."""
    recipe = read_recipe("detect")
    heads = Heads(**{key: recipe[key] for key in Heads.__dataclass_fields__ if key in recipe})
    detector = Detector(SimplePyramid(WIDTH, heads.channels, heads.strides), CLASSES, heads).train()
    maps = torch.randn(batch, WIDTH, GRID, GRID, generator=generator)
    targets = []
    for _ in range(batch):
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


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--bf16", action="store_true", help="the step in bfloat16, too")
    parser.add_argument("--batch", type=int, default=16)
    asked = begin(parser, batch=1)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    kinds = {
        "regions alone": pooling(generator, asked.batch),
        "step, float32": training(generator, asked.batch, bf16=False),
    }
    if asked.bf16:
        kinds["step, bfloat16"] = training(generator, asked.batch, bf16=True)
    for name, step in kinds.items():

        def by(way: str, step: Work = step) -> Work:
            def run() -> None:
                RegionPool._summed = WAYS[way]  # type: ignore[method-assign]
                step()

            return run

        taken = in_turn({way: by(way) for way in WAYS}, asked.rounds, asked.clock)
        milliseconds = " ".join(f"{way} {1000 * statistics.median(own):.0f} ms" for way, own in taken.items())
        print(f"{name:15} {milliseconds}: torchvision takes {ratio(taken['torchvision'], taken['sums'])} times as long")


if __name__ == "__main__":
    main()
