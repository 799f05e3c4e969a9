"""RCDM as a user has it: from encoders to pictures, numbers and a page; conditions whose answer is known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image
from typer.testing import CliRunner

import sightline as sl
from sightline.cli.application import app
from sightline.core.errors import InputError
from sightline.encoders.encoder import build_encoder
from sightline.generation.imagine import _found, imagine
from sightline.images.preprocess import Preprocess
from sightline.studies import rcdm as study

VIT = "timm:vit_tiny_patch16_224@random?size=8&patch_size=4&depth=1&embed_dim=16&num_heads=2&num_classes=0"
SETTINGS: dict[str, Any] = {
    "size": 8,
    "channels": [32],
    "layers": 1,
    "head_width": 32,
    "batch": 32,
    "epochs": 30,
    "lr": 3e-3,
    "warmup_epochs": 2,
    "ema": 0.95,
    "sampling_steps": 4,
    "images": "folder:made",
}


class Told(torch.nn.Module):
    """Its representation is the image, or always the same."""

    def __init__(self, constant: bool) -> None:
        super().__init__()
        self.constant, self.pixels = constant, torch.nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.pixels(torch.ones_like(x) if self.constant else x)
        return found


def told(name: str, constant: bool) -> sl.Encoder:
    plain = Preprocess((8, 8), 8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    return build_encoder(Told(constant), reference=name, name=name, preprocess=plain)


def two_halves() -> sl.Images:
    """One half of each image is light, the other dark: left or right."""
    random = np.random.default_rng(0)
    images = np.full((256, 8, 8, 3), 60) + random.integers(0, 40, (256, 8, 8, 3))
    for number, image in enumerate(images):
        image[:, slice(0, 4) if number % 2 else slice(4, 8)] += 120
    return sl.load_images(images.astype(np.uint8), labels=np.arange(256) % 2)


def run_of(out: Path, **more: Any) -> sl.Run:
    encoders = {"image": told("image", False), "constant": told("constant", True), "vit": sl.load_encoder(VIT)}
    options = {"samples": 4, "sources": 24, "compared": 32, "transformations": ("mirror", "colours")} | more
    return sl.rcdm(encoders, two_halves(), out, settings=SETTINGS, workers=0, show_progress=False, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> sl.Run:
    return run_of(tmp_path_factory.mktemp("rcdm") / "run")


@pytest.fixture(scope="module")
def result(run: sl.Run) -> xr.Dataset:
    return run["rcdm"]


def test_differences_have_an_interval_over_images(run: sl.Run, result: xr.Dataset) -> None:
    for number, where in (
        ("share", {"transformation": "mirror"}),
        ("gap", {"transformation": "mirror"}),
        ("orientation", {}),
    ):
        of = result[number].sel(where)
        found = run.contrast(f"rcdm.{number}", {"encoder": "image"}, {"encoder": "constant"}, **where)
        assert found.value == pytest.approx(float(of.sel(encoder="image") - of.sel(encoder="constant")))
        if np.isnan(found.low):  # every image says the same, so that none of them tells how others would differ
            assert number != "gap"
            assert "the same without any of" in found.how
        else:
            assert found.low <= found.value <= found.high
        assert 8 < found.n_groups <= 32
    for number in ("r2", "nearer", "odd"):
        found = run.contrast(f"rcdm.{number}", {"encoder": "image"}, {"encoder": "vit"})
        assert found.value == pytest.approx(
            float(result[number].sel(encoder="image") - result[number].sel(encoder="vit"))
        )
        assert found.low < found.high
    assert "kept_low" in result


def test_the_image_itself_decides_and_a_constant_does_not(result: xr.Dataset) -> None:
    image, constant = (result.sel(encoder=name) for name in ("image", "constant"))
    assert float(image.orientation) > 0.95
    error = 0.5 / np.sqrt(2 * 24 * 4)
    assert abs(float(constant.orientation) - 0.5) <= 3 * error
    mirror = result.sel(transformation="mirror")
    assert float(mirror.share.sel(encoder="image")) > 0.95
    assert float(mirror.z.sel(encoder="image")) > 3
    assert (float(mirror.gap.sel(encoder="constant")), float(mirror.share.sel(encoder="constant"))) == (0, 0.5)
    assert float(image.nearer) == pytest.approx(1, abs=0.05)
    assert np.isnan(constant.r2)


def test_the_result_is_complete(result: xr.Dataset) -> None:
    assert result.encoder.values.tolist() == ["image", "constant", "vit"]
    assert result.pictures.shape == (3, 8, 5, 8, 8, 3)
    assert result.attrs["features"] == "image: pixels.gap, constant: pixels.gap, vit: norm.cls"
    assert (result.correlation.sel(encoder="image") < 0.99).all()
    assert (result.nearest > 0).all()
    for name in ("gap", "share", "kept", "orientation", "r2"):
        known = result[name].notnull()
        assert (result[f"{name}_low"] <= result[name] + 1e-9).where(known, True).all()
        assert (result[name] <= result[f"{name}_high"] + 1e-9).where(known, True).all()


def test_words_and_page(run: sl.Run, result: xr.Dataset) -> None:
    sentences = dict(zip(result.encoder.values.tolist(), study.summary(result), strict=True))
    assert "keeps left and right" in sentences["image"]
    assert "has forgotten left and right" in sentences["constant"]
    label, number, detail = study.headlines(result)[0]
    assert label == "image"
    assert number.endswith("%")
    assert "face as the source does" in detail
    assert [figure.name for figure in study.figures(result)] == ["gap"]
    page = sl.write_report(run).read_text("utf-8")
    assert page.count('<img src="data:image/png;base64,') == 3 * 8 * 5
    assert "mirror: gap" in page
    assert "One diffusion model draws pictures" in page


def test_what_an_interval_leaves_open_is_unclear(result: xr.Dataset) -> None:
    own = result.sel(encoder="vit").copy(deep=True)
    bounds = {"gap_low": -0.1, "gap_high": 0.1, "kept_high": 0.4}
    own = own.assign({name: own[name] * 0 + value for name, value in bounds.items()})
    (sentence,) = study.summary(own.expand_dims("encoder"))
    assert sentence == "vit: by the likelihood gap it leaves left and right and which colours unclear."


def test_a_study_finds_what_it_has_trained_beside_its_pictures(tmp_path: Path) -> None:
    """Whatever the current folder is."""
    (tmp_path / "steps" / "finetune-mae-1234").mkdir(parents=True)
    pictures = tmp_path / "steps" / "rcdm-5678"
    there = f"run:{tmp_path}/steps/finetune-mae-1234"
    assert _found("run:finetune-mae-1234", pictures) == there
    assert _found("run:finetune-mae-1234?window=none", pictures) == f"{there}?window=none"
    for other in (there, "run:gone", "zoo:mae", VIT):
        assert _found(other, pictures) == other


def test_again_nothing_is_done_and_others_are_refused(run: sl.Run, result: xr.Dataset) -> None:
    assert run.path is not None
    xr.testing.assert_identical(run_of(run.path)["rcdm"], result)
    with pytest.raises(InputError, match="other sites or settings of rcdm"):
        run_of(run.path, samples=2)
    with pytest.raises(InputError, match="samples is 1, but at least 2"):
        run_of(run.path, samples=1)
    with pytest.raises(InputError, match="There is no transformation, but at least 1 is needed; give mirror, "):
        run_of(run.path, transformations=())
    with pytest.raises(InputError, match="miror"):
        run_of(run.path, transformations=("miror",))


def test_imagine(run: sl.Run, tmp_path: Path) -> None:
    assert run.path is not None
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, image in zip(files, two_halves().source.read([0, 1]), strict=True):
        Image.fromarray(image.image).save(path)
    (one,) = imagine(run.path, files, 3, encoders=["vit"], seed=1)
    assert (one.encoder, one.columns, one.pictures.shape) == ("vit", ("image", "1", "2", "3"), (2, 4, 8, 8, 3))
    assert np.array_equal(one.pictures[0, 0], two_halves().source.read([0])[0].image)
    (again,) = imagine(run.path, files[1:], 3, encoders=["vit"], seed=1)
    assert np.abs(again.pictures[0].astype(int) - one.pictures[1].astype(int)).max() <= 1
    (line,) = imagine(run.path, files, encoders=["vit"], between=True)
    assert line.pictures.shape == (1, 10, 8, 8, 3)
    made = CliRunner().invoke(
        app,
        ["imagine", str(run.path), str(files[0]), "--encoders", "vit", "--samples", "2", "-o", str(tmp_path / "out")],
    )
    assert made.exit_code == 0, made.output
    with Image.open(tmp_path / "out" / "vit.png") as picture:
        assert picture.size == (3 * 66 - 2, 64)
    with pytest.raises(InputError, match="not trained on an encoder 'vitt'; did you mean 'vit'"):
        imagine(run.path, files, encoders=["vitt"])
    with pytest.raises(InputError, match="two images or more"):
        imagine(run.path, files[:1], between=True)
    with pytest.raises(InputError, match="There is no image"):
        imagine(run.path, [tmp_path / "c.png"])
    with pytest.raises(InputError, match="holds no diffusion model"):
        imagine(tmp_path, files)
