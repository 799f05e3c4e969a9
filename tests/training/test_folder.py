"""The folder of a training, for an objective that is none of ours and ends in no encoder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainings import stopped
from torch import Tensor, nn

import sightline as sl
from sightline.core.errors import InputError
from sightline.core.folders import latest
from sightline.encoders.encoder import Encoder
from sightline.images.augment.policy import Policy
from sightline.training.feed import Feed
from sightline.training.folder import _trained_on, kept_recipe, start, training_folder
from sightline.training.launch import Launch
from sightline.training.loop import Loop
from sightline.training.objective import Learner, Views
from sightline.training.optimization import Optimization
from sightline.training.recipe import Training

IMAGES = "shapes:scenes?size=16&train=64&val=0&test=0"


class Painter(Learner):
    """Learns the share of the picture that objects take, from their masks; leaves one picture."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3 * 8 * 8, 1)

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        masks = [one.masks.any(0).float().mean() for one in views.targets[0] if one.masks is not None]
        return (self.layer(views.pixels[0].flatten(1))[:, 0] - torch.stack(masks)).square().mean(), {}

    def export(self, folder: Path, encoder: Encoder | None) -> None:
        assert encoder is None
        save_file({"picture": self.layer.weight.detach().view(3, 8, 8).clone()}, folder / "picture.safetensors")


@dataclass(frozen=True)
class Recipe:
    objective: str = "painter"
    training: Training = field(default_factory=lambda: Training(images=IMAGES, log_every=1))

    def values(self) -> dict[str, Any]:
        return {"objective": self.objective, "images": self.training.images}


def train(out: Path, launch: Launch) -> dict[str, float]:
    wanted = Recipe()
    kept_recipe(out, launch)
    fabric, data = start(wanted, None, launch)
    feed = Feed(data, [Policy(8)], batch=16, epochs=2, workers=launch.workers, targets=True)
    with training_folder(out, "painting", wanted, data, resume=launch.resume) as folder:
        settings = Optimization(batch=16, epochs=2, lr=1e-2)
        return Loop(Painter(), feed, settings, folder.path, fabric, "painter", log_every=1, show_progress=False).run()


def test_an_objective_without_an_encoder_trains_stops_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "whole", Launch(workers=0))
    assert whole["step"] == 8
    with stopped(3, 8, monkeypatch):
        train(tmp_path / "stopped", Launch(workers=0))
    with pytest.raises(InputError, match="holds a training already; pass --resume"):
        train(tmp_path / "stopped", Launch(workers=0))
    last = train(tmp_path / "stopped", Launch(resume=True, workers=2))  # the lock was let go
    assert last["loss"] == whole["loss"]
    folders = [latest(tmp_path / name) for name in ("whole", "stopped")]
    for name in ("training.safetensors", "picture.safetensors"):
        one, other = (folder / name for folder in folders if folder is not None)
        assert one.read_bytes() == other.read_bytes()
    found = [path.name for path in folders[0].iterdir()] if folders[0] is not None else []
    assert sorted(found) == ["optimizer.safetensors", "picture.safetensors", "state.json", "training.safetensors"]
    assert load_file(str(latest(tmp_path / "whole")) + "/picture.safetensors")["picture"].shape == (3, 8, 8)
    about = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert (about["kind"], about["recipe"]["objective"]) == ("painting", "painter")
    assert train(tmp_path / "whole", Launch(resume=True, workers=0)) == {}


def test_two_cannot_train_in_one_folder(tmp_path: Path) -> None:
    data = sl.load_images(IMAGES)
    with training_folder(tmp_path / "run", "painting", Recipe(), data, resume=False) as folder:
        assert (folder.path / "recipe.toml").is_file()
        with pytest.raises(InputError), training_folder(tmp_path / "run", "painting", Recipe(), data, resume=True):
            pass
    other = sl.load_images(IMAGES.replace("train=64", "train=48"))
    with (
        pytest.raises(InputError, match="has changed since"),
        training_folder(tmp_path / "run", "painting", Recipe(), other, resume=True),
    ):
        pass


def test_it_is_said_how_many_images_are_trained_on() -> None:
    own = sl.load_images("shapes?train=64&val=0&test=32")
    assert _trained_on(own) == "shapes?train=64&val=0&test=32: 64 training images"
    pixels = np.zeros((5, 8, 8, 3), np.uint8)
    halved = sl.load_images(pixels, labels=[0, 0, 0, 1, 1])
    assert _trained_on(halved) == (
        f"{halved.name}: 3 training images; it has no splits, so 2 images are held out. "
        "With folders or files named train and test you choose"
    )
