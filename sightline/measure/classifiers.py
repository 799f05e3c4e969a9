"""Who decides: the encoder's own head where it knows the classes of the images, else a probe on its features.

Analyses of decisions (agreement, shape bias, noise) need a classifier for every encoder, also for those without a head.
Its input goes to disk in the pass like the features of k-NN; it is fitted to the training images when the pass is over.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sightline.core.errors import InputError, counted, nearest
from sightline.core.processes import shared
from sightline.core.results import ENDS, NOTHING
from sightline.measure.class_mappings import AUTO, load_mapping, mean_probabilities
from sightline.measure.estimators.intervals import accuracy_of
from sightline.measure.estimators.probes import Probe
from sightline.measure.estimators.ridge import BLOCK_NUMBERS, Ridge, fit_ridge
from sightline.measure.estimators.sweep import PRESETS, Chosen, Labelled, Sweep, hold_out, train_sweep, training_bytes
from sightline.measure.plan import Cost, Plan
from sightline.measure.pooled import Matrix, Pooled, disk, flaw, widths
from sightline.measure.request import check_labels

SITES = ("block.*", "norm", "head.*")  # the plan shows all blocks; only the last one is looked at, where it is needed
SEEN = ("cls", "gap", "cls_gap")  # by probes, in the order of preference
HEAD, PROBE, LINEAR = "own head", "ridge probe", "linear probe"


@dataclass(frozen=True)
class ClassifierChoice:
    """Who decides, and what probes see.

    classifier   auto: the own head if it has one output per class, and the same classes where their names are known,
                 else a ridge probe; head or probe: that one; linear: a probe trained by gradient descent, the best of
                 a sweep of settings on training images that are held out
    pooling      auto: the CLS token if there is one, else the mean of all tokens or positions; cls, gap or cls_gap
                 (both side by side): that one
    preset       of linear: the sweep of settings, default, table4 or a1, see `sweep.Sweep`
    mapping      lets own heads decide that know other, finer classes: a CSV file `fine,coarse`, or imagenet16, see
                 `class_mappings`; auto: imagenet16 where all classes of the images are among its 16; none
    """

    classifier: str = "auto"
    pooling: str = "auto"
    preset: str = "default"
    mapping: str = "none"
    mapping_digest: str = field(default="", init=False)  # so that another content of a file is another question

    def __post_init__(self) -> None:
        known = {"classifier": ("auto", "head", "probe", "linear"), "pooling": ("auto", *SEEN), "preset": PRESETS}
        for name, names in known.items():
            if (given := getattr(self, name)) not in names:
                raise InputError(f"There is no {name} {given!r}{nearest(given, names)}")
        if self.preset != "default" and self.classifier != "linear":
            raise InputError(
                f"The preset {self.preset} is a sweep of linear probes, but the classifier is {self.classifier}; "
                "choose the classifier linear, or leave preset out"
            )
        if self.mapping not in ("auto", "none"):
            object.__setattr__(self, "mapping_digest", load_mapping(self.mapping).digest)
            if self.classifier not in ("auto", "head"):
                raise InputError(
                    f"A mapping of classes is for heads, but the classifier is {self.classifier}; choose auto or head"
                )

    @property
    def sweep(self) -> Sweep:
        """The settings that a linear probe is trained with."""
        return Sweep(preset=self.preset)


class Where(NamedTuple):
    """Who decides for an encoder, the site and feature that it sees, and the mapping by which its head decides."""

    kind: str
    site: str
    feature: str
    mapping: str = ""


@dataclass(frozen=True)
class Classifier:
    """Scores the classes of the images for one encoder; `reason` says why it cannot."""

    where: Where
    ridge: Ridge | None = None
    linear: Chosen | None = None
    members: tuple[tuple[int, ...], ...] | None = None  # outputs of the own head that make up each class
    reason: str = ""

    def scores(self, features: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Scores of the classes (n, C) from what `where` says."""
        if self.ridge is not None:
            return self.ridge.scores(features)
        if self.linear is not None:
            return self.linear.scores({"x": features}).astype(np.float64)
        outputs = np.asarray(features, np.float64)
        if self.where.mapping and self.members is not None:
            return mean_probabilities(outputs, self.members)
        return outputs if self.members is None else outputs[:, [only for (only,) in self.members]]

    @property
    def left_out_accuracy(self) -> float:
        """Of a probe: the share of right decisions on training images that it was not fitted to."""
        if self.linear is not None:
            return self.linear.accuracy
        return math.nan if self.ridge is None else self.ridge.left_out_accuracy

    def decisions(self, features: Matrix) -> npt.NDArray[np.int64]:
        """The class with the highest score for each row, of equal ones the first."""
        return np.concatenate([self.scores(block).argmax(1) for block in features.blocks()])


class DecisionAnalysis(Pooled):
    """An analysis of decisions: what classifiers see goes to disk in the pass, they are fitted when it is over."""

    def __init__(self, choice: ClassifierChoice, plan: Plan, splits: Sequence[str], title: str, name: str) -> None:
        check_labels(plan.images, splits, title, name)
        self.where, sweep = _where(choice, plan), choice.sweep
        super().__init__(plan, splits, _wanted(self.where))
        self.sweep = sweep

    def input_of(self, encoder: str, split: str, view: str = "plain") -> Matrix:
        """What the classifier of an encoder sees of the labelled images of a split."""
        _, site, feature, _ = self.where[encoder]
        return self.features(encoder, site, feature, view, split)

    def fitted(self) -> dict[str, Classifier]:
        """The classifier of every encoder; processes share the fitting."""
        self.finish()
        return dict(zip(self.where, shared(list(self.where), self._fit), strict=True))

    def _fit(self, encoder: str) -> Classifier:
        where, train = self.where[encoder], self.input_of(encoder, "train")
        if why := flaw(train, "train"):
            return Classifier(where, reason=why)
        if where.kind == HEAD:
            named, names = self.plan.encoders[encoder].classes, self.plan.images.classes
            if where.mapping:
                (outputs,) = self.plan.shapes[encoder][where.site]
                return Classifier(where, members=load_mapping(where.mapping).members_of(names, named, outputs))
            return Classifier(where, members=None if named is None else tuple((named.index(n),) for n in names))
        labels, classes = self.labels("train"), len(self.plan.images.classes)
        if where.kind == PROBE:
            return Classifier(where, fit_ridge(train, labels, classes, device=self.device))
        parts = hold_out(labels, self.sweep.held_out, self.plan.seed)
        kept, held = (Labelled({"x": train.some(part)}, labels[part]) for part in parts)
        title = f"Probes of {encoder}"
        shapes = [Probe(("x",))]
        swept = train_sweep(shapes, self.sweep, kept, held, classes, self.plan.seed, title, self.device)
        chosen = swept.chosen(0)
        return Classifier(where, linear=chosen, reason="" if chosen else "the training diverged with all settings")

    def decisions(
        self, classifier: Classifier, encoder: str, split: str, view: str = "plain"
    ) -> tuple[npt.NDArray[np.int64] | None, str]:
        """The classes that an encoder decides on for the labelled images, or None and the reason."""
        seen = self.input_of(encoder, split, view)
        why = classifier.reason or flaw(seen, split, constant=False)
        return (None, why) if why else (classifier.decisions(seen), "")

    def describe(self, classifiers: Mapping[str, Classifier]) -> dict[str, tuple[str, Any]]:
        """Variables of a result over encoders: who decided from what, and how well."""

        def train(encoder: str) -> tuple[float, float, float]:
            decided, _ = self.decisions(classifiers[encoder], encoder, "train")
            return NOTHING if decided is None else accuracy_of(decided, self.labels("train"))

        fitted = list(classifiers.values())
        accuracy = np.array(shared(list(classifiers), train)).T
        return {
            "classifier": ("encoder", [c.where.kind for c in fitted]),
            "mapping": ("encoder", [c.where.mapping for c in fitted]),
            "classifier_site": ("encoder", [c.where.site for c in fitted]),
            "classifier_feature": ("encoder", ["" if c.where.kind == HEAD else c.where.feature for c in fitted]),
            "penalty": ("encoder", [math.nan if c.ridge is None else c.ridge.penalty for c in fitted]),
            "setting": ("encoder", ["" if c.linear is None else str(c.linear.setting) for c in fitted]),
            "left_out_accuracy": ("encoder", [c.left_out_accuracy for c in fitted]),
            **{f"train_accuracy{end}": ("encoder", values) for end, values in zip(ENDS, accuracy, strict=True)},
        }


def about(choice: ClassifierChoice) -> str:
    """How probes are fitted, in words."""
    if choice.classifier != "linear":
        return "ridge, one against all, standardised features, penalty by leave-one-out error on train"
    settings, share = counted(len(choice.sweep.settings), "setting"), choice.sweep.held_out
    chosen = f"the best of {settings} on {share:.0%} of train, held out"
    return f"linear after BatchNorm without affine parameters, softmax, gradient descent, {chosen}"


def _where(choice: ClassifierChoice, plan: Plan) -> dict[str, Where]:
    """Who decides for each encoder."""
    return {name: _decider(choice, plan, name) for name in plan.encoders}


def _decider(choice: ClassifierChoice, plan: Plan, encoder: str) -> Where:
    sites, classes = plan.sites[encoder], len(plan.images.classes)
    heads = [site for site in sites if site.startswith("head.")]
    # A head of several layers projects for training, and does not classify.
    outputs = plan.shapes[encoder][heads[0]] if len(heads) == 1 else ()
    named = plan.encoders[encoder].classes
    same = outputs == (classes,) and (named is None or set(named) == set(plan.images.classes))
    if choice.classifier in ("auto", "head") and same:
        return Where(HEAD, heads[0], "gap")
    mapping, problem = _mapping(choice, plan, encoder, outputs)
    if mapping:
        return Where(HEAD, heads[0], "gap", mapping)
    if choice.classifier == "head":
        has = f"a head with {counted(outputs[0], 'output')}" if len(outputs) == 1 else "no head that classifies"
        has += " of other names" if outputs == (classes,) else ""
        raise InputError(
            f"Encoder {encoder!r} has {has}, but {plan.images.name} has {counted(classes, 'class')}{problem}; "
            "choose the classifier auto, probe or linear"
        )
    for site in sorted((site for site in sites if site not in heads), key=_last):
        known = widths(plan, encoder, site)
        feature = next((name for name in SEEN if name in known and choice.pooling in ("auto", name)), None)
        if feature is not None:
            return Where(LINEAR if choice.classifier == "linear" else PROBE, site, feature)
    raise InputError(
        f"Encoder {encoder!r} has no feature {'' if choice.pooling == 'auto' else f'{choice.pooling!r} '}after its "
        "last block that a probe could use; choose the pooling auto, or leave the encoder out"
    )


def _mapping(choice: ClassifierChoice, plan: Plan, encoder: str, outputs: tuple[int, ...]) -> tuple[str, str]:
    """The mapping by which the head of an encoder can decide, or "" and how an error goes on to say why not."""
    if choice.mapping == "none" or choice.classifier not in ("auto", "head") or len(outputs) != 1:
        return "", ""
    chosen = AUTO if choice.mapping == "auto" else choice.mapping
    try:
        load_mapping(chosen).members_of(plan.images.classes, plan.encoders[encoder].classes, outputs[0])
    except InputError as problem:
        if choice.mapping != "auto":
            raise InputError(
                f"Encoder {encoder!r} cannot decide by its head: {problem}; give another mapping"
            ) from None
        return "", f", and {problem}"
    return chosen, ""


def _last(site: str) -> tuple[bool, int]:
    """Key that sorts the final norm first, then blocks from the last one."""
    return site != "norm", -int(site.split(".")[1]) if "." in site else 0


def _wanted(where: Mapping[str, Where]) -> dict[tuple[str, str], tuple[str]]:
    return {(encoder, site): (feature,) for encoder, (_, site, feature, _) in where.items()}


def cost_of(choice: ClassifierChoice, plan: Plan, splits: Sequence[str]) -> Cost:
    """Sums and eigenvectors of the largest probe, and blocks of features, in memory; on disk what the pass writes."""
    inputs = _wanted(_where(choice, plan))
    width = max(widths(plan, encoder, site)[name] for (encoder, site), (name,) in inputs.items())
    memory = 8 * (4 * width**2 + 4 * width * len(plan.images.classes) + 8 * BLOCK_NUMBERS)
    if choice.classifier == "linear":
        memory += training_bytes(
            width * len(plan.images.classes), width * len(plan.images.indices("train")), choice.sweep
        )
    return Cost(memory, disk(plan, splits, inputs))
