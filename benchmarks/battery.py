"""The cost of every analysis over the bare forward pass, alone and all together, interleaved in one run.

    python benchmarks/battery.py [--rounds 16] [--images 1024] [--threads 2] [--only cka,attention] [--ours]

Two ViT-S/16 (224 px, random weights), batches of 32. Each round times the same batch bare, with each analysis alone,
with all of them in one pass, and in the usual way: one forward pass per analysis, attention unfused, activations kept,
plain functions on them. `step` is the median over rounds of the ratio to the bare forward, which is timed before and
after each of them. Analyses that look at a bounded sample of images work in some batches only, so `pass` adds up what a
pass over all images takes, with its end.
On a machine that others use, too, `--threads 1 --clock processor` counts what this process computes, not what it waits;
`--ours` leaves the usual way out, which takes as long as all others, and `--together` times the one pass alone.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import sightline as sl
from sightline.analyses.attention import attention_distance, attention_nmi
from sightline.analyses.diversity import token_cosine
from sightline.encoders.watching import capture
from sightline.images.pipeline import Batch
from sightline.images.sets import Images
from sightline.measure.analyze import _step
from sightline.measure.contract import analysis
from sightline.measure.plan import make_plans
from sightline.measure.request import default_analyses
from sightline.measure.streaming import result_of

VIT = "timm:vit_small_patch16_224@random?seed="
CKA_SITES = ("block.*.norm1", "block.*.qkv", "block.*.fc1")  # 36 layers of each
LABELLED = ("agreement", "knn")  # they also see the training images; here only their share of the test images counts
CPU = torch.device("cpu")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def batch_of(pixels: Tensor, encoders: dict[str, sl.Encoder], images: Images, number: int) -> Batch:
    """Rows of the test split in the order of the pass, with pixels that cost nothing to make."""
    rows = torch.from_numpy(np.arange(number * len(pixels), (number + 1) * len(pixels)) % len(images.indices("test")))
    where = images.indices("test")[rows.numpy()]
    seen = {encoder.preprocess: pixels for encoder in encoders.values()}
    return Batch("test", number, rows, tuple(images.ids[where]), torch.from_numpy(images.labels[where]), {}, seen, ())


class Ours:
    """Some analyses in one pass."""

    def __init__(self, names: list[str], encoders: dict[str, sl.Encoder], images: Images, cache: Path) -> None:
        settings = {"batch": 32, "seed": 0, "precision": "float32"}
        configs = {name: analysis(name).Config() for name in names}
        if "cka" in names:  # the 36 × 36 layers and one token view that the peers are compared on
            configs["cka"] = analysis("cka").Config(tokens=("all",))
        self.plans = {}
        for name, config in configs.items():
            sites = CKA_SITES if name == "cka" else None
            self.plans |= make_plans(encoders, images, {name: config}, sites, settings, cache, CPU)
        self.metrics = {n: analysis(n).Analysis(configs[n], plan) for n, plan in self.plans.items()}

    def step(self, batch: Batch) -> None:
        """What the pass does with a batch."""
        _step(batch, self.metrics, self.plans, CPU)

    def end(self) -> None:
        """What `compute` does; labelled analyses cannot be finished without the training images."""
        for name, metric in self.metrics.items():
            if name not in LABELLED:
                result_of(metric)


def seconds_of(work: Callable[[], None], clock: Callable[[], float]) -> float:
    """What it takes."""
    began = clock()
    work()
    return clock() - began


def usual(encoders: dict[str, sl.Encoder], pixels: Tensor) -> None:
    """One forward pass per analysis with all activations kept, attention computed unfused, plain functions after it."""
    for encoder in encoders.values():
        inputs = encoder.preprocess.normalize(pixels)
        tokens = encoder.tokens
        assert tokens is not None

        def forward(sites: list[str], encoder: sl.Encoder = encoder, inputs: Tensor = inputs) -> dict[str, Tensor]:
            with capture(encoder, sites) as acts:
                encoder(inputs)
            return acts

        for kept in unfused_maps(encoder, inputs):  # attention
            attention_distance(kept, tokens.grid, 16, tokens.prefix)
            attention_nmi(kept, tokens.prefix)
        for site, x in forward(["block.*", "block.*.mid", "block.*.heads"]).items():  # diversity
            if site.endswith("heads"):
                unit = torch.nn.functional.normalize(x, dim=-1)
                torch.einsum("bhnd,bgnd->bhg", unit, unit)
            else:
                token_cosine(x[:, tokens.prefix :])
        for x in forward(["block.*"]).values():  # fourier
            maps = x[:, tokens.prefix :].mT.unflatten(2, tokens.grid)
            (torch.fft.fft2(maps).abs() + 1e-6).log().mean((0, 1))
        for x in forward(["block.*"]).values():  # spectra, of two images of a batch as in the sample
            torch.linalg.svdvals(x[:2, tokens.prefix :])
        forward(["block.*"])  # tokens
        grams = [x.flatten(1) @ x.flatten(1).T for x in forward(list(CKA_SITES)).values()]  # cka
        torch.stack(grams).flatten(1) @ torch.stack(grams).flatten(1).T
        {site: (x[:, 0].clone(), x.mean(1)) for site, x in forward(["block.*", "norm"]).items()}  # k-NN features


def unfused_maps(encoder: sl.Encoder, inputs: Tensor) -> list[Tensor]:
    """Attention maps as hooks on the dropout of unfused attention give them."""
    maps: list[Tensor] = []
    layers = [block.attn for block in encoder.module.blocks]
    handles = [layer.attn_drop.register_forward_hook(lambda _, __, x: maps.append(x)) for layer in layers]
    for layer in layers:
        layer.fused_attn = False
    encoder(inputs)
    for layer, handle in zip(layers, handles, strict=True):
        layer.fused_attn = True
        handle.remove()
    return maps


def main() -> None:
    """Print the table."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=16)
    words.add_argument("--images", type=int, default=1024)
    words.add_argument("--threads", type=int, default=torch.get_num_threads())
    words.add_argument("--only", help="analyses, separated by commas")
    words.add_argument("--ours", action="store_true", help="without the usual way")
    words.add_argument("--together", action="store_true", help="all analyses in one pass, and nothing else")
    words.add_argument("--clock", choices=CLOCKS, default="wall")
    asked = words.parse_args()
    clock = CLOCKS[asked.clock]
    torch.set_num_threads(asked.threads)
    encoders = {"a": sl.load_encoder(VIT + "0"), "b": sl.load_encoder(VIT + "1")}
    images = sl.load_images(f"shapes?size=224&train=64&val=0&test={asked.images}")
    pixels = torch.randint(0, 256, (32, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    names = asked.only.split(",") if asked.only else [n for n in default_analyses() if n != "agreement"]
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        groups = ({} if asked.together else {name: [name] for name in names}) | {"all in one pass": names}
        ours = {label: Ours(group, encoders, images, Path(cache)) for label, group in groups.items()}
        steps: dict[str, Callable[[Batch], None]] = {label: tool.step for label, tool in ours.items()}
        steps |= {} if asked.ours or asked.together else {"the usual way": lambda _: usual(encoders, pixels)}
        ratios: dict[str, list[float]] = {label: [] for label in steps}
        bares: list[float] = []
        for number in range(asked.rounds + 1):
            batch = batch_of(pixels, encoders, images, number)
            order = list(steps)[number % len(steps) :] + list(steps)[: number % len(steps)]
            before = seconds_of(lambda: bare(encoders, pixels), clock)
            for label in order:
                taken = seconds_of(functools.partial(steps[label], batch), clock)
                after = seconds_of(lambda: bare(encoders, pixels), clock)
                if number:  # the first round warms up
                    ratios[label].append(2 * taken / (before + after))
                    bares.append(after)
                before = after
        ends = {label: seconds_of(tool.end, clock) for label, tool in ours.items()}
    passes = -(-asked.images // 32)
    print(f"{platform.processor() or platform.machine()}, {asked.threads} threads, {datetime.date.today()}")
    print(f"bare forward: {statistics.median(bares):.2f} s a batch")
    print(f"{'':24}{'step':>8}{'spread':>16}{'end':>8}{f'pass of {asked.images}':>16}")
    for label, found in ratios.items():
        found.sort()
        spread = f"{found[len(found) // 10]:.3f} … {found[-1 - len(found) // 10]:.3f}"
        whole = statistics.mean(found) + ends.get(label, 0.0) / (passes * statistics.median(bares))
        print(f"{label:24}{statistics.median(found):8.3f}{spread:>16}{ends.get(label, 0.0):7.1f}s{whole:16.3f}")


def bare(encoders: dict[str, sl.Encoder], pixels: Tensor) -> None:
    """The forward passes alone."""
    for encoder in encoders.values():
        encoder(encoder.preprocess.normalize(pixels))


if __name__ == "__main__":
    main()
