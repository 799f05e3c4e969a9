"""Exact nearest neighbours by cosine, fast, and the votes of a k-NN classifier.

The neighbours are those of the float64 cosine, whatever the features. A float32 product finds candidates, float64
ranks them, and a bound on the float32 error proves for each query that no other row can be among its k nearest;
the few queries without proof (near-duplicates) are done again wholly in float64.

A neighbour is one int64 number: its similarity in steps of 2⁻³⁵ in the high bits, and in the low bits its row,
counted backwards. Larger number = nearer, and at equal similarity the smaller row: ties need no code of their own.

Shapes: n training rows, b queries, D width, k neighbours.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sightline.core.arrays import Array
from sightline.core.errors import InputError, counted

STEP: float = 2**-35
ROW_BITS = 26
ROW_MASK = (1 << ROW_BITS) - 1
LARGEST = ROW_MASK  # most training rows that a key can tell apart
MARGIN = 4  # candidates beyond k; more of them prove more queries, and cost more in float64
BLOCK_NUMBERS = 2**23  # of a block of features; a block of 768 wide features is 32 MiB in float32
QUERIES = 1024  # rows of a block of similarities


@torch.no_grad()
def predict(train: Rows, codes: Tensor, test: Rows, k: int, temperature: float, top: int = 1) -> Tensor:
    """Codes of the classes with the most votes for each test row, (n, top), most first."""
    k = min(k, len(train))
    codes = codes.to(train.device)
    winners = [codes.new_empty(0, top)]
    for block in test.blocks():
        keys = nearest(train, test.unit(block).to(train.device), k)
        parts = torch.split(keys, max(1, BLOCK_NUMBERS // (k * k)))
        winners += [_vote(part, codes, temperature, top) for part in parts]
    return torch.cat(winners)


def nearest(train: Rows, queries: Tensor, k: int) -> Tensor:
    """Keys (b, k) of the nearest training rows of unit queries (b, D), nearest first."""
    count, width = train.shape
    # Subtracting one vector from all training rows changes no query's ranking, and shrinks what float32 rounds.
    centre = train.unit(slice(0, count, max(1, count // 1024))).mean(0)
    scanned, spread = _sweep(train, queries.float(), min(k + MARGIN, count), centre)
    keys = _rank(train, queries, scanned, k)
    if count > k + MARGIN:
        # |fl(q̂·t̂) − q·t| ≤ (D + 2)u‖t‖ to first order in u for t = row − centre: rounding of q and t, any order of
        # summation (Higham 2002, eq. 3.5). Matrix products that the user lets round to bfloat16 lose 2⁻⁷ more.
        coarse = 0.0 if torch.get_float32_matmul_precision() == "highest" else 2**-6
        error = 1.1 * ((width + 16) * 2**-24 + coarse) * spread + 4 * STEP
        unproved = _similarity(keys[:, -1]) <= _similarity(scanned[:, -1]) + queries @ centre + error
        if unproved.any():
            keys[unproved] = _sweep(train, queries[unproved], k, torch.zeros_like(centre))[0]
    return keys


def _sweep(train: Rows, queries: Tensor, k: int, centre: Tensor) -> tuple[Tensor, float]:
    """Keys (b, k) of the largest q·(t − centre) in the precision of the queries, and the largest ‖t − centre‖."""
    best = torch.full((len(queries), k), torch.iinfo(torch.int64).min, device=queries.device)
    spread = 0.0
    for block in train.blocks():
        centred = train.unit(block).sub_(centre)  # (block, D) float64
        spread = max(spread, float(torch.linalg.vector_norm(centred, dim=1).max()))
        centred = centred.to(queries.dtype)
        for start in range(0, len(queries), QUERIES):
            part = slice(start, start + QUERIES)
            nearest = _top(queries[part] @ centred.T, block.start, k)
            best[part] = torch.cat([best[part], nearest], 1).topk(k).values
    return best, spread


def _top(scores: Tensor, first: int, k: int) -> Tensor:
    """Keys of the k largest scores of each row; of equal float64 scores those of the first rows, of float32 any."""
    k = min(k, scores.shape[1])
    if scores.dtype == torch.float64:
        return _keys(scores, torch.arange(first, first + scores.shape[1], device=scores.device)).topk(k).values
    values, at = scores.topk(k)
    return _keys(values, at + first)


def _rank(train: Rows, queries: Tensor, candidates: Tensor, k: int) -> Tensor:
    """Keys of the k nearest among the candidates, by float64 cosine."""
    ranked = []
    for part, keys in zip(*(torch.split(x, QUERIES // 2) for x in (queries, candidates)), strict=True):
        rows = row_of(keys)
        chosen = train.take(rows.flatten()).double().view(*rows.shape, -1)  # (b, k + margin, D)
        cosine = torch.bmm(chosen, part.unsqueeze(2)).squeeze(2) / train.length[rows]
        ranked.append(_keys(cosine, rows).topk(k).values)
    return torch.cat(ranked)


def _vote(keys: Tensor, codes: Tensor, temperature: float, top: int) -> Tensor:
    """Codes of the classes with the largest sums of exp(cosine / T), (b, top); of equal sums the smallest code first.

    Where fewer classes have votes, the last one of them is repeated.
    """
    similarity, label = _similarity(keys), codes[row_of(keys)]  # (b, k)
    weight = ((similarity - similarity[:, :1]) / temperature).exp()  # the shift cancels, and keeps exp finite
    same = label.unsqueeze(1) == label.unsqueeze(2)  # (b, k, k)
    votes = (weight.unsqueeze(1) * same).sum(2)
    winners: list[Tensor] = []
    for _ in range(top):
        wins = votes >= votes.amax(1, keepdim=True) * (1 - 1e-9)
        winner = label.masked_fill(~wins, len(codes)).amin(1)
        if winners:
            winner = torch.where(votes.amax(1) > 0, winner, winners[-1])
        winners.append(winner)
        votes = votes.masked_fill(label == winner.unsqueeze(1), 0.0)
    return torch.stack(winners, 1)


def _keys(similarity: Tensor, row: Tensor) -> Tensor:
    return (similarity.double() / STEP).round_().long().mul_(1 << ROW_BITS).add_(ROW_MASK - row)


def _similarity(keys: Tensor) -> Tensor:
    return (keys >> ROW_BITS).double() * STEP


def row_of(keys: Tensor) -> Tensor:
    """Training rows that the keys stand for."""
    return ROW_MASK - (keys & ROW_MASK)


@runtime_checkable
class OnDisk(Protocol):
    """Rows that are read when they are needed, such as `pooled.Matrix`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""

    def __getitem__(self, part: slice, /) -> np.ndarray[Any, Any]: ...

    def some(self, chosen: np.ndarray[Any, Any], /) -> OnDisk:
        """These of its rows."""


class Rows:
    """Features (n, D) in memory or on disk, read in blocks to where they are compared, and the length of each row."""

    def __init__(
        self,
        features: Tensor | np.ndarray[Any, Any] | OnDisk,
        what: str = "training",
        device: torch.device | str | None = None,
    ) -> None:
        on_disk = isinstance(features, OnDisk) and not isinstance(features, (np.ndarray, Tensor))
        self.values: Tensor | OnDisk = features if on_disk else _matrix(features, what)  # type: ignore[assignment,arg-type]
        here = self.values.device if isinstance(self.values, Tensor) else torch.device("cpu")
        self.device = here if device is None else torch.device(device)

    @property
    def shape(self) -> tuple[int, int]:
        count, width = self.values.shape
        return count, width

    def __len__(self) -> int:
        return self.shape[0]

    def blocks(self) -> Iterator[slice]:
        """Slices of rows, small enough for the memory whatever the number of rows."""
        count, width = self.shape
        size = max(QUERIES, BLOCK_NUMBERS // max(1, width))
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))

    def read(self, rows: slice) -> Tensor:
        """Consecutive rows, or every n-th one."""
        part = self.values[rows]
        return (part if isinstance(part, Tensor) else torch.from_numpy(part)).to(self.device)

    def take(self, rows: Tensor) -> Tensor:
        """Rows by their numbers."""
        if isinstance(self.values, Tensor):
            return self.values.index_select(0, rows.to(self.values.device)).to(self.device)
        return torch.from_numpy(self.values.some(rows.numpy(force=True))[:]).to(self.device)

    @cached_property
    def length(self) -> Tensor:
        """Euclidean norms, float64, 1 for a row of zeros."""
        norms = [torch.linalg.vector_norm(self._floats(b), dim=1, dtype=torch.float64) for b in self.blocks()]
        length = torch.cat(norms) if norms else torch.zeros(0, dtype=torch.float64, device=self.device)
        bad = int((~length.isfinite()).sum())
        if bad:
            raise InputError(f"k-NN needs finite features, but NaN or infinity is in {bad} of {len(length)} rows")
        return length.masked_fill_(length == 0, 1)

    def _floats(self, rows: slice) -> Tensor:
        part = self.read(rows)
        return part if part.is_floating_point() else part.double()

    def unit(self, rows: slice) -> Tensor:
        """Rows of length one, a new float64 tensor."""
        return self.read(rows) / self.length[rows, None]


def _matrix(features: Tensor | np.ndarray[Any, Any], what: str) -> Tensor:
    """Features as a tensor that shares the memory, or the memory map, of what was given."""
    if isinstance(features, np.ndarray) and features.dtype.kind in "fiub":
        if not features.dtype.isnative or any(stride < 0 for stride in features.strides):
            features = features.astype(features.dtype.newbyteorder("="), order="C")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "not writable": a map of a file is not written to here
            features = torch.from_numpy(features)
    if not isinstance(features, Tensor) or features.ndim != 2 or features.is_complex() or not features.shape[1]:
        shape = tuple(getattr(features, "shape", ()))
        raise InputError(
            f"k-NN needs {what} features as a real numpy array or tensor (images, width), "
            f"not {type(features).__name__} of shape {shape}"
        )
    return features.detach()


# The pure function


def check_votes(k: int, temperature: float) -> None:
    """Numbers of neighbours and temperatures that cannot be are an InputError."""
    if k < 1:
        raise InputError(f"k-NN needs k of at least 1, not {k}")
    if not temperature > 0:
        raise InputError(f"k-NN needs a temperature above 0, not {temperature}")


def knn_predict(
    train: Tensor | np.ndarray[Any, Any] | OnDisk,
    labels: Array,
    test: Tensor | np.ndarray[Any, Any] | OnDisk,
    k: int = 20,
    temperature: float = 0.07,
    device: torch.device | str | None = None,
    top: int = 1,
) -> Array:
    """Class of each test feature: votes of its k nearest training features by cosine, weighted exp(cosine / T).

    >>> train = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    >>> knn_predict(train, np.array(["cat", "cat", "dog"]), np.array([[2.0, 0.1], [0.1, 3.0]]), k=1)
    array(['cat', 'dog'], dtype='<U3')

    Labels may be any values that can be sorted; the answer has their type. With fewer than k training features all
    of them vote. Ties (similarities within 3e-11, votes within one part in 1e9): the smaller training row is the
    nearer one, the smaller label wins. A feature of zeros has similarity 0 with everything. NaN and infinity are an
    error. Memory beside the input: some 0.5 GB whatever the number of features. They are compared on `device`, or where
    the training features are. With `top` above 1 the classes with the most votes, (n, top), most first; where fewer
    have any, the last of them is repeated.
    """
    check_votes(k, temperature)
    if top < 1:
        raise InputError(f"k-NN gives at least one class for each feature, not {top}")
    rows, queries = Rows(train, "training", device), Rows(test, "test", device)
    width, wanted = rows.shape[1], queries.shape[1]
    if width != wanted:
        raise InputError(f"k-NN got training features of width {width} and test features of width {wanted}")
    if not 0 < len(rows) == len(labels) <= LARGEST:
        raise InputError(
            f"k-NN got {counted(len(rows), 'training feature')} and {counted(len(labels), 'label')}; one label for each"
        )
    if isinstance(labels, Tensor):
        classes, codes = torch.unique(labels, return_inverse=True)
        winners: Tensor = classes[predict(rows, codes, queries, k, temperature, top).to(classes.device)]
        return winners if top > 1 else winners[:, 0]
    names, inverse = np.unique(np.asarray(labels), return_inverse=True)
    codes = predict(rows, torch.from_numpy(inverse), queries, k, temperature, top)
    chosen: np.ndarray[Any, Any] = names[codes.cpu().numpy()]
    return chosen if top > 1 else chosen[:, 0]
