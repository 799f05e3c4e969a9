"""Attention distance and NMI against plain loops, closed forms, and the whole maps of real layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from support.references import SMALL

import sightline as sl
from sightline.analyses import attention
from sightline.analyses.attention import Analysis, Config, attention_distance, attention_nmi, charts
from sightline.analyses.attention.charts import densities
from sightline.analyses.attention.viewer import VIEWER_BYTES, Look
from sightline.core.errors import InputError
from sightline.encoders.attention import AttentionProduct
from sightline.encoders.sites import Tokens
from sightline.measure.estimators.attention import distance_and_nmi, unattended
from sightline.measure.plan import Key

DEEPER = SMALL.replace("depth=2", "depth=3")
OPTIONS: dict[str, Any] = {"workers": 0, "show_progress": False}


def plain_distance(row_of: np.ndarray, grid: tuple[int, int], patch: float, prefix: int) -> float:
    """One map, with loops over queries and keys."""
    places = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    total = 0.0
    for i, (r, c) in enumerate(places):
        row = row_of[prefix + i, prefix:].astype(np.float64)
        row = row / row.sum()
        total += sum(p * patch * math.hypot(r - y, c - x) for p, (y, x) in zip(row, places, strict=True))
    return total / len(places)


def plain_nmi(row_of: np.ndarray, prefix: int) -> float:
    """One map, from the joint distribution of queries and keys."""
    joint = row_of[prefix:, prefix:].astype(np.float64) + 1e-8
    joint = joint / joint.sum(1, keepdims=True) / len(joint)
    q, k = joint.sum(1), joint.sum(0)
    information = (joint * np.log(joint / np.outer(q, k))).sum()
    return float(information / np.sqrt((q * np.log(q)).sum() * (k * np.log(k)).sum()))


def random_maps(shape: tuple[int, ...], sharpness: float = 2.0, seed: int = 0) -> np.ndarray:
    logits = sharpness * np.random.default_rng(seed).normal(size=shape)
    whole = np.exp(logits - logits.max(-1, keepdims=True))
    return whole / whole.sum(-1, keepdims=True)


def product_of(
    tokens: Tokens, scale: float = 0.25, bias: torch.Tensor | None = None, images: int = 3, dtype: Any = torch.float32
) -> AttentionProduct:
    generator = torch.Generator().manual_seed(0)
    q, k, _ = torch.randn(images, tokens.count, 3, 4, 16, generator=generator).to(dtype).permute(2, 0, 3, 1, 4)
    return AttentionProduct(q, k, bias, scale)  # strided as in a ViT


@pytest.mark.parametrize(("grid", "prefix"), [((3, 3), 0), ((2, 5), 1), ((4, 3), 5), ((1, 6), 2)])
@pytest.mark.parametrize("sharpness", [0.1, 2.0, 20.0])
def test_equals_plain_loops(grid: tuple[int, int], prefix: int, sharpness: float) -> None:
    tokens = prefix + grid[0] * grid[1]
    maps = random_maps((2, 3, tokens, tokens), sharpness)
    distance, nmi = attention_distance(maps, grid, 16, prefix), attention_nmi(maps, prefix)
    assert distance.shape == nmi.shape == (2, 3)
    for b in range(2):
        for h in range(3):
            assert distance[b, h] == pytest.approx(plain_distance(maps[b, h], grid, 16, prefix), rel=1e-12)
            assert nmi[b, h] == pytest.approx(plain_nmi(maps[b, h], prefix), abs=1e-12)


def test_closed_forms() -> None:
    """A patch that looks at itself, at the next column, at all alike, and all at one."""
    grid, n = (3, 4), 12
    own, even, one = np.eye(n), np.full((n, n), 1 / n), np.eye(n)[np.zeros(n, int)]
    right = np.eye(n)[[i + 1 if i % 4 < 3 else i - 3 for i in range(n)]]
    maps = np.stack([own, even, one, right])[None]
    distance, nmi = attention_distance(maps, grid, patch_size=8), attention_nmi(maps)
    assert distance[0, 0] == 0
    assert distance[0, 3] == pytest.approx(8 * (3 * 1 + 3) / 4)
    assert distance[0, 2] == pytest.approx(8 * np.mean([math.hypot(r, c) for r in range(3) for c in range(4)]))
    np.testing.assert_allclose(nmi[0, [0, 3]], 1, atol=1e-6)
    np.testing.assert_allclose(nmi[0, [1, 2]], 0, atol=1e-6)


def test_even_attention_is_a_third_of_the_diagonal_and_more() -> None:
    """What the page says: the mean distance in a square is 0.5214 of its side (Philip 2007), 0.37 of the diagonal."""
    even = np.full((1, 1, 784, 784), 1 / 784)
    assert attention_distance(even, (28, 28)).item() / math.hypot(28, 28) == pytest.approx(
        0.5214 / math.sqrt(2), rel=0.01
    )


def test_arrays_may_be_views_and_not_writable() -> None:
    maps = random_maps((2, 2, 6, 6))
    maps.setflags(write=False)
    np.testing.assert_array_equal(attention_nmi(maps[::-1]), attention_nmi(maps)[::-1])
    np.testing.assert_array_equal(attention_distance(maps[::-1], (2, 3)), attention_distance(maps, (2, 3))[::-1])


def test_kind_of_input_is_kept() -> None:
    maps = random_maps((1, 2, 5, 5)).astype(np.float32)
    assert isinstance(attention_nmi(maps), np.ndarray)
    tensor = attention_distance(torch.from_numpy(maps), (2, 2), prefix=1)
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor, attention_distance(maps, (2, 2), prefix=1))


@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(2, 5), st.floats(0.1, 30))
@settings(max_examples=30, deadline=None)
def test_properties(seed: int, rows: int, columns: int, sharpness: float) -> None:
    """Bounds, and what does not matter: prefix tokens' own rows, and for NMI the order of queries and of keys."""
    n = rows * columns
    maps = random_maps((1, 1, n + 1, n + 1), sharpness, seed)
    distance, nmi = attention_distance(maps, (rows, columns), prefix=1), attention_nmi(maps, prefix=1)
    assert 0 <= distance.item() <= math.hypot(rows - 1, columns - 1)
    assert -1e-9 <= nmi.item() <= 1 + 1e-9
    changed = maps.copy()
    changed[:, :, 0] = 1 / (n + 1)
    assert attention_nmi(changed, prefix=1) == nmi
    assert attention_distance(changed, (rows, columns), prefix=1) == distance
    mixed = np.random.default_rng(seed).permutation(n) + 1
    order = np.array([0, *mixed])
    assert attention_nmi(maps[:, :, order], prefix=1).item() == pytest.approx(nmi.item(), abs=1e-9)
    assert attention_nmi(maps[..., order], prefix=1).item() == pytest.approx(nmi.item(), abs=1e-9)
    turned = maps[:, :, 1:, 1:].reshape(rows, columns, rows, columns).transpose(1, 0, 3, 2).reshape(1, 1, n, n)
    assert attention_distance(turned, (columns, rows)).item() == pytest.approx(distance.item(), rel=1e-9)


def test_wrong_shapes_are_a_sentence() -> None:
    maps = random_maps((1, 1, 6, 6))
    with pytest.raises(InputError, match=r"6 tokens with 1 prefix tokens do not fit a grid of 2 × 3"):
        attention_distance(maps, (2, 3), prefix=1)
    with pytest.raises(InputError, match=r"got \(1, 1, 6, 5\)"):
        attention_nmi(maps[..., :5])
    with pytest.raises(InputError, match="a prefix of 6"):
        attention_nmi(maps, prefix=6)


# ---------------------------------------------------------------------------------------------------------------
# Without the whole map


LAYOUTS = [Tokens(1, 0, (14, 14)), Tokens(0, None, (4, 7)), Tokens(5, 0, (3, 2))]


@pytest.mark.parametrize("tokens", LAYOUTS)
@pytest.mark.parametrize("scale", [1e-3, 0.25, 2.0, 12.0])
def test_products_give_what_whole_maps_give(tokens: Tokens, scale: float) -> None:
    """The last scale overflows exp in float32 unless the maximum is taken off; its scores have an error of 1e-5."""
    product = product_of(tokens, scale)
    distance, nmi = distance_and_nmi(product, tokens)
    maps = ((product.q.double() * scale) @ product.k.double().mT).softmax(-1)
    loose = 20 if scale > 10 else 1
    np.testing.assert_allclose(distance, attention_distance(maps, tokens.grid, 1, tokens.prefix), rtol=loose * 1e-6)
    np.testing.assert_allclose(nmi, attention_nmi(maps, tokens.prefix), atol=loose * 1e-6)


@pytest.mark.parametrize("tokens", LAYOUTS)
@pytest.mark.parametrize("scale", [1e-3, 0.25, 2.0])
def test_map_times_values_is_left_in_the_product(tokens: Tokens, scale: float) -> None:
    product = product_of(tokens, scale, images=5)
    product.v = torch.randn(product.q.shape, generator=torch.Generator().manual_seed(2)).transpose(1, 2).contiguous()
    product.v = product.v.transpose(1, 2)  # in memory as a layer has it
    with torch.inference_mode():
        distance_and_nmi(product, tokens)
    maps = ((product.q.double() * scale) @ product.k.double().mT).softmax(-1)
    kernel = torch.nn.functional.scaled_dot_product_attention(product.q, product.k, product.v, scale=scale)
    assert product.output is not None
    ours, theirs = ((x - maps @ product.v.double()).abs().max() for x in (product.output, kernel))
    assert ours < 2 * theirs + 1e-7  # large scores are rounded, by the kernel just as here
    assert ours < (1e-5 if scale > 1 else 1e-6)
    assert product.output.transpose(1, 2).is_contiguous()


def test_the_kernel_stays_where_the_map_is_not_enough() -> None:
    """Scores that overflow, a bias, bf16, and gradients."""
    large, biased = product_of(LAYOUTS[2], 12.0), product_of(LAYOUTS[2], 0.25, torch.zeros(11, 11))
    rounded, plain = product_of(LAYOUTS[2], 0.25, dtype=torch.bfloat16), product_of(LAYOUTS[2], 0.25)
    for product in (large, biased, rounded):
        product.v = product.k
        with torch.inference_mode():
            distance_and_nmi(product, LAYOUTS[2])
        assert product.output is None
    plain.v = plain.k
    distance_and_nmi(plain, LAYOUTS[2])
    assert plain.output is None


@pytest.mark.parametrize("shape", [(3, 4, 11, 11), (1, 4, 11, 11), (4, 11, 11), (11, 11), (3, 1, 1, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_of_any_shape_and_bf16(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens = LAYOUTS[2]
    bias = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    product = product_of(tokens, 0.25, bias, dtype=dtype)
    before = product.q.clone()
    distance, nmi = distance_and_nmi(product, tokens)
    np.testing.assert_allclose(distance, attention_distance(product.map(), tokens.grid, 1, 5), rtol=1e-6)
    np.testing.assert_allclose(nmi, attention_nmi(product.map(), 5), atol=1e-6)
    assert torch.equal(before, product.q)


def test_chunks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    product = product_of(LAYOUTS[1], images=5)
    whole = distance_and_nmi(product, LAYOUTS[1])
    for maps in (1, 3, 4, 9):
        monkeypatch.setattr("sightline.measure.estimators.attention.CACHED", maps * 28**2 // 2)
        for part, expected in zip(distance_and_nmi(product, LAYOUTS[1]), whole, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-7)


def test_a_prefix_token_that_takes_nearly_all_attention() -> None:
    tokens = Tokens(1, 0, (2, 3))
    for strength in (5.0, 30.0, 300.0):
        bias = torch.zeros(7, 7)
        bias[:, 0] = strength
        product = product_of(tokens, 0.25, bias)
        distance, nmi = distance_and_nmi(product, tokens)
        alone = AttentionProduct(product.q[:, :, 1:], product.k[:, :, 1:], None, 0.25).map()
        np.testing.assert_allclose(distance, attention_distance(alone, (2, 3)), rtol=1e-6)
        assert nmi.isfinite().all()


def test_masked_rows_are_nan_and_known() -> None:
    tokens = Tokens(1, 0, (2, 3))
    bias = torch.zeros(3, 1, 7, 7)
    bias[1, :, 2, 1:] = -math.inf  # this query of the second image may attend to CLS alone
    bias[2, :, 2, 1:4] = -math.inf  # and this one to some patches
    product = product_of(tokens, 0.25, bias)
    for part in distance_and_nmi(product, tokens):
        assert part.isfinite().all(1).tolist() == [True, False, True]
    assert unattended(product, 1).tolist() == [False, True, False]
    whole = product.map()
    assert attention_nmi(whole, 1).isnan().all(1).tolist() == [False, True, False]
    assert attention_distance(whole, (2, 3), 1, 1).isnan().all(1).tolist() == [False, True, False]
    assert distance_and_nmi(product, tokens)[1][2].tolist() == pytest.approx(
        attention_nmi(whole, 1)[2].tolist(), abs=1e-6
    )


@pytest.mark.parametrize("shape", [(6, 6), (4, 6, 6), (1, 1, 6, 6), (3, 1, 6, 6), (1, 6), (1, 1, 1, 6), (6, 1)])
def test_a_mask_that_is_shared_is_known_for_every_image(shape: tuple[int, ...]) -> None:
    product = product_of(Tokens(0, None, (2, 3)), 0.25, torch.full(shape, -math.inf))
    assert unattended(product, 0).tolist() == [True] * product.shape[0]
    assert not unattended(product_of(Tokens(0, None, (2, 3)), 0.25, torch.zeros(shape)), 0).any()


# ---------------------------------------------------------------------------------------------------------------
# The pass


@pytest.fixture(scope="module")
def compared() -> tuple[dict[str, sl.Encoder], Any, xr.Dataset]:
    encoders = {
        "vit": sl.load_encoder(DEEPER),
        "registers": sl.load_encoder(DEEPER.replace("num_heads=3", "num_heads=4") + "&reg_tokens=2&seed=1"),
        "cnn": sl.load_encoder("timm:resnet18@random?size=32"),
    }
    images = sl.load_images("shapes?size=32", limit=20)
    return encoders, images, sl.analyze(encoders, images, ["attention"], batch=8, **OPTIONS)["attention"]


def whole_maps(encoder: sl.Encoder, images: Any) -> dict[str, torch.Tensor]:
    arrays = [item.image for item in images.source.read([int(i) for i in images.indices("test")])]
    with torch.inference_mode(), encoder.evaluating(), sl.capture(encoder, attention.SITES[:1]) as maps:
        encoder(encoder.preprocess(arrays))
    return maps


def test_the_pass_equals_whole_maps(compared: Any) -> None:
    encoders, images, result = compared
    assert result.encoder.values.tolist() == ["vit", "registers"]
    for name, prefix, heads in (("vit", 1, 3), ("registers", 3, 4)):
        for site, maps in whole_maps(encoders[name], images).items():
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


def test_measuring_changes_the_encoder_by_rounding_only(compared: Any, tmp_path: Any) -> None:
    """The layers go on with the map that was measured, so sites after them may differ in the last digits."""
    encoders, images, _ = compared
    vit = {"vit": encoders["vit"]}
    alone, beside = (
        sl.analyze(vit, images, names, batch=8, **OPTIONS)["spectra"]
        for names in (["spectra"], ["spectra", "attention"])
    )
    for name in alone.data_vars:
        if alone[name].dtype.kind == "f":
            np.testing.assert_allclose(beside[name], alone[name], rtol=1e-4, atol=1e-5, err_msg=str(name))


def test_a_map_that_is_not_the_layers_own_is_refused(compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(product: AttentionProduct, *_: Any) -> Any:
        product.output = product.v
        return torch.zeros(2, *product.shape[:2]).unbind()

    monkeypatch.setattr("sightline.analyses.attention.distance_and_nmi", wrong)
    fresh = sl.load_encoder(DEEPER)
    with pytest.raises(sl.InputError, match=r"block.0.attn_map.*differs from the layer's own output"):
        sl.analyze({"vit": fresh}, compared[1], ["attention"], batch=8, **OPTIONS)


def test_batching_changes_no_number(compared: Any) -> None:
    encoders, images, result = compared
    again = sl.analyze(encoders, images, ["attention"], batch=5, **OPTIONS)["attention"]
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
        maps = whole_maps(encoders[name], images)
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
    off = sl.analyze(encoders, images, {"attention": Config(viewer_images=0)}, batch=8, **OPTIONS)["attention"]
    assert not [name for name in off.variables if str(name).startswith("viewer")]
    with pytest.raises(InputError, match="0 or more"):
        Config(viewer_images=-1)
    large = Look(0, tuple(map(str, range(32))), 16, (16, 16))
    assert math.prod(large.shape) > VIEWER_BYTES >= math.prod(large.within(1).shape)
    assert large.within(1).side == 5
    assert Look(0, ("a",), 1, (2, 9), 3).queries == [1, 4, 7, 10, 13, 16]


def plan_for(encoders: Any, images: Any, tmp_path: Any) -> Any:
    from sightline.measure.plan import make_plans

    chosen = {"batch": 8, "seed": 0, "precision": "float32"}
    plans = make_plans(encoders, images, {"attention": Config()}, None, chosen, tmp_path, torch.device("cpu"))
    return plans["attention"]


def test_flaws_have_a_reason(compared: Any, tmp_path: Any) -> None:
    from sightline.images.pipeline import batches

    encoders, images, _ = compared
    metric = Analysis(Config(viewer_images=1), plan_for({"vit": encoders["vit"]}, images, tmp_path))
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
    result = Analysis.compute(metric)
    assert result.reason.values[0].tolist() == [
        "",
        "in 20 of 20 images a query may attend to no patch",
        "the activations are not finite (NaN or infinity) in 1 of 20 images",
    ]
    assert np.isfinite(result.nmi.values[0, 0]).all()
    assert np.isnan(result.nmi.values[0, 1:]).all()
    assert np.isnan(result.distance_mean.values[0, 1:]).all()


def test_maps_that_are_not_of_the_grid_have_a_reason(compared: Any, tmp_path: Any) -> None:
    import dataclasses

    encoders, images, _ = compared
    odd = dataclasses.replace(encoders["vit"], tokens=Tokens(1, 0, (2, 2)))
    plan = plan_for({"vit": encoders["vit"], "odd": encoders["registers"]}, images, tmp_path)
    plan = dataclasses.replace(plan, encoders={**plan.encoders, "odd": odd})
    metric = Analysis(Config(), plan)
    assert metric.problems[0] == ""
    assert metric.problems[3] == "the map has 19 × 19 tokens, but 1 prefix tokens and 2 × 2 patches are 5"
    assert list(metric.viewer.looks) == ["vit"]
    with pytest.raises(InputError, match="attention cannot be measured"):
        Analysis(Config(), dataclasses.replace(plan, encoders={"odd": odd}, sites={"odd": plan.sites["odd"]}))


def test_bytes_of_several_processes_add_up(compared: Any, tmp_path: Any) -> None:
    """torch sums bytes as int64; the result is bytes again."""
    encoders, images, _ = compared
    metric = Analysis(Config(), plan_for(encoders, images, tmp_path))
    metric.seen += 1
    metric.viewer_map_0 = torch.stack([metric.viewer_map_0, torch.full_like(metric.viewer_map_0, 255)]).sum(0)
    result = Analysis.compute(metric)
    assert result.viewer_map_0.dtype == np.uint8
    assert int(result.viewer_map_0.min()) == 255


def test_density_is_the_one_of_scipy(compared: Any) -> None:
    from scipy.stats import gaussian_kde

    _, _, result = compared
    _, heads, _ = charts._tables(result)
    curves = densities(heads, "nmi")
    for (encoder, third), rows in curves.groupby(["encoder", "third"]):
        values = heads[(heads.encoder == encoder) & (heads.third == third)].nmi.to_numpy()
        expected = gaussian_kde(values, rows.bandwidth.iloc[0] / values.std(ddof=1))(rows.value)
        np.testing.assert_allclose(rows.density, expected, rtol=1e-6, atol=1e-9)


def test_figures_and_headlines(compared: Any) -> None:
    _, _, result = compared
    found = {figure.name: figure for figure in charts.figures(result)}
    assert list(found) == ["distance", "nmi", "spread", "distance-heads", "nmi-heads"]
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
