"""Peak memory of the whole pass against the number of images: it should not grow.

    python benchmarks/memory.py [--images 256 1024 4096]

Every number of images is measured in a process of its own, with CKA and k-NN on two small ViTs.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
from pathlib import Path

ENCODER = "timm:vit_tiny_patch16_224@random?size=64&patch_size=8&depth=6"


def peak(images: int) -> None:
    import sightline as sl

    encoders = {"a": sl.load_encoder(ENCODER), "b": sl.load_encoder(ENCODER + "&seed=1")}
    shapes = sl.load_images(f"shapes?train={images}&val=0&test={images}")
    with tempfile.TemporaryDirectory() as folder:
        sl.analyze(encoders, shapes, ["cka", "knn"], out=Path(folder) / "run", show_progress=False)
    status = Path("/proc/self/status").read_text().splitlines()
    print(int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--peak", type=int)
    options = parser.parse_args()
    if options.peak:
        return peak(options.peak)
    print(f"{datetime.date.today()}, CKA and k-NN, two ViTs of 6 blocks, 64 pixels")
    for images in options.images:
        script = [sys.executable, __file__, "--peak", str(images)]
        found = subprocess.run(script, check=True, capture_output=True, text=True).stdout
        print(f"  {2 * images:6} images: peak {float(found):6.0f} MB")
    return None


if __name__ == "__main__":
    main()
