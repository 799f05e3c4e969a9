"""Diversity: cosines against all pairs written out, their invariances, and the stream."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.passes import activations, measured
from support.plans import make_plan
from support.references import SMALL

from sightline import load_encoder
from sightline.analyses import diversity
from sightline.analyses.diversity import depth_cosine, head_cosine, token_cosine
from sightline.core.errors import InputError
from sightline.measure.contract import NoSettings, result_of
from sightline.measure.plan import Key, make_plans


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.sqrt((x @ x) * (y @ y))) if x.any() and y.any() else 0.0


def token_pairs(tokens: np.ndarray) -> list[float]:
    return [float(np.mean([cosine(x, y) for x, y in itertools.combinations(image, 2)])) for image in tokens]


def head_pairs(heads: np.ndarray) -> list[float]:
    pairs = list(itertools.combinations(range(heads.shape[1]), 2))
    return [
        float(np.mean([cosine(image[a, n], image[b, n]) for a, b in pairs for n in range(heads.shape[2])]))
        for image in heads
    ]


def depth_pairs(before: np.ndarray, after: np.ndarray) -> list[float]:
    return [
        float(np.mean([cosine(x, y) for x, y in zip(*both, strict=True)])) for both in zip(before, after, strict=True)
    ]


@pytest.mark.parametrize("offset", [0.0, 1.0, 30.0])
@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-12), (np.float32, 1e-6)])
def test_equal_all_pairs_written_out(offset: float, dtype: Any, error: float) -> None:
    tokens, heads = (random((3, 6, 5)) + offset).astype(dtype), (random((3, 4, 5, 7), 1) + offset).astype(dtype)
    after = tokens + random((3, 6, 5), 2).astype(dtype)
    np.testing.assert_allclose(token_cosine(tokens), token_pairs(tokens.astype(np.float64)), atol=error)
    np.testing.assert_allclose(head_cosine(heads), head_pairs(heads.astype(np.float64)), atol=error)
    np.testing.assert_allclose(
        depth_cosine(tokens, after), depth_pairs(tokens.astype(np.float64), after.astype(np.float64)), atol=error
    )


def test_closed_forms() -> None:
    same = np.broadcast_to(random((1, 1, 4)), (1, 9, 4))
    assert token_cosine(same) == pytest.approx(1)
    assert token_cosine(np.eye(5)[None]) == pytest.approx(0)
    # A regular simplex: N unit vectors that sum to zero are as different as N vectors can be.
    assert token_cosine((np.eye(5) - 1 / 5)[None]) == pytest.approx(-1 / 4)
    assert head_cosine(np.eye(5)[None, :, None] - 1 / 5) == pytest.approx(-1 / 4)
    assert depth_cosine(same, -2 * same) == pytest.approx(-1)


def test_zeros_have_no_direction() -> None:
    tokens, heads, after = random((2, 5, 4)), random((2, 3, 5, 4), 1), random((2, 5, 4), 2)
    tokens[0, 2], heads[0, 1, 3], after[0, 1] = 0, 0, 0
    np.testing.assert_allclose(token_cosine(tokens), token_pairs(tokens))
    np.testing.assert_allclose(head_cosine(heads), head_pairs(heads))
    np.testing.assert_allclose(depth_cosine(tokens, after), depth_pairs(tokens, after))
    tokens[1], heads[1] = 0, 0  # an image with nothing but zeros
    for values in (token_cosine(tokens), head_cosine(heads), depth_cosine(tokens, after), depth_cosine(after, tokens)):
        assert np.isnan(values).tolist() == [False, True]


def test_nan_and_infinity_do_not_hide() -> None:
    for bad in (np.nan, np.inf):
        tokens, heads = random((2, 5, 4)), random((2, 3, 5, 4))
        tokens[1, 2, 0], heads[1, 1, 2, 0] = bad, bad
        for values in (token_cosine(tokens), head_cosine(heads), depth_cosine(random((2, 5, 4)), tokens)):
            assert np.isnan(values).tolist() == [False, True]


def test_a_pair_needs_two() -> None:
    assert np.isnan(token_cosine(random((2, 1, 4)))).all()
    assert np.isnan(head_cosine(random((2, 1, 5, 4)))).all()


def test_tensors_arrays_and_views() -> None:
    tokens = torch.from_numpy(random((2, 7, 4))).float()
    assert isinstance(token_cosine(tokens.numpy()), np.ndarray)
    assert isinstance(token_cosine(tokens), torch.Tensor)
    np.testing.assert_array_equal(token_cosine(tokens), token_cosine(tokens.numpy()))
    turned = tokens.mT.contiguous().mT  # as the positions of a map lie in memory
    np.testing.assert_allclose(token_cosine(turned), token_cosine(tokens), atol=1e-7)
    np.testing.assert_allclose(token_cosine(tokens.bfloat16()), token_cosine(tokens), atol=0.01)
    heads = torch.from_numpy(random((2, 7, 3, 4))).transpose(1, 2)[:, :, 1:]
    before = heads.clone()
    np.testing.assert_allclose(head_cosine(heads), head_pairs(heads.numpy()))
    assert torch.equal(heads, before)


@given(seed=st.integers(0, 1000), exponent=st.integers(-15, 15), n=st.integers(2, 9), width=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_invariances(seed: int, exponent: int, n: int, width: int) -> None:
    tokens, heads = random((2, n, width), seed), random((2, n, 3, width), seed)
    rotation = np.linalg.qr(random((width, width), seed + 1))[0]
    order = np.random.default_rng(seed).permutation(n)
    tall, after = (x.astype(np.float32) * np.float32(10.0**exponent) for x in (tokens, tokens + 1))
    np.testing.assert_allclose(token_cosine(tall), token_cosine(tokens), atol=2e-6)  # no ε that a scale would show
    np.testing.assert_allclose(depth_cosine(tall, after), depth_cosine(tokens, tokens + 1), atol=2e-6)
    np.testing.assert_allclose(head_cosine(heads * 10.0**exponent), head_cosine(heads), atol=1e-12)
    np.testing.assert_allclose(token_cosine(tokens[:, order] @ rotation), token_cosine(tokens), atol=1e-12)
    np.testing.assert_allclose(head_cosine(heads[:, order] @ rotation), head_cosine(heads), atol=1e-12)
    turned = depth_cosine(tokens @ rotation, (tokens + 1) @ rotation)
    np.testing.assert_allclose(turned, depth_cosine(tokens, tokens + 1), atol=1e-12)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="tokens"):
        token_cosine(random((5, 4)))
    with pytest.raises(InputError, match="heads"):
        head_cosine(random((2, 5, 4)))
    with pytest.raises(InputError, match="the same tokens"):
        depth_cosine(random((2, 5, 4)), random((2, 6, 4)))


# The pass


@pytest.fixture(scope="module")
def result(encoders: Any, images: Any) -> Any:
    return measured("diversity", encoders, images)


@pytest.mark.parametrize(
    ("name", "block", "entry", "prefix"),
    [
        ("vit", "block.0", "embed", 1),
        ("vit", "block.1", "block.0", 1),
        ("registers", "block.1", "block.0", 2),
        ("wide", "block.1", "block.0", 1),
        ("mae", "decoder.block.0", "decoder.embed", 1),
        ("mae", "decoder.block.1", "decoder.block.0", 1),
        ("one head", "block.1", "block.0", 1),
        ("cnn", "block.3", None, 0),
    ],
)
def test_the_pass_equals_the_whole_array(
    encoders: Any, images: Any, result: Any, name: str, block: str, entry: str | None, prefix: int
) -> None:
    sites = [block] if entry is None else [block, f"{block}.heads", f"{block}.mid", entry]
    acts = activations(encoders[name], images, sites)
    out = acts[block].flatten(2).mT if acts[block].ndim == 4 else acts[block][:, prefix:]
    values = {"tokens": token_cosine(out.double())}
    if entry is not None:
        mid = acts[f"{block}.mid"][:, prefix:].double()
        values |= {"depths": depth_cosine(acts[entry][:, prefix:].double(), mid), "mid": token_cosine(mid)}
        if name != "one head":
            values["heads"] = head_cosine(acts[f"{block}.heads"][:, :, prefix:].double())
    own = result.sel(encoder=name, site=block)
    for kind, expected in values.items():
        half = 1.96 * expected.std() / np.sqrt(len(expected))
        assert float(own.cosine.sel(kind=kind)) == pytest.approx(float(expected.mean()), abs=1e-6)
        low, high = (float(own[f"cosine_{end}"].sel(kind=kind)) for end in ("low", "high"))
        assert high - low == pytest.approx(float(2 * half), abs=1e-5)
        assert own.reason.sel(kind=kind) == ""


def test_what_cannot_be_measured_says_why(result: Any) -> None:
    reason, cnn = result.reason, result.reason.sel(encoder="cnn")
    assert reason.sel(kind="heads", encoder="one head", site="block.1") == "a single head has no pair"
    assert cnn.sel(kind="tokens", site="block.7") == "a single token has no pair"  # a map of 1 × 1
    assert "attention heads of this block cannot be observed" in cnn.sel(kind="heads", site="block.0").item()
    assert "stream between attention and MLP of this block" in cnn.sel(kind="depths", site="block.0").item()
    assert (reason.sel(encoder="vit", site="block.7") == "this encoder has no such site").all()
    assert (np.isfinite(result.cosine) == (reason == "")).all()
    assert set(result.layer_type.values) == {"block"}


def fed(encoder: Any, images: Any, change: Any) -> Any:
    """A result from activations of our own, (B, …) at every site."""
    settings = {"batch": 8, "seed": 0, "precision": "float32"}
    config = NoSettings()
    cache, device = SimpleNamespace(), torch.device("cpu")
    plan = make_plans({"a": encoder}, images, {"diversity": config}, None, settings, cache, device)["diversity"]
    metric = diversity.DiversityAnalysis(config, plan)
    keys = [Key("a", site, "plain") for site in plan.sites["a"]]
    generator = torch.Generator().manual_seed(0)
    drawn = {key: change(key.site, torch.randn(4, *plan.shapes["a"][key.site], generator=generator)) for key in keys}
    reductions = {}
    for key, activation in drawn.items():
        reductions[key] = metric.reduce(key, activation)
        activation.fill_(7.0)  # the model may go on in place
    assert not metric.before
    metric.update(SimpleNamespace(split="test", rows=torch.arange(4)), reductions)
    return result_of(metric).sel(encoder="a")


def test_flaws_have_a_reason(images: Any) -> None:
    encoder = load_encoder(SMALL)

    def flawed(site: str, x: torch.Tensor) -> torch.Tensor:
        if site == "block.0":
            x[1] = torch.nan
        return torch.zeros_like(x) if site == "block.1.heads" else x

    result = fed(encoder, images, flawed)
    says = "images all vectors are zero, or some are not finite"
    assert result.reason.sel(site="block.0").values.tolist() == ["", "", f"in 1 of 4 {says}", ""]
    assert result.reason.sel(site="block.1").values.tolist() == [f"in 4 of 4 {says}", f"in 1 of 4 {says}", "", ""]
    assert (np.isnan(result.cosine) == (result.reason != "")).all()


def test_no_number_without_a_readable_image_and_no_empty_reason(tmp_path: Path) -> None:
    result = result_of(diversity.DiversityAnalysis(NoSettings(), make_plan(tmp_path))).sel(
        kind="tokens", site="block.0"
    )
    assert (result.reason == "no image could be read").all()
    assert result.cosine.isnull().all()


def test_nothing_is_read_after_the_model_went_on(images: Any) -> None:
    """Had the stream before attention not been copied, it would be constant by the time it is compared."""
    kept: dict[str, torch.Tensor] = {}

    def keep(site: str, x: torch.Tensor) -> torch.Tensor:
        kept[site] = x.clone()
        return x

    result = fed(load_encoder(SMALL), images, keep)
    for block, entry in (("block.0", "embed"), ("block.1", "block.0")):
        expected = depth_cosine(kept[entry][:, 1:], kept[f"{block}.mid"][:, 1:]).mean()
        assert float(result.cosine.sel(kind="depths", site=block)) == pytest.approx(float(expected), abs=1e-6)


def test_bf16_activations(images: Any) -> None:
    encoder = load_encoder(SMALL)
    plain = fed(encoder, images, lambda _, x: x + 1)
    rounded = fed(encoder, images, lambda _, x: (x + 1).bfloat16())
    np.testing.assert_allclose(rounded.cosine, plain.cosine, atol=2e-3)


def test_figure_has_the_numbers(result: Any) -> None:
    (figure,) = diversity.figures(result)
    panels = ["between heads", "before and after attention", "between tokens", "between tokens after attention"]
    assert list(figure.table.panel_title.unique()) == panels
    row = figure.table.query("series == 'mae' and kind == 'depths' and site == 'decoder.block.1'").iloc[0]
    assert row.depth > figure.table.query("series == 'mae' and site == 'block.1'").depth.max()  # behind the encoder
    assert row.value == float(result.cosine.sel(encoder="mae", kind="depths", site="decoder.block.1"))
    last = figure.table.query("series == 'cnn' and site == 'block.5'")  # of eight blocks, the last two of one position
    assert last.depth.tolist() == [pytest.approx(5 / 7)]
    lines = {label: detail for label, _, detail in diversity.headlines(result)}
    assert list(lines) == list(result.encoder.values)
    assert "between heads" in lines["vit"]
    assert "between heads" not in lines["one head"]
