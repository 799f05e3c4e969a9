"""Segmenters: what is learned, what is left alone, windows that slide, and wrong input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.trainings import same_state, stopped
from torch.nn import functional as F

import sightline as sl
from sightline.core.errors import InputError
from sightline.core.schedules import Progress
from sightline.encoders.files.weights import hash_weights
from sightline.images.preprocess import Preprocess
from sightline.images.targets import VOID, Targets
from sightline.measure.estimators.overlap import iou_of
from sightline.training.launch import Launch
from sightline.training.objective import Views
from sightline.transfer.segmentation.segment import SegmentConfig, _prepare, check, make_recipe, train_segmenter
from sightline.transfer.segmentation.sliding import Sliding, starts

SCENES = "shapes:scenes?size=32&train=8&val=0&test=4"
QUICK = {"size": 32, "batch": 4, "epochs": 1, "images": SCENES, "channels": 8, "auxiliary_channels": 4}
DEEP = "timm:test_vit@random?size=32&patch_size=8&depth=6"
LAUNCH = Launch(device="cpu", workers=0, show_progress=False)


def test_upernet_needs_two_images_in_a_forward(tmp_path: Path) -> None:
    settings = {**QUICK, "head": "upernet", "accumulate": 4}
    with pytest.raises(InputError, match="two images or more in each forward"):
        train_segmenter(sl.load_encoder(DEEP), out=tmp_path / "run", settings=settings, launch=LAUNCH)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("head", ["linear", "upernet"])
def test_a_frozen_encoder_stays_as_it_is_and_the_head_learns(head: str, tmp_path: Path) -> None:
    encoder = sl.load_encoder(DEEP)
    before = hash_weights(encoder.module)
    found = train_segmenter(encoder, out=tmp_path / "run", settings={**QUICK, "head": head}, launch=LAUNCH)
    assert hash_weights(encoder.module) == before
    data = sl.load_images(SCENES)
    assert list(found) == data.ids[data.indices("test")].tolist()
    counts = np.sum([one.counts for one in found.values()], 0)
    assert counts[1].sum() == counts[2].sum() == 4 * 32 * 32  # every pixel has a decision
    told = json.loads((tmp_path / "run" / "run.json").read_text())["results"]["test_miou"]
    assert told == pytest.approx(np.nanmean(iou_of(counts)))
    # The same command finds what is there.
    again = train_segmenter(encoder, out=tmp_path / "run", launch=Launch(True, False, "cpu", None, 1, 0, False))
    np.testing.assert_array_equal(again[next(iter(found))].counts, next(iter(found.values())).counts)
    assert sum(one.picture.size > 0 for one in found.values()) == 4


@pytest.mark.parametrize("frozen", [True, False])
def test_a_stopped_training_goes_on_bit_exactly(frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = QUICK | {"epochs": 2, "log_every": 1, "frozen": frozen, "head": "linear" if frozen else "upernet"}
    runs = [tmp_path / name for name in ("whole", "stopped")]
    train_segmenter(DEEP, out=runs[0], settings=settings, launch=LAUNCH)
    with stopped(2, 4, monkeypatch):
        train_segmenter(DEEP, out=runs[1], settings=settings, launch=LAUNCH)
    assert not (runs[1] / "segments.npz").exists()
    train_segmenter(out=runs[1], launch=replace(LAUNCH, resume=True))
    assert same_state(*runs)
    one, other = (np.load(run / "segments.npz") for run in runs)
    assert all(np.array_equal(one[key], other[key]) for key in one.files)


def test_a_few_images_are_learned_by_heart_end_to_end(tmp_path: Path) -> None:
    """Which also shows that maps, views and decisions mean the same pixels."""
    scenes = sl.load_images("shapes:scenes?size=32&train=4&val=0&test=4")
    known = replace(scenes, splits={"train": scenes.indices("train"), "test": scenes.indices("train")})
    settings = QUICK | {
        "frozen": False,
        "epochs": 150,
        "lr": 3e-3,
        "warmup_epochs": 5,
        "head": "upernet",
        "channels": 32,
    }
    settings |= {"scale": (1.0, 1.0), "layer_decay": 1.0}
    settings |= dict.fromkeys(("flip", "drop_path", "dropout", "weight_decay"), 0.0)
    found = train_segmenter(DEEP, known, tmp_path / "run", settings=settings, launch=LAUNCH)
    counts = np.sum([one.counts for one in found.values()], 0)
    assert counts[0].sum() / counts[2].sum() > 0.85
    assert sl.load_encoder(f"run:{tmp_path / 'run'}").depth == 6


def test_the_loss_is_the_mean_over_all_pixels_and_void_ones_count_nothing() -> None:
    torch.manual_seed(0)
    data = sl.load_images(SCENES)
    parts = _prepare(make_recipe(QUICK, {"head": "upernet", "dropout": 0.0}), sl.load_encoder(DEEP), data, LAUNCH)
    objective = parts.objective.eval()
    truth = torch.randint(-1, 16, (2, 32, 32))
    truth[0, :9] = VOID
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, 4)
    pixels = torch.randn(2, 3, 32, 32)
    targets = [Targets(*nothing, None, one) for one in truth]
    views = Views([pixels], torch.zeros(2), np.zeros(2, np.uint64), Progress(0, 1, 1), 0, [targets])
    with torch.no_grad():
        loss, curves = objective(views)
        maps = objective.maps(pixels)
    expected = 0.0
    for weight, head in ((1.0, objective.head), (0.4, objective.auxiliary)):
        assert head is not None
        with torch.no_grad():
            scores = F.interpolate(head(maps), (32, 32), mode="bilinear", align_corners=False).double().log_softmax(1)
        for n, y, x in np.ndindex(2, 32, 32):
            if truth[n, y, x] != VOID:
                expected -= weight * float(scores[n, truth[n, y, x] + 1, y, x]) / truth.numel()
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert 0 <= float(curves["pixel_accuracy"]) <= 1


def test_windows_slide_over_an_image_and_their_scores_are_averaged() -> None:
    class Columns:
        """Scores that say in which column of its window a pixel lies."""

        def scores(self, images: Any) -> torch.Tensor:
            ramp = torch.arange(6.0).expand(len(images), 1, 6, 6)
            return torch.cat([ramp, torch.full_like(ramp, 2.9)], 1)

    sliding = Sliding(Columns(), Preprocess((6, 6)), 2, torch.device("cpu"))
    decided = sliding.decide(torch.zeros(3, 6, 9, dtype=torch.uint8), (6, 9))
    assert starts(9, 6) == [0, 3]
    # Columns 3 to 5 are seen twice, as 3 4 5 and as 0 1 2: 1.5 2.5 3.5 on average.
    assert decided[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert sliding.decide(torch.zeros(3, 6, 6, dtype=torch.uint8), (12, 12)).shape == (12, 12)


@pytest.mark.parametrize("length", [512, 513, 683, 853, 854, 1024, 2048])
def test_windows_move_on_as_in_the_published_protocol(length: int) -> None:
    """512 and 341 pixels, as in mmsegmentation's `slide_inference`."""
    crop, stride = 512, 341
    count = max(length - crop + stride - 1, 0) // stride + 1
    ends = [min(i * stride + crop, length) for i in range(count)]
    assert starts(length, crop) == [max(end - crop, 0) for end in ends]


def test_what_cannot_be_is_said_before_anything_is_written(tmp_path: Path) -> None:
    data = sl.load_images(SCENES)
    shallow, cnn = sl.load_encoder("timm:test_vit@random?size=32&patch_size=8&depth=2"), "timm:resnet18@random?size=32"
    for settings, encoder, message in (
        ({"head": "upernet"}, shallow, "UperNet looks at 4 blocks, but .* has 2; set head=linear"),
        ({"head": "upernet", "blocks": "last"}, sl.load_encoder(DEEP), "not at blocks=last; name 4"),
        ({"head": "linear"}, sl.load_encoder(cnn), "head=linear is for encoders with patches; set head=upernet"),
    ):
        with pytest.raises(InputError, match=message):
            check(make_recipe(QUICK, settings), encoder, data)
    with pytest.raises(InputError, match="There is no head 'linar'; did you mean 'linear'"):
        SegmentConfig(head="linar")
    with pytest.raises(InputError, match="This recipe is for segmentation, not for fine-tuning"):
        sl.finetune(DEEP, recipe="segment", out=tmp_path / "x")
    pixels = sl.load_images(np.zeros((8, 32, 32, 3), np.uint8), labels=list("abababab"))
    with pytest.raises(InputError, match="no boxes, masks or segmentation maps"):
        check(make_recipe(QUICK), sl.load_encoder(DEEP), pixels)
    assert not list(tmp_path.iterdir())
