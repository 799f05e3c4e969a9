"""k-NN: which class do the nearest training images have? Weighted votes of cosine neighbours, for every block.

For a test feature q and its k nearest training features tᵢ (all of length one),

    class(q) = argmax_c  Σ_{i ∈ k nearest, labelᵢ = c}  exp(q·tᵢ / T),        k = 20, T = 0.07

Source of the protocol: Wu et al. 2018, "Unsupervised Feature Learning via Non-Parametric Instance Discrimination";
k = 20 as in Caron et al. 2021, "Emerging Properties in Self-Supervised Vision Transformers".

Shapes: n training images, b test images, D width, k neighbours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from sightline.accuracy import ENDS, NOTHING, accuracy_of, accuracy_table, check_labels, figure_over_depth
from sightline.errors import InputError, counted
from sightline.neighbours import BLOCK_NUMBERS, LARGEST, Rows, predict
from sightline.plan import Cost, Plan
from sightline.pooling import Pooled, disk, every_site, flaw, shared

if TYPE_CHECKING:
    from sightline.figures import Figure

__all__ = ["Analysis", "Config", "figures", "knn_predict"]

TITLE = "k-NN accuracy"
QUESTION = "How well do the neighbours of an image, in each block, tell its class?"
FORMULA = "class(q) = argmax_c Σ exp(q·tᵢ / T) over the k nearest training features tᵢ of class c; q, tᵢ of length one"
HOW_TO_READ = (
    "Accuracy on the test split when every test image takes the class that its k most similar training images vote "
    "for. Nothing is trained, so the number speaks of the features alone: it is high where images of one class lie "
    "close together. Compare it with the line of chance and with the width of the 95 % interval; differences within "
    "the interval say nothing. Look where along the depth the curve peaks: encoders trained for reconstruction often "
    "peak before their last block, contrastive ones at the end. CLS, GAP (mean of all tokens) and GAP without CLS "
    "(mean of the patches) may differ widely in one block. Compare only numbers of the same protocol and images."
)
SOURCE = (
    'Wu, Xiong, Yu, Lin 2018, "Unsupervised Feature Learning via Non-Parametric Instance Discrimination" (weighted '
    "votes, T = 0.07); "
    'Caron et al. 2021, "Emerging Properties in Self-Supervised Vision Transformers" (k = 20)'
)
SITES = ("block.*", "norm", "decoder.block.*")
PROJECTION = ("head.*",)
SPLITS = ("train", "test")
ANY_SITE = True
BY_DEFAULT = True
INVARIANT_TO = frozenset({"rotation", "scale", "batching", "order"})

Array = TypeVar("Array", Tensor, np.ndarray[Any, Any])


@dataclass(frozen=True)
class Config:
    """k neighbours, and the temperature of their votes."""

    k: int = 20
    temperature: float = 0.07

    def __post_init__(self) -> None:
        check_votes(self.k, self.temperature)


def views(config: Config, split: str) -> tuple[str, ...]:
    """The images as they are."""
    return ("plain",)


# ---------------------------------------------------------------------------------------------------------------
# The pure function


def check_votes(k: int, temperature: float) -> None:
    """Numbers of neighbours and temperatures that cannot be are an InputError."""
    if k < 1:
        raise InputError(f"k-NN needs k of at least 1, not {k}")
    if not temperature > 0:
        raise InputError(f"k-NN needs a temperature above 0, not {temperature}")


def knn_predict(
    train: Tensor | np.ndarray[Any, Any],
    labels: Array,
    test: Tensor | np.ndarray[Any, Any],
    k: int = 20,
    temperature: float = 0.07,
) -> Array:
    """Class of each test feature: votes of its k nearest training features by cosine, weighted exp(cosine / T).

    >>> train = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    >>> knn_predict(train, np.array(["cat", "cat", "dog"]), np.array([[2.0, 0.1], [0.1, 3.0]]), k=1)
    array(['cat', 'dog'], dtype='<U3')

    Labels may be any values that can be sorted; the answer has their type. With fewer than k training features all
    of them vote. Ties (similarities within 3e-11, votes within one part in 1e9): the smaller training row is the
    nearer one, the smaller label wins. A feature of zeros has similarity 0 with everything. NaN and infinity are an
    error. Memory beside the input: some 0.5 GB whatever the number of features.
    """
    check_votes(k, temperature)
    rows, queries = Rows(train, "training"), Rows(test, "test")
    width, wanted = rows.values.shape[1], queries.values.shape[1]
    if width != wanted:
        raise InputError(f"k-NN got training features of width {width} and test features of width {wanted}")
    if not 0 < len(rows.values) == len(labels) <= LARGEST:
        raise InputError(
            f"k-NN got {counted(len(rows.values), 'training feature')} and {counted(len(labels), 'label')}; "
            "one label for each"
        )
    if isinstance(labels, Tensor):
        classes, codes = torch.unique(labels, return_inverse=True)
        winners: Tensor = classes[predict(rows, codes, queries, k, temperature).to(classes.device)]
        return winners
    names, inverse = np.unique(np.asarray(labels), return_inverse=True)
    chosen: np.ndarray[Any, Any] = names[
        predict(rows, torch.from_numpy(inverse), queries, k, temperature).cpu().numpy()
    ]
    return chosen


# ---------------------------------------------------------------------------------------------------------------
# The streaming analysis


class Analysis(Pooled):
    """Writes pooled features of the pass to disk; the neighbours are looked for at the end."""

    def __init__(self, config: Config, plan: Plan) -> None:
        check_labels(plan.images, SPLITS, "k-NN", "knn")
        super().__init__(plan, SPLITS, every_site(plan))
        self.config = config

    def compute(self) -> xr.Dataset:
        """Accuracy of every encoder, site and feature, with its interval and the reason where there is none."""
        self.finish()
        chosen = list(dict.fromkeys(which[:3] for which in self.files))
        scores = shared(chosen, lambda names: self._score(*names))
        names = [f"accuracy{end}" for end in ENDS]
        return self.dataset(names, dict(zip(chosen, scores, strict=True))).assign_attrs(self._protocol())

    def _score(self, encoder: str, site: str, feature: str) -> tuple[tuple[float, float, float], str]:
        train, test = (self.features(encoder, site, feature, "plain", split) for split in SPLITS)
        if why := flaw(train, "train") or flaw(test, "test", constant=False):
            return NOTHING, why
        labels, truth = (self.labels(split) for split in SPLITS)
        predicted = knn_predict(np.asarray(train), labels, np.asarray(test), self.config.k, self.config.temperature)
        return accuracy_of(predicted, truth), ""

    def _protocol(self) -> dict[str, Any]:
        """What makes the number comparable with another one (TRAPS 17)."""
        train, test = (self.labels(split) for split in SPLITS)
        protocol = {
            "k": self.config.k,
            "temperature": self.config.temperature,
            "weighting": "exp(cosine / temperature)",
            "normalisation": "L2",
        }
        classes = len(np.unique(train))
        return {
            "protocol": json.dumps(protocol),
            **protocol,
            "interval": "95 % Wilson",
            "splits": f"neighbours from {SPLITS[0]}, accuracy on {SPLITS[1]}",
            "n_train": len(train),
            "n_test": len(test),
            "classes": classes,
            "chance": 1 / classes,
            "majority": float(np.unique(test, return_counts=True)[1].max() / len(test)),
        }


def cost(config: Config, plan: Plan) -> Cost:
    """Blocks of features and similarities in memory; on disk the features that are not there yet."""
    return Cost(memory=60 * BLOCK_NUMBERS, disk=disk(plan, SPLITS, every_site(plan)))


def figures(result: xr.Dataset) -> list[Figure]:
    """Accuracy over depth: a panel for each feature, a colour for each encoder, chance as a line."""
    caption = (
        f"k = {result.attrs['k']}, votes weighted exp(cosine / {result.attrs['temperature']}), "
        f"{result.attrs['n_train']} training and {result.attrs['n_test']} test images; bands are 95 % Wilson intervals."
    )
    return figure_over_depth(result, "k-NN accuracy", caption, "chance")


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    """Best site and feature of each encoder: (label, number, detail)."""
    table = accuracy_table(result)
    best = table.loc[table.groupby("encoder", sort=False).accuracy.idxmax()] if len(table) else table
    return [
        (
            str(row.encoder),
            f"{row.accuracy:.1%}",
            f"best at {row.site}, feature {row.feature}, 95 % {row.accuracy_low:.1%} – {row.accuracy_high:.1%}",
        )
        for row in best.itertuples()
    ]
