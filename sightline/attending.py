"""Attention between patches while a layer computes it: two numbers per head, and small maps to look at.

Softmax over the patch keys alone is the map with its prefix tokens dropped and its rows renormalised. It is formed in
chunks of a few heads that stay in the cache, keys in rows and queries in columns: then sums over keys, and products
with a number of each query, run along contiguous memory.

B images, H heads, T tokens, n patches, i a query, j a key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as pairs
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn import functional as F

from sightline.layers import sample_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from sightline.encoder import Encoder
    from sightline.images import Batch
    from sightline.plan import Plan
    from sightline.products import AttentionProduct
    from sightline.sites import Tokens

__all__ = [
    "EPSILON",
    "Look",
    "Viewer",
    "distance_and_nmi",
    "nmi_of",
    "patch_distances",
    "patch_size",
    "problem",
    "unattended",
]

EPSILON = 1e-8  # added to the attention to every patch before the mutual information
SMALLEST = 1e-20  # of a sum of exponentials that has lost nothing that counts
LARGEST = 80.0  # of a score, so that its exponential is finite
CACHED = 2**17  # numbers of maps that a core keeps in its cache, with as many to work on; chunks are for two at least
ON_DEVICE = 2**26  # numbers of the maps that are formed at a time on a GPU
QUERIES = 7  # a viewer shows at most 7 × 7 queries
VIEWER_BYTES = 4_000_000  # of an encoder
THUMBNAIL = 112  # pixels of the longer side


def patch_distances(grid: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
    """Euclidean distances (n, n) between patches of a grid (rows, columns), in patches.

    >>> patch_distances((2, 2))[0].tolist()
    [0.0, 1.0, 1.0, 1.4142135623730951]
    """
    rows, columns = (torch.arange(side, dtype=torch.float64, device=device) for side in grid)
    places = torch.cartesian_prod(rows, columns)
    difference = places[:, None] - places
    return torch.hypot(difference[..., 0], difference[..., 1])


def nmi_of(keys: Tensor, plogp: Tensor) -> Tensor:
    """NMI of rows t_ij that sum to one: from Σ_i t_ij (…, n) and Σ_ij t_ij ln t_ij (…), both float64.

    I = H(k) − H(k|q),  H(k|q) = −(1/n) Σ_ij t_ij ln t_ij,  H(q) = ln n. The sum of all t, n but for rounding, takes the
    place of n, so that rounding of the rows' own sums cancels.
    """
    n, total = keys.shape[-1], keys.sum(-1)
    of_keys: Tensor = torch.special.entr(keys / total[..., None]).sum(-1)
    given_query = (total / n).log() - plogp / total
    return (of_keys - given_query) / torch.sqrt(math.log(n) * of_keys)


def distance_and_nmi(product: AttentionProduct, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Attention distance in patches and NMI, both (B, H) in float64, of patches attending to patches.

    NaN for a head where a query may attend to no patch, or where q and k are not finite. Leaves map @ v in the product
    where that is cheap, since the map is there.
    """
    # Without the maximum taken off, exp is two passes cheaper, and as exact unless it leaves the range of float32. On
    # a GPU the look at the sums would wait for the device.
    if product.q.device.type == "cpu":
        output = _room_for_output(product)
        z, distance, nmi = _measure(product, tokens, shift=False, output=output)
        if z.amin() > SMALLEST and (distance + nmi).isfinite().all():
            product.output = output
            return distance, nmi
    return _measure(product, tokens, shift=True)[1:]


def _room_for_output(product: AttentionProduct) -> Tensor | None:
    """Empty (B, H, T, d), tokens before heads in memory as the next layer wants them; None if the kernel is better."""
    v = product.v
    if v is None or v.dtype != torch.float32 or product.bias is not None or torch.is_grad_enabled():
        return None
    return v.new_empty(v.shape[0], v.shape[2], v.shape[1], v.shape[3]).transpose(1, 2)


def _measure(
    product: AttentionProduct, tokens: Tokens, shift: bool, output: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_j e_ij of each query (B, H, n), distance and NMI (B, H); `output` is filled with map @ v.

    With e = exp(score), Z its sum over patches and Z' over all tokens, the map is e / Z', and the rows whose mutual
    information is wanted are t = (e / Z' + ε) / (Z / Z' + n ε) = (e + ε Z') / (Z + n ε Z').
    """
    (images, heads), n, first = product.shape[:2], math.prod(tokens.grid), tokens.prefix
    distances = _distances(tokens.grid, product.q.device)
    q, k, bias = product.q[..., first:, :].mT, product.k, _bias(product, first)
    bias = None if bias is None else bias.expand(images, heads, -1, -1)
    room = CACHED * max(torch.get_num_threads(), 2) if q.device.type == "cpu" else ON_DEVICE
    maps = max(room // n**2, 1)
    several, part = max(maps // heads, 1), min(maps, heads)  # images, and heads of an image, at a time
    whole, spare = (distances.new_empty(min(several, images) * part, rows, n) for rows in (first + n, n))
    sums = distances.new_empty(4, images, heads, n)
    for at in pairs(_slices(images, several), _slices(heads, part)):
        a, b = (_stacked(x[at]) for x in (k, q))
        z, far, keys, plogp = (of[at].view(-1, n) for of in sums)
        e, work = whole[: len(a)], spare[: len(a)]
        if bias is None:
            torch.baddbmm(e, a, b, beta=0, alpha=product.scale, out=e)
        else:
            e.copy_(bias[at].flatten(0, 1)).baddbmm_(a, b, alpha=product.scale)
        t = e[:, first:]
        if shift:
            e -= t.amax(1, keepdim=True)
            e.clamp_(max=LARGEST)  # a prefix token may have more than all patches together
        e.exp_()
        torch.sum(t, 1, out=z)
        torch.sum(torch.mul(t, distances, out=work), 1, out=far)
        every = e[:, :first].sum(1).add_(z)
        if output is not None and product.v is not None:
            _attend(e, every, product.q[at][:, :, :first], k[at], product.v[at], product.scale, into=output[at])
        share = torch.add(z, every, alpha=n * EPSILON).reciprocal_()
        torch.addcmul(every.mul_(EPSILON).mul_(share)[:, None], t, share[:, None], out=t)
        torch.sum(t, 2, out=keys)
        torch.sum(torch.log(t, out=work).mul_(t), 1, out=plogp)
    z, far, keys, plogp = sums
    distance = (far / z).mean(-1, dtype=torch.float64)
    return z, distance, nmi_of(keys.double(), plogp.sum(-1, dtype=torch.float64))


def _attend(
    e: Tensor, every: Tensor, prefix: Tensor, k: Tensor, v: Tensor, scale: float, into: Tensor
) -> None:  # into: (b, h, T, d)
    """map @ v: of patch queries from e (b · h, T, n) and its sums, of the few prefix queries (b, h, P, d) anew."""
    values = torch.bmm(e.mT, _stacked(v)).view(*v.shape[:2], -1, v.shape[-1])
    torch.mul(values, every.reciprocal().view(*v.shape[:2], -1, 1), out=into[:, :, prefix.shape[2] :])
    if prefix.shape[2]:
        into[:, :, : prefix.shape[2]] = F.scaled_dot_product_attention(prefix, k, v, scale=scale)


def _stacked(x: Tensor) -> Tensor:
    """(b, h, …) → (b · h, …) in float32; of one image it is a view, and nothing is copied."""
    return (x[0] if len(x) == 1 else x.flatten(0, 1)).float()


@functools.lru_cache(maxsize=8)
def _distances(grid: tuple[int, int], device: torch.device) -> Tensor:
    return patch_distances(grid, device).float()


def _bias(product: AttentionProduct, prefix: int) -> Tensor | None:
    """The bias of patch queries for all keys as (B, H, T, n); of 1 for B or H where all images or heads share it."""
    if product.bias is None:
        return None
    bias = product.bias[(None,) * (4 - product.bias.ndim)]
    rows = prefix if bias.shape[-2] > 1 else 0  # a bias of one row is for all queries
    tokens = product.shape[-1]
    return bias[..., rows:, :].mT.float().contiguous().expand(-1, -1, tokens, tokens - prefix)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def unattended(product: AttentionProduct, prefix: int) -> Tensor:
    """Which images (B,) have a query that a mask lets attend to no patch."""
    bias = _bias(product, prefix)
    if bias is None:
        return torch.zeros(product.shape[0], dtype=torch.bool, device=product.q.device)
    return (bias[:, :, prefix:] == -math.inf).all(2).flatten(1).any(1).expand(product.shape[0])


# ---------------------------------------------------------------------------------------------------------------
# Maps to look at


@dataclass(frozen=True)
class Look:
    """What a viewer keeps of one encoder: maps of some queries, all layers and heads, one byte a number."""

    number: int  # of the encoder on the axis of the result
    sites: tuple[str, ...]
    heads: int  # the most that a layer has
    grid: tuple[int, int]
    side: int = QUERIES  # at most side × side queries

    @property
    def queries(self) -> list[int]:
        """Flat indices of the queries, evenly spread over the grid.

        >>> Look(0, ("block.0.attn_map",), 6, (1, 14)).queries
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

    def within(self, images: int) -> Look:
        """With as many queries as fit, for so many images."""
        look = self
        while look.side > 1 and images * math.prod(look.shape) > VIEWER_BYTES:
            look = replace(look, side=look.side - 1)
        return look


class Viewer:
    """Quantised attention maps of a few test images, and the images as each encoder saw them."""

    def __init__(self, images: int, plan: Plan) -> None:
        self.plan, self.looks = plan, dict[str, Look]()
        for number, (name, sites) in enumerate(plan.sites.items()):
            encoder, shapes = plan.encoders[name], plan.shapes[name]
            kept = tuple(site for site in sites if not problem(encoder, shapes[site]))
            if images and kept and encoder.tokens is not None:
                heads = max(shapes[site][0] for site in kept)
                self.looks[name] = Look(number, kept, heads, encoder.tokens.grid)
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
        found: dict[str, tuple[int, ...]] = {}
        for name, look in self.looks.items():
            found[f"viewer_map_{look.number}"] = (len(self.rows), *look.shape)
            size = _small(self.plan.encoders[name].preprocess.size)
            found[f"viewer_pixels_{look.number}"] = (len(self.rows), *size, 3)
        return found

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
        found = []
        for place in self.places:
            rows = product[place : place + 1].scores(prefix)[0, :, self.looks[encoder].queries].softmax(-1)
            rows = torch.cat([rows.mean(0, keepdim=True), rows])
            found.append((255 * rows / rows.amax(-1, keepdim=True)).round().nan_to_num(0).to(torch.uint8))
        return torch.stack(found)

    def pictures(self, encoder: str, batch: Batch) -> Tensor:
        """The noted images as the encoder saw them, uint8 (images, y, x, 3), averaged over areas."""
        pixels = batch.pixels[self.plan.encoders[encoder].preprocess][self.places]
        small = F.adaptive_avg_pool2d(pixels.float(), _small(pixels.shape[2:]))
        return small.round().to(torch.uint8).permute(0, 2, 3, 1)

    def variables(self, states: Mapping[str, Any], seen: npt.NDArray[np.bool_]) -> dict[str, xr.DataArray]:
        """The states as labelled arrays, of the images that could be read."""
        images = self.plan.images
        where = images.indices("test")[self.rows[seen]]
        labels = [images.classes[label] if label >= 0 else "" for label in images.labels[where]]
        about = {
            "viewer_id": ("viewer_image", images.ids[where].astype(str)),
            "viewer_label": ("viewer_image", np.array(labels, dtype=str)),
        }
        found = {}
        for name, look in self.looks.items():
            i = look.number
            maps, pictures = (states[f"viewer_{what}_{i}"].numpy(force=True)[seen] for what in ("map", "pixels"))
            found[f"viewer_map_{i}"] = xr.DataArray(
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
            found[f"viewer_pixels_{i}"] = xr.DataArray(
                pictures.astype(np.uint8),
                dims=("viewer_image", f"viewer_y_{i}", f"viewer_x_{i}", "viewer_rgb"),
                coords=about,
            )
        return found


def _small(size: Sequence[int]) -> tuple[int, int]:
    """Height and width whose longer side is at most 112.

    >>> _small((224, 448)), _small((32, 32))
    ((56, 112), (32, 32))
    """
    shrink = min(THUMBNAIL / max(size), 1)
    return max(round(size[0] * shrink), 1), max(round(size[1] * shrink), 1)


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
