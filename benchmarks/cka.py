"""CKA in the pass against the bare forward pass and two peers, interleaved in one run: time, error, peak memory.

    python benchmarks/cka.py [--images folder:PATH] [--rounds 9] [--only time,error,memory]

Time: every round runs one batch of 32 images through each tool in turn; the ratio is taken round by round, and the
median of the rounds is printed, so that whatever else the machine does hits all of them alike. Error: the largest
difference from CKA in float64 computed from the very same float32 activations. Peers: `pytorch-cka`, `torch-cka`
(`pip install 'sightline[bench]'`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.analyses.cka import CkaAnalysis, CkaConfig
from sightline.encoders.sites import select
from sightline.encoders.watching import watch
from sightline.images.pipeline import Batch, batches
from sightline.measure.analyze import _step
from sightline.measure.estimators.cka import centre, products, ratio
from sightline.measure.plan import make_plans
from sightline.measure.streaming import result_of

VIT = "timm:vit_small_patch16_224@random?seed="
LAYERS = {"36 × 36": ("block.*.norm1", "block.*.qkv", "block.*.fc1"), "12 × 12": ("block.*",)}
CPU = torch.device("cpu")

# The peer's package is called `cka`, as this file is; the folder of a script comes first on the path.
sys.path = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]


def batch_of(pixels: Tensor, encoders: dict[str, sl.Encoder], number: int = 0) -> Batch:
    ids = tuple(f"{number}-{i}" for i in range(len(pixels)))
    labels = torch.zeros(len(pixels), dtype=torch.int64)
    return Batch("test", number, labels, ids, labels, {}, {e.preprocess: pixels for e in encoders.values()}, ())


def ours(encoders: dict[str, sl.Encoder], sites: tuple[str, ...]) -> tuple[CkaAnalysis, Callable[[Batch], None]]:
    images = sl.load_images("shapes?size=32&train=64&val=0&test=64")
    config = CkaConfig(tokens=("all",))
    settings = {"batch": 32, "seed": 0, "precision": "float32"}
    plans = make_plans(encoders, images, {"cka": config}, sites, settings, Path("unused"), CPU)
    metric = CkaAnalysis(config, plans["cka"])
    return metric, lambda batch: _step(batch, {"cka": metric}, plans, CPU)


def names_of(encoder: sl.Encoder, sites: tuple[str, ...]) -> list[str]:
    """Our sites as the module names that the peers want; they can hook outputs only."""
    names = {module: name for name, module in encoder.module.named_modules()}
    return [names[encoder.sites[site].module] for site in select(encoder.sites, sites)]


def pytorch_cka(encoders: dict[str, sl.Encoder], sites: tuple[str, ...], inputs: list[Tensor]) -> Tensor:
    from cka import CKA

    a, b = encoders.values()
    with CKA(a.module, b.module, names_of(a, sites), names_of(b, sites), device="cpu") as tool:
        return tool._compare(inputs, progress=False)


def torch_cka(encoders: dict[str, sl.Encoder], sites: tuple[str, ...], inputs: list[Tensor]) -> Tensor | str:
    from torch_cka import CKA

    class Loader(list):  # it asks its data loader for a data set and a length
        dataset = "images"

    a, b = encoders.values()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), torch.inference_mode():
            warnings.simplefilter("ignore")
            tool = CKA(a.module, b.module, "a", "b", names_of(a, sites), names_of(b, sites), device="cpu")
            tool.compare(Loader((x,) for x in inputs))
        return tool.hsic_matrix
    except AssertionError as error:
        return str(error)
    finally:  # it leaves its hooks behind
        for encoder in encoders.values():
            for module in encoder.module.modules():
                module._forward_hooks.clear()


def bare(encoders: dict[str, sl.Encoder], pixels: Tensor) -> None:
    for encoder in encoders.values():
        encoder(encoder.preprocess.normalize(pixels))


def reference(encoders: dict[str, sl.Encoder], sites: tuple[str, ...], pixels: list[Tensor]) -> np.ndarray:
    """Float64 from the same float32 activations, one Gram matrix at a time."""
    total = 0
    for part in pixels:
        grams: list[Tensor] = []

        def see(_: str, x: Tensor, grams: list[Tensor] = grams) -> None:
            x = x.flatten(1).double()
            x = x - x.mean(0)
            grams.append(x @ x.T)

        for encoder in encoders.values():
            with watch(encoder.sites, select(encoder.sites, sites), see):
                encoder(encoder.preprocess.normalize(part))
        total = total + products(centre(torch.stack(grams))).numpy()
    half = len(total) // 2
    return ratio(total)[:half, half:]


# ---------------------------------------------------------------------------------------------------------------


def measure_time(pixels: Tensor, rounds: int) -> None:
    encoders = {"a": sl.load_encoder(VIT + "0"), "b": sl.load_encoder(VIT + "1")}
    inputs = [encoder.preprocess.normalize(pixels) for encoder in encoders.values()][:1]
    for label, sites in LAYERS.items():
        _, step = ours(encoders, sites)
        tools: dict[str, Callable[[], object]] = {
            "bare forward": lambda: bare(encoders, pixels),
            "sightline": lambda step=step: step(batch_of(pixels, encoders)),
            "pytorch-cka": lambda sites=sites: pytorch_cka(encoders, sites, inputs),
            "torch-cka": lambda sites=sites: torch_cka(encoders, sites, inputs),
        }
        seconds: dict[str, list[float]] = {name: [] for name in tools}
        for number in range(rounds + 1):
            names = list(tools)[number % len(tools) :] + list(tools)[: number % len(tools)]
            for name in names:
                began = time.perf_counter()
                tools[name]()
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - began)
        print(f"\nTime, two ViT-S/16, {label} layers, batch 32 ({rounds} rounds)")
        for name, values in seconds.items():
            ratios = [v / b - 1 for v, b in zip(values, seconds["bare forward"], strict=True)]
            spread = f"{min(ratios):+.1%} … {max(ratios):+.1%}" if name != "bare forward" else ""
            added = f"{statistics.median(ratios):+7.1%}" if name != "bare forward" else ""
            print(f"  {name:<14}{statistics.median(values):7.3f} s  {added}  {spread}")


class Offset(nn.Module):
    """Layers whose features have a mean of 100 and a deviation of about 1."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Conv2d(3, 64, 16, 16)
        self.layers = nn.ModuleList(nn.Conv2d(64, 64, 1) for _ in range(4))
        self.shifted = nn.ModuleList(nn.Identity() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, shifted in zip(self.layers, self.shifted, strict=True):
            x = layer(x).tanh()
            shifted(x / x.std() + 100)
        return x


def measure_error(natural: list[Tensor]) -> None:
    torch.manual_seed(0)
    vits = {"a": sl.load_encoder(VIT + "0"), "b": sl.load_encoder(VIT + "1")}
    cnns = {s: sl.load_encoder(f"timm:resnet18@random?zero_init_last=False&seed={s}") for s in ("0", "1")}
    shifted = {str(s): sl.load_encoder(Offset(s), name=str(s)) for s in (0, 1)}
    uniform = [torch.randint(0, 256, natural[0].shape, dtype=torch.uint8) for _ in natural]
    normal = [(128 + 40 * torch.randn(natural[0].shape)).clamp(0, 255).to(torch.uint8) for _ in natural]
    cases = {
        "ViT-S/16, images": (vits, LAYERS["36 × 36"], natural),
        "ViT-S/16, uniform noise": (vits, LAYERS["36 × 36"], uniform),
        "ViT-S/16, normal noise": (vits, LAYERS["36 × 36"], normal),
        "ResNet-18, images": (cnns, ("block.*", "block.*.residual"), natural),
        "ResNet-18, normal noise": (cnns, ("block.*", "block.*.residual"), normal),
        "features + 100, images": (shifted, ("shifted.*",), natural),
    }
    print(f"\nLargest difference from float64 ({len(natural)} batches of 32)")
    print(f"  {'':<26}{'sightline':>12}{'pytorch-cka':>14}{'torch-cka':>14}")
    for label, (encoders, sites, pixels) in cases.items():
        first = next(iter(encoders.values()))
        inputs = [first.preprocess.normalize(part) for part in pixels]
        truth = reference(encoders, sites, pixels)
        metric, step = ours(encoders, sites)
        for number, part in enumerate(pixels):
            step(batch_of(part, encoders, number))
        a, b = encoders
        found = result_of(metric).cka.sel(encoder_a=a, encoder_b=b, tokens="all").values
        row = [np.abs(found - truth).max(), _error(pytorch_cka(encoders, sites, inputs), truth)]
        row.append(_error(torch_cka(encoders, sites, inputs), truth))
        print(f"  {label:<26}{row[0]:>12.1e}{row[1]:>14}{row[2]:>14}")


def _error(found: Tensor | str, truth: np.ndarray) -> str:
    if isinstance(found, str):
        return "stops (NaN)"
    return f"{np.abs(found.numpy() - truth).max():.1e}"


def measure_memory() -> None:
    print("\nPeak memory of a process, two ViT-S/16, 36 × 36 layers, 2 batches of 32")
    for tool in ("bare forward", "sightline", "pytorch-cka", "torch-cka"):
        script = [sys.executable, __file__, "--peak", tool]
        peak = subprocess.run(script, check=True, capture_output=True, text=True).stdout.split()[-1]
        print(f"  {tool:<14}{float(peak) / 1e6:8.0f} MB")


def peak(tool: str) -> None:
    encoders = {"a": sl.load_encoder(VIT + "0"), "b": sl.load_encoder(VIT + "1")}
    pixels = [torch.randint(0, 256, (32, 3, 224, 224), dtype=torch.uint8) for _ in range(2)]
    inputs = [encoders["a"].preprocess.normalize(part) for part in pixels]
    sites = LAYERS["36 × 36"]
    with torch.inference_mode():
        if tool == "sightline":
            _, step = ours(encoders, sites)
            for number, part in enumerate(pixels):
                step(batch_of(part, encoders, number))
        elif tool == "bare forward":
            for part in pixels:
                bare(encoders, part)
        else:
            {"pytorch-cka": pytorch_cka, "torch-cka": torch_cka}[tool](encoders, sites, inputs)
    # Not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text().splitlines()
    print(1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", default="shapes?size=224")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="time,error,memory")
    parser.add_argument("--peak")
    options = parser.parse_args()
    if options.peak:
        return peak(options.peak)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{datetime.date.today()}, {machine}, torch {torch.__version__}")
    encoder = sl.load_encoder(VIT + "0")
    images = sl.load_images(options.images, limit=128)
    loader = batches(images, [encoder.preprocess], splits=["test"], batch=32, workers=0)
    natural = [batch.pixels[encoder.preprocess] for batch in loader if len(batch.ids) == 32]
    with torch.inference_mode():
        if "time" in options.only:
            measure_time(natural[0], options.rounds)
        if "error" in options.only:
            measure_error(natural)
    if "memory" in options.only:
        measure_memory()
    return None


if __name__ == "__main__":
    main()
