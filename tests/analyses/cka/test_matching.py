"""What the matrix of all pairs says in short, against plain loops; the study of batch sizes; figures and headlines."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vl_convert
import xarray as xr
from support.passes import OPTIONS, measured
from support.references import SMALL
from support.results import cka_result, vit_sites

from sightline import Images, analyze, load_encoder
from sightline.analyses.cka import CkaConfig
from sightline.analyses.cka.charts import figures, headlines, study_figure
from sightline.analyses.cka.matching import depths_of, layers_of_same_depth, summaries
from sightline.core.errors import InputError
from sightline.core.results import ABSENT
from sightline.measure.estimators.cka import cka, study
from sightline.measure.layers import Layers
from sightline.report.tables import tables

SITES = {
    "vit": ["embed", *(site for i in range(4) for site in (f"block.{i}.qkv", f"block.{i}"))],
    "mae": [*(f"block.{i}" for i in range(4)), *(f"decoder.block.{i}" for i in range(2))],
    "resnet": [site for i in range(6) for site in (f"block.{i}.residual", f"block.{i}")],
}
TOKENS = ["all", "mean"]


def matrix(sites: dict[str, list[str]], seed: int = 0) -> xr.Dataset:
    """A symmetric matrix of random values between all layers, as the analysis gives it."""
    layers = Layers(sites)
    coords = layers.coords()
    names, every = coords["encoder"], coords["site"]
    values = np.random.default_rng(seed).random((2, len(layers), len(layers)))
    values = (values + values.transpose(0, 2, 1)) / 2
    values[:, range(len(layers)), range(len(layers))] = 1
    full = np.full((2, len(names), len(names), len(every), len(every)), np.nan)
    for i, (a, s) in enumerate(layers):
        for j, (b, t) in enumerate(layers):
            full[:, names.index(a), names.index(b), every.index(s), every.index(t)] = values[:, i, j]
    reason = [[["" if s in sites[a] else ABSENT for s in every] for a in names]] * 2
    pair = ("tokens", "encoder_a", "encoder_b", "site_a", "site_b")
    return xr.Dataset(
        {
            "cka": (pair, full),
            **{f"cka_{part}": (pair, full + step) for part, step in (("low", -0.1), ("high", 0.1), ("null", -0.5))},
            "reason": (("tokens", "encoder", "site"), reason),
        },
        coords={
            "tokens": TOKENS,
            **coords,
            **{f"encoder_{x}": names for x in "ab"},
            **{f"site_{x}": every for x in "ab"},
        },
    )


def said(result: xr.Dataset, **depths: int) -> xr.Dataset:
    """The same result, which says how many blocks its encoders have."""
    about = [{"name": name, "depth": depth} for name, depth in depths.items()]
    return result.assign_attrs(provenance=json.dumps({"encoders": about}))


@pytest.fixture(scope="module")
def result() -> xr.Dataset:
    return matrix(SITES)


@pytest.fixture(scope="module", params=[{}, {"vit": 4, "mae": 4, "resnet": 6}], ids=["ranks", "depths"])
def short(result: xr.Dataset, request: pytest.FixtureRequest) -> xr.Dataset:
    """Where all blocks are there, it makes no difference whether the result says how many an encoder has."""
    return summaries(said(result, **request.param))


def kind(site: str) -> str:
    return {"embed": "embed"}.get(site, site.split(".")[-1] if site.split(".")[-1].isalpha() else "block")


def test_row_maximum(result: xr.Dataset, short: xr.Dataset) -> None:
    for a, b in ((a, b) for a in SITES for b in SITES):
        for site in SITES[a]:
            at = {"tokens": "mean", "encoder_a": a, "encoder_b": b, "site_a": site}
            others = [other for other in SITES[b] if kind(other) == kind(site)]
            if not others:
                assert np.isnan(short.row_max.sel(at))
                assert short.row_argmax.sel(at) == ""
                continue
            values = {other: float(result.cka.sel({**at, "site_b": other})) for other in others}
            assert str(short.row_argmax.sel(at).values) == max(values, key=lambda other: values[other])
            assert float(short.row_max.sel(at)) == max(values.values())
    assert "decoder.block" in "".join(short.row_argmax.sel(encoder_a="vit", encoder_b="mae").values.flat)
    absent = short.sel(encoder_a="mae", site_a="embed")
    assert absent.row_max.isnull().all()
    assert (absent.row_argmax == "").all()


def test_the_diagonal_pairs_layers_of_one_kind_and_depth(result: xr.Dataset, short: xr.Dataset) -> None:
    def twin(a: str, b: str, site: str) -> str:
        return str(short.diagonal_site.sel(tokens="all", encoder_a=a, encoder_b=b, site_a=site).values)

    assert [twin("vit", "mae", f"block.{i}") for i in range(4)] == [f"block.{i}" for i in range(4)]
    # 0, 1/3, 2/3, 1 among 0, 1/5, …, 1
    assert [twin("vit", "resnet", f"block.{i}") for i in range(4)] == ["block.0", "block.2", "block.3", "block.5"]
    assert twin("mae", "mae", "decoder.block.1") == "decoder.block.1"
    for nothing in (("mae", "vit", "decoder.block.1"), ("vit", "mae", "block.1.qkv"), ("vit", "vit", "block.5")):
        assert twin(*nothing) == ""
    for a, b, site in (("vit", "resnet", "block.2"), ("resnet", "mae", "block.3")):
        at = {"tokens": "mean", "encoder_a": a, "encoder_b": b, "site_a": site}
        twin_site = str(short.diagonal_site.sel(at).values)
        value = result.cka.sel({**at, "site_b": twin_site})
        assert float(short.diagonal.sel(at)) == float(value)


@pytest.mark.parametrize(("a", "b"), [("vit", "vit"), ("vit", "mae"), ("mae", "vit"), ("vit", "resnet")])
def test_mean_over_distance(result: xr.Dataset, short: xr.Dataset, a: str, b: str) -> None:
    n, m = ({"vit": 4, "mae": 4, "resnet": 6}[name] for name in (a, b))
    near: dict[int, list[float]] = {}
    for i in range(n):
        for j in range(i if a == b else 0, m):
            apart = abs(i / (n - 1) - j / (m - 1))
            at = {"encoder_a": a, "encoder_b": b, "site_a": f"block.{i}", "site_b": f"block.{j}", "tokens": "all"}
            near.setdefault(round(apart * (min(n, m) - 1)), []).append(float(result.cka.sel(at)))
    found = short.sel(encoder_a=a, encoder_b=b, tokens="all")
    for step, values in near.items():
        assert float(found.distance_cka.sel(distance=step)) == pytest.approx(np.mean(values), abs=1e-12)
        assert int(found.distance_pairs.sel(distance=step)) == len(values)
        assert float(found.relative_distance.sel(distance=step)) == pytest.approx(step / 3)
    assert np.isnan(found.distance_cka.sel(distance=slice(4, None))).all()
    if (n, a) == (m, b):
        own = result.cka.sel(encoder_a=a, encoder_b=a, tokens="all")
        blocks = [f"block.{i}" for i in range(n)]
        plain = np.diagonal(own.sel(site_a=blocks, site_b=blocks), 1).mean()
        assert float(found.distance_cka.sel(distance=1)) == pytest.approx(plain)


def test_a_layer_without_value_is_left_out_of_the_means() -> None:
    result = matrix({"a": ["block.0", "block.1", "block.2"]})
    expected = float(result.cka.isel(tokens=0).sel(site_a="block.0", site_b="block.1").item())
    for side in ("site_a", "site_b"):
        result.cka.loc[{side: "block.2"}] = np.nan
    found = summaries(result).isel(tokens=0, encoder_a=0, encoder_b=0)
    assert float(found.distance_cka.sel(distance=1)) == expected
    assert int(found.distance_pairs.sel(distance=1)) == 1
    assert np.isnan(found.distance_cka.sel(distance=2))


def test_no_block_has_no_distance() -> None:
    found = summaries(matrix({"a": ["embed", "norm"], "b": ["block.0", "block.1"]}))
    assert found.distance_cka.sel(encoder_a="a").isnull().all()
    assert found.relative_distance.sel(encoder_a="a").isnull().all()


def test_one_block_is_the_last_of_as_many_as_it_says() -> None:
    result = matrix({"a": ["block.3"], "b": ["block.0", "block.1"]})
    found = summaries(result).isel(tokens=0).sel(encoder_a="a")
    assert found.distance_pairs.sel(encoder_b="a").values.tolist() == [1, 0]
    cka = result.cka.isel(tokens=0).sel(encoder_a="a", encoder_b="b", site_a="block.3")
    across = found.distance_cka.sel(encoder_b="b").values
    assert across.tolist() == [float(cka.sel(site_b=site)) for site in ("block.1", "block.0")]


# Some blocks alone


def known(*encoders: tuple[int, list[str]]) -> Any:
    """Depths as an analysis knows them, of encoders with so many blocks and these sites."""
    made: Any = [SimpleNamespace(depth=depth, sites=sites) for depth, sites in encoders]
    return depths_of(made)


def test_blocks_are_as_far_apart_as_their_numbers() -> None:
    result = matrix({"a": ["block.0", "block.11"]})
    own = result.cka.isel(tokens=0, encoder_a=0, encoder_b=0)
    found = summaries(said(result, a=12)).isel(tokens=0, encoder_a=0, encoder_b=0)
    assert found.distance_pairs.values.tolist() == [2, *[0] * 10, 1]
    assert float(found.distance_cka.sel(distance=11)) == float(own.sel(site_a="block.0", site_b="block.11"))
    assert found.distance_cka.sel(distance=slice(1, 10)).isnull().all()
    np.testing.assert_array_equal(found.relative_distance, np.arange(12) / 11)


def test_the_depth_is_that_of_the_encoder_where_its_last_blocks_are_left_out() -> None:
    """From what the result says; from what the analysis knows, which counts for more; else from the sites."""
    result = matrix({"a": ["block.0", "block.5"]})
    twelve = known((12, ["block.0"]))
    for found in (summaries(said(result, a=12)), summaries(said(result, a=6), depths=twelve)):
        one = found.isel(tokens=0, encoder_a=0, encoder_b=0)
        np.testing.assert_array_equal(one.relative_distance, np.arange(6) / 11)
        assert one.row_depth.values.tolist() == [0, 5 / 12]
    one = summaries(result).isel(tokens=0, encoder_a=0, encoder_b=0)
    np.testing.assert_array_equal(one.relative_distance, np.arange(6) / 5)
    assert one.row_depth.values.tolist() == [0, 5 / 6]


@pytest.fixture(scope="module")
def chosen() -> xr.Dataset:
    """As from `--sites 'block.1*'` of encoders of 12 and 24 blocks."""
    deep = ["block.1", *(f"block.{n}" for n in range(10, 20))]
    return said(matrix({"small": ["block.1", "block.10", "block.11"], "large": deep}), small=12, large=24)


def test_layers_of_the_same_depth_among_some_blocks(chosen: xr.Dataset) -> None:
    found = summaries(chosen).isel(tokens=0)

    def twins(a: str, b: str) -> dict[str, str]:
        row = found.diagonal_site.sel(encoder_a=a, encoder_b=b)
        return {str(site): str(row.sel(site_a=site).values) for site in row.site_a.values if row.sel(site_a=site) != ""}

    assert twins("small", "large") == {"block.1": "block.1", "block.10": "block.19", "block.11": "block.19"}
    back = twins("large", "small")
    for n in (1, *range(10, 20)):
        assert back[f"block.{n}"] == f"block.{min((1, 10, 11), key=lambda m, n=n: abs(m / 11 - n / 23))}"
    at = {"encoder_a": "small", "encoder_b": "large", "site_a": "block.10"}
    cka = chosen.cka.isel(tokens=0).sel(at)
    assert float(found.diagonal.sel(at)) == float(cka.sel(site_b="block.19"))


def test_means_over_distance_among_some_blocks(chosen: xr.Dataset) -> None:
    near: dict[int, list[float]] = {}
    cka = chosen.cka.isel(tokens=0).sel(encoder_a="small", encoder_b="large")
    for i in (1, 10, 11):
        for j in (1, *range(10, 20)):
            pair = cka.sel(site_a=f"block.{i}", site_b=f"block.{j}")
            near.setdefault(round(abs(i / 11 - j / 23) * 11), []).append(float(pair))
    found = summaries(chosen).isel(tokens=0).sel(encoder_a="small", encoder_b="large")
    assert {int(step) for step in found.distance.values[found.distance_pairs > 0]} == set(near)
    for step, values in near.items():
        assert float(found.distance_cka.sel(distance=step)) == pytest.approx(np.mean(values), abs=1e-12)
        assert float(found.relative_distance.sel(distance=step)) == pytest.approx(step / 11)
    assert found.relative_distance.values[np.isfinite(found.distance_cka)].max() <= 1


def test_figures_leave_out_distances_that_no_pair_has() -> None:
    sites = {name: ["block.0", "block.11"] for name in "ab"}
    result = said(matrix(sites), a=12, b=12)
    found = {figure.name: figure for figure in figures(result)}
    assert found["distance"].table[["series", "distance", "depth"]].values.tolist() == [["a", 11, 1.0], ["b", 11, 1.0]]
    assert found["distance-across"].table[["distance", "depth"]].values.tolist() == [[0, 0.0], [11, 1.0]]
    for figure in found.values():
        assert vl_convert.vegalite_to_svg(figure.chart.to_dict()).startswith("<svg")


def test_some_blocks_of_a_decoder() -> None:
    """Of decoders of 8 and of 4 blocks: 3/7 is nearest to 1/3, although it is the last of those chosen."""
    sites = np.array(["decoder.block.0", "decoder.block.1", "decoder.block.3"])
    has = np.array([[True, False, True], [True, True, True]])
    every = [[f"decoder.block.{n}" for n in range(depth)] for depth in (8, 4)]
    found = layers_of_same_depth(sites, has, known((12, every[0]), (12, every[1])))
    assert found[0, 1].tolist() == [0, -1, 1]
    assert found[1, 0].tolist() == [0, 2, 2]


def test_layers_outside_the_blocks_go_by_their_rank() -> None:
    sites = np.array([f"stage.{n}.conv" for n in (0, 1, 4, 7)] + ["head.0", "head.2", "head.3"])
    has = np.array([[True] * 7, [True, False, False, True, True, False, True]])
    found = layers_of_same_depth(sites, has, known((0, list(sites)), (0, list(sites))))
    assert found[0, 1].tolist() == [0, 0, 3, 3, 4, 4, 6]
    assert found[1, 0].tolist() == [0, -1, -1, 3, 4, -1, 6]


def test_the_pass_knows_how_deep_encoders_are(images: Images) -> None:
    """Before the result says so; kept for contrasts with the same distances."""
    deep = SMALL.replace("depth=2", "depth=6")
    encoders = {"a": load_encoder(SMALL.replace("depth=2", "depth=4")), "b": load_encoder(deep)}
    config = {"cka": CkaConfig(tokens=("mean",), bootstrap=20)}
    run = analyze(encoders, images, config, sites=["block.0", "block.2"], **OPTIONS)
    found = run["cka"].isel(tokens=0)
    own = found.sel(encoder_a="b", encoder_b="b")
    assert own.distance_pairs.values.tolist() == [2, 0, 1]
    np.testing.assert_array_equal(own.relative_distance, np.arange(3) / 5)
    assert own.row_depth.sel(site_a="block.2") == 2 / 6
    across = found.sel(encoder_a="a", encoder_b="b")  # 0 and 2/3 with 0 and 2/5, in thirds
    assert across.distance_pairs.values.tolist() == [1, 2, 1]
    assert across.diagonal_site.values.tolist() == ["block.0", "block.2"]
    for name, known in (("a", across), ("b", own)):
        for distance in known.distance.values[np.isfinite(known.distance_cka)]:
            estimate = run.estimate("cka.distance_cka", encoder=name, other="b", distance=distance, tokens="mean")
            assert estimate.value == float(known.distance_cka.sel(distance=distance))
            groups = next(iter(estimate.left_out.values()))
            assert np.isfinite(groups).all()
            assert np.ptp(groups) > 0 or (name, distance) == ("b", 0)  # a layer with itself
    again = summaries(run["cka"])  # from what the result says
    for name in again.data_vars:
        xr.testing.assert_equal(again[name].reset_coords(drop=True), run["cka"][name].reset_coords(drop=True))


def test_decoder_blocks_are_named_by_their_site(result: xr.Dataset) -> None:
    at = {"encoder_a": "vit", "encoder_b": "mae", "site_a": "block.3", "site_b": "decoder.block.1"}
    result = result.copy(deep=True)
    result.cka.loc[at] = 2.0
    label, number, detail = next(line for line in headlines(result) if line[0] == "vit × mae")
    assert (label, number) == ("vit × mae", "2.00")
    assert detail.startswith("closest: block.3 and decoder.block.1, 95 % ")


def test_headlines_of_one_encoder_and_of_one_batch() -> None:
    result = matrix({"a": ["block.0", "block.1", "block.2"]})
    value = float(result.cka.isel(tokens=0).sel(site_a="block.0", site_b="block.2").item())
    whole = f"block.0 with block.2, 95 % {value - 0.1:.2f} – {value + 0.1:.2f}"
    assert headlines(result) == [("a", f"{value:.2f}", whole)]
    unknown = result.assign(cka_low=result.cka * np.nan, cka_high=result.cka * np.nan)
    assert headlines(unknown) == [("a", f"{value:.2f}", "block.0 with block.2")]
    assert headlines(result.assign(cka=result.cka * np.nan)) == []


def test_figures(result: xr.Dataset) -> None:
    found = {figure.name: figure for figure in figures(result)}
    assert list(found) == ["pairs", "depth", "distance", "closest", "distance-across", "residual"]
    for figure in found.values():
        assert vl_convert.vegalite_to_svg(figure.chart.to_dict()).startswith("<svg")
    table = found["closest"].table.set_index(["encoder_a", "series", "site"])
    short = summaries(result).isel(tokens=0)
    row = table.loc[("resnet", "vit", "block.4")]
    at = {"encoder_a": "resnet", "encoder_b": "vit", "site_a": "block.4"}
    assert row.value == float(short.row_max.sel(at))
    assert row.site_b == str(short.row_argmax.sel(at).values)
    assert row.low == pytest.approx(row.value - 0.1)
    across = found["distance-across"].table
    assert set(across.series) == {"vit × mae", "vit × resnet", "mae × resnet"}
    assert across[across.series == "vit × mae"].depth.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_odd_layers_are_before_the_addition_and_even_ones_after(result: xr.Dataset) -> None:
    table = {figure.name: figure for figure in figures(result)}["residual"].table
    assert table.groupby("layers", sort=False).size().to_dict() == {
        "resnet × resnet, all": 144,
        "resnet × resnet, odd": 36,
        "resnet × resnet, even": 36,
    }
    for row in table.itertuples():
        block, residual = divmod(row.row - 1, 2)
        assert row.site_a == f"block.{block}" + ("" if residual else ".residual")
    odd = table[table.layers.str.endswith("odd")]
    assert odd.site_b.str.endswith("residual").all()


def test_exported_tables_name_layer_types_and_blocks_of_both_sides(images: Images) -> None:
    result = measured("cka", {"a": load_encoder(SMALL)}, images, CkaConfig(tokens=("mean",)), batch=20)
    found = tables(result, "cka")
    assert list(found) == ["cka", "cka-class_cka", "cka-row_max", "cka-distance_cka"]
    row = found["cka"].query("site_a == 'block.1.qkv' and site_b == 'block.0'").iloc[0]
    assert (row.layer_type_a, row.block_a, row.layer_type_b, row.block_b) == ("qkv", 1, "block", 0)
    row = found["cka-row_max"].query("site_a == 'block.1.qkv'").iloc[0]
    assert (row.row_argmax, row.diagonal_site, row.layer_type_a) == ("block.1.qkv", "block.1.qkv", "qkv")
    # One batch: there is no interval, and no headline tells of one.
    assert all("nan" not in detail for *_, detail in headlines(result))


# The study


def test_study_is_cka_of_random_batches() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(90, 7))
    y = x @ random.normal(size=(7, 5)) + random.normal(size=(90, 5))
    found = study(x, torch.from_numpy(y), [8, 32, 64], [40, 90], draws=3, seed=5)
    generator = np.random.Generator(np.random.Philox(5))
    orders = [generator.permutation(90) for _ in range(3)]
    for count in (40, 90):
        for batch in (8, 32, 64):
            values = [cka(x[order[:count]], y[order[:count]], batch) for order in orders]
            at = {"count": count, "batch": batch}
            assert float(found["mean"].sel(at)) == pytest.approx(np.mean(values), abs=1e-12)
            assert float(found["std"].sel(at)) == pytest.approx(np.std(values), abs=1e-12)
    figure = study_figure(found)
    assert len(figure.table) == 6
    assert vl_convert.vegalite_to_svg(figure.chart.to_dict()).startswith("<svg")
    # All at once: batches do not matter.
    assert float(found["std"].sel(count=90, batch=64)) > 0
    assert float(study(x, y, [128], draws=3)["std"].item()) == pytest.approx(0, abs=1e-12)


def test_the_estimate_does_not_depend_on_the_batch_size() -> None:
    """Within the spread of its draws; the biased one of small batches would be far off."""
    random = np.random.default_rng(1)
    x = random.normal(size=(512, 64))
    y = x[:, :32] + 2 * random.normal(size=(512, 32))
    found = study(x, y, [8, 16, 64, 512], draws=6)["mean"].values[0]
    assert np.ptp(found) < 0.02
    assert cka(x[:8], y[:8], unbiased=False) > found.max() + 0.3


def test_study_refuses_what_it_cannot_draw() -> None:
    x = np.random.default_rng(0).normal(size=(20, 3))
    for options in ({"counts": [21]}, {"batches": []}, {"draws": 0}):
        with pytest.raises(InputError, match="A study of CKA needs"):
            study(x, x, **options)


def test_of_many_encoders_each_has_a_panel_with_all_others() -> None:
    sites = {name: vit_sites(3) for name in "abcd"}
    result = cka_result(sites)
    figure = next(one for one in figures(result) if one.name == "distance-across")
    pairs = figure.table.groupby(["encoder_a", "series"]).value.mean()
    assert len(pairs) == 4 * 3  # both ways
    assert all(pairs[a, b] == pytest.approx(pairs[b, a]) for a, b in pairs.index)
    blocks = [site for site in sites["a"] if site.count(".") == 1 and site.startswith("block")]
    same = result.cka.isel(tokens=0).sel(encoder_a="a", encoder_b="b", site_a=blocks, site_b=blocks)
    shown = figure.table.query("encoder_a == 'a' and series == 'b' and distance == 0").value.item()
    assert shown == pytest.approx(float(np.diagonal(same).mean()))
    few = next(one for one in figures(cka_result({n: vit_sites(3) for n in "abc"})) if one.name == "distance-across")
    assert list(dict.fromkeys(few.table.series)) == ["a × b", "a × c", "b × c"]
