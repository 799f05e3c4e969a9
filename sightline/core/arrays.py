"""Array in, array out: the measures on whole arrays take NumPy's arrays and tensors, and answer in kind."""

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, np.ndarray[Any, Any])


def as_tensor(values: Tensor | npt.ArrayLike) -> Tensor:
    """A tensor as it is; an array as a copy, which may come in any order of axes and bytes, and be read-only.

    >>> as_tensor(np.arange(3, dtype=">i4")[::-1])
    tensor([2, 1, 0], dtype=torch.int32)
    """
    if isinstance(values, Tensor):
        return values
    array = np.array(values, order="C")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def like(given: Array, result: Tensor) -> Array:
    """The result as what was given: an array for an array, a tensor for a tensor.

    >>> like(np.zeros(1), torch.ones(2)), like(torch.zeros(1), torch.ones(2))
    (array([1., 1.], dtype=float32), tensor([1., 1.]))
    """
    return result if isinstance(given, Tensor) else result.numpy(force=True)
