"""k-NN: Sightline, plain float32 PyTorch, faiss IndexFlatIP and scikit-learn, interleaved in one run.

    python benchmarks/knn.py                  # 10,000 queries in 50,000 × 768 features, two kinds of features
    python benchmarks/knn.py --quick          # a tenth of the queries
    python benchmarks/knn.py --sklearn        # scikit-learn as well

Every round measures all of them once, in another order; the table shows the fastest round and the ratio to faiss.
Peak memory is that of a process of its own, beyond the features. Predictions are compared with faiss.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import platform
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from sightline.measure.estimators.neighbours import knn_predict

K, TEMPERATURE, CLASSES, WIDTH = 20, 0.07, 100, 768
Features = NDArray[np.float32]
Labels = NDArray[np.int64]
Data = tuple[Features, Labels, Features]


def normal(train: int, test: int) -> Data:
    """Independent normal numbers: the neighbours mean nothing, and lie close to each other's distance."""
    random = np.random.default_rng(0)
    every = random.standard_normal((train + test, WIDTH), dtype=np.float32)
    return every[:train], random.integers(0, CLASSES, train), every[train:]


def clustered(train: int, test: int) -> Data:
    """As a trained encoder gives them: classes, a falling spectrum and a mean that is longer than the rest."""
    random = np.random.default_rng(1)
    spectrum = (1 / np.sqrt(np.arange(1, WIDTH + 1))).astype(np.float32)
    centres = random.standard_normal((CLASSES, WIDTH), dtype=np.float32) * spectrum
    labels = random.integers(0, CLASSES, train + test)
    every = random.standard_normal((train + test, WIDTH), dtype=np.float32) * spectrum
    every += 0.7 * centres[labels] + 0.3 * random.standard_normal(WIDTH, dtype=np.float32)
    return every[:train], labels[:train], every[train:]


def vote(similarity: Features, rows: NDArray[np.int64], labels: Labels) -> Labels:
    """Votes from neighbours that another library has found."""
    votes = np.zeros((len(rows), CLASSES))
    weights = np.exp(similarity.astype(np.float64) / TEMPERATURE)
    np.add.at(votes, (np.arange(len(rows))[:, None], labels[rows]), weights)
    return votes.argmax(1)


def unit(features: Features) -> Features:
    """Rows of length one."""
    return torch.nn.functional.normalize(torch.from_numpy(features), dim=1).numpy()


def ours(train: Features, labels: Labels, test: Features) -> Labels:
    """Sightline, from raw features."""
    return knn_predict(train, labels, test, K, TEMPERATURE)


def plain_torch(train: Features, labels: Labels, test: Features) -> Labels:
    """What one would write: product and topk, 512 queries at a time."""
    rows, queries = torch.from_numpy(unit(train)), torch.from_numpy(unit(test))
    found = [(part @ rows.T).topk(K) for part in queries.split(512)]
    return vote(torch.cat([f.values for f in found]).numpy(), torch.cat([f.indices for f in found]).numpy(), labels)


def faiss_flat(train: Features, labels: Labels, test: Features) -> Labels:
    """Exact inner products of normalised features."""
    index = faiss.IndexFlatIP(WIDTH)
    index.add(unit(train))
    similarity, rows = index.search(unit(test), K)
    return vote(similarity, rows, labels)


def scikit_learn(train: Features, labels: Labels, test: Features) -> Labels:
    """Brute force with a function for the weights."""
    from sklearn.neighbors import KNeighborsClassifier

    def weights(distance: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.exp((1 - distance) / TEMPERATURE)

    peer = KNeighborsClassifier(K, metric="cosine", algorithm="brute", weights=weights)
    return peer.fit(train, labels).predict(test)


def peak(method: Callable[..., Labels], kind: Callable[..., Data], train: int, test: int, answer: object) -> None:
    """Memory of one run beyond the features themselves, in MB; runs in a process of its own."""
    setup()
    data = kind(train, test)
    method(data[0][:2000], data[1][:2000], data[2][:100])  # libraries loaded, threads started
    before, seen, over = resident(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            seen.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    method(*data)
    over.set()
    watcher.join()
    answer.put((max(seen) - before) / 1e6)  # type: ignore[attr-defined]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_peak(method: Callable[..., Labels], kind: Callable[..., Data], train: int, test: int) -> float:
    """Start `peak` in a fresh process and wait for its number."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=peak, args=(method, kind, train, test, answer))
    process.start()
    value: float = answer.get()
    process.join()
    return value


def setup() -> int:
    """The same number of threads for all."""
    threads = torch.get_num_threads()
    faiss.omp_set_num_threads(threads)
    return threads


def machine() -> str:
    """The processor and what PyTorch uses of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sklearn", action="store_true")
    options = parser.parse_args()
    train, test = options.train, options.test // (10 if options.quick else 1)
    methods = {"sightline": ours, "torch float32": plain_torch, "faiss IndexFlatIP": faiss_flat}
    if options.sklearn:
        methods["scikit-learn brute"] = scikit_learn
    print(
        f"{datetime.date.today()}, {machine()}, {setup()} threads, torch {torch.__version__}, faiss {faiss.__version__}"
    )
    print(f"{test} queries in {train} × {WIDTH} features, k = {K}, fastest of {options.rounds} rounds")
    for kind in (normal, clustered):
        data = kind(train, test)
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        predicted: dict[str, Labels] = {}
        for turn in range(options.rounds):
            for name in list(methods)[turn % len(methods) :] + list(methods)[: turn % len(methods)]:
                start = time.perf_counter()
                predicted[name] = methods[name](*data)
                seconds[name].append(time.perf_counter() - start)
        print(f"\n{kind.__name__} features\n{'':20}{'seconds':>9}{'of faiss':>10}{'same as faiss':>15}{'peak MB':>9}")
        for name, method in methods.items():
            best, same = min(seconds[name]), predicted[name] == predicted["faiss IndexFlatIP"]
            memory = measure_peak(method, kind, train, test)
            ratio = best / min(seconds["faiss IndexFlatIP"])
            print(f"{name:20}{best:9.2f}{ratio:10.2f}{same.mean():14.2%} {memory:8.0f}", flush=True)


if __name__ == "__main__":
    main()
