"""Estimators compute where they are told: no tensor is made on an assumed device, and no features come back.

There need not be a GPU to see this. PyTorch's default device is set to `meta`, which holds no numbers: a tensor that is
made without naming a device cannot take part in a computation on the CPU, as it could not on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from sightline.measure.estimators.neighbours import knn_predict
from sightline.measure.estimators.probes import Probe, Schedule, train_probes

N, WIDTH = 96, 24
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 3, N)
X = (RANDOM.normal(size=(N, WIDTH)) + LABELS[:, None]).astype(np.float32)
OTHERS = RANDOM.normal(size=(N, WIDTH)).astype(np.float32)


def neighbours() -> Any:
    return (knn_predict(X, LABELS, OTHERS, device="cpu"),)


def probes() -> Any:
    heads = [Probe(("x",), depth, optimizer) for depth in (1, 2) for optimizer in ("sgd", "lars")]
    trained = train_probes(heads, Schedule(epochs=3, batch=32, warmup_epochs=1), {"x": X}, LABELS, 3, device="cpu")
    return trained.loss, trained.accuracy({"x": OTHERS}, LABELS), trained.decisions(1, {"x": OTHERS})


ESTIMATORS: list[Callable[[], Any]] = [neighbours, probes]


class Leaving(TorchFunctionMode):
    """Counts the numbers that are handed to the CPU or to NumPy."""

    largest = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = [*args[1:], *(kwargs or {}).values()]
        to_host = func in (torch.Tensor.cpu, torch.Tensor.numpy) or (
            func is torch.Tensor.to and any(isinstance(one, str) and one == "cpu" for one in given)
        )
        if to_host and isinstance(args[0], torch.Tensor):
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **(kwargs or {}))


@contextmanager
def nowhere() -> Iterator[None]:
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_device_is_assumed(estimator: Callable[[], Any]) -> None:
    expected = estimator()
    with nowhere():
        found = estimator()
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_features_do_not_come_back(estimator: Callable[[], Any]) -> None:
    with Leaving() as leaving:
        estimator()
    assert 0 < leaving.largest <= 3 * N  # decisions and scores do


def test_the_trap_works() -> None:
    with nowhere(), pytest.raises((RuntimeError, NotImplementedError)):
        (torch.from_numpy(X) @ torch.ones(WIDTH)).numpy()
    with Leaving() as leaving:
        torch.from_numpy(X).to("cpu")
    assert leaving.largest == X.size
