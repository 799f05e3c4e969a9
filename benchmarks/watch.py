"""What a look at an encoder costs (`sl.watch`), over the bare forward pass of the same images, interleaved in one run.

    python benchmarks/watch.py [--rounds 4] [--images 32]

A ViT-S/16 (224 px, random weights), as many training as held-out images, batches of 32, one thread. Times are those of
the process, so that others on the machine do not count; `ratio` is the median over rounds.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from typing import Any

import torch

import sightline as sl
from sightline.training.look import look_at
from sightline.training.watch import _Eyes
from sightline.training.watchers import read_watched

CASES = (("knn", "rank"), ("attention",), ("cka",), ("knn", "rank", "attention", "cka"))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--images", type=int, default=32)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    encoder, images = sl.load_encoder("timm:vit_small_patch16_224@random"), sl.load_images("shapes?size=224")
    read = {
        role: read_watched(images, split, encoder.preprocess, limit=given.images, batch=32, seed=0)
        for role, split in (("train", "train"), ("held out", "test"))
    }
    start = look_at(encoder, {"held out": read["held out"]}, cka=True).grams
    times: dict[str, list[float]] = {}
    for number in range(given.rounds + 1):
        record(times, "bare", lambda: bare(encoder, read), number)
        for case in CASES:
            others = {"start": start, "reference": start} if "cka" in case else {}
            eyes = _Eyes(read, others, None)  # type: ignore[arg-type]
            record(times, ", ".join(case), lambda eyes=eyes, case=case: eyes.row(encoder, case), number)
    print(f"{datetime.date.today()}, {platform.processor() or platform.machine()}, torch {torch.__version__}")
    for name, took in times.items():
        ratio = statistics.median(a / b for a, b in zip(took, times["bare"], strict=True))
        print(f"{name:30} {statistics.median(took):7.2f} s   ratio {ratio:.2f}")


def bare(encoder: sl.Encoder, read: Any) -> None:
    with torch.no_grad(), encoder.evaluating():
        for part in read.values():
            for pixels in part.pixels:
                encoder(encoder.preprocess.normalize(pixels))


def record(times: dict[str, list[float]], name: str, look: Any, number: int) -> None:
    begun = time.process_time()
    look()
    if number:  # the first round warms up
        times.setdefault(name, []).append(time.process_time() - begun)


if __name__ == "__main__":
    main()
