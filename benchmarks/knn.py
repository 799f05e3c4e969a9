"""k-NN: Sightline, plain float32 PyTorch, faiss IndexFlatIP and scikit-learn.

    python benchmarks/knn.py                  # 10,000 queries in 50,000 × 768 features, two kinds of features
    python benchmarks/knn.py --test 1000      # a tenth of the queries
    python benchmarks/knn.py --sklearn        # scikit-learn as well

`ratio` is that of the time to plain PyTorch's, round by round; memory is beyond the features. Predictions are compared
with those of plain PyTorch, which says nothing of which one is right.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from shared import arguments, begin, in_turn, peak, peer, ratio

from sightline.analyses.knn import knn_predict

K, TEMPERATURE, CLASSES, WIDTH = 20, 0.07, 100, 768
PLAIN = "torch float32"
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
    faiss = peer("faiss")
    assert faiss is not None
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(WIDTH)
    index.add(unit(train))
    similarity, rows = index.search(unit(test), K)
    return vote(similarity, rows, labels)


def scikit_learn(train: Features, labels: Labels, test: Features) -> Labels:
    """Brute force with a function for the weights."""
    from sklearn.neighbors import KNeighborsClassifier

    def weights(distance: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.exp((1 - distance) / TEMPERATURE)

    known = KNeighborsClassifier(K, metric="cosine", algorithm="brute", weights=weights)
    return known.fit(train, labels).predict(test)


Method = Callable[[Features, Labels, Features], Labels]


def measure(methods: dict[str, Method], data: Data, rounds: int, clock: str) -> None:
    """One table."""
    predicted: dict[str, Labels] = {}
    tools = {name: functools.partial(method, *data) for name, method in methods.items()}
    taken = in_turn(tools, rounds, clock, predicted)
    print(f"{'':20}{'seconds':>9}{'ratio':>22}{'same as torch':>15}{'peak MB':>9}")
    for name, tool in tools.items():
        same = (predicted[name] == predicted[PLAIN]).mean()
        time = f"{statistics.median(taken[name]):9.2f}{ratio(taken[name], taken[PLAIN]):>22}"
        print(f"{name:20}{time}{same:14.2%} {peak(tool):8.0f}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--sklearn", action="store_true")
    asked = begin(parser, train=400, test=40, sklearn=True)
    methods: dict[str, Method] = {"sightline": ours, PLAIN: plain_torch}
    methods |= {"faiss IndexFlatIP": faiss_flat} if peer("faiss") else {}
    methods |= {"scikit-learn brute": scikit_learn} if asked.sklearn else {}
    for kind in (normal, clustered):
        print(f"\n{asked.test} queries in {asked.train} × {WIDTH} {kind.__name__} features, k = {K}")
        measure(methods, kind(asked.train, asked.test), asked.rounds, asked.clock)


if __name__ == "__main__":
    main()
