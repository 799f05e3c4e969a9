"""What masked objectives share: patches of pixels, random masks, mask units, and tokens put back in their places.

B images, h × w pixels, p side of a patch, N patches in rows (row-major), D width.
A mask is true where a patch is hidden.
"""

import torch
from torch import Tensor


def patchify(images: Tensor, patch: int) -> Tensor:  # (B, C, h, w) -> (B, N, p·p·C)
    """Pixels of every patch as a vector in the order (row, column, channel), the channel fastest.

    >>> patchify(torch.arange(8.0).view(1, 2, 2, 2), 2)
    tensor([[[0., 4., 1., 5., 2., 6., 3., 7.]]])
    """
    B, C, h, w = images.shape
    cells = images.reshape(B, C, h // patch, patch, w // patch, patch)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(B, (h // patch) * (w // patch), patch * patch * C)


def unpatchify(patches: Tensor, grid: tuple[int, int]) -> Tensor:  # (B, N, p·p·3) -> (B, 3, h, w)
    """Images of patches on a grid of rows and columns: undoes `patchify`.

    >>> images = torch.rand(2, 3, 8, 12)
    >>> bool((unpatchify(patchify(images, 4), (2, 3)) == images).all())
    True
    """
    rows, columns = grid
    patch = round((patches.shape[-1] / 3) ** 0.5)
    cells = patches.reshape(-1, rows, columns, patch, patch, 3)
    return cells.permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, rows * patch, columns * patch)


def norm_pix(patches: Tensor) -> Tensor:  # (B, N, P)
    """Each patch with mean 0 and variance 1: (t − mean) / √(var + 10⁻⁶), the variance unbiased."""
    variance, mean = torch.var_mean(patches, -1, keepdim=True)
    return (patches - mean) * torch.rsqrt(variance + 1e-6)


def random_masking(noise: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:  # (B, N) -> (B, kept), (B, N), (B, N)
    """Keep the patches with the smallest noise: `ids_keep`, `ids_restore` and the mask.

    `ids_restore` puts the kept patches followed by the hidden ones back in the order of the image, see `restore`.

    >>> ids_keep, ids_restore, mask = random_masking(torch.tensor([[0.5, 0.1, 0.9, 0.3]]), 2)
    >>> ids_keep, ids_restore, mask
    (tensor([[1, 3]]), tensor([[2, 0, 3, 1]]), tensor([[ True, False,  True, False]]))
    """
    ids_shuffle = noise.argsort(1)
    ids_restore = ids_shuffle.argsort(1)
    return ids_shuffle[:, :kept], ids_restore, ids_restore >= kept


def restore(visible: Tensor, mask_token: Tensor, ids_restore: Tensor) -> Tensor:  # (B, kept, D) -> (B, N, D)
    """Visible tokens in their places in the image, `mask_token` (1, 1, D) in all others."""
    B, kept, D = visible.shape
    hidden = mask_token.to(visible.dtype).expand(B, ids_restore.shape[1] - kept, D)
    return torch.cat([visible, hidden], 1).gather(1, ids_restore.unsqueeze(-1).expand(-1, -1, D))


def hidden(x: Tensor, mask: Tensor) -> Tensor:  # (B, N, D), (B, N) -> (hidden patches of all images, D)
    """The rows of hidden patches alone, so that heads and losses need not see the others.

    >>> hidden(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[True, False, True]])).tolist()
    [[1.0], [3.0]]
    """
    # The gradient of x[mask] is slower: it has to expect that a row is taken twice.
    return x.flatten(0, 1).index_select(0, mask.flatten().nonzero().squeeze(1))


def enlarge(mask: Tensor, grid: tuple[int, int], factor: int) -> Tensor:  # (B, N) -> (B, rows · f, columns · f)
    """A mask of units as the mask of what they consist of, factor × factor patches (or pixels) each.

    >>> enlarge(torch.tensor([[True, False]]), (1, 2), 2).int()
    tensor([[[1, 1, 0, 0],
             [1, 1, 0, 0]]], dtype=torch.int32)
    """
    return mask.reshape(-1, *grid).repeat_interleave(factor, 1).repeat_interleave(factor, 2)
