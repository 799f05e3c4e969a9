"""Centred kernel alignment (CKA) of whole arrays, and its parts for those who sum over batches.

    HSIC₁(K, L) = ⟨K̃, L̃⟩ / (n (n − 3)),   K̃ the U-centred Gram matrix K = X Xᵀ of n images, zero diagonal
    CKA = Σ_b HSIC₁(K_b, L_b) / √(Σ_b HSIC₁(K_b, K_b) · Σ_b HSIC₁(L_b, L_b))     over minibatches b

⟨K̃, L̃⟩ with U-centred matrices (Székely & Rizzo 2014) equals the textbook tr(K̃L̃) + 1ᵀK̃1·1ᵀL̃1/((n−1)(n−2)) −
2/(n−2)·1ᵀK̃L̃1 (Song et al. 2012) term by term, but does not cancel, and ⟨K̃, K̃⟩ ≥ 0 by construction. With all Gram
matrices of a batch as rows of one matrix, all pairs of layers of all encoders are one matrix product.

Source: Nguyen, Raghu & Kornblith 2021 (minibatch CKA), as used by Shekhar et al. 2023, Appendix B.1.

Shapes: n images of a batch, p features, S layers, G groups of batches.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.core.arrays import as_tensor
from sightline.core.errors import InputError
from sightline.core.processes import shared
from sightline.images.pipeline import batch_count
from sightline.images.sets import FEWEST
from sightline.measure.estimators.resampling import draw_groups, percentile_ends

TOKENS = ("all", "cls", "mean", "patches")
GROUPS = 32  # batches are summed in this many groups, so that memory does not grow; up to 32 batches each is its own
CHUNK = 16384  # columns whose mean is taken off at a time; 32 rows of them stay in the cache
PIECE = 4096  # columns of one product in the precision of the features; products are summed in float64
SQUARES = 1e-20, 1e30  # sums of squares between which no square of a float32 is too small or too large for float32
NUMBERS = 2**20  # of the products of pieces that are made at a time

Own = tuple["npt.NDArray[np.float64]", "npt.NDArray[np.float64]"]  # HSIC of rows and of columns, each with itself


# Whole arrays


def cka(
    x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike, batch: int | None = 32, *, unbiased: bool = True
) -> float:
    """CKA of two whole arrays of activations (images first), in float64.

    Unbiased: minibatches of `batch` images (all at once with `batch=None`), the last ones shared out evenly.
    `unbiased=False` is the biased full-batch form ‖YᵀX‖²_F / (‖XᵀX‖_F ‖YᵀY‖_F) on centred columns.

    >>> x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    >>> round(cka(x, 3 * x.flip(1) + 100), 6)
    1.0
    >>> noise = torch.randn(256, 500, generator=torch.Generator().manual_seed(1))
    >>> abs(cka(x, noise, unbiased=True)) < 0.1 < cka(x, noise, unbiased=False)
    True
    """
    a, b = as_tensor(x), as_tensor(y)
    if a.ndim < 2 or b.ndim < 2 or len(a) != len(b) or len(a) < FEWEST:
        raise InputError(
            f"CKA needs features (images, …) of the same images twice, at least {FEWEST} of them; "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if batch is not None and batch < FEWEST:
        raise InputError(f"The batch size is {batch}, but the unbiased CKA needs at least {FEWEST} images in a batch")
    a, b = a.flatten(1).double(), b.flatten(1).double()
    parts = 1 if batch is None or not unbiased else batch_count(len(a), batch)
    hsic = torch.zeros(2, 2, dtype=torch.float64)
    for rows in torch.arange(len(a)).tensor_split(parts):
        centred = centre(torch.stack([gram(a[rows]), gram(b[rows])]), unbiased)
        hsic += len(rows) * products(centred, unbiased)
    return float(ratio(hsic.numpy(force=True))[0, 1])


def study(
    x: Tensor | npt.ArrayLike,
    y: Tensor | npt.ArrayLike,
    batches: Sequence[int] = (32, 64, 128, 256, 512, 1024),
    counts: Sequence[int] = (),
    draws: int = 10,
    seed: int = 0,
) -> xr.Dataset:
    """How far minibatch CKA depends on the batch size and on the number of images: mean and deviation over draws.

    A draw takes `count` of the images (`counts` empty: all of them) and puts them into random batches; the same images
    in the same order for every batch size. A batch size beyond `count` means all at once.

    >>> x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    >>> found = study(x, x + torch.randn(256, 8, generator=torch.Generator().manual_seed(1)), [8, 32], [64, 256])
    >>> found["mean"].round(1).values.tolist(), bool((found["std"][0] > found["std"][1]).all())
    ([[0.5, 0.5], [0.5, 0.5]], True)
    """
    a, b = as_tensor(x), as_tensor(y)
    counts = list(counts) or [len(a)]
    if not batches or draws < 1 or max(counts) > len(a):
        raise InputError(
            f"A study of CKA needs a batch size, a draw, and counts of at most the {len(a)} images that there are; "
            f"got {len(batches)} batch sizes, {draws} draws and counts up to {max(counts)}"
        )
    random = np.random.Generator(np.random.Philox(seed))
    orders = [torch.from_numpy(random.permutation(len(a))) for _ in range(draws)]
    values = np.array(
        [[[cka(a[o[:count]], b[o[:count]], batch) for o in orders] for batch in batches] for count in counts]
    )
    dims = ("count", "batch")
    return xr.Dataset(
        {"mean": (dims, values.mean(-1)), "std": (dims, values.std(-1))},
        coords={"count": counts, "batch": list(batches)},
        attrs={"draws": draws, "seed": seed},
    )


# Gram matrices


def gram(x: Tensor) -> Tensor:
    """Gram matrix for CKA, (n, p) → float64 (n, n); exactly zero if all rows are the same.

    CKA does not see the mean of the features, but float32 does: its error grows with mean² / variance. So where the
    mean dominates, in a sample or in the end, it is taken off all rows, chunk by chunk while in the cache.
    """
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    eps = torch.finfo(x.dtype).eps
    total = _gram(x, eps)
    if x.device.type == "cpu" and x.dtype == torch.float32 and not SQUARES[0] < float(total.trace()) < SQUARES[1]:
        return _gram(x.double(), eps)
    return total


def _gram(x: Tensor, eps: float) -> Tensor:
    # The look at the sample waits for the device, which is worth it only where products are slower than that.
    if x.device.type == "cpu":
        total = _products(x[:, :CHUNK])
        if not _mean_dominates(total):
            total += _products(x[:, CHUNK:])
            if not _mean_dominates(total):
                return total
    total = _products(x, shift=True)
    # What is left of constant features is rounding: about eps of each feature.
    rounding = len(x) * x[0].double().square().sum() * (8 * eps) ** 2
    return torch.where(total.trace() <= rounding, 0.0, total)


def _products(x: Tensor, shift: bool = False) -> Tensor:
    """X Xᵀ in float64, or that of the rows minus the mean of (at most 32 of) them.

    Of the symmetric product three quarters are computed: the first half of its columns, and of the others the rest.
    """
    half = -(-len(x) // 2)
    first, rest = (x.new_zeros(shape, dtype=torch.float64) for shape in ((len(x), half), (len(x) - half,) * 2))
    few = x[:: -(-len(x) // 32)]  # a longer sum would round constant features to something else
    share = few.new_full((len(few),), 1 / len(few))
    columns = CHUNK if shift else PIECE * max(NUMBERS // len(x) ** 2, 1)
    for start in range(0, x.shape[1], columns):
        part = x[:, start : start + columns]
        if shift:  # not by one of the rows, which might be an outlier; a product is faster than a mean over rows
            part = part - few[:, start : start + columns].T @ share
        for pieces in _pieces(part):  # (m, n, c)
            first += torch.bmm(pieces, pieces[:, :half].mT).sum(0, dtype=torch.float64)
            rest += torch.bmm(pieces[:, half:], pieces[:, half:].mT).sum(0, dtype=torch.float64)
    return torch.cat([first, torch.cat([first[half:].T, rest])], 1)


def _pieces(x: Tensor) -> list[Tensor]:
    """Columns in pieces of equal length, (n, p) → (m, n, c), and the few that are left over, without a copy."""
    count = max(x.shape[1] // PIECE, 1)
    whole = x.shape[1] // count * count
    pieces = [x[:, :whole].unflatten(1, (count, -1)).transpose(0, 1)]
    return pieces if whole == x.shape[1] else [*pieces, x[:, whole:][None]]


def _mean_dominates(gram: Tensor) -> bool:
    """Whether less than a quarter of the squares is variance, or they are not finite: Σ‖x − x̄‖² < ¼ Σ‖x‖²."""
    return not gram.trace() - gram.mean() * len(gram) >= 0.25 * gram.trace()


# From Gram matrices to CKA


def centre(grams: Tensor, unbiased: bool = True) -> Tensor:
    """U-centre (unbiased) or double-centre (biased) Gram matrices: (…, n, n) → (…, n, n)."""
    n = grams.shape[-1]
    if not unbiased:
        rows = grams.mean(-1, keepdim=True)
        return grams - rows - rows.mT + rows.mean(-2, keepdim=True)
    grams = grams - torch.diag_embed(grams.diagonal(dim1=-2, dim2=-1))
    rows = grams.sum(-1, keepdim=True) / (n - 2)
    centred = grams - rows - rows.mT + rows.sum(-2, keepdim=True) / (n - 1)
    centred = centred - torch.diag_embed(centred.diagonal(dim1=-2, dim2=-1))
    # Where all images but one are the same, nothing but rounding is left, and its ratio would look like a value.
    whole, left = (torch.linalg.vector_norm(part, dim=(-2, -1), keepdim=True) for part in (grams, centred))
    return centred.mul_(torch.where(whole.isfinite(), left > 1e-12 * whole, torch.nan))


def products(centred: Tensor, unbiased: bool = True, shuffled: bool = False, others: Tensor | None = None) -> Tensor:
    """HSIC of all pairs: (…, S, n, n) → (…, S, S), or of each with each of `others` (…, O, n, n) → (…, S, O).

    `shuffled` pairs every image with the next one, not itself.
    """
    n = centred.shape[-1]
    other = centred if others is None else others
    other = other.roll((1, 1), (-2, -1)) if shuffled else other
    scale = n * (n - 3) if unbiased else (n - 1) ** 2
    return centred.flatten(-2) @ other.flatten(-2).mT / scale


def own_of(hsic: npt.NDArray[np.float64]) -> Own:
    """The HSIC of each row and of each column with itself, of all pairs of the same layers (…, S, S)."""
    diagonal = np.diagonal(hsic, axis1=-2, axis2=-1)
    return diagonal, diagonal


def ratio(hsic: npt.NDArray[np.float64], own: Own | None = None) -> npt.NDArray[np.float64]:
    """CKA from summed HSIC (…, A, B) and that of each layer with itself; NaN where that is zero."""
    rows, columns = own or own_of(hsic)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = hsic / (np.sqrt(rows)[..., :, None] * np.sqrt(columns)[..., None, :])
    return np.where(np.isfinite(value), value, np.nan)


def bootstrap(
    hsic: npt.NDArray[np.float64],
    replicates: int,
    seed: int,
    own: Own | None = None,
    device: torch.device | str = "cpu",
    bounds: bool = True,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """95 % percentile interval of CKA: resample the groups of (G, …, A, B), sum again, take the ratio again.

    The replicates are made on the device. NaN where that is not known: of a single group, or where a replicate has no
    value. Without `bounds` it may leave [−1, 1], for those who move it.
    """
    low, high = (np.full(hsic.shape[1:], np.nan) for _ in range(2))
    if len(hsic) < 2:
        return low, high
    draws = draw_groups(len(hsic), replicates, seed, device)
    rows, columns = (_again(draws, part) for part in own or own_of(hsic))  # (R, …, A), (R, …, B)
    value = ratio(hsic.sum(0), own and (own[0].sum(0), own[1].sum(0)))
    whole = torch.from_numpy(value).to(draws)

    def first(row: int) -> int:
        return row if own is None else 0  # of the same layers, a pair has the interval of the pair turned round

    def ends_of(row: int) -> list[npt.NDArray[np.float64]]:
        rest = slice(first(row), None)
        values = _again(draws, hsic[..., row, rest]) / torch.sqrt(columns[..., rest] * rows[..., row, None])
        return [end.numpy(force=True) for end in percentile_ends(values, len(hsic), whole[..., row, rest])]

    # Some rows at a time, because all replicates at once would not fit.
    ends_of_rows = shared(range(hsic.shape[-2]), ends_of)
    for row, ends in enumerate(ends_of_rows):
        for whole_end, end in zip((low, high), ends, strict=True):
            whole_end[..., row, first(row) :] = end
            if own is None:
                whole_end[..., row:, row] = end
    return within_bounds(value, low, high) if bounds else (low, high)


def within_bounds(
    value: npt.NDArray[np.float64], low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Both ends of intervals of CKA within [−1, 1], and further out only as far as rounding has put the value itself.

    No CKA lies beyond, biased or unbiased, of one batch or of sums over batches: HSIC is an inner product of centred
    Gram matrices, so that |HSIC(K, L)| ≤ √(HSIC(K, K) · HSIC(L, L)). But Student's interval of few batches would.
    """
    least, most = np.minimum(value, -1.0), np.maximum(value, 1.0)
    return np.clip(low, least, most), np.clip(high, least, most)


def _again(draws: Tensor, groups: npt.NDArray[np.float64]) -> Tensor:
    """Sums over groups (G, …) as often as each was drawn, (R, …)."""
    sums: Tensor = torch.tensordot(draws, torch.from_numpy(groups.copy()).to(draws), 1)
    return sums
