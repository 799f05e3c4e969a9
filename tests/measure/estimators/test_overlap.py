"""mIoU against torchmetrics and scikit-learn, and its interval."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import confusion_matrix, jaccard_score
from torchmetrics.classification import MulticlassJaccardIndex

from sightline.measure.estimators.overlap import count_overlap, iou_of, mean_iou, miou_difference, miou_of


@given(st.integers(0, 10**6), st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_miou_is_that_of_one_confusion_over_the_data_set(seed: int, classes: int) -> None:
    random = np.random.default_rng(seed)
    truth, decided = random.integers(-1, classes, (3, 40)), random.integers(0, classes, (3, 40))
    truth[0, 0] = 0
    metric = MulticlassJaccardIndex(classes, average="macro", ignore_index=-1)
    expected = float(metric(torch.from_numpy(decided), torch.from_numpy(truth)))
    np.testing.assert_allclose(mean_iou(decided, truth, classes), expected, rtol=1e-6)
    known = truth >= 0
    table = confusion_matrix(truth[known], decided[known], labels=range(classes))
    counts = count_overlap(decided, truth, classes)
    np.testing.assert_array_equal(counts, [table.diagonal(), table.sum(0), table.sum(1)])
    there = counts[1:].sum(0) > 0
    scores = jaccard_score(truth[known], decided[known], labels=np.flatnonzero(there), average=None, zero_division=0)
    np.testing.assert_allclose(iou_of(counts)[there], scores)
    assert np.isnan(iou_of(counts)[~there]).all()


def test_the_jackknife_is_that_of_the_formula() -> None:
    random = np.random.default_rng(0)
    truth = random.integers(0, 3, (12, 50))
    decided = np.where(random.random((12, 50)) < 0.6, truth, random.integers(0, 3, (12, 50)))
    groups = np.stack([count_overlap(d, t, 3) for d, t in zip(decided, truth, strict=True)])
    value, low, high = miou_of(groups)
    assert value == mean_iou(decided, truth, 3)
    without = [mean_iou(np.delete(decided, g, 0), np.delete(truth, g, 0), 3) for g in range(12)]
    deviation = np.sqrt(11 / 12 * np.square(without - np.mean(without)).sum())
    np.testing.assert_allclose([value - low, high - value], stats.t.ppf(0.975, 11) * deviation)
    assert np.isnan(miou_of(groups[:1])[1])
    shifted = np.stack([count_overlap(d, t, 3) for d, t in zip(decided[:, ::-1], truth[:, ::-1], strict=True)])
    assert miou_difference(groups, shifted) == (0, 0, 0)  # the same pixels in another order
    worse = groups.copy()
    worse[:, 0] //= 2
    difference, low, high = miou_difference(groups, worse)
    assert difference == pytest.approx(value - miou_of(worse)[0])
    assert high - low < miou_of(groups)[2] - miou_of(groups)[1]  # paired
