"""CKA in the pass against the bare forward pass and two peers: time, error, peak memory.

    python benchmarks/cka.py [--images folder:PATH] [--rounds 9] [--only time,error,memory]

Time: what each adds to the bare forward passes of a batch of 32 images, which run in between. Error: the largest
difference from CKA in float64 of the very same float32 activations. Memory: of a process, beyond the loaded encoders.
Peers: `pytorch-cka`, `torch-cka`. They give the pairs across two encoders; Sightline those within each, too.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from shared import TINY, Beside, arguments, bare_pass, begin, in_turn, peak, peer, ratio
from torch import Tensor, nn

import sightline as sl
from sightline.encoders.sites import select

VIT = "timm:vit_small_patch16_224@random"
LAYERS = {"3 layers a block": ("block.*.norm1", "block.*.qkv", "block.*.fc1"), "blocks": ("block.*",)}
Encoders = Mapping[str, sl.Encoder]
Sites = tuple[str, ...]


def names_of(encoder: sl.Encoder, sites: Sites) -> list[str]:
    """Our sites as the module names that the peers want; they can hook outputs only."""
    names = {module: name for name, module in encoder.module.named_modules()}
    return [names[encoder.sites[site].module] for site in select(encoder.sites, sites)]


def pytorch_cka(encoders: Encoders, sites: Sites, pixels: list[Tensor]) -> Tensor:
    package = peer("cka")
    assert package is not None
    a, b = encoders.values()
    inputs = [a.preprocess.normalize(part) for part in pixels]
    layers = [names_of(encoder, sites) for encoder in (a, b)]
    with package.CKA(a.module, b.module, *layers, device="cpu") as tool:
        return tool._compare(inputs, progress=False)


def torch_cka(encoders: Encoders, sites: Sites, pixels: list[Tensor]) -> Tensor | str:
    package = peer("torch_cka")
    assert package is not None

    class Loader(list):  # it asks its data loader for a data set and a length
        dataset = "images"

    a, b = encoders.values()
    layers = [names_of(encoder, sites) for encoder in (a, b)]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), torch.inference_mode():
            warnings.simplefilter("ignore")
            tool = package.CKA(a.module, b.module, "a", "b", *layers, device="cpu")
            tool.compare(Loader((a.preprocess.normalize(part),) for part in pixels))
        return tool.hsic_matrix
    except AssertionError as error:
        return str(error)
    finally:  # it leaves its hooks behind
        for encoder in encoders.values():
            for module in encoder.module.modules():
                module._forward_hooks.clear()


PEERS: dict[str, tuple[str, Callable[[Encoders, Sites, list[Tensor]], Tensor | str]]] = {
    "pytorch-cka": ("cka", pytorch_cka),
    "torch-cka": ("torch_cka", torch_cka),
}


def installed() -> dict[str, Callable[[Encoders, Sites, list[Tensor]], Tensor | str]]:
    return {name: run for name, (package, run) in PEERS.items() if peer(package)}


def ours(encoders: Encoders, sites: Sites, images: sl.Images, batch: int) -> np.ndarray:
    """The pairs across both, from a pass over the test images."""
    how = {"sites": sites, "batch": batch, "workers": 0, "show_progress": False, "device": "cpu"}
    run = sl.analyze(encoders, images, {"cka": {"tokens": ["all"]}}, **how)
    (a, one), (b, other) = encoders.items()
    found = run["cka"].cka.sel(encoder_a=a, encoder_b=b, tokens="all")
    return found.sel(site_a=select(one.sites, sites), site_b=select(other.sites, sites)).values


def read(images: sl.Images) -> list[np.ndarray]:
    """The test images."""
    return [item.image for item in images.source.read(images.splits["test"].tolist()) if item.image is not None]


def measure_time(encoders: Encoders, pixels: list[Tensor], images: sl.Images, rounds: int, clock: str) -> None:
    batch, bare = len(pixels[0]), bare_pass(encoders, len(pixels[0]))
    for label, sites in LAYERS.items():
        beside = Beside(encoders, clock)
        beside.measure(images, batch, only={"cka": {"tokens": ["all"]}}, sites=sites)
        ratios = beside.ratios()
        print(f"\nTime, {label}, batch {batch}: of the bare forward ({statistics.median(beside.bares):.3f} s)")
        print(f"  {'sightline':<14}{statistics.median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})")
        tools = {name: lambda run=run, s=sites: run(encoders, s, pixels[:1]) for name, run in installed().items()}
        taken = in_turn({"bare": bare, **tools}, rounds, clock)
        for name in tools:
            print(f"  {name:<14}{ratio(taken[name], taken['bare'])}")


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


def reference(encoders: Encoders, sites: Sites, pixels: list[Tensor]) -> np.ndarray:
    """CKA of minibatches, HSIC₁ by its formula (Song et al. 2012), in float64 from the same float32 activations."""
    total: Tensor | float = 0.0
    for part in pixels:
        grams = []
        for encoder in encoders.values():
            with sl.capture(encoder, sites) as acts, torch.inference_mode():
                encoder(encoder.preprocess.normalize(part))
            for site in select(encoder.sites, sites):
                x = acts[site].flatten(1).double()
                x = x - x.mean(0)
                grams.append((x @ x.T).fill_diagonal_(0))
        n, stack = len(part), torch.stack(grams)
        rows, sums = stack.sum(2), stack.sum((1, 2))
        traces = torch.einsum("aij,bij->ab", stack, stack)
        total = total + traces + sums[:, None] * sums / ((n - 1) * (n - 2)) - 2 / (n - 2) * rows @ rows.T
    assert isinstance(total, Tensor)
    scale = total.diagonal().sqrt()
    half = len(total) // 2
    return (total / (scale[:, None] * scale))[:half, half:].numpy()


def measure_error(vits: Encoders, size: int, natural: sl.Images, batch: int) -> None:
    cnns = {s: sl.load_encoder(f"timm:resnet18@random?zero_init_last=False&seed={s}") for s in ("0", "1")}
    shifted = {str(s): sl.load_encoder(Offset(s), name=str(s)) for s in (0, 1)}
    cnn_sites, random = ("block.*", "block.*.residual"), np.random.default_rng(0)
    every = list(range(len(natural.splits["test"])))
    shape = (len(every), size, size, 3)
    uniform = random.integers(0, 256, shape, np.uint8)
    normal = (128 + 40 * random.standard_normal(shape)).clip(0, 255).astype(np.uint8)
    pixels = np.stack(read(natural))
    cases: dict[str, tuple[Encoders, Sites, np.ndarray]] = {
        "ViT, images": (vits, LAYERS["3 layers a block"], pixels),
        "ViT, uniform noise": (vits, LAYERS["3 layers a block"], uniform),
        "ViT, normal noise": (vits, LAYERS["3 layers a block"], normal),
        "ResNet-18, images": (cnns, cnn_sites, pixels),
        "ResNet-18, normal noise": (cnns, cnn_sites, normal),
        "features + 100, images": (shifted, ("shifted.*",), pixels),
    }
    if size != 224:  # a smoke test
        cases = {label: cases[label] for label in ("ViT, images", "features + 100, images")}
    tools = installed()
    print(f"\nLargest difference from float64 ({shape[0] // batch} batches of {batch})")
    print(f"  {'':<26}{'sightline':>12}{''.join(f'{name:>14}' for name in tools)}")
    for label, (encoders, sites, content) in cases.items():
        images = sl.load_images(content, labels=[i % 2 for i in every], splits={"test": every})
        parts = batches_of(content[images.order("test", 0)], encoders, batch)
        truth = reference(encoders, sites, parts)
        row = [f"{np.abs(ours(encoders, sites, images, batch) - truth).max():.1e}"]
        row += [error(run(encoders, sites, parts), truth) for run in tools.values()]
        print(f"  {label:<26}{row[0]:>12}{''.join(f'{text:>14}' for text in row[1:])}", flush=True)


def batches_of(images: Iterable[np.ndarray], encoders: Encoders, batch: int) -> list[Tensor]:
    """Images as the encoders see them, before they are normalised."""
    preprocess = next(iter(encoders.values())).preprocess
    return list(torch.from_numpy(np.stack([preprocess.crop(image) for image in images])).split(batch))


def error(found: Tensor | str, truth: np.ndarray) -> str:
    return "stops (NaN)" if isinstance(found, str) else f"{np.abs(found.numpy() - truth).max():.1e}"


def measure_memory(encoders: Encoders, pixels: list[Tensor], images: sl.Images) -> None:
    sites, bare = LAYERS["3 layers a block"], bare_pass(encoders, len(pixels[0]))
    works = {"bare forward": bare, "sightline": lambda: ours(encoders, sites, images, len(pixels[0]))}
    works |= {name: lambda run=run: run(encoders, sites, pixels[:2]) for name, run in installed().items()}
    print("\nPeak memory beyond the encoders, 3 layers a block")
    for name, work in works.items():
        print(f"  {name:<14}{peak(work):8.0f} MB", flush=True)


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--images", default="shapes")
    parser.add_argument("--only", default="time,error,memory")
    parser.add_argument("--batch", type=int, default=32)
    asked = begin(parser, batch=8)
    size = 16 if asked.smoke else 224
    vit = TINY if asked.smoke else VIT
    vits = {"a": sl.load_encoder(vit), "b": sl.load_encoder(f"{vit}{'&' if '?' in vit else '?'}seed=1")}
    drawn = f"{asked.images}?size={size}" if asked.images == "shapes" else asked.images
    every = sl.load_images(drawn)

    def some(count: int) -> sl.Images:
        return replace(every, splits={"test": every.splits["test"][: count * asked.batch]})

    pixels = batches_of(read(some(2)), vits, asked.batch)
    if "time" in asked.only:
        measure_time(vits, pixels, some(asked.rounds + 2), asked.rounds, asked.clock)
    if "error" in asked.only:
        measure_error(vits, size, some(2 if asked.smoke else 4), asked.batch)
    if "memory" in asked.only:
        measure_memory(vits, pixels, some(2))


if __name__ == "__main__":
    main()
