"""Noise: which frequencies does an encoder need to tell the class? Accuracy with noise of one frequency band added.

    drop(f) = accuracy(x) − accuracy(x + noise of frequencies f − 0.05π … f + 0.05π)

The classifier is fitted to images without noise. How the noise is made: `sightline/images/noise.py`.

Source: Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Figures 8b and F.2, after Park & Kim
2022, "How Do Vision Transformers Work?".
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xarray as xr

from sightline.core.errors import InputError, nearest
from sightline.core.groups import Kept, Mean
from sightline.core.processes import shared
from sightline.core.results import ENDS, NOTHING
from sightline.images import noise
from sightline.measure import classifiers
from sightline.measure.classifiers import ClassifierChoice, DecisionAnalysis, cost_of
from sightline.measure.estimators.intervals import accuracy_of, difference_of
from sightline.measure.groups import GROUPS
from sightline.measure.plan import Cost, Plan
from sightline.report.figures import Figure, KeyNumber, curve_over_depth, key_number

TOPIC = "robust"
TITLE = "Noise by frequency"
QUESTION = "How much accuracy does noise of each frequency cost, from coarse waves to fine grain?"
FORMULA = """\
drop(f) = accuracy on the test images − accuracy on the same images with noise of frequency f added
noise: white Gaussian, cut to the ring |ω| ∈ [f − 0.05π, f + 0.05π] of its Fourier transform, scaled to one strength
kind=sign: ±ε at every pixel, cut to the square ring max(|ω_row|, |ω_column|) ∈ [f − 0.05π, f + 0.05π), not scaled"""
HOW_TO_READ = """\
The strength of the noise is the same in every band; only its grain differs, from waves as large as objects (left) to
single pixels (right, π). A high curve at the left says that decisions rest on coarse structure such as shape, a high
curve at the right that they rest on fine detail such as texture. Contrastive encoders are typically robust to
high-frequency noise, those trained by masked image modelling are not. Where a drop is below 0, either 0 is within its
interval, or the noise helps. Compare encoders of similar accuracy: one that starts near chance has nothing to lose."""
SOURCE = (
    'Park, Kim, Heo, Kim, Yun 2023, "What Do Self-Supervised Vision Transformers Learn?", Figures 8b and F.2; '
    'the noise after Park, Kim 2022, "How Do Vision Transformers Work?"'
)
SITES = classifiers.SITES
SPLITS = ("train", "test")
ANY_SITE = False
BY_DEFAULT = False
INVARIANT_TO = frozenset({"scale", "translation", "batching", "order"})


@dataclass(frozen=True)
class NoiseConfig(ClassifierChoice):
    """Which noise.

    frequencies   centres of the bands in π
    strength      for pixels in [0, 1], the root mean square of the noise; of kind sign the ε before the band is cut out
    kind          gaussian: round bands, each as strong; sign: ±ε, square bands, as strong as they are large
    """

    frequencies: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    strength: float = noise.STRENGTH
    kind: str = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.frequencies or not all(0 < f <= math.sqrt(2) for f in self.frequencies):
            raise InputError(f"Frequencies must be above 0 and at most √2 (in units of π), not {self.frequencies}")
        if not 0 < self.strength <= 1:
            raise InputError(f"The strength of the noise must be above 0 and at most 1, not {self.strength}")
        if self.kind not in noise.KINDS:
            raise InputError(f"There is no noise of kind {self.kind!r}{nearest(self.kind, noise.KINDS)}")

    @property
    def bands(self) -> dict[float, str]:
        """The view of each frequency."""
        return {f: noise.name_of(f, self.strength, self.kind) for f in self.frequencies}


def views(config: NoiseConfig, split: str) -> tuple[str, ...]:
    return ("plain", *config.bands.values()) if split == "test" else ("plain",)


def accuracy_drop(plain: npt.ArrayLike, noisy: npt.ArrayLike, truth: npt.ArrayLike) -> tuple[float, float, float]:
    """Accuracy of the decisions `plain` minus that of `noisy`, and its 95 % interval, paired over images.

    >>> [round(number, 2) for number in accuracy_drop([1, 2, 3, 3], [1, 2, 3, 0], [1, 2, 3, 3])]
    [0.25, -0.28, 0.61]
    """
    return difference_of(np.equal(plain, truth), np.equal(noisy, truth))


class NoiseAnalysis(DecisionAnalysis):
    """Features with and without noise go to disk; classifiers decide when the pass is over."""

    def __init__(self, config: NoiseConfig, plan: Plan) -> None:
        super().__init__(config, plan, SPLITS, "The accuracy under noise", "noise")
        self.config = config
        for encoder, f in itertools.product(plan.encoders.values(), config.frequencies):
            if not noise.has_frequencies(encoder.preprocess.size, f, config.kind):
                height, width = encoder.preprocess.size
                raise InputError(
                    f"Encoder {encoder.name!r} sees {height} × {width} pixels, which have no frequency near {f:g}π; "
                    "choose other frequencies"
                )

    def compute(self) -> xr.Dataset:
        classifiers, truth = self.fitted(), self.labels("test")
        bands = self.config.bands
        jobs = list(itertools.product(classifiers, ["plain", *bands.values()]))
        answers = shared(jobs, lambda job: self.decisions(classifiers[job[0]], job[0], "test", job[1]))
        decided = dict(zip(jobs, answers, strict=True))
        plain = np.array([NOTHING] * len(classifiers))
        noisy, drop = (np.full((len(classifiers), len(bands), 3), np.nan) for _ in range(2))
        reason = np.full((len(classifiers), len(bands)), "", dtype=object)
        right = np.zeros((GROUPS, len(classifiers), 1 + len(bands)))
        for e, encoder in enumerate(classifiers):
            without, why = decided[encoder, "plain"]
            if without is not None:
                plain[e] = accuracy_of(without, truth)
                right[:, e, 0] = self.by_group("test", without == truth)
            for b, name in enumerate(bands.values()):
                with_noise, flawed = decided[encoder, name]
                reason[e, b] = why or flawed
                if without is not None and with_noise is not None:
                    noisy[e, b] = accuracy_of(with_noise, truth)
                    drop[e, b] = accuracy_drop(without, with_noise, truth)
                    right[:, e, 1 + b] = self.by_group("test", with_noise == truth)
        over = ("encoder", "frequency")
        data: dict[str, tuple[tuple[str, ...], npt.NDArray[np.float64]]] = {
            "test_accuracy": (("encoder",), plain),
            "accuracy": (over, noisy),
            "drop": (over, drop),
        }
        result = xr.Dataset(
            {
                **{
                    f"{name}{end}": (dims, values[..., at])
                    for name, (dims, values) in data.items()
                    for at, end in enumerate(ENDS)
                },
                **self.describe(classifiers),
                "reason": (over, reason.astype(str)),
            },
            coords={"encoder": list(classifiers), "frequency": list(bands)},
            attrs={
                "strength": self.config.strength,
                "kind": self.config.kind,
                "width": 2 * noise.HALF,
                "n_train": len(self.labels("train")),
                "n_test": len(truth),
                "chance": 1 / len(np.unique(self.labels("train"))),
                "interval": "95 %: accuracies Wilson, drops Agresti and Min, paired over images",
            },
        )
        return self._kept(right).beside(result)

    def _kept(self, right: npt.NDArray[np.float64]) -> Kept:
        """Right decisions by groups of images (G, encoders, without and with noise of each band), for contrasts."""
        kept, noisy = Kept({"group": self.groups("test").axis}), ("group", "encoder", "frequency")
        images = (("group",), self.by_group("test", np.ones(len(self.labels("test")))))
        parts = {
            "test_accuracy": (noisy[:2], right[..., 0]),
            "accuracy": (noisy, right[..., 1:]),
            "drop": (noisy, right[..., :1] - right[..., 1:]),
        }
        for name, part in parts.items():
            kept.add(name, Mean(f"{name}_sum", "images"), **{f"{name}_sum": part, "images": images})
        return kept


def cost(config: NoiseConfig, plan: Plan) -> Cost:
    probes = cost_of(config, plan, SPLITS)
    pixels = max(3 * math.prod(encoder.preprocess.size) for encoder in plan.encoders.values())
    return Cost(probes.memory + 24 * plan.batch * pixels, probes.disk)


def figures(result: xr.Dataset) -> list[Figure]:
    table = result[["drop", "drop_low", "drop_high", "accuracy", "reason"]].to_dataframe().reset_index()
    names = {"encoder": "series", "frequency": "depth", "drop": "value", "drop_low": "low", "drop_high": "high"}
    chart = curve_over_depth(
        table.rename(columns=names),
        value_title="drop in accuracy",
        depth_title="frequency of the noise (π)",
        series_title="encoder",
        series=[str(name) for name in result.encoder.values],
        reference=(0.0, "no drop"),
        domain=None,
        percent=True,
        details={"accuracy": "accuracy with noise"},
    )
    plain = ", ".join(f"{a.encoder.item()}: {float(a):.1%}" for a in result.test_accuracy.dropna("encoder"))
    about = result.attrs
    how = f"Noise of root mean square {about['strength']:g} (of pixels in [0, 1]) in bands"
    if about.get("kind") == "sign":
        how = f"Noise of ±{about['strength']:g} at every pixel (in [0, 1]), cut to square bands"
    caption = (
        f"{how} {about['width']:g}π wide; "
        f"{about['n_test']} test images. Accuracy without noise: {plain or 'unknown'}. Shaded: 95 % intervals."
    )
    return [Figure("drop", "Drop in accuracy over the frequency of noise", caption, chart, table)]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    lines = []
    for encoder in result.encoder.values:
        drop = result["drop"].sel(encoder=encoder).dropna("frequency")
        if drop.size:
            worst = drop[int(np.argmax(drop.values))]
            plain = float(result.test_accuracy.sel(encoder=encoder))
            detail = f"at most, with noise of {float(worst.frequency):g}π; accuracy without noise {plain:.1%}"
            lost = f"−{100 * float(worst):.1f} points" if float(worst) > 0 else "nothing lost"
            lines.append((str(encoder), lost, detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    about = "accuracy lost to noise of the worst frequency"
    numbers = key_number(
        result, "drop", at="highest", over="frequency", title="noise drop", about=about, style=".1%", best="lowest"
    )
    return [replace(number, over="frequencies") for number in numbers]
