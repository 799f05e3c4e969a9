"""A ViT's forward pass in steps is timm's own; windows, masks and positions against plain twins."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from support.official_vit import matrix
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.modules.positions import Resize, by_scale, by_size
from sightline.encoders.modules.vit import embed, encode, features, fix_positions, grid_of, sincos
from sightline.encoders.watching import capture
from sightline.training.backbones import Backbone

TINY = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4)
KINDS: dict[str, dict[str, Any]] = {
    "cls": {},
    "registers": {"reg_tokens": 3},
    "no cls": {"class_token": False, "global_pool": "avg"},
    "no_embed_class": {"no_embed_class": True, "reg_tokens": 2},
    "pre_norm": {"pre_norm": True},
    "no positions": {"pos_embed": "none"},
}


def make(kind: str = "cls", **more: Any) -> Any:
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 0}
    torch.manual_seed(3)
    vit = timm.create_model("vit_tiny_patch16_224", **options | KINDS[kind] | more).eval()
    with torch.no_grad():  # so that nothing is zero or small that could hide a mistake
        for name, parameter in vit.named_parameters():
            if "token" in name or "pos" in name or "norm" in name or "bias" in name:
                parameter.normal_()
    return vit


def images(size: tuple[int, int] = (16, 16), n: int = 3) -> Tensor:
    return torch.randn(n, 3, *size, generator=torch.Generator().manual_seed(1))


def run(vit: Any, x: Tensor, keep: Tensor | None = None) -> Tensor:
    return encode(vit, embed(vit, x), grid_of(vit, x), keep)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_are_timms_forward(kind: str) -> None:
    vit, x = make(kind), images()
    torch.testing.assert_close(run(vit, x), vit.forward_features(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(features(vit, x), vit(x), rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("size", [(8, 8), (24, 16), (12, 28)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("resize", "more"), [(by_size, 0.0), (by_scale, 0.1)])
def test_other_sizes_are_those_of_a_vit_with_resized_positions(
    kind: str, size: tuple[int, int], resize: Resize, more: float
) -> None:
    vit, other = make(kind), make(kind, img_size=size)
    state = vit.state_dict()
    if vit.pos_embed is not None:
        rows, columns = (matrix(side // 4, 4, (side // 4 + more) / 4) for side in size)
        patches = torch.einsum("ri,cj,ijd->rcd", rows, columns, state["pos_embed"][0, -16:].double().view(4, 4, 16))
        state["pos_embed"] = torch.cat([state["pos_embed"][:, :-16], patches.float().view(1, -1, 16)], 1)
    other.load_state_dict(state)
    tokens = embed(vit, images(size), resize=resize)
    found = encode(vit, tokens, grid_of(vit, images(size)))
    torch.testing.assert_close(found, other.forward_features(images(size)), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_does_not_exist(kind: str) -> None:
    vit, x = make(kind), images()
    keep = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:5] for i in range(3)])
    tokens, prefix = embed(vit, x), vit.num_prefix_tokens
    found = encode(vit, tokens, (4, 4), keep)
    assert found.shape == (3, prefix + 5, 16)
    for i in range(3):
        alone = torch.cat([tokens[i, :prefix], tokens[i, prefix:][keep[i]]]).unsqueeze(0)
        torch.testing.assert_close(found[i : i + 1], vit.norm(vit.blocks(alone)), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_keeping_all_is_keeping_none_out() -> None:
    vit, x = make("registers"), images()
    torch.testing.assert_close(run(vit, x, torch.arange(16).expand(3, -1)), run(vit, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("kept", [None, 5])
@pytest.mark.parametrize("more", [{}, {"reg_tokens": 3}, {"init_values": 0.5, "drop_path_rate": 0.5, "qk_norm": True}])
def test_a_cls_token_alone_has_the_values_and_gradients_that_it_has_among_all(
    more: dict[str, Any], kept: int | None, window: int
) -> None:
    keep = None if kept is None else torch.stack([torch.arange(kept), torch.arange(16 - kept, 16), torch.arange(kept)])
    found = []
    for pooled in (lambda vit, x: features(vit, x, keep), lambda vit, x: run(vit, x, keep)[:, 0]):
        vit = make("cls", **more).train()
        vit.attention_window = window
        torch.manual_seed(0)  # for the paths that are dropped
        x = pooled(vit, images())
        x.square().sum().backward()
        found.append([x, *(p.grad for p in vit.parameters())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_last_mlp_sees_the_cls_token_alone() -> None:
    vit, seen = make("registers"), []
    for block in vit.blocks:
        block.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    features(vit, images())
    assert seen == [20, 1]
    vit.blocks[1].register_forward_hook(lambda *_: seen.append(0))  # who listens to a block hears of all tokens
    features(vit, images())
    assert seen == [20, 1, 20, 20, 0]


@torch.no_grad()
@pytest.mark.parametrize("pooling", [{"global_pool": "avg"}, {"global_pool": "map"}, {"block_fn": ResPostBlock}])
def test_features_that_are_more_than_a_cls_token_are_computed_from_all(pooling: dict[str, Any]) -> None:
    vit, x = make("cls", **pooling), images()
    torch.testing.assert_close(features(vit, x), vit(x), rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["cls", "no_embed_class"])
def test_the_mask_token_stands_for_the_embedding_and_has_a_position(kind: str) -> None:
    vit, x = make(kind), images()
    mask = torch.rand(3, 16, generator=torch.Generator().manual_seed(2)) < 0.5
    token = torch.randn(1, 1, 16)
    prefix = vit.num_prefix_tokens
    plain, masked = embed(vit, x)[:, prefix:], embed(vit, x, mask, token)[:, prefix:]
    positions = vit.pos_embed[:, -16:].expand(3, -1, -1)
    torch.testing.assert_close(masked[~mask], plain[~mask])
    torch.testing.assert_close(masked[mask], (token + positions)[mask])
    torch.testing.assert_close(embed(vit, x, mask, token)[:, :prefix], embed(vit, x)[:, :prefix])


def naive(vit: Any, tokens: Tensor, places: list[list[tuple[int, int] | None]], window: int) -> Tensor:
    """Blocks in float64 with loops over who attends to whom; a place of None is a prefix token."""
    result = []
    for x, where in zip(tokens.double(), places, strict=True):
        for block in vit.blocks:
            y = block.norm1.double()(x)
            qkv = block.attn.qkv.double()(y).view(len(y), 3, 2, 8)
            mixed = torch.zeros(len(y), 2, 8, dtype=torch.float64)
            for head in range(2):
                for i, here in enumerate(where):
                    seen = [
                        j
                        for j, there in enumerate(where)
                        if here is None
                        or there is None
                        or max(abs(here[0] - there[0]), abs(here[1] - there[1])) <= window // 2
                    ]
                    scores = torch.stack([qkv[i, 0, head] @ qkv[j, 1, head] / math.sqrt(8) for j in seen])
                    mixed[i, head] = sum(
                        (w * qkv[j, 2, head] for w, j in zip(scores.softmax(0), seen, strict=True)),
                        torch.zeros(8, dtype=torch.float64),
                    )
            x = x + block.attn.proj.double()(mixed.flatten(1))
            x = x + block.mlp.double()(block.norm2.double()(x))
        result.append(vit.norm.double()(x))
    return torch.stack(result)


@torch.no_grad()
@pytest.mark.parametrize("size", [(16, 16), (8, 20)])
@pytest.mark.parametrize("kind", ["registers", "no cls"])
@pytest.mark.parametrize("kept", [None, 5])
def test_attention_windows(kind: str, size: tuple[int, int], kept: int | None) -> None:
    vit, x = make(kind), images(size, 2)
    vit.attention_window = 3
    rows, columns = grid_of(vit, x)
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    prefix: list[tuple[int, int] | None] = [None] * vit.num_prefix_tokens
    tokens = embed(vit, x)
    keep = None
    places = [[*prefix, *cells]] * 2
    chosen = tokens
    if kept:
        keep = torch.stack(
            [torch.randperm(len(cells), generator=torch.Generator().manual_seed(i))[:kept] for i in (0, 1)]
        )
        places = [[*prefix, *(cells[n] for n in ids)] for ids in keep.tolist()]
        chosen = torch.stack(
            [torch.cat([t[: len(prefix)], t[len(prefix) :][ids]]) for t, ids in zip(tokens, keep, strict=True)]
        )
    found = encode(vit, tokens, (rows, columns), keep)
    torch.testing.assert_close(found.double(), naive(vit, chosen, places, 3), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_restricted_vit_is_restricted_in_its_own_forward_pass() -> None:
    encoder = sl.load_encoder(f"{TINY.reference()}&attention_window=3&global_pool=avg&reg_tokens=2")
    vit: Any = encoder.module
    copied = copy.deepcopy(vit)
    x = images()
    cells = [(row, column) for row in range(4) for column in range(4)]
    tokens = naive(copy.deepcopy(vit), embed(vit, x), [[None, None, None, *cells]] * 3, 3)
    wanted = vit.forward_head(tokens.float())
    torch.testing.assert_close(encoder(x), wanted, rtol=1e-5, atol=1e-5)
    with capture(encoder, "block.*.attn_map") as maps:
        encoder(x)
    for at in maps.values():
        far = torch.tensor([[max(abs(a - c), abs(b - d)) > 1 for c, d in cells] for a, b in cells])
        assert not at[..., 3:, 3:][..., far].any()
        assert at[..., 3:, 3:][..., ~far].all()
        assert at[..., :3].all()
    for parameter in vit.parameters():  # the copy computes with its own weights
        parameter.zero_()
    torch.testing.assert_close(copied(x), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match=r"Images of \(24, 24\) pixels were given to a ViT for \(16, 16\)"):
        vit(images((24, 24)))
    with pytest.raises(InputError, match="has its own mask"):
        vit(x, attn_mask=torch.ones(19, 19, dtype=torch.bool))


def test_windows_that_cannot_be() -> None:
    for window, sentence in (("4", "it must be odd"), ("x", "must be a whole number")):
        with pytest.raises(InputError, match=sentence):
            sl.load_encoder(f"{TINY.reference()}&attention_window={window}")
    with pytest.raises(InputError, match="attention_window is for a ViT, not for ResNet"):
        sl.load_encoder("timm:resnet18@random?attention_window=3")


@torch.no_grad()
def test_a_window_as_large_as_the_grid_is_no_window() -> None:
    vit, x = make("cls"), images()
    full = run(vit, x)
    for window in (7, 9):
        vit.attention_window = window
        torch.testing.assert_close(run(vit, x), full, rtol=1e-5, atol=1e-6)
    vit.attention_window = 5
    assert not torch.allclose(run(vit, x), full, atol=1e-3)


@torch.no_grad()
def test_a_window_of_one_sees_only_itself_and_the_prefix() -> None:
    vit = make("no cls")
    vit.attention_window = 1
    x = images()
    other = x.clone()
    other[:, :, :4, :4] += 1  # the first patch
    one, two = run(vit, x), run(vit, other)
    assert not torch.allclose(one[:, 0], two[:, 0], atol=1e-3)
    assert torch.equal(one[:, 1:], two[:, 1:])


@pytest.mark.parametrize("column_first", [True, False])
def test_sincos_against_a_loop(column_first: bool) -> None:
    rows, columns, width = 3, 5, 16
    expected = np.zeros((2 + rows * columns, width))
    for row in range(rows):
        for column in range(columns):
            first, second = (column, row) if column_first else (row, column)
            for k in range(width // 4):
                omega = 1 / 10000 ** (k / (width / 4))
                place = 2 + row * columns + column
                expected[place, k] = math.sin(first * omega)
                expected[place, width // 4 + k] = math.cos(first * omega)
                expected[place, width // 2 + k] = math.sin(second * omega)
                expected[place, 3 * width // 4 + k] = math.cos(second * omega)
    found = sincos((rows, columns), width, prefix=2, column_first=column_first)
    assert found.shape == (1, 17, 16)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-7)


def test_sincos_needs_a_width_of_fours() -> None:
    with pytest.raises(InputError, match="a width that 4 divides, not 18"):
        sincos((2, 2), 18)


@pytest.mark.parametrize("kind", ["registers", "no cls", "no_embed_class"])
def test_fixed_positions_are_not_trained(kind: str) -> None:
    vit = make(kind)
    prefix = vit.pos_embed.shape[1] - 16
    fix_positions(vit)
    assert not vit.pos_embed.requires_grad
    assert torch.equal(vit.pos_embed.detach(), sincos((4, 4), 16, prefix))
    with pytest.raises(InputError, match="no absolute positions"):
        fix_positions(make("no positions"))
