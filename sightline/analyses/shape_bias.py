"""Shape bias: where shape and texture of an image contradict each other, which of them decides?

    shape bias = decisions for the shape / (decisions for the shape + decisions for the texture)

on cue-conflict images, such as the outline of a cat with the skin of an elephant. Decisions for a third class count
for neither.

Source: Geirhos et al. 2019; Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Figures 8a and F.2.

Shapes: n images, C classes.
"""

import math
from dataclasses import dataclass

import altair as alt
import numpy as np
import numpy.typing as npt
import xarray as xr

from sightline.core.errors import InputError
from sightline.core.groups import Kept, Mean
from sightline.core.processes import shared
from sightline.core.results import ENDS, NOTHING, interval
from sightline.measure import classifiers
from sightline.measure.classifiers import ClassifierChoice, DecisionAnalysis, cost_of
from sightline.measure.contract import FurtherImages
from sightline.measure.estimators.intervals import wilson
from sightline.measure.groups import GROUPS
from sightline.measure.plan import Cost, Plan
from sightline.report.figures import FIRST, Figure, KeyNumber, of_encoders

TOPIC = "robust"
TITLE = "Shape bias"
QUESTION = "Where shape and texture contradict each other, which of them does the encoder go by?"
FORMULA = (
    "shape bias = decisions for the shape class / (decisions for the shape class + decisions for the texture class)"
)
HOW_TO_READ = """\
Every image has the shape of one class and the texture of another. 1 means that all decisions for either of the two go
by shape, 0 that they go by texture. Dots are the classes (of the shape), the line is their mean. Look also at the share
of decisions that are for either: where it is small, the encoder sees neither, and the bias rests on few images.
Encoders trained by contrast lean towards shape, those trained by masked image modelling towards texture. An encoder
without a head decides by a probe that is fitted to ordinary images; one with the 1000 classes of ImageNet decides among
the 16 of the published cue-conflict images by the mean probability of the classes that belong to each. The caption says
who decides, and how well on ordinary images: a classifier that hardly works, such as a head for other classes, has no
bias to speak of."""
SOURCE = (
    'Geirhos et al. 2019, "ImageNet-trained CNNs are biased towards texture"; '
    'Park, Kim, Heo, Kim, Yun 2023, "What Do Self-Supervised Vision Transformers Learn?", Figures 8a and F.2'
)
SITES = classifiers.SITES
SPLITS = ("train", "conflict")
IMAGES = {
    "conflict": FurtherImages(
        title="Cue-conflict images",
        what="cue-conflict images, the shape of one class with the texture of another",
        labels=("texture",),
        which="cue-conflict images are shapes:conflict, or files named after shape and texture, cat4-truck3.png, with "
        "folder:PATH?names=shape-texture",
    )
}
ANY_SITE = False
BY_DEFAULT = False
INVARIANT_TO = frozenset({"scale", "translation", "batching", "order"})


@dataclass(frozen=True)
class ShapeBiasConfig(ClassifierChoice):
    """Who decides, see `classifiers.ClassifierChoice`; heads with 1000 ImageNet classes by the 16 of Geirhos et al."""

    mapping: str = "auto"


def views(config: ShapeBiasConfig, split: str) -> tuple[str, ...]:
    """The images as they are; those of other splits are not looked at."""
    return ("plain",) if split in SPLITS else ()


def shape_bias(decisions: npt.ArrayLike, shape: npt.ArrayLike, texture: npt.ArrayLike) -> float:
    """Share of decisions for the shape among those for shape or texture; images where both are the same are left out.

    >>> shape_bias(decisions=[1, 1, 5, 7], shape=[1, 1, 1, 2], texture=[5, 6, 5, 6])
    0.6666666666666666
    """
    for_shape, for_texture, _ = _counts(*map(np.asarray, (decisions, shape, texture)))
    return for_shape / (for_shape + for_texture) if for_shape + for_texture else math.nan


def _counts(
    decisions: npt.NDArray[np.int64], shape: npt.NDArray[np.int64], texture: npt.NDArray[np.int64]
) -> tuple[int, int, int]:
    """Decisions for the shape, for the texture, and images, where the two differ."""
    conflict = shape != texture
    return (
        int((conflict & (decisions == shape)).sum()),
        int((conflict & (decisions == texture)).sum()),
        int(conflict.sum()),
    )


class ShapeBiasAnalysis(DecisionAnalysis):
    """Classifiers are fitted to the training images and decide on cue-conflict images when the pass is over."""

    def __init__(self, config: ShapeBiasConfig, plan: Plan) -> None:
        if "texture" not in plan.images.extras:
            raise InputError(
                f"Shape bias needs images with a shape and a texture class, and {plan.images.name} has none; give some "
                "such as shapes:conflict or folder:PATH?names=shape-texture"
            )
        super().__init__(config, plan, SPLITS, "Shape bias", "shape_bias")
        if not (self._texture(np.arange(len(plan.images.indices("conflict")))) >= 0).any():
            raise InputError("None of the cue-conflict images has a texture class; give some that have")

    def _texture(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        images = self.plan.images
        texture: npt.NDArray[np.int64] = images.extras["texture"][images.indices("conflict")[rows]]
        return texture

    def compute(self) -> xr.Dataset:
        """Shares of shape decisions, per class and overall, with intervals; who decided for each encoder."""
        classifiers = self.fitted()
        shape, texture = self.labels("conflict"), self._texture(self.labelled("conflict"))
        usable = (texture >= 0) & (texture != shape)
        numbers = np.unique(shape[usable])
        answers = shared(list(classifiers), lambda encoder: self.decisions(classifiers[encoder], encoder, "conflict"))
        bias, either = (np.full((len(classifiers), 1 + len(numbers), 3), np.nan) for _ in range(2))
        reason = np.full((len(classifiers), 1 + len(numbers)), "", dtype=object)
        counts = np.zeros((GROUPS, 3, len(classifiers), 1 + len(numbers)))  # for the shape, for either, images
        for e, (decided, why) in enumerate(answers):
            for c, chosen in enumerate([usable, *(usable & (shape == number) for number in numbers)]):
                if decided is None:
                    reason[e, c] = why
                    continue
                for_shape, for_texture, images = _counts(decided[chosen], shape[chosen], texture[chosen])
                of_shape, of_either = decided == shape, (decided == shape) | (decided == texture)
                each = np.stack([chosen & of_shape, chosen & of_either, chosen], 1)
                counts[:, :, e, c] = self.by_group("conflict", each)
                both = for_shape + for_texture
                either[e, c] = (both / images, *wilson(both, images)) if images else NOTHING
                bias[e, c] = (for_shape / both, *wilson(for_shape, both)) if both else NOTHING
                reason[e, c] = "" if both else "no decision was for the shape or for the texture"
        result = xr.Dataset(
            {
                **{f"overall{end}": ("encoder", bias[:, 0, at]) for at, end in enumerate(ENDS)},
                **{f"overall_either{end}": ("encoder", either[:, 0, at]) for at, end in enumerate(ENDS)},
                "overall_reason": ("encoder", reason[:, 0].astype(str)),
                **{f"shape_bias{end}": (("encoder", "class"), bias[:, 1:, at]) for at, end in enumerate(ENDS)},
                **{f"either{end}": (("encoder", "class"), either[:, 1:, at]) for at, end in enumerate(ENDS)},
                "reason": (("encoder", "class"), reason[:, 1:].astype(str)),
                **self.describe(classifiers),
            },
            coords={"encoder": list(classifiers), "class": [self.plan.images.classes[number] for number in numbers]},
            attrs={"n_train": len(self.labels("train")), "n_conflict": int(usable.sum()), "interval": "95 % Wilson"},
        )
        return self._kept(counts).beside(result)

    def _kept(self, counts: npt.NDArray[np.float64]) -> Kept:
        """Decisions by groups of images, (G, 3, encoders, 1 + classes), for contrasts."""
        kept, dims = Kept({"group": self.groups("conflict").axis}), ("group", "encoder", "class")
        for end, axes, at in (("overall", dims[:2], 0), ("class", dims, slice(1, None))):
            names = [f"{end}_{word}" for word in ("shape", "either", "images")]
            parts = {name: (axes, counts[:, n][:, :, at]) for n, name in enumerate(names)}
            shape, either, images = names
            kept.add("overall" if end == "overall" else "shape_bias", Mean(shape, either), **parts)
            kept.add("overall_either" if end == "overall" else "either", Mean(either, images))
        return kept


def cost(config: ShapeBiasConfig, plan: Plan) -> Cost:
    return cost_of(config, plan, SPLITS)


def figures(result: xr.Dataset) -> list[Figure]:
    """A dot for each class, a line for their mean; texture at the left, shape at the right."""
    table = result[["shape_bias", "shape_bias_low", "shape_bias_high", "either", "reason"]].to_dataframe().reset_index()
    encoders = [str(name) for name in result.encoder.values]
    x = alt.X("shape_bias:Q", title="shape bias: 0 by texture, 1 by shape").scale(domain=[0, 1], padding=8, nice=False)
    y = alt.Y("class:N", title=None, axis=alt.Axis(grid=True, ticks=False))
    colour = alt.Color("encoder:N").scale(domain=encoders, range="category").legend(orient="right")
    shares = {"shape_bias": "shape bias", "either": "decisions for shape or texture"}
    tip = [alt.Tooltip("encoder:N"), alt.Tooltip("class:N")]
    tip += [alt.Tooltip(f"{name}:Q", title=title, format=".1%") for name, title in shares.items()]
    base = alt.Chart(table).transform_filter("isValid(datum.shape_bias)")
    chart = alt.layer(
        base.mark_rule(strokeWidth=2).encode(x=alt.X("mean(shape_bias):Q"), color=colour),
        base.mark_point(size=60, filled=True, opacity=1).encode(
            x=x, y=y, color=colour, shape=alt.Shape("encoder:N").scale(domain=encoders), tooltip=tip
        ),
    ).properties(width=420, height=alt.Step(20))
    overall = "; ".join(f"{e}: {_overall(result.sel(encoder=e))}" for e in encoders)
    caption = (
        "Dots: share of decisions for the shape among those for shape or texture, by class of the shape; lines: their "
        f"mean. {result.attrs['n_conflict']} cue-conflict images. Overall: {overall}."
    )
    return [Figure("classes", "Shape or texture", caption, chart, table)]


def _overall(row: xr.Dataset) -> str:
    """The number of an encoder in words, or why there is none."""
    if why := str(row.overall_reason.item()):
        return why
    share = f"{float(row.overall):.1%} for the shape, of the {float(row.overall_either):.1%} of decisions for either"
    return f"{share}, {_who(row)}"


def _who(row: xr.Dataset) -> str:
    """Who decides for an encoder, and how well: a head that has learned other classes is found out by that."""
    probe = not np.isnan(row.left_out_accuracy)
    right = float(row.left_out_accuracy if probe else row.train_accuracy)
    images = "training images that were left out" if probe else "training images"
    by = f" ({mapping})" if (mapping := str(row.get("mapping", xr.DataArray("")).item())) else ""
    return f"by its {row.classifier.item()}{by}, {right:.1%} right on {images}"


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    return [
        (
            str(encoder),
            f"{float(row.overall):.1%} shape",
            f"{interval(float(row.overall_low), float(row.overall_high))}; "
            f"{float(row.overall_either):.1%} of decisions are for shape or texture; {_who(row)}",
        )
        for encoder in result.encoder.values
        if not np.isnan((row := result.sel(encoder=encoder)).overall)
    ]


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    about = "share of decisions for the shape, of those for shape or texture"
    return of_encoders(result, "overall", title="shape bias", about=about, style=".1%", place=FIRST)
