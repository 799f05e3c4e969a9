"""Inversion: encoders whose answer is known, and the analysis against the measure on whole arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from support import passes
from support.references import SMALL

import sightline as sl
from sightline.analyses import inversion as plugin
from sightline.analyses.inversion import InversionConfig
from sightline.encoders.encoder import build_encoder
from sightline.images.preprocess import Preprocess
from sightline.report.tables import tables

SIZE = 8


class Pixels(torch.nn.Module):
    """Gives its pixels; of the image plus its mirror image, or nothing but a constant."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.pixels = kind, torch.nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed = {"image": x, "symmetric": x + x.flip(-1), "constant": torch.ones_like(x)}
        found: torch.Tensor = self.pixels(changed[self.kind])
        return found


def encoder(kind: str) -> sl.Encoder:
    preprocess = Preprocess(size=(SIZE, SIZE), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    return build_encoder(Pixels(kind), reference=kind, name=kind, preprocess=preprocess)


def measured(images: Any, out: Path | None = None, **options: Any) -> xr.Dataset:
    encoders = {kind: encoder(kind) for kind in ("image", "symmetric", "constant")}
    return passes.measured("inversion", encoders, images, InversionConfig(size=SIZE, pictures=3), out=out, **options)


@pytest.fixture(scope="module")
def images() -> Any:
    return sl.load_images(f"shapes?size={SIZE}&train=480&val=96&test=64")


@pytest.fixture(scope="module")
def result(images: Any, tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    return measured(images, tmp_path_factory.mktemp("run") / "x")


def test_pixels_come_back_whole(result: xr.Dataset) -> None:
    found = result.sel(encoder="image", site="pixels", feature="gap")
    assert (float(found.r2), float(found.nearer), float(found.odd)) == pytest.approx((1, 1, 1), abs=1e-3)
    assert float(found.penalty) == pytest.approx(1e-6)
    for measure in plugin.MEASURES:
        assert float(found[f"{measure}_ceiling"]) == pytest.approx(1)
    assert float(found.r2_null) == pytest.approx(0, abs=0.05)
    assert float(found.nearer_null) == pytest.approx(0.5, abs=0.2)
    assert float(found.odd_null) == pytest.approx(0, abs=0.05)
    sources, made = (result.pictures.sel(picture_sheet="image, gap", picture_column=c) for c in ("image", "pixels"))
    assert np.abs(sources.values.astype(int) - made.values.astype(int)).max() <= 2


def test_a_symmetric_encoder_has_lost_left_and_right(result: xr.Dataset) -> None:
    """Its even part comes back whole, nothing of the odd part does."""
    found = result.sel(encoder="symmetric", site="pixels", feature="gap")
    assert 0.3 < float(found.r2) < 0.99
    assert float(found.odd) == pytest.approx(0, abs=1e-6)
    made = result.pictures.sel(picture_sheet="symmetric, gap", picture_column="pixels").values.astype(int)
    assert np.abs(made - made[:, :, ::-1]).max() <= 1


def test_a_constant_has_a_reason(result: xr.Dataset) -> None:
    found = result.sel(encoder="constant", site="pixels", feature="gap")
    assert np.isnan(found.r2)
    assert found.reason == "the features are the same for all training images"
    assert (result.picture_note.sel(picture_sheet="constant, gap", picture_column="pixels") == "").all()


def test_batching_order_and_a_missing_val_split_change_what_they_may(images: Any, result: xr.Dataset) -> None:
    again = measured(images, batch=7)
    for name in plugin.NAMES:
        np.testing.assert_allclose(again[name], result[name], rtol=1e-6, atol=1e-8)
    without = measured(sl.load_images(f"shapes?size={SIZE}&train=480&val=0&test=64"))
    assert (without.attrs["n_train"], without.attrs["n_selection"]) == (384, 96)
    assert float(without.r2.sel(encoder="image", site="pixels", feature="gap")) > 0.999


def test_page_and_words(result: xr.Dataset, images: Any, tmp_path: Path) -> None:
    small = sl.analyze(
        [SMALL],
        sl.load_images("shapes?size=32", limit=40),
        {"inversion": InversionConfig(size=6, pictures=2)},
        out=tmp_path / "run",
        **passes.OPTIONS,
    )
    assert [figure.name for figure in plugin.figures(small["inversion"])] == ["r2", "nearer", "odd"]
    page = sl.write_report(small).read_text("utf-8")
    assert page.count('<img src="data:image/png;base64,') == 2 * 2 * (1 + 3)  # features, images, source and sites
    assert (tmp_path / "run" / "figures" / "inversion-pictures-1.png").is_file()
    label, number, detail = plugin.headlines(result)[0]
    assert (label, number) == ("image", "1.000")
    assert "nearer to themselves" in detail
    assert "tells left from right" in plugin.summary(result)[0]
    assert "does not tell left from right" in plugin.summary(result)[1]
    assert len(plugin.summary(result)) == 2
    assert list(tables(result, "inversion")) == ["inversion"]
