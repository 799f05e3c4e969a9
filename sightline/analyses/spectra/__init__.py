"""Singular value spectra: how many directions do the tokens of an image, and the images, spread into?

    Δ log σ_r = log σ_r − log σ_1,    σ_1 ≥ σ_2 ≥ … the singular values of a centred matrix X

Tokens: X holds the N patch tokens of one image; averaged over a sample of images. Images: X holds the mean patch token
of each image. A singular value is the length of the cloud of rows along one direction, so the spectrum tells its
volume. The effective rank (RankMe) is exp of the entropy of σ / Σσ.

Singular values are roots of the eigenvalues of the smaller of XXᵀ and XᵀX: several times as fast as decomposing X.

The mean of the rows is taken off first, or it would be most of σ_1. The second largest value is also given of X as it
is: with the mean for σ_1, log σ_2 is the length of the cloud as Figure E.3 reads it. With `centred=False` everything is
measured on X as it is.

Source: Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Figures 7 and E.3, after Jing et al.
2022; Garrido et al. 2023 (RankMe).

Shapes: B images of a batch, N tokens, D width, R ranks, S layers, M images of the image spectrum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from sightline.analyses.spectra.charts import LEVELS
from sightline.analyses.spectra.charts import figures as figures
from sightline.analyses.spectra.charts import headlines as headlines
from sightline.analyses.spectra.charts import key_numbers as key_numbers
from sightline.analyses.spectra.singular_values import NAMES, NUMBERS, log_values, log_values_left_out, numbers_of
from sightline.analyses.spectra.singular_values import log_singular_values as log_singular_values
from sightline.core.errors import InputError
from sightline.core.groups import Kept, LeftOut, Mean
from sightline.core.results import ABSENT, ENDS, NOT_FINITE
from sightline.encoders.sites import token_view
from sightline.images.pipeline import Batch
from sightline.measure import contract
from sightline.measure.estimators.rank import effective_rank as effective_rank
from sightline.measure.groups import GROUPS, ImageGroups
from sightline.measure.layers import Layers, add_images, mean_of_images, sample_rows
from sightline.measure.plan import Cost, Key, Plan

TOPIC = "structure"
TITLE = "Singular value spectra"
QUESTION = "How many directions do the tokens of an image fill, and how many do the images?"
FORMULA = """\
Δ log σ_r = log σ_r − log σ_1, σ_1 ≥ σ_2 ≥ … the singular values of a centred matrix X
tokens: X (patch tokens × features) of one image, averaged over images; images: X (mean patch tokens × features)
effective rank = exp( −Σ_r p_r log p_r ), p_r = σ_r / Σσ"""
HOW_TO_READ = """\
A singular value is the length of a cloud of points along one direction; the spectrum lists them, the longest first. A
flat spectrum (Δ log near 0) says that the cloud fills many directions, a steep one that it lies in a few. For the
tokens of an image: where the curve falls with depth, the tokens become alike, and the layer hardly tells the places of
an image apart; where it rises, they become distinct. For images: where the curve rises, images move apart from each
other. Contrastive encoders tend to spread images and to clump tokens, masked ones the other way round. The second
largest singular value, not relative to the first and with the mean left in, tells the absolute size of the cloud: a
layer that clumps tokens lowers it. The effective rank is the whole spectrum as one number, the count of directions that
matter."""
SOURCE = (
    'Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Figures 7 and E.3; '
    'Jing et al. 2022, "Understanding Dimensional Collapse in Contrastive Self-supervised Learning"; '
    'Garrido et al. 2023, "RankMe" (effective rank)'
)
SITES = ("embed", "block.*", "decoder.block.*")
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = True
INVARIANT_TO = frozenset({"rotation", "batching", "order"})  # and to a translation, but for the uncentred value

RANKS = (64, 128)  # the ranks that are drawn over depth, about a third and two thirds of the 196 patches of a ViT/16

Numbers: TypeAlias = np.ndarray[Any, Any]
Shape: TypeAlias = tuple[int, int]  # rows and width of a matrix


@dataclass(frozen=True)
class SpectraConfig:
    """Which matrices.

    images    how many images have their tokens looked at
    means     how many images make the image spectrum
    centred   whether the mean of the rows is taken off
    """

    images: int = 32
    means: int = 1024
    centred: bool = True

    def __post_init__(self) -> None:
        if self.images < 1 or self.means < 2:
            raise InputError(
                f"Spectra need the tokens of at least one image and the means of two, not {self.images} and "
                f"{self.means}"
            )


class SpectraAnalysis(contract.Analysis):
    """Sums the spectra of the tokens of a sample of images, and keeps the mean token of up to `means` images."""

    sums: Tensor  # (G, S, 3, 4 + R)
    flaws: Tensor  # (S, 3): images seen, images with constant tokens, with tokens that are not finite
    seen: Tensor  # (M,)
    # and means_0, means_1, … float32 (M, D), one for each layer

    def __init__(self, config: SpectraConfig, plan: Plan) -> None:
        super().__init__()
        self.plan, self.layers, self.centred = plan, Layers(plan.sites, plan.stages), config.centred
        self.slots, self.means = _slots(plan, config.means)
        self.chosen, self.images = _slots(plan, config.images)
        self.shapes = [_shape(plan, *layer) for layer in self.layers]
        self.groups, s = ImageGroups(plan.images, plan.splits), len(self.layers)
        numbers = NUMBERS + max(map(self._ranks, self.shapes))
        states = {"sums": (GROUPS, s, 3, numbers), "flaws": (s, 3), "seen": (self.means,)}
        for name, shape in states.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        for i, (_, d) in enumerate(self.shapes):
            self.add_state(f"means_{i}", torch.zeros(self.means, d), dist_reduce_fx="sum")

    def begin(self, batch: Batch) -> None:
        slots = self.slots[batch.split][batch.rows]
        self.kept = (slots >= 0).nonzero()[:, 0]
        self.at = slots[self.kept]
        self.looked = (self.chosen[batch.split][batch.rows] >= 0).nonzero()[:, 0]

    def _ranks(self, shape: Shape) -> int:
        return _ranks(shape, self.centred)

    def _logs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log singular values as they are asked for, and with the mean of the rows left in."""
        logs = log_values(x, (True, False) if self.centred else (False,))
        return logs[0], logs[-1]

    def reduce(self, key: Key, activation: Tensor) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """Mean tokens (B, D) and, of the images that are in the sample, log singular values."""
        encoder = self.plan.encoders[key.encoder]
        patches, mean = (token_view(activation, view, encoder.tokens) for view in ("patches", "mean"))
        if patches is None or mean is None or not encoder.has_places(activation.shape[1:]):
            return None, None
        return mean, self._logs(patches[self.looked]) if len(self.looked) and patches.shape[1] > 1 else None

    def update(
        self, batch: Batch, reductions: Mapping[Key, tuple[Tensor | None, tuple[Tensor, Tensor] | None]]
    ) -> None:
        """Add the spectra, and put mean tokens into their places."""
        self.seen[self.at] += 1
        members = self.groups.members(batch, self.sums.device)[:, self.looked]
        for (encoder, site, _), (mean, both) in reductions.items():
            layer = self.layers.index(encoder, site)
            if mean is not None:
                getattr(self, f"means_{layer}")[self.at] = mean[self.kept].float()
            if both is None:
                continue
            logs, raw = both
            constant, infinite = logs[:, 0] == -math.inf, logs[:, 0].isnan()
            self.flaws[layer] += torch.stack([torch.ones_like(constant), constant, infinite], 1).sum(0)
            if not constant.all():  # an image without any spread has no spectrum
                ranks = self._ranks(self.shapes[layer])
                numbers = numbers_of(logs[~constant][:, :ranks], raw[~constant])
                add_images(self.sums, layer, numbers, members[:, ~constant])

    def compute(self) -> xr.Dataset:
        kept = self.seen > 0
        shapes = [(int(kept.sum()) if d else 0, d) for _, d in self.shapes]
        width = NUMBERS + max(1, *map(self._ranks, (*self.shapes, *shapes)))
        images, flaws = np.full((len(shapes), width), np.nan), np.zeros((len(shapes), 3))
        left_out, members = np.full((GROUPS, len(shapes), width), np.nan), self._members()[:, kept]
        for i, shape in enumerate(shapes):
            if r := self._ranks(shape):
                means = getattr(self, f"means_{i}")[kept]
                logs, raw = self._logs(means)
                images[i, : NUMBERS + r] = numbers_of(logs[:r], raw).numpy(force=True)
                rest = log_values_left_out(means, members, self.centred)[:, :r]
                left_out[:, i, : NUMBERS + r] = numbers_of(rest, rest).numpy(force=True)
                flaws[i] = shape[0], shape[0] * bool(logs[0] == -math.inf), bool(logs[0].isnan())
        tokens = [
            np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=np.nan)
            for part in mean_of_images(self.sums)
        ]
        result = xr.Dataset(
            self._variables("token", self.shapes, self.flaws.numpy(force=True), tokens)
            | self._variables("image", shapes, flaws, [images]),
            coords=self.layers.coords() | {"rank": np.arange(1, width - NUMBERS + 1), "level": list(LEVELS)},
            attrs={
                "token_sample": self.images,
                "image_sample": self.means,
                "interval": "95 % over images",
                "logarithm": "natural",
                "centred": int(self.centred),
            },
        )
        return self._kept(shapes, left_out).beside(result)

    def _members(self) -> Tensor:
        """1 where an image of the image spectrum is in a group, (G, M)."""
        groups = torch.full((self.means,), -1, device="cpu")
        for split, slots in self.slots.items():
            groups[slots[slots >= 0]] = torch.from_numpy(self.groups.of(split))[slots >= 0]
        return (torch.arange(GROUPS, device="cpu")[:, None] == groups).double().to(self.sums.device)

    def _kept(self, shapes: Sequence[Shape], left_out: Numbers) -> Kept:
        """Sums of the numbers of tokens by groups of images, those of images without each group; for contrasts."""
        kept, axes = Kept({"group": self.groups.axis}), ("encoder", "site", "group")
        sums = self.sums.numpy(force=True)
        images = (axes, self.layers.by_group(self.sums[:, :, 0, 0]))
        for cloud, of, values in (("token", self.shapes, sums[:, :, 1]), ("image", shapes, left_out)):
            levels = np.array([_levels(self._ranks(shape)) for shape in of])
            columns = np.minimum(NUMBERS + np.maximum(levels, 1), values.shape[2]) - 1  # where there are no ranks: any
            at_levels = np.take_along_axis(values, np.broadcast_to(columns, (GROUPS, *columns.shape)), 2)
            # With the mean left in, the images would need a second decomposition.
            names = NAMES[:-1] if cloud == "image" and self.centred else NAMES
            parts: dict[str, tuple[tuple[str, ...], Numbers]] = {
                f"{cloud}_{name}": (axes, values[:, :, n]) for n, name in enumerate(names)
            }
            parts[f"{cloud}_delta"] = ((*axes, "level"), at_levels)
            for name, (dims, part) in parts.items():
                spread = (dims, self.layers.spread(part.swapaxes(0, 1)))
                recipe = Mean(f"{name}_kept", "token_images") if cloud == "token" else LeftOut(f"{name}_kept")
                kept.add(name, recipe, **{f"{name}_kept": spread, "token_images": images})
        return kept

    def _variables(
        self, cloud: str, shapes: Sequence[Shape], flaws: Numbers, parts: Sequence[Numbers]
    ) -> dict[str, tuple[tuple[str, ...], Any]]:
        """The variables of one kind of cloud, from its numbers (S, 4 + R) and, if there is an interval, its bounds."""
        layer, spread = ("encoder", "site"), self.layers.spread
        data: dict[str, tuple[tuple[str, ...], Any]] = {}
        levels = np.array([_levels(self._ranks(shape)) for shape in shapes])  # (S, 2)
        for end, part in zip(ENDS, parts, strict=False):
            values = np.where(np.isfinite(part), part, np.nan)  # −inf: lost in rounding
            for column, name in enumerate(NAMES):
                data[f"{cloud}_{name}{end}"] = (layer, spread(values[:, column]))
            at_levels = np.take_along_axis(values, NUMBERS + np.maximum(levels, 1) - 1, 1)
            data[f"{cloud}_delta{end}"] = ((*layer, "level"), spread(at_levels))
            data[f"{cloud}_spectrum{end}"] = ((*layer, "rank"), spread(values[:, NUMBERS:]))
        ranks = np.isfinite(parts[0][:, NUMBERS:]).sum(1)
        possible = [self._ranks(shape) for shape in shapes]
        reasons = [_why(cloud, *layer) for layer in zip(shapes, flaws, ranks, possible, strict=True)]
        return data | {
            f"{cloud}_rank": ((*layer, "level"), spread(np.where(levels > 0, levels, np.nan))),
            f"{cloud}_images": (layer, spread(flaws[:, 0] - flaws[:, 1])),
            f"{cloud}_reason": (layer, spread(reasons, ABSENT)),
        }


def _slots(plan: Plan, count: int) -> tuple[dict[str, Tensor], int]:
    """Places of the rows of each split in a sample of at most `count` images, −1 outside; and the sample's size."""
    slots, size = {}, 0
    for split in plan.splits:
        rows = sample_rows(plan.images, split, max(count // len(plan.splits), 1), plan.seed)
        slots[split] = torch.full((len(plan.images.indices(split)),), -1)
        slots[split][torch.from_numpy(rows)] = torch.arange(size, size + len(rows))
        size += len(rows)
    return slots, size


def _shape(plan: Plan, encoder: str, site: str) -> Shape:
    """Patch tokens of an image and their width, (0, 0) where there are none."""
    model, shape = plan.encoders[encoder], plan.shapes[encoder][site]
    blank = torch.empty(1, *shape, device="meta")
    patches = token_view(blank, "patches", model.tokens) if model.has_places(shape) else None
    return (0, 0) if patches is None else (patches.shape[1], patches.shape[2])


def _ranks(shape: Shape, centred: bool) -> int:
    """How many singular values of a matrix can differ from zero."""
    return max(min(shape[0] - 1, shape[1]), 0) if centred or shape[0] < 2 else min(shape)


def _levels(ranks: int) -> tuple[int, int]:
    """The two ranks that are followed over depth: a third and two thirds where there are too few; 0 where none are.

    >>> _levels(195), _levels(48)
    ((64, 128), (16, 32))
    """
    return RANKS if ranks >= RANKS[1] else (min(ranks, max(ranks // 3, 1)), min(ranks, max(2 * ranks // 3, 1)))


def _why(cloud: str, shape: Shape, flaws: Numbers, found: int, ranks: int) -> str:
    """Why numbers of a layer are missing, or nothing."""
    seen, constant, infinite = flaws
    if not shape[1]:
        return "this site has no patch tokens"
    if shape[0] < 2:
        return "there is a single patch token" if cloud == "token" else "fewer than two images could be read"
    if not seen:
        return "none of the images of the sample could be read"
    if infinite:
        return NOT_FINITE
    if constant == seen:
        return "the tokens of an image are all the same" if cloud == "token" else "all images have the same mean token"
    lost = ranks - found
    return f"{lost} of {ranks} singular values cannot be distinguished from rounding" if lost else ""


def cost(config: SpectraConfig, plan: Plan) -> Cost:
    shapes = [_shape(plan, *layer) for layer in Layers(plan.sites)]
    means = _slots(plan, config.means)[1]
    numbers = NUMBERS + max(_ranks(shape, config.centred) for shape in shapes)
    sums = 24 * GROUPS * len(shapes) * numbers
    return Cost(memory=sums + sum(4 * means * d for _, d in shapes), disk=0)
