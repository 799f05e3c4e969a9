"""Inversion: which pixels can be read off the features of a block by a linear map?

Ridge regression in closed form from features to small pictures, fitted to training images and their mirror images; on
test images and theirs

    R²     = 1 − Σ ‖x − x̂‖² / Σ ‖x − mean x‖²               share of the pixels' variance that comes back
    nearer = share of pictures with ‖x̂ − x‖ < ‖x̂ − mirror x‖;    0.5 = left and right are lost
    odd    = Σ ⟨odd x̂, odd x⟩ / Σ ‖odd x‖²,   odd x = (x − mirror x) / 2;    0 = invariant to the flip, 1 = kept

The null is the same fit with the pictures of other images, turned at random. See estimators/inversion.py.

Source: Mahendran and Vedaldi 2015 and Dosovitskiy and Brox 2016 for inverting representations; the odd part answers
Shekhar et al. 2023, section 2.2, without a diffusion model.

Shapes: n images, D width, P = 3 · size² numbers of a picture.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
import xarray as xr
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.core.groups import Kept, Mean
from sightline.core.keyed_random import id_keys, mix
from sightline.core.processes import shared
from sightline.core.results import interval, outside_decoder
from sightline.encoders.encoder import Encoder
from sightline.images.pipeline import Batch
from sightline.images.preprocess import Preprocess
from sightline.measure.estimators.inversion import MEASURES as MEASURES
from sightline.measure.estimators.inversion import fit_inverse as fit_inverse
from sightline.measure.estimators.ridge import BLOCK_NUMBERS
from sightline.measure.feature_cache import Features
from sightline.measure.groups import GROUPS
from sightline.measure.inversion import NAMES as NAMES
from sightline.measure.inversion import ImagePairs, invert
from sightline.measure.layers import sample_rows
from sightline.measure.plan import Cost, Key, Plan
from sightline.measure.pooled import Matrix, Pooled, Which, disk, every_site, flaw, widths
from sightline.report.figures import Figure, KeyNumber, key_number, over_depth

TOPIC = "structure"
TITLE = "Inversion"
QUESTION = "Which pixels can be read off the features of a block, and do they still know left from right?"
FORMULA = """\
x̂ = ridge regression from features to small pixels, fitted to training images and their mirror images
R² = 1 − Σ ‖x − x̂‖² / Σ ‖x − mean x‖²
nearer = share of test pictures with ‖x̂ − x‖ < ‖x̂ − mirror x‖
odd = Σ ⟨odd x̂, odd x⟩ / Σ ‖odd x‖²,  odd x = (x − mirror x) / 2"""
HOW_TO_READ = """\
R² says how much of a small version of the image a linear map finds in the features: colours and layout first, details
hardly ever. The other two numbers look only at left and right: an encoder that is invariant to the flip gives the same
picture for an image and its mirror image, which is as near to the one as to the other (50 %), and none of the odd part
comes back (0). Dashes are the null, the same fit with the pictures of other images; with the image itself in place of
the features, R² and the odd part would be 1. What a linear map does not find may still be there, only hidden more
deeply: a diffusion model (sightline rcdm) can find more. Compare encoders on the same images and at the same size of
pictures."""
SOURCE = (
    'Mahendran, Vedaldi 2015, "Understanding Deep Image Representations by Inverting Them"; Dosovitskiy, Brox 2016, '
    '"Inverting Visual Representations with Convolutional Networks"; Shekhar et al. 2023, "Objectives Matter", '
    "section 2.2 (invariances, seen in generated pictures)"
)
SITES = ("block.*", "norm", "decoder.block.*")
SPLITS = ("train", "val", "test")
ANY_SITE = True
BY_DEFAULT = False
# Batching and order change no number either, but may round a byte of a picture the other way.
INVARIANT_TO = frozenset({"rotation", "scale", "translation"})

VIEWS = ("plain", "mirror")
FEATURES = ("cls", "gap")
PIXELS = ""  # in the place of a site, which no site is called: the pictures
HELD_OUT = 5  # without a val split, one of so many training images chooses the penalty instead
TITLES = {
    "r2": "R² of the pixels",
    "nearer": "nearer to themselves than to their mirror image",
    "odd": "odd part that is recovered",
}


@dataclass(frozen=True)
class InversionConfig:
    """`size` of the pictures in pixels, `features` that are inverted, and how many `pictures` the report shows."""

    size: int = 24
    features: tuple[str, ...] = FEATURES
    pictures: int = 8

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 64:
            raise InputError(f"inversion.size is {self.size}, but pictures of 2 to 64 pixels can be inverted to")
        if self.pictures < 1:
            raise InputError(f"inversion.pictures is {self.pictures}, but at least 1 is needed")
        if not self.features:
            raise InputError(f"Inversion needs a feature; choose from {', '.join(FEATURES)}")
        for name in self.features:
            if name not in FEATURES:
                raise InputError(f"Inversion has no feature {name!r}{nearest(name, FEATURES)}")


def views(config: InversionConfig, split: str) -> tuple[str, ...]:
    return VIEWS


def _bytes(pictures: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Pictures (…, 3, h, w) in 0 … 1 as bytes (…, h, w, 3)."""
    values: npt.NDArray[np.uint8] = np.rint(255 * np.clip(np.moveaxis(pictures, -3, -1), 0, 1)).astype(np.uint8)
    return values


class InversionAnalysis(Pooled):
    """Features of images and mirror images, and small pictures, go to disk; all fits are made when the pass is over."""

    def __init__(self, config: InversionConfig, plan: Plan) -> None:
        splits = _splits(plan)
        super().__init__(plan, splits, every_site(plan, config.features))
        self.config = config
        self.shown = sample_rows(plan.images, "test", config.pictures, plan.seed)
        self.files |= _pictures(plan, config)

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        super().update(batch, reductions)
        rows = batch.rows.numpy(force=True)
        size = (self.config.size, self.config.size)
        entries = {name: self.files.get(_picture_of(name, batch.split)) for name in self.plan.encoders}
        once = {entry.key: name for name, entry in entries.items() if entry is not None}  # some see the same
        for name in once.values():
            pixels = batch.pixels[self.plan.encoders[name].preprocess].float() / 255
            small = F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
            self.files[_picture_of(name, batch.split)].write(rows, small.flatten(1).numpy(force=True))

    def compute(self) -> xr.Dataset:
        self.finish()
        chosen = list(dict.fromkeys(which[:3] for which in self.files if which.site != PIXELS))
        answers = dict(zip(chosen, shared(chosen, lambda names: self._score(*names)), strict=True))
        numbers = {names: (answer, why) for names, (answer, _, why, _) in answers.items()}
        kept, held = self._chosen()
        result = (
            self.dataset([*NAMES, "penalty"], numbers)
            .assign(self._shown({names: pictures for names, (_, pictures, _, _) in answers.items()}))
            .assign_attrs(
                n_train=len(kept),
                n_selection=len(held),
                n_test=len(self.rows["test"]),
                selection="the val split" if "val" in self.splits else f"one of {HELD_OUT} training images",
                interval="95 % over images: nearer Wilson, as if an image and its mirror image were one decision",
                null="the same fit with the pictures of other images, turned at random",
                ceiling="the image itself in the place of its reconstruction",
                size_of_pictures=self.config.size,
            )
        )
        return self._kept(result, {names: images for names, (*_, images) in answers.items()}).beside(result)

    def _kept(self, result: xr.Dataset, images: Mapping[tuple[str, str, str], npt.NDArray[np.float64] | None]) -> Kept:
        """By groups of test images, with the fit as it is: what the measures are ratios of."""
        dims, kept = ("encoder", "site", "feature"), Kept({"group": self.groups("test").axis})
        axes = [[str(name) for name in result[dim].values] for dim in dims]
        sums = np.zeros((*map(len, axes), GROUPS, 5))
        for names, of_images in images.items():
            if of_images is not None:
                at = tuple(axis.index(name) for axis, name in zip(axes, names, strict=True))
                sums[at] = self.by_group("test", of_images)
        left, whole, nearer, common, odd = (((*dims, "group"), part) for part in np.moveaxis(sums, -1, 0))
        count = (("group",), self.by_group("test", np.ones(len(self.rows["test"]))))
        explained = ((*dims, "group"), whole[1] - left[1])
        kept.add("r2", Mean("explained", "variance"), explained=explained, variance=whole)
        kept.add("nearer", Mean("nearer_sum", "images"), nearer_sum=nearer, images=count)
        kept.add("odd", Mean("odd_common", "odd_whole"), odd_common=common, odd_whole=odd)
        return kept

    def _chosen(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Positions of the training images that fit, and of those that choose, in the train or val split."""
        count = len(self.rows["train"])
        if "val" in self.splits:
            return np.arange(count), np.arange(len(self.rows["val"]))
        held = np.zeros(count, bool)
        held[np.argsort(self._keys("train"), kind="stable")[::HELD_OUT]] = True
        return np.flatnonzero(~held), np.flatnonzero(held)

    def _keys(self, split: str) -> npt.NDArray[np.uint64]:
        """Of the images of a split that could be read."""
        images = self.plan.images
        return mix(id_keys(images.ids[images.indices(split)[self.rows[split]]]), self.plan.seed)

    def _part(self, encoder: str, site: str, feature: str, split: str) -> ImagePairs:
        plain, mirror = (self.features(encoder, site, feature, view, split, labelled=False) for view in VIEWS)
        pictures = self.files[_picture_of(encoder, split)].read()[0]
        return ImagePairs(plain, mirror, Matrix(pictures, self.rows[split]))

    def _score(
        self, encoder: str, site: str, feature: str
    ) -> tuple[list[float], npt.NDArray[np.uint8] | None, str, npt.NDArray[np.float64] | None]:
        """Numbers, reconstructions of the images that are shown, why there are none, and the parts of each image."""
        parts = {split: self._part(encoder, site, feature, split) for split in self.splits}
        flaws = (flaw(matrix, split, constant=split == "train") for split, part in parts.items() for matrix in part[:2])
        if why := next(filter(None, flaws), ""):
            return [np.nan] * (len(NAMES) + 1), None, why, None
        kept, held = self._chosen()
        chooses, keys = "val" if "val" in self.splits else "train", self._keys("train")[kept]
        recovered = invert(
            parts["train"].some(kept),
            parts[chooses].some(held),
            parts["test"],
            (keys, self._keys(chooses)[held]),
            size := self.config.size,
            self.device,
        )
        shown = recovered.fit(parts["test"].plain.values[self._visible()])[:, : 3 * size * size]
        pictures = _bytes(shown.reshape(-1, 3, size, size))
        return (
            [*(recovered.numbers[name] for name in NAMES), recovered.fit.penalties[0]],
            pictures,
            "",
            recovered.images,
        )

    def _visible(self) -> npt.NDArray[np.int64]:
        """Rows of the images that are shown and could be read."""
        return self.shown[np.isin(self.shown, self.rows["test"])]

    def _shown(self, pictures: Mapping[tuple[str, str, str], npt.NDArray[np.uint8] | None]) -> dict[str, Any]:
        """Source and reconstructions over depth, a sheet for each encoder and feature; see report/pictures.py."""
        rows, size = self._visible(), self.config.size
        sheets = list(dict.fromkeys((encoder, feature) for encoder, _, feature in pictures))
        sites = list(dict.fromkeys(site for _, site, _ in pictures))
        shape = (len(sheets), len(rows), 1 + len(sites))
        values, notes = np.zeros((*shape, size, size, 3), np.uint8), np.full(shape, "", object)
        ids = self.plan.images.ids[self.plan.images.indices("test")[rows]]
        for i, (encoder, feature) in enumerate(sheets):
            sources = self.files[_picture_of(encoder, "test")].read()[0][rows]
            values[i, :, 0], notes[i, :, 0] = _bytes(sources.reshape(-1, 3, size, size)), ids
            for j, site in enumerate(sites, 1):
                made = pictures.get((encoder, site, feature))
                if made is not None:
                    values[i, :, j], notes[i, :, j] = made, [f"{name} from {feature} of {site}" for name in ids]
        dims = ("picture_sheet", "picture_row", "picture_column")
        caption = (
            f"On the left the image at {size} pixels, then what a linear map makes of the features of each layer. "
            "Where the pictures of a column are the same, the layer does not distinguish the images."
        )
        about = {"title": "Pictures read off the features", "caption": caption}
        return {
            "pictures": ((*dims, "picture_y", "picture_x", "picture_rgb"), values, about),
            "picture_note": (dims, notes.astype(str)),
            "picture_sheet": [f"{encoder}, {feature}" for encoder, feature in sheets],
            "picture_column": ["image", *sites],
        }


def _splits(plan: Plan) -> tuple[str, ...]:
    return tuple(split for split in SPLITS if split in plan.splits)


def _picture_of(encoder: str, split: str) -> Which:
    """The name that the pictures of an encoder have among the matrices on disk."""
    return Which(encoder, PIXELS, "", "plain", split)


def _pictures(plan: Plan, config: InversionConfig) -> dict[Which, Features]:
    """Matrices for small pictures of what each encoder sees; encoders that see the same share one."""
    made: dict[tuple[str, str], Features] = {}
    pictures = {}
    for name, encoder in plan.encoders.items():
        for split in _splits(plan):
            about = {
                "small pixels": config.size,
                "seen": _geometry(encoder),
                "images": plan.images.name,
                "split": split,
                "digest": plan.images.digest(split),
            }
            key = (repr(about["seen"]), split)
            rows = len(plan.images.indices(split))
            pictures[_picture_of(name, split)] = made.setdefault(
                key, Features(plan.cache, about, rows, 3 * config.size**2)
            )
    return pictures


def _geometry(encoder: Encoder) -> dict[str, Any]:
    """The part of an image that an encoder sees, whatever it makes of the colours."""
    return asdict(replace(encoder.preprocess, mean=Preprocess.mean, std=Preprocess.std))


def cost(config: InversionConfig, plan: Plan) -> Cost:
    chosen = every_site(plan, config.features)
    width = max(widths(plan, *key)[name] for key, names in chosen.items() for name in names)
    pictures = {entry.key: entry for entry in _pictures(plan, config).values()}.values()
    more = sum(entry.bytes for entry in pictures if not entry.exists)
    sums = 4 * width**2 + 4 * width * 2 * 3 * config.size**2
    return Cost(memory=8 * (sums + 16 * BLOCK_NUMBERS), disk=disk(plan, _splits(plan), chosen) + more)


def figures(result: xr.Dataset) -> list[Figure]:
    about = result.attrs
    words = (
        f"{about['n_train']} images and their mirror images were fitted, {about['n_selection']} chose the penalty, "
        f"{about['n_test']} are scored. Bands are 95 % intervals, dashes the same fit with pictures of other images."
    )
    return [
        figure
        for measure, title in TITLES.items()
        for figure in over_depth(
            result,
            measure,
            title=f"{title[0].upper()}{title[1:]}, over depth",
            caption=words,
            value_title=title,
            name=measure,
            facet="feature",
            reference=(0.5, "left and right are lost") if measure == "nearer" else (0.0, "nothing comes back"),
            domain=None,
            percent=measure == "nearer",
        )
    ]


def _last(result: xr.Dataset) -> Iterator[tuple[str, Any]]:
    """Each encoder with the row of its last site, which is not of a decoder."""
    for encoder in result.encoder.values:
        rows = result[[*NAMES]].sel(encoder=encoder).to_dataframe().reset_index().dropna(subset="r2")
        rows = rows[outside_decoder(rows.site)]
        if len(rows):
            yield str(encoder), rows[rows.site == rows.site.iloc[-1]].iloc[0]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    return [
        (
            encoder,
            f"{last.r2:.3f}",
            f"R² at {last.site}, feature {last.feature}, {interval(last.r2_low, last.r2_high, '.3f')}; "
            f"{last.nearer:.1%} are nearer to themselves than to their mirror image "
            f"({interval(last.nearer_low, last.nearer_high)}), {last.odd:.3f} of the odd part is recovered "
            f"({interval(last.odd_low, last.odd_high, '.3f')})",
        )
        for encoder, last in _last(result)
    ]


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    about = "R² of the pixels that a linear map reads off the last block"
    return key_number(result, "r2", at="last", title="pixels R²", about=about)


def summary(result: xr.Dataset) -> list[str]:
    """How much of the pixels comes back at the last site of each encoder, and whether left and right do."""
    sentences = []
    for encoder, last in _last(result):
        knows = "tells left from right" if last.nearer_low > 0.5 else "does not tell left from right"
        sentences.append(
            f"{encoder}: a linear map finds {max(last.r2, 0):.0%} of the variance of the pixels in {last.feature} of "
            f"{last.site}, and {knows}: {last.nearer:.1%} of the pictures are nearer to the image than to its mirror "
            "image."
        )
    return sentences
