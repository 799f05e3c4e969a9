"""Path efficiency against a plain NumPy reference, closed forms, and its invariances."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from sightline import Encoder, load_encoder
from sightline.analyses.dynamics.paths import START, STILL, groups_of, path_efficiency, paths_of, trainings_of
from sightline.core.errors import InputError
from sightline.core.results import ABSENT

SMALL = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=2&embed_dim=12&num_heads=2"


def random_path(points: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    steps = [{"a": torch.randn(3, 4, generator=random), "b": torch.randn(5, generator=random)} for _ in range(points)]
    return [{name: sum(step[name] for step in steps[: t + 1]) for name in "ab"} for t in range(points)]


def plain(points: np.ndarray) -> np.ndarray:
    """The definition, word for word, on whole vectors (E, all weights)."""
    lengths = [sum(np.linalg.norm(points[t + 1] - points[t]) for t in range(end)) for end in range(len(points))]
    return np.array([np.linalg.norm(points[end] - points[0]) for end in range(len(points))]) / np.array(lengths)


def vectors(path: list[dict[str, torch.Tensor]]) -> np.ndarray:
    return np.stack([np.concatenate([x.double().flatten().numpy() for x in point.values()]) for point in path])


def test_equals_the_definition() -> None:
    path = random_path(6)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(path_efficiency(path), plain(vectors(path)), rtol=1e-12)
    assert np.isnan(path_efficiency(path)[0])
    assert path_efficiency(path)[1] == 1  # one step is straight


def test_a_straight_line_is_1_at_any_speed() -> None:
    direction = torch.randn(50, dtype=torch.float64)
    path = [{"w": 2 + speed * direction} for speed in (0, 0.1, 0.15, 3, 3, 100)]
    np.testing.assert_allclose(path_efficiency(path)[1:], 1, rtol=1e-12)


def test_back_at_the_start_is_0() -> None:
    path = random_path(4)
    assert path_efficiency([*path, path[0]])[-1] == 0


def test_a_random_walk_falls_like_one_over_the_root_of_its_steps() -> None:
    random = torch.Generator().manual_seed(0)
    walk = torch.randn(65, 20000, generator=random).cumsum(0)
    found = path_efficiency([{"w": point} for point in walk])
    np.testing.assert_allclose(found[1:], 1 / np.sqrt(np.arange(1, 65)), rtol=0.03)


def test_what_never_moved_has_no_efficiency() -> None:
    assert np.isnan(path_efficiency([{"w": torch.ones(3)}] * 4)).all()


@given(st.integers(0, 10**6), st.floats(1e-4, 1e4), st.integers(2, 6))
@settings(max_examples=30, deadline=None)
def test_scale_rotation_and_place_do_not_matter(seed: int, scale: float, points: int) -> None:
    whole = vectors(random_path(points, seed))
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(whole.shape[1],) * 2))[0]
    value = path_efficiency([{"w": torch.from_numpy(x)} for x in whole])
    for changed in (scale * whole, whole @ rotation, whole + 7):
        again = path_efficiency([{"w": torch.from_numpy(x)} for x in changed])
        np.testing.assert_allclose(again, value, rtol=1e-9)


def test_small_steps_of_large_weights_are_summed_in_float64() -> None:
    """A million float32 weights of 1 that move by one unit in the last place."""
    step = float(np.spacing(np.float32(1)))
    path = [{"w": torch.full((10**6,), 1 + k * step)} for k in (0, 1, 2, 1)]
    np.testing.assert_allclose(path_efficiency(path)[1:], [1, 1, 1 / 3], rtol=1e-12)


def test_weights_may_stay_on_disk(tmp_path: Path) -> None:
    path = random_path(4)
    for t, weights in enumerate(path):
        save_file(weights, tmp_path / f"{t}.safetensors")
    files = [safe_open(tmp_path / f"{t}.safetensors", "pt") for t in range(4)]
    np.testing.assert_array_equal(path_efficiency(files), path_efficiency(path))


def test_a_path_leads_through_the_same_weights() -> None:
    with pytest.raises(InputError, match="their names differ"):
        path_efficiency([{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    with pytest.raises(InputError, match=r"a has shape \(2,\) at the start and \(3,\) at point 1"):
        path_efficiency([{"a": torch.ones(2)}, {"a": torch.ones(3)}])


def epochs(run: str, count: int, reference: str = SMALL) -> dict[str, Encoder]:
    """A random walk from random weights that leaves position embeddings where they are."""
    found = [dataclasses.replace(load_encoder(reference), reference=f"run:{run}?step={n}") for n in range(count)]
    random = torch.Generator().manual_seed(0)
    for before, after in itertools.pairwise(found):
        after.module.load_state_dict(before.module.state_dict())
        for name, weights in after.module.named_parameters():
            if name != "pos_embed":
                weights.data += 0.1 * torch.randn(weights.shape, generator=random)
    return {f"{run}, step {n}": encoder for n, encoder in enumerate(found)}


def test_weights_are_found_by_block_and_layer() -> None:
    groups = groups_of(load_encoder(SMALL))
    assert groups["blocks.1.attn.qkv.weight"] == groups["blocks.1.attn.qkv.bias"] == ("block.1", "attn.qkv")
    assert groups["blocks.0.mlp.fc2.weight"] == ("block.0", "mlp.fc2")
    assert groups["blocks.0.norm1.bias"] == ("block.0", "norm1")
    assert groups["pos_embed"] == ("outside blocks", "pos_embed")
    assert groups["patch_embed.proj.weight"] == ("outside blocks", "patch_embed.proj")
    assert groups["head.bias"] == ("outside blocks", "head")
    cnn = groups_of(load_encoder("timm:resnet18@random"))
    assert cnn["layer1.1.conv2.weight"] == ("block.1", "conv2")
    assert cnn["layer2.0.downsample.0.weight"] == ("block.2", "downsample.0")
    assert cnn["conv1.weight"] == ("outside blocks", "conv1")


def test_every_group_is_its_weights_as_one_vector() -> None:
    encoders = epochs("runs/mine", 4) | {"other": load_encoder(SMALL)}
    result = paths_of(encoders, trainings_of(encoders))
    parameters = [dict(e.module.named_parameters()) for e in encoders.values() if e.reference.startswith("run:")]
    groups = groups_of(encoders["runs/mine, step 0"])
    for place in result.place.values:
        for weights in result.weights.values:
            several = {"all": lambda _: True, "attention": lambda layer: layer.startswith("attn.")}
            belongs = several.get(str(weights), str(weights).__eq__)
            names = [n for n, (p, w) in groups.items() if place in ("all", p) and belongs(w)]
            cell = result.sel(place=place, weights=weights)
            if not names:
                assert (cell.efficiency_reason == ABSENT).all()
                assert cell.distance.isnull().all()
                continue
            path = np.stack([np.concatenate([p[n].detach().double().flatten() for n in names]) for p in parameters])
            np.testing.assert_allclose(cell.distance, np.linalg.norm(path - path[0], axis=1), rtol=1e-10)
            if weights == "pos_embed":
                assert cell.efficiency.isnull().all()
                assert cell.efficiency_reason.values.tolist() == [START, STILL, STILL, STILL]
                continue
            with np.errstate(invalid="ignore"):
                np.testing.assert_allclose(cell.efficiency, plain(path), rtol=1e-10)
            assert cell.efficiency_reason.values.tolist() == [START, "", "", ""]
    assert set(result.place.values) == {"all", "outside blocks", "block.0", "block.1"}
    assert result.weights.values.tolist()[:2] == ["all", "attention"]


def test_trainings_of_other_architectures_lie_side_by_side() -> None:
    encoders = epochs("a", 3) | epochs("b", 2, "timm:resnet18@random?size=32")
    result = paths_of(encoders, trainings_of(encoders))
    for name, weights in (("a, step 1", "conv1"), ("b, step 1", "attn.qkv")):
        assert str(result.efficiency_reason.sel(encoder=name, place="all", weights=weights).item()) == ABSENT
    assert float(result.efficiency.sel(encoder="b, step 1", place="block.7", weights="conv2")) == pytest.approx(1)
    assert result.encoder.values.tolist() == list(encoders)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mine, step 1", "mine, step 10"], "mine"),
        (["mine step 1", "mine step 10"], "mine"),
        (["mine, step 1 (2)", "mine, step 10 (2)"], "mine (2)"),
        (["before", "after"], "tuned"),
    ],
)
def test_trainings_have_the_name_of_their_epochs_or_of_their_folder(names: list[str], expected: str) -> None:
    encoder: Any = load_encoder(SMALL)
    # In any order, with other options beside the epoch.
    of = {
        names[1]: dataclasses.replace(encoder, reference="run:runs/tuned?decoder=true&step=10"),
        "other": encoder,
        names[0]: dataclasses.replace(encoder, reference="run:runs/tuned?step=1&decoder=true"),
    }
    (training,) = trainings_of(of)
    assert training.name == expected
    assert training.steps == {1: names[0], 10: names[1]}
    assert training.start == names[0]


def test_trainings_of_one_name_are_told_apart_by_their_references() -> None:
    encoder = load_encoder(SMALL)
    of = {
        f"x, step {n}": dataclasses.replace(encoder, reference=f"run:{run}/x?step={n}")
        for run, n in [("a", 0), ("a", 1), ("b", 2), ("b", 3)]
    }
    assert [training.name for training in trainings_of(of)] == ["run:a/x", "run:b/x"]


def test_what_is_no_path_is_one_sentence() -> None:
    encoder = load_encoder(SMALL)
    with pytest.raises(InputError, match="none of these is a step of one; train with --set keep=log"):
        trainings_of({"a": encoder, "b": dataclasses.replace(encoder, reference="run:runs/x")})
    with pytest.raises(InputError, match=r"of run:runs/x there is one; give 'run:runs/x\?step=\*'"):
        trainings_of({"a": dataclasses.replace(encoder, reference="run:runs/x?step=3")})
