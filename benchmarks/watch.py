"""What a look at an encoder costs (`sl.watch`), against the bare forward pass of the same images.

    python benchmarks/watch.py [--rounds 4] [--images 32]

A ViT-S/16 (224 px, random weights), as many training as held-out images, batches of 32. The first look, which reads the
images and keeps the start, is not counted.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path

import torch
from shared import TINY, Work, arguments, begin, in_turn, ratio

import sightline as sl

CASES = (("knn", "rank"), ("attention",), ("cka",), ("knn", "rank", "attention", "cka"))


def main() -> None:
    parser = arguments(__doc__, rounds=4)
    parser.add_argument("--images", type=int, default=32)
    asked = begin(parser, images=8)
    encoder = sl.load_encoder(TINY if asked.smoke else "timm:vit_small_patch16_224@random")
    images = sl.load_images(f"shapes?size={encoder.preprocess.size[0]}", limit=asked.images)
    batch = min(32, asked.images)
    pixels = torch.randint(0, 256, (batch, 3, *encoder.preprocess.size), dtype=torch.uint8)

    def bare() -> None:
        with torch.no_grad(), encoder.evaluating():
            for _ in range(2 * asked.images // batch):
                encoder(encoder.preprocess.normalize(pixels))

    with tempfile.TemporaryDirectory() as folder:

        def looking(case: tuple[str, ...]) -> Work:
            out = Path(folder) / "-".join(case)
            reference = encoder if "cka" in case else None
            watched = sl.watch(
                encoder, images, case, every=1, out=out, reference=reference, limit=asked.images, show_progress=False
            )
            steps = itertools.count()
            watched(next(steps))
            return lambda: watched(next(steps))

        looks = {", ".join(case): looking(case) for case in CASES}
        taken = in_turn({"bare": bare, **looks}, asked.rounds, asked.clock)
    for name, values in taken.items():
        print(f"{name:30} {statistics.median(values):7.2f} s   {ratio(values, taken['bare'])} of bare")


if __name__ == "__main__":
    main()
