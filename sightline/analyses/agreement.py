"""Agreement: do two encoders decide alike? Kendall's τ of their class scores, F1 and Cohen's κ of their decisions.

    τ_b(a, b) = (concordant − discordant) / √(pairs not tied in a · pairs not tied in b)    over pairs of classes
    τ@k = ½ [τ_b on the k classes that A scores highest + τ_b on the k classes that B scores highest], per image
    F1 = mean over classes of 2 n_cc / (n_c· + n_·c)          n_ij images that A takes for i and B for j
    κ = (p_o − p_e) / (1 − p_e)             p_o = Σ n_cc / n, p_e = Σ n_c· n_·c / n²: agreement by chance

Source: Kendall 1938 and 1945 (τ, ties), Cohen 1960 (κ); used on probes of ViTs by Shekhar et al. 2022 and 2023.

Shapes: n images, C classes, k of them, m images of a block, P pairs of encoders, K values of k.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.groups import Kept, Mean, TopChoices
from sightline.core.processes import shared
from sightline.core.results import ENDS, NOTHING
from sightline.measure import classifiers
from sightline.measure.classifiers import Classifier, ClassifierChoice, DecisionAnalysis, cost_of
from sightline.measure.estimators.intervals import accuracy_of
from sightline.measure.groups import GROUPS
from sightline.measure.layers import add_images, mean_of_images
from sightline.measure.plan import Cost, Plan
from sightline.measure.pooled import flaw
from sightline.report.figures import Figure, KeyNumber, Likeness, heatmap

TOPIC = "alike"
TITLE = "Agreement of decisions"
QUESTION = "Do two encoders rank the classes of an image alike, and are they right and wrong on the same images?"
FORMULA = """\
τ@k = mean over images of ½ [τ_b over the k best classes of A + τ_b over the k best classes of B]
τ_b = (concordant − discordant pairs of classes) / √(pairs not tied for A · pairs not tied for B)
F1 = mean over classes of 2 n_cc / (n_c· + n_·c);    κ = (p_o − p_e) / (1 − p_e)"""
HOW_TO_READ = """\
Every encoder has a classifier: its own head if that has an output for each class of the images, otherwise a probe on
its frozen features; the caption says which, and how accurate it is. A head that does no better than chance may have
learned other classes, or the same ones in another order: choose the classifier probe for it. τ@k asks whether two of
them put the k best classes of an image in the same order: 1 for the same order, 0 for no relation, −1 for the opposite
order. F1 and κ look only at the first choice; κ subtracts the agreement that chance would give, and is 0 there.
Agreement on images that both get right is easy. Agreement on images that both get wrong tells you more: only what the
encoders have learned makes them err in the same way. Two accurate classifiers agree more than two poor ones, so compare
pairs of similar accuracy."""
SOURCE = (
    'Shekhar, Bordes, Vincent, Morcos 2022, "Understanding Contrastive versus Reconstructive Self-Supervised Learning '
    'of Vision Transformers", and 2023, "Objectives Matter" (τ@k of linear probes, F1); Kendall 1945 (τ_b); '
    "Cohen 1960 (κ)"
)
SITES = classifiers.SITES
SPLITS = ("train", "test")
ANY_SITE = False
BY_DEFAULT = True
INVARIANT_TO = frozenset({"scale", "translation", "batching", "order"})

SUBSETS = ("all images", "both right", "both wrong")
BLOCK_NUMBERS = 2**21  # scores of all encoders that are in memory at a time
CHUNK_NUMBERS = 2**16  # scores of the best classes that are compared at a time; they stay in the cache


@dataclass(frozen=True)
class AgreementConfig(ClassifierChoice):
    """`k`: the numbers of best classes whose order is compared; `bootstrap` draws for the intervals of F1 and κ."""

    k: tuple[int, ...] = (5, 10, 100)
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.k or min(self.k) < 2:
            raise InputError(f"The order of classes needs k of at least 2, not {', '.join(map(str, self.k)) or 'none'}")
        if self.bootstrap < 1:
            raise InputError(f"The bootstrap needs at least 1 draw, not {self.bootstrap}")


# The pure functions


def kendall_tau(
    scores_a: npt.NDArray[Any] | Tensor, scores_b: npt.NDArray[Any] | Tensor, k: int
) -> npt.NDArray[np.float64]:
    """τ@k of each image: scores (n, C) of the same images and classes, twice → (n,); take the mean of it.

    τ_b on the k classes that A scores highest (of equal scores the first classes), averaged with that on the k classes
    that B scores highest; with fewer than k classes on all of them. NaN where all scores of those classes are tied, or
    where a score is NaN.

    >>> a = np.array([[9.0, 8.0, 7.0, 1.0], [9.0, 8.0, 7.0, 1.0]])
    >>> b = np.array([[5.0, 4.0, 3.0, 0.0], [3.0, 4.0, 5.0, 0.0]])
    >>> kendall_tau(a, b, 3)
    array([ 1., -1.])
    """
    # In float64, also what NumPy does not know (bfloat16) and what has no negative (unsigned numbers).
    a, b = (
        np.asarray(x.detach().double().cpu() if isinstance(x, torch.Tensor) else x, np.float64)
        for x in (scores_a, scores_b)
    )
    if a.ndim != 2 or a.shape != b.shape or a.shape[1] < 2:
        raise InputError(f"τ needs two arrays (images, classes) of the same shape, not {a.shape} and {b.shape}")
    if k < 2:
        raise InputError(f"The order of classes needs k of at least 2, not {k}")
    tau = _tau(a, b, best_classes(a, k), best_classes(b, k))
    tau[(np.isnan(a) | np.isnan(b)).any(1)] = np.nan
    return tau


def best_classes(scores: npt.NDArray[Any], k: int) -> npt.NDArray[np.int64]:
    """The k classes (n, k) with the highest scores of each image, highest first; of equal scores the first classes."""
    best: npt.NDArray[np.int64] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return best


def _tau(
    a: npt.NDArray[Any], b: npt.NDArray[Any], best_of_a: npt.NDArray[np.int64], best_of_b: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Mean of τ_b on the best classes of A and on those of B, (n,)."""
    step = max(1, CHUNK_NUMBERS // best_of_a.shape[1])
    parts = [np.zeros(0)]
    for start in range(0, len(a), step):
        rows = slice(start, start + step)
        taus = [
            tau_b(*(np.take_along_axis(scores[rows], best[rows], 1) for scores in (a, b)))
            for best in (best_of_a, best_of_b)
        ]
        parts.append((taus[0] + taus[1]) / 2)
    return np.concatenate(parts)


def tau_b(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """τ_b of each row of two arrays (m, k), all pairs (i, i + lag) of a lag at once."""
    agreed, differ_a, differ_b = np.zeros((3, len(a)))
    for lag in range(1, a.shape[1]):
        # −1, 0 or 1 in one byte: differences would overflow at infinity
        sign_a, sign_b = (
            (x[:, :-lag] > x[:, lag:]).view(np.int8) - (x[:, :-lag] < x[:, lag:]).view(np.int8) for x in (a, b)
        )
        agreed += np.sum(sign_a * sign_b, 1, np.int64)
        differ_a += np.count_nonzero(sign_a, 1)
        differ_b += np.count_nonzero(sign_b, 1)
    with np.errstate(invalid="ignore"):
        tau: npt.NDArray[np.float64] = agreed / np.sqrt(differ_a * differ_b)
    return tau


def macro_f1(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """F1 of decisions a against decisions b as if b were the truth, mean over the classes that occur; symmetric.

    >>> macro_f1([0, 0, 1, 1], [0, 0, 0, 1])
    0.7333333333333334
    """
    return float(_top_1(*_table(a, b))[0])


def cohen_kappa(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Cohen's κ of two sequences of decisions: agreement beyond chance; NaN where both always choose one class.

    >>> cohen_kappa([0, 0, 1, 1], [0, 0, 0, 1])
    0.5
    """
    return float(_top_1(*_table(a, b))[1])


def _table(a: npt.ArrayLike, b: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The pairs of decisions that occur (2, cells), as codes 0 … C − 1, and how often."""
    both = np.stack([np.asarray(a), np.asarray(b)])
    if both.ndim != 2 or not both.size:
        raise InputError(f"Agreement needs two sequences of decisions, not shapes {np.shape(a)} and {np.shape(b)}")
    codes = np.unique(both, return_inverse=True)[1].reshape(both.shape)
    return np.unique(codes, axis=1, return_counts=True)


def _top_1(cells: npt.NDArray[np.int64], counts: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """F1 and κ from a table of decisions."""
    classes = int(cells.max()) + 1
    n_a, n_b = (np.bincount(side, counts, classes) for side in cells)
    same = cells[0] == cells[1]
    both = np.bincount(cells[0][same], counts[same], classes)
    occurs = n_a + n_b > 0
    n = counts.sum()
    observed, expected = both.sum() / n, n_a @ n_b / n**2
    kappa = (observed - expected) / (1 - expected) if expected < 1 else np.nan
    return np.array([np.mean(2 * both[occurs] / (n_a + n_b)[occurs]), kappa])


def _with_interval(a: npt.NDArray[Any], b: npt.NDArray[Any], draws: int, seed: int) -> npt.NDArray[np.float64]:
    """F1 and κ, and their 95 % percentile bootstrap over images: (value, low, high) × (F1, κ)."""
    cells, counts = _table(a, b)
    random = np.random.default_rng(seed)
    # To draw images is to draw from the cells of the table.
    drawn = np.array([_top_1(cells, random.multinomial(len(a), counts / len(a))) for _ in range(draws)])
    finite = drawn[~np.isnan(drawn).any(1)]
    bounds = np.percentile(finite, (2.5, 97.5), axis=0) if len(finite) else np.full((2, 2), np.nan)
    return np.vstack([_top_1(cells, counts), bounds])


# The streaming analysis


class AgreementAnalysis(DecisionAnalysis):
    """Fits the classifiers when the pass is over, and compares all pairs of them, block of images by block."""

    def __init__(self, config: AgreementConfig, plan: Plan) -> None:
        if len(plan.encoders) < 2:
            raise InputError(
                f"Agreement compares encoders, but there is only {next(iter(plan.encoders))!r}; give at least two, "
                "or leave agreement out"
            )
        super().__init__(config, plan, SPLITS, "Agreement", "agreement")
        self.config = config
        classes = len(plan.images.classes)
        self.k = sorted({k for k in config.k if k <= classes}) or [classes]

    def compute(self) -> xr.Dataset:
        fitted, truth = self.fitted(), self.labels("test")
        reason = {name: c.reason or flaw(self.input_of(name, "test"), "test", False) for name, c in fitted.items()}
        usable = {name: c for name, c in fitted.items() if not reason[name]}
        pairs = list(itertools.combinations(usable, 2))
        size = max(64, BLOCK_NUMBERS // (len(self.plan.images.classes) * len(fitted)))
        blocks = [slice(start, start + size) for start in range(0, len(truth), size)]
        parts = shared(blocks, lambda rows: self._compare(usable, pairs, rows))
        decided = {name: np.concatenate([decisions[name] for decisions, _ in parts]) for name in usable}
        sums = torch.from_numpy(np.sum([part for _, part in parts], axis=0))
        draws, seed = self.config.bootstrap, self.plan.seed
        top = shared(pairs, lambda pair: _with_interval(decided[pair[0]], decided[pair[1]], draws, seed))
        accuracy = np.array([accuracy_of(decided[e], truth) if e in decided else NOTHING for e in fitted]).T
        order = [*mean_of_images(sums), sums[:, :, 0].sum(0).numpy()]  # each (P, 3 · K)
        shape = (len(pairs), len(SUBSETS), len(self.k))
        data = {
            f"tau{end}": (("images", "k", "encoder_a", "encoder_b"), _square(values.reshape(shape), pairs, reason, end))
            for end, values in zip((*ENDS, "_images"), order, strict=True)
        } | {
            f"{name}{end}": (
                ("encoder_a", "encoder_b"),
                _square(np.array([t[at, number] for t in top]), pairs, reason, end),
            )
            for number, name in enumerate(("f1", "kappa"))
            for at, end in enumerate(ENDS)
        }
        result = xr.Dataset(
            {
                **data,
                **self.describe(fitted),
                **{f"test_accuracy{end}": ("encoder", values) for end, values in zip(ENDS, accuracy, strict=True)},
                "reason": (("images", "encoder_a", "encoder_b"), _reasons(reason, data["tau_images"][1])),
            },
            coords={
                "images": list(SUBSETS),
                "k": self.k,
                **{f"encoder{end}": list(fitted) for end in ("_a", "_b", "")},
            },
            attrs={
                "classes": len(self.plan.images.classes),
                "n_train": len(self.labels("train")),
                "n_test": len(truth),
                "interval": "95 %: τ normal over images, F1 and κ bootstrap over images, accuracies Wilson",
                "probe": classifiers.about(self.config),
            },
        )
        return self._kept(sums.reshape(*sums.shape[:-1], *shape[1:]), pairs, reason, decided).beside(result)

    def _kept(
        self,
        sums: Tensor,  # (G, P, 3, subsets, k)
        pairs: list[tuple[str, str]],
        reason: Mapping[str, str],
        decided: Mapping[str, npt.NDArray[np.int64]],
    ) -> Kept:
        """By groups of images: sums of τ, how often each class is chosen and how often by both, right decisions."""
        kept, names, truth = Kept({"group": self.groups("test").axis}), list(reason), self.labels("test")
        dims, both_dims = ("group", "images", "k", "encoder_a", "encoder_b"), ("group", "encoder_a", "encoder_b")
        count, total = (_square(sums[:, :, n].transpose(0, 1).numpy(), pairs, reason, "") for n in range(2))
        kept.add("tau", Mean("tau_sum", "tau_count"), tau_sum=(dims, total), tau_count=(dims, count))
        groups = self.groups("test").of("test")[self.labelled("test")]
        chosen = np.zeros((GROUPS, len(names), len(self.plan.images.classes)), np.uint32)
        both = np.zeros((GROUPS, len(names), *chosen.shape[1:]), np.uint32)
        right = np.zeros((GROUPS, len(names)))
        for a, decisions in decided.items():
            i = names.index(a)
            np.add.at(chosen, (groups, np.full(len(decisions), i), decisions), 1)
            right[:, i] = self.by_group("test", decisions == truth)
            for b, other in decided.items():
                same = decisions == other
                at = np.full((2, int(same.sum())), [[i], [names.index(b)]])
                np.add.at(both, (groups[same], *at, decisions[same]), 1)
        parts = {"chosen": (("group", "encoder", "choice"), chosen), "both": ((*both_dims, "choice"), both)}
        for name in ("f1", "kappa"):
            kept.add(name, TopChoices("chosen", "both", kappa=name == "kappa"), **parts)
        images = self.by_group("test", np.ones(len(truth)))
        kept.add(
            "test_accuracy",
            Mean("right", "labelled"),
            right=(("group", "encoder"), right),
            labelled=(("group",), images),
        )
        return kept

    def _compare(
        self, known: Mapping[str, Classifier], pairs: list[tuple[str, str]], rows: slice
    ) -> tuple[dict[str, npt.NDArray[np.int64]], npt.NDArray[np.float64]]:
        """Decisions of each encoder on some images, and the sums of τ over them: (G, P, 3, 3 · K), see `add_images`."""
        scores = {name: c.scores(self.input_of(name, "test")[rows]) for name, c in known.items()}
        best = {name: best_classes(values, max(self.k)) for name, values in scores.items()}
        right = {name: classes[:, 0] == self.labels("test")[rows] for name, classes in best.items()}
        sums = torch.zeros(GROUPS, len(pairs), 3, len(SUBSETS) * len(self.k), dtype=torch.float64, device="cpu")
        groups = torch.from_numpy(self.groups("test").of("test")[self.labelled("test")[rows]])
        members = (torch.arange(GROUPS, device=groups.device)[:, None] == groups).double()
        for number, (a, b) in enumerate(pairs):
            taus = [_tau(scores[a], scores[b], best[a][:, :k], best[b][:, :k]) for k in self.k]
            subsets = (np.ones_like(right[a]), right[a] & right[b], ~(right[a] | right[b]))
            for column, (subset, tau) in enumerate(itertools.product(subsets, taus)):
                counts = torch.from_numpy(subset & ~np.isnan(tau))
                if counts.any():
                    values = torch.from_numpy(tau)[counts, None]
                    add_images(sums[..., column : column + 1], number, values, members[:, counts])
        return {name: classes[:, 0] for name, classes in best.items()}, sums.numpy()


def _square(
    values: npt.NDArray[np.float64], pairs: list[tuple[str, str]], reason: Mapping[str, str], end: str
) -> npt.NDArray[np.float64]:
    """Numbers of pairs (P, …) over both encoders (…, A, B); each agrees with itself (1, without interval)."""
    names = list(reason)
    full = np.full((*values.shape[1:], len(names), len(names)), np.nan)
    for (a, b), value in zip(pairs, values, strict=True):
        i, j = names.index(a), names.index(b)
        full[..., i, j] = full[..., j, i] = value
    for number, why in enumerate(reason.values()):
        full[..., number, number] = 1.0 if not end and not why else np.nan
    return full


def _reasons(reason: Mapping[str, str], images: npt.NDArray[np.float64]) -> npt.NDArray[np.str_]:
    """Why a pair has no τ (images, A, B): one of its classifiers, or no image of that kind."""
    why = np.where((images == 0).all(1), "there are no such images", "").astype(object)
    for number, (name, flawed) in enumerate(reason.items()):
        if flawed:
            why[:, number, :] = why[:, :, number] = f"{name}: {flawed}"
    return why.astype(str)


def cost(config: AgreementConfig, plan: Plan) -> Cost:
    probes = cost_of(config, plan, SPLITS)
    return Cost(probes.memory + 24 * BLOCK_NUMBERS, probes.disk)


def figures(result: xr.Dataset) -> list[Figure]:
    encoders = [str(name) for name in result.encoder.values]

    def table(name: str) -> pd.DataFrame:
        found = result[[f"{name}{end}" for end in ENDS]].to_dataframe().reset_index()
        return found.rename(columns={name: "value", f"{name}_low": "low", f"{name}_high": "high"}).assign(measure=name)

    def chart(cells: pd.DataFrame, title: str) -> Any:
        return heatmap(
            cells.rename(columns={"encoder_a": "row", "encoder_b": "column"}),
            row_title="encoder A",
            column_title="encoder B",
            value_title=title,
            rows=encoders,
            columns=encoders,
            facet="measure",
        )

    why = result.reason.to_dataframe().reset_index()
    order = table("tau").merge(why, on=["images", "encoder_a", "encoder_b"])
    order["measure"] = [f"{images}, k = {k}" for images, k in zip(order.images, order.k, strict=True)]
    first = pd.concat([table("f1"), table("kappa")]).replace({"measure": {"f1": "macro F1", "kappa": "Cohen's κ"}})
    first = first.merge(why[why.images == SUBSETS[0]].drop(columns="images"), on=["encoder_a", "encoder_b"])
    who = "; ".join(
        f"{e}: {kind} at {site}, " + ("which cannot decide" if np.isnan(right) else f"{right:.1%} right")
        for e, kind, site, right in zip(
            encoders, result.classifier.values, result.classifier_site.values, result.test_accuracy.values, strict=True
        )
    )
    about_order = (
        f"How alike two encoders rank the k best classes of an image: on all {result.attrs['n_test']} test images, on "
        f"those that both get right, on those that both get wrong. Who decides: {who}."
    )
    about_first = (
        "Macro F1 of the first choices of A against those of B, and Cohen's κ, which is 0 for what chance would give. "
        f"{result.attrs['n_test']} test images, 95 % bootstrap intervals. Who decides: {who}."
    )
    return [
        Figure("tau", "Kendall's τ of the k best classes", about_order, chart(order, "τ@k"), order),
        Figure("top1", "Agreement of first choices", about_first, chart(first, "agreement"), first),
    ]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    k = int(result.k[0])
    lines = []
    for a, b in itertools.combinations(result.encoder.values, 2):
        pair = result.sel(encoder_a=a, encoder_b=b, k=k)
        tau, wrong = (float(pair.tau.sel(images=images)) for images in (SUBSETS[0], SUBSETS[2]))
        if not np.isnan(tau):
            detail = f"κ {float(pair.kappa):.2f}, F1 {float(pair.f1):.2f}"
            detail += "" if np.isnan(wrong) else f"; τ@{k} where both are wrong {wrong:.2f}"
            lines.append((f"{a} and {b}", f"τ@{k} = {tau:.2f}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    like = likeness(result)
    about = f"{like.about}, mean over the other encoders"
    others = np.where(np.eye(len(like.encoders), dtype=bool), np.nan, like.values)
    values = {
        name: float(np.nanmean(row)) for name, row in zip(like.encoders, others, strict=True) if np.isfinite(row).any()
    }
    return [KeyNumber("agreement", about, values)] if values else []


def likeness(result: xr.Dataset) -> Likeness:
    tau = result.tau.sel(images=SUBSETS[0]).isel(k=0).transpose("encoder_a", "encoder_b").values
    about = f"rank correlation of the first {int(result.k[0])} classes"
    return Likeness(f"τ@{int(result.k[0])}", about, tuple(map(str, result.encoder_a.values)), tau)
