"""Attention distance and mutual information of maps and products: plain loops, closed forms, masks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import plain_distance, plain_nmi, product_of

from sightline.analyses.attention import attention_distance, attention_nmi
from sightline.core.errors import InputError
from sightline.encoders.attention import AttentionProduct
from sightline.encoders.sites import Tokens
from sightline.measure.estimators.attention import attend, distance_and_nmi, unattended


def random_maps(shape: tuple[int, ...], sharpness: float = 2.0, seed: int = 0) -> np.ndarray:
    logits = sharpness * np.random.default_rng(seed).normal(size=shape)
    whole = np.exp(logits - logits.max(-1, keepdims=True))
    return whole / whole.sum(-1, keepdims=True)


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


def rounding_of(product: AttentionProduct, maps: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """How far any order of the float32 sums may take each number of map @ v (B, H, T, d) from the exact one.

    With u = eps / 2 and T keys, to first order in u: a score s_j of d products has an absolute error of
    (d + 1) u |scale| Σ|q||k_j|, which is a relative one of e_j = exp(s_j), and exp adds two units in the last place,
    4 u. Relative errors r_j of e_j move the output by Σ_j p_j r_j (v_j − output). The sums over keys above and below
    have T roundings each, their quotient two.
    """
    v, d, keys = product.v.double(), product.q.shape[-1], maps.shape[-1]
    u = torch.finfo(torch.float32).eps / 2
    sizes = abs(product.scale) * (product.q.double().abs() @ product.k.double().abs().mT)
    weights = maps * ((d + 1) * u * sizes + 4 * u)
    apart = torch.stack([(v[..., None, :, i] - exact[..., i, None]).abs().mul(weights).sum(-1) for i in range(d)], -1)
    return apart + (2 * keys + 2) * u * (maps @ v.abs())


@pytest.mark.parametrize("tokens", LAYOUTS)
@pytest.mark.parametrize("scale", [1e-3, 0.25, 2.0])
def test_map_times_values_is_left_in_the_product(tokens: Tokens, scale: float) -> None:
    product = product_of(tokens, scale, images=5)
    product.v = torch.randn(product.q.shape, generator=torch.Generator().manual_seed(2)).transpose(1, 2).contiguous()
    product.v = product.v.transpose(1, 2)  # in memory as a layer has it
    with torch.inference_mode():
        distance_and_nmi(product, tokens)
    maps = ((product.q.double() * scale) @ product.k.double().mT).softmax(-1)
    assert product.output is not None
    exact = maps @ product.v.double()
    error = (product.output - exact).abs()
    assert (error <= rounding_of(product, maps, exact)).all()
    assert error.max() < (1e-5 if scale > 1 else 1e-6)
    assert product.output.transpose(1, 2).is_contiguous()
    with torch.inference_mode():  # to the last bit, so that nobody sees whether attention is measured
        assert torch.equal(attend(product, tokens), product.output)


def test_the_kernel_stays_where_the_map_is_not_enough() -> None:
    """Scores that overflow, a bias, bf16, and gradients."""
    large, biased = product_of(LAYOUTS[2], 12.0), product_of(LAYOUTS[2], 0.25, torch.zeros(11, 11))
    rounded, plain = product_of(LAYOUTS[2], 0.25, dtype=torch.bfloat16), product_of(LAYOUTS[2], 0.25)
    for product in (large, biased, rounded):
        product.v = product.k
        with torch.inference_mode():
            distance_and_nmi(product, LAYOUTS[2])
            assert product.output is attend(product, LAYOUTS[2]) is None
    plain.v = plain.k
    distance_and_nmi(plain, LAYOUTS[2])
    assert plain.output is attend(plain, LAYOUTS[2]) is None


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
