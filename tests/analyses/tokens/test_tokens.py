"""Token clouds: silhouettes against loops and scikit-learn, clouds against a full decomposition, and the stream."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import silhouette_score
from support.passes import measured
from support.references import SMALL

from sightline import capture, load_encoder, load_images
from sightline.analyses import tokens as module
from sightline.analyses.tokens import TokensAnalysis, TokensConfig, silhouette, token_clouds
from sightline.core.errors import InputError
from sightline.encoders.sites import Tokens
from sightline.images.sets import Images
from sightline.measure.contract import result_of
from sightline.measure.plan import Key

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


# The pure functions


def plain(tokens: Array, groups: Array) -> float:
    """The definition, token by token."""
    scores = []
    for i, x in enumerate(tokens):
        distances = np.sqrt(((tokens - x) ** 2).sum(1))
        means = {g: distances[(groups == g) & (np.arange(len(tokens)) != i)] for g in np.unique(groups)}
        own = means.pop(groups[i])
        if not len(own):
            scores.append(0.0)
            continue
        a, b = own.mean(), min(others.mean() for others in means.values())
        scores.append(0.0 if a == b == 0 else (b - a) / max(a, b))
    return float(np.mean(scores))


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 24), st.integers(1, 6), st.integers(2, 4), st.integers(0, 99))
def test_silhouette_is_the_definition(n: int, d: int, groups: int, seed: int) -> None:
    tokens = normal(n, d, seed=seed)
    of = np.random.default_rng(seed).integers(0, groups, n)
    of[:2] = 0, 1
    assert silhouette(tokens, of) == pytest.approx(plain(tokens, of), abs=1e-12)
    if len(np.unique(of)) < n:
        assert silhouette(tokens, of) == pytest.approx(silhouette_score(tokens, of), abs=1e-12)


def test_silhouette_does_not_see_rotation_scale_translation_order() -> None:
    tokens, of = normal(30, 8) + np.repeat(normal(3, 8, seed=1), 10, 0), np.repeat([4, 1, 7], 10)
    rotation = np.linalg.qr(normal(8, 8))[0]
    found = silhouette(tokens, of)
    assert silhouette(37.5 * tokens[::-1] @ rotation + 100, of[::-1]) == pytest.approx(found, abs=1e-10)
    names = np.array(["c", "a", "d"])[np.unique(of, return_inverse=True)[1]]
    assert silhouette(tokens, names) == found
    assert silhouette(torch.from_numpy(tokens), torch.from_numpy(of)) == found


def test_equal_tokens_are_at_no_distance_and_bad_ones_give_no_number() -> None:
    """Rounding must not make a distance of two equal tokens: (b − a) / max(a, b) would take it for one."""
    tokens = np.repeat(normal(2, 5) + 1000, 6, 0)
    assert silhouette(tokens, np.repeat([0, 1], 6)) == 1.0
    assert silhouette(tokens, np.tile([0, 1], 6)) == pytest.approx(plain(tokens, np.tile([0, 1], 6)), abs=1e-12)
    assert silhouette(np.full((6, 3), 0.3), np.arange(6) % 2) == 0.0
    tokens[3, 2] = np.nan
    assert np.isnan(silhouette(tokens, np.repeat([0, 1], 6)))
    with pytest.raises(InputError, match="at least two groups"):
        silhouette(tokens, np.zeros(12))


@pytest.mark.parametrize(("n", "d"), [(10, 40), (40, 10), (3, 2), (1, 9)])
def test_clouds_are_projections_onto_singular_vectors(n: int, d: int) -> None:
    before, after = normal(n, d) * np.linspace(3, 0.1, d), normal(n, d, seed=1) + 2
    both = np.concatenate([before, after])
    centred = both - both.mean(0)
    vectors = np.linalg.svd(centred, full_matrices=False)[2][:3].T
    expected = np.zeros((2 * n, 3))
    expected[:, : vectors.shape[1]] = centred @ vectors
    expected *= np.where(expected[0] < 0, -1, 1)
    found = token_clouds(before, after)
    assert found.shape == (2, n, 3)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-6)


def test_arrays_may_be_views_and_bad_tokens_have_no_cloud() -> None:
    x, y = normal(6, 4), normal(6, 4, seed=1)
    x.setflags(write=False)
    np.testing.assert_array_equal(token_clouds(x[::-1], y[::-1]), token_clouds(x[::-1].copy(), y[::-1].copy()))
    groups = np.arange(6) % 2
    assert silhouette(x, groups) == pytest.approx(silhouette(x[::-1], groups[::-1]), abs=1e-12)
    assert silhouette(torch.tensor(x, requires_grad=True), torch.from_numpy(groups)) == silhouette(x, groups)
    y[2, 1] = np.nan
    assert np.isnan(token_clouds(x, y)).all()
    assert token_clouds(x, y).shape == (2, 6, 3)


def test_clouds_keep_distances_and_show_a_common_shift() -> None:
    """Tokens in a plane and a shift that leaves it: three axes hold everything."""
    rotation = np.linalg.qr(normal(12, 12))[0]
    before = np.pad(normal(9, 2), ((0, 0), (0, 10)))
    after = before + np.eye(12)[5] * 20
    found = token_clouds(before @ rotation + 100, after @ rotation + 100)
    np.testing.assert_allclose(found, token_clouds(before, after), atol=1e-6)
    np.testing.assert_allclose(found[1, :, 1:], found[0, :, 1:], atol=1e-6)
    np.testing.assert_allclose(np.abs(found[1, :, 0] - found[0, :, 0]), 20)
    with pytest.raises(InputError, match="twice"):
        token_clouds(before, after[:4])


# The sample


@pytest.mark.parametrize(
    ("grid", "count", "sizes"),
    [
        ((14, 14), 36, (6, 6)),
        ((2, 20), 36, (2, 18)),
        ((20, 2), 36, (18, 2)),
        ((1, 1), 36, (1, 1)),
        ((3, 4), 36, (3, 4)),
        ((7, 1), 3, (3, 1)),
        ((9, 9), 1, (1, 1)),
    ],
)
def test_places_are_spread_over_the_grid(grid: tuple[int, int], count: int, sizes: tuple[int, int]) -> None:
    places = module._spread_over(grid, count).numpy()
    assert len(places) == len(set(places)) == sizes[0] * sizes[1] <= count
    for along, size, of in zip((places // grid[1], places % grid[1]), sizes, grid, strict=True):
        lines = np.unique(along)
        assert len(lines) == size
        assert np.diff(lines, prepend=-1, append=of).max() <= of / size + 1


def images_of(labels: list[int] | Array) -> Images:
    return load_images(np.zeros((len(labels), 8, 8, 3), np.uint8), labels=labels, splits={"test": range(len(labels))})


def chosen(labels: list[int] | Array, config: TokensConfig, seed: int = 0) -> Array:
    """Labels of the sample."""
    plan: Any = SimpleNamespace(images=images_of(labels), seed=seed)
    rows, shown = module._choose(plan, config)
    assert len(set(rows.tolist())) == len(rows)
    of = np.asarray(labels)[rows]
    assert len(shown) == min(config.clouds, len(rows))
    assert len(set(of[shown])) == min(len(shown), len(set(of)))
    return of


def test_few_classes_have_several_images_each() -> None:
    many = np.arange(200) % 10
    of = chosen(many, TokensConfig())
    assert sorted(np.unique(of, return_counts=True)[1]) == [6, 6, 6]
    assert {tuple(np.unique(chosen(many, TokensConfig(), seed))) for seed in range(8)} != {tuple(np.unique(of))}
    assert len(chosen(np.arange(12), TokensConfig())) == 12  # one image of each class: all there are
    assert np.unique(chosen([0] * 3 + [1] * 30 + [2] * 30 + [3] * 30, TokensConfig())).tolist() == [1, 2, 3]
    assert np.unique(chosen([0] * 30 + [1] * 30, TokensConfig()), return_counts=True)[1].tolist() == [9, 9]


# The stream


def streamed(
    activations: dict[str, torch.Tensor],
    layout: Tokens | None,
    labels: list[int] | Array,
    batch: int = 4,
    config: TokensConfig | None = None,
    unread: tuple[int, ...] = (),
) -> tuple[xr.Dataset, Array]:
    """The result for given activations, and the rows of its sample."""
    config = config or TokensConfig(images=6, classes=2, tokens=4, tsne=False)
    plan: Any = SimpleNamespace(
        encoders={"e": SimpleNamespace(tokens=layout)},
        sites={"e": tuple(activations)},
        shapes={"e": {site: tuple(x.shape[1:]) for site, x in activations.items()}},
        images=images_of(labels),
        splits=("test",),
        stages={},
        seed=0,
    )
    metric = TokensAnalysis(config, plan)
    for start in range(0, len(labels), batch):
        rows = torch.tensor([row for row in range(start, min(start + batch, len(labels))) if row not in unread])
        seen: Any = SimpleNamespace(split="test", rows=rows)
        metric.begin(seen)
        keys = {site: Key("e", site, "plain") for site in activations}
        metric.update(seen, {keys[site]: metric.reduce(keys[site], x[rows]) for site, x in activations.items()})
    assert module.cost(config, plan).memory > 0
    return result_of(metric).sel(encoder="e"), metric.rows


def stream_of(
    prefix: int, patches: int, dtype: torch.dtype = torch.float32, images: int = 20
) -> dict[str, torch.Tensor]:
    sites = ("embed", "block.0.mid", "block.0", "block.1.mid", "block.1")
    found = {site: torch.from_numpy(normal(images, prefix + patches, 7, seed=i)) for i, site in enumerate(sites)}
    for x in found.values():
        x[:, :prefix] *= 1000
    return {site: x.to(dtype) for site, x in found.items()}


LABELS = np.arange(20) % 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("prefix", "batch"), [(0, 3), (1, 20), (5, 6)])
def test_the_stream_is_the_pure_functions(prefix: int, batch: int, dtype: torch.dtype) -> None:
    found = stream_of(prefix, 8, dtype)
    result, rows = streamed(found, Tokens(prefix, 0 if prefix else None, (2, 4)), LABELS, batch)
    patches = {site: x[:, prefix:].double() for site, x in found.items()}
    places = module._spread_over((2, 4), 4)
    assert result.site.values.tolist() == ["embed", "block.0", "block.1"]
    assert result.image_class.values.tolist() == [str(LABELS[row]) for row in rows]
    for site in result.site.values:
        x = patches[str(site)][rows][:, places].flatten(0, 1).numpy()
        at = result.sel(site=site)
        by_image, by_class = np.repeat(np.arange(6), 4), np.repeat(LABELS[rows], 4)
        assert at.silhouette_image == pytest.approx(plain(x, by_image), abs=1e-9)
        assert at.silhouette_class == pytest.approx(plain(x, by_class), abs=1e-9)
        assert at.silhouette_image_low < at.silhouette_image < at.silhouette_image_high
        left = [plain(x[by_image != out], by_class[by_image != out]) for out in range(6)]
        half = stats.t.ppf(0.975, 5) * np.sqrt(5 * np.var(left))  # (m − 1)/m · Σ of m squares
        assert (at.silhouette_class_high - at.silhouette_class_low) / 2 == pytest.approx(half, rel=1e-6)
    shown = rows[[0, 3]]
    for site, before, after in (("block.0", "embed", "block.0.mid"), ("block.1", "block.0", "block.1.mid")):
        at = result.sel(site=site)
        for i, row in enumerate(shown):
            np.testing.assert_allclose(at.cloud[i], token_clouds(patches[before][row], patches[after][row]), atol=1e-9)
        joint = token_clouds(*(patches[s][shown].flatten(0, 1) for s in (before, after))).reshape(2, 2, 8, 3)
        np.testing.assert_allclose(at.cloud_joint, joint.transpose(0, 1), atol=1e-9)
    assert result.cloud_reason.values.tolist() == ["this enters the first block", "", ""]
    assert result.tsne_reason == "not asked for (tsne=False)"


def test_clouds_of_a_decoder_begin_with_what_enters_it() -> None:
    found = {f"decoder.{site}": x for site, x in stream_of(1, 8).items()}
    result, rows = streamed(found, Tokens(1, 0, (2, 4)), LABELS)
    expected = token_clouds(*(found[site][rows[0], 1:] for site in ("decoder.embed", "decoder.block.0.mid")))
    np.testing.assert_allclose(result.cloud.sel(site="decoder.block.0")[0], expected, atol=1e-9)


def test_maps_have_silhouettes_and_no_clouds() -> None:
    found = {"block.0": torch.from_numpy(normal(20, 5, 2, 6)).float(), "block.1": torch.from_numpy(normal(20, 9, 1, 1))}
    result, rows = streamed(found, None, LABELS)
    x = found["block.0"].flatten(2).transpose(1, 2)[rows][:, module._spread_over((2, 6), 4)]
    expected = plain(x.double().flatten(0, 1).numpy(), np.repeat(np.arange(6), 4))
    assert result.silhouette_image.sel(site="block.0") == pytest.approx(expected, abs=1e-9)
    assert result.silhouette_image_reason.sel(site="block.1") == "there is a single token of each image"
    assert np.isfinite(result.silhouette_class.sel(site="block.1"))
    assert (result.cloud_reason == "the attention of this block cannot be observed").all()
    assert result.cloud.isnull().all()


def test_reasons() -> None:
    found = stream_of(0, 8)
    found["embed"][:] = 0.1
    found["block.0"][..., 3] = torch.nan
    layout = Tokens(0, None, (2, 4))
    result, _ = streamed(found, layout, LABELS)
    for name in ("silhouette_image_reason", "silhouette_class_reason"):
        assert result[name].values.tolist() == [
            "all tokens are the same",
            "the activations are not finite (NaN or infinity)",
            "",
        ]
    assert result.cloud_reason.values.tolist()[1:] == ["", "the activations are not finite (NaN or infinity)"]
    for labels, why in (
        (np.zeros(20, int), "the sample has no two classes"),
        (np.arange(20), "no two images of the sample share a class"),
    ):
        result, _ = streamed(stream_of(0, 8), layout, labels)
        assert (result.silhouette_class_reason == why).all()
        assert result.silhouette_class.isnull().all()
        assert result.silhouette_image.notnull().all()


def test_images_that_could_not_be_read_are_missing() -> None:
    found, layout = stream_of(0, 8), Tokens(0, None, (2, 4))
    _, rows = streamed(found, layout, LABELS)
    result, _ = streamed(found, layout, LABELS, unread=(int(rows[0]), int(rows[5])))
    x = found["block.1"].double()[rows[1:5]][:, module._spread_over((2, 4), 4)].flatten(0, 1).numpy()
    at = result.sel(site="block.1")
    assert at.silhouette_image == pytest.approx(plain(x, np.repeat(np.arange(4), 4)), abs=1e-9)
    assert at.cloud[0].isnull().all()
    assert at.cloud[1].notnull().all()
    assert result.attrs["images"] == 4
    drawn = {figure.name: figure.table for figure in module.figures(result.expand_dims("encoder"))}
    assert set(drawn["clouds"].cloud_image) == {at.cloud_image.values[1]}  # the first that could be read
    nothing, _ = streamed(found, layout, LABELS, unread=tuple(rows.tolist()))
    assert (nothing.silhouette_image_reason == "none of the images of the sample could be read").all()
    assert module.figures(nothing.expand_dims("encoder")) == []


def test_tsne_keeps_islands_together_and_comes_out_twice() -> None:
    found = stream_of(0, 9)
    found["block.1"] += 30 * torch.from_numpy(normal(20, 1, 7, seed=9)).float()
    config = TokensConfig(images=6, classes=2, tokens=9)
    (one, rows), (other, _) = (streamed(found, Tokens(0, None, (3, 3)), LABELS, batch, config) for batch in (4, 20))
    assert one.tsne_site == "block.1"
    assert one.tsne.shape == (6, 9, 2)
    np.testing.assert_array_equal(one.tsne, other.tsne)
    assert silhouette(one.tsne.values.reshape(-1, 2), np.repeat(rows, 9)) > 0.5
    (label, number, detail), *rest = module.headlines(one.expand_dims("encoder"))
    assert not rest
    assert (label, number) == ("e", f"{one.silhouette_image.sel(site='block.1').item():.2f}")
    assert "block.1" in detail


def test_a_pass_with_registers_without_labels_and_other_numbers_of_patches() -> None:
    encoders = {
        "small": load_encoder(SMALL + "&class_token=False&global_pool=avg&reg_tokens=2"),
        "coarse": load_encoder(SMALL.replace("patch_size=8", "patch_size=16")),
    }
    pixels = np.random.default_rng(0).integers(0, 255, (9, 32, 32, 3), dtype=np.uint8)
    images = load_images(pixels, splits={"test": range(9)})
    result = measured("tokens", encoders, images, TokensConfig(images=5, clouds=1))
    assert (result.silhouette_class_reason == "the sample has no two classes").all()
    assert result.cloud.notnull().any(["site", "cloud_image", "moment", "axis"]).sum("patch").values.tolist() == [16, 4]
    assert result.tsne.notnull().sum(["image", "token", "tsne_axis"]).values.tolist() == [5 * 16 * 2, 5 * 4 * 2]
    row = images.ids.tolist().index(str(result.cloud_image.values[0]))
    encoder = encoders["small"]
    batch = torch.from_numpy(pixels[row : row + 1]).permute(0, 3, 1, 2)
    with capture(encoder, ["block.0", "block.1.mid"]) as found, torch.inference_mode():
        encoder(encoder.preprocess.normalize(batch))
    expected = token_clouds(found["block.0"][0, 2:], found["block.1.mid"][0, 2:])
    np.testing.assert_allclose(result.cloud.sel(encoder="small", site="block.1")[0], expected, atol=1e-4)
    drawn = {figure.name: figure for figure in module.figures(result)}
    tables = {name: figure.table for name, figure in drawn.items()}
    assert set(tables) == {"silhouette", "tsne", "clouds", "centres"}
    colour = drawn["tsne"].chart.to_dict()["spec"]["layer"][0]["encoding"]["color"]
    assert (colour["field"], colour["scale"]["domain"]) == ("image", result.image.values.tolist())  # no class tells
    assert tables["clouds"].panel_name.unique().tolist() == [
        f"{encoder} · {site}" for encoder in ("small", "coarse") for site in ("block.0", "block.1")
    ]
