"""Spectra: singular values against a full decomposition, what is lost in rounding, and the stream."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from support.passes import OPTIONS, activations, measured
from torch import nn

import sightline as sl
from sightline import Images, load_images
from sightline.analyses import spectra
from sightline.analyses.spectra import SpectraAnalysis, SpectraConfig, effective_rank, log_singular_values
from sightline.core.errors import InputError
from sightline.encoders.sites import Tokens, token_view
from sightline.measure.contract import result_of
from sightline.measure.plan import Key

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def plain(tokens: Array) -> Array:
    """The definition: a decomposition of each image's centred tokens in float64."""
    tokens = np.asarray(tokens, np.float64)
    return np.stack([np.log(np.linalg.svd(x - x.mean(0), compute_uv=False)) for x in tokens])


def with_mean(tokens: Array) -> Array:
    """The same, nothing taken off."""
    return np.stack([np.log(np.linalg.svd(x, compute_uv=False)) for x in np.asarray(tokens, np.float64)])


def spread(n: int, d: int, rank: int, seed: int = 0) -> Array:
    """Tokens in a subspace of this rank, after centring."""
    return normal(n, rank, seed=seed) @ normal(rank, d, seed=seed + 1)


# The pure functions


@pytest.mark.parametrize(("n", "d"), [(16, 48), (48, 16), (20, 20), (2, 5), (5, 2)])
def test_values_are_those_of_a_decomposition(n: int, d: int) -> None:
    tokens = normal(3, n, d) * np.geomspace(1, 1e-4, d)
    found = log_singular_values(tokens)
    assert found.shape == (3, min(n, d))
    assert found.dtype == np.float64
    ranks = min(n - 1, d)
    np.testing.assert_allclose(found[:, :ranks], plain(tokens)[:, :ranks], atol=1e-6)
    assert (found[:, ranks:] == -np.inf).all()
    np.testing.assert_allclose(log_singular_values(tokens[1]), found[1], atol=1e-9)


def test_orthogonal_rows_have_their_lengths() -> None:
    """Rows ±a e₁, ±b e₂ are centred, and their singular values are √2 a and √2 b."""
    tokens = np.zeros((4, 6))
    tokens[[0, 1], 0], tokens[[2, 3], 1] = (5, -5), (2, -2)
    found = log_singular_values(tokens)
    np.testing.assert_allclose(found[:2], np.log(np.sqrt(2) * np.array([5, 2])), rtol=1e-14)
    assert (found[2:] == -np.inf).all()


def test_arrays_may_be_views_and_not_writable() -> None:
    x = np.random.default_rng(0).normal(size=(2, 6, 4))
    x.setflags(write=False)
    np.testing.assert_allclose(log_singular_values(x[:, ::-1]), log_singular_values(x), atol=1e-9)
    assert effective_rank(np.broadcast_to(1.0, (2, 3))) == pytest.approx(3)


def test_arrays_and_tensors_in_the_same_out() -> None:
    tokens = normal(2, 6, 9)
    found = log_singular_values(torch.from_numpy(tokens))
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), log_singular_values(tokens))
    assert isinstance(effective_rank(found.exp()), torch.Tensor)
    whole = np.array([[3, 0], [-3, 0], [0, 1], [0, -1]])
    np.testing.assert_allclose(log_singular_values(whole), np.log(np.sqrt([18, 2])))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_lost_in_rounding_is_not_a_number(dtype: torch.dtype) -> None:
    """A product of rank 5 in floating point has full rank, by rounding."""
    tokens = torch.from_numpy(spread(40, 60, rank=5)).to(dtype)
    found = log_singular_values(tokens)
    assert found[:5].isfinite().all()
    assert (found[5:] == -np.inf).all()
    np.testing.assert_allclose(found[:5], plain(tokens[None].double().numpy())[0, :5], atol=1e-9)


def test_rounding_of_a_network_is_found_too() -> None:
    """A linear layer from 20 to 64 features has 20 directions, a layer norm one less than its width; in float32."""
    torch.manual_seed(0)
    tokens = torch.nn.Linear(20, 64)(torch.randn(4, 50, 20)).detach() + 3.0
    found = log_singular_values(tokens)
    assert found[:, :20].isfinite().all()
    assert (found[:, 20:] == -np.inf).all()
    normed = log_singular_values(torch.nn.functional.layer_norm(torch.randn(4, 50, 20), (20,)))
    assert normed[:, :19].isfinite().all()
    assert (normed[:, 19] == -np.inf).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_constant_tokens_have_no_spectrum(dtype: torch.dtype) -> None:
    tokens = torch.linspace(-3, 7, 13, dtype=torch.float64).to(dtype).expand(2, 11, 13)
    assert (log_singular_values(tokens) == -np.inf).all()
    assert (log_singular_values(tokens[:, :1]) == -np.inf).all()
    assert effective_rank(torch.zeros(3)).isnan()


def test_an_image_that_is_not_finite_is_nan_alone() -> None:
    tokens = normal(3, 6, 4)
    tokens[1, 2, 3] = np.nan
    tokens[2, 0, 0] = np.inf
    found = log_singular_values(tokens)
    np.testing.assert_allclose(found[0], log_singular_values(tokens[0]), atol=1e-9)
    assert np.isnan(found[1:]).all()


def test_a_large_offset_costs_no_digits() -> None:
    tokens = normal(2, 50, 30)
    np.testing.assert_allclose(log_singular_values(tokens + 1e4), log_singular_values(tokens), atol=1e-9)
    single = torch.from_numpy(tokens).float()
    np.testing.assert_allclose(log_singular_values(single + 100), log_singular_values(single), atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 99), st.floats(1e-3, 1e3))
def test_invariances(n: int, d: int, seed: int, scale: float) -> None:
    tokens = normal(n, d, seed=seed)
    ranks = min(n - 1, d)
    rotation = np.linalg.qr(normal(d, d, seed=seed + 1))[0]
    found = log_singular_values(tokens)[:ranks]
    changed = log_singular_values(scale * tokens[::-1] @ rotation + normal(d, seed=seed + 2))[:ranks]
    np.testing.assert_allclose(changed, found + np.log(scale), atol=1e-6)
    assert (np.diff(found) <= 0).all()
    rank = effective_rank(np.exp(found))
    assert 1 - 1e-12 <= rank <= ranks + 1e-12
    np.testing.assert_allclose(effective_rank(np.exp(changed)), rank, rtol=1e-6)


def test_effective_rank_is_the_exponential_of_an_entropy() -> None:
    values = np.array([4.0, 2.0, 1.0, 1.0])
    share = values / 8
    np.testing.assert_allclose(effective_rank(values), np.exp(-sum(p * np.log(p) for p in share)), rtol=1e-14)
    np.testing.assert_allclose(effective_rank(np.ones((2, 7))), [7, 7])


def test_wrong_input_is_told() -> None:
    with pytest.raises(InputError, match=r"\(N, D\) or \(B, N, D\)"):
        log_singular_values(np.zeros(5))


# The stream


def streamed(
    activations: dict[str, torch.Tensor],
    tokens: Tokens | None,
    batch: int = 4,
    config: SpectraConfig | None = None,
    unread: tuple[int, ...] = (),
    splits: tuple[str, ...] = ("test",),
) -> xr.Dataset:
    """The result for given activations, in batches; with two splits the images are halved."""
    count = len(next(iter(activations.values())))
    parts = np.array_split(np.arange(count), len(splits))
    images = load_images(
        np.zeros((count, 8, 8, 3), np.uint8), labels=[0] * count, splits=dict(zip(splits, parts, strict=True))
    )
    plan: Any = SimpleNamespace(
        encoders={"e": SimpleNamespace(tokens=tokens, has_places=lambda _: True)},
        stages={},
        sites={"e": tuple(activations)},
        shapes={"e": {site: tuple(x.shape[1:]) for site, x in activations.items()}},
        images=images,
        splits=splits,
        seed=0,
    )
    metric = SpectraAnalysis(config or SpectraConfig(), plan)
    for split, part in zip(splits, parts, strict=True):
        for start in range(0, len(part), batch):
            rows = torch.tensor([row for row in range(start, min(start + batch, len(part))) if row not in unread])
            seen: Any = SimpleNamespace(split=split, rows=rows)
            metric.begin(seen)
            found = {
                Key("e", site, "plain"): metric.reduce(Key("e", site, "plain"), x[part[0] + rows])
                for site, x in activations.items()
            }
            metric.update(seen, found)
    assert spectra.cost(config or SpectraConfig(), plan).memory > 0
    return result_of(metric).sel(encoder="e")


def check(result: xr.Dataset, patches: Array, atol: float = 1e-6) -> None:
    """All numbers of a layer against the definition."""
    logs = plain(patches)
    ranks = min(patches.shape[1] - 1, patches.shape[2])
    delta = logs - logs[:, :1]
    np.testing.assert_allclose(result.token_spectrum[:ranks], delta.mean(0)[:ranks], atol=atol)
    assert np.isnan(result.token_spectrum[ranks:]).all()
    np.testing.assert_allclose(result.token_largest, logs[:, 0].mean(), atol=atol)
    np.testing.assert_allclose(result.token_second, logs[:, 1].mean(), atol=atol)
    np.testing.assert_allclose(result.token_uncentred_second, with_mean(patches)[:, 1].mean(), atol=10 * atol)
    sigma = np.exp(logs[:, :ranks])
    np.testing.assert_allclose(result.token_effective_rank, effective_rank(sigma).mean(), rtol=1e-4)
    half = 1.96 * logs[:, 0].std(ddof=1) / np.sqrt(len(logs))
    np.testing.assert_allclose(result.token_largest_high - result.token_largest, half, rtol=1e-3)
    means = plain(patches.mean(1)[None])[0]
    count = min(len(patches) - 1, patches.shape[2])
    np.testing.assert_allclose(result.image_spectrum[:count], (means - means[0])[:count], atol=100 * atol)
    np.testing.assert_allclose(result.image_largest, means[0], atol=10 * atol)
    np.testing.assert_allclose(result.image_second, means[1], atol=10 * atol)
    raw = with_mean(patches.mean(1)[None])[0]
    np.testing.assert_allclose(result.image_uncentred_second, raw[1], atol=100 * atol)
    np.testing.assert_allclose(result.image_effective_rank, effective_rank(np.exp(means[:count])), rtol=1e-4)
    assert (result.token_reason, result.image_reason) == ("", "")
    for cloud, most in (("token", ranks), ("image", count)):
        assert result[f"{cloud}_rank"].values.tolist() == [most // 3, 2 * most // 3]
        at = [result[f"{cloud}_spectrum"].sel(rank=rank) for rank in (most // 3, 2 * most // 3)]
        np.testing.assert_array_equal(result[f"{cloud}_delta"], at)


@pytest.mark.parametrize("batch", [1, 4, 10])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_prefix_tokens_take_no_part(prefix: int, batch: int) -> None:
    grid = (3, 5)
    x = torch.from_numpy(normal(10, prefix + 15, 8)).float()
    x[:, :prefix] *= 1000
    result = streamed({"block.0": x}, Tokens(prefix, 0 if prefix else None, grid), batch)
    check(result.sel(site="block.0"), x[:, prefix:].double().numpy())


def test_positions_of_a_map_are_tokens() -> None:
    x = torch.from_numpy(normal(9, 12, 4, 6)).float().to(memory_format=torch.channels_last)
    result = streamed({"block.0": x}, None)
    check(result.sel(site="block.0"), x.double().flatten(2).transpose(1, 2).numpy())


def test_bf16_activations() -> None:
    x = torch.from_numpy(normal(9, 15, 8)).bfloat16()
    check(streamed({"block.0": x}, Tokens(0, None, (3, 5))).sel(site="block.0"), x.double().numpy())


def test_features_far_from_zero() -> None:
    x = torch.from_numpy(normal(40, 15, 8)).float()
    near, far = (streamed({"block.0": x + offset}, Tokens(0, None, (3, 5))) for offset in (0, 100))
    for name in ("token_spectrum", "image_spectrum", "token_largest", "image_largest"):
        np.testing.assert_allclose(far[name], near[name], atol=1e-4)


def test_the_sample_does_not_depend_on_batches_and_is_named() -> None:
    x = torch.from_numpy(normal(40, 15, 8)).float()
    config = SpectraConfig(images=6, means=20)
    one, other = (streamed({"block.0": x}, Tokens(0, None, (3, 5)), batch, config) for batch in (3, 40))
    xr.testing.assert_allclose(one, other, rtol=1e-6)
    assert one.attrs["token_sample"] == 6
    assert one.attrs["image_sample"] == 20
    assert one.token_images.item() == 6
    assert one.image_images.item() == 20


def test_images_without_splits_are_all_used() -> None:
    x = torch.from_numpy(normal(10, 15, 8)).float()
    result = streamed({"block.0": x}, Tokens(0, None, (3, 5)), splits=("train", "test"))
    check(result.sel(site="block.0"), x.double().numpy())


def test_images_that_could_not_be_read_are_missing() -> None:
    x = torch.from_numpy(normal(10, 15, 8)).float()
    result = streamed({"block.0": x}, Tokens(0, None, (3, 5)), unread=(0, 7))
    check(result.sel(site="block.0"), np.delete(x.double().numpy(), [0, 7], 0))


def test_ranks_64_and_128_where_there_are_so_many() -> None:
    x = torch.from_numpy(normal(4, 144, 130)).float()
    result = streamed({"block.0": x}, Tokens(0, None, (12, 12))).sel(site="block.0")
    assert result.token_rank.values.tolist() == [64, 128]
    assert result.image_rank.values.tolist() == [1, 2]


def test_reasons() -> None:
    x = torch.from_numpy(normal(6, 15, 8)).float()
    constant, blank, broken, flat = x[:, :1].expand(6, 15, 8), x.clone(), x.clone(), torch.ones(6, 15, 8)
    blank[2] = 1.0
    broken[4, 3, 2] = torch.nan
    low = x.clone()
    low[..., 3:] = 0
    sites = {
        "block.0": constant,
        "block.1": blank,
        "block.2": broken,
        "block.3": flat,
        "block.4": low,
        "head.0": x[:, 0],
    }
    result = streamed(sites, Tokens(0, None, (3, 5)))

    def reasons(site: str) -> tuple[str, str]:
        return result.token_reason.sel(site=site).item(), result.image_reason.sel(site=site).item()

    assert reasons("block.0") == ("the tokens of an image are all the same", "")
    assert reasons("block.1") == ("", "")  # an image without any spread is left out of the mean, and counted
    assert result.token_images.sel(site="block.1") == 5
    check_one = plain(np.delete(blank.double().numpy(), 2, 0))
    np.testing.assert_allclose(result.token_largest.sel(site="block.1"), check_one[:, 0].mean(), atol=1e-6)
    assert reasons("block.2") == ("the activations are not finite (NaN or infinity)",) * 2
    assert reasons("block.3")[1] == "all images have the same mean token"
    assert reasons("block.4")[0] == "5 of 8 singular values cannot be distinguished from rounding"
    assert reasons("head.0") == ("this site has no patch tokens",) * 2
    for site in ("block.0", "block.2", "block.3", "head.0"):
        at = result.sel(site=site)
        assert np.isnan(at.token_spectrum).all()
        assert np.isnan([at.token_largest, at.token_second, at.token_effective_rank]).all()
    single = streamed({"block.0": torch.from_numpy(normal(6, 9, 1, 1)).float()}, None).sel(site="block.0")
    assert single.token_reason == "there is a single patch token"
    assert np.isfinite(single.image_largest)


def test_a_pass_gives_what_the_pure_function_gives(encoders: Any, images: Images) -> None:
    encoders = {name: encoders[name] for name in ("registers", "cnn")}
    result = measured("spectra", encoders, images)
    for name, encoder in encoders.items():
        for site, activation in activations(encoder, images, ["embed", "block.*"]).items():
            at = result.sel(encoder=name, site=site)
            patches = token_view(activation, "patches", encoder.tokens)
            assert patches is not None
            if patches.shape[1] > 3:
                ranks = min(patches.shape[1] - 1, patches.shape[2])
                logs = log_singular_values(patches)[:, :ranks].numpy()
                spectrum = (logs - logs[:, :1]).mean(0)
                spectrum[np.isinf(spectrum)] = np.nan  # a value that is lost in rounding in one of the images
                np.testing.assert_allclose(at.token_spectrum[:ranks], spectrum, atol=1e-4)
                np.testing.assert_allclose(at.token_second, logs[:, 1].mean(), atol=1e-5)
            means = log_singular_values(patches.mean(1)).numpy()
            np.testing.assert_allclose(at.image_spectrum[:10], (means - means[0])[:10], atol=1e-3)
            np.testing.assert_allclose(at.image_effective_rank, effective_rank(np.exp(means)), rtol=1e-4)
    assert {"embed", "block.0", "block.1"} <= set(result.site.values)


@pytest.mark.parametrize(("n", "d"), [(12, 30), (30, 12), (16, 16)])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1000.0])
def test_the_mean_may_be_left_in(n: int, d: int, offset: float) -> None:
    x = np.stack([normal(n, d, seed=seed) + offset * normal(1, d, seed=9) for seed in range(3)])
    np.testing.assert_allclose(log_singular_values(x, centred=False), with_mean(x), atol=1e-9 if offset < 10 else 1e-6)
    np.testing.assert_allclose(log_singular_values(x)[:, :11], plain(x)[:, :11], atol=1e-6)
    assert np.isneginf(log_singular_values(np.ones((4, 5)), centred=False)[1:]).all()
    bad = x.copy()
    bad[1, 2, 3] = np.nan
    found = log_singular_values(bad, centred=False)
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


def test_spectra_of_the_matrix_as_it_is() -> None:
    x = torch.from_numpy(np.stack([normal(15, 20, seed=seed) + 2 for seed in range(8)])).float()
    result = streamed({"block.0": x}, Tokens(0, None, (3, 5)), config=SpectraConfig(centred=False)).isel(site=0)
    logs = with_mean(x.numpy())
    np.testing.assert_allclose(result.token_spectrum[:15], (logs - logs[:, :1]).mean(0), atol=1e-5)
    np.testing.assert_allclose(result.token_second, result.token_uncentred_second)
    np.testing.assert_allclose(result.token_effective_rank, effective_rank(np.exp(logs)).mean(), rtol=1e-4)
    assert result.token_rank.values.tolist() == [5, 10]
    assert result.attrs["centred"] == 0


def test_only_the_uncentred_value_sees_an_offset() -> None:
    x = torch.from_numpy(np.stack([normal(15, 20, seed=seed) for seed in range(8)])).float()
    one, other = (streamed({"block.0": x + offset}, Tokens(0, None, (3, 5))) for offset in (0.0, 2.5))
    for name, values in one.data_vars.items():
        if values.dtype.kind == "f" and "uncentred" not in str(name):
            np.testing.assert_allclose(other[name], values, atol=2e-4)
    assert float(abs(other.token_uncentred_second - one.token_uncentred_second).max()) > 0.01


def test_figures_begin_with_the_embedding_and_end_with_the_decoder() -> None:
    x = torch.from_numpy(normal(8, 15, 8)).float()
    sites = {site: x * (1 + i) for i, site in enumerate(("embed", "block.0", "block.1", "decoder.block.0"))}
    result = streamed(sites, Tokens(0, None, (3, 5))).expand_dims("encoder")
    figures = {figure.name: figure.table for figure in spectra.figures(result)}
    assert set(figures) == {"token-delta", "token-spectrum", "image-delta", "image-spectrum", "second", "rank"}
    assert set(figures["token-delta"].what) == {"rank 2", "rank 5"}
    for what in ("tokens of an image", "images"):
        rows = figures["second"][figures["second"].what == what]
        assert rows.site.tolist() == list(sites)
        assert rows.depth.tolist() == [0, 1, 2, 3]
    ((label, number, detail),) = spectra.headlines(result)
    assert (label, number) == ("e", f"{result.image_effective_rank.sel(site='block.1').item():.1f}")
    assert "block.1" in detail


def test_channels_that_may_be_last_are_not_guessed_at(images: Images) -> None:
    """Of a module of its own kind: maps are taken as such if they have the proportions of the image, tokens never."""

    class Last(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.permute(0, 2, 3, 1)

    module = nn.Sequential(nn.Conv2d(3, 8, 8, 8), Last(), nn.Flatten(1, 2))
    encoder = sl.load_encoder(module, name="mine", preprocess=sl.Preprocess((32, 32)))
    run = sl.analyze([encoder], images, ["spectra", "fourier"], **OPTIONS)
    reasons = run["fourier"].reason.values[0].tolist()
    assert reasons == ["", *["the places of its tokens on the image are not known"] * 2]
    assert run["fourier"].high_frequency.notnull().values.tolist() == [[True, False, False]]
    assert (run["spectra"].token_reason == "").values.tolist() == [[True, False, False]]
