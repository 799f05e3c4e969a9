"""ViTDet's checkpoints: every site equal to what the official model computes, by loops over pairs of patches."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.official_vit import layer_norm, linear
from torch import Tensor
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.encoders.files.convert import convert
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder
from sightline.encoders.watching import capture

State = dict[str, Tensor]
WIDTH, HEADS, PATCH, WINDOW, SIDE, TRAINED = 12, 2, 4, 2, 5, 3  # patches on a side of the image and at pre-training
GLOBAL = (1, 3)


def weights(depth: int = 4, tables: bool = True, cls: bool = True) -> State:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=random)

    def layer(name: str, *shape: int) -> State:
        return {f"{name}.weight": normal(*shape) + (len(shape) == 1), f"{name}.bias": normal(shape[0])}

    state = {"pos_embed": normal(1, TRAINED**2 + cls, WIDTH)} | layer("patch_embed.proj", WIDTH, 3, PATCH, PATCH)
    for i in range(depth):
        state |= layer(f"blocks.{i}.norm1", WIDTH) | layer(f"blocks.{i}.attn.qkv", 3 * WIDTH, WIDTH)
        for axis in "hw" if tables else "":
            rows = 2 * (SIDE if i in GLOBAL else WINDOW) - 1
            state[f"blocks.{i}.attn.rel_pos_{axis}"] = normal(rows, WIDTH // HEADS)
        state |= layer(f"blocks.{i}.attn.proj", WIDTH, WIDTH) | layer(f"blocks.{i}.norm2", WIDTH)
        state |= layer(f"blocks.{i}.mlp.fc1", 4 * WIDTH, WIDTH) | layer(f"blocks.{i}.mlp.fc2", WIDTH, 4 * WIDTH)
    return state


def detector(state: State) -> dict[str, Any]:
    beside = {"backbone.simfp_2.0.weight": torch.ones(2), "roi_heads.mask_head.deconv.bias": torch.ones(2)}
    return {"model": {f"backbone.net.{name}": value for name, value in state.items()} | beside, "iteration": 3}


def saved(folder: Path, content: dict[str, Any]) -> Path:
    torch.save(content, folder / "some.pth")
    return folder / "some.pth"


def activations(weights: State, images: Tensor, windows: tuple[int, ...]) -> State:
    """Of every block, in float64: keys are looked up one by one, those beyond the image are empty patches."""
    state = {name: value.double() for name, value in weights.items()}
    x = F.conv2d(images.double(), state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=PATCH)
    rows, columns = x.shape[2:]
    cls = state["pos_embed"].shape[1] - TRAINED**2
    table = state["pos_embed"][0, cls:].T.reshape(1, WIDTH, TRAINED, TRAINED)
    positions = F.interpolate(table, (rows, columns), mode="bicubic", align_corners=False)
    x = (x + positions).permute(0, 2, 3, 1)  # (B, rows, columns, D)
    found = {"embed": x.flatten(1, 2)}
    for i, window in enumerate(windows):
        at = f"blocks.{i}"
        sides = (window, window) if window else (rows, columns)
        tables = [state.get(f"{at}.attn.rel_pos_{axis}") for axis in "hw"]
        tables = [t if t is None else stretched(t, 2 * side - 1) for t, side in zip(tables, sides, strict=True)]
        normed = layer_norm(state, f"{at}.norm1", x)
        mixed = torch.zeros_like(x)
        for r in range(rows):
            for c in range(columns):
                top, left = (r - r % window, c - c % window) if window else (0, 0)
                keys = [(top + dr, left + dc) for dr in range(sides[0]) for dc in range(sides[1])]
                inside = [normed[:, kr, kc] if kr < rows and kc < columns else 0 * normed[:, 0, 0] for kr, kc in keys]
                qkv = linear(state, f"{at}.attn.qkv", torch.stack(inside, 1)).unflatten(-1, (3, HEADS, -1))
                q = qkv[:, keys.index((r, c)), 0]  # (B, H, d)
                scores = torch.einsum("bhd,bkhd->bhk", q, qkv[:, :, 1]) / q.shape[-1] ** 0.5
                for n, (kr, kc) in enumerate(keys):
                    for axis, distance in zip(tables, (r - kr, c - kc), strict=True):
                        scores[:, :, n] += 0 if axis is None else q @ axis[distance + len(axis) // 2]
                mixed[:, r, c] = torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), qkv[:, :, 2]).flatten(1)
        found[f"block.{i}.attn"] = linear(state, f"{at}.attn.proj", mixed).flatten(1, 2)
        x = x + linear(state, f"{at}.attn.proj", mixed)
        hidden = F.gelu(linear(state, f"{at}.mlp.fc1", layer_norm(state, f"{at}.norm2", x)))
        x = x + linear(state, f"{at}.mlp.fc2", hidden)
        found[f"block.{i}"] = x.flatten(1, 2)
    return found


def stretched(table: Tensor, rows: int) -> Tensor:
    return F.interpolate(table.T[None], size=rows, mode="linear")[0].T


def check(reference: str, state: State, windows: tuple[int, ...] = (WINDOW, 0, WINDOW, 0)) -> Any:
    encoder = load_encoder(reference)
    images = torch.randn(2, 3, *encoder.preprocess.size, generator=torch.Generator().manual_seed(1))
    wanted = activations(state, images, windows)
    with torch.no_grad(), capture(encoder, list(wanted)) as found:
        output = encoder(images)
    for site, value in wanted.items():
        torch.testing.assert_close(found[site].double(), value, rtol=1e-5, atol=1e-5, msg=lambda m, s=site: f"{s}: {m}")
    torch.testing.assert_close(output.double(), wanted[f"block.{len(windows) - 1}"].mean(1), rtol=1e-5, atol=1e-5)
    return encoder


@pytest.mark.parametrize("size", ["", "?size=16", "?size=12x28"])
def test_every_block_is_the_official_models(tmp_path, size):
    """Tables tell windows, heads and size; windows that do not fit have empty patches, other sizes other tables."""
    encoder = check(f"vitdet:{saved(tmp_path, detector(weights()))}{size}", weights())
    assert (encoder.depth, encoder.heads, encoder.patch) == (4, HEADS, PATCH)
    assert encoder.tokens is not None
    assert (encoder.tokens.prefix, encoder.tokens.cls) == (0, None)
    assert size or encoder.preprocess.size == (SIDE * PATCH, SIDE * PATCH)
    assert "norm" not in encoder.sites


def test_attention_is_seen_where_it_spans_the_image(tmp_path):
    encoder = load_encoder(f"vitdet:{saved(tmp_path, detector(weights()))}")
    images = torch.randn(2, 3, *encoder.preprocess.size)
    with torch.no_grad(), capture(encoder, "block.*.attn_map") as found:
        encoder(images)
    assert list(found) == ["block.1.attn_map", "block.3.attn_map"]
    torch.testing.assert_close(found["block.1.attn_map"].sum(-1), torch.ones(2, HEADS, SIDE**2))


@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_backbone_alone_and_no_position_of_cls(tmp_path, prefix):
    state = weights(cls=False)
    path = saved(tmp_path, {prefix + name: value for name, value in state.items()})
    encoder = check(f"checkpoint:{path}", state)
    assert "recognised as ViTDet" in encoder.notes[0]


def test_a_pickle_of_arrays(tmp_path):
    content = detector(weights())
    arrays = {name: value.numpy() for name, value in content["model"].items()}
    for protocol in (2, 4):
        (tmp_path / "model_final.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "some"}, protocol))
        encoder = check(f"checkpoint:{tmp_path / 'model_final.pkl'}", weights())
        assert "roi_heads.mask_head.deconv.bias" in encoder.notes[-1]


def test_without_tables_windows_are_asked_for(tmp_path):
    """Officially the last block of each quarter attends to the whole image."""
    state = weights(depth=8, tables=False)
    path = saved(tmp_path, detector(state))
    with pytest.raises(InputError, match=r"write \?window=14"):
        load_encoder(f"vitdet:{path}?heads=2")
    check(f"vitdet:{path}?heads=2&size=12&window=2", state, (2, 0) * 4)
    check(f"vitdet:{path}?heads=2&size=12&window=0", state, (0,) * 8)
    assert load_encoder(f"vitdet:{path}?heads=2&window=2").preprocess.size == (64 * PATCH, 64 * PATCH)


def test_saved_and_loaded_again(tmp_path):
    encoder = load_encoder(f"vitdet:{saved(tmp_path, detector(weights()))}")
    again = load_encoder(f"run:{save_encoder(encoder, tmp_path / 'run')}")
    images = torch.randn(2, 3, *encoder.preprocess.size)
    assert (again.weights, list(again.sites)) == (encoder.weights, list(encoder.sites))
    assert torch.equal(again(images), encoder(images))


@pytest.mark.parametrize(
    ("more", "options", "reason"),
    [
        ({"blocks.1.residual.conv1.weight": torch.ones(2)}, "", "blocks.1.residual.conv1.weight, which the ViT"),
        ({}, "?window=2", "leave window out"),
        ({}, "?size=21", "cannot be cut into patches of 4"),
    ],
)
def test_refused(tmp_path, more, options, reason):
    path = saved(tmp_path, detector(weights() | more))
    with pytest.raises(InputError, match=reason):
        load_encoder(f"vitdet:{path}{options}")


def test_the_vit_of_sam_is_another(tmp_path):
    """It has the same blocks, and a neck behind them."""
    path = saved(tmp_path, weights() | {"neck.0.weight": torch.ones(2, WIDTH, 1, 1)})
    with pytest.raises(InputError, match="timm:NAME@FILE"):
        load_encoder(f"checkpoint:{path}")
    with pytest.raises(InputError, match="which the ViT of ViTDet does not have"):
        load_encoder(f"vitdet:{path}")


def test_no_other_library_can_build_it(tmp_path):
    path = saved(tmp_path, detector(weights()))
    with pytest.raises(InputError, match="has windows, which timm cannot build"):
        convert(f"vitdet:{path}", tmp_path / "out")
