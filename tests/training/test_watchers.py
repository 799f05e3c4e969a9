"""What watches a training: rank against NumPy, k-NN beside it unchanged, collapse said once, the list in the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import sightline as sl
from sightline.core.errors import InputError
from sightline.training.watchers import Collapse, FeatureWatch

IMAGES = "shapes?size=16&train=64&val=32&test=0"
SETTINGS: dict[str, Any] = {
    "images": IMAGES, "batch": 16, "epochs": 1, "size": 16, "width": 16, "depth": 1, "heads": 2, "patch": 4,
    "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2, "evaluate_every": 0.5,
}  # fmt: skip


def train(out: Path, images: Any = None, **settings: Any) -> pd.DataFrame:
    sl.pretrain("mae", images, out, settings=SETTINGS | settings, workers=0, show_progress=False)
    return pd.read_csv(out / "metrics.csv")


def test_rank_is_that_of_the_features_of_training_images(tmp_path: Path) -> None:
    table = train(tmp_path / "run")
    encoder, images = sl.load_encoder(f"run:{tmp_path / 'run'}"), sl.load_images(IMAGES)
    read = [item.image for item in images.source.read(range(64)) if item.image is not None]
    pixels = torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2)
    module: Any = encoder.module
    with torch.inference_mode(), encoder.evaluating():
        tokens = module.forward_features(encoder.preprocess.normalize(pixels)).double().numpy()
    for name, features in {"cls": tokens[:, 0], "gap": tokens[:, 1:].mean(1)}.items():
        sigma = np.sqrt(np.linalg.eigvalsh(features.T @ features).clip(0))
        p = sigma / sigma.sum()
        expected = np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum())
        assert table[f"rank_{name}"].iloc[-1] == pytest.approx(expected, rel=1e-4)
        assert 1 <= expected <= 16


def test_what_is_watched_is_a_list(tmp_path: Path) -> None:
    both, knn, none = (train(tmp_path / str(len(w)), watch=w) for w in (("knn", "rank"), ("knn",), ()))
    pd.testing.assert_series_equal(both.knn_cls, knn.knn_cls)
    assert both.rank_cls.notna().any()
    assert not [name for name in knn if name.startswith("rank_")]
    assert not [name for name in none if name.startswith(("rank_", "knn_"))]
    weights = {sl.load_encoder(f"run:{tmp_path / n}").weights for n in ("2", "1", "0")}
    assert len(weights) == 1  # watching changes nothing
    with pytest.raises(InputError, match=r"There is no watcher 'ranks'; did you mean 'rank'"):
        train(tmp_path / "other", watch=("ranks",))


def test_images_without_labels_have_a_rank(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    images = sl.load_images([chance.integers(0, 256, (16, 16, 3)).astype(np.uint8) for _ in range(64)])
    table = train(tmp_path / "run", images)
    assert not [name for name in table if name.startswith("knn_")]
    assert table.rank_gap.dropna().between(1, 16).all()


def test_features_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = sl.load_encoder("timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=12&num_heads=2")
    watch = FeatureWatch(sl.load_images(IMAGES), encoder.preprocess, torch.device("cpu"), measures=("knn", "rank"))
    asked = []
    features = FeatureWatch._features
    monkeypatch.setattr(FeatureWatch, "_features", lambda *a: (asked.append(1), features(*a))[1])
    assert watch(encoder.module).keys() == {"knn_cls", "knn_gap", "rank_cls", "rank_gap"}
    assert len(asked) == 2  # training images and those that are held out


def test_collapse_is_said_once() -> None:
    watcher = Collapse()
    assert watcher.warning({"step": 1, "std": 0.8}) is None
    assert watcher.warning({"step": 2, "deviation_std": 0.0, "stdev": 0.0}) is None  # other numbers
    assert watcher.warning({"step": 3, "moco_v3.std": 0.02}) == (
        "The embeddings have nearly collapsed at step 3: moco_v3.std = 0.020, where 1 is spread out and 0 is the "
        "same for all images; a lower lr, a longer warm-up or a larger batch may help"
    )
    assert watcher.warning({"step": 4, "std": 0.0}) is None
