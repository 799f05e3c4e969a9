"""k-NN: which class do the nearest training images have? Weighted votes of cosine neighbours, for every block.

For a test feature q and its k nearest training features tᵢ (all of length one),

    class(q) = argmax_c  Σ_{i ∈ k nearest, labelᵢ = c}  exp(q·tᵢ / T),        k = 20, T = 0.07

Source of the protocol: Wu et al. 2018, "Unsupervised Feature Learning via Non-Parametric Instance Discrimination";
k = 20 as in Caron et al. 2021, "Emerging Properties in Self-Supervised Vision Transformers".

Shapes: n training images, b test images, D width, k neighbours.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from sightline.core.processes import shared
from sightline.core.results import ENDS, NOTHING
from sightline.measure.estimators.intervals import accuracy_of
from sightline.measure.estimators.neighbours import BLOCK_NUMBERS, check_votes
from sightline.measure.estimators.neighbours import knn_predict as knn_predict
from sightline.measure.groups import GROUPS
from sightline.measure.plan import Cost, Plan
from sightline.measure.pooled import Pooled, disk, every_site, flaw
from sightline.measure.request import check_labels
from sightline.report.figures import FIRST, Figure, KeyNumber, accuracy_over_depth, accuracy_table, key_number

TOPIC = "separable"
TITLE = "k-NN accuracy"
QUESTION = "How well do the nearest neighbours of an image, in each block, predict its class?"
FORMULA = "class(q) = argmax_c Σ exp(q·tᵢ / T) over the k nearest training features tᵢ of class c; q, tᵢ of length one"
HOW_TO_READ = (
    "Accuracy on the test split when every test image takes the class that its k most similar training images vote "
    "for. Nothing is trained, so the number describes the features alone: it is high where images of one class lie "
    "close together. Compare it with chance and with the 95 % interval; differences within "
    "the interval mean nothing. Look where along the depth the curve peaks: encoders trained for reconstruction often "
    "peak before their last block, contrastive ones at the end. CLS, GAP (mean of all tokens) and GAP without CLS "
    "(mean of the patches) may differ widely in one block. The highest of all layers is a little above what this layer "
    "has on other images, since it was found on these; therefore it has no interval. To choose a layer, use probes, "
    "which choose on other images. Compare only numbers of the same protocol and images."
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


@dataclass(frozen=True)
class KnnConfig:
    """k neighbours, and the temperature of their votes."""

    k: int = 20
    temperature: float = 0.07

    def __post_init__(self) -> None:
        check_votes(self.k, self.temperature)


# The streaming analysis


class KnnAnalysis(Pooled):
    """Writes pooled features of the pass to disk; the neighbours are looked for at the end."""

    def __init__(self, config: KnnConfig, plan: Plan) -> None:
        check_labels(plan.images, SPLITS, "k-NN", "knn")
        super().__init__(plan, SPLITS, every_site(plan))
        self.config = config

    def compute(self) -> xr.Dataset:
        self.finish()
        chosen = list(dict.fromkeys(which[:3] for which in self.files))
        scores = shared(chosen, lambda names: self._score(*names))
        both = ("accuracy", "top5_accuracy")
        names = [f"{name}{end}" for name in both for end in ENDS]
        answers = {at: (numbers, why) for at, (numbers, why, _) in zip(chosen, scores, strict=True)}
        result = self.dataset(names, answers).assign_attrs(self._protocol())
        right = {at: of_groups for at, (*_, of_groups) in zip(chosen, scores, strict=True)}
        return self.with_right(result, "test", right, both)

    def _score(self, encoder: str, site: str, feature: str) -> tuple[tuple[float, ...], str, npt.NDArray[np.float64]]:
        """Accuracies with their intervals, why there are none, and right decisions by groups of images."""
        train, test = (self.features(encoder, site, feature, "plain", split) for split in SPLITS)
        if why := flaw(train, "train") or flaw(test, "test", constant=False):
            return (*NOTHING, *NOTHING), why, np.zeros((2, GROUPS))
        labels, truth = (self.labels(split) for split in SPLITS)
        predicted = knn_predict(train, labels, test, self.config.k, self.config.temperature, top=5, device=self.device)
        first, among = predicted[:, 0], (predicted == truth[:, None]).any(1)
        numbers = (*accuracy_of(first, truth), *accuracy_of(among, np.ones_like(among)))
        return numbers, "", self.by_group("test", np.stack([first == truth, among], 1)).T

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


def cost(config: KnnConfig, plan: Plan) -> Cost:
    return Cost(memory=60 * BLOCK_NUMBERS, disk=disk(plan, SPLITS, every_site(plan)))


def figures(result: xr.Dataset) -> list[Figure]:
    caption = (
        f"k = {result.attrs['k']}, votes weighted exp(cosine / {result.attrs['temperature']}), "
        f"{result.attrs['n_train']} training and {result.attrs['n_test']} test images; bands are 95 % Wilson intervals."
    )
    top1 = accuracy_over_depth(result, "k-NN accuracy", caption, "chance")
    if result.attrs["classes"] <= 5:
        return top1
    five = result.drop_vars([f"accuracy{end}" for end in ENDS])
    five = five.rename({f"top5_accuracy{end}": f"accuracy{end}" for end in ENDS})
    five = five.assign_attrs(chance=5 / result.attrs["classes"])
    caption = f"Share of images whose class is among the five with the most votes; {caption}"
    drawn = accuracy_over_depth(five, "k-NN top-5 accuracy", caption, "chance")
    return [*top1, *(replace(figure, name="top5") for figure in drawn)]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    table = accuracy_table(result)
    best = table.loc[table.groupby("encoder", sort=False).accuracy.idxmax()] if len(table) else table
    of = {str(name): len(rows) for name, rows in table.groupby("encoder")}
    return [
        (
            str(row.encoder),
            f"{row.accuracy:.1%}",
            f"the highest of {of[str(row.encoder)]} on {SPLITS[1]}, at {row.site}, feature {row.feature}"
            + (f"; top-5 {_top5(result, row):.1%}" if result.attrs["classes"] > 5 else ""),
        )
        for row in best.itertuples()
    ]


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    """Accuracy at the best site and feature, which has no interval: it was chosen on the same images."""
    about = f"highest k-NN accuracy of all layers and features on {SPLITS[1]}"
    numbers = key_number(
        result, "accuracy", at="highest", title="best k-NN", about=about, style=".1%", best="highest", place=FIRST
    )
    return [replace(number, ends={}) for number in numbers]


def _top5(result: xr.Dataset, row: Any) -> float:
    """Top-5 accuracy where a row of the table is."""
    return float(result.top5_accuracy.sel(encoder=row.encoder, site=row.site, feature=row.feature))
