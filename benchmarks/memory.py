"""Memory of a pass against the number of images, and of a long pass and a long training over their steps.

    python benchmarks/memory.py [--images 256 1024 4096] [--steps 10000] [--of images,pass,training]

Against the images: the peak of a process beyond the loaded encoders, with CKA and k-NN on two small ViTs. Over the
steps: resident memory, of which the second half counts, since caches fill in the first; its line, fitted by least
squares, in kB for a thousand steps, and how far the highest is above the lowest. Neither should grow.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from shared import TINY, arguments, begin, peak, sampled

import sightline as sl

VIT = "timm:vit_tiny_patch16_224@random?size=64&patch_size=8&depth=6"
TRAINED = {"batch": 8, "depth": 1, "width": 12, "heads": 2, "patch": 8, "size": 16, "watch": [], "save_minutes": 0.05}
QUIET = {"workers": 0, "show_progress": False, "device": "cpu"}


def of_images(count: int) -> None:
    """The peak with so many images in each of two splits."""
    encoders = {"a": sl.load_encoder(VIT), "b": sl.load_encoder(f"{VIT}&seed=1")}
    images = sl.load_images(f"shapes?train={count}&val=0&test={count}")
    with tempfile.TemporaryDirectory() as folder:
        work = lambda: sl.analyze(encoders, images, ["cka", "knn"], out=Path(folder) / "run", **QUIET)  # noqa: E731
        print(f"  {2 * count:6} images: peak {peak(work):6.0f} MB", flush=True)


def long_pass(steps: int, folder: Path) -> None:
    """Batches of four images through four analyses."""
    images = sl.load_images(f"shapes?size=16&train=0&val=0&test={4 * steps}")
    sl.analyze(TINY, images, ["cka", "fourier", "attention", "diversity"], batch=4, out=folder / "run", **QUIET)


def long_training(steps: int, folder: Path) -> None:
    """Steps of eight images, with a checkpoint every three seconds."""
    settings = TRAINED | {"epochs": steps / 8}
    sl.pretrain("mae", "shapes?size=16&train=64&val=0&test=8", folder / "run", settings=settings, **QUIET)


def main() -> None:
    """Print a line for each."""
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--images", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--of", default="images,pass,training")
    asked = begin(parser, images=[16], steps=16)
    if "images" in asked.of:
        print("CKA and k-NN, two ViTs of 6 blocks, 64 pixels")
        for count in asked.images:
            of_images(count)
    for name, work in {"pass": long_pass, "training": long_training}.items():
        if name not in asked.of:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, sampled(0.02) as seen:
            work(asked.steps, Path(folder))
        late = np.array(seen[len(seen) // 2 :]) * 1000
        slope = np.polyfit(np.linspace(asked.steps / 2, asked.steps, len(late)), late, 1)[0] * 1000
        print(f"{name}, {asked.steps} steps in {time.monotonic() - began:.0f} s: {late[-1] / 1000:.0f} MB,", end=" ")
        print(f"{slope:+.1f} kB per 1000 steps, {late.max() - late.min():.0f} kB from lowest to highest", flush=True)


if __name__ == "__main__":
    main()
