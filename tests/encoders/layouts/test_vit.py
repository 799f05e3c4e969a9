"""What the layouts of official ViTs share: measures, heads, sizes, the way back from a folder, and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.official_vit import HEADS, SIDE, WIDTH, activations, check_sites, images, saved, sincos, vit

import sightline as sl
from sightline.core.errors import InputError
from sightline.core.references import parse_reference
from sightline.encoders.files.reading import read_checkpoint
from sightline.encoders.formats import dino, mae, moco_v3, msn
from sightline.encoders.layouts.layout import Layout, _NoRandomNumbers, build, recognized
from sightline.encoders.saved import save_encoder

FORMATS = (mae, moco_v3, dino, msn)
MAE = {"model": vit() | {"pos_embed": sincos(SIDE, SIDE, WIDTH, row_first=False)}}
MOCO = {"model": vit() | {"pos_embed": sincos(SIDE, SIDE, WIDTH, row_first=True)}}


@pytest.mark.parametrize(("classes", "pooled"), [(0, False), (5, False), (5, True)])
def test_a_saved_encoder_is_the_same(classes: int, pooled: bool, tmp_path: Path) -> None:
    path = saved({"model": vit(classes=classes, pooled=pooled)}, tmp_path)
    encoder = sl.load_encoder(f"dino:{path}?heads={HEADS}&size=8x24")
    again = sl.load_encoder(f"run:{save_encoder(encoder, tmp_path / 'saved')}")
    assert (again.weights, again.preprocess, again.tokens) == (encoder.weights, encoder.preprocess, encoder.tokens)
    assert (again.heads, again.depth, again.patch) == (HEADS, 3, 4)
    with torch.no_grad():
        assert torch.equal(again(images(8, 24)), encoder(images(8, 24)))


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_heads_change_what_is_computed(heads: int, tmp_path: Path) -> None:
    encoder = sl.load_encoder(f"dino:{saved(vit(), tmp_path)}?heads={heads}")
    check_sites(encoder, activations(vit(), images(), heads), images())


def test_another_width_of_the_mlp(tmp_path: Path) -> None:
    state = vit()
    for i in range(3):
        for name in ("fc1.weight", "fc1.bias"):
            state[f"blocks.{i}.mlp.{name}"] = state[f"blocks.{i}.mlp.{name}"][:40]
        state[f"blocks.{i}.mlp.fc2.weight"] = state[f"blocks.{i}.mlp.fc2.weight"][:, :40]
    check_sites(sl.load_encoder(f"dino:{saved(state, tmp_path)}?heads=3"), activations(state, images()), images())


def test_weights_in_half_precision(tmp_path: Path) -> None:
    """A smaller file computes in float32 what its rounded weights say, at another size, too."""
    state = {name: value.half() for name, value in vit().items()}
    encoder = sl.load_encoder(f"dino:{saved(state, tmp_path)}?heads=3")
    check_sites(encoder, activations({name: value.float() for name, value in state.items()}, images()), images())
    assert sl.load_encoder(f"mae:{tmp_path / 'file.pth'}?heads=3&size=24").module.pos_embed.dtype == torch.float32


def test_a_grid_that_is_not_square_needs_its_size(tmp_path: Path) -> None:
    state = vit()
    state["pos_embed"] = state["pos_embed"][:, :13]  # 3 × 4 patches
    path = saved(state, tmp_path)
    check_sites(sl.load_encoder(f"dino:{path}?heads=3&size=12x16"), activations(state, images(12, 16)), images(12, 16))
    for size in ("", "&size=16"):
        with pytest.raises(InputError, match=r"positions of 12 patches, which are not a square; write \?size=HEIGHTx"):
            sl.load_encoder(f"dino:{path}?heads=3{size}")


@pytest.mark.parametrize("source", FORMATS, ids=lambda source: source.TITLE)
def test_a_width_that_is_not_official_needs_its_heads(source: Any, tmp_path: Path) -> None:
    name, path = source.__name__.rpartition(".")[2], saved(vit(), tmp_path)
    with pytest.raises(InputError, match=r"No tensor gives the number of heads, .* width 24 .*; write \?heads=NUMBER"):
        sl.load_encoder(f"{name}:{path}")
    for wrong in ("5", "0", "x"):
        with pytest.raises(InputError, match=rf"heads={wrong} cannot split a width of 24"):
            sl.load_encoder(f"{name}:{path}?heads={wrong}")


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    path = saved(vit(), tmp_path)
    with pytest.raises(InputError, match=r"Images of 17 × 17 pixels cannot be cut into patches of 4"):
        sl.load_encoder(f"dino:{path}?heads=3&size=17")
    with pytest.raises(InputError, match=r"cannot be cut into patches of 4|is not a size"):
        sl.load_encoder(f"dino:{path}?heads=3&size=2")


@pytest.mark.parametrize("source", FORMATS, ids=lambda source: source.TITLE)
def test_a_file_without_the_encoder(source: Any, tmp_path: Path) -> None:
    name = source.__name__.rpartition(".")[2]
    path = saved({"state_dict": {"linear.weight": torch.ones(3, 3)}, "epoch": 3}, tmp_path)
    with pytest.raises(InputError, match=rf"holds no encoder of {source.TITLE} .*, but state_dict, epoch; is it"):
        sl.load_encoder(f"{name}:{path}?heads=3")


@pytest.mark.parametrize(
    ("given", "content", "title", "why"),
    [
        ("mae", MOCO, "MoCo-v3", r"its positions are MoCo-v3's sine-cosine, row first; write moco_v3:"),
        ("dino", MAE, "MAE", r"its positions are MAE's sine-cosine, column first; write mae:"),
        ("dino", {"prototypes": torch.ones(2, 2), "encoder": vit(), "target_encoder": vit()}, "MSN", "write msn:"),
    ],
)
def test_a_file_of_another_format_is_named(given: str, content: Any, title: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"is a checkpoint of {title}: .*{why}"):
        sl.load_encoder(f"{given}:{saved(content, tmp_path)}?heads=3")


def test_one_format_each(tmp_path: Path) -> None:
    assert list(recognized(read_checkpoint(saved(MAE, tmp_path)))) == ["mae"]
    assert list(recognized(read_checkpoint(saved(MOCO, tmp_path)))) == ["moco_v3"]
    assert recognized(read_checkpoint(saved(vit(), tmp_path))) == {}


@pytest.mark.parametrize("name", ["blocks.0.ls1.gamma", "blocks.2.attn.q_norm.weight", "reg_token", "norm_pre.weight"])
def test_a_vit_that_computes_something_else_is_refused(name: str, tmp_path: Path) -> None:
    path = saved(vit() | {name: torch.ones(WIDTH)}, tmp_path)
    with pytest.raises(InputError, match=rf"has {name}, which the ViT of DINO does not have"):
        sl.load_encoder(f"dino:{path}?heads=3")


def test_a_norm_beside_the_norm_of_the_mean_is_left_over(tmp_path: Path) -> None:
    state = vit(classes=5, pooled=True)
    path = saved(state | {"norm.weight": torch.ones(WIDTH), "norm.bias": torch.ones(WIDTH)}, tmp_path)
    encoder = sl.load_encoder(f"dino:{path}?heads=3")
    check_sites(encoder, activations(state, images()), images())
    assert encoder.notes == [
        "2 weights of the file are not part of the encoder and were left out: norm.weight, norm.bias"
    ]


def test_weights_that_are_no_real_numbers(tmp_path: Path) -> None:
    """Integers of a quantised file would be copied as they are, without their scale."""
    state = vit()
    state["blocks.1.mlp.fc1.weight"] = (state["blocks.1.mlp.fc1.weight"] * 100).to(torch.int8)
    with pytest.raises(InputError, match=r"fc1\.weight in int8 instead of real numbers; give .* not quantised"):
        sl.load_encoder(f"dino:{saved(state, tmp_path)}?heads=3")


@pytest.mark.parametrize("source", ["dino", "checkpoint"])
def test_shapes_that_no_vit_has(source: str, tmp_path: Path) -> None:
    path = saved(vit() | {"patch_embed.proj.weight": torch.ones(WIDTH, 3, 0, 0)}, tmp_path)
    with pytest.raises(InputError, match=r"has the names of \w+, but not its shapes .* is it damaged"):
        sl.load_encoder(f"{source}:{path}?heads=3")


@pytest.mark.parametrize(
    "architecture",
    [
        "vit_base_patch16_224@random?embed_dim=24&depth=2&num_heads=3&patch_size=4&img_size=(16,16)&num_classes=5",
        "beit_base_patch16_224@random?embed_dim=24&depth=2&num_heads=3&patch_size=4&img_size=(16,16)&num_classes=5",
        "convnextv2_tiny@random?depths=(1,1,1,1)&dims=(8,8,8,8)&num_classes=5",
        "resnet18@random?layers=(1,1,1,1)&num_classes=5&stem=small",
    ],
)
def test_nothing_is_drawn_for_weights_that_are_loaded(architecture: str) -> None:
    """What is built without drawing weights is, with weights loaded, the model that was built with them."""
    drawn = sl.load_encoder(f"timm:{architecture}&seed=3")
    before = torch.random.get_rng_state()
    layout = Layout("a format", f"timm:{architecture}", drawn.module.state_dict(), drawn.preprocess)
    built = build(layout, parse_reference("checkpoint:file.pth"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert built.weights == drawn.weights
    for (name, value), (_, other) in zip(drawn.module.named_buffers(), built.module.named_buffers(), strict=True):
        assert torch.equal(value, other), name
    with torch.no_grad():
        size = built.preprocess.size
        assert torch.equal(built(images(*size)), drawn(images(*size)))
    with _NoRandomNumbers():  # so this does leave something out
        assert torch.full((3,), 7.0).normal_().tolist() == [7, 7, 7]
