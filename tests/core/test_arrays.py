"""Array in, array out."""

import numpy as np
import pytest
import torch

from sightline.core.arrays import as_tensor, like


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6.0).reshape(2, 3)[:, ::-1],
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.broadcast_to(np.arange(3), (2, 3)),  # read-only
        [[1, 2, 3], [4, 5, 6]],
    ],
    ids=["plain", "backwards", "transposed", "big-endian", "read-only", "list"],
)
@pytest.mark.filterwarnings("error")
def test_any_array_becomes_a_tensor_of_its_own_memory(array: np.ndarray) -> None:
    tensor = as_tensor(array)
    assert tensor.tolist() == np.asarray(array).tolist()
    tensor += 1
    assert (tensor - 1).tolist() == np.asarray(array).tolist()


def test_a_tensor_stays_what_it_is() -> None:
    tensor = torch.ones(2, dtype=torch.bfloat16)
    assert as_tensor(tensor) is tensor


def test_the_answer_is_of_the_kind_that_was_given() -> None:
    result = torch.ones(2, requires_grad=True)
    assert like(torch.zeros(1), result) is result
    answer = like(np.zeros(1), result)
    assert isinstance(answer, np.ndarray)
    assert answer.tolist() == [1, 1]
