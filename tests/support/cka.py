"""CKA of the textbook, and arrays to compare."""

import numpy as np


def textbook_hsic(k: np.ndarray, l: np.ndarray) -> float:  # noqa: E741
    """HSIC₁ of Song et al. 2012, word for word, on float64 Gram matrices."""
    n = len(k)
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
    one = np.ones(n)
    middle = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
    return (np.trace(k @ l) + middle - 2 / (n - 2) * (one @ k @ l @ one)) / (n * (n - 3))


def textbook_cka(x: np.ndarray, y: np.ndarray, batch: int) -> float:
    """Ratio of sums over minibatches; features centred first, or the textbook formula itself would cancel."""
    sums = np.zeros(3)
    for rows in np.array_split(np.arange(len(x)), -(-len(x) // batch)):
        a, b = (v[rows].reshape(len(rows), -1).astype(np.float64) for v in (x, y))
        a, b = a - a.mean(0), b - b.mean(0)
        k, l = a @ a.T, b @ b.T  # noqa: E741
        sums += len(rows) * np.array([textbook_hsic(k, l), textbook_hsic(k, k), textbook_hsic(l, l)])
    return float(sums[0] / np.sqrt(sums[1] * sums[2]))


def random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)
