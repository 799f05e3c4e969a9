"""Shared relative positions: trained as a table in each block, which changes no output, only what is learned."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.official_beit import DEPTH, HEADS, PATCH, SHARED, SIZE, WIDTH, activations, own, weights
from support.trainings import TINY_DETECTOR, same_state, stopped
from torch import Tensor

import sightline as sl
from sightline.analyses.dynamics.paths import paths_of, trainings_of
from sightline.api import finetune
from sightline.encoders.encoder import build_encoder
from sightline.encoders.files.convert import convert
from sightline.encoders.modules.vit import embed, encode, grid_of, restrict
from sightline.training.launch import Launch
from sightline.training.optimization import Optimization, make_optimizer
from sightline.transfer import head_training
from sightline.transfer.classification import ClassificationObjective
from sightline.transfer.classifier_head import layers_of, with_classifier
from sightline.transfer.detection.detect import train_detector
from sightline.transfer.detection.features import FeatureMaps, trainable
from sightline.transfer.relative_positions import own_tables
from sightline.transfer.segmentation.segment import train_segmenter

TINY = f"size={SIZE}&patch_size={PATCH}&depth={DEPTH}&embed_dim={WIDTH}&num_heads={HEADS}&num_classes=0"
BEIT = f"timm:beit_base_patch16_224@random?{TINY}&global_pool=token&use_rel_pos_bias="
ONE, BOTH, EACH = (f"{BEIT}{a}&use_shared_rel_pos_bias={b}" for a, b in ((False, True), (True, True), (True, False)))
TABLES = {ONE: weights(), BOTH: weights(per_block=True), EACH: weights(shared=False, per_block=True)}
CLASSES = ("cat", "dog", "owl")


def beit(reference: str = ONE) -> sl.Encoder:
    """An encoder with weights of the official model."""
    module = sl.load_encoder(reference).module
    told = {k: v for k, v in TABLES[reference].items() if k != "mask_token" and not k.endswith("position_index")}
    module.load_state_dict(told)
    size = sl.Preprocess((SIZE, SIZE))
    return build_encoder(module.eval(), reference=reference, architecture=reference, preprocess=size)


def images(side: int = SIZE, n: int = 3) -> Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(1))


def tokens_of(encoder: sl.Encoder, x: Tensor) -> Tensor:
    """In the steps of training, at any size."""
    module: Any = encoder.module
    with torch.inference_mode():
        return encode(module, embed(module, x), grid_of(module, x))


@pytest.mark.parametrize("reference", [ONE, BOTH])
def test_no_output_changes(reference: str, tmp_path: Path) -> None:
    shared = beit(reference)
    apart = own_tables(shared)
    for side in (SIZE, 2 * SIZE):
        exact = {"rtol": 0, "atol": 0 if side == SIZE or reference == ONE else 1e-5}  # sums of resized ones are rounded
        torch.testing.assert_close(tokens_of(apart, images(side)), tokens_of(shared, images(side)), **exact)
    with torch.inference_mode():
        # PyTorch has other sums for masks of another number of axes, which is timm's difference between the two.
        torch.testing.assert_close(apart(images()), shared(images()), rtol=0, atol=2e-6)
        expected = activations(TABLES[reference], images())["output"]
    torch.testing.assert_close(tokens_of(apart, images())[:, 0].double(), expected, rtol=0, atol=1e-5)
    assert SHARED in shared.module.state_dict()  # the given one is left as it is
    assert apart.module.state_dict().keys() == beit(EACH).module.state_dict().keys()
    assert [name for name, _ in apart.module.named_parameters()] == [n for n, _ in beit(EACH).module.named_parameters()]
    assert apart.architecture == EACH
    again = sl.load_encoder(f"run:{sl.save_encoder(apart, tmp_path / 'saved')}")
    assert again.weights == apart.weights
    assert torch.equal(tokens_of(again, images()), tokens_of(shared, images()))


def test_each_block_has_a_copy_of_its_own() -> None:
    module = own_tables(beit()).module
    first, second = (module.get_parameter(own(block)) for block in range(DEPTH))
    assert torch.equal(first, TABLES[ONE][SHARED])
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    module(images()).square().sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    assert not torch.equal(first.grad, second.grad)
    both = own_tables(beit(BOTH)).module
    for block in range(DEPTH):
        total = TABLES[BOTH][own(block)] + TABLES[BOTH][SHARED]
        assert torch.equal(both.get_parameter(own(block)), total)


def test_windows_and_classifiers_stay(tmp_path: Path) -> None:
    kept = with_classifier(beit(), CLASSES)
    torch.nn.init.normal_(kept.module.get_parameter("head.weight"))
    apart = own_tables(kept)
    assert apart.classes == CLASSES
    torch.testing.assert_close(apart.module(images()), kept.module(images()), rtol=0, atol=2e-6)
    restrict(kept.module, 3)
    wide = apart.module(images())
    near = own_tables(kept).module(images())
    assert torch.equal(near, kept.module(images()))
    assert not torch.allclose(near, wide)


def test_others_stay_as_they_are() -> None:
    vit = "timm:vit_tiny_patch16_224@random?size=16&patch_size=4&depth=2&embed_dim=16&num_heads=2"
    for encoder in (beit(EACH), sl.load_encoder(vit), sl.load_encoder("timm:resnet10t@random?size=32")):
        assert own_tables(encoder) is encoder
    unnamed = sl.load_encoder(beit().module)  # cannot be built again, and so not be trained
    assert own_tables(unnamed) is unnamed


def test_a_table_learns_as_its_block_does() -> None:
    tuned = with_classifier(own_tables(beit()), CLASSES)
    layers = layers_of(tuned)
    assert SHARED not in layers
    assert [layers[own(block)] for block in range(DEPTH)] == [1, 2]
    objective = ClassificationObjective(tuned.module, layers, len(CLASSES), layer_decay=0.5)
    names = {parameter: name for name, parameter in objective.named_parameters()}
    groups = make_optimizer(objective, Optimization(), objective.lr_scales()).param_groups
    found = {names[p]: (group["scale"], group["decays"]) for group in groups for p in group["params"]}
    assert [found[f"model.{own(block)}"] for block in range(DEPTH)] == [(0.25, True), (0.5, True)]


def test_a_block_that_is_made_anew_has_a_new_table() -> None:
    module = with_classifier(own_tables(beit()), CLASSES, reinit="first:1").module
    assert not module.get_parameter(own(0)).any()  # as timm and the official codes begin
    assert torch.equal(module.get_parameter(own(1)), TABLES[ONE][SHARED])


def test_what_is_trained_along_has_tables_of_its_own() -> None:
    begun = beit()
    (expected,) = FeatureMaps(begun, 2 * SIZE).look(images(2 * SIZE))
    copied, features = trainable(own_tables(begun), lambda one: FeatureMaps(one, 2 * SIZE), 0.0)
    torch.testing.assert_close(features.look(images(2 * SIZE))[0], expected, rtol=0, atol=0)
    assert [layers_of(copied)[own(block)] for block in range(DEPTH)] == [1, 2]
    assert all(copied.module.get_parameter(own(block)).requires_grad for block in range(DEPTH))


# Trainings


IMAGES, SCENES = f"shapes?size={SIZE}&train=48&val=0&test=16", "shapes:scenes?size=32&train=8&val=0&test=4"
QUICK: dict[str, Any] = {"lr": 1e-2, "log_every": 1, "evaluate_every": 0, "layer_decay": 0.5}
DENSE = QUICK | {"size": 24, "batch": 4, "epochs": 3, "frozen": False}
LAUNCH = Launch(device="cpu", workers=0, show_progress=False)


def tune(out: Path, resume: bool = False) -> None:
    more = {"batch": 16, "epochs": 2, "keep": 3, "pool": "gap", "reinit": "last:1", "ema": 0.5}
    finetune(beit(), IMAGES, out, settings=QUICK | more, resume=resume, show_progress=False, workers=0)


def detect(out: Path, resume: bool = False) -> None:
    train_detector(beit(), SCENES, out, settings=DENSE | TINY_DETECTOR, launch=replace(LAUNCH, resume=resume))


def segment(out: Path, resume: bool = False) -> None:
    train_segmenter(beit(), SCENES, out, settings=DENSE, launch=replace(LAUNCH, resume=resume))


TRAININGS: list[Callable[..., None]] = [tune, detect, segment]


@pytest.mark.parametrize("train", TRAININGS)
def test_a_training_leaves_tables_of_blocks(
    train: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole")
    with stopped(3, 6, monkeypatch):
        train(tmp_path / "run")
    train(tmp_path / "run", resume=True)
    assert same_state(tmp_path / "whole", tmp_path / "run")
    trained = sl.load_encoder(f"run:{tmp_path / 'run'}")
    assert SHARED not in trained.module.state_dict()
    tables = [trained.module.get_parameter(own(block)) for block in range(DEPTH)]
    assert not torch.equal(*tables)
    assert not torch.equal(tables[0], TABLES[ONE][SHARED])
    assert convert(trained, tmp_path / "timm").difference == 0
    if train is tune:
        steps = {str(t): sl.load_encoder(f"run:{tmp_path / 'run'}?step={t}") for t in (0, 3, 6)}
        assert torch.equal(steps["0"].module.get_parameter(own(0)), TABLES[ONE][SHARED].bfloat16().float())
        assert not steps["0"].module.get_parameter(own(1)).any()  # reinit
        paths = paths_of(steps, trainings_of(steps))
        assert not [str(name) for name in paths.weights.values if "rel_pos_bias" in str(name)]
        assert (paths.distance.sel(encoder="6", weights="attn")[1:] > 0).sum() == DEPTH


def test_a_frozen_encoder_keeps_its_shared_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(encoder: sl.Encoder) -> sl.Encoder:
        raise AssertionError("nothing is trained here")

    monkeypatch.setattr(head_training, "own_tables", refuse)
    settings = DENSE | {"epochs": 1, "frozen": True}
    train_segmenter(beit(), SCENES, tmp_path / "run", settings=settings, launch=LAUNCH)
