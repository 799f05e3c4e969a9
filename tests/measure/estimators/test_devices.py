"""Estimators compute where they are told: no tensor is made on an assumed device, and no features come back.

There need not be a GPU to see this. PyTorch's default device is set to `meta`, which holds no numbers: a tensor that is
made without naming a device cannot take part in a computation on the CPU, as it could not on a GPU.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from sightline.analyses.spectra import log_singular_values
from sightline.measure.estimators.cka import bootstrap
from sightline.measure.estimators.lda import add_patches, fit_lda
from sightline.measure.estimators.neighbours import knn_predict
from sightline.measure.estimators.pixels import Pixels, fit_softmax
from sightline.measure.estimators.probes import Probe, Schedule, train_probes
from sightline.measure.estimators.ridge import fit_ridge
from sightline.measure.estimators.similarity import bootstrap_linear
from sightline.measure.inversion import ImagePairs, invert
from sightline.measure.pooled import Matrix

N, WIDTH = 96, 24
CPU = torch.device("cpu")  # where estimators are told to compute; "cpu" is where a tensor would be sent unasked
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 3, N)
X = (RANDOM.normal(size=(N, WIDTH)) + LABELS[:, None]).astype(np.float32)
OTHERS = RANDOM.normal(size=(N, WIDTH)).astype(np.float32)
RANDOM_PICTURES = RANDOM.random((48, 3, 4, 4))


def neighbours() -> Any:
    return (knn_predict(X, LABELS, OTHERS, device=CPU),)


def probes() -> Any:
    heads = [Probe(("x",), depth, optimizer) for depth in (1, 2) for optimizer in ("sgd", "lars")]
    trained = train_probes(heads, Schedule(epochs=3, batch=32, warmup_epochs=1), {"x": X}, LABELS, 3, device=CPU)
    return trained.loss, trained.accuracy({"x": OTHERS}, LABELS), trained.decisions(1, {"x": OTHERS})


def ridge() -> Any:
    probe = fit_ridge((X, OTHERS), (LABELS, LABELS), device=CPU)
    return probe.errors, probe.scores(OTHERS), probe.decisions(OTHERS)


def inversion() -> Any:
    """48 images of which 24 fit, 12 choose and 12 are scored; a picture has 3 · 4 · 4 numbers."""
    pictures = RANDOM_PICTURES.reshape(48, -1)
    rows = np.split(np.arange(48), [24, 36])
    parts = [ImagePairs(*(Matrix(x, part) for x in (X[:48], OTHERS[:48], pictures))) for part in rows]
    keys = tuple(part.astype(np.uint64) for part in rows[:2])
    found = invert(parts[0], parts[1], parts[2], keys, 4, CPU)
    return np.array(list(found.numbers.values())), found.images


def discriminants() -> Any:
    """LDA, and a softmax on pixels from there; 24 images of 4 patches, of which 8 pixels each are seen."""
    patches = torch.from_numpy(X)
    shares = torch.nn.functional.one_hot(torch.from_numpy(LABELS), 3)
    fitted = fit_lda(add_patches(patches, shares), (1e-2, 1e-1))
    assert not isinstance(fitted, str)
    around = np.arange(24 * 8 * 4).reshape(24, 8, 4) % 4
    pixels = Pixels(around, np.full(around.shape, 0.25, np.float32), LABELS[: 24 * 2].repeat(4).reshape(24, 8))
    deviation = fitted.covariance.diagonal().sqrt()
    start = fitted.weight[0], fitted.bias[0]
    trained = fit_softmax(X.reshape(24, -1), pixels, start, fitted.mean, deviation, steps=3, lr=0.1, seed=0)
    return tuple((patches @ weight.float() + bias.float()).numpy() for weight, bias in (start, trained))


def intervals() -> Any:
    hsic = np.abs(RANDOM_PICTURES[:8, 0]) + 4 * np.eye(4)  # (G, S, S)
    return *bootstrap(hsic, 50, 0, device=CPU), *bootstrap_linear(hsic[0], hsic, 50, 0, CPU)


def spectra() -> Any:
    return log_singular_values(torch.from_numpy(X)).numpy(), log_singular_values(torch.from_numpy(X), False).numpy()


ESTIMATORS: list[Callable[[], Any]] = [neighbours, probes, ridge, inversion, discriminants, intervals, spectra]


class Leaving(TorchFunctionMode):
    """Counts the numbers that are handed to the CPU or to NumPy."""

    largest = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = [*args[1:], *(kwargs or {}).values()]
        to_host = func in (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__) or (
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
    """What is answered does: decisions, scores, numbers of images."""
    with Leaving() as leaving:
        estimator()
    assert 0 < leaving.largest <= 3 * N


def test_the_trap_works() -> None:
    with nowhere(), pytest.raises((RuntimeError, NotImplementedError)):
        (torch.from_numpy(X) @ torch.ones(WIDTH)).numpy()
    with Leaving() as leaving:
        torch.from_numpy(X).to("cpu")
    assert leaving.largest == X.size
