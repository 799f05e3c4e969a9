"""Orientation: can an image be told from its mirror image by the features of a block?

A ridge probe learns from training images and their mirror images which of the two a feature comes from:

    accuracy = share of test images and mirror images that the probe tells right;    0.5 = the features are invariant

Its penalty is chosen by the error on images that are left out together with their mirror images (see
estimators/ridge.py): a fit that has seen the one knows too much about the other.

Source: Shekhar et al. 2023, "Objectives Matter", section 2.2, where pictures generated from features show it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr

from sightline.core.errors import InputError, nearest
from sightline.core.processes import shared
from sightline.core.results import ENDS, NOTHING, interval, outside_decoder
from sightline.measure.estimators.intervals import wilson
from sightline.measure.estimators.ridge import BLOCK_NUMBERS, Sliceable, fit_ridge
from sightline.measure.groups import GROUPS
from sightline.measure.plan import Cost, Plan
from sightline.measure.pooled import Matrix, Pooled, disk, every_site, flaw, widths
from sightline.report.figures import Figure, KeyNumber, accuracy_over_depth, key_number

TOPIC = "robust"
TITLE = "Orientation"
QUESTION = "Do the features of a block still know left from right?"
FORMULA = (
    "accuracy of a ridge probe on frozen features at telling test images from their mirror images; 0.5 = invariant"
)
HOW_TO_READ = """\
Every image is shown twice, as it is and mirrored, and a linear probe is asked which of the two it sees. At 50 % the
features say nothing about it: the encoder is invariant to the flip, as far as a linear probe can tell. Above,
orientation is in the features. Encoders that were trained to give the same answer for both (contrast with flips as
augmentation, supervision) lose it towards the last blocks; encoders trained by reconstruction keep it, and lose it when
they are fine-tuned. The images must have an orientation in the first place: cars that all drive to the left are easy to
tell from their mirror images; if objects face either way equally often, there is little to find."""
SOURCE = (
    'Shekhar, Bordes, Vincent, Morcos 2023, "Objectives Matter: Understanding the Impact of Self-Supervised Objectives '
    'on Vision Transformer Representations", section 2.2 (invariances, seen in generated pictures)'
)
SITES = ("block.*", "norm", "decoder.block.*")
SPLITS = ("train", "test")
ANY_SITE = True
BY_DEFAULT = False
INVARIANT_TO = frozenset({"scale", "translation", "batching", "order"})

VIEWS = ("plain", "mirror")
FEATURES = ("cls", "gap")


@dataclass(frozen=True)
class OrientationConfig:
    """`features`: cls (the CLS token) and gap (the mean of all tokens), where they exist."""

    features: tuple[str, ...] = FEATURES

    def __post_init__(self) -> None:
        if not self.features:
            raise InputError(f"The orientation probe needs a feature; choose from {', '.join(FEATURES)}")
        for name in self.features:
            if name not in FEATURES:
                raise InputError(f"The orientation probe has no feature {name!r}{nearest(name, FEATURES)}")


def views(config: OrientationConfig, split: str) -> tuple[str, ...]:
    return VIEWS


def orientation_accuracy(train: tuple[Sliceable, Sliceable], test: tuple[Sliceable, Sliceable]) -> float:
    """Share of test features that a probe fitted to `train` tells right.

    Both are features (n, D) of images, and of the same images mirrored.

    >>> random = np.random.default_rng(0)
    >>> x, left = random.normal(size=(200, 4)), np.array([0, 0, 0, 2.0])
    >>> orientation_accuracy((x[:100] - left, x[:100] + left), (x[100:] - left, x[100:] + left)) > 0.9
    True
    >>> orientation_accuracy((x[:100], x[:100]), (x[100:], x[100:]))
    0.5
    """
    return float(oriented_right(train, test).mean())


def oriented_right(
    train: tuple[Sliceable, Sliceable], test: tuple[Sliceable, Sliceable], device: torch.device | str = "cpu"
) -> npt.NDArray[np.bool_]:
    """Which test features a probe fitted to `train` tells right: (2, n), images and mirror images."""
    labels = tuple(np.full(part.shape[0], number) for number, part in enumerate(train))
    probe = fit_ridge(train, labels, 2, device=device)
    return np.array([probe.decisions(part) == number for number, part in enumerate(test)])


class OrientationAnalysis(Pooled):
    """Features of images and mirror images go to disk; a probe for each block is fitted when the pass is over."""

    def __init__(self, config: OrientationConfig, plan: Plan) -> None:
        super().__init__(plan, SPLITS, every_site(plan, config.features))

    def compute(self) -> xr.Dataset:
        self.finish()
        chosen = list(dict.fromkeys(which[:3] for which in self.files))
        scores = shared(chosen, lambda names: self._score(*names))
        answers = {at: (numbers, why) for at, (numbers, why, _) in zip(chosen, scores, strict=True)}
        result = self.dataset([f"accuracy{end}" for end in ENDS], answers).assign_attrs(
            n_train=len(self.rows["train"]),
            n_test=len(self.rows["test"]),
            chance=0.5,
            interval="95 % Wilson, as if an image and its mirror image were one decision",
            probe="ridge, standardised features, penalty by the error on pairs of training images that are left out",
        )
        return self.with_right(
            result, "test", {at: right for at, (*_, right) in zip(chosen, scores, strict=True)}, labelled=False
        )

    def _score(
        self, encoder: str, site: str, feature: str
    ) -> tuple[tuple[float, float, float], str, npt.NDArray[np.float64]]:
        def both(split: str) -> tuple[Matrix, Matrix]:
            plain, mirror = (self.features(encoder, site, feature, view, split, labelled=False) for view in VIEWS)
            return plain, mirror

        train, test = both("train"), both("test")
        flaws = [flaw(part, "train") for part in train] + [flaw(part, "test", constant=False) for part in test]
        if why := next(filter(None, flaws), ""):
            return NOTHING, why, np.zeros(GROUPS)
        right = oriented_right(train, test, self.device).mean(0)  # an image and its mirror image: both, one or none
        ends = wilson(right.sum(), len(right))
        return (float(right.mean()), *ends), "", self.by_group("test", right)


def cost(config: OrientationConfig, plan: Plan) -> Cost:
    chosen = every_site(plan, config.features)
    width = max(widths(plan, *key)[name] for key, names in chosen.items() for name in names)
    return Cost(memory=8 * (4 * width**2 + 16 * BLOCK_NUMBERS), disk=disk(plan, SPLITS, chosen))


def figures(result: xr.Dataset) -> list[Figure]:
    about = result.attrs
    caption = (
        f"Accuracy of a ridge probe at telling {about['n_test']} test images from their mirror images, fitted to "
        f"{about['n_train']} training images and theirs; 50 % is chance. Bands are 95 % intervals."
    )
    return accuracy_over_depth(result, "Accuracy of the orientation probe", caption, "invariant", lowest=0.4)


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    lines = []
    for encoder in result.encoder.values:
        rows = result.sel(encoder=encoder).to_dataframe().reset_index().dropna(subset="accuracy")
        rows = rows[outside_decoder(rows.site)]
        if len(rows):
            last, best = rows[rows.site == rows.site.iloc[-1]].iloc[0], rows.iloc[int(rows.accuracy.argmax())]
            detail = f"at {last.site}, feature {last.feature}, {interval(last.accuracy_low, last.accuracy_high)}"
            detail += f"; most at {best.site}, feature {best.feature}: {best.accuracy:.1%}"
            lines.append((str(encoder), f"{last.accuracy:.1%}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    about = "accuracy of a probe that tells mirror images from images, at the last block"
    return key_number(result, "accuracy", at="last", title="left or right", about=about, style=".1%")
