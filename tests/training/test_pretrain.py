"""The training loop as a user has it: stop and go, kills, bad luck, several processes."""

import contextlib
import dataclasses
import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.processes import Started
from support.trainings import TINY_VIT, stopped
from support.words import options

import sightline as sl
from sightline.api import pretrain
from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.core.folders import latest
from sightline.core.schedules import Progress
from sightline.training import backbones
from sightline.training.objective import Views
from sightline.training.objectives.simclr import SimclrObjective
from sightline.training.watchers import COLLAPSED, FeatureWatch

TINY: dict[str, Any] = {
    **TINY_VIT,
    "images": "shapes?size=16&train=96&val=32&test=32",
    "batch": 16,
    "epochs": 2,
    "lr": 1e-3,
    "log_every": 1,
    "drop_path": 0.1,  # so that the generator's state matters
    "evaluate_every": 1,
}
SIMCLR = {"hidden": 16, "out": 8}
CONVNEXT: dict[str, Any] = {"backbone": "convnextv2_atto", "width": 8, "depth": 0, "heads": 0, "patch": 0}
DINO = {"hidden": 8, "bottleneck": 8, "out": 8, "local_crops": 1}


def train(out: Path, objective: str = "simclr", resume: bool = False, **settings: Any) -> sl.Encoder:
    own = SIMCLR if objective == "simclr" else {}
    return pretrain(objective, out=out, settings=TINY | own | settings, resume=resume, show_progress=False)


def weights(run: Path) -> dict[str, torch.Tensor]:
    folder = latest(run)
    assert folder is not None
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    tables = [pd.read_csv(run / "metrics.csv").drop(columns=["images_per_second", "seconds"]) for run in (a, b)]
    pd.testing.assert_frame_equal(*tables)


def files_of(run: Path) -> dict[str, bytes]:
    """The files of all checkpoints, whatever they are called."""
    folder = run / "checkpoints"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run)
    return run


def test_a_training_leaves_an_encoder_and_its_numbers(whole: Path) -> None:
    encoder = sl.load_encoder(f"run:{whole}")
    assert (encoder.depth, encoder.heads, encoder.patch, encoder.preprocess.size) == (2, 2, 4, (16, 16))
    table = pd.read_csv(whole / "metrics.csv")
    assert table.step.tolist() == list(range(1, 13))
    assert table.loss.notna().all()
    assert table.dropna(subset="knn_cls").step.tolist() == [6, 12]  # every epoch has six steps
    assert table.knn_gap.dropna().between(0, 1).all()
    assert list((whole / "tensorboard").iterdir())
    recipe = (whole / "recipe.toml").read_text()
    assert 'objective = "simclr"' in recipe
    assert "hidden = 16" in recipe
    about = json.loads((whole / "run.json").read_text())
    assert about["recipe"]["width"] == 16
    assert about["images"]["splits"]["train"] == 96


def test_objectives_of_one_seed_begin_apart(tmp_path: Path) -> None:
    starts = {}
    for objective, seed in (("simclr", 0), ("mae", 0), ("simclr", 1)):
        train(out := tmp_path / f"{objective}{seed}", objective, seed=seed, epochs=0.2, keep=2)
        starts[objective, seed] = sl.load_encoder(f"run:{out}?step=0").module.state_dict()["blocks.0.attn.qkv.weight"]
    first = starts.pop(("simclr", 0))
    assert all((first - other).abs().mean() > 0.01 for other in starts.values())


def test_the_encoder_is_kept_at_points_of_the_training(tmp_path: Path) -> None:
    train(tmp_path / "run", keep="log")
    points = {step: sl.load_encoder(f"run:{tmp_path / 'run'}?step={step}") for step in (0, 1, 2, 6, 12)}
    assert sorted(int(path.name) for path in (tmp_path / "run" / "steps").iterdir()) == list(points)
    last = sl.load_encoder(f"run:{tmp_path / 'run'}").module.state_dict()
    own = points[12].module.state_dict()
    assert all(torch.equal(own[name], value.bfloat16().float()) for name, value in last.items())
    assert len({encoder.weights for encoder in points.values()}) == 4  # the first step of a warm-up moves nothing


def test_the_encoder_is_the_one_that_was_evaluated(whole: Path) -> None:
    encoder = sl.load_encoder(f"run:{whole}")
    knn = FeatureWatch(sl.load_images(TINY["images"]), encoder.preprocess, torch.device("cpu"))
    last = pd.read_csv(whole / "metrics.csv").iloc[-1]
    assert knn(encoder.module) == pytest.approx({"knn_cls": last.knn_cls, "knn_gap": last.knn_gap}, abs=1e-5)


@pytest.mark.parametrize("stop_after", [1, 5, 6, 11])
def test_a_stopped_training_goes_on_bit_exactly(
    whole: Path, tmp_path: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped(stop_after, 12, monkeypatch):
        train(tmp_path / "run")
    before = sl.load_encoder(f"run:{tmp_path / 'run'}")
    assert before.weights != sl.load_encoder(f"run:{whole}").weights
    (tmp_path / "run").rename(tmp_path / "moved")
    train(tmp_path / "moved", resume=True)
    assert_same(whole, tmp_path / "moved")
    assert files_of(tmp_path / "moved") == files_of(whole)  # encoder.json knows neither of folders nor of stops


def test_a_stopped_cnn_goes_on_bit_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights lie in memory with channels last, in files with channels first."""
    cnn = {"backbone": "resnet18", "width": 8, "stem": "small", "depth": 0, "heads": 0, "patch": 0, "epochs": 1}
    train(tmp_path / "whole", **cnn)
    with stopped(3, 6, monkeypatch):
        train(tmp_path / "stopped", **cnn)
    train(tmp_path / "stopped", resume=True, **cnn)
    assert_same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.bf16
def test_attention_is_fused_but_in_bfloat16_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []  # the precision that each call of the fused kernel was trained in
    for precision in ("float32", "bf16"):
        with monkeypatch.context() as patch:
            kernel = torch.nn.functional.scaled_dot_product_attention

            def called(*args: Any, _precision: str = precision, _kernel: Any = kernel, **options: Any) -> torch.Tensor:
                asked.append(_precision)
                return _kernel(*args, **options)

            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
            train(tmp_path / precision, precision=precision, epochs=1, evaluate_every=0)
    assert set(asked) == {"float32"}
    plain, rounded = (pd.read_csv(tmp_path / name / "metrics.csv").loss.to_numpy() for name in ("float32", "bf16"))
    np.testing.assert_allclose(rounded[:3], plain[:3], rtol=0.005)  # later, rounding has moved the weights apart


def test_what_a_kill_has_left_beside_the_last_checkpoint_is_removed(whole: Path, tmp_path: Path) -> None:
    """Killed when all was saved, but not all that it replaces was gone."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    kept = files_of(run)
    drafted = run / "checkpoints" / ".00000012.99-0123abcd.tmp"
    for folder in (run / "checkpoints" / "00000007", drafted, run / "steps" / drafted.name):
        shutil.copytree(next((whole / "checkpoints").iterdir()), folder)
    train(run, resume=True)
    assert files_of(run) == kept


def test_the_number_of_workers_and_where_crops_are_taken_change_nothing_but_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = sl.load_images(TINY["images"])
    for name, resident, workers in (("memory", 10**9, 0), ("stream", 0, 0), ("workers", 0, 2)):
        monkeypatch.setattr("sightline.training.feed.RESIDENT", resident)
        pretrain("simclr", images, tmp_path / name, settings=TINY | SIMCLR, workers=workers, show_progress=False)
    assert_same(tmp_path / "stream", tmp_path / "workers")
    losses = [pd.read_csv(tmp_path / name / "metrics.csv").loss for name in ("memory", "stream")]
    # Crops in workers are rounded to 8 bits; after a few steps the batch normalisations have made much of that.
    np.testing.assert_allclose(losses[0][:2], losses[1][:2], rtol=0.005)


def test_accumulation_equals_one_forward_where_nothing_is_contrasted(tmp_path: Path) -> None:
    for number in (1, 4):
        train(tmp_path / str(number), "mae", accumulate=number, drop_path=0.0, optimizer="sgd", lr=0.1, **MAE)
    one, four = (weights(tmp_path / str(number)) for number in (1, 4))
    for name, value in one.items():
        if not name.startswith("rng"):
            torch.testing.assert_close(four[name], value, rtol=1e-4, atol=1e-6)


MAE = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}


def test_a_resumed_training_must_be_the_same(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another lr"):
        train(whole, resume=True, lr=2e-3)
    with pytest.raises(InputError, match="--resume to continue or --overwrite"):
        train(whole)
    encoder = train(whole, resume=True)
    assert "already finished" in encoder.notes[-1]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not a run folder"):
        train(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwriting_starts_anew(tmp_path: Path) -> None:
    train(tmp_path / "run", epochs=1)
    pretrain("simclr", out=tmp_path / "run", settings=TINY | SIMCLR | {"lr": 2e-3}, overwrite=True, show_progress=False)
    table = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert len(table) == 12
    assert "lr = 0.002" in (tmp_path / "run" / "recipe.toml").read_text()


def test_a_loss_that_is_not_a_number_ends_with_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = SimclrObjective.forward

    def spoiled(self: Any, views: Any) -> Any:
        loss, scalars = forward(self, views)
        return loss * (float("nan") if views.progress.step >= 7 else 1), scalars

    monkeypatch.setattr(SimclrObjective, "forward", spoiled)
    with pytest.raises(InputError, match=r"The loss became nan .* last good checkpoint is 0000000[1-7].* lower lr"):
        train(tmp_path / "run", save_minutes=0.0)
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values() if value.is_floating_point())
    sl.load_encoder(f"run:{tmp_path / 'run'}")


def test_a_full_disk_ends_with_a_sentence_and_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Path.write_bytes
    count = 0

    def until_full(self: Path, data: Any) -> int:
        nonlocal count
        count += "optimizer" in self.name
        if count > 3:
            written(self, bytes(data)[:10])
            raise OSError(28, "No space left on device", str(self))
        return written(self, data)

    monkeypatch.setattr(Path, "write_bytes", until_full)
    with pytest.raises(InputError, match="The disk is full"):
        train(tmp_path / "run", save_minutes=0.0)
    monkeypatch.undo()
    assert latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "00000003"
    train(tmp_path / "run", resume=True, save_minutes=0.0)
    assert len(pd.read_csv(tmp_path / "run" / "metrics.csv")) == 12


def test_collapse_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    forward, std = SimclrObjective.forward, {"std": torch.tensor(0.01)}
    monkeypatch.setattr(SimclrObjective, "forward", lambda self, views: (forward(self, views)[0], std))
    train(tmp_path / "run")
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("nearly collapsed at step 1: std = 0.010") == 1


# As a process


def started(run: Path, *words: str, **settings: Any) -> Started:
    values = TINY | SIMCLR | {"evaluate_every": 0} | settings
    return Started("-m", "sightline", "pretrain", "simclr", "-o", str(run), *options(values), *words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_stop(tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    process = started(run, epochs=100000)
    process.wait_until((run / "metrics.csv").exists)
    time.sleep(0.3)
    process.signal(number)
    status = process.ended(60)
    out, err = process.said
    assert status == 128 + number, err
    assert "Stopped and saved after step" in out
    assert "Traceback" not in err
    assert latest(run) is not None
    sl.load_encoder(f"run:{run}")


def test_kill_leaves_a_usable_run_at_any_moment(tmp_path: Path) -> None:
    """Saves after every step, so that a kill hits all places of a save; each time the run loads and goes on."""
    run = tmp_path / "run"
    chance = random.Random(0)
    steps: list[int] = []
    for _ in range(6):
        process = started(run, "--resume", epochs=100000, save_minutes=0.0, log_every=7)
        seen = steps[-1] if steps else -1
        process.wait_until(lambda seen=seen: _step(run) > seen)
        time.sleep(chance.random() * 0.5)
        process.signal(signal.SIGKILL)
        assert process.ended(60) == -signal.SIGKILL
        sl.load_encoder(f"run:{run}")
        steps.append(_step(run))
        assert steps[-1] > seen


def _step(run: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(json.loads((run / "latest.json").read_text())["step"])
    return -1


@pytest.mark.parametrize("objective", ["simclr", "moco_v3", "dino", "msn"])
def test_collapse_is_noticed_behind_batch_normalisation(objective: str) -> None:
    plugin = plugins.find("objectives", objective)
    names = {field.name for field in dataclasses.fields(plugin.Config)}
    small = {"hidden": 16, "out": 16, "bottleneck": 8, "prototypes": 8, "local_crops": 1, "focal_views": 1}
    config = plugin.Config(**{key: value for key, value in small.items() if key in names})
    backbone = backbones.Backbone("vit", size=16, width=16, depth=1, heads=2, patch=4)
    module = plugin.Objective(backbones.build(backbone).module, config)
    for norm in (part.norm for name, part in module.named_modules() if name.rpartition(".")[2].endswith("backbone")):
        torch.nn.init.constant_(norm.weight, 1e-3)  # features: a constant, and next to nothing of the image
        torch.nn.init.uniform_(norm.bias, 0.5, 1.0)
    pixels = [torch.randn(8, 3, policy.size, policy.size) for policy in plugin.views(config, backbone)]
    labels, keys = torch.zeros(8, dtype=torch.int64), np.arange(8, dtype=np.uint64)
    _, scalars = module(Views(pixels, labels, keys, Progress(0, 9, 3)))
    assert scalars["std"] < COLLAPSED


@pytest.mark.parametrize(
    ("objective", "settings", "word"),
    [
        ("simclr", {"batch": 1}, "leaves 1 image to each, .* raise it with --batch 2"),
        ("moco_v3", {"batch": 4, "accumulate": 4}, "4 forwards leaves 1 image to each, .* --batch 8, or lower"),
        ("msn", {"batch": 1}, "leaves 1 image to each"),
        ("dino", {"batch": 1, "batch_norm": True}, "leaves 1 image to each"),
        ("hybrid", {"batch": 1}, "leaves 1 image to each"),
        ("simclr", {"batch": 128, "limit": 4}, "4 images to train on, .* --batch 2$"),
        ("simclr", {"batch": 128, "limit": 4, "accumulate": 4}, "4 images to train on, .* give 8 or more, or lower"),
        ("dino", CONVNEXT | {"size": 48}, "Small crops of 21 pixels .* total stride of ConvNeXt is 32"),
        ("simclr", CONVNEXT, "Images of 16 pixels .* total stride of ConvNeXt is 32"),
        ("hybrid", {"cl": "dino", "dino": {"local_size": 10}}, "10 pixels cannot be cut into patches of 4"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    objective: str, settings: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=word):
        train(tmp_path / "run", objective, **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", ["mae", "simmim", "supervised", "dino"])
def test_one_image_is_enough_where_none_is_compared(objective: str, tmp_path: Path) -> None:
    alone = DINO | {"sinkhorn": False, "batch_norm": False}
    own = {"mae": MAE, "simmim": {"mask_unit": 4}, "dino": alone}.get(objective, {}) | {"batch": 1, "epochs": 1 / 48}
    pretrain(objective, out=tmp_path / "run", settings=TINY | own, show_progress=False)
    assert pd.read_csv(tmp_path / "run" / "metrics.csv").loss.gt(0).all()


def test_dino_trains_a_convnext_with_small_crops_that_fit(tmp_path: Path) -> None:
    own = CONVNEXT | DINO | {"patch": 1, "local_size": 8, "epochs": 0.2}
    pretrain("dino", out=tmp_path / "run", settings=TINY | own, show_progress=False)
    assert pd.read_csv(tmp_path / "run" / "metrics.csv").rank_gap.notna().any()


def test_supervised_training_takes_what_fine_tuning_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RandAugment, erasing and mixing; odd shares of a batch are refused before anything is written."""
    strong = {"randaugment": [9, 0.5], "erase": 0.5, "mixup": 0.8, "cutmix": 1.0, "evaluate_every": 0}
    with pytest.raises(InputError, match="15 images in 1 process with 1 forward each are odd shares"):
        train(tmp_path / "odd", "supervised", batch=15, **strong)
    assert not (tmp_path / "odd").exists()
    with stopped(4, 12, monkeypatch):
        train(tmp_path / "stopped", "supervised", **strong)
    train(tmp_path / "stopped", "supervised", resume=True, **strong)
    train(tmp_path / "whole", "supervised", **strong)
    assert_same(tmp_path / "stopped", tmp_path / "whole")
    train(tmp_path / "plain", "supervised", evaluate_every=0)
    losses = [pd.read_csv(tmp_path / run / "metrics.csv")["loss"].to_numpy() for run in ("whole", "plain")]
    assert not np.allclose(*losses, atol=0.01)
