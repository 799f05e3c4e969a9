"""What the attention viewer of the report keeps: thumbnails and maps of a few images, in bounded space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product as pairs
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.encoders.attention import AttentionProduct
from sightline.encoders.encoder import Encoder
from sightline.images.pipeline import Batch
from sightline.images.thumbnails import thumbnail_size, thumbnails
from sightline.measure.layers import sample_rows
from sightline.measure.plan import Plan

QUERIES = 7  # a viewer shows at most 7 × 7 queries
VIEWER_BYTES = 4_000_000  # of an encoder


# Maps to look at


@dataclass(frozen=True)
class ViewerMaps:
    """What a viewer keeps of one encoder: maps of some queries, all layers and heads, one byte a number."""

    number: int  # of the encoder on the axis of the result
    sites: tuple[str, ...]
    heads: int  # the most that a layer has
    grid: tuple[int, int]
    side: int = QUERIES  # at most side × side queries

    @property
    def queries(self) -> list[int]:
        """Flat indices of the queries, evenly spread over the grid.

        >>> ViewerMaps(0, ("block.0.attn_map",), 6, (1, 14)).queries
        [1, 3, 5, 7, 9, 11, 13]
        """
        rows, columns = (
            [(2 * i + 1) * length // (2 * min(length, self.side)) for i in range(min(length, self.side))]
            for length in self.grid
        )
        return [row * self.grid[1] + column for row, column in pairs(rows, columns)]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, heads (their mean first), queries, keys of one image."""
        return len(self.sites), 1 + self.heads, len(self.queries), math.prod(self.grid)

    def within(self, images: int) -> ViewerMaps:
        """With as many queries as fit, for so many images."""
        look = self
        while look.side > 1 and images * math.prod(look.shape) > VIEWER_BYTES:
            look = replace(look, side=look.side - 1)
        return look


class Viewer:
    """Quantised attention maps of a few test images, and the images as each encoder saw them."""

    def __init__(self, images: int, plan: Plan) -> None:
        self.plan, self.looks = plan, dict[str, ViewerMaps]()
        for number, (name, sites) in enumerate(plan.sites.items()):
            encoder, shapes = plan.encoders[name], plan.shapes[name]
            kept = tuple(site for site in sites if not problem(encoder, shapes[site]))
            if images and kept and encoder.tokens is not None:
                heads = max(shapes[site][0] for site in kept)
                self.looks[name] = ViewerMaps(number, kept, heads, encoder.tokens.grid)
        # All encoders show the same images. Fewer of them go before fewer queries.
        fitting = (VIEWER_BYTES // math.prod(look.shape) for look in self.looks.values())
        images = max(1, min(images, *fitting)) if self.looks else 0
        self.looks = {name: look.within(images) for name, look in self.looks.items()}
        self.rows = sample_rows(plan.images, "test", images, plan.seed) if images else np.empty(0, np.int64)
        self.slots: list[int] = []
        self.places: list[int] = []

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the states: maps (images, layers, heads, queries, keys) and pictures (images, y, x, 3), all uint8."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, look in self.looks.items():
            shapes[f"viewer_map_{look.number}"] = (len(self.rows), *look.shape)
            size = thumbnail_size(self.plan.encoders[name].preprocess.size)
            shapes[f"viewer_pixels_{look.number}"] = (len(self.rows), *size, 3)
        return shapes

    def begin(self, batch: Batch) -> None:
        """Note which images of the batch are shown, their slots and their places in the batch."""
        places = {int(row): place for place, row in enumerate(batch.rows)} if batch.split == "test" else {}
        self.slots = [slot for slot, row in enumerate(self.rows) if int(row) in places]
        self.places = [places[int(self.rows[slot])] for slot in self.slots]

    def maps(self, encoder: str, product: AttentionProduct, prefix: int) -> Tensor | None:
        """Rows of the noted images, uint8 (images, 1 + H, queries, keys): 255 is the largest probability of a row.

        First the mean of the heads: once each is scaled to its own largest probability, it could not be told.
        """
        if not self.places:
            return None
        maps = []
        for place in self.places:
            rows = product[place : place + 1].scores(prefix)[0, :, self.looks[encoder].queries].softmax(-1)
            rows = torch.cat([rows.mean(0, keepdim=True), rows])
            maps.append((255 * rows / rows.amax(-1, keepdim=True)).round().nan_to_num(0).to(torch.uint8))
        return torch.stack(maps)

    def pictures(self, encoder: str, batch: Batch) -> Tensor:
        """The noted images as the encoder saw them, uint8 (images, y, x, 3), averaged over areas."""
        pixels = batch.pixels[self.plan.encoders[encoder].preprocess][self.places]
        return thumbnails(pixels)

    def variables(self, states: Mapping[str, Any], seen: npt.NDArray[np.bool_]) -> dict[str, xr.DataArray]:
        """The states as labelled arrays, of the images that could be read."""
        images = self.plan.images
        where = images.indices("test")[self.rows[seen]]
        labels = [images.classes[label] if label >= 0 else "" for label in images.labels[where]]
        about = {
            "viewer_id": ("viewer_image", images.ids[where].astype(str)),
            "viewer_label": ("viewer_image", np.array(labels, dtype=str)),
        }
        variables = {}
        for name, look in self.looks.items():
            i = look.number
            maps, pictures = (states[f"viewer_{what}_{i}"].numpy(force=True)[seen] for what in ("map", "pixels"))
            variables[f"viewer_map_{i}"] = xr.DataArray(
                maps.astype(np.uint8),  # sums of several processes come as int64
                dims=("viewer_image", *(f"viewer_{axis}_{i}" for axis in ("layer", "head", "query", "key"))),
                coords={
                    **about,
                    f"viewer_layer_{i}": list(look.sites),
                    f"viewer_head_{i}": ["mean", *map(str, range(look.heads))],
                    f"viewer_query_{i}": look.queries,
                },
                attrs={"grid": list(look.grid), "patch": patch_size(self.plan.encoders[name])},
            )
            variables[f"viewer_pixels_{i}"] = xr.DataArray(
                pictures.astype(np.uint8),
                dims=("viewer_image", f"viewer_y_{i}", f"viewer_x_{i}", "viewer_rgb"),
                coords=about,
            )
        return variables


def problem(encoder: Encoder, shape: tuple[int, ...]) -> str:
    """Why the map (H, T, T) of a layer has no patches that can be placed on a grid; empty if it has."""
    tokens = encoder.tokens
    if tokens is None:
        return "the patch grid of the encoder is not known"
    if shape[-2:] != (tokens.count, tokens.count):
        return (
            f"the map has {shape[-2]} × {shape[-1]} tokens, but {tokens.prefix} prefix tokens and "
            f"{tokens.grid[0]} × {tokens.grid[1]} patches are {tokens.count}"
        )
    return "" if math.prod(tokens.grid) > 1 else "there is one patch only"


def patch_size(encoder: Encoder) -> float:
    """Pixels of the side of a patch; NaN without patches."""
    if encoder.patch is not None:
        return encoder.patch
    return encoder.preprocess.size[0] / encoder.tokens.grid[0] if encoder.tokens is not None else math.nan
