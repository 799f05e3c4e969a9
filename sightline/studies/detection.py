"""How well do detectors do that stand on these encoders? A Mask R-CNN each, frozen or end to end, on the same images.

    AP   mean over classes and over IoU thresholds 0.50 … 0.95 of the average precision

of boxes and of masks, for all objects and for small, medium and large ones, with intervals over the test images, which
are the same for all encoders, so that differences are paired (transfer/detection/average_precision.py).

Source: Shekhar et al. 2023, "Objectives Matter", tables 6 and 7, fig. 7; Li et al. 2022, "Exploring Plain Vision
Transformer Backbones for Object Detection"; Lin et al. 2014, "Microsoft COCO".

RUN/trainings/ENCODER             a detector each, with its detections.json
RUN/results/detection.nc, …       see core/run_folder.py
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from sightline.core.errors import counted
from sightline.core.groups import Axis, Kept, LeftOut
from sightline.core.provenance import fingerprint
from sightline.core.results import ENDS, interval
from sightline.core.run_folder import Run
from sightline.encoders.encoder import Encoder
from sightline.images.sets import Images
from sightline.images.sources.coco import Annotated
from sightline.measure.estimators.intervals import jackknife
from sightline.measure.request import named_encoders
from sightline.report.figures import FIRST, Figure, KeyNumber, Table, curve_over_depth, of_encoders
from sightline.training.launch import Launch
from sightline.transfer.detection.average_precision import KINDS, MEASURES, Range, parts_of, replicates
from sightline.transfer.detection.detect import ALL, NAME, DetectConfig, check, make_recipe, train_detector, truth_of
from sightline.transfer.detection.objects import Detections, Objects, objects_of
from sightline.transfer.detection.pictures import CERTAIN, draw, misses
from sightline.transfer.trainings import NOT_YET, Reuse, folder_of, prepare, train_each

TOPIC = "transfer"
TITLE = "Detection"
QUESTION = "How well do detectors built on these encoders find and outline objects?"
FORMULA = """\
AP  = mean over classes and IoU thresholds 0.50, 0.55, …, 0.95 of the precision at 101 recalls
AR  = mean over classes and thresholds of the largest recall, 100 detections per image at most
s²  = (g − 1)/g Σᵢ (AP without part i of the images − their mean)²,   AP ± t · s"""
HOW_TO_READ = """\
Each encoder has a detector of the same kind, trained with the same settings. A frozen encoder shows what its features
already hold; one that is trained as well shows how good a start it is. AP50 asks for a rough box, AP75 for a good one;
masks are outlines. Small, medium and large refer to the area of the objects, with the limits given below. Intervals are
over the test images; a difference between two encoders is more certain than the two intervals suggest, because both see
the same images: its own interval is in the second table. Intervals do not say how much another seed of the training
would change: for differences of a point or two, train several (--seed 1)."""
SOURCE = (
    'Shekhar et al. 2023, "Objectives Matter", tables 6 and 7, fig. 7; Li et al. 2022, "Exploring Plain Vision '
    'Transformer Backbones for Object Detection"; Lin et al. 2014, "Microsoft COCO"'
)

NOBODY = "there is no object of this size"
COCO_LIMITS = (32.0, 96.0)  # √area in pixels between small, medium and large
SAMPLED = 512  # training images whose objects decide where small ends and large begins
BINS = 6  # sizes of the curve
SHOWN = 10  # images of the gallery


def detect(
    encoders: Mapping[str, Encoder | str] | Sequence[Encoder | str] | Encoder | str,
    images: str | Images | None,
    out: str | Path,
    recipe: str | Path | None,
    settings: Mapping[str, Any],
    launch: Launch,
    reuse: Reuse | None = None,
) -> Run:
    """Train a detector on each encoder, see `sightline.api`, and measure it on the test images.

    `reuse` are runs by encoder whose trainings are known to be the same: they are taken over.
    """
    asked = prepare(make_recipe, named_encoders(encoders), images, out, recipe or NAME, settings, launch)
    members, data, base = asked.members, asked.data, asked.recipe
    for encoder in members.values():
        check(base, encoder, data)
    results = functools.cache(lambda: _Results(data, base.config))  # of the first process alone

    def train(name: str, folder: Path) -> Mapping[str, Detections]:
        return train_detector(members[name], data, folder, recipe=recipe, settings=settings, launch=asked.each)

    def result(found: Mapping[str, Mapping[str, Detections]]) -> xr.Dataset:
        for name in found.keys() - results().scores.keys():
            results().add(name, found[name])
        return results().kept(list(members)).beside(results().dataset(list(members)))

    folders = {name: folder_of(asked.out, name) for name in members}
    return train_each("detection", asked, folders, train, result, reuse=reuse)


class _Scores(NamedTuple):
    """Of one kind: the numbers, and what they are without each part of the images."""

    whole: NDArray[np.float64]  # (measures, ranges)
    without: NDArray[np.float64]  # (parts, measures, ranges)


class _Results:
    """What is known of the test images, and of the detectors so far."""

    def __init__(self, data: Images, config: DetectConfig) -> None:
        self.data, self.config = data, config
        self.truth = truth_of(data, "test")
        self.kinds = KINDS if config.masks else KINDS[:1]
        small, large = limits_of(data, config)
        self.ranges = [ALL, Range("small", 0, small), Range("medium", small, large), Range("large", large, ALL.high)]
        self.bins = _bins(self.truth.values())
        self.found: dict[str, Mapping[str, Detections]] = {}
        self.scores: dict[str, dict[str, _Scores]] = {}

    def add(self, name: str, found: Mapping[str, Detections]) -> None:
        """Measure a detector, on the images that could be read."""
        self.found[name] = found
        common = {image: one for image, one in self.truth.items() if image in found}
        again = [name] if len(common) == len(self.truth) else list(self.found)  # all on the same images
        self.truth, every, parts = common, [*self.ranges, *self.bins], parts_of(list(common))
        for one in again:
            detections = {image: self.found[one][image] for image in common}
            self.scores[one] = {
                kind: _Scores(*replicates(common, detections, len(self.data.classes), every, kind, parts))
                for kind in self.kinds
            }

    def dataset(self, encoders: Sequence[str]) -> xr.Dataset:
        """All numbers with their intervals, as far as they are known, and the gallery."""
        n = len(self.ranges)
        values = np.full((len(MEASURES), len(encoders), len(self.kinds), n + len(self.bins), 3), np.nan)
        apart = np.full((len(encoders), len(encoders), len(self.kinds), n, 3), np.nan)
        for (i, name), (k, kind) in itertools.product(enumerate(encoders), enumerate(self.kinds)):
            if name not in self.scores:
                continue
            mine = self.scores[name][kind]
            values[:, i, k] = np.stack([mine.whole, *jackknife(mine.whole, mine.without)], -1)
            for j, other in enumerate(encoders):
                if other in self.scores:
                    theirs = self.scores[other][kind]
                    ours = (mine.whole - theirs.whole)[0, :n], (mine.without - theirs.without)[:, 0, :n]
                    apart[i, j, k] = np.stack([ours[0], *jackknife(*ours)], -1)
        dims = ("encoder", "kind", "area")
        reason = np.where(np.isnan(values[0, :, :, :n, 0]), NOBODY, "").astype(object)
        reason[[name not in self.scores for name in encoders]] = NOT_YET
        variables: dict[str, Any] = {
            **_with_ends(dict(zip(MEASURES, values[..., :n, :], strict=True)), dims),
            **_with_ends({"AP_by_size": values[0, ..., n:, :]}, ("encoder", "kind", "bin")),
            **_with_ends({"difference": apart}, ("encoder", "other", "kind", "area")),
            "reason": (dims, reason.astype(str)),
            "objects": (("area",), self._counts(self.ranges)),
            "low_side": (("area",), [size.low for size in self.ranges]),
            "high_side": (("area",), [size.high for size in self.ranges]),
            "bin_objects": (("bin",), self._counts(self.bins)),
            "bin_side": (("bin",), [(size.low + size.high) / 2 for size in self.bins]),
        }
        result = xr.Dataset(
            variables,
            coords={
                "encoder": list(encoders),
                "other": list(encoders),
                "kind": list(self.kinds),
                "area": [size.name for size in self.ranges],
                "bin": np.arange(len(self.bins)),
            },
            attrs={
                "test_images": len(self.truth),
                "interval": f"95 %: jackknife over {counted(int(parts_of(list(self.truth)).max()) + 1, 'part')} of the "
                "test images, the same for all encoders",
                "areas": f"√area in pixels: small up to {self.ranges[1].high:.1f}, large from "
                f"{self.ranges[3].low:.1f} on",
                "encoders": "frozen" if self.config.frozen else "trained along",
            },
        )
        return result.merge(self._gallery([name for name in encoders if name in self.found]))

    def kept(self, encoders: Sequence[str]) -> Kept:
        """Every number without each part of the images, so that differences of any of them have an interval."""
        names, n = list(self.truth), len(self.ranges)
        parts = int(parts_of(names).max()) + 1
        without = np.full((len(MEASURES), parts, len(encoders), len(self.kinds), n), np.nan)
        for (i, name), (k, kind) in itertools.product(enumerate(encoders), enumerate(self.kinds)):
            if name in self.scores:
                without[:, :, i, k] = self.scores[name][kind].without[..., :n].swapaxes(0, 1)
        kept = Kept({"part": Axis(fingerprint(["parts", names]), "parts of the test images")})
        for measure, values in zip(MEASURES, without, strict=True):
            left_out = f"{measure}_left_out"
            kept.add(measure, LeftOut(left_out), **{left_out: (("part", "encoder", "kind", "area"), values)})
        return kept

    def _counts(self, ranges: Sequence[Range]) -> list[int]:
        """Objects of each size, without crowds."""
        areas = np.concatenate([one.areas[~one.crowd] for one in self.truth.values()])
        return [int(((areas >= low) & (areas <= high)).sum()) for low, high in (size.areas for size in ranges)]

    def _gallery(self, encoders: Sequence[str]) -> xr.Dataset:
        """Images with what is there and what each detector finds, the worst first."""
        counts = {
            image: [misses(one, self.found[name][image]) for name in encoders] for image, one in self.truth.items()
        }
        order = sorted(
            counts, key=lambda image: (-sum(c.missed for c in counts[image]), -sum(c.wrong for c in counts[image]))
        )
        chosen, captions, rows = order[:SHOWN], [], []
        place = {str(self.data.ids[i]): int(i) for i in self.data.indices("test")}
        for image in chosen:
            pixels = self.data.source.read([place[image]])[0].image
            assert pixels is not None, "it was read before"
            shown: list[Objects | Detections] = [self.truth[image], *(self.found[name][image] for name in encoders)]
            rows.append([draw(pixels, one, self.data.classes) for one in shown])
            told = [
                f"{name} misses {c.missed}, {c.wrong} wrong" for name, c in zip(encoders, counts[image], strict=True)
            ]
            there = int((~self.truth[image].crowd).sum())
            captions.append(f"{image}: {counted(there, 'object')}; {'; '.join(told)}")
        about = {
            "title": "What is found, and what is missed",
            "caption": "The images with the most missed objects first: what is there, and what each detector finds "
            f"with a score of {CERTAIN} or more. An object is found by a box of its class that overlaps it by half "
            "(IoU).",
        }
        axes = [f"gallery_{axis}" for axis in ("row", "column", "y", "x", "rgb")]
        return xr.Dataset(
            {"gallery": (axes, np.array(rows, np.uint8), about)},
            coords={"gallery_row": captions, "gallery_column": ["truth", *encoders]},
        )


def _with_ends(values: Mapping[str, NDArray[np.float64]], dims: Sequence[str]) -> dict[str, Any]:
    """Variables from arrays whose last axis is value, low and high."""
    return {f"{name}{end}": (dims, value[..., k]) for name, value in values.items() for k, end in enumerate(ENDS)}


def limits_of(data: Images, config: DetectConfig) -> tuple[float, float]:
    """√area in pixels where medium and large begin: as set, COCO's for its files, else terciles of training objects.

    COCO's would leave a size without objects where all images are small; then terciles are taken of its files, too.
    """
    if config.areas:
        return config.areas[0], config.areas[1]
    some = data.sample(SAMPLED, seed=0)
    objects = [objects_of(one) for one in some.targets(some.indices("train"))]
    sides = np.sqrt(np.concatenate([np.zeros(0), *(one.areas[~one.crowd] for one in objects)]))
    every_size = len(np.unique(np.digitize(sides, COCO_LIMITS))) == 3
    if not len(sides) or (isinstance(data.source, Annotated) and every_size):
        return COCO_LIMITS
    small, large = np.quantile(sides, [1 / 3, 2 / 3])
    return float(small), float(large)


def _bins(truth: Any) -> list[Range]:
    """Sizes with about the same number of test objects each."""
    sides = np.sqrt(np.concatenate([one.areas[~one.crowd] for one in truth]))
    edges = np.unique(np.quantile(sides, np.linspace(0, 1, BINS + 1))) if len(sides) else np.array([])
    return [Range(f"bin {i}", float(a), float(b)) for i, (a, b) in enumerate(itertools.pairwise(edges))]


# The page


def tables(result: xr.Dataset) -> list[Table]:
    """AP as the papers print it: boxes and masks, all and by size; and differences from the first encoder."""
    columns = ["encoder"]
    for kind in result.kind.values:
        columns += [f"{kind} {name}" for name in ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR")]
    rows = [[str(name), *_row(result.sel(encoder=name))] for name in result.encoder.values]
    how = str(result.attrs["encoders"])
    printed = [
        Table(
            "Average precision",
            f"In per cent, of encoders that are {how}; s, m, l: small, medium and large objects "
            f"({result.attrs['areas']}); {result.attrs['interval']}.",
            columns,
            rows,
        )
    ]
    if result.sizes["encoder"] > 1:
        first = str(result.encoder.values[0])
        printed.append(
            Table(
                f"Differences from {first}",
                f"AP minus that of {first} in points, on the same images, with 95 % intervals of the difference; * "
                "where the interval does not contain 0.",
                ["encoder", *(f"{kind} {area}" for kind in result.kind.values for area in result.area.values)],
                [
                    [str(name), *_differences(result.sel(encoder=name, other=first))]
                    for name in result.encoder.values[1:]
                ],
            )
        )
    return printed


def _row(one: xr.Dataset) -> list[str]:
    cells = []
    for kind in one.kind.values:
        every, by_size = one.sel(kind=kind, area="all"), one.sel(kind=kind)
        low, high = 100 * every.AP_low.item(), 100 * every.AP_high.item()
        between = f" [{low:.1f}, {high:.1f}]" if np.isfinite(low) else ""
        cells += [f"{_percent(every.AP)}{between}", _percent(every.AP50), _percent(every.AP75)]
        cells += [_percent(by_size.AP.sel(area=area)) for area in ("small", "medium", "large")]
        cells.append(_percent(every.AR))
    return cells


def _differences(one: xr.Dataset) -> list[str]:
    cells = []
    for kind, area in itertools.product(one.kind.values, one.area.values):
        value, low, high = (100 * one[f"difference{end}"].sel(kind=kind, area=area).item() for end in ENDS)
        certain = " *" if low > 0 or high < 0 else ""
        cells.append(f"{value:+.1f} [{low:+.1f}, {high:+.1f}]{certain}" if np.isfinite(value) else "–")
    return cells


def _percent(value: xr.DataArray) -> str:
    return f"{100 * value.item():.1f}" if np.isfinite(value.item()) else "–"


def figures(result: xr.Dataset) -> list[Figure]:
    names = [f"AP_by_size{end}" for end in ENDS]
    table = result[[*names, "bin_side", "bin_objects"]].to_dataframe().reset_index().dropna(subset="AP_by_size")
    if table.empty:
        return []
    points = table.rename(columns={**dict(zip(names, ("value", "low", "high"), strict=True)), "encoder": "series"})
    points = points.assign(depth=points.bin_side)
    chart = curve_over_depth(
        points[["series", "kind", "depth", "value", "low", "high", "bin_objects"]],
        value_title="AP",
        depth_title="side of the object, √area in pixels",
        series_title="encoder",
        series=[str(name) for name in result.encoder.values],
        facet="kind",
        domain=None,
        percent=True,
        details={"depth": "side", "bin_objects": "objects"},
    )
    text = "AP of objects of about the same size; each point stands for about the same number of test objects."
    return [Figure("size", "AP over the size of objects", text, chart, pd.DataFrame(table))]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    lines = []
    for name, kind in itertools.product(result.encoder.values, result.kind.values):
        one = result.sel(encoder=name, kind=kind, area="all")
        if np.isfinite(one.AP.item()):
            detail = f"{kind} AP, {result.attrs['encoders']}"
            if np.isfinite(one.AP_low.item()):
                detail += f", {interval(one.AP_low.item(), one.AP_high.item())}"
            lines.append((str(name), f"{one.AP.item():.1%}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    numbers = []
    for kind in map(str, result.kind.values):
        precision = result[["AP", "AP_low", "AP_high"]].sel(kind=kind, area="all")
        about = f"{kind} AP, {result.attrs['encoders']}"
        numbers += of_encoders(
            precision, "AP", title=f"{kind} AP", about=about, style=".1%", best="highest", place=FIRST
        )
    return numbers
