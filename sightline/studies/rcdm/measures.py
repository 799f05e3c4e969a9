"""The three measures of a trained model, as one result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.groups import Kept, Mean
from sightline.core.keyed_random import Keys, id_keys, mix
from sightline.core.progress import bar_of_steps
from sightline.core.results import ENDS
from sightline.encoders.encoder import Encoder
from sightline.generation.conditions import Conditions, Feature, represent
from sightline.generation.denoiser import Model
from sightline.generation.gap import PLAIN, likelihood_gaps, others, summarise, transformed
from sightline.generation.samples import as_bytes, draw, facing_share, nearest_images, orientation_share
from sightline.generation.training import DiffusionRecipe
from sightline.images.pipeline import batches
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images
from sightline.measure.groups import ImageGroups
from sightline.measure.inversion import NAMES as INVERSION
from sightline.measure.inversion import ImagePairs, invert
from sightline.measure.layers import sample_rows
from sightline.measure.pooled import Matrix

TRANSFORMATIONS = ("mirror", "upside_down", "rotation", "grey", "colours", "blur", "shift", "scale")
LARGEST = 8192  # training images whose pictures are compared with and inverted to
SHOWN = 8  # sources of the page
IMAGES = "images"  # of a measure: what it is of each image
GAPS = (
    *(f"{name}{end}" for name in ("gap", "share", "kept") for end in (*ENDS, "_null")),
    "z",
    "z_null",
    "z_beyond",
    "gap_ceiling",
    "share_ceiling",
)


@dataclass(frozen=True)
class Extent:
    """How much is measured once the model is trained; it takes no part in the training."""

    samples: int = 8  # pictures of each source
    sources: int = 32  # test images that pictures are drawn from
    compared: int = 256  # test images whose likelihood gaps are measured
    transformations: tuple[str, ...] = TRANSFORMATIONS

    def __post_init__(self) -> None:
        for key, least in (("samples", 2), ("sources", 2), ("compared", 2)):
            if getattr(self, key) < least:
                raise InputError(f"{key} is {getattr(self, key)}, but at least {least} are needed")
        if not self.transformations:
            raise InputError(f"There is no transformation, but at least 1 is needed; give {', '.join(TRANSFORMATIONS)}")
        for name in self.transformations:
            transformed(name, torch.zeros(1, 3, 8, 8))  # says what cannot be


class Seen(NamedTuple):
    """Some images of a split: pictures in [0, 1], what each encoder sees of them (uint8), keys, ids, labels, rows."""

    pictures: Tensor
    pixels: Mapping[Preprocess, Tensor]
    keys: Keys
    ids: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def some(self, count: int) -> Seen:
        pixels = {preprocess: values[:count] for preprocess, values in self.pixels.items()}
        rest = self.keys[:count], self.ids[:count], self.labels[:count], self.rows[:count]
        return Seen(self.pictures[:count], pixels, *rest)


def _seen(
    data: Images, split: str, count: int, size: int, preprocesses: Iterable[Preprocess], workers: int | None, seed: int
) -> Seen:
    """At most `count` images of a split that can be read, balanced over classes."""
    rows = sample_rows(data, split, count, seed)
    where = data.indices(split)[rows]
    part = replace(data, splits={"test": np.sort(where)})
    small = Preprocess((size, size), size)
    views: dict[Preprocess, list[Tensor]] = {preprocess: [] for preprocess in (small, *preprocesses)}
    kept: list[Tensor] = []
    loader = batches(part, list(views), splits=["test"], batch=64, workers=workers)
    with contextlib.closing(loader):
        for batch in loader:
            kept.append(batch.rows)
            for preprocess, into in views.items():
                into.append(batch.pixels[preprocess])
    order = torch.cat(kept).argsort()
    pixels = {preprocess: torch.cat(values)[order] for preprocess, values in views.items()}
    positions = part.indices("test")[torch.cat(kept)[order].numpy()]
    # Those that are shown come first whatever is measured on more of them.
    shuffled = np.argsort(mix(id_keys(data.ids[positions]), seed), kind="stable")
    positions, pixels = positions[shuffled], {key: values[shuffled] for key, values in pixels.items()}
    pictures = pixels[small].float() / 255
    rest = {preprocess: values for preprocess, values in pixels.items() if preprocess in set(preprocesses)}
    places = np.searchsorted(data.indices(split), positions)
    return Seen(pictures, rest, id_keys(data.ids[positions]), data.ids[positions], data.labels[positions], places)


@dataclass(frozen=True, eq=False)
class Measures:
    """All that the measures need."""

    model: Model
    members: Mapping[str, tuple[Encoder, Feature]]
    conditions: Mapping[str, Mapping[str, Conditions]]  # split → encoder
    data: Images
    wanted: DiffusionRecipe
    extent: Extent
    workers: int | None

    def result(self) -> xr.Dataset:
        """All measures of all encoders, and what contrasts of them need."""
        size, seed = self.model.size, self.wanted.training.seed
        preprocesses = {encoder.preprocess for encoder, _ in self.members.values()}
        many = max(self.extent.compared, self.extent.sources)
        test = _seen(self.data, "test", many, size, preprocesses, self.workers, seed)
        train = _seen(self.data, "train", LARGEST, size, (), self.workers, seed)
        sources = test.some(self.extent.sources)
        parts: dict[str, dict[str, dict[str, Any]]] = {}
        steps = len(self.members) * (len(self.extent.transformations) + 2)
        with bar_of_steps("Measuring what representations keep", steps) as move:
            for number, name in enumerate(self.members):
                parts[name] = {"inversion": self._inversion(name, train, test)}
                move()
                parts[name]["gap"] = self._gaps(number, name, test.some(self.extent.compared), move)
                parts[name]["samples"] = self._samples(number, name, sources, train)
                move()
        compared = test.some(self.extent.compared).rows
        result = self._dataset(parts, sources, len(compared), len(train.rows))
        return self._kept(parts, test.rows, compared, sources.rows).beside(result)

    def _inversion(self, name: str, train: Seen, test: Seen) -> dict[str, Any]:
        """The three numbers of analyses/inversion.py; a fifth of the training images chooses the penalty."""

        def part(split: str, seen: Seen, which: npt.NDArray[np.int64]) -> ImagePairs:
            features = self.conditions[split][name]
            rows = seen.rows[which]
            pictures = Matrix(seen.pictures.flatten(1).numpy(), which)
            return ImagePairs(Matrix(features.plain, rows), Matrix(features.mirror, rows), pictures)

        every = np.arange(len(train.rows))
        fits, chooses = every[every % 5 > 0], every[every % 5 == 0]
        if np.ptp(self.conditions["train"][name].plain[train.rows], 0).max() == 0:
            return dict.fromkeys(INVERSION, np.nan) | {IMAGES: np.zeros((len(test.rows), 5))}
        keys = train.keys[fits], train.keys[chooses]
        recovered = invert(
            part("train", train, fits),
            part("train", train, chooses),
            part("test", test, np.arange(len(test.rows))),
            keys,
            self.model.size,
        )
        return {**recovered.numbers, IMAGES: recovered.images}

    def _gaps(self, number: int, name: str, test: Seen, move: Callable[[], None]) -> dict[str, Any]:
        encoder, feature = self.members[name]
        pixels = test.pixels[encoder.preprocess]
        names = (PLAIN, *self.extent.transformations)

        def as_seen(images: Tensor, which: str) -> Tensor:
            return images if which == PLAIN else transformed(which, images)

        pictures = {which: 2 * as_seen(test.pictures, which) - 1 for which in names}
        features = {
            which: torch.cat(
                [represent(encoder, feature, as_seen(part, which)).cpu() for part in torch.split(pixels, 64)]
            )
            for which in names
        }
        gaps = likelihood_gaps(self.model, number, pictures, features, test.keys, after_each=move)
        by_image = np.stack([gaps[which].gaps for which in self.extent.transformations], 1)  # (n, transformations)
        return {which: summarise(gap) for which, gap in gaps.items()} | {"": self._alike(features), IMAGES: by_image}

    @staticmethod
    def _alike(features: Mapping[str, Tensor]) -> dict[str, float]:
        """Correlation of the representations of image and transformed image, over images."""
        plain = features[PLAIN].double()
        centred = plain - plain.mean(0)
        correlations = {}
        for which, values in features.items():
            other = values.double() - values.double().mean(0)
            norm = (centred.square().sum() * other.square().sum()).sqrt()
            correlations[which] = float((centred * other).sum() / norm) if norm > 0 else np.nan
        return correlations

    def _samples(self, number: int, name: str, sources: Seen, train: Seen) -> dict[str, Any]:
        """Pictures of the sources and of their mirror images, and which way they face."""
        conditions, k = self.conditions["test"][name], self.extent.samples
        told = [torch.from_numpy(np.array(values[sources.rows])) for values in (conditions.plain, conditions.mirror)]
        steps, seed = self.wanted.config.sampling_steps, self.wanted.training.seed
        both = torch.cat(
            [draw(self.model, number, features, sources.keys, k, steps=steps, seed=seed) for features in told]
        )
        truth = torch.cat([sources.pictures, sources.pictures.flip(-1)]) * 2 - 1
        pictures, images, other = both.numpy(), truth.numpy(), others(np.concatenate([sources.keys, mix(sources.keys)]))
        return {
            "pictures": as_bytes(both[: min(SHOWN, len(sources.rows))]),
            "orientation": (*orientation_share(images, pictures), orientation_share(images[other], pictures)[0]),
            IMAGES: facing_share(images, pictures),  # (sources and mirror images,)
            "nearest": nearest_images(both.flatten(0, 1), 2 * train.pictures - 1)[1].mean(),
            "nearest_real": nearest_images(2 * sources.pictures - 1, 2 * train.pictures - 1)[1].mean(),
        }

    def _kept(
        self,
        parts: Mapping[str, Any],
        test: npt.NDArray[np.int64],
        compared: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
    ) -> Kept:
        """What the numbers are means or ratios of, by groups of test images; model and fits stay as they are."""
        groups = ImageGroups(self.data, ["test"])
        kept = Kept({"group": groups.axis})

        def sums(rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            return groups.sums("test", rows, values)

        def by_image(measure: str) -> npt.NDArray[np.float64]:
            return np.stack([of[measure][IMAGES] for of in parts.values()], 1)  # (n, encoders, …)

        dims, gaps = ("group", "encoder", "transformation"), by_image("gap")
        counts = (("group",), sums(compared, np.ones(len(compared))))
        kept.add("gap", Mean("gap_sum", "compared"), gap_sum=(dims, sums(compared, gaps)), compared=counts)
        share = (dims, sums(compared, np.sign(gaps) / 2 + 0.5))
        kept.add("share", Mean("share_sum", "compared"), share_sum=share)
        both = np.concatenate([sources, sources])  # the images, and their mirror images
        kept.add(
            "orientation",
            Mean("facing", "drawn"),
            facing=(dims[:2], sums(both, by_image("samples"))),
            drawn=(("group",), sums(both, np.ones(len(both)))),
        )
        inverted = np.moveaxis(sums(test, by_image("inversion")), -1, 0)
        left, whole, nearer, common, odd = ((dims[:2], part) for part in inverted)
        kept.add("r2", Mean("explained", "variance"), explained=(dims[:2], whole[1] - left[1]), variance=whole)
        counts = (("group",), sums(test, np.ones(len(test))))
        kept.add("nearer", Mean("nearer_sum", "inverted"), nearer_sum=nearer, inverted=counts)
        kept.add("odd", Mean("odd_common", "odd_whole"), odd_common=common, odd_whole=odd)
        return kept

    def _dataset(self, parts: Mapping[str, Any], sources: Seen, compared: int, trained_on: int) -> xr.Dataset:
        encoders, transformations = list(parts), list(self.extent.transformations)
        data: dict[str, Any] = {
            name: ("encoder", [parts[encoder]["inversion"][name] for encoder in encoders]) for name in INVERSION
        }
        for name in GAPS:
            values = [[parts[encoder]["gap"][which][name] for which in transformations] for encoder in encoders]
            data[name] = (("encoder", "transformation"), values)
        alike = [[parts[encoder]["gap"][""][which] for which in transformations] for encoder in encoders]
        data["correlation"] = (("encoder", "transformation"), alike)
        for k, end in enumerate((*ENDS, "_null")):
            facing = [parts[encoder]["samples"]["orientation"][k] for encoder in encoders]
            data[f"orientation{end}"] = ("encoder", facing)
        for name in ("nearest", "nearest_real"):
            data[name] = ("encoder", [parts[encoder]["samples"][name] for encoder in encoders])
        coords = {"encoder": encoders, "transformation": transformations}
        about = {
            "n_compared": compared,
            "n_sources": len(sources.rows),
            "n_samples": self.extent.samples,
            "n_nearest": trained_on,
            "features": ", ".join(f"{name}: {feature}" for name, (_, feature) in self.members.items()),
            "null": "representations of other images",
            "interval": "95 % over test images: shares Wilson, gaps normal",
            "decides": "the likelihood gap, where the measures disagree",
        }
        return xr.Dataset(data, coords, about).assign(self._sheets(parts, sources))

    def _sheets(self, parts: Mapping[str, Any], sources: Seen) -> dict[str, Any]:
        """Sources and samples, a sheet for each encoder; see report/pictures.py."""
        truth = as_bytes(2 * sources.pictures[: min(SHOWN, len(sources.rows))] - 1)
        values = np.stack([np.concatenate([truth[:, None], parts[name]["samples"]["pictures"]], 1) for name in parts])
        notes = np.empty(values.shape[:3], object)
        mirror = "mirror" in self.extent.transformations
        for i, name in enumerate(parts):
            gap = parts[name]["gap"]["mirror"] if mirror else None
            more = (
                ""
                if gap is None
                else f"; mirror: gap {gap['gap']:.3g}, z = {gap['z']:.1f}, {gap['share']:.0%} of images"
            )
            for row, identity in enumerate(sources.ids[: len(truth)]):
                notes[i, row, 0] = str(identity)
                notes[i, row, 1:] = [f"drawn from {name} of {identity}{more}"] * (values.shape[2] - 1)
        dims = ("picture_sheet", "picture_row", "picture_column")
        caption = (
            "On the left the source, then pictures drawn from its representation: the encoder keeps what they share."
        )
        about = {"title": "Pictures of what is kept", "caption": caption}
        return {
            "pictures": ((*dims, "picture_y", "picture_x", "picture_rgb"), values, about),
            "picture_note": (dims, notes.astype(str)),
            "picture_sheet": list(parts),
            "picture_column": ["source", *(str(k + 1) for k in range(values.shape[2] - 1))],
        }
