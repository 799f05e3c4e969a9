"""Fine-tuning as a user has it: from any reference to a classifier, stop and go, kept steps, re-initialised blocks."""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.trainings import stopped
from support.words import options
from typer.testing import CliRunner

import sightline as sl
from sightline.api import finetune
from sightline.cli.application import app
from sightline.core.errors import InputError
from sightline.core.folders import latest
from sightline.core.settings import to_toml
from sightline.core.stopping import Stopped
from sightline.training.loop import Loop
from sightline.training.recipe import read_recipe
from sightline.transfer.finetune import FinetuneConfig, make_recipe

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=4&depth=2&embed_dim=16&num_heads=2&num_classes=0"
IMAGES = "shapes?size=16&train=96&val=32&test=32"
TINY: dict[str, Any] = {
    "batch": 16,
    "epochs": 2,
    "lr": 1e-3,
    "log_every": 1,
    "evaluate_every": 1,
    "layer_decay": 0.75,
    "drop_path": 0.1,  # so that the generator's state matters
    "mixup": 0.8,
    "cutmix": 1.0,
    "randaugment": [9, 0.5],
    "erase": 0.25,
}


def tune(out: Path, what: Any = VIT, images: Any = IMAGES, resume: bool = False, **settings: Any) -> sl.Encoder:
    return finetune(what, images, out, settings=TINY | settings, resume=resume, show_progress=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    tune(run, keep=3, ema=0.9)
    return run


def scores(encoder: sl.Encoder, images: sl.Images, split: str) -> tuple[np.ndarray, np.ndarray]:
    where = images.indices(split)
    items = [item.image for item in images.source.read(where.tolist()) if item.image is not None]
    with torch.inference_mode(), encoder.evaluating():
        return encoder(encoder.preprocess(items)).numpy(), images.labels[where]


def test_a_fine_tuning_leaves_a_classifier_and_its_numbers(whole: Path) -> None:
    encoder, images = sl.load_encoder(f"run:{whole}"), sl.load_images(IMAGES)
    assert encoder.classes == images.classes
    assert (encoder.depth, encoder.patch, encoder.preprocess) == (2, 4, sl.load_encoder(VIT).preprocess)
    table = pd.read_csv(whole / "metrics.csv")
    assert table.step.tolist() == list(range(1, 13))
    assert table.dropna(subset="val_accuracy").step.tolist() == [6, 12]
    assert table.dropna(subset="test_accuracy").step.tolist() == [12]
    results = json.loads((whole / "run.json").read_text())["results"]
    for split in ("val", "test"):
        output, labels = scores(encoder, images, split)
        assert results[f"{split}_accuracy"] == pytest.approx((output.argmax(1) == labels).mean(), abs=1e-5)
        assert table[f"{split}_accuracy"].iloc[-1] == pytest.approx(results[f"{split}_accuracy"], abs=1e-5)


def test_the_run_says_what_it_was(whole: Path) -> None:
    about = json.loads((whole / "run.json").read_text())
    assert about["kind"] == "finetune"
    assert about["encoder"]["reference"] == about["recipe"]["encoder"] == VIT
    assert about["encoder"]["weights"] == sl.load_encoder(VIT).weights
    values = read_recipe(whole / "recipe.toml")
    told = {"objective": "finetune", "images": IMAGES, "layer_decay": 0.75, "batch": 16}
    assert {key: values[key] for key in told} == told
    tuples = {key: tuple(values[key]) for key in ("crop", "randaugment", "betas", "milestones")}
    assert make_recipe(values).values() == values | tuples


def test_analyses_use_its_own_head(whole: Path) -> None:
    run = sl.analyze({"tuned": sl.load_encoder(f"run:{whole}")}, sl.load_images(IMAGES), ["noise"], show_progress=False)
    assert run["noise"].classifier.item() == "own head"


@pytest.mark.parametrize("stop_after", [1, 6, 9])
def test_a_stopped_training_goes_on_bit_exactly(
    whole: Path, tmp_path: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with stopped(stop_after, 12, monkeypatch):
        tune(run, keep=3, ema=0.9)
    assert len(list((run / "steps").iterdir())) == 1 + stop_after // 6
    finetune(out=run, resume=True, show_progress=False)  # the rest is in the folder
    folders = [latest(path) for path in (whole, run)]
    for name in ("training.safetensors", "optimizer.safetensors", "encoder.safetensors"):
        one, other = (load_file(folder / name) for folder in folders if folder is not None)
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    tables = [pd.read_csv(path / "metrics.csv").drop(columns=["images_per_second", "seconds"]) for path in (whole, run)]
    pd.testing.assert_frame_equal(*tables)
    for step in (0, 6, 12):
        kept = [(path / "steps" / f"{step:08d}" / "encoder.safetensors").read_bytes() for path in (whole, run)]
        assert kept[0] == kept[1]
    assert "already finished" in finetune(out=run, resume=True, show_progress=False).notes[0]


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "steps").iterdir())


def test_the_classifier_is_kept_at_points_of_the_training(whole: Path) -> None:
    assert kept(whole) == ["00000000", "00000006", "00000012"]
    points = [sl.load_encoder(f"run:{whole}?step={step}") for step in (0, 6, 12)]
    last = sl.load_encoder(f"run:{whole}")
    assert len({encoder.weights for encoder in points}) == 3
    start = sl.load_encoder(VIT).module.state_dict()
    for point, exact in ((points[0], start), (points[2], last.module.state_dict())):
        own = point.module.state_dict()
        assert all(torch.equal(own[name], value.bfloat16().float()) for name, value in exact.items())
    assert [encoder.classes for encoder in points] == [last.classes] * 3
    assert points[1].reference == f"run:{whole}?step=6"
    assert points[1].name == "run, step 6"


def test_steps_that_were_not_kept_are_sentences(whole: Path, tmp_path: Path) -> None:
    for step in ("7", "-1", "last", ""):
        with pytest.raises(InputError, match=f"step '{step}' was not kept; these were: 0, 6, 12"):
            sl.load_encoder(f"run:{whole}?step={step}")
    tune(tmp_path / "run", epochs=0.1)
    with pytest.raises(InputError, match=r"No steps are kept in .*; train with --set keep=log"):
        sl.load_encoder(f"run:{tmp_path / 'run'}?step=0")


def test_a_new_training_keeps_nothing_of_the_one_before(tmp_path: Path) -> None:
    tune(tmp_path / "run", epochs=1.5, keep="log")
    assert kept(tmp_path / "run") == ["00000000", "00000001", "00000002", "00000004", "00000009"]
    finetune(VIT, IMAGES, tmp_path / "run", settings=TINY | {"epochs": 0.1}, overwrite=True, show_progress=False)
    assert not (tmp_path / "run" / "steps").exists()


@pytest.mark.parametrize("keep", ["all", 1, 0, -3])
def test_points_that_cannot_be_are_sentences(keep: Any) -> None:
    with pytest.raises(InputError, match=f"keep is {keep!r}; give log, or how many points"):
        make_recipe({"keep": keep})


def test_a_full_disk_leaves_whole_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Path.write_bytes

    def until_full(self: Path, data: Any) -> int:
        if ".00000006." in str(self) and "encoder.json" in self.name:
            raise OSError(28, "No space left on device", str(self))
        return written(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", until_full)
        with pytest.raises(InputError, match="The disk is full"):
            tune(tmp_path / "run", epochs=1, keep=2)
    assert kept(tmp_path / "run") == ["00000000"]
    finetune(out=tmp_path / "run", resume=True, show_progress=False)
    assert kept(tmp_path / "run") == ["00000000", "00000006"]


def test_the_average_is_what_is_kept(whole: Path) -> None:
    folder = latest(whole)
    assert folder is not None
    every, kept = load_file(folder / "training.safetensors"), load_file(folder / "encoder.safetensors")
    for name, value in kept.items():
        assert torch.equal(value, every[f"average.{name}"])
    assert not torch.equal(every["average.head.weight"], every["model.head.weight"])


@pytest.fixture(scope="module")
def colours() -> sl.Images:
    """Red and blue things: two classes that can be told at once."""
    chance = np.random.default_rng(0)
    pixels = chance.integers(0, 90, (144, 16, 16, 3)).astype(np.uint8)
    labels = np.arange(144) % 2
    for image, label in zip(pixels, labels, strict=True):
        image[4:12, 4:12, 2 * label] += 150
    splits = {"train": range(96), "val": range(96, 120), "test": range(120, 144)}
    return sl.load_images(pixels, labels=labels, classes=["red", "blue"], splits=splits)


EASY = {"epochs": 4, "lr": 3e-3, "randaugment": [0, 0], "mixup": 0.0, "cutmix": 0.0, "evaluate_every": 0}


@pytest.mark.parametrize("reference", [VIT, "timm:resnet10t@random?size=16&zero_init_last=False"])
def test_it_learns(reference: str, colours: sl.Images, tmp_path: Path) -> None:
    tuned = tune(tmp_path / "run", reference, colours, **EASY)
    results = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    assert results == {"val_accuracy": 1.0, "test_accuracy": 1.0}
    assert tuned.classes == ("red", "blue")
    assert tuned.notes[-1] == "Test accuracy: 100.0%"
    assert pd.read_csv(tmp_path / "run" / "metrics.csv").val_accuracy.notna().sum() == 1
    # And the run itself can go on, with the head that it has.
    few = EASY | {"epochs": 0.1, "lr": 0.0}
    again = tune(tmp_path / "again", f"run:{tmp_path / 'run'}", colours, keep_head=True, **few)
    table = pd.read_csv(tmp_path / "again" / "metrics.csv")
    assert table.test_accuracy.iloc[-1] == 1
    assert again.classes == ("red", "blue")


def test_other_models_have_layers_of_their_own(colours: sl.Images, tmp_path: Path) -> None:
    other = "torchvision:shufflenet_v2_x0_5@random?size=16"
    with pytest.raises(InputError, match="leave out layer_decay"):
        tune(tmp_path / "run", other, colours, **EASY)
    tuned = tune(tmp_path / "run", other, colours, **EASY | {"epochs": 0.4, "layer_decay": 1.0})
    assert tuned.module.get_submodule("fc").out_features == 2


def test_an_encoder_in_memory_can_be_tuned(colours: sl.Images, tmp_path: Path) -> None:
    encoder = sl.load_encoder(VIT)
    before = encoder.weights
    tuned = tune(tmp_path / "run", encoder, colours, **EASY, pool="gap")
    assert encoder.weights == before == sl.load_encoder(VIT).weights
    assert tuned.module.global_pool == "avg"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["results"]["test_accuracy"] == 1


def test_reinitialised_blocks_begin_from_the_seed(tmp_path: Path) -> None:
    tune(tmp_path / "run", epochs=0.2, reinit="last:1", seed=3, keep=2)
    start = sl.load_encoder(f"run:{tmp_path / 'run'}?step=0").module.state_dict()
    given = sl.load_encoder(VIT).module.state_dict()
    names = [f"blocks.{n}.mlp.fc1.weight" for n in (0, 1)]
    assert [torch.equal(start[name], given[name].bfloat16().float()) for name in names] == [True, False]
    assert float(start["blocks.1.mlp.fc1.weight"].std()) == pytest.approx(0.02, rel=0.1)  # of timm's ViTs


def test_accumulation_makes_the_same_step(tmp_path: Path) -> None:
    for number in (1, 4):
        tune(tmp_path / str(number), accumulate=number, drop_path=0.0, optimizer="sgd", lr=0.1, epochs=1)
    one, four = (pd.read_csv(tmp_path / str(number) / "metrics.csv").loss for number in (1, 4))
    np.testing.assert_allclose(four, one, rtol=1e-4)


def test_a_resumed_training_must_be_the_same(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another layer_decay"):
        tune(whole, resume=True, layer_decay=0.5)
    with pytest.raises(InputError, match="another encoder"):
        tune(whole, f"{VIT}&seed=1", resume=True)
    with pytest.raises(InputError, match="--resume to continue or --overwrite"):
        tune(whole)
    start = sl.save_encoder(sl.load_encoder(VIT), tmp_path / "start")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_told_to_stop", lambda loop: signal.SIGTERM)
        with pytest.raises(Stopped):
            tune(tmp_path / "run", f"run:{start}")
    sl.save_encoder(sl.load_encoder(f"{VIT}&seed=9"), start)
    with pytest.raises(InputError, match=r"encoder run:.*start has changed since .* began with it"):
        tune(tmp_path / "run", f"run:{start}", resume=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"layer_deca": 0.5}, "no setting 'layer_deca' of finetune; did you mean 'layer_decay'"),
        ({"layer_decay": 0.0}, r"layer_decay is 0.0; it must be in \(0, 1\]"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"mixup": -1.0}, "mixup is -1.0, but it cannot be negative"),
        ({"randaugment": 9}, "randaugment is 9, but a list"),
        ({"randaugment": [-9, 0.5]}, "randaugment is a magnitude and its deviation"),
        ({"erase": 1.5}, "erase is a probability"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"pool": "max"}, "no pooling 'max'"),
        ({"reinit": "first:3"}, "has 2 blocks; choose at most that many"),
        ({"batch": 15}, "are odd shares; choose another batch"),
        ({"keep_head": True}, "has no head, but there are 16 classes"),
        ({"crop": [0.0, 1.0]}, "crop is a range of shares"),
    ],
)
def test_mistakes_are_sentences_and_nothing_is_written(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        tune(tmp_path / "run", **settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Name an encoder for fine-tuning, such as `sightline finetune zoo:moco_v3`"):
        finetune(images=IMAGES, out=tmp_path / "run", settings=TINY)
    unlabelled = sl.load_images(np.zeros((40, 16, 16, 3), np.uint8))
    with pytest.raises(InputError, match="needs labels of at least two classes"):
        tune(tmp_path / "run", images=unlabelled)
    tall = dataclasses.replace(sl.load_encoder(VIT), preprocess=sl.Preprocess((16, 8), (16, 8)))
    with pytest.raises(InputError, match="16 × 8; only square ones"):
        tune(tmp_path / "run", tall)
    with pytest.raises(InputError, match="for fine-tuning, not for pre-training; use it with `sightline finetune`"):
        sl.pretrain(recipe="finetune", out=tmp_path / "run")
    with pytest.raises(
        InputError, match="pre-training with mae, not for fine-tuning; use it with `sightline pretrain`"
    ):
        finetune(VIT, IMAGES, tmp_path / "run", recipe="mae", show_progress=False)
    assert not (tmp_path / "run").exists()


def test_the_published_recipe_is_that_of_the_paper() -> None:
    recipe = make_recipe(read_recipe("finetune_vit_b16"))
    assert recipe.config == FinetuneConfig()  # whose defaults are the paper's as well
    assert recipe.optimization.peak_lr == pytest.approx(4e-3)
    steps = recipe.optimization
    assert (steps.epochs, steps.warmup_epochs, steps.weight_decay, steps.betas) == (100, 5, 0.05, (0.9, 0.999))


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(make_recipe(TINY, {"encoder": VIT, "images": IMAGES, "epochs": 0.2}).values()))
    encoder = finetune(out=tmp_path / "run", recipe=path, show_progress=False)
    assert encoder.classes is not None
    assert len(encoder.classes) == 16


def test_the_command(tmp_path: Path) -> None:
    sets = options(TINY | {"epochs": 0.2})
    done = CliRunner().invoke(app, ["finetune", VIT, "--images", IMAGES, "-o", str(tmp_path / "run"), *sets])
    assert done.exit_code == 0, done.output
    assert "Test accuracy: " in done.output
    assert f"Encoder: run:{tmp_path / 'run'}" in done.output
    again = CliRunner().invoke(app, ["finetune", "--resume", "-o", str(tmp_path / "run")])
    assert "already finished" in again.output
    assert "finetune_vit_b16" in CliRunner().invoke(app, ["list", "recipes"]).output
