"""The pass gives what the functions on arrays give, for all pairs of layers, with null, interval and reasons."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from support.plans import TEST, activations, computed, make_plan

from sightline.analyses import similarity
from sightline.analyses.similarity import SimilarityAnalysis, SimilarityConfig
from sightline.measure.estimators.similarity import angular_distance, mutual_knn, procrustes, pwcca, rsa, svcca
from sightline.measure.plan import Key, Plan
from sightline.report.explorer import pack_explorer

MEASURES = ("procrustes", "shape", "svcca", "pwcca", "rsa", "mutual_knn")
ALL = SimilarityConfig(measures=MEASURES, tokens=("mean", "cls", "all", "patches"), k=3, variance=0.8)
SPLITS = {"test": ("plain",)}
PLAIN = {
    "procrustes": procrustes,
    "shape": angular_distance,
    "svcca": lambda x, y: svcca(x, y, 0.8),
    "pwcca": lambda x, y: pwcca(x, y, 0.8),
    "rsa": rsa,
    "mutual_knn": lambda x, y: mutual_knn(x, y, 3),
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(tmp_path_factory.mktemp("cache"), views=SPLITS)


@pytest.fixture(scope="module")
def result(plan: Plan) -> xr.Dataset:
    found: xr.Dataset = computed(SimilarityAnalysis(ALL, plan), plan, activations(plan))
    return found


def features(plan: Plan, encoder: str, site: str, view: str) -> torch.Tensor | None:
    x = activations(plan)[Key(encoder, site, "plain")]
    if encoder == "cnn":
        return {"mean": x.mean((2, 3)), "all": x.flatten(1), "patches": x.flatten(1)}.get(view)
    return {"mean": x[:, 2:].mean(1), "cls": x[:, 0], "all": x.flatten(1), "patches": x[:, 2:].flatten(1)}[view]


@pytest.mark.parametrize("name", MEASURES)
def test_all_pairs_are_those_of_the_functions(name: str, plan: Plan, result: xr.Dataset) -> None:
    layers = [(encoder, site) for encoder, sites in plan.sites.items() for site in sites]
    count = 0
    for view, a, b in itertools.product(ALL.tokens, layers, layers):
        x, y = features(plan, *a, view), features(plan, *b, view)
        pair = {"encoder_a": a[0], "site_a": a[1], "encoder_b": b[0], "site_b": b[1]}
        value = float(result.similarity.sel(pair).sel(measure=name, tokens=view))
        if x is None or y is None:
            assert math.isnan(value)
        else:
            assert value == pytest.approx(PLAIN[name](x, y), abs=3e-7)
            count += 1
    assert count == 3 * 25 + 9


def test_interval_and_null(result: xr.Dataset) -> None:
    value, low, high, null = (result[f"similarity{end}"] for end in ("", "_low", "_high", "_null"))
    known = value.notnull()
    for part in (low, high, null.where(null.measure != "pwcca", value)):  # whose null may be undefined
        assert known.equals(part.notnull())
    assert bool(((low <= value) & (value <= high)).where(known, True).all())
    same = {"encoder_a": "vit", "encoder_b": "vit", "site_a": "norm", "site_b": "norm", "tokens": "mean"}
    for name in MEASURES:
        ends = [float(part.sel(same, drop=True).sel(measure=name)) for part in (low, value, high)]
        assert ends == pytest.approx([0, 0, 0] if name == "shape" else [1, 1, 1], abs=1e-6)
    other = {"encoder_a": "vit", "encoder_b": "cnn", "site_a": "norm", "site_b": "block.1", "tokens": "mean"}
    of_pair = {part: float(result[part].sel(other).sel(measure="rsa")) for part in ("similarity", "similarity_null")}
    assert abs(of_pair["similarity_null"]) < 0.2 < of_pair["similarity"]  # both know the class
    shuffled = float(null.sel(other).sel(measure="mutual_knn"))
    assert shuffled == pytest.approx(3 / (TEST - 1), abs=0.1)  # chance


def test_pairs_are_symmetric(result: xr.Dataset) -> None:
    turned = {"encoder_a": "encoder_b", "encoder_b": "encoder_a", "site_a": "site_b", "site_b": "site_a"}
    for end in ("", "_low", "_high", "_null"):
        values = result[f"similarity{end}"].reset_coords(drop=True)
        np.testing.assert_array_equal(values, values.rename(turned).transpose(*values.dims))


def test_in_short_the_closest_has_the_smallest_distance(result: xr.Dataset) -> None:
    vit = result.sel(encoder_a="vit", encoder_b="vit", tokens="mean", site_a="block.1")
    assert vit.row_argmax.sel(measure=["procrustes", "shape"]).values.tolist() == ["block.1", "block.1"]
    assert vit.row_max.sel(measure=["procrustes", "shape"]).values.tolist() == pytest.approx([1, 0], abs=1e-6)
    across = result.sel(encoder_a="vit", encoder_b="cnn", tokens="mean", site_a="block.1")
    both = across.row_max.sel(measure=["procrustes", "shape"]).values
    assert math.cos(both[1]) == pytest.approx(both[0], abs=1e-9)


def test_reasons(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, views=SPLITS)
    data = activations(plan)
    data[Key("vit", "block.0", "plain")][:] = 0.1
    data[Key("cnn", "block.1", "plain")][5] = torch.nan
    found = computed(SimilarityAnalysis(SimilarityConfig(tokens=("mean", "cls")), plan), plan, data)
    reason = found.reason.sel(tokens="mean")
    assert reason.sel(encoder="vit", site="block.0") == "the activations are the same for all images"
    assert "not finite" in str(reason.sel(encoder="cnn", site="block.1").item())
    assert reason.sel(encoder="cnn", site="norm") == "this encoder has no such site"
    assert found.reason.sel(tokens="cls", encoder="cnn", site="block.0") == "this site has no such token view"
    whole = found.similarity.sel(tokens="mean", encoder_a="vit", site_a="norm", encoder_b="vit", site_b="block.1")
    assert whole.notnull().all()
    bad = found.similarity.sel(tokens="mean", encoder_a="vit", site_a="norm", encoder_b="vit", site_b="block.0")
    assert bad.isnull().all()


def test_neighbours_of_which_there_are_no_others_tell_nothing(plan: Plan) -> None:
    """Of k + 1 images each has all others as neighbours in any layer; of one more it may miss one, and they differ."""
    for k in (TEST - 1, TEST - 2):
        config = SimilarityConfig(measures=("rsa", "mutual_knn"), tokens=("mean",), k=k, bootstrap=20)
        found = computed(SimilarityAnalysis(config, plan), plan, activations(plan))
        pair = {"encoder_a": "vit", "site_a": "norm", "encoder_b": "cnn", "site_b": "block.0", "tokens": "mean"}
        value = found.similarity.sel(pair)
        assert np.isfinite(value.sel(measure="rsa"))
        if k == TEST - 1:
            assert found.similarity.sel(measure="mutual_knn").isnull().all()
            assert found.similarity_null.sel(measure="mutual_knn").isnull().all()
            why = f"all of {TEST} images are among the {k} nearest neighbours of each other"
            assert found.measure_reason.values.tolist() == ["", why]
            assert similarity.figures(found)
        else:
            x, y = (features(plan, *layer, "mean") for layer in (("vit", "norm"), ("cnn", "block.0")))
            assert float(value.sel(measure="mutual_knn")) == pytest.approx(mutual_knn(x, y, k))
            assert 1 - 1 / k <= float(value.sel(measure="mutual_knn")) < 1
            assert found.measure_reason.values.tolist() == ["", ""]


def test_images_in_one_direction_have_no_nearest(tmp_path: Path) -> None:
    """Mutual k-NN says so and has no value; the other measures of that layer have."""
    plan = make_plan(tmp_path, views=SPLITS)
    data = activations(plan)
    lengths = torch.arange(1.0, 1 + len(plan.images.labels))
    data[Key("vit", "norm", "plain")][:] = lengths[:, None, None] * torch.arange(6.0)
    data[Key("cnn", "block.0", "plain")] = 1 + 5e-6 * data[Key("cnn", "block.0", "plain")]
    config = SimilarityConfig(measures=("procrustes", "mutual_knn"), tokens=("mean", "cls"), k=3, bootstrap=20)
    found = computed(SimilarityAnalysis(config, plan), plan, data)
    value = found.similarity.sel(tokens="mean", encoder_a="vit", site_a="norm", encoder_b="vit")
    assert value.sel(measure="procrustes").notnull().all()
    for end in ("", "_low", "_high", "_null"):
        near = found[f"similarity{end}"].sel(measure="mutual_knn", tokens="mean")
        assert near.sel(encoder_a="vit", site_a="norm").isnull().all()
        assert near.sel(encoder_a="vit", encoder_b="vit", site_b="norm").isnull().all()
        blocks = near.sel(encoder_a="vit", site_a="block.1", encoder_b="vit", site_b=["block.0", "block.1"])
        assert blocks.notnull().all()
    assert (found.reason.sel(encoder="vit", tokens="mean") == "").all()
    why = "all images have the same direction, so that none is nearer than another"
    assert found.measure_reason.values.tolist() == ["", f"{why}, in norm of vit (mean), norm of vit (cls)"]
    hardly = data[Key("cnn", "block.0", "plain")].mean((2, 3))
    other = data[Key("vit", "block.0", "plain")][:, 2:].mean(1)
    pair = {"encoder_a": "cnn", "site_a": "block.0", "encoder_b": "vit", "site_b": "block.0", "tokens": "mean"}
    assert float(found.similarity.sel(pair).sel(measure="mutual_knn")) == pytest.approx(mutual_knn(hardly, other, 3))
    assert similarity.figures(found)


def test_a_sample_is_bounded_and_the_same_for_all(plan: Plan) -> None:
    small = SimilarityConfig(measures=("rsa", "mutual_knn"), tokens=("mean",), sample=10, k=20)
    found = computed(SimilarityAnalysis(small, plan), plan, activations(plan))
    assert (found.attrs["sample"], found.attrs["k"]) == (10, 9)
    own = found.similarity.sel(encoder_a="vit", encoder_b="vit", site_a="block.0", site_b="block.0", tokens="mean")
    assert own.values.tolist() == pytest.approx([1, np.nan], nan_ok=True)  # all others are neighbours
    random = np.random.Generator(np.random.Philox(plan.seed)).permutation(TEST)[:10]
    x, y = (features(plan, encoder, "block.1", "mean") for encoder in ("vit", "cnn"))
    pair = found.similarity.sel(encoder_a="vit", encoder_b="cnn", site_a="block.1", site_b="block.1", tokens="mean")
    assert float(pair.sel(measure="rsa")) == pytest.approx(rsa(x[random], y[random]), abs=1e-6)


def test_the_linked_view_offers_every_measure(result: xr.Dataset) -> None:
    packed = pack_explorer(result, similarity.TITLE)
    assert packed is not None
    assert packed["tokens"] == ["mean", "cls", "all", "patches"]
    assert [measure["name"] for measure in packed["measures"]] == list(MEASURES)
    titles = {measure["name"]: measure["title"] for measure in packed["measures"]}
    assert titles == {name: similarity.MEASURES[name].title for name in MEASURES}
    assert [measure["name"] for measure in packed["measures"] if measure["distance"]] == ["shape"]
    farthest = max(float(result[f"similarity{end}"].sel(measure="shape").max()) for end in ("", "_high", "_null"))
    assert {measure["name"]: measure["top"] for measure in packed["measures"]} == {
        name: pytest.approx(farthest, abs=1e-4) if name == "shape" else 1 for name in MEASURES
    }
    assert packed["values"]["value"]["symmetric"]


def test_the_page_shows_one_measure_at_a_time(result: xr.Dataset) -> None:
    found = similarity.figures(result)
    assert list(dict.fromkeys(figure.choice for figure in found)) == list(MEASURES)
    for name in MEASURES:
        own = [(figure.name, figure.linked, figure.folded) for figure in found if figure.choice == name]
        assert own == [
            (f"{name}-pairs", True, False),
            (f"{name}-depth", False, False),
            (f"{name}-closest", False, False),
            (f"{name}-distance", False, True),
            (f"{name}-distance-across", False, True),
        ]


def test_figures_of_a_distance_rise(result: xr.Dataset) -> None:
    figures = {figure.name: figure for figure in similarity.figures(result)}
    assert {"procrustes-pairs", "shape-pairs", "rsa-depth", "mutual_knn-distance"} <= set(figures)
    assert "slow rise" in figures["shape-distance"].caption
    assert "slow fall" in figures["rsa-distance"].caption
    closest = figures["shape-closest"].table
    assert closest.value.max() < math.pi / 2
    assert [line[2].split(",")[0] for line in similarity.headlines(result)] == [
        similarity.MEASURES[name].title for name in MEASURES
    ]
