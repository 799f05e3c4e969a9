"""What watches a training: rank against NumPy, features of every kind of backbone against loops, k-NN beside it
unchanged, collapse said once, the list in the recipe.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.trainings import TINY_VIT

import sightline as sl
from sightline.core.errors import InputError
from sightline.training.backbones import Backbone, build
from sightline.training.watchers import Collapse, FeatureWatch, WatchedFeatures, pooled, ranks

IMAGES = "shapes?size=16&train=64&val=32&test=0"
SETTINGS: dict[str, Any] = {
    "images": IMAGES,
    "batch": 16,
    "epochs": 1,
    **TINY_VIT,
    "decoder_width": 16,
    "decoder_depth": 1,
    "decoder_heads": 2,
    "evaluate_every": 0.5,
}


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
    assert not [name for name in knn if str(name).startswith("rank_")]
    assert not [name for name in none if str(name).startswith(("rank_", "knn_"))]
    weights = {sl.load_encoder(f"run:{tmp_path / n}").weights for n in ("2", "1", "0")}
    assert len(weights) == 1  # watching changes nothing
    with pytest.raises(InputError, match=r"There is no watcher 'ranks'; did you mean 'rank'"):
        train(tmp_path / "other", watch=("ranks",))


def test_k_nn_needs_a_class_in_both_splits() -> None:
    """Without one it would be 0 %, which looks like a failed training."""
    pixels = np.zeros((8, 16, 16, 3), np.uint8)
    for test, known in (([0, 1], True), ([1, 2], True), ([2, 3], False), ([-1, -1], False)):
        splits = {"train": range(6), "test": range(6, 8)}
        images = sl.load_images(pixels, labels=[0, 0, 1, 1, -1, -1, *test], classes=list("abcd"), splits=splits)
        assert FeatureWatch.knows_classes(images) == known


def test_images_without_labels_have_a_rank(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    images = sl.load_images([chance.integers(0, 256, (16, 16, 3)).astype(np.uint8) for _ in range(64)])
    table = train(tmp_path / "run", images)
    assert not [name for name in table if str(name).startswith("knn_")]
    assert table.rank_gap.dropna().between(1, 16).all()
    assert table.centred_rank_gap.dropna().between(1, 16).all()


def test_ranks_with_and_without_the_mean() -> None:
    """Directions of a spread far from zero: uncentred the mean is nearly all there is, centred they count."""
    spread = torch.eye(4).double().repeat(8, 1)
    found = ranks(WatchedFeatures({"cls": spread + 1000}, np.full(32, -1)))
    assert found["rank_cls"] == pytest.approx(1, abs=0.02)
    assert found["centred_rank_cls"] == pytest.approx(3)  # four corners around their mean


def test_features_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = sl.load_encoder("timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=12&num_heads=2")
    watch = FeatureWatch(sl.load_images(IMAGES), encoder.preprocess, torch.device("cpu"), measures=("knn", "rank"))
    asked = []
    features = FeatureWatch._features
    monkeypatch.setattr(FeatureWatch, "_features", lambda *a: (asked.append(1), features(*a))[1])
    names = {f"{measure}_{feature}" for measure in ("knn", "rank", "centred_rank") for feature in ("cls", "gap")}
    assert watch(encoder.module).keys() == names
    assert len(asked) == 2  # training images and those that are held out


LITTLE: dict[str, Any] = {"width": 16, "depth": 1, "heads": 2}
# Prefix tokens, and whether the first of them is CLS; of maps which axes are places.
LAYOUTS: list[tuple[Backbone, int, bool]] = [
    (Backbone("vit_small_patch16_dinov3", size=32, **LITTLE), 5, True),  # CLS and four registers
    (Backbone("eva02_tiny_patch14_224", size=28, **LITTLE), 1, True),
    (Backbone("deit_tiny_distilled_patch16_224", size=32, **LITTLE), 2, True),
    (Backbone("vit_base_patch16_siglip_224", size=32, **LITTLE), 0, False),
    (Backbone("beit", size=32, **LITTLE), 1, True),
]
SWIN = Backbone("swin_tiny_patch4_window7_224", size=64, width=12)
MAPS = [(SWIN, (1, 2), 3), (Backbone("convnextv2_atto", size=64, width=8), (2, 3), 1)]


@torch.no_grad()
@pytest.mark.parametrize(("backbone", "prefix", "cls"), LAYOUTS, ids=lambda value: getattr(value, "backbone", None))
def test_tokens_are_pooled_without_those_that_are_no_patches(backbone: Backbone, prefix: int, cls: bool) -> None:
    module: Any = build(backbone).module.eval()
    output = module.forward_features(torch.randn(3, 3, backbone.size, backbone.size))
    assert output.shape == (3, prefix + 4, 16)
    tokens = output.double().numpy()
    found = pooled(module, output)
    assert found.keys() == ({"cls", "gap"} if cls else {"gap"})
    for image in range(3):
        mean = sum(tokens[image, prefix + patch] for patch in range(4)) / 4
        np.testing.assert_allclose(found["gap"][image], mean, atol=1e-5)
        if cls:
            np.testing.assert_array_equal(found["cls"][image], output[image, 0])


@torch.no_grad()
@pytest.mark.parametrize(("backbone", "places", "channel"), MAPS, ids=lambda value: getattr(value, "backbone", None))
def test_maps_are_pooled_over_their_places(backbone: Backbone, places: tuple[int, int], channel: int) -> None:
    module: Any = build(backbone).module.eval()
    output = module.forward_features(torch.randn(3, 3, 64, 64))
    width = module.num_features
    assert (*(output.shape[axis] for axis in places), output.shape[channel]) == (2, 2, width)
    expected = np.zeros((3, width))
    for (image, *where), value in np.ndenumerate(output.double().numpy()):
        expected[image, where[channel - 1]] += value / 4
    found = pooled(module, output)
    assert found.keys() == {"gap"}
    np.testing.assert_allclose(found["gap"], expected, atol=1e-5)


@torch.no_grad()
def test_what_is_neither_tokens_nor_a_map_is_pooled_by_the_model() -> None:
    cls = torch.randn(3, 1, 12)
    encoder: Any = torch.nn.Module()
    encoder.cls_token, encoder.num_prefix_tokens = torch.nn.Parameter(torch.zeros(1, 1, 12)), 1
    assert pooled(encoder, cls).keys() == {"cls"}  # without patches there is no mean of them
    torch.testing.assert_close(pooled(encoder, cls)["cls"], cls[:, 0])
    encoder.forward_head = lambda sets, pre_logits: torch.cat([tokens[:, 0] for tokens in sets], 1)
    torch.testing.assert_close(pooled(encoder, [cls, 2 * cls])["gap"], torch.cat([cls, 2 * cls], 2)[:, 0])


@pytest.mark.train
@pytest.mark.parametrize("backbone", [LAYOUTS[0][0], LAYOUTS[2][0], SWIN], ids=lambda value: value.backbone)
def test_every_kind_of_backbone_is_watched(backbone: Backbone, tmp_path: Path) -> None:
    measures = {key: getattr(backbone, key) for key in ("backbone", "size", "width", "depth", "heads")}
    settings = measures | {"patch": 0, "batch": 16, "epochs": 1, "hidden": 16, "out": 8}
    images = f"shapes?size={backbone.size}&train=32&val=32&test=0"
    encoder = sl.pretrain("simclr", images, tmp_path / "run", settings=settings, workers=0, show_progress=False)
    last = pd.read_csv(tmp_path / "run" / "metrics.csv").iloc[-1]
    names = ["gap"] if backbone is SWIN else ["cls", "gap"]
    assert [name for name in last.index if str(name).startswith("rank_")] == [f"rank_{name}" for name in names]
    watch = FeatureWatch(sl.load_images(images), encoder.preprocess, torch.device("cpu"), measures=("knn", "rank"))
    again = watch(encoder.module)
    assert again == pytest.approx({name: last[name] for name in again}, rel=1e-4)


def test_collapse_is_said_once() -> None:
    watcher = Collapse()
    assert watcher.warning({"step": 1, "std": 0.8}) is None
    assert watcher.warning({"step": 2, "deviation_std": 0.0, "stdev": 0.0}) is None  # other numbers
    assert watcher.warning({"step": 3, "moco_v3.std": 0.02}) == (
        "The embeddings have nearly collapsed at step 3: moco_v3.std = 0.020, where 1 is spread out and 0 is the "
        "same for all images; a lower lr, a longer warm-up or a larger batch may help"
    )
    assert watcher.warning({"step": 4, "std": 0.0}) is None
