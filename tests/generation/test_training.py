"""The training: what a step sees, stop and go, and encoders that stay as they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.passes import OPTIONS
from support.trainings import stopped

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.encoder import build_encoder
from sightline.encoders.files.weights import hash_weights
from sightline.generation.conditions import Conditions, Feature, feature_of, represent, represent_split
from sightline.generation.denoiser import Denoiser, Shape, load_model
from sightline.generation.training import DiffusionObjective, by_row, centre_crop, make_recipe, train_denoiser
from sightline.images.preprocess import Preprocess
from sightline.training.feed import Feed
from sightline.training.launch import Launch
from sightline.training.loop import make_fabric

VIT = "timm:vit_tiny_patch16_224@random?size=8&patch_size=4&depth=2&embed_dim=16&num_heads=2&num_classes=0"
IMAGES = "shapes?size=8&train=48&val=16&test=16"
TINY: dict[str, Any] = {
    "size": 8,
    "channels": [8],
    "layers": 1,
    "head_width": 8,
    "batch": 8,
    "epochs": 1,
    "lr": 1e-3,
    "log_every": 1,
    "weight_decay": 0.01,
    "clip": 1.0,
    "images": IMAGES,
}


class Image(torch.nn.Module):
    """An encoder whose representation is the image."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = torch.nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.pixels(x)
        return found


@pytest.fixture(scope="module")
def members() -> dict[str, tuple[sl.Encoder, Feature]]:
    plain = Preprocess((8, 8), 8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    image = build_encoder(Image(), reference="image", name="image", preprocess=plain)
    vit = sl.load_encoder(VIT, name="vit")
    return {"vit": (vit, feature_of(vit, "block.1.gap")), "image": (image, feature_of(image))}


@pytest.fixture(scope="module")
def conditions(members: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Conditions]:
    cache = tmp_path_factory.mktemp("cache")
    return represent_split(members, sl.load_images(IMAGES), ["train"], cache, workers=0)["train"]


def train(out: Path, members: Any, conditions: Any, resume: bool = True, **settings: Any) -> Path:
    wanted = make_recipe(TINY, settings)
    launch = Launch(resume=resume, device="cpu", workers=0, show_progress=False)
    fabric = make_fabric("cpu", "float32", 1, 1)
    return train_denoiser(members, conditions, sl.load_images(IMAGES), out, wanted, fabric, launch)


@pytest.fixture(scope="module")
def whole(members: Any, conditions: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("whole") / "run", members, conditions)


def test_conditions_are_those_of_the_encoder(members: Any, conditions: dict[str, Conditions], tmp_path: Path) -> None:
    images = sl.load_images(IMAGES)
    pixels = torch.from_numpy(np.stack([item.image for item in images.source.read([3, 5])])).permute(0, 3, 1, 2)
    for name, (encoder, feature) in members.items():
        with sl.capture(encoder, feature.site) as seen, torch.no_grad(), encoder.evaluating():
            encoder(encoder.preprocess.normalize(pixels))
        expected = seen[feature.site].mean(1) if name == "vit" else seen[feature.site]
        np.testing.assert_allclose(conditions[name].plain[[3, 5]], expected, rtol=1e-4, atol=1e-5)
        both = conditions[name].at(np.array([3, 5]), np.array([False, True]))
        mirrored = represent(encoder, feature, pixels.flip(-1))
        torch.testing.assert_close(both[1], mirrored[1], rtol=1e-4, atol=1e-5)
        assert not mirrored.requires_grad
        mean, scale = conditions[name].standards()
        every = np.concatenate([conditions[name].plain, conditions[name].mirror]).astype(np.float64)
        np.testing.assert_allclose(mean, every.mean(0), atol=1e-6)
        assert scale == pytest.approx(np.sqrt(every.var(0).mean()), rel=1e-5)
    # The pass finds them, and leaves the same.
    run = sl.analyze({"vit": members["vit"][0]}, images, ["knn"], sites="block.1", out=tmp_path, **OPTIONS)
    assert "knn" in run
    again = represent_split({"vit": members["vit"]}, images, ["train"], tmp_path / "cache", workers=0)["train"]["vit"]
    np.testing.assert_allclose(again.plain, conditions["vit"].plain, rtol=1e-4, atol=1e-5)


def test_images_and_conditions_flip_together(members: Any, conditions: dict[str, Conditions]) -> None:
    """With the image as its own representation, what is told is what is shown."""
    denoiser = Denoiser(Shape(size=8, channels=(8,), head_width=8), [192])
    objective = DiffusionObjective(denoiser, [conditions["image"]], [{}], 0.0)
    shown: list[torch.Tensor] = []
    told: list[torch.Tensor] = []

    class Watching:
        def losses(self, network: Any, pictures: torch.Tensor, noise: torch.Tensor, random: torch.Tensor) -> Any:
            shown.append(pictures)
            return torch.zeros(len(pictures))

    objective.process = Watching()
    embed = denoiser.embed
    denoiser.embed = lambda features, which: (told.append(features[0]), embed(features, which))[1]
    images = by_row(sl.load_images(IMAGES), "train")
    feed = Feed(images, (centre_crop(8),), batch=8, epochs=2, mean=(0.5,) * 3, std=(0.5,) * 3, workers=0)
    for forwards in feed.views():
        objective(forwards[0])
    torch.testing.assert_close(torch.cat(told), torch.cat(shown).flatten(1), atol=1e-2, rtol=1e-2)
    plain = torch.from_numpy(np.array(conditions["image"].plain))
    flipped = [not (picture.flatten() - plain).abs().amax(1).min() < 0.02 for picture in torch.cat(shown)]
    assert 20 < sum(flipped) < 76  # of 96


def test_a_stopped_training_goes_on_bit_exactly(
    whole: Path, members: Any, conditions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with stopped(2, 6, monkeypatch):
        train(run, members, conditions)
    other = train(run, members, conditions)
    for name in ("training.safetensors", "optimizer.safetensors", "diffusion_pytorch_model.safetensors"):
        one, two = (load_file(folder / name) for folder in (whole, other))
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[key]) for key, value in one.items())
    with pytest.raises(InputError, match="another lr"):
        train(run, members, conditions, lr=1e-2)


def test_what_is_left_is_the_average_and_encoders_stay(whole: Path, members: Any) -> None:
    model = load_model(whole)
    weights = load_file(whole / "training.safetensors")
    kept = model.denoiser.state_dict()
    for name in ("unet.conv_in.weight", "conditions.0.linear.weight"):
        assert torch.equal(kept[name], weights[f"average.{name}"])
        assert not torch.equal(kept[name], weights[f"denoiser.{name}"])
    assert [about["feature"] for about in model.encoders] == ["block.1.gap", "pixels.gap"]
    vit = members["vit"][0]
    assert all(parameter.grad is None for parameter in vit.module.parameters())
    assert hash_weights(vit.module) == vit.weights == sl.load_encoder(VIT).weights
    assert not any(name.startswith("sources") for name in weights)


def test_features(members: Any) -> None:
    vit = members["vit"][0]
    assert str(feature_of(vit)) == "norm.cls"
    assert str(feature_of(sl.load_encoder("timm:resnet18@random?size=32"))) == "block.7.gap"
    with pytest.raises(InputError, match=r"written SITE.POOLING, such as norm.cls"):
        feature_of(vit, "norm")
    with pytest.raises(InputError, match=r"No site matches 'block.9'"):
        feature_of(vit, "block.9.cls")
    with pytest.raises(InputError, match=r"has no feature 'block.7.cls'"):
        feature_of(sl.load_encoder("timm:resnet18@random?size=32"), "block.7.cls")


def test_bad_settings() -> None:
    with pytest.raises(InputError, match="ema is 1"):
        make_recipe({"ema": 1.0})
    with pytest.raises(InputError, match="sampling_steps is 1"):
        make_recipe({"sampling_steps": 1})
    with pytest.raises(InputError, match="recipe of mae, not of rcdm"):
        make_recipe({"objective": "mae"})
