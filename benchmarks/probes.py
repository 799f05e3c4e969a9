"""A sweep of probes trained together against the same heads one after the other.

    python benchmarks/probes.py                                  # 27 configurations × 12 layers, 10,000 × 384 features
    python benchmarks/probes.py --classes 100 --batch 4096 256   # other numbers of classes and sizes of a batch

Peers, float32, the same order of the images and the same first weights:

- `loop`: `BatchNorm1d`, `Linear` and `torch.optim.SGD`, batches indexed from a tensor in memory: the fastest plain one
- `loader`: the same with a `DataLoader` of a `TensorDataset`, as it is mostly written
- scikit-learn's `LogisticRegression`, one head per layer until it has converged; it is compared with 100 epochs

Peers train a sample of the heads, spread over layers and configurations, and bfloat16 one layer; what is compared is
the time for a head and an epoch. The more classes, the more of the time is in the products themselves, which cost the
same in company and alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from shared import Work, arguments, begin, in_turn, ratio
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sightline.measure.estimators.probes import Probe, Schedule, train_probes

RATES, DECAYS = np.logspace(-3, 0, 9).tolist(), (0.0, 1e-4, 1e-2)  # 27 configurations
EPOCHS = 100  # of a training, where scikit-learn is compared

Features = dict[str, NDArray[np.float32]]
Labels = NDArray[np.int64]
Losses = dict[Probe, float]


def clustered(images: int, width: int, layers: int, classes: int) -> tuple[Features, Labels]:
    """As encoders give them: classes that come out layer by layer, a falling spectrum and an offset."""
    random = np.random.default_rng(0)
    labels = random.integers(0, classes, images)
    spectrum = (1 / np.sqrt(np.arange(1, width + 1))).astype(np.float32)
    features = {}
    for layer in range(layers):
        centres = random.standard_normal((classes, width), dtype=np.float32) * spectrum
        x = random.standard_normal((images, width), dtype=np.float32) * spectrum
        features[f"block.{layer}"] = x + 0.15 * (layer + 1) / layers * centres[labels] + 0.3  # classes overlap
    return features, labels


def together(probes: list[Probe], schedule: Schedule, features: Features, labels: Labels, classes: int) -> Losses:
    return dict(zip(probes, train_probes(probes, schedule, features, labels, classes).loss.tolist(), strict=True))


def one_by_one(
    probes: list[Probe], schedule: Schedule, features: Features, labels: Labels, classes: int, loader: bool
) -> Losses:
    """Each head in a loop of its own."""
    losses, y = {}, torch.from_numpy(labels)
    n = len(y)
    warmup = schedule.warmup_epochs * schedule.per_epoch(n)
    for probe in probes:
        x = torch.from_numpy(features[probe.inputs[0]])
        linear = nn.Linear(x.shape[1], classes)
        nn.init.normal_(linear.weight, std=0.01, generator=torch.Generator().manual_seed(schedule.seed))
        nn.init.zeros_(linear.bias)
        model = nn.Sequential(nn.BatchNorm1d(x.shape[1], affine=False, eps=1e-6), linear)
        optimizer = torch.optim.SGD(linear.parameters(), probe.lr, 0.9, weight_decay=probe.weight_decay)
        steps, last = schedule.steps(n), []
        for step, (part, target) in enumerate(batches(x, y, schedule, loader)):
            after = max(0.0, (step - warmup) / (steps - warmup))
            rate = step / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * after)
            optimizer.param_groups[0]["lr"] = probe.lr * rate
            loss = nn.functional.cross_entropy(model(part), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last.append(loss.detach())
        losses[probe] = torch.stack(last[-schedule.per_epoch(n) :]).mean().item()
    return losses


def batches(x: Tensor, y: Tensor, schedule: Schedule, loader: bool) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(schedule.seed)
    for _ in range(int(schedule.epochs)):
        if loader:
            yield from DataLoader(
                TensorDataset(x, y), schedule.batch, shuffle=True, drop_last=len(y) > schedule.batch, generator=random
            )
        else:
            full = schedule.per_epoch(len(y)) * schedule.batch
            for rows in torch.randperm(len(y), generator=random)[:full].split(schedule.batch):
                yield x[rows], y[rows]


def logistic(probes: list[Probe], features: Features, labels: Labels) -> int:
    """scikit-learn on standardised features; how many iterations it took."""
    iterations = 0
    for probe in probes:
        x = features[probe.inputs[0]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer = LogisticRegression(max_iter=1000).fit((x - x.mean(0)) / x.std(0), labels)
        iterations += int(peer.n_iter_[0])
    return iterations


def measure(options: argparse.Namespace, classes: int, batch: int) -> None:
    """One table."""
    features, labels = clustered(options.images, options.width, options.layers, classes)
    probes = [Probe((name,), lr=lr, weight_decay=decay) for name in features for lr in RATES for decay in DECAYS]
    sample = probes[:: max(1, len(probes) // options.sample)][: options.sample]
    layer = probes[: len(RATES) * len(DECAYS)]
    schedule = Schedule(options.epochs, batch, warmup_epochs=1)
    half = Schedule(options.epochs, batch, warmup_epochs=1, precision="bf16")
    data = (features, labels, classes)
    methods: dict[str, tuple[int, Work]] = {
        "together": (len(probes), lambda: together(probes, schedule, *data)),
        "loop": (len(sample), lambda: one_by_one(sample, schedule, *data, loader=False)),
        "loader": (len(sample), lambda: one_by_one(sample, schedule, *data, loader=True)),
    }
    if options.bf16:
        methods["together, bf16"] = (len(layer), lambda: together(layer, half, *data))
    if batch == options.batch[0]:  # it knows no batches
        methods["scikit-learn"] = (1, lambda: logistic(probes[-1:], features, labels))
    results: dict[str, object] = {}
    taken = in_turn({name: run for name, (_, run) in methods.items()}, options.rounds, options.clock, results)
    print(
        f"\n{len(probes)} heads on {options.layers} × {options.images} × {options.width} features, {classes} classes, "
        f"batch {batch}, {options.rounds} rounds\n{'':18}{'ms per head and epoch':>22}{'of together':>28}"
    )
    each = {}
    for name, values in taken.items():
        epochs = EPOCHS if name == "scikit-learn" else options.epochs
        each[name] = [value / methods[name][0] / epochs for value in values]
        print(f"{name:18}{1e3 * statistics.median(each[name]):22.3f}{ratio(each[name], each['together']):>28}")
    ours, loop = results["together"], results["loop"]
    assert isinstance(ours, dict)
    assert isinstance(loop, dict)
    worst = max(abs(loss - ours[probe]) for probe, loss in loop.items())
    print(f"largest difference of a loss from that of the loop: {worst:.1e}")
    if "scikit-learn" in results:
        print(f"scikit-learn took {results['scikit-learn']} iterations")


def main() -> None:
    """Print the tables."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--batch", type=int, nargs="+", default=[4096, 1024, 256])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--sample", type=int, default=12, help="heads that are trained one after the other")
    parser.add_argument("--bf16", action="store_true", help="in bfloat16, too, which kills the process on some CPUs")
    options = begin(parser, images=64, width=8, layers=1, classes=[4], batch=[32], epochs=2, sample=2)
    for classes in options.classes:
        for batch in options.batch:
            measure(options, classes, batch)


if __name__ == "__main__":
    main()
