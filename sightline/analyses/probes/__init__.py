"""Probes: how well does a classifier on frozen features tell the class, from every block, pooled in every way?

    linear       softmax(W z + b)                     z: features x through BatchNorm without affine parameters
    depth 2, 3   one or two blocks of linear, BatchNorm, ReLU before the last linear
    multilayer   linear on z(last layer) ⊕ z(block i)
    ridge        least squares in closed form for the whole path of penalties (estimators/ridge.py): a fast first look

All but ridge are trained with every setting of a sweep (estimators/sweep.py). The selection split chooses, the test
split scores:

    accuracy = test accuracy of the setting that is best on the selection split
    mean ± std = of the test accuracies of the five settings that are best on the selection split
    gain = accuracy − accuracy of the linear probe on the last layer, same pooling

Source: Shekhar et al. 2023, "Objectives Matter" (sweep, depth, added layer); Park et al. 2023, Figure 11, and Grigg et
al. 2021, Figure 3 (accuracy per layer); He et al. 2022 (BatchNorm without affine parameters).

Shapes: n images, D width, C classes, K settings, L penalties.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr

from sightline.analyses.probes.advice import headlines as headlines
from sightline.analyses.probes.advice import key_numbers as key_numbers
from sightline.analyses.probes.advice import summary as summary
from sightline.analyses.probes.charts import figures as figures
from sightline.analyses.probes.results import (
    BEST,
    OVER,
    ProbeOutcome,
    ProbePlace,
    axes_of,
    dataset_of,
    reference_of,
    spread,
)
from sightline.analyses.probes.results import mean_of_best as mean_of_best
from sightline.core.errors import InputError, nearest
from sightline.core.groups import Kept, Mean
from sightline.core.processes import shared
from sightline.core.results import of_decoder
from sightline.measure.estimators.intervals import accuracy_of
from sightline.measure.estimators.probes import Probe
from sightline.measure.estimators.ridge import fit_ridge
from sightline.measure.estimators.sweep import Labelled, Sweep, Swept, hold_out, train_sweep, training_bytes
from sightline.measure.groups import GROUPS
from sightline.measure.plan import Cost, Plan
from sightline.measure.pooled import FEATURES, Pooled, disk, every_site, flaw, widths
from sightline.measure.request import check_labels

TOPIC = "separable"
TITLE = "Probes"
QUESTION = (
    "How well does a classifier on the frozen features predict the class, and which layer, pooling and probe is best?"
)
FORMULA = """\
linear: softmax(W·BN(x) + b);   depth d: d − 1 blocks of linear, BatchNorm, ReLU before it
multilayer: softmax(W·[BN(last layer) ⊕ BN(block i)] + b);   ridge: min 1/n Σ‖y − b − Wᵀz‖² + λ‖W‖²
gain = accuracy − accuracy of the linear probe on the last layer, same pooling"""
HOW_TO_READ = """\
The encoder stays as it is; only a small classifier on top is trained. Where the linear probe is accurate, the classes
already lie apart. Where a deeper probe gains, the classes are in the features, but not linearly. Where adding another
layer to the last one gains, the last layer has lost something that an earlier one knew: typical of encoders trained by
reconstruction, and rare for those trained by contrast. Every probe is trained with many settings; one of them is chosen
on images that are used for nothing else, and scored on the test images. The bands are 95 % intervals: what they leave
open, these images cannot settle. ± is the spread among the five best settings: if it is large, the probe depends on its
settings. What no probe reaches cannot be had by choosing another layer or probe: that is what fine-tuning is for."""
SOURCE = (
    'Shekhar, Bordes, Vincent, Morcos 2023, "Objectives Matter: Understanding the Impact of Self-Supervised Objectives '
    'on Vision Transformer Representations", Figures 2 and 5, Table 4; Park et al. 2023, "What Do Self-Supervised '
    'Vision Transformers Learn?", Figure 11; Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn '
    'Similar Visual Representations?", Figure 3; He et al. 2022, "Masked Autoencoders Are Scalable Vision Learners"'
)
SITES = ("block.*", "norm", "decoder.block.*")
SPLITS = ("train", "val", "test")
ANY_SITE = True
BY_DEFAULT = False
INVARIANT_TO = frozenset({"batching"})

PROBE_KINDS = ("ridge", "linear", "nonlinear", "multilayer")


def last_of(sites: Sequence[str]) -> str:
    """The last layer of an encoder: its final norm or last block, not one of a decoder or of a head.

    >>> last_of(["block.0", "block.1", "norm", "decoder.block.0"]), last_of(["block.0", "block.1", "head.0"])
    ('norm', 'block.1')
    """
    return ([site for site in sites if not site.startswith(("decoder.", "head."))] or list(sites))[-1]


@dataclass(frozen=True)
class ProbesConfig(Sweep):
    """Which probes are trained, and the sweep of their settings, see `sweep.Sweep`.

    kinds          ridge, linear, nonlinear, multilayer; ridge alone takes seconds
    depths         of the nonlinear probes
    nonlinear_at   last: on the last layer; every: on all
    poolings       cls (the CLS token), gap (the mean of all tokens), gap_without_cls (of the patches), cls_gap (cls and
                   gap side by side, each through its own BatchNorm), where they exist
    more_on        every: nonlinear and multilayer probes on all poolings; first: on the first that an encoder has
    """

    kinds: tuple[str, ...] = PROBE_KINDS
    depths: tuple[int, ...] = (2, 3)
    nonlinear_at: str = "last"
    poolings: tuple[str, ...] = ("cls", "gap")
    more_on: str = "every"

    def __post_init__(self) -> None:
        super().__post_init__()
        for word, given, known in (("kind", self.kinds, PROBE_KINDS), ("pooling", self.poolings, FEATURES)):
            if not given:
                raise InputError(f"Probes need at least one {word}; choose from {', '.join(known)}")
            for name in given:
                if name not in known:
                    raise InputError(f"Probes have no {word} {name!r}{nearest(name, known)}")
        if self.nonlinear_at not in ("last", "every"):
            raise InputError(f"nonlinear_at is last or every, not {self.nonlinear_at!r}")
        if self.more_on not in ("every", "first"):
            raise InputError(f"more_on is every or first, not {self.more_on!r}")
        if not set(self.depths) <= {2, 3} or not self.depths:
            raise InputError(f"Nonlinear probes have depth 2 or 3, not {', '.join(map(str, self.depths)) or 'none'}")

    @property
    def probes(self) -> list[str]:
        """Names of the probes, the simplest first."""
        names = {"nonlinear": [f"depth {depth}" for depth in sorted(set(self.depths))]}
        return [name for kind in PROBE_KINDS if kind in self.kinds for name in names.get(kind, [kind])]

    def shapes(self, sites: Sequence[str], first: bool = True) -> dict[tuple[str, str], Probe]:
        """Which probes there are on these layers: (name, site) → what it sees and how deep it is.

        `first`: whether this is the first pooling that the encoder has.

        >>> config = ProbesConfig(kinds=("nonlinear", "multilayer"), depths=(2,))
        >>> {at: shape.inputs for at, shape in config.shapes(["block.0", "block.1"]).items()}
        {('depth 2', 'block.1'): ('block.1',), ('multilayer', 'block.0'): ('block.1', 'block.0')}
        """
        last, shapes = last_of(sites), {}
        more = first or self.more_on == "every"
        for probe in (name for name in self.probes if more or name in ("ridge", "linear")):
            for site in sites:
                if probe == "multilayer":
                    if site != last and not of_decoder(site):
                        shapes[probe, site] = Probe((last, site))
                elif not probe.startswith("depth"):
                    shapes[probe, site] = Probe((site,))
                elif site == last or self.nonlinear_at == "every":
                    shapes[probe, site] = Probe((site,), depth=int(probe.split()[1]))
        return shapes


def precision(config: ProbesConfig) -> str:
    return config.precision


class ProbesAnalysis(Pooled):
    """Pooled features go to disk in the pass; when it is over, all probes of an encoder are trained together."""

    def __init__(self, config: ProbesConfig, plan: Plan) -> None:
        classes = {split: set(plan.images.labels_of(split).tolist()) - {-1} for split in plan.splits}
        chooses = bool(classes["train"] & classes.get("val", set()))  # else a part of the training images does
        splits = SPLITS if chooses else ("train", "test")
        check_labels(plan.images, splits, "A probe", "probes")
        super().__init__(plan, splits, every_site(plan, config.poolings))
        self.config = config

    def compute(self) -> xr.Dataset:
        self.finish()
        asked = ((encoder, feature) for (encoder, _), features in self.wanted.items() for feature in features)
        # All encoders of one pooling, then of the next: the first may have more probes, shared evenly in this order.
        jobs = sorted(dict.fromkeys(asked), key=lambda job: self.config.poolings.index(job[1]))
        answers = shared(jobs, lambda job: self._probe(*job))
        outcomes = {at: answer for part in answers for at, answer in part.items()}
        last = {job: last_of(self._sites(*job)) for job in jobs}
        result = dataset_of(outcomes, self.plan, last, self.config.probes, self.config.settings)
        return self._kept(outcomes, last, result).beside(result.assign_attrs(self._protocol()))

    def _kept(
        self, found: Mapping[ProbePlace, ProbeOutcome], last: Mapping[tuple[str, str], str], result: xr.Dataset
    ) -> Kept:
        """Right decisions of all probes by groups of images, and how many more than those of the last layer."""
        kept = Kept({"group": self.groups("test").axis})
        right = {at: self.by_group("test", a.right) for at, a in found.items() if a.right is not None}
        gain = {at: of - right[to] for at, of in right.items() if (to := reference_of(at, last)) in right}
        images = (("group",), self.by_group("test", np.ones(len(self.labels("test")))))
        for name, sums in {"accuracy": right, "gain": gain}.items():
            part = ((*OVER, "group"), spread(sums, axes_of(result), (GROUPS,)))
            kept.add(name, Mean(f"{name}_sum", "images"), **{f"{name}_sum": part, "images": images})
        return kept

    def _probe(self, encoder: str, feature: str) -> dict[ProbePlace, ProbeOutcome]:
        """All probes of an encoder on one kind of feature."""
        sites = self._sites(encoder, feature)
        train, selection, test = self._images(encoder, feature, sites)
        flaws = {site: self._flaw(encoder, site, feature) for site in sites}
        outcomes: dict[ProbePlace, ProbeOutcome] = {}
        todo: dict[ProbePlace, Probe] = {}
        for (probe, site), shape in self.config.shapes(sites, feature == self._first(encoder)).items():
            at = ProbePlace(encoder, probe, site, feature)
            if why := next((flaws[name] for name in reversed(shape.inputs) if flaws[name]), ""):
                outcomes[at] = ProbeOutcome(reason=why)
            elif probe == "ridge":
                outcomes[at] = _ridge(site, train, selection, test, self._classes, self.device)
            else:
                todo[at] = shape
        if todo:
            shapes = list(todo.values())
            title = f"Probes of {encoder}, {feature}"
            swept = train_sweep(
                shapes, self.config, train, selection, self._classes, self.plan.seed, title, self.device
            )
            outcomes |= zip(todo, _answers(swept, test), strict=True)
        return outcomes

    def _flaw(self, encoder: str, site: str, feature: str) -> str:
        """Why nothing can be told from these features, or ""."""
        each = ((split, self.features(encoder, site, feature, "plain", split)) for split in self.splits)
        return next(filter(None, (flaw(matrix, split, split == "train") for split, matrix in each)), "")

    def _first(self, encoder: str) -> str:
        """The first of the poolings that an encoder has."""
        return next(name for name in self.config.poolings if self._sites(encoder, name))

    def _sites(self, encoder: str, feature: str) -> list[str]:
        """The layers of an encoder that have this feature."""
        return [site for site in self.plan.sites[encoder] if feature in self.wanted[encoder, site]]

    @property
    def _classes(self) -> int:
        return len(self.plan.images.classes)

    def _images(self, encoder: str, feature: str, sites: Sequence[str]) -> tuple[Labelled, Labelled, Labelled]:
        """Features and labels of the images that train, that choose and that score."""

        def labelled(split: str, chosen: npt.NDArray[np.int64]) -> Labelled:
            whole = {site: self.features(encoder, site, feature, "plain", split) for site in sites}
            return Labelled({site: matrix.some(chosen) for site, matrix in whole.items()}, self.labels(split)[chosen])

        kept, held = self._chosen()
        chooses = "val" if "val" in self.splits else "train"
        return labelled("train", kept), labelled(chooses, held), labelled("test", np.arange(len(self.labels("test"))))

    def _chosen(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Positions of the images that train, and of those that choose, in the train or val split."""
        if "val" in self.splits:
            return np.arange(len(self.labels("train"))), np.arange(len(self.labels("val")))
        return hold_out(self.labels("train"), self.config.held_out, self.plan.seed)

    def _protocol(self) -> dict[str, Any]:
        has_val = "val" in self.splits
        train, test = self.labels("train"), self.labels("test")
        kept, held = self._chosen()
        return {
            "selection": "the val split" if has_val else f"{self.config.held_out:.0%} of the training images, by class",
            "n_train": len(kept),
            "n_selection": len(held),
            "n_test": len(test),
            "classes": len(np.unique(train)),
            "chance": 1 / len(np.unique(train)),
            "majority": float(np.unique(test, return_counts=True)[1].max() / len(test)),
            "interval": "95 %: accuracies Wilson, differences Agresti and Min, paired over images",
            "preset": self.config.preset,
            "learning_rate": f"lr · {min(self.config.batch, len(kept))} / 256 at its peak, then a cosine to min_lr",
            "best_of": min(BEST, len(self.config.settings)),
            "augmentation": "none: features of the images as they are",
        }


def _ridge(
    site: str, train: Labelled, selection: Labelled, test: Labelled, classes: int, device: torch.device
) -> ProbeOutcome:
    """The closed form; left-out training images choose its penalty, so that the selection split is new to it."""
    probe = fit_ridge(train.features[site], train.labels, classes, device=device)
    accuracy, *_ = accuracy_of(probe.decisions(selection.features[site]), selection.labels)
    return ProbeOutcome(accuracy, probe.decisions(test.features[site]) == test.labels, errors=probe.errors)


def _answers(swept: Swept, test: Labelled) -> list[ProbeOutcome]:
    """The chosen probe of each shape, and the numbers of all settings."""
    accuracy = swept.accuracy(test)
    answers = []
    for number in range(swept.shapes):
        chosen = swept.chosen(number)
        settings = np.stack([swept.loss[number], swept.selection[number], accuracy[number]])
        if chosen is None:
            answers.append(ProbeOutcome(settings=settings, reason="the training diverged with all settings"))
            continue
        right = chosen.decisions(test.features) == test.labels
        answers.append(ProbeOutcome(chosen.accuracy, right, swept.settings.index(chosen.setting), settings))
    return answers


def cost(config: ProbesConfig, plan: Plan) -> Cost:
    """What the probes of one encoder and feature take, the largest; features on disk."""
    chosen, classes = every_site(plan, config.poolings), len(plan.images.classes)
    memory = [0]
    for encoder, feature in itertools.product(plan.encoders, config.poolings):
        size = {s: widths(plan, encoder, s)[feature] for s in plan.sites[encoder] if feature in chosen[encoder, s]}
        if not size:
            continue
        shapes = [(sum(size[name] for name in p.inputs), p.depth) for p in config.shapes(list(size)).values()]
        weights = sum(width * (classes + (depth - 1) * width) for width, depth in shapes)
        widest = max(size.values()) * 2
        features = widest * (len(plan.images.indices("train")) + 32 * widest)  # and the sums of a ridge probe
        memory.append(training_bytes(weights, features, config))
    splits = [split for split in SPLITS if split in plan.splits]
    return Cost(max(memory), disk(plan, splits, chosen))
