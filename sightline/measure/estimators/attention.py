"""Attention between patches while a layer computes it: two numbers per head, and small maps to look at.

Softmax over the patch keys alone is the map with its prefix tokens dropped and its rows renormalised. It is formed in
chunks of a few heads that stay in the cache, keys in rows and queries in columns: then sums over keys, and products
with a number of each query, run along contiguous memory.

B images, H heads, T tokens, n patches, i a query, j a key.
"""

import functools
import math
from collections.abc import Iterator
from itertools import product as pairs
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.encoders.attention import AttentionProduct
from sightline.encoders.sites import Tokens

EPSILON = 1e-8  # added to the attention to every patch before the mutual information
SMALLEST = 1e-20  # of a sum of exponentials that has lost nothing that counts
LARGEST = 80.0  # of a score, so that its exponential is finite
CACHED = 2**17  # numbers of maps that a core keeps in its cache, with as many to work on; chunks are for two at least
ON_DEVICE = 2**26  # numbers of the maps that are formed at a time on a GPU


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

    NaN for a head where a query may attend to no patch, or where q and k are not finite. Leaves what `attend` gives in
    the product, since the map is there.
    """
    # Without the maximum taken off, exp is two passes cheaper, and as exact unless it leaves the range of float32. On
    # a GPU the look at the sums would wait for the device.
    if product.q.device.type == "cpu":
        sums = _Sums(product, tokens, _room_for_output(product, tokens))
        distance, nmi = _measure(sums, shift=False)
        if sums.exact():
            product.output = sums.output
            return distance, nmi
    return _measure(_Sums(product, tokens), shift=True)


def attend(product: AttentionProduct, tokens: Tokens | None) -> Tensor | None:
    """map @ v (B, H, T, d) by the same steps as `distance_and_nmi`, to the last bit; None where that leaves none."""
    if tokens is None or (room := _room_for_output(product, tokens)) is None:
        return None
    sums = _Sums(product, tokens, room)
    for _ in sums.chunks(shift=False):
        pass
    return sums.output if sums.exact() else None


def _room_for_output(product: AttentionProduct, tokens: Tokens) -> Tensor | None:
    """Empty (B, H, T, d), tokens before heads in memory as the next layer wants them; None if the kernel is better."""
    v = product.v
    if v is None or v.dtype != torch.float32 or product.bias is not None or torch.is_grad_enabled():
        return None
    if v.device.type != "cpu" or product.shape[-2:] != (tokens.count, tokens.count) or math.prod(tokens.grid) == 1:
        return None
    return v.new_empty(v.shape[0], v.shape[2], v.shape[1], v.shape[3]).transpose(1, 2)


class _Chunk(NamedTuple):
    """Maps of some heads of some images: m = b · h of them."""

    at: tuple[slice, slice]
    e: Tensor  # (m, T, T): exp(score) of the keys for the queries
    z: Tensor  # (m, T): its sum over keys that are patches, Z
    every: Tensor  # (m, T): over all keys, Z'
    work: Tensor  # (m, n, T) to compute in


class _Sums:
    """The exponentials of the scores of a product, chunk by chunk, with their sums, and map @ v if there is room.

    The few prefix queries are computed with the others, since map @ v needs them, and are left out in the end.
    """

    def __init__(self, product: AttentionProduct, tokens: Tokens, output: Tensor | None = None) -> None:
        self.product, self.tokens, self.output = product, tokens, output
        self.n, self.first = math.prod(tokens.grid), tokens.prefix
        self.z, self.every = product.q.new_empty(2, *product.shape[:2], tokens.count, dtype=torch.float32)

    def chunks(self, shift: bool) -> Iterator[_Chunk]:
        """Each chunk may be overwritten when the next one is asked for."""
        product, n, first, (images, heads, tokens) = self.product, self.n, self.first, self.product.shape[:3]
        q, k, bias = product.q.mT, product.k, _bias(product)
        bias = None if bias is None else bias.expand(images, heads, -1, -1)
        room = CACHED * max(torch.get_num_threads(), 2) if q.device.type == "cpu" else ON_DEVICE
        maps = max(room // n**2, 1)
        several, part = max(maps // heads, 1), min(maps, heads)  # images, and heads of an image, at a time
        most = min(several, images) * part
        whole, spare, values = (self.z.new_empty(most, *of) for of in ((tokens,) * 2, (n, tokens), k.shape[2:]))
        for at in pairs(_slices(images, several), _slices(heads, part)):
            a, b = (_stacked(x[at]) for x in (k, q))
            z, every = (of[at].view(-1, tokens) for of in (self.z, self.every))
            e, work = whole[: len(a)], spare[: len(a)]
            if bias is None:
                torch.baddbmm(e, a, b, beta=0, alpha=product.scale, out=e)
            else:
                e.copy_(bias[at].flatten(0, 1)).baddbmm_(a, b, alpha=product.scale)
            if shift:
                e -= e[:, first:].amax(1, keepdim=True)
                e.clamp_(max=LARGEST)  # a prefix token may have more than all patches together
            e.exp_()
            torch.sum(e[:, first:], 1, out=z)
            torch.sum(e[:, :first], 1, out=every).add_(z)
            if self.output is not None and product.v is not None:
                into = self.output[at]
                attended = torch.bmm(e.mT, _stacked(product.v[at]), out=values[: len(a)])
                torch.mul(attended.view(into.shape), every.reciprocal().view(*into.shape[:3], 1), out=into)
            yield _Chunk(at, e, z, every, work)

    def exact(self) -> bool:
        """Whether no exponential was too small or too large for float32, so that nothing that counts was lost."""
        return bool(self.z.amin() > SMALLEST) and bool(self.every.amax() < 1 / SMALLEST)


def _measure(sums: _Sums, shift: bool) -> tuple[Tensor, Tensor]:
    """Distance and NMI (B, H).

    With e = exp(score), Z its sum over patches and Z' over all tokens, the map is e / Z', and the rows whose mutual
    information is wanted are t = (e / Z' + ε) / (Z / Z' + n ε) = (e + ε Z') / (Z + n ε Z').
    """
    n, first, distances = sums.n, sums.first, _distances(sums.tokens, sums.z.device)
    far, plogp = sums.z.new_empty(2, *sums.z.shape)
    keys = sums.z.new_empty(*sums.z.shape[:2], n)
    for at, e, z, every, work in sums.chunks(shift):
        t, (far_of, plogp_of) = e[:, first:], (of[at].view(z.shape) for of in (far, plogp))
        torch.sum(torch.mul(t, distances, out=work), 1, out=far_of)
        share = torch.add(z, every, alpha=n * EPSILON).reciprocal_()
        torch.addcmul((every * EPSILON).mul_(share)[:, None], t, share[:, None], out=t)
        torch.sum(t[:, :, first:], 2, out=keys[at].view(-1, n))
        torch.sum(torch.log(t, out=work).mul_(t), 1, out=plogp_of)
    distance = (far / sums.z)[..., first:].mean(-1, dtype=torch.float64)
    return distance, nmi_of(keys.double(), plogp[..., first:].sum(-1, dtype=torch.float64))


def _stacked(x: Tensor) -> Tensor:
    """(b, h, …) → (b · h, …) in float32; of one image it is a view, and nothing is copied."""
    return (x[0] if len(x) == 1 else x.flatten(0, 1)).float()


@functools.lru_cache(maxsize=8)
def _distances(tokens: Tokens, device: torch.device) -> Tensor:
    """Between patch keys and all queries, (n, T): 0 for a prefix token, which has no place."""
    return F.pad(patch_distances(tokens.grid, device).float(), (tokens.prefix, 0))


def _bias(product: AttentionProduct) -> Tensor | None:
    """The bias of all keys and queries as (B, H, T, T); of 1 for B or H where all images or heads share it."""
    if product.bias is None:
        return None
    bias = product.bias[(None,) * (4 - product.bias.ndim)]
    return bias.mT.float().contiguous().expand(-1, -1, product.shape[-1], product.shape[-1])


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def unattended(product: AttentionProduct, prefix: int) -> Tensor:
    """Which images (B,) have a query that a mask lets attend to no patch."""
    bias = _bias(product)
    if bias is None:
        return torch.zeros(product.shape[0], dtype=torch.bool, device=product.q.device)
    return (bias[:, :, prefix:, prefix:] == -math.inf).all(2).flatten(1).any(1).expand(product.shape[0])
