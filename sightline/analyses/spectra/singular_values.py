"""Singular values of tokens in logarithms, what is lost in rounding, and the numbers that are read off them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sightline.core.arrays import Array, as_tensor, like
from sightline.core.errors import InputError
from sightline.measure.estimators.rank import effective_rank

NAMES = ("largest", "second", "effective_rank", "uncentred_second")  # what comes before the ranks
NUMBERS = len(NAMES)


def log_singular_values(tokens: Array, centred: bool = True) -> Array:
    """Natural logarithm of the singular values of tokens: (N, D) or (B, N, D) → float64 (…, min(N, D)).

    Each image's tokens have their mean taken off, or with `centred=False` left in. Values descend, and are absolute:
    subtract the first one for Δ log.
    A value that is lost in rounding is −inf, such as the last of N ≤ D centred tokens: rounding of the input,
    about its eps in every number, or of the Gram matrix, some 1e-7 of the largest value. Constant tokens give −inf
    throughout, those that are not finite NaN.

    >>> log_singular_values(torch.tensor([[3.0, 1.0, 0.0], [-3.0, 1.0, 0.0]]))
    tensor([1.4452,   -inf], dtype=torch.float64)
    >>> round(math.log(math.sqrt(3**2 + 3**2)), 4)
    1.4452
    """
    return like(tokens, log_values(_checked(as_tensor(tokens)), (centred,))[0])


def _checked(tokens: Tensor) -> Tensor:
    if tokens.ndim not in (2, 3) or 0 in tokens.shape[-2:]:
        raise InputError(f"Spectra need tokens (N, D) or (B, N, D), at least one of each; got {tuple(tokens.shape)}")
    return tokens if tokens.is_floating_point() else tokens.double()


def log_values(x: Tensor, centred: Sequence[bool]) -> list[Tensor]:
    """Log singular values with the mean of the rows taken off (True), or left in, as they are asked for."""
    n, d = x.shape[-2:]
    # Rounding is a random matrix, whose largest singular value is about (√n + √d) times the size of its numbers: eps of
    # what was rounded, and several eps where sums were computed in the same precision, which they are not in 16 bits.
    info = torch.finfo(x.dtype)
    noise = info.eps * (8 if info.bits > 16 else 1) * (math.sqrt(n) + math.sqrt(d))
    x = x.double()
    mean = x.mean(-2, keepdim=True)
    x = x - mean
    gram = x @ x.mT if n <= d else x.mT @ x
    offset = mean.square().sum(-1, keepdim=True)  # (…, 1, 1)
    squares = (gram.diagonal(dim1=-2, dim2=-1).sum(-1) + n * offset[..., 0, 0]) / (n * d)
    bad = ~gram.isfinite().all(-1).all(-1)
    gram.masked_fill_(bad[..., None, None], 0.0)
    spectra = []
    for without in centred:
        values = torch.linalg.eigvalsh(gram if without else _with_mean(gram, x, mean)).flip(-1)
        resolved = (n + d) * torch.finfo(torch.float64).eps * values[..., 0]  # by the product and its eigenvalues
        floor = torch.maximum(noise**2 * squares, resolved)[..., None]
        logs = torch.where(values > floor, values.log() / 2, -math.inf)
        spectra.append(logs.masked_fill_(bad[..., None], math.nan))
    return spectra


def log_values_left_out(x: Tensor, members: Tensor, centred: bool) -> Tensor:
    """The same of one matrix (M, D) without each group of its rows, members (G, M): float64 (G, min(M, D)).

    Rows that are left out shorten the cloud along the singular vectors of the whole, which stay as they are: one
    decomposition serves all groups, and the variation over groups is rather too large than too small.
    """
    n, d = x.shape
    x = x.double()
    x = x - x.mean(0) if centred else x
    if not x.isfinite().all():
        return x.new_full((len(members), min(n, d)), math.nan)
    if n <= d:  # X Xᵀ = U Σ² Uᵀ: a row has σ² u² of each direction
        squares, vectors = torch.linalg.eigh(x @ x.T)
        of_rows = squares.clamp(min=0) * vectors.square()
    else:
        of_rows = (x @ torch.linalg.eigh(x.T @ x).eigenvectors).square()
    rest = of_rows.sum(0) - members @ of_rows
    floor = (n + d) * torch.finfo(torch.float64).eps * rest.amax(-1, keepdim=True)
    return torch.where(rest > floor, rest.log() / 2, -math.inf).sort(-1, descending=True).values


def _with_mean(gram: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """The smaller product of X + 1 mᵀ with itself from that of the centred X: no second large product."""
    mean = mean.nan_to_num(0.0, 0.0, 0.0)
    if x.shape[-2] <= x.shape[-1]:  # (X + 1 mᵀ)(X + 1 mᵀ)ᵀ
        across = (x @ mean.mT).nan_to_num(0.0, 0.0, 0.0)  # (…, n, 1)
        return gram + across + across.mT + mean @ mean.mT
    return gram + x.shape[-2] * mean.mT @ mean


def numbers_of(logs: Tensor, raw: Tensor) -> Tensor:
    """`NAMES`, then Δ log σ of all ranks: (…, R), and the values with the mean left in → (…, 4 + R)."""
    second, raw_second = (
        each[..., 1:2] if each.shape[-1] > 1 else torch.full_like(each, -math.inf) for each in (logs, raw)
    )
    delta = logs - logs[..., :1]
    return torch.cat([logs[..., :1], second, effective_rank(delta.exp())[..., None], raw_second, delta], -1)
