"""How many embedded images per second two worker processes draw.

python benchmarks/shapes.py [--workers 2]
"""

from __future__ import annotations

import argparse
import time

from sightline.images.loading import load_images
from sightline.images.pipeline import batches
from sightline.images.preprocess import Preprocess


def rate(reference: str, size: int, count: int, workers: int) -> float:
    """Images per second of a pass over `count` images, the start of the workers included."""
    images = load_images(f"{reference}?size={size}&train={count}&val=0&test=0")
    start = time.perf_counter()
    seen = sum(
        len(batch.ids)
        for batch in batches(images, [Preprocess(size=(size, size))], splits=["train"], batch=64, workers=workers)
    )
    return seen / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    workers = parser.parse_args().workers
    for reference in ("shapes", "shapes:conflict", "shapes:scenes"):
        for size, count in ((32, 8192), (64, 8192), (224, 1024)):
            best = max(rate(reference, size, count, workers) for _ in range(3))
            print(f"{reference:16} {size:4} px {best:8.0f} images/s with {workers} workers", flush=True)


if __name__ == "__main__":
    main()
