"""Batches of rows in random order: each row once, mixed, the same by the seed, from memory and from disk."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.core.errors import InputError
from sightline.measure.estimators import probe_batches as shuffling
from sightline.measure.estimators.probe_batches import JoinedFeatures
from sightline.measure.pooled import Matrix


def epochs_of(
    joined: JoinedFeatures, labels: torch.Tensor, batch: int, count: int, seed: int = 3
) -> list[torch.Tensor]:
    """Row numbers of two epochs, which the first feature tells."""
    batches = joined.batches(labels, batch, seed)
    found = []
    for _ in range(2):
        parts = [next(batches) for _ in range(count)]
        for x, y in parts:
            torch.testing.assert_close(labels[x[:, 0].long()], y)
            torch.testing.assert_close(x[:, 2], -x[:, 0])  # of the second matrix
        found.append(torch.stack([x[:, 0].long() for x, _ in parts]))
    return found


@pytest.mark.parametrize("memory", [2**20, 512 * 3])
def test_every_row_once_in_a_new_order(memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffling, "MEMORY", memory)
    monkeypatch.setattr(shuffling, "CONSECUTIVE", 4)
    rows = np.arange(1100.0)
    np.save(tmp_path / "a.npy", np.stack([rows, rows], 1))
    values = np.load(tmp_path / "a.npy", mmap_mode="r")
    features = {"a": Matrix(values, np.arange(1001)), "b": -rows[:1001, None]}
    joined = JoinedFeatures(("a", "b"), features)
    labels = torch.arange(1001) // 100
    first, second = epochs_of(joined, labels, 60, 16)  # 960 of 1001 rows
    for order in (first, second):
        assert len(order.unique()) == 960
        assert all(len(labels[batch].unique()) >= 7 for batch in order)  # sorted by class, but mixed
        assert all(len((batch // 4).unique()) >= 35 for batch in order)
    assert (first != second).any()
    again, _ = epochs_of(joined, labels, 60, 16)
    torch.testing.assert_close(again, first)
    other, _ = epochs_of(joined, labels, 60, 16, seed=4)
    assert (other != first).any()


def test_fewer_rows_than_a_batch_are_one() -> None:
    x = np.arange(5.0)[:, None]
    batches = JoinedFeatures(("x",), {"x": x}).batches(torch.arange(5), 100, seed=0)
    for _ in range(3):
        features, labels = next(batches)
        assert sorted(labels.tolist()) == [0, 1, 2, 3, 4]
        torch.testing.assert_close(features[:, 0], labels.float())


def test_bad_input() -> None:
    features = {"block.1": np.ones((3, 2)), "norm": np.ones((4, 2))}
    with pytest.raises(InputError, match=r"no features 'blok.1'; did you mean 'block.1'"):
        JoinedFeatures(("blok.1",), features)
    with pytest.raises(InputError, match="'norm' have 4 rows for 3 images"):
        JoinedFeatures(("block.1", "norm"), features)
