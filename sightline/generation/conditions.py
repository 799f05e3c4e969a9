"""Conditions: one feature of each encoder, of images and of their mirror images.

A feature is a site and a pooling, `norm.cls` or `block.6.gap`. Representations of a split are computed once, in one
pass over the images, and lie on disk in the feature cache of the pass, where its analyses find them, too.

B images, D width.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core import progress
from sightline.core.errors import InputError, nearest
from sightline.core.processes import barrier, rank, world
from sightline.encoders.encoder import Encoder
from sightline.encoders.sites import unmatched
from sightline.encoders.watching import watch
from sightline.images.pipeline import batches
from sightline.images.sets import Images
from sightline.images.views import make_view
from sightline.measure.feature_cache import Features, describe_features
from sightline.measure.pooled import POOLINGS, poolings

BATCH = 64
ROWS = 4096  # that are read at a time
VIEWS = ("plain", "mirror")


@dataclass(frozen=True)
class Feature:
    """What of an encoder conditions the pictures."""

    site: str
    pooling: str

    def __str__(self) -> str:
        return f"{self.site}.{self.pooling}"


@dataclass(frozen=True, eq=False)
class Conditions:
    """Representations of the images of a split and of their mirror images, in the order of the split."""

    plain: npt.NDArray[np.float32]  # (n, D), a memory map
    valid: npt.NDArray[np.bool_]  # (n,): whose image could be read
    mirror: npt.NDArray[np.float32]

    @property
    def width(self) -> int:
        return int(self.plain.shape[1])

    def at(self, rows: npt.NDArray[np.int64], mirrored: npt.NDArray[np.bool_]) -> Tensor:
        """Those of some images, mirrored or not, (B, D) float32."""
        return torch.from_numpy(np.where(mirrored[:, None], self.mirror[rows], self.plain[rows]))

    def standards(self) -> tuple[npt.NDArray[np.float32], float]:
        """Mean (D,) over images and mirror images, and the root of the mean variance: one number, so that directions in
        which an encoder hardly differs stay small; 1 where nothing differs at all.
        """
        count = 2 * int(self.valid.sum())
        mean = sum((part.sum(0, dtype=np.float64) for part in self._blocks()), np.zeros(self.width)) / count
        variance = sum(float(np.square(part - mean).sum()) for part in self._blocks()) / (count * self.width)
        constant = variance <= (1e-6 * float(np.abs(mean).max())) ** 2
        return np.asarray(mean, np.float32), 1.0 if constant else float(np.sqrt(variance))

    def _blocks(self) -> Iterator[npt.NDArray[np.float32]]:
        """All representations, some at a time."""
        rows = np.flatnonzero(self.valid)
        for start in range(0, len(rows), ROWS):
            yield self.plain[rows[start : start + ROWS]]
            yield self.mirror[rows[start : start + ROWS]]


def feature_of(encoder: Encoder, text: str = "") -> Feature:
    """The feature that is asked for; without words, CLS (else the mean of all tokens) of the norm or the last block."""
    if text:
        site, _, pooling = text.rpartition(".")
        if pooling not in POOLINGS or not site:
            raise InputError(
                f"The feature {text!r} is written SITE.POOLING, such as norm.cls or block.6.gap"
                f"{nearest(pooling, POOLINGS)}"
            )
        if problem := unmatched([site], encoder.sites):
            raise InputError(f"{encoder.name}: {problem}")
        wanted = [Feature(site, pooling)]
    else:
        blocks = [site for site in encoder.sites if site.startswith("block.") and site.count(".") == 1]
        sites = ["norm"] if "norm" in encoder.sites else blocks[-1:] or list(encoder.sites)[-1:]
        wanted = [Feature(site, pooling) for site in sites for pooling in ("cls", "gap")]
    grey = torch.full((2, 3, *encoder.preprocess.size), 128, dtype=torch.uint8)
    for feature in wanted:
        with contextlib.suppress(_NoSuchFeature):
            represent(encoder, feature, grey)
            return feature
    raise InputError(
        f"Encoder {encoder.name!r} has no feature {text or ' or '.join(map(str, wanted))!r}; choose another one with "
        "--set feature=SITE.POOLING (`sightline list sites REF` shows the sites)"
    )


class _NoSuchFeature(Exception):  # noqa: N818 — never seen by users
    """The site is not reached, or has no such pooling."""


@torch.no_grad()
def represent(encoder: Encoder, feature: Feature, pixels: Tensor) -> Tensor:
    """The feature of images as the encoder sees them, uint8 or floats in [0, 1] (B, 3, h, w) → (B, D) float32."""
    vectors: list[Tensor] = []

    def see(_: str, activation: Tensor) -> None:
        vector = poolings(activation, encoder, [feature.pooling]).get(feature.pooling)
        if vector is not None:
            vectors.append(vector.float().clone())

    device = next(encoder.module.parameters(), torch.empty(0)).device
    with encoder.evaluating(), watch(encoder.sites, [feature.site], see):
        encoder(encoder.preprocess.normalize(pixels.to(device)))
    if not vectors:
        raise _NoSuchFeature
    return vectors[-1]


def represent_split(
    encoders: Mapping[str, tuple[Encoder, Feature]],
    images: Images,
    splits: Sequence[str],
    cache: Path,
    *,
    workers: int | None = None,
    shown: bool = False,
) -> dict[str, dict[str, Conditions]]:
    """Conditions by split and encoder; what the cache has is not computed again, and processes share the images."""
    entries = {
        (split, name, view): _entry(encoder, feature, images, split, view, cache)
        for split in splits
        for name, (encoder, feature) in encoders.items()
        for view in VIEWS
    }
    for split in splits:
        todo = {key: entry for key, entry in entries.items() if key[0] == split and not entry.complete}
        if todo:
            _fill(todo, encoders, images, split, workers, shown)
    barrier()
    return {
        split: {
            name: Conditions(*entries[split, name, "plain"].read(), entries[split, name, "mirror"].read()[0])
            for name in encoders
        }
        for split in splits
    }


def _entry(encoder: Encoder, feature: Feature, images: Images, split: str, view: str, cache: Path) -> Features:
    """With the name that the pass would give it."""
    about = {**describe_features(encoder, images, split, "float32"), "site": feature.site, "feature": feature.pooling}
    if view != "plain":
        about |= {"view": view, "seed": 0}
    grey = torch.full((2, 3, *encoder.preprocess.size), 128, dtype=torch.uint8)
    return Features(cache, about, len(images.indices(split)), represent(encoder, feature, grey).shape[1])


def _fill(
    entries: Mapping[tuple[str, str, str], Features],
    encoders: Mapping[str, tuple[Encoder, Feature]],
    images: Images,
    split: str,
    workers: int | None,
    shown: bool,
) -> None:
    chosen = {name: encoders[name] for _, name, _ in entries}
    loader = batches(
        images,
        {encoder.preprocess for encoder, _ in chosen.values()},
        splits=[split],
        batch=BATCH,
        workers=workers,
        rank=rank(),
        world=world(),
    )
    total = len(images.indices(split))
    with progress.bar(f"Representations of {split}", total, 0, shown) as move, contextlib.closing(loader):
        for batch in loader:
            for _, name, view in entries:
                encoder, feature = chosen[name]
                if batch.ids:
                    pixels = make_view(view, batch.pixels[encoder.preprocess])
                    values = represent(encoder, feature, pixels).numpy(force=True)
                    entries[split, name, view].write(batch.rows.numpy(), values)
            move(len(batch.rows) * world())
    barrier()
    if rank() == 0:
        for entry in entries.values():
            entry.finish()
