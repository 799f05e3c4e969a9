"""Attention between patches while a layer computes it: two numbers per head, and small maps to look at.

Softmax over the patch keys alone is the map with its prefix tokens dropped and its rows renormalised. It is formed in
chunks of a few heads that stay in the cache, keys in rows and queries in columns: then sums over keys, and products
with a number of each query, run along contiguous memory.

B images, H heads, T tokens, n patches, i a query, j a key.
"""

from __future__ import annotations

import functools
import math
from itertools import product as pairs
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from sightline.encoders.attention import AttentionProduct
    from sightline.encoders.sites import Tokens

__all__ = ["EPSILON", "distance_and_nmi", "nmi_of", "patch_distances", "unattended"]


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
    """Σ_j e_ij of each patch query (B, H, n), distance and NMI (B, H); `output` is filled with map @ v.

    With e = exp(score), Z its sum over patches and Z' over all tokens, the map is e / Z', and the rows whose mutual
    information is wanted are t = (e / Z' + ε) / (Z / Z' + n ε) = (e + ε Z') / (Z + n ε Z'). The few prefix queries
    are computed with the others, since `output` needs them, and are left out of the sums at the end.
    """
    (images, heads), n, first = product.shape[:2], math.prod(tokens.grid), tokens.prefix
    distances = _distances(tokens, product.q.device)  # (n, T)
    q, k, bias = product.q.mT, product.k, _bias(product)
    bias = None if bias is None else bias.expand(images, heads, -1, -1)
    room = CACHED * max(torch.get_num_threads(), 2) if q.device.type == "cpu" else ON_DEVICE
    maps = max(room // n**2, 1)
    several, part = max(maps // heads, 1), min(maps, heads)  # images, and heads of an image, at a time
    whole, spare = (distances.new_empty(min(several, images) * part, rows, first + n) for rows in (first + n, n))
    values = distances.new_empty(0 if output is None else len(whole), first + n, product.q.shape[-1])
    sums, received = distances.new_empty(3, images, heads, first + n), distances.new_empty(images, heads, n)
    for at in pairs(_slices(images, several), _slices(heads, part)):
        a, b = (_stacked(x[at]) for x in (k, q))
        z, far, plogp = (of[at].view(-1, first + n) for of in sums)
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
            attended = torch.bmm(e.mT, _stacked(product.v[at]), out=values[: len(a)])
            torch.mul(
                attended.view(output[at].shape),
                every.reciprocal().view(output[at].shape[:3])[..., None],
                out=output[at],
            )
        share = torch.add(z, every, alpha=n * EPSILON).reciprocal_()
        torch.addcmul(every.mul_(EPSILON).mul_(share)[:, None], t, share[:, None], out=t)
        torch.sum(t[:, :, first:], 2, out=received[at].view(-1, n))
        torch.sum(torch.log(t, out=work).mul_(t), 1, out=plogp)
    z, far, plogp = sums[..., first:]
    distance = (far / z).mean(-1, dtype=torch.float64)
    return z, distance, nmi_of(received.double(), plogp.sum(-1, dtype=torch.float64))


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
