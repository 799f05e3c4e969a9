"""Attention in the pass: equal to the whole maps of real layers, with reasons, densities and the viewer."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import gaussian_kde
from support.attention import product_of
from support.passes import activations, measured
from support.references import SMALL

import sightline as sl
from sightline.analyses import attention
from sightline.analyses.attention import AttentionAnalysis, AttentionConfig, attention_distance, attention_nmi, charts
from sightline.analyses.attention.charts import densities
from sightline.analyses.attention.viewer import VIEWER_BYTES, ViewerMaps
from sightline.core.errors import InputError
from sightline.encoders.attention import AttentionProduct
from sightline.encoders.sites import Tokens
from sightline.images.pipeline import batches
from sightline.measure.plan import Key, make_plans

DEEPER = SMALL.replace("depth=2", "depth=3")


@pytest.fixture(scope="module")
def compared(images: sl.Images) -> tuple[dict[str, sl.Encoder], Any, xr.Dataset]:
    encoders = {
        "vit": sl.load_encoder(DEEPER),
        "registers": sl.load_encoder(DEEPER.replace("num_heads=3", "num_heads=4") + "&reg_tokens=2&seed=1"),
        "cnn": sl.load_encoder("timm:resnet18@random?size=32"),
    }
    return encoders, images, measured("attention", encoders, images)


def test_the_pass_equals_whole_maps(compared: Any) -> None:
    encoders, images, result = compared
    assert result.encoder.values.tolist() == ["vit", "registers"]
    for name, prefix, heads in (("vit", 1, 3), ("registers", 3, 4)):
        for site, maps in activations(encoders[name], images, attention.SITES[:1]).items():
            got = result.sel(encoder=name, site=site)
            distance, nmi = attention_distance(maps, (4, 4), 8, prefix), attention_nmi(maps, prefix)
            assert got.distance.values[:heads] == pytest.approx(distance.mean(0).numpy(), rel=1e-6)
            assert got.nmi.values[:heads] == pytest.approx(nmi.mean(0).numpy(), abs=1e-6)
            relative = distance.mean(0).numpy() / math.hypot(32, 32)
            assert got.distance_relative.values[:heads] == pytest.approx(relative, rel=1e-6)
            assert np.isnan(got.nmi.values[heads:]).all()
            assert float(got.nmi_mean) == pytest.approx(nmi.mean().item(), abs=1e-6)
            assert float(got.nmi_std) == pytest.approx(nmi.mean(0).numpy().std(), abs=1e-6)
            half = 1.959964 * nmi.mean(1).numpy().std(ddof=1) / math.sqrt(20)
            assert float(got.nmi_mean_high - got.nmi_mean) == pytest.approx(half, abs=1e-6)
            assert str(got.reason.values) == ""
    assert result.attrs["images"] == 20


def test_a_map_that_is_not_the_layers_own_is_refused(compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(product: AttentionProduct, *_: Any) -> Any:
        product.output = product.v
        return torch.zeros(2, *product.shape[:2]).unbind()

    monkeypatch.setattr("sightline.analyses.attention.distance_and_nmi", wrong)
    fresh = sl.load_encoder(DEEPER)
    with pytest.raises(sl.InputError, match=r"block.0.attn_map.*differs from the layer's own output"):
        measured("attention", {"vit": fresh}, compared[1])


def test_batching_changes_no_number(compared: Any) -> None:
    encoders, images, result = compared
    again = measured("attention", encoders, images, batch=5)
    for name, values in result.data_vars.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(again[name], values, rtol=1e-5, atol=1e-6)
        elif values.dtype.kind == "u":  # a byte may round the other way
            assert np.abs(again[name].astype(int) - values.astype(int)).max() <= 1


def test_viewer_holds_quantised_maps(compared: Any) -> None:
    encoders, images, result = compared
    test = images.indices("test")
    for i, (name, prefix, heads) in enumerate((("vit", 1, 3), ("registers", 3, 4))):
        view, pictures = result[f"viewer_map_{i}"], result[f"viewer_pixels_{i}"]
        assert view.dtype == pictures.dtype == np.uint8
        assert view.shape == (4, 3, 1 + heads, 16, 16)
        assert (list(view.attrs["grid"]), view.attrs["patch"]) == ([4, 4], 8)
        assert view[f"viewer_query_{i}"].values.tolist() == list(range(16))
        maps = activations(encoders[name], images, attention.SITES[:1])
        for slot, label in enumerate(view.viewer_id.values):
            row = int(np.flatnonzero(images.ids[test] == label)[0])
            assert images.classes[images.labels[test[row]]] == view.viewer_label.values[slot]
            crop = encoders[name].preprocess.crop(images.source.read([int(test[row])])[0].image)
            np.testing.assert_array_equal(pictures[slot], crop.transpose(1, 2, 0))
            for layer, site in enumerate(view[f"viewer_layer_{i}"].values):
                p = maps[site][row, :, prefix:, prefix:].numpy()
                p = p / p.sum(-1, keepdims=True)
                p = np.concatenate([p.mean(0, keepdims=True), p])  # the mean of the heads, then each
                expected = np.round(255 * p / p.max(-1, keepdims=True))
                assert np.abs(view.values[slot, layer].astype(int) - expected).max() <= 1


def test_viewer_can_be_off_and_stays_small(compared: Any) -> None:
    encoders, images, _ = compared
    off = measured("attention", encoders, images, AttentionConfig(viewer_images=0))
    assert not [name for name in off.variables if str(name).startswith("viewer")]
    large = ViewerMaps(0, tuple(map(str, range(32))), 16, (16, 16))
    assert math.prod(large.shape) > VIEWER_BYTES >= math.prod(large.within(1).shape)
    assert large.within(1).side == 5
    assert ViewerMaps(0, ("a",), 1, (2, 9), 3).queries == [1, 4, 7, 10, 13, 16]


def plan_for(encoders: Any, images: Any, tmp_path: Any) -> Any:
    chosen = {"batch": 8, "seed": 0, "precision": "float32"}
    plans = make_plans(encoders, images, {"attention": AttentionConfig()}, None, chosen, tmp_path, torch.device("cpu"))
    return plans["attention"]


def test_flaws_have_a_reason(compared: Any, tmp_path: Any) -> None:
    encoders, images, _ = compared
    metric = AttentionAnalysis(AttentionConfig(viewer_images=1), plan_for({"vit": encoders["vit"]}, images, tmp_path))
    mask = torch.zeros(17, 17)
    mask[3, 1:] = -math.inf
    tokens = Tokens(1, 0, (4, 4))
    for batch in batches(images, {encoders["vit"].preprocess}, splits=["test"], batch=10, seed=0, workers=0):
        metric.begin(batch)
        found = {}
        for block in range(3):
            product = product_of(tokens, 0.25, mask if block == 1 else None, images=len(batch.ids))
            if block == 2 and batch.number == 0:
                product.q[0, 0, 5] = math.nan
            product = AttentionProduct(product.q[:, :3], product.k[:, :3], product.bias, product.scale)
            key = Key("vit", f"block.{block}.attn_map", "plain")
            found[key] = metric.reduce(key, product)
        metric.update(batch, found)
    result = AttentionAnalysis.compute(metric)
    assert result.reason.values[0].tolist() == [
        "",
        "in 20 of 20 images a query may attend to no patch",
        "the activations are not finite (NaN or infinity) in 1 of 20 images",
    ]
    assert np.isfinite(result.nmi.values[0, 0]).all()
    assert np.isnan(result.nmi.values[0, 1:]).all()
    assert np.isnan(result.distance_mean.values[0, 1:]).all()


def test_maps_that_are_not_of_the_grid_have_a_reason(compared: Any, tmp_path: Any) -> None:
    encoders, images, _ = compared
    odd = dataclasses.replace(encoders["vit"], tokens=Tokens(1, 0, (2, 2)))
    plan = plan_for({"vit": encoders["vit"], "odd": encoders["registers"]}, images, tmp_path)
    plan = dataclasses.replace(plan, encoders={**plan.encoders, "odd": odd})
    metric = AttentionAnalysis(AttentionConfig(), plan)
    assert metric.problems[0] == ""
    assert metric.problems[3] == "the map has 19 × 19 tokens, but 1 prefix tokens and 2 × 2 patches are 5"
    assert list(metric.viewer.looks) == ["vit"]
    alone = dataclasses.replace(plan, encoders={"odd": odd}, sites={"odd": plan.sites["odd"]})
    with pytest.raises(InputError, match="attention cannot be measured"):
        AttentionAnalysis(AttentionConfig(), alone)


def test_bytes_of_several_processes_add_up(compared: Any, tmp_path: Any) -> None:
    """torch sums bytes as int64; the result is bytes again."""
    encoders, images, _ = compared
    metric = AttentionAnalysis(AttentionConfig(), plan_for(encoders, images, tmp_path))
    metric.seen += 1
    metric.viewer_map_0 = torch.stack([metric.viewer_map_0, torch.full_like(metric.viewer_map_0, 255)]).sum(0)
    result = AttentionAnalysis.compute(metric)
    assert result.viewer_map_0.dtype == np.uint8
    assert int(result.viewer_map_0.min()) == 255


def test_density_is_the_one_of_scipy(compared: Any) -> None:
    _, _, result = compared
    _, heads, _ = charts._tables(result)
    for by in ("third", "site"):
        curves = densities(heads, "nmi", by)
        assert set(curves[by]) == set(heads[by])
        for (encoder, place), rows in curves.groupby(["encoder", by]):
            values = heads[(heads.encoder == encoder) & (heads[by] == place)].nmi.to_numpy()
            expected = gaussian_kde(values, rows.bandwidth.iloc[0] / values.std(ddof=1))(rows.value)
            np.testing.assert_allclose(rows.density, expected, rtol=1e-6, atol=1e-9)


def test_figures_and_headlines(compared: Any) -> None:
    _, _, result = compared
    found = {figure.name: figure for figure in charts.figures(result)}
    of_heads = ["distance-heads", "distance-heads-of-layers", "nmi-heads", "nmi-heads-of-layers"]
    assert list(found) == ["distance", "nmi", "spread", *of_heads]
    assert len(found["distance"].table) == 3 * 3 + 3 * 4
    assert [label for label, _, _ in charts.headlines(result)] == ["vit", "registers"]
    for depth, blocks in ((1, "block 0,"), (2, "block 1,"), (3, "block 2,")):  # a last third at any depth
        few = result.isel(site=slice(depth))
        assert all(blocks in detail for _, _, detail in charts.headlines(few))
        assert len(charts.headlines(few)) == 2
    flawed = result.where((result.site != "block.0.attn_map") & (result.encoder == "vit")).assign(reason=result.reason)
    layers, heads, _ = charts._tables(flawed)  # the others stay where they were
    assert layers[["depth", "third"]].values.tolist() == [[1, charts.THIRDS[1]], [2, charts.THIRDS[2]]]
    assert sorted(set(heads.depth)) == [1, 2]
    nothing = result.where(result.nmi_mean > 2)
    assert charts.figures(nothing.assign(reason=result.reason)) == []
    assert charts.headlines(nothing.assign(reason=result.reason)) == []
