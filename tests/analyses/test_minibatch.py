"""Minibatch CKA of all batch sizes and numbers of images from one pass, against CKA of whole arrays."""

from typing import Any

import numpy as np
import pytest
import xarray as xr
from support.passes import CNN, OPTIONS, activations, measured
from support.references import SMALL

from sightline import analyze, load_encoder, load_images
from sightline.analyses import minibatch as plugin
from sightline.analyses.minibatch import MinibatchConfig
from sightline.measure.estimators.cka import cka

CONFIG = MinibatchConfig(batches=(8, 16, 32), layers=3, tokens=("all", "cls"), bootstrap=30)


def measure(encoders: Any, config: MinibatchConfig = CONFIG, batch: int = 32, **options: Any) -> xr.Dataset:
    images = load_images("shapes?size=32&train=8&val=0&test=128")
    return measured("minibatch", encoders, images, config, batch=batch, **options)


@pytest.fixture(scope="module")
def result() -> xr.Dataset:
    return measure({"a": load_encoder(SMALL), "b": load_encoder(SMALL + "&seed=1&depth=3")})


def test_every_batch_size_and_count_is_cka_of_whole_arrays(result: xr.Dataset) -> None:
    """The first 32, 64 and 128 images in the order of the pass, in batches of 8, 16 and 32."""
    assert result["count"].values.tolist() == [32, 64, 128]
    assert result.batch.values.tolist() == [8, 16, 32]
    encoder, images = load_encoder(SMALL), load_images("shapes?size=32&train=8&val=0&test=128")
    sites = result.site.sel(encoder="a").values.tolist()
    found = activations(encoder, images, sites, images.order("test", 0))
    for count in (32, 64, 128):
        for batch in (8, 16, 32):
            for tokens in ("all", "cls"):
                x, y = (found[site][:count] if tokens == "all" else found[site][:count, 0] for site in sites[:2])
                at = {"tokens": tokens, "count": count, "batch": batch, "encoder": "a", "layer_a": 0, "layer_b": 1}
                assert float(result.cka.sel(at)) == pytest.approx(cka(x, y, batch), abs=1e-5)


def test_layers_are_drawn_once_and_numbers_have_their_interval(result: xr.Dataset) -> None:
    for encoder in ("a", "b"):
        sites = result.site.sel(encoder=encoder).values.tolist()
        assert len(set(sites)) == 3
    whole = result.sel(tokens="all")
    np.testing.assert_allclose(np.diagonal(whole.cka, axis1=-2, axis2=-1), 1, atol=1e-9)
    known = whole.cka_low.notnull()
    assert (known == (whole["count"] > 32)).all()  # a single batch of the pass has none
    assert (whole.cka_low <= whole.cka + 1e-9).where(known, True).mean() > 0.95
    assert (whole.reason == "").all()
    # The class token is the same for all images before the first attention layer.
    same = (result.reason.sel(tokens="cls") == "the activations are the same for all images").values
    np.testing.assert_array_equal(same, np.isin(result.site.values, ["block.0.norm1", "block.0.qkv"]))
    largest = np.abs(result.cka - result.cka.isel(count=-1, batch=-1)).max(("layer_a", "layer_b"))
    np.testing.assert_allclose(result.difference, largest)
    again = measure({"a": load_encoder(SMALL)})
    xr.testing.assert_allclose(again.cka, result.cka.sel(encoder=["a"]))
    other = measure({"a": load_encoder(SMALL)}, seed=5)
    assert other.site.values.tolist() != again.site.values.tolist()


def test_beside_other_analyses_the_numbers_of_batches_do_not_matter() -> None:
    """Training images, which k-NN wants, shift the numbers of the batches of a pass."""
    images = load_images("shapes?size=32&train=80&val=0&test=64")
    encoder = load_encoder(SMALL)
    alone = measured("minibatch", encoder, images, CONFIG, batch=32)
    beside = analyze(encoder, images, ["knn"], also={"minibatch": CONFIG}, **OPTIONS | {"batch": 32})["minibatch"]
    xr.testing.assert_allclose(alone, beside)


def test_few_layers_few_images_and_small_batches() -> None:
    encoders = {"a": load_encoder(SMALL), "r": load_encoder(CNN)}
    result = measure(encoders, MinibatchConfig(layers=10, bootstrap=5), batch=8, sites=["block.*"])
    assert result.batch.values.tolist() == [8]
    assert result["count"].values.tolist() == [8, 16, 32, 64, 128]
    assert result.site.sel(encoder="a").values.tolist() == ["block.0", "block.1", *[""] * 6]
    assert set(result.reason.sel(encoder="a").values[0, 2:]) == {"this encoder has no such site"}
    assert result.cka.sel(encoder="a", layer_a=5).isnull().all()
    assert result.cka.sel(encoder="r").notnull().all()


def test_the_page(result: xr.Dataset) -> None:
    figures = plugin.figures(result)
    assert [figure.name for figure in figures] == ["batch", "count", "difference"]
    by_batch, by_count, difference = (figure.table for figure in figures)
    assert (len(by_batch), len(by_count), len(difference)) == (2 * 3 * 3, 2 * 3 * 3, 2 * 9)
    row = by_batch.query("encoder == 'a' and batch == 16").iloc[1]
    values = result.cka.sel(tokens="all", count=128, batch=16, encoder="a", layer_a=1, layer_b=[0, 2])
    assert row.value == pytest.approx(float(values.mean()))
    assert row.depth == 4
    label, number, detail = plugin.headlines(result)[0]
    assert (label, float(number)) == ("a", pytest.approx(float(result.difference[0, -1, :, 0].max()), abs=1e-3))
    assert detail == "largest difference of CKA between batches of 8 … 32; 3 layers, 128 images"
