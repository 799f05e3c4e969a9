"""Pooled features of the pass on disk, for analyses that look at the features of all images when the pass is over.

    class Analysis(Pooled):
        def __init__(self, config, plan):
            super().__init__(plan, ("train", "test"), {("vit", "norm"): ("cls",)})  # which features of which sites

        def compute(self):
            self.finish()                                          # all processes have written their rows
            train = self.features("vit", "norm", "cls", "plain", "train")     # read in blocks: train[start:stop]

A view of the images other than `plain` enters the key of the files, so that plain features are found by all analyses
and by later runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.groups import Kept, Mean
from sightline.core.processes import barrier, rank
from sightline.core.results import ABSENT
from sightline.encoders.encoder import Encoder
from sightline.encoders.sites import token_view
from sightline.images.pipeline import Batch
from sightline.measure.contract import Analysis
from sightline.measure.feature_cache import Features, describe_features
from sightline.measure.groups import GROUPS, ImageGroups
from sightline.measure.layers import Layers
from sightline.measure.plan import Key, Plan

POOLINGS = {"cls": "cls", "gap": "gap", "gap_without_cls": "mean"}  # our name → token view
JOINED = {"cls_gap": ("cls", "gap")}  # poolings side by side, put together when they are read
FEATURES = (*POOLINGS, *JOINED)
FLAT = ("all", "patches")  # token views side by side, many times as wide; only for those who ask for them by name
ROWS_AT_A_TIME = 4096  # rows that are read at a time
CONSTANT = 1e-6  # what differs by less of its size is rounding, in float32

Wanted = Mapping[tuple[str, str], Collection[str]]  # encoder and site → features


class Which(NamedTuple):
    """Names of one matrix of features."""

    encoder: str
    site: str
    feature: str
    view: str
    split: str


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Matrices of the same rows as one; what is not asked for stays on disk."""

    parts: tuple[npt.NDArray[Any], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and the widths of all together."""
        return len(self), sum(part.shape[1] for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return np.concatenate([part[rows] for part in self.parts], 1)


@dataclass(frozen=True, eq=False)
class Matrix:
    """Some rows of a matrix on disk; what is not sliced stays there.

    >>> matrix = Matrix(np.arange(8.0).reshape(4, 2), np.array([0, 2, 3]))
    >>> matrix.shape, matrix[1:].tolist()
    ((3, 2), [[4.0, 5.0], [6.0, 7.0]])
    >>> matrix.some(np.array([2]))[:].tolist()
    [[6.0, 7.0]]
    """

    values: npt.NDArray[Any] | SideBySide
    rows: npt.NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.values.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        chosen: npt.NDArray[Any] = self.values[self.rows[part]]
        return chosen

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        # Indexing would copy the whole file into memory, so only where rows are missing.
        whole = isinstance(self.values, np.ndarray) and len(self.rows) == len(self.values)
        return np.array(self.values if whole else self[:], dtype=dtype, copy=copy)

    def some(self, chosen: npt.NDArray[np.int64]) -> Matrix:
        """These of its rows, still on disk."""
        return Matrix(self.values, self.rows[chosen])

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """All rows, some at a time."""
        return (self[start : start + ROWS_AT_A_TIME] for start in range(0, len(self), ROWS_AT_A_TIME))


class Pooled(Analysis):
    """Writes the features that are wanted to disk; the analysis that derives from it computes with them at the end."""

    seen: Tensor  # (splits,) images whose features were written

    def __init__(self, plan: Plan, splits: Sequence[str], wanted: Wanted) -> None:
        super().__init__()
        self.plan, self.splits, self.wanted = plan, tuple(splits), wanted
        self.files = matrices(plan, splits, wanted)
        if not self.files:
            raise InputError("None of these sites has the pooling that is asked for; choose others")
        self._groups: dict[str, ImageGroups] = {}
        self.rows: dict[str, npt.NDArray[np.int64]] = {}  # split → rows that could be read, known when finished
        self.elsewhere: set[Which] = set()  # what another analysis of the pass writes, see `share`
        self.split = ""  # of the batch
        self.add_state("seen", torch.zeros(len(self.splits), dtype=torch.int64), dist_reduce_fx="sum")

    def lacks(self, encoder: str, split: str, view: str) -> bool:
        """Whether an earlier pass has not left all of its features of these images."""
        whose = (encoder, view, split)
        return any(
            not entry.complete
            for which, entry in self.files.items()
            if (which.encoder, which.view, which.split) == whose
        )

    def unread(self) -> list[tuple[str, str]]:
        """Images without a row in what is complete."""
        images = self.plan.images
        reasons: dict[str, str] = {}
        for which, entry in self.files.items():
            if not entry.complete:
                continue
            ids = images.ids[images.indices(which.split)][~entry.written()]
            reasons |= dict.fromkeys(ids.tolist(), "it could not be read when its features were made")
        return list(reasons.items())

    def begin(self, batch: Batch) -> None:
        self.split = batch.split

    def reduce(self, key: Key, activation: Tensor) -> dict[str, Tensor]:
        """Pooled vectors (B, D), copied: the activation itself does not outlive its layer."""
        names = [
            feature
            for feature in _kept(self.wanted.get(key[:2], ()))
            if Which(key.encoder, key.site, feature, key.view, self.split) not in self.elsewhere
        ]
        vectors = poolings(activation, self.plan.encoders[key.encoder], names) if names else {}
        return {feature: vector.to("cpu", torch.float32, copy=True) for feature, vector in vectors.items()}

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        if batch.split not in self.splits:
            return
        rows = batch.rows.numpy(force=True)
        for key, vectors in reductions.items():
            for feature, vector in vectors.items():
                which = Which(key.encoder, key.site, feature, key.view, batch.split)
                self.files[which].write(rows, vector.numpy(force=True))
        self.seen[self.splits.index(batch.split)] += len(rows)

    def finish(self) -> None:
        """All processes have written their rows: one of them closes the files."""
        entries: dict[str, list[Features]] = {split: [] for split in self.splits}
        for which, entry in self.files.items():
            entries[which.split].append(entry)
        seen = dict(zip(self.splits, self.seen.tolist(), strict=True))
        self.rows.update(finish_files(entries, seen, self.plan.images.name))

    def labels(self, split: str) -> npt.NDArray[np.int64]:
        """Labels of the images of a split that could be read and have one."""
        labels: npt.NDArray[np.int64] = self.plan.images.labels_of(split)[self.labelled(split)]
        return labels

    def labelled(self, split: str) -> npt.NDArray[np.int64]:
        """Rows of the images of a split that could be read and have a label."""
        rows = self.rows[split]
        rows = rows[self.plan.images.labels_of(split)[rows] >= 0]
        if not len(rows):
            raise InputError(f"None of the {split} images with a label could be read; give some")
        return rows

    def features(self, encoder: str, site: str, feature: str, view: str, split: str, labelled: bool = True) -> Matrix:
        """Features of the images that could be read and, unless told otherwise, have a label."""
        parts = tuple(self.files[Which(encoder, site, part, view, split)].read()[0] for part in _kept([feature]))
        values = parts[0] if len(parts) == 1 else SideBySide(parts)
        return Matrix(values, self.labelled(split) if labelled else self.rows[split])

    def groups(self, split: str) -> ImageGroups:
        """The groups of images that numbers of a split are kept by, for contrasts."""
        if split not in self._groups:
            self._groups[split] = ImageGroups(self.plan.images, [split])
        return self._groups[split]

    def by_group(self, split: str, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sums over groups of the values (n, …) of the labelled images of a split, or of all that could be read."""
        rows = self.rows[split] if len(values) == len(self.rows[split]) else self.labelled(split)
        return self.groups(split).sums(split, rows, values)

    def with_right(
        self,
        result: xr.Dataset,
        split: str,
        right: Mapping[tuple[str, str, str], npt.NDArray[np.float64]],
        names: Sequence[str] = ("accuracy",),
        labelled: bool = True,
    ) -> xr.Dataset:
        """The result with what contrasts of its accuracies need: right decisions by group, (names, G) or (G,)."""
        dims, kept = ("encoder", "site", "feature"), Kept({"group": self.groups(split).axis})
        axes = [[str(name) for name in result[dim].values] for dim in dims]
        sums = np.zeros((*map(len, axes), len(names), GROUPS))
        for at, of_groups in right.items():
            sums[tuple(axis.index(name) for axis, name in zip(axes, at, strict=True))] = of_groups
        images = self.by_group(split, np.ones(len(self.labelled(split) if labelled else self.rows[split])))
        for number, name in enumerate(names):
            right_of = {f"{name}_right": ((*dims, "group"), sums[..., number, :]), "images": (("group",), images)}
            kept.add(name, Mean(f"{name}_right", "images"), **right_of)
        return kept.beside(result)

    def dataset(
        self, names: Sequence[str], answers: Mapping[tuple[str, str, str], tuple[Sequence[float], str]]
    ) -> xr.Dataset:
        """Numbers `names` and the reason where there are none, over encoder, site and feature."""
        layers, features_there = Layers(self.plan.sites, self.plan.stages), {feature for _, _, feature in answers}
        encoders, sites, features = layers.encoders, layers.sites, [name for name in FEATURES if name in features_there]
        values = np.full((len(names), len(encoders), len(sites), len(features)), np.nan)
        reason = np.full(values.shape[1:], ABSENT, dtype=object)
        for encoder, site in layers:
            reason[encoders.index(encoder), sites.index(site)] = "this site has no such feature"
        for (encoder, site, feature), (numbers, why) in answers.items():
            at = encoders.index(encoder), sites.index(site), features.index(feature)
            values[(slice(None), *at)], reason[at] = numbers, why
        dims = ("encoder", "site", "feature")
        data = {name: (dims, part) for name, part in zip(names, values, strict=True)}
        return xr.Dataset({**data, "reason": (dims, reason.astype(str))}, {**layers.coords(), "feature": features})


def share(metrics: Iterable[Analysis]) -> None:
    """Let every matrix be pooled and written once in a pass, by the first of the analyses that want it."""
    taken: set[str] = set()
    for metric in metrics:
        if isinstance(metric, Pooled):
            metric.elsewhere = {which for which, entry in metric.files.items() if entry.key in taken}
            taken.update(entry.key for entry in metric.files.values())


def finish_files(
    files: Mapping[str, Sequence[Features]], seen: Mapping[str, int], images: str
) -> dict[str, npt.NDArray[np.int64]]:
    """Close the files of each split, of which so many rows were written; which rows could be read, by split."""
    barrier()
    for split, entries in files.items():
        open_ones = [entry for entry in entries if not entry.complete]  # the others are those of an earlier pass
        if open_ones and not seen[split]:
            raise InputError(f"None of the {split} images of {images} could be read; give some")
        for entry in open_ones:
            if not entry.exists or int(entry.written().sum()) != seen[split]:
                raise InputError(
                    f"The feature cache in {str(entry.cache)!r} lost rows of an interrupted pass; "
                    "delete the folder 'cache' of the run and run the same command again"
                )
    barrier()
    if rank() == 0:
        for entry in (entry for entries in files.values() for entry in entries):
            entry.finish()
    barrier()
    # The same images for all, or rows of two encoders would not be one image.
    return {
        split: np.flatnonzero(np.logical_and.reduce([entry.written() for entry in entries]))
        for split, entries in files.items()
    }


def poolings(activation: Tensor, encoder: Encoder, names: Collection[str] = tuple(POOLINGS)) -> dict[str, Tensor]:
    """The features that exist at a site, each (B, D); of the poolings there is only GAP without prefix tokens."""
    prefix = encoder.tokens.prefix if encoder.tokens is not None else 0
    views = {name: POOLINGS[name] for name in names if name in POOLINGS and (name == "gap" or prefix)}
    views_of_tokens = {name: token_view(activation, view, encoder.tokens) for name, view in views.items()}
    pooled = {name: vector for name, vector in views_of_tokens.items() if vector is not None and vector.ndim == 2}
    flat = {name: token_view(activation, name, encoder.tokens) for name in names if name in FLAT}
    return pooled | {name: tokens.flatten(1) for name, tokens in flat.items() if tokens is not None}


def widths(plan: Plan, encoder: str, site: str) -> dict[str, int]:
    """The features that exist at a site, and how wide each is."""
    blank = torch.empty(1, *plan.shapes[encoder][site])
    names = (*POOLINGS, *FLAT)
    single = {name: vector.shape[1] for name, vector in poolings(blank, plan.encoders[encoder], names).items()}
    joined = {name: sum(single[part] for part in parts) for name, parts in JOINED.items() if set(parts) <= set(single)}
    return single | joined


def _kept(features: Iterable[str]) -> tuple[str, ...]:
    """The poolings that are written for these features.

    >>> _kept(["cls_gap", "gap"])
    ('cls', 'gap')
    """
    return tuple(dict.fromkeys(part for name in features for part in JOINED.get(name, (name,))))


def every_site(plan: Plan, names: Collection[str] = tuple(POOLINGS)) -> dict[tuple[str, str], tuple[str, ...]]:
    """These features of all sites of all encoders, where they exist."""
    return {
        (encoder, site): tuple(name for name in widths(plan, encoder, site) if name in names)
        for encoder, sites in plan.sites.items()
        for site in sites
    }


def matrices(plan: Plan, splits: Sequence[str], wanted: Wanted) -> dict[Which, Features]:
    """Every matrix that the pass will write."""
    entries = {}
    about = {
        (name, split): describe_features(encoder, plan.images, split, plan.precision)
        for name, encoder in plan.encoders.items()
        for split in splits
    }
    for (encoder, site), features in wanted.items():
        width = widths(plan, encoder, site)
        for feature in _kept(features):
            for split in splits:
                for view in plan.views[split]:
                    what = {**about[encoder, split], "site": site, "feature": feature}
                    if view != "plain":  # what is random in a view depends on the seed
                        what |= {"view": view, "seed": plan.seed}
                    entry = Features(plan.cache, what, len(plan.images.indices(split)), width[feature])
                    entries[Which(encoder, site, feature, view, split)] = entry
    return entries


def disk(plan: Plan, splits: Sequence[str], wanted: Wanted) -> int:
    """Bytes of those that are not there yet."""
    return sum(entry.bytes for entry in matrices(plan, splits, wanted).values() if not entry.exists)


def flaw(features: Matrix, split: str, constant: bool = True) -> str:
    """Why nothing can be told from these features: they are not finite, or the same for all images; "" if neither."""
    if bad := len(features) - sum(int(np.isfinite(block).all(1).sum()) for block in features.blocks()):
        are = "is" if bad == 1 else "are"
        return f"{bad} of {len(features)} {split} features {are} not finite (NaN or infinity)"
    first = features[:1]
    if constant and all((np.abs(block - first) <= CONSTANT * np.abs(first).max()).all() for block in features.blocks()):
        return f"the features are the same for all {'training' if split == 'train' else split} images"
    return ""
