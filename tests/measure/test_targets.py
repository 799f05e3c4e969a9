"""Targets in the pass: an analysis that asks for them sees them in its batches, and images without any are refused."""

from typing import Any

import numpy as np
import pytest
from support.references import SMALL

import sightline as sl
from sightline.analyses import knn
from sightline.core.errors import InputError
from sightline.images.pipeline import Batch
from sightline.measure.contract import analysis

OPTIONS: dict[str, Any] = {"batch": 8, "workers": 0, "show_progress": False}


def test_an_analysis_that_asks_sees_the_targets_of_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(analysis("knn"), "TARGETS", True)
    monkeypatch.setattr(knn.KnnAnalysis, "begin", lambda self, batch: seen.update(told(batch)))
    images = sl.load_images("shapes:scenes?train=8&val=0&test=8&size=64")
    encoder = sl.load_encoder(SMALL)
    sl.analyze({"a": encoder}, images, ["knn"], **OPTIONS)
    assert sorted(seen) == sorted(images.ids)
    for one, given in zip(images.ids, images.targets(range(len(images.ids))), strict=True):
        assert len(seen[one].labels) <= len(given.labels)
        assert seen[one].segmentation.shape == encoder.preprocess.size
    with pytest.raises(InputError, match="no boxes, masks or segmentation maps"):
        sl.analyze(
            {"a": encoder}, sl.load_images(np.zeros((16, 32, 32, 3), np.uint8), labels=[0, 1] * 8), ["knn"], **OPTIONS
        )


def test_others_are_not_kept_waiting_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(knn.KnnAnalysis, "begin", lambda self, batch: seen.update(told(batch)))
    sl.analyze({"a": SMALL}, sl.load_images("shapes:scenes?train=8&val=0&test=8&size=64"), ["knn"], **OPTIONS)
    assert seen == {}


def told(batch: Batch) -> dict[str, Any]:
    return {name: one for of in batch.targets.values() for name, one in zip(batch.ids, of, strict=True)}
