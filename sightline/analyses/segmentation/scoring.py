"""From sums and patches on disk to mIoU: fit, choose on val, train the softmax, score test.

Images are scored in lots, which the processes of a run share, and which are the groups of the jackknife.

C classes and the background, P patches, D width, R shrinkages.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.processes import shared
from sightline.core.results import ENDS, NOT_FINITE, of_decoder
from sightline.images.label_maps import seen_part, shares, upsampling
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images
from sightline.measure.estimators.lda import Lda, PatchSums, fit_lda
from sightline.measure.estimators.overlap import count_overlap, iou_of, mean_over_classes, miou_of
from sightline.measure.estimators.pixels import draw_pixels, fit_softmax, stack_pixels
from sightline.measure.feature_cache import Features
from sightline.measure.plan import Plan

LOT = 32  # images that are scored at a time
GROUPS = 20  # of the jackknife, at least, where there are as many images
PIXELS = 256  # of a training image that the softmax sees
NUMBERS = 2**22  # scores of pixels at a time

Layer = tuple[str, str]  # encoder and site
Maps = list["npt.NDArray[np.int64]"]


@dataclass
class Scores:
    """What came out, by layer or by encoder."""

    reasons: dict[Layer, str] = field(default_factory=dict)  # why a layer has no number
    of_layers: dict[str, dict[Layer, float]] = field(default_factory=dict)  # variable → layer → number
    iou: dict[Layer, npt.NDArray[np.float64]] = field(default_factory=dict)  # (C + 1,)
    chosen: dict[str, str] = field(default_factory=dict)  # encoder → site
    softmax: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # encoder → mIoU and its interval
    softmax_iou: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    probes: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # encoder → weight, bias, classes
    fits: dict[Layer, Lda] = field(default_factory=dict)
    # IoU (lots, C + 1) without each lot of test images; of the softmax under the name of no site
    rest: dict[Layer, npt.NDArray[np.float64]] = field(default_factory=dict)
    pixels: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # of each class in test
    chosen_on: str = ""
    counts: dict[str, int] = field(default_factory=dict)  # images by split


@dataclass(frozen=True)
class Scoring:
    """What the scores are made of."""

    config: Any
    plan: Plan
    shapes: Mapping[Layer, tuple[int, int, int]]  # rows, columns, width
    files: Mapping[tuple[str, str, str], Features]  # encoder, site, split
    sample: npt.NDArray[np.int64]  # training rows on disk
    held_out: npt.NDArray[np.int64]  # those of them that choose
    rows: Mapping[str, npt.NDArray[np.int64]]  # split → rows of the files that could be read
    device: torch.device

    def run(self, sums: Mapping[Layer, PatchSums]) -> Scores:
        scores = Scores()
        for layer, of_layer in sums.items():
            fitted = fit_lda(of_layer, self.config.shrinkages)
            if isinstance(fitted, str):
                scores.reasons[layer] = fitted
            else:
                scores.fits[layer] = fitted
        self._choose(scores)
        self._train(scores)
        self._test(scores)
        return scores

    def patches(self, layer: Layer, split: str, rows: npt.NDArray[np.int64]) -> Tensor:
        """(n, P, D) of these rows of a file, on the device."""
        height, width, depth = self.shapes[layer]
        values = self.files[(*layer, split)].read()[0][rows]
        return torch.from_numpy(np.array(values, np.float32)).to(self.device).view(len(rows), height * width, depth)

    def preprocess(self, encoder: str) -> Preprocess:
        return self.plan.encoders[encoder].preprocess

    # Choosing

    def _choose(self, scores: Scores) -> None:
        """λ of each layer, and the layer of each encoder, by mIoU of patches on images that no fit has seen."""
        split, rows = ("val", self.rows["val"]) if "val" in self.rows else ("train", self._held_out())
        scores.chosen_on = (
            f"val, {len(rows)} images" if split == "val" else f"{len(rows)} training images that nothing else uses"
        )
        answers = shared(_lots(rows), lambda lot: self._patch_counts(scores.fits, split, lot))
        counts_of = {layer: np.sum([answer[layer] for answer in answers], 0) for layer in scores.fits}
        best = {layer: mean_over_classes(iou_of(counts)) for layer, counts in counts_of.items()}  # (R,)
        where = {layer: int(np.nanargmax(values)) for layer, values in best.items() if np.isfinite(values).any()}
        for layer in scores.fits.keys() - where.keys():
            unlabelled = "the images for selection have no labelled pixel"
            scores.reasons[layer] = unlabelled if np.isfinite(counts_of[layer]).all() else NOT_FINITE
        scores.fits = {layer: fitted for layer, fitted in scores.fits.items() if layer in where}
        scores.of_layers["val_miou"] = {layer: float(best[layer][r]) for layer, r in where.items()}
        scores.of_layers["shrinkage"] = {layer: self.config.shrinkages[r] for layer, r in where.items()}
        for layer, fitted in scores.fits.items():
            r = where[layer]
            scores.fits[layer] = Lda(
                fitted.weight[r : r + 1], fitted.bias[r : r + 1], fitted.classes, fitted.mean, fitted.covariance
            )
        for encoder, site in scores.fits:
            value = scores.of_layers["val_miou"][encoder, site]
            before = scores.chosen.get(encoder)
            if not of_decoder(site) and (before is None or value > scores.of_layers["val_miou"][encoder, before]):
                scores.chosen[encoder] = site

    def _held_out(self) -> npt.NDArray[np.int64]:
        """Where they are in the files of training images."""
        return np.intersect1d(np.searchsorted(self.sample, self.held_out), self.rows["train"])

    def _fitted_rows(self) -> npt.NDArray[np.int64]:
        """The others there."""
        return np.setdiff1d(self.rows["train"], np.searchsorted(self.sample, self.held_out))

    def _patch_counts(
        self, fits: Mapping[Layer, Lda], split: str, lot: npt.NDArray[np.int64]
    ) -> dict[Layer, npt.NDArray[np.float64]]:
        """Overlap (R, 3, C + 1) where each patch gives its decision to all of its pixels; NaN if one is not finite."""
        maps = maps_of(self.plan.images, split, self.sample[lot] if split == "train" else lot)
        classes = len(self.plan.images.classes)
        of_grid: dict[tuple[Preprocess, tuple[int, int]], npt.NDArray[np.float64]] = {}
        counts = {}
        for layer, fitted in fits.items():
            height, width, _ = self.shapes[layer]
            which = (self.preprocess(layer[0]), (height, width))
            if which not in of_grid:
                of_grid[which] = shares(maps, *which, classes).reshape(-1, classes + 1).astype(np.float64)
            there = of_grid[which]
            x = self.patches(layer, split, lot).flatten(0, 1).double()
            decided = fitted.classes[(x @ fitted.weight + fitted.bias[:, None]).argmax(-1)]  # (R, n · P)
            counts[layer] = np.stack([_soft_overlap(one, there) for one in decided.numpy(force=True)])
            if not x.isfinite().all():
                counts[layer] = np.full_like(counts[layer], np.nan)
        return counts

    # The softmax

    def _train(self, scores: Scores) -> None:
        """On pixels of the training images that are kept, at the chosen layer of each encoder."""
        if not self.config.steps or not scores.chosen:
            return
        encoders = list(scores.chosen)
        for encoder, probe in zip(encoders, shared(encoders, lambda name: self._softmax(scores, name)), strict=True):
            scores.probes[encoder] = probe

    def _softmax(self, scores: Scores, encoder: str) -> tuple[Tensor, Tensor, Tensor]:
        layer = (encoder, scores.chosen[encoder])
        height, width, _ = self.shapes[layer]
        fitted, rows = scores.fits[layer], self._fitted_rows()
        place = {int(channel): number for number, channel in enumerate(fitted.classes)}
        drawn, random = [], np.random.default_rng(self.plan.seed)
        for start in range(0, len(rows), LOT):
            for one in maps_of(self.plan.images, "train", self.sample[rows[start : start + LOT]]):
                windows = self.preprocess(encoder).windows(*one.shape)
                pixels = draw_pixels(one, windows, (height, width), PIXELS, random)
                labels = np.array([place.get(label, -1) for label in pixels.labels.tolist()])
                drawn.append(pixels._replace(labels=labels))
        values = self.files[(*layer, "train")].read()[0]
        weight, bias = fit_softmax(
            _Chosen(values, rows),
            stack_pixels(drawn),
            (fitted.weight[0], fitted.bias[0]),
            fitted.mean,
            fitted.covariance.diagonal().clamp(min=0).sqrt(),
            steps=self.config.steps,
            lr=self.config.lr,
            seed=self.plan.seed,
        )
        return weight, bias, fitted.classes

    # Testing

    def _test(self, scores: Scores) -> None:
        rows = self.rows["test"]
        scores.counts = {split: len(of) for split, of in self.rows.items() if split != "train"}
        scores.counts["train"] = len(self.plan.images.indices("train")) - len(self.held_out)
        scores.of_layers |= {f"miou{end}": {} for end in ENDS}
        scores.pixels = np.full(len(self.plan.images.classes) + 1, np.nan)
        if not scores.fits:
            return
        answers = shared(_lots(rows), lambda lot: self._pixel_counts(scores, lot))
        for layer in [layer for layer in scores.fits if any(layer not in answer for answer in answers)]:
            self._forget(scores, layer)
        for layer in scores.fits:
            groups = np.stack([answer[layer] for answer in answers])
            scores.iou[layer] = iou_of(groups.sum(0))
            scores.rest[layer] = iou_of(groups.sum(0) - groups)
            for name, number in zip((f"miou{end}" for end in ENDS), miou_of(groups), strict=True):
                scores.of_layers[name][layer] = number
            scores.pixels = groups.sum(0)[2].astype(np.float64)
        for encoder in scores.probes:
            groups = np.stack([answer[encoder, ""] for answer in answers])
            scores.softmax[encoder], scores.softmax_iou[encoder] = miou_of(groups), iou_of(groups.sum(0))
            scores.rest[encoder, ""] = iou_of(groups.sum(0) - groups)

    @staticmethod
    def _forget(scores: Scores, layer: Layer) -> None:
        """A layer that is not finite on test images; if it is the chosen one, its encoder has none."""
        encoder, site = layer
        scores.reasons[layer] = NOT_FINITE
        del scores.fits[layer]
        if scores.chosen.get(encoder) == site:
            del scores.chosen[encoder]
            scores.probes.pop(encoder, None)

    def _pixel_counts(self, scores: Scores, lot: npt.NDArray[np.int64]) -> dict[Layer, npt.NDArray[np.int64]]:
        """Overlap (3, C + 1) of every layer with LDA, and of the softmax under the name of no site.

        Layers with patches that are not finite are left out.
        """
        maps = maps_of(self.plan.images, "test", lot)
        counts: dict[Layer, npt.NDArray[np.int64]] = {}
        for layer, fitted in scores.fits.items():
            encoder, site = layer
            patches = self.patches(layer, "test", lot)
            if not patches.isfinite().all():
                continue
            counts[layer] = self._overlap(
                layer, patches, (fitted.weight[0].float(), fitted.bias[0].float(), fitted.classes), maps
            )
            if encoder in scores.probes and site == scores.chosen[encoder]:
                counts[encoder, ""] = self._overlap(layer, patches, scores.probes[encoder], maps)
        return counts

    def _overlap(
        self, layer: Layer, patches: Tensor, probe: tuple[Tensor, Tensor, Tensor], maps: Maps
    ) -> npt.NDArray[np.int64]:
        height, width, _ = self.shapes[layer]
        preprocess, classes = self.preprocess(layer[0]), len(self.plan.images.classes) + 1
        weight, bias, channels = probe
        scores = (patches @ weight + bias).unflatten(1, (height, width))
        total = np.zeros((3, classes), np.int64)
        for _, where in _of_one_shape(maps):
            truth = np.stack([seen_part(maps[i], preprocess) for i in where])
            decided = channels[decide(scores[where], preprocess, maps[where[0]].shape)]
            total += count_overlap(decided, truth, classes)
        return total


@dataclass(frozen=True)
class _Chosen:
    """Some rows of a matrix on disk, by their number among them."""

    values: npt.NDArray[np.float32]
    rows: npt.NDArray[np.int64]

    def __getitem__(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32] = self.values[self.rows[chosen]]
        return rows


def decide(scores: Tensor, preprocess: Preprocess, shape: Sequence[int]) -> Tensor:
    """Scores of patches (n, h, w, C) → the class of each pixel that is seen of maps of this shape, (n, Y, X)."""
    down, across = (
        torch.from_numpy(upsampling(window, cells)).to(scores.device)
        for window, cells in zip(preprocess.windows(*shape), scores.shape[1:3], strict=True)
    )
    wide = scores.permute(3, 0, 1, 2).contiguous() @ across.T  # classes first: the largest of them is found fastest
    band = max(1, NUMBERS // max(1, wide[:, :, 0].numel()))
    return torch.cat([(part @ wide).max(0).indices for part in down.split(band)], 1)


def maps_of(images: Images, split: str, rows: npt.NDArray[np.int64]) -> Maps:
    """Segmentation maps of rows of a split."""
    return [one.segmentation for one in images.targets(images.indices(split)[rows]) if one.segmentation is not None]


def _lots(rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Rows in lots of 32 images at most; neighbours, which may be of one class, in different ones."""
    count = max(math.ceil(len(rows) / LOT), min(len(rows), GROUPS))
    return [rows[start::count] for start in range(count)]


def _of_one_shape(maps: Maps) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Numbers of the maps of each shape."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(maps):
        by_shape.setdefault(one.shape, []).append(number)
    yield from by_shape.items()


def _soft_overlap(decided: npt.NDArray[np.int64], there: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Overlap (3, C) of the decisions on patches (p,) with the shares (p, C) of the classes in them."""
    classes = there.shape[1]
    right = np.bincount(decided, there[np.arange(len(decided)), decided], classes)
    return np.stack([right, np.bincount(decided, there.sum(1), classes), there.sum(0)])
