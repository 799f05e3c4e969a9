"""Semantic segmentation: how well do the patches of each block predict the class of every pixel?

A linear probe of every block in the one pass. A patch x belongs to class c with the share s_c of its pixels; from sums
over all training patches linear discriminant analysis follows in closed form,

    score_c(x) = μ_cᵀ S_λ⁻¹ x − ½ μ_cᵀ S_λ⁻¹ μ_c + log π_c,          S_λ = (1 − λ) S + λ tr(S)/D · 1

(measure/estimators/lda.py). Block and λ are those with the highest mIoU on `val`, where a patch gives its decision to
all of its pixels; without a val split, some training images that the sums leave out choose. On `test`, scores are
interpolated to every pixel at the resolution of the labels, and mIoU is that of one confusion over all images. The
number to publish is that of a softmax trained on pixels of the chosen block, from the same start.

C classes and the background, P patches, D width, L layers, R shrinkages.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.analyses.segmentation.charts import figures as figures
from sightline.analyses.segmentation.charts import headlines as headlines
from sightline.analyses.segmentation.charts import key_numbers as key_numbers
from sightline.analyses.segmentation.charts import summary as summary
from sightline.analyses.segmentation.pictures import pictures_of
from sightline.analyses.segmentation.scoring import Scores, Scoring, maps_of
from sightline.core.errors import InputError
from sightline.core.groups import Axis, Kept, LeftOut
from sightline.core.provenance import fingerprint
from sightline.core.results import ABSENT, ENDS
from sightline.encoders.sites import token_view
from sightline.images.label_maps import BACKGROUND, shares
from sightline.images.pipeline import Batch
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images
from sightline.measure import contract
from sightline.measure.estimators.lda import PatchSums, add_patches
from sightline.measure.estimators.lda import lda_scores as lda_scores
from sightline.measure.estimators.overlap import mean_iou as mean_iou
from sightline.measure.estimators.overlap import mean_over_classes
from sightline.measure.feature_cache import Features, describe_features
from sightline.measure.layers import Layers, sample_rows
from sightline.measure.plan import Cost, Key, Plan
from sightline.measure.pooled import finish_files

TOPIC = "separable"
TITLE = "Semantic segmentation"
QUESTION = "Which block is best for dense tasks: how well do its patches predict the class of every pixel?"
FORMULA = (
    "mIoU = mean over classes of |decided ∩ true| / |decided ∪ true| over all test pixels; "
    "score_c(x) = μ_cᵀS_λ⁻¹x − ½ μ_cᵀS_λ⁻¹μ_c + log π_c of each patch, interpolated to pixels"
)
HOW_TO_READ = (
    "A linear probe of every block decides on the class of each pixel of the test images, and mIoU says how well its "
    "areas cover those of the labels, class by class. The block was chosen on other images (val), so the number at the "
    "chosen block is not the best of many. Encoders trained for reconstruction often keep more of what lies where, and "
    "are ahead here while they are behind in k-NN; a curve that falls towards the end says that the last blocks lose "
    "the places. The second number is that of a softmax trained on the pixels of the chosen block, which is what "
    "papers call the linear probe. Compare numbers only at the same resolution of the labels, the same window of the "
    "image and the same classes; IoU per class says which classes a difference comes from. In the pictures of "
    "components, areas of one colour are patches that are alike to the block."
)
SOURCE = (
    'Oquab et al. 2023, "DINOv2: Learning Robust Visual Features without Supervision" (linear segmentation, and '
    'pictures of principal components); Everingham et al. 2010, "The Pascal Visual Object Classes Challenge" (IoU); '
    "Fisher 1936 (discriminant analysis)"
)
SITES = ("block.*", "norm")
SPLITS = ("train", "val", "test")
ANY_SITE = True
BY_DEFAULT = False  # features of patches go to disk, which is for those who ask
INVARIANT_TO: frozenset[str] = frozenset()  # of exact numbers: rounding may turn the decision on a pixel
HELD_OUT = 4  # without a val split, one of so many of the training images that are kept chooses


@dataclass(frozen=True)
class SegmentationConfig:
    """How the probe is fitted."""

    shrinkages: tuple[float, ...] = (1e-4, 1e-3, 1e-2)  # λ to choose from
    images: int = 1024  # training images at most whose pixels the softmax sees
    steps: int = 400  # of the softmax; 0: without
    lr: float = 1e-3  # of the softmax
    pictures: int = 4  # test images that the report shows

    def __post_init__(self) -> None:
        if not self.shrinkages or not all(0 < rate <= 1 for rate in self.shrinkages):
            raise InputError(f"shrinkages is {list(self.shrinkages)}; one or more numbers in (0, 1] are expected")
        if self.images < 2 * HELD_OUT or self.steps < 0 or self.pictures < 0 or not self.lr > 0:
            raise InputError(
                f"segmentation needs {2 * HELD_OUT} training images for its softmax at least, a learning rate above 0, "
                f"and no negative numbers, not images={self.images}, lr={self.lr}, steps={self.steps}, "
                f"pictures={self.pictures}"
            )


# The streaming analysis


class SegmentationAnalysis(contract.Analysis):
    """Sums of training patches for LDA; patches of val, test and some training images go to disk to be scored."""

    seen: Tensor  # (splits,) images whose patches were written
    weights: Tensor  # (L, C + 1) pixels of each class, in patches

    def __init__(self, config: SegmentationConfig, plan: Plan) -> None:
        super().__init__()
        check_maps(plan.images)
        self.config, self.plan, self.layers = config, plan, Layers(plan.sites, plan.stages)
        self.shapes = patch_shapes(plan)
        if not self.shapes:
            raise InputError(
                "segmentation needs patches on a grid, which none of these encoders has at these sites; choose others, "
                "or leave it out (--only cka)"
            )
        self.classes = len(plan.images.classes) + 1
        self.files = patch_files(config, plan)
        self.sample = training_sample(config, plan)
        self.held_out = self.sample[::HELD_OUT] if "val" not in plan.splits else self.sample[:0]
        self.add_state("seen", torch.zeros(len(plan.splits), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("weights", torch.zeros(len(self.layers), self.classes, dtype=torch.float64), "sum")
        for (encoder, site), (_, _, width) in self.shapes.items():
            number = self.layers.index(encoder, site)
            for name, rows in (("squares", width), ("values", self.classes)):
                self.add_state(f"{name}_{number}", torch.zeros(rows, width, dtype=torch.float64), dist_reduce_fx="sum")
        self.batch: Batch | None = None
        self.shares: dict[tuple[Preprocess, tuple[int, int]], Tensor] = {}

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        self.shares.clear()
        if batch.split != "train":
            return
        maps = maps_of(self.plan.images, "train", batch.rows.numpy(force=True))
        fitted = ~np.isin(batch.rows.numpy(force=True), self.held_out)
        for (encoder, _), (height, width, _) in self.shapes.items():
            which = (self.plan.encoders[encoder].preprocess, (height, width))
            if which not in self.shares:
                counted = shares(maps, *which, self.classes - 1) * fitted[:, None, None]
                self.shares[which] = torch.from_numpy(counted.astype(np.float32)).to(self.weights.device)

    def reduce(self, key: Key, activation: Tensor) -> PatchSums | None:
        """Sums of training patches. What is kept goes to disk at once: all layers of a batch would fill the memory."""
        batch, shape = self.batch, self.shapes.get((key.encoder, key.site))
        if batch is None or shape is None:
            return None
        encoder = self.plan.encoders[key.encoder]
        patches = token_view(activation, "patches", encoder.tokens)
        assert patches is not None
        rows = batch.rows.numpy(force=True)
        kept = np.isin(rows, self.sample) if batch.split == "train" else np.ones(len(rows), bool)
        if kept.any():
            where = np.searchsorted(self.sample, rows[kept]) if batch.split == "train" else rows[kept]
            values = patches[torch.from_numpy(kept).to(patches.device)].flatten(1)
            self.files[key.encoder, key.site, batch.split].write(where, values.float().numpy(force=True))
        if batch.split != "train":
            return None
        return add_patches(patches.flatten(0, 1).float(), self.shares[encoder.preprocess, shape[:2]].flatten(0, 1))

    def update(self, batch: Batch, reductions: Mapping[Key, PatchSums | None]) -> None:
        for key, sums in reductions.items():
            if sums is not None:
                number = self.layers.index(key.encoder, key.site)
                self.weights[number] += sums.weights
                getattr(self, f"squares_{number}").add_(sums.squares)
                getattr(self, f"values_{number}").add_(sums.values)
        rows = batch.rows.numpy(force=True)
        written = np.isin(rows, self.sample).sum() if batch.split == "train" else len(rows)
        self.seen[self.plan.splits.index(batch.split)] += int(written)

    def sums(self, encoder: str, site: str) -> PatchSums:
        number = self.layers.index(encoder, site)
        squares, values = (getattr(self, f"{name}_{number}") for name in ("squares", "values"))
        return PatchSums(squares, values, self.weights[number])

    def compute(self) -> xr.Dataset:
        splits = self.plan.splits
        entries: dict[str, list[Features]] = {split: [] for split in splits}
        for (_, _, split), entry in self.files.items():
            entries[split].append(entry)
        rows = finish_files(entries, dict(zip(splits, self.seen.tolist(), strict=True)), self.plan.images.name)
        scoring = Scoring(
            self.config, self.plan, self.shapes, self.files, self.sample, self.held_out, rows, self.device
        )
        scores = scoring.run({layer: self.sums(*layer) for layer in self.shapes})
        result = self._dataset(scores).assign(pictures_of(self.config.pictures, scoring, scores))
        return self._kept(scores, len(rows["test"])).beside(result)

    def _kept(self, scores: Scores, images: int) -> Kept:
        which = ["lots", self.plan.images.digest("test"), images]
        kept = Kept({"lot": Axis(fingerprint(which)[:16], "lots of test images")})
        lots = max((len(rest) for rest in scores.rest.values()), default=1)
        nothing, over = np.full((lots, self.classes), np.nan), ("encoder", "site", "lot")
        iou = self.layers.spread(np.stack([scores.rest.get(layer, nothing) for layer in self.layers]))
        softmax = np.stack([scores.rest.get((name, ""), nothing) for name in self.layers.encoders])
        for name, dims, rest in (("", over, iou), ("softmax_", ("encoder", "lot"), softmax)):
            mean = mean_over_classes(rest)
            kept.add(f"{name}miou", LeftOut(f"{name}miou_rest"), **{f"{name}miou_rest": (dims, mean)})
            kept.add(f"{name}iou", LeftOut(f"{name}iou_rest"), **{f"{name}iou_rest": ((*dims, "class"), rest)})
        return kept

    def _dataset(self, scores: Scores) -> xr.Dataset:
        layers, names = self.layers, [BACKGROUND, *self.plan.images.classes]
        why = {layer: "" if layer in self.shapes else "this site has no patches on a grid" for layer in layers}
        why |= scores.reasons
        over = ("encoder", "site")
        data: dict[str, tuple[str | tuple[str, ...], npt.NDArray[Any]]] = {}
        for name, numbers in scores.of_layers.items():
            data[name] = (over, layers.spread(np.array([numbers.get(layer, math.nan) for layer in layers])))
        nothing = np.full(self.classes, np.nan)
        iou = np.stack([scores.iou.get(layer, nothing) for layer in layers])
        data["iou"] = ((*over, "class"), layers.spread(iou))
        data["reason"] = (over, layers.spread([why[layer] for layer in layers], ABSENT))
        encoders = layers.encoders
        data["chosen"] = ("encoder", np.array([scores.chosen.get(name, "") for name in encoders], str))
        for number, end in enumerate(ENDS):
            values = [scores.softmax[name][number] if name in scores.softmax else math.nan for name in encoders]
            data[f"softmax_miou{end}"] = ("encoder", np.array(values))
        softmax_iou = np.stack([scores.softmax_iou.get(name, nothing) for name in encoders])
        data["softmax_iou"] = (("encoder", "class"), softmax_iou)
        data["pixels"] = ("class", scores.pixels)
        return xr.Dataset(data, {**layers.coords(), "class": names}).assign_attrs(self._protocol(scores))

    def _protocol(self, scores: Scores) -> dict[str, Any]:
        protocol = {
            "labels": "their own resolution, within the window that the encoder sees",
            "upsampling": "bilinear between the centres of patches",
            "ignored": "pixels without a label",
            "classes counted": "those that occur in the labels or in the decisions",
            "chosen on": scores.chosen_on,
        }
        return {
            "protocol": json.dumps(protocol),
            "interval": "95 %, jackknife over groups of images",
            **{f"n_{split}": count for split, count in scores.counts.items()},
            "shrinkages": ", ".join(f"{rate:g}" for rate in self.config.shrinkages),
            "softmax": f"AdamW, {self.config.steps} steps" if self.config.steps else "none",
        }


def check_maps(images: Images) -> None:
    """Say before the pass that there is nothing to segment."""
    first = images.targets(images.indices("train")[:1])[0]
    if first.segmentation is None:
        raise InputError(
            f"{images.name} has boxes, but no segmentation maps; give others, such as shapes:scenes or masks:PATH"
        )


def patch_shapes(plan: Plan) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Rows, columns and width of the patches of each layer that has them on a grid."""
    shapes = {}
    for encoder, site in Layers(plan.sites):
        tokens, shape = plan.encoders[encoder].tokens, plan.shapes[encoder][site]
        patches = token_view(torch.empty(1, *shape, device="meta"), "patches", tokens)
        grid = tokens.grid if tokens is not None else shape[1:] if len(shape) == 3 else None
        if patches is not None and grid is not None and math.prod(grid) == patches.shape[1]:
            shapes[encoder, site] = (grid[0], grid[1], patches.shape[2])
    return shapes


def training_sample(config: SegmentationConfig, plan: Plan) -> npt.NDArray[np.int64]:
    """Rows of the training images whose patches are kept."""
    return np.sort(sample_rows(plan.images, "train", config.images, plan.seed))


def patch_files(config: SegmentationConfig, plan: Plan) -> dict[tuple[str, str, str], Features]:
    """Where the patches of each layer and split go."""
    entries = {}
    sample = training_sample(config, plan)
    for split in plan.splits:
        rows = len(sample) if split == "train" else len(plan.images.indices(split))
        about = {
            name: describe_features(encoder, plan.images, split, plan.precision)
            for name, encoder in plan.encoders.items()
        }
        chosen = {"sample": [rows, plan.seed]} if split == "train" else {}
        for (encoder, site), (height, width, depth) in patch_shapes(plan).items():
            what = {**about[encoder], "site": site, "feature": "patches", **chosen}
            entries[encoder, site, split] = Features(plan.cache, what, rows, height * width * depth)
    return entries


def cost(config: SegmentationConfig, plan: Plan) -> Cost:
    classes = len(plan.images.classes) + 1
    shapes = patch_shapes(plan).values()
    sums = sum(8 * width * (width + classes) for _, _, width in shapes)
    disk = sum(entry.bytes for entry in patch_files(config, plan).values() if not entry.exists)
    return Cost(memory=2 * sums, disk=disk)
