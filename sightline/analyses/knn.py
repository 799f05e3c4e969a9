"""k-NN: which class do the nearest training images have? Weighted votes of cosine neighbours, for every block.

For a test feature q and its k nearest training features tᵢ (all of length one),

    class(q) = argmax_c  Σ_{i ∈ k nearest, labelᵢ = c}  exp(q·tᵢ / T),        k = 20, T = 0.07

Source of the protocol: Wu et al. 2018, "Unsupervised Feature Learning via Non-Parametric Instance Discrimination";
k = 20 as in Caron et al. 2021, "Emerging Properties in Self-Supervised Vision Transformers".

Shapes: n training images, b test images, D width, k neighbours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torchmetrics
import xarray as xr
from torch import Tensor

from sightline.errors import InputError
from sightline.features import Features, describe_features, reserve
from sightline.neighbours import BLOCK_NUMBERS, LARGEST, Rows, predict
from sightline.plan import Cost, Key, Plan
from sightline.run import ABSENT
from sightline.sites import block_number, layer_type, token_view, union_of_sites

if TYPE_CHECKING:
    from sightline.encoder import Encoder
    from sightline.figures import Figure
    from sightline.images import Batch, Images

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
SITES = ("block.*", "norm")
SPLITS = ("train", "test")
VIEWS = ("plain",)
INVARIANT_TO = frozenset({"rotation", "scale", "batching", "order"})
FEATURES = {"cls": "cls", "gap": "gap", "gap_without_cls": "mean"}  # our name -> token view

Array = TypeVar("Array", Tensor, np.ndarray[Any, Any])


@dataclass(frozen=True)
class Config:
    """k neighbours, and the temperature of their votes."""

    k: int = 20
    temperature: float = 0.07

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"k-NN needs k of at least 1, not {self.k}")
        if not self.temperature > 0:
            raise InputError(f"k-NN needs a temperature above 0, not {self.temperature}")


# ---------------------------------------------------------------------------------------------------------------
# The pure function


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
    Config(k, temperature)
    rows, queries = Rows(train, "training"), Rows(test, "test")
    width, wanted = rows.values.shape[1], queries.values.shape[1]
    if width != wanted:
        raise InputError(f"k-NN got training features of width {width} and test features of width {wanted}")
    if not 0 < len(rows.values) == len(labels) <= LARGEST:
        raise InputError(f"k-NN got {len(rows.values)} training features and {len(labels)} labels; one label for each")
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


class Analysis(torchmetrics.Metric):
    """Writes pooled features of the pass to disk; the neighbours are looked for at the end."""

    full_state_update = False
    seen: Tensor  # (splits,) images whose features were written

    def __init__(self, config: Config, plan: Plan) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        check_labels(plan.images)
        self.files = {(e, s, f, split): entry for e, s, f, split, entry in entries(plan)}
        self.reserved = False
        self.add_state("seen", torch.zeros(len(SPLITS), dtype=torch.int64), dist_reduce_fx="sum")

    def reduce(self, key: Key, activation: Tensor) -> dict[str, Tensor]:
        """Pooled vectors (B, D), copied: the activation itself does not outlive its layer."""
        found = pooled(activation, self.plan.encoders[key.encoder])
        return {feature: vector.to("cpu", torch.float32, copy=True) for feature, vector in found.items()}

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        """Write the rows of this batch."""
        if batch.split not in SPLITS:
            return
        if not self.reserved:  # not before the pass has told its cost and checked the disk
            reserve(self.files.values())
            self.reserved = True
        rows = batch.rows.numpy(force=True)
        for key, found in reductions.items():
            for feature, vector in found.items():
                self.files[key.encoder, key.site, feature, batch.split].write(rows, vector.numpy(force=True))
        self.seen[SPLITS.index(batch.split)] += len(rows)

    def compute(self) -> xr.Dataset:
        """Accuracy of every encoder, site and feature, with its interval and the reason where there is none."""
        self._finish()
        encoders, sites = list(self.plan.sites), union_of_sites(self.plan.sites)
        chosen = list(dict.fromkeys(key[:3] for key in self.files))
        place = {"encoder": encoders, "site": sites, "feature": list(FEATURES)}
        accuracy = np.full((3, len(encoders), len(sites), len(FEATURES)), np.nan)
        reason = np.full(accuracy.shape[1:], ABSENT, dtype=object)
        for e, encoder in enumerate(encoders):
            for site in self.plan.sites[encoder]:
                reason[e, sites.index(site)] = "this site has no such feature"
        for (encoder, site, feature), (values, why) in zip(chosen, self._shared(chosen), strict=True):
            at = encoders.index(encoder), sites.index(site), list(FEATURES).index(feature)
            accuracy[(slice(None), *at)], reason[at] = values, why
        names = ("accuracy", "accuracy_low", "accuracy_high")
        data = {name: (tuple(place), values) for name, values in zip(names, accuracy, strict=True)}
        return xr.Dataset(
            {**data, "reason": (tuple(place), reason.astype(str))},
            coords={
                **place,
                "layer_type": ("site", [layer_type(site) for site in sites]),
                "block": ("site", [block_number(site) for site in sites]),
            },
            attrs=self._protocol(),
        )

    def _finish(self) -> None:
        """All processes have written their rows: one of them closes the files."""
        _barrier()
        for (_, _, _, split), entry in self.files.items():
            expected = int(self.seen[SPLITS.index(split)])
            if expected == 0:
                raise InputError(
                    f"None of the {split} images of {self.plan.images.name} could be read; k-NN needs some"
                )
            if not entry.complete and (not entry.exists or int(entry.written().sum()) != expected):
                raise InputError(
                    f"The feature cache in {str(entry.cache)!r} lost rows of an interrupted pass; "
                    "delete the folder 'cache' of the run and give the same command again"
                )
        _barrier()
        if _process()[0] == 0:
            for entry in self.files.values():
                entry.finish()
        _barrier()

    def _shared(self, chosen: list[tuple[str, str, str]]) -> list[tuple[tuple[float, float, float], str]]:
        """Scores of all entries; processes share the work."""
        rank, world = _process()
        own = [self._score(*names) for names in chosen[rank::world]]
        if world == 1:
            return own
        parts: list[Any] = [None] * world
        torch.distributed.all_gather_object(parts, own)
        return [parts[i % world][i // world] for i in range(len(chosen))]

    def _score(self, encoder: str, site: str, feature: str) -> tuple[tuple[float, float, float], str]:
        (train, labels), (test, truth) = (self._labelled(encoder, site, feature, split) for split in SPLITS)
        nothing = (math.nan, math.nan, math.nan)
        for split, values in zip(SPLITS, (train, test), strict=True):
            if bad := len(values) - sum(int(np.isfinite(part).all(1).sum()) for part in _parts(values)):
                return nothing, f"{bad} of {len(values)} {split} features are not finite (NaN or infinity)"
        if all((part == train[0]).all() for part in _parts(train)):
            return nothing, "the features are the same for all training images"
        predicted = knn_predict(train, labels, test, self.config.k, self.config.temperature)
        right = int((predicted == truth).sum())
        return (right / len(truth), *wilson(right, len(truth))), ""

    def _labelled(self, encoder: str, site: str, feature: str, split: str) -> tuple[Any, Any]:
        """Features and labels of the images that could be read and have a label."""
        values, valid = self.files[encoder, site, feature, split].read()
        labels = self.plan.images.labels_of(split)
        valid = valid & (labels >= 0)
        if not valid.any():
            raise InputError(f"None of the {split} images with a label could be read; k-NN needs some")
        # Indexing would copy the whole file into memory, so only where rows are missing.
        return (values, labels) if valid.all() else (values[valid], labels[valid])

    def _protocol(self) -> dict[str, Any]:
        """What makes the number comparable with another one (TRAPS 17)."""
        images = self.plan.images
        readable = {split: next(e for key, e in self.files.items() if key[3] == split).read()[1] for split in SPLITS}
        train, test = (images.labels_of(split)[readable[split]] for split in SPLITS)
        train, test = train[train >= 0], test[test >= 0]
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


def check_labels(images: Images) -> None:
    """k-NN without classes would be a number without meaning: say so before the pass."""
    for split in SPLITS:
        found = np.unique(images.labels_of(split))
        classes = int((found >= 0).sum())
        if classes < (2 if split == "train" else 1):
            raise InputError(
                f"k-NN needs labels of at least two classes, but the {split} split of {images.name} has "
                f"{classes or 'no'} labelled class{'es' if classes != 1 else ''}; "
                "give images with class folders or labels, or leave knn out (--only cka)"
            )
    train, test = (set(images.labels_of(split).tolist()) - {-1} for split in SPLITS)
    if not train & test:
        raise InputError(
            f"k-NN cannot be right on {images.name}: no class of the test split is in the train split; "
            "give more images of each class, or leave knn out (--only cka)"
        )


def pooled(activation: Tensor, encoder: Encoder) -> dict[str, Tensor]:
    """The features that exist at a site, each (B, D); without prefix tokens there is only GAP."""
    prefix = encoder.tokens.prefix if encoder.tokens is not None else 0
    views = {name: view for name, view in FEATURES.items() if name == "gap" or prefix}
    found = {name: token_view(activation, view, encoder.tokens) for name, view in views.items()}
    return {name: vector for name, vector in found.items() if vector is not None and vector.ndim == 2}


def entries(plan: Plan) -> Iterator[tuple[str, str, str, str, Features]]:
    """Encoder, site, feature and split of every matrix that the pass will write, and the matrix."""
    for name, sites in plan.sites.items():
        encoder = plan.encoders[name]
        about = {split: describe_features(encoder, plan.images, split, plan.precision) for split in SPLITS}
        for site in sites:
            blank = torch.empty(1, *plan.shapes[name][site])
            for feature, vector in pooled(blank, encoder).items():
                for split in SPLITS:
                    what = {**about[split], "site": site, "feature": feature}
                    entry = Features(plan.cache, what, len(plan.images.indices(split)), vector.shape[1])
                    yield name, site, feature, split, entry


def cost(config: Config, plan: Plan) -> Cost:
    """Blocks of features and similarities in memory; on disk the features that are not there yet."""
    disk = sum(entry.bytes for *_, entry in entries(plan) if not entry.exists)
    return Cost(memory=60 * BLOCK_NUMBERS, disk=disk)


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % interval of a share, which stays within [0, 1] and has a width even at 0 and 1 (Wilson 1927).

    >>> [round(bound, 4) for bound in wilson(9, 10)]
    [0.5958, 0.9821]
    """
    z, p = 1.959963984540054, right / n
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return max(0.0, (centre - half) / (1 + z**2 / n)), min(1.0, (centre + half) / (1 + z**2 / n))


def _parts(values: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    return (values[start : start + 4096] for start in range(0, len(values), 4096))


def _process() -> tuple[int, int]:
    """Rank and number of the processes of this run."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _barrier() -> None:
    if _process()[1] > 1:
        torch.distributed.barrier()


def figures(result: xr.Dataset) -> list[Figure]:
    """Accuracy over depth: a panel for each feature, a colour for each encoder, chance as a line."""
    from sightline.figures import Figure, curve_over_depth, depth_of

    known = result.sel(site=result.layer_type == "block")
    table = known[["accuracy", "accuracy_low", "accuracy_high"]].to_dataframe().reset_index().dropna(subset="accuracy")
    if table.empty:  # only other sites were chosen: the table of the report has them
        return []
    blocks = {str(name): sorted(set(rows.block)) for name, rows in table.groupby("encoder", sort=False)}
    depth, title = depth_of(blocks)
    names = {"encoder": "series", "accuracy": "value", "accuracy_low": "low", "accuracy_high": "high"}
    points = table.rename(columns=names)
    points["depth"] = [depth[e][b] for e, b in zip(table.encoder, table.block, strict=True)]
    chart = curve_over_depth(
        points,
        value_title="k-NN accuracy",
        depth_title=title,
        series_title="encoder",
        series=[str(name) for name in result.encoder.values],
        facet="feature",
        reference=(float(result.attrs["chance"]), "chance"),
        percent=True,
        domain=(0, min(1.0, math.ceil(10 * points.high.max()) / 10)),
    )
    caption = (
        f"k = {result.attrs['k']}, votes weighted exp(cosine / {result.attrs['temperature']}), "
        f"{result.attrs['n_train']} training and {result.attrs['n_test']} test images; bands are 95 % Wilson intervals."
    )
    return [Figure("depth", "k-NN accuracy over depth", caption, chart, table)]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    """Best site and feature of each encoder: (label, number, detail)."""
    table = result[["accuracy", "accuracy_low", "accuracy_high"]].to_dataframe().reset_index().dropna(subset="accuracy")
    best = table.loc[table.groupby("encoder", sort=False).accuracy.idxmax()] if len(table) else table
    return [
        (
            str(row.encoder),
            f"{row.accuracy:.1%}",
            f"best at {row.site}, feature {row.feature}, 95 % {row.accuracy_low:.1%} – {row.accuracy_high:.1%}",
        )
        for row in best.itertuples()
    ]
