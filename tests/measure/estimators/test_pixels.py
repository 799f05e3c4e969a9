"""The softmax on pixels: its scores of pixels, and that it finds the minimum."""

import numpy as np
import torch
from torch.nn import functional as F

from sightline.images.preprocess import Preprocess
from sightline.measure.estimators.pixels import draw_pixels, fit_softmax, stack_pixels


def test_pixels_are_interpolated_as_torch_does() -> None:
    random = np.random.default_rng(0)
    one = random.integers(-2, 3, (12, 20))
    drawn = draw_pixels(one, Preprocess((24, 40), resize=(24, 40)).windows(12, 20), (3, 5), 200, random)
    scores = torch.randn(1, 15, 2)
    found = (scores[0][drawn.patches] * torch.from_numpy(drawn.weights)[..., None]).sum(1)
    up = F.interpolate(scores.view(1, 3, 5, 2).permute(0, 3, 1, 2), (12, 20), mode="bilinear", align_corners=False)
    expected = {tuple(np.round(value, 4)) for value in up[0].permute(1, 2, 0).reshape(-1, 2).tolist()}
    assert {tuple(np.round(value, 4)) for value in found.tolist()} <= expected
    assert set(drawn.labels.tolist()) == {0, 1, 2, 3}  # and never what is left out
    void = draw_pixels(np.full((4, 4), -2), Preprocess((4, 4)).windows(4, 4), (2, 2), 5, random)
    assert set(void.labels.tolist()) == {-1}


def test_the_softmax_goes_to_the_minimum_of_the_cross_entropy() -> None:
    """On one patch per image it is logistic regression; scikit-learn has its minimum."""
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(1)
    labels = random.integers(0, 3, 64)
    x = (random.normal(size=(64, 4)) + np.eye(4)[labels] * 1.5 + 3).astype(np.float32)
    maps = [np.full((2, 2), label - 1) for label in labels]
    drawn = stack_pixels([draw_pixels(one, Preprocess((2, 2)).windows(2, 2), (1, 1), 2, random) for one in maps])
    start = torch.zeros(4, 3), torch.zeros(3)
    mean, deviation = torch.from_numpy(x.mean(0)).double(), torch.from_numpy(x.std(0)).double()
    weight, bias = fit_softmax(x, drawn, start, mean, deviation, steps=400, lr=0.1, seed=0)
    logits = torch.from_numpy(x) @ weight + bias
    twin = LogisticRegression(C=1e6, max_iter=1000).fit(x, labels)
    best = F.cross_entropy(torch.from_numpy(twin.decision_function(x)), torch.from_numpy(labels))
    assert float(F.cross_entropy(logits, torch.from_numpy(labels))) < float(best) + 0.01
