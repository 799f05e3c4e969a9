"""timm's Beit as a backbone: its steps, masks, crops and windows against the official model, written out in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.official_beit import GRID, HEADS, PATCH, SHARED, SIZE, WIDTH, activations, own, resized_table, weights
from torch import Tensor

import sightline as sl
from sightline.analyses.attention import attention_distance
from sightline.core.errors import InputError
from sightline.encoders.modules.masking import unpatchify
from sightline.encoders.modules.vit import embed, encode, features, grid_of, is_vit, restrict
from sightline.encoders.watching import capture
from sightline.images.pipeline import batches
from sightline.training.backbones import Backbone, build
from sightline.training.objective import objective_named
from sightline.training.objectives import beit, mae, simmim
from sightline.training.objectives.beit.tokenizer import Tokenizer
from sightline.training.recipe import make_recipe, read_recipe

TINY = Backbone("beit", size=SIZE, width=WIDTH, depth=2, heads=HEADS, patch=PATCH)
TABLES = {"shared": weights(), "blocks": weights(shared=False, per_block=True)}


def made(tables: str = "shared", **more: Any) -> Any:
    """A backbone with weights of the official model."""
    module = build(Backbone(**{**vars(TINY), "relative_positions": tables, **more})).module
    module.load_state_dict(
        {k: v for k, v in TABLES[tables].items() if k != "mask_token" and not k.endswith("position_index")}
    )
    return module


def images(size: tuple[int, int] = (SIZE, SIZE), n: int = 3) -> Tensor:
    return torch.randn(n, 3, *size, generator=torch.Generator().manual_seed(1))


def some(n: int = 3, share: float = 0.5) -> Tensor:
    """A mask (B, N)."""
    return torch.rand(n, GRID**2, generator=torch.Generator().manual_seed(2)) < share


# The forward pass in steps


@torch.no_grad()
@pytest.mark.parametrize("tables", TABLES)
def test_the_steps_are_timms_forward_and_the_official_one(tables: str) -> None:
    vit, x = made(tables), images()
    found = encode(vit, embed(vit, x), grid_of(vit, x))
    exact, of = made(tables).double(), x.double()  # sums in another order round differently, which is not the question
    in_steps = encode(exact, embed(exact, of), grid_of(exact, of))
    torch.testing.assert_close(in_steps, exact.forward_features(of), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(features(exact, of), exact(of), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.double(), activations(TABLES[tables], x)["norm"], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("tables", TABLES)
def test_what_is_left_out_has_no_bias_either(tables: str) -> None:
    vit, x = made(tables), images()
    keep = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i))[:4] for i in range(3)])
    found = encode(vit, embed(vit, x), (GRID, GRID), keep)
    for i in range(3):
        plain = activations(TABLES[tables], x[i : i + 1], kept=keep[i].tolist())["norm"]
        torch.testing.assert_close(found[i : i + 1].double(), plain, rtol=1e-5, atol=1e-5)
    shuffled = torch.stack([torch.randperm(9) for _ in range(3)])
    whole, again = encode(vit, embed(vit, x), (GRID, GRID)), encode(vit, embed(vit, x), (GRID, GRID), shuffled)
    torch.testing.assert_close(again[:, 1:], whole[:, 1:].gather(1, shuffled[:, :, None].expand(-1, -1, WIDTH)))


@torch.no_grad()
@pytest.mark.parametrize("grid", [(2, 2), (4, 4), (2, 5)])
@pytest.mark.parametrize("tables", TABLES)
def test_other_sizes_have_tables_as_the_official_code_resizes_them(tables: str, grid: tuple[int, int]) -> None:
    x = images((grid[0] * PATCH, grid[1] * PATCH))
    state = {
        name: resized_table(value, *grid) if name.endswith("bias_table") else value
        for name, value in TABLES[tables].items()
    }
    plain = activations(state, x)["norm"]
    torch.testing.assert_close(features(made(tables), x).double(), plain[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tables", TABLES)
def test_small_crops_train_the_tables(tables: str) -> None:
    vit = made(tables)
    with torch.inference_mode():  # what an analysis leaves in caches must not stop a training
        features(vit, images((8, 8)))
    table = vit.get_parameter(SHARED if tables == "shared" else own(0))
    features(vit, images((8, 8))).square().sum().backward()
    assert table.grad is not None
    assert table.grad[:-3].any()
    # The gradient against a difference of losses, in a direction of its own.
    step = torch.randn(table.shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        losses = []
        for sign in (1, -1):
            table.add_(sign * 1e-2 * step)
            losses.append(features(vit, images((8, 8))).double().square().sum())
            table.sub_(sign * 1e-2 * step)
    assert ((losses[0] - losses[1]) / 2e-2).item() == pytest.approx((table.grad * step).sum().item(), rel=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("kept", [None, [7, 0, 4, 5]])
@pytest.mark.parametrize("tables", TABLES)
def test_windows(tables: str, kept: list[int] | None) -> None:
    vit, x = made(tables), images()
    restrict(vit, 3)
    plain = activations(TABLES[tables], x, kept=kept, window=3)
    keep = None if kept is None else torch.tensor(kept).expand(3, -1)
    found = encode(vit, embed(vit, x), (GRID, GRID), keep)
    torch.testing.assert_close(found.double(), plain["norm"], rtol=1e-5, atol=1e-5)
    if kept is None:
        encoder = sl.load_encoder(vit.eval())
        with capture(encoder, "**") as sites:  # its own forward pass, and what analyses see of it
            torch.testing.assert_close(encoder(x).double(), plain["norm"][:, 0], rtol=1e-5, atol=1e-5)
        for site in ("block.0.qkv", "block.1.attn_map", "block.1.heads", "block.1"):
            torch.testing.assert_close(sites[site].double(), plain[site], rtol=1e-5, atol=1e-5)


def test_the_tables_are_in_their_places_after_an_error() -> None:
    vit = made("blocks")
    with pytest.raises(RuntimeError):
        encode(vit, torch.randn(2, 10, WIDTH + 1), (GRID, GRID))
    assert torch.equal(vit.get_parameter(own(0)), TABLES["blocks"][own(0)])
    assert all(block.attn.relative_position_bias_table is not None for block in vit.blocks)


# Objectives from official weights, end to end


@torch.no_grad()
def test_simmims_reconstruction_is_the_official_one() -> None:
    state, x, mask = TABLES["shared"], images(), some()
    objective = simmim.SimmimObjective(made(), simmim.SimmimConfig(mask_unit=PATCH))
    random = torch.Generator().manual_seed(4)
    # decoder.0 is a 1 × 1 convolution, PixelShuffle wants its outputs as (channel, row, column).
    kernel, bias = (torch.randn(3, PATCH, PATCH, *shape, generator=random) for shape in ((WIDTH,), ()))
    objective.mask_token.copy_(state["mask_token"])
    objective.head.weight.copy_(kernel.permute(1, 2, 0, 3).flatten(0, 2))
    objective.head.bias.copy_(bias.permute(1, 2, 0).flatten())
    tokens = activations(state, x, mask)["norm"][:, 1:]  # (B, N, D)
    rebuilt = torch.zeros(3, 3, SIZE, SIZE, dtype=torch.float64)
    for patch in range(GRID**2):
        top, left = PATCH * (patch // GRID), PATCH * (patch % GRID)
        pixels = torch.einsum("cijd,bd->bcij", kernel.double(), tokens[:, patch]) + bias
        rebuilt[:, :, top : top + PATCH, left : left + PATCH] = pixels
    everywhere = mask.view(3, 1, GRID, GRID).repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    wanted = ((x - rebuilt).abs() * everywhere).sum() / (everywhere.sum() + 1e-5) / 3
    pred = objective.forward_encoder(x, mask)
    assert objective.forward_loss(x, pred, mask).item() == pytest.approx(wanted.item(), rel=1e-6)
    ours = torch.zeros(3, GRID**2, PATCH**2 * 3)
    ours[mask] = pred
    torch.testing.assert_close(unpatchify(ours, (GRID, GRID)).double(), rebuilt * everywhere, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("tables", TABLES)
def test_beits_logits_are_the_official_ones(tables: str) -> None:
    state, x, mask = TABLES[tables], images(), some()
    objective = beit.BeitObjective(made(tables), beit.BeitConfig(codes=7), Tokenizer(PATCH, 7, 8))
    objective.mask_token.copy_(state["mask_token"])
    torch.nn.init.normal_(objective.head.weight)
    torch.nn.init.normal_(objective.head.bias)
    tokens = activations(state, x, mask)["norm"][:, 1:][mask]
    wanted = tokens @ objective.head.weight.double().T + objective.head.bias.double()
    torch.testing.assert_close(objective.forward_encoder(x, mask).double(), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_maes_encoder_sees_relative_positions_of_visible_patches() -> None:
    objective = mae.MaeObjective(
        made(), mae.MaeConfig(mask_ratio=0.5, decoder_width=8, decoder_depth=1, decoder_heads=2)
    )
    state = {name: value.clone() for name, value in objective.backbone.state_dict().items()}
    assert state[SHARED].any()  # Xavier is for linear layers; in a training they begin with 0
    x, noise = images(), torch.rand(3, 9)
    latent, mask, _ = objective.forward_encoder(x, noise)
    for i in range(3):
        visible = noise[i].argsort()[:4].tolist()
        plain = activations(state, x[i : i + 1], kept=visible)["norm"]
        torch.testing.assert_close(latent[i : i + 1].double(), plain, rtol=1e-5, atol=1e-5)
    assert mask.sum(1).tolist() == [5, 5, 5]


@pytest.mark.parametrize(("name", "key"), [("dino", "local_size"), ("msn", "focal_size")])
def test_small_crops_of_too_few_patches_are_said(name: str, key: str) -> None:
    """Two patches on a side have distances −1, 0, 1, too few for a cubic."""
    objective = objective_named(name)
    module = build(Backbone("beit", size=8, width=16, depth=1, heads=2, patch=4)).module
    with pytest.raises(InputError, match="A table of 3 × 3 relative positions is too small for a cubic spline"):
        features(objective.Objective(module, objective.Config(**{key: 4})).backbone, images((4, 4)))


# Building, training, and what is done with it afterwards


def test_measures() -> None:
    vit: Any = build(
        Backbone("beit", size=24, width=32, depth=3, heads=4, patch=4, drop_path=0.3, layer_scale=0.02)
    ).module
    assert is_vit(vit)
    assert (len(vit.blocks), vit.embed_dim, vit.blocks[0].attn.num_heads) == (3, 32, 4)
    assert vit.patch_embed.grid_size == (6, 6)
    assert vit.pos_embed is None
    assert vit.rel_pos_bias.relative_position_bias_table.shape == (11 * 11 + 3, 4)
    assert not vit.rel_pos_bias.relative_position_bias_table.any()
    assert [block.drop_path1.drop_prob for block in vit.blocks[1:]] == pytest.approx([0.15, 0.3])
    assert all((block.gamma_2 == 0.02).all() for block in vit.blocks)
    assert isinstance(vit.norm, torch.nn.LayerNorm)
    own: Any = build(Backbone("beit", size=24, patch=4, width=32, depth=2, heads=4, relative_positions="blocks")).module
    assert own.rel_pos_bias is None
    assert own.blocks[1].attn.relative_position_bias_table.shape == (11 * 11 + 3, 4)
    assert (own.blocks[0].gamma_1 == 0.1).all()  # the model's own
    plain: Any = build(Backbone("vit", size=24, patch=4, width=32, depth=2, heads=4, layer_scale=0.5)).module
    assert (plain.blocks[1].ls1.gamma == 0.5).all()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"backbone": "vit", "relative_positions": "shared"}, "are those of a Beit, not of vit_tiny_patch16_224"),
        ({"backbone": "beit", "relative_positions": "share"}, "no relative_positions 'share'; did you mean 'shared'"),
        ({"backbone": "resnet18", "layer_scale": 0.1}, "layer_scale can be set for a ViT only, not for resnet18"),
        ({"backbone": "beit", "layer_scale": -1.0}, "layer_scale is -1.0, but it cannot be negative"),
    ],
)
def test_what_cannot_be_is_said(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build(Backbone(**settings))


@pytest.mark.parametrize("name", ["simmim_vit_b16", "beit_vit_b16", "hybrid_vit_b16"])
def test_published_recipes_have_the_architecture_of_their_papers(name: str) -> None:
    values = read_recipe(name)
    backbone = make_recipe(str(values["objective"]), values).backbone
    assert backbone.reference() == (
        "timm:beit_base_patch16_224@random?size=224&init_values=0.1&use_rel_pos_bias=False&use_shared_rel_pos_bias=True"
        "&global_pool=token&drop_path_rate=0.1&num_classes=0"
    )


def test_measures_of_a_recipe_fall_away_with_its_backbone() -> None:
    recipe = make_recipe("simmim", read_recipe("simmim_vit_b16"), {"backbone": "vit_base_patch16_224"})
    assert (recipe.backbone.relative_positions, recipe.backbone.layer_scale) == ("", 0.0)


LITTLE = {
    "images": "shapes?size=16&train=32&val=16&test=16",
    "backbone": "beit",
    "size": 16,
    "width": 16,
    "depth": 2,
    "heads": 2,
    "patch": 4,
    "batch": 16,
    "epochs": 1,
    "warmup_epochs": 0,
    "evaluate_every": 0,
}


@pytest.fixture(scope="module", params=["shared", "blocks"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / str(request.param)
    decoder = {"decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2, "relative_positions": request.param}
    sl.pretrain("mae", out=folder, settings=LITTLE | decoder, workers=0, show_progress=False)
    return folder


@torch.no_grad()
def test_a_trained_beit_is_loaded_with_its_decoder(run: Path) -> None:
    encoder, both = sl.load_encoder(f"run:{run}"), sl.load_encoder(f"run:{run}?decoder=true")
    assert (encoder.family, both.family) == ("beit", "autoencoder")
    tables = [value for name, value in encoder.module.state_dict().items() if name.endswith("bias_table")]
    assert all(table.any() for table in tables)  # they have been trained
    x = images((16, 16))
    with capture(both, "**") as sites, capture(encoder, "**") as own_sites:
        both(x)
        encoder(x)
    for site in ("block.0.qkv", "block.1.attn_map", "norm"):
        assert torch.equal(sites[site], own_sites[site])
    assert sites["decoder.block.0"].shape == (3, 17, 8)


def test_a_trained_beit_is_fine_tuned_and_analysed(run: Path, tmp_path: Path) -> None:
    settings = {"epochs": 1, "batch": 16, "images": LITTLE["images"], "evaluate_every": 0, "pool": "gap"}
    tuned = sl.finetune(f"run:{run}", out=tmp_path / "tuned", settings=settings, workers=0, show_progress=False)
    assert "fc_norm.weight" in tuned.module.state_dict()
    data = sl.load_images(str(LITTLE["images"]), limit=8)
    encoders = {"pre-trained": sl.load_encoder(f"run:{run}"), "tuned": tuned}
    found = sl.analyze(encoders, data, ["attention", "knn", "cka"], batch=8, workers=0, show_progress=False)
    encoder = encoders["pre-trained"]
    (batch,) = batches(data, [encoder.preprocess], splits=["test"], batch=8, workers=0)
    with torch.inference_mode(), capture(encoder, "block.*.attn_map") as maps:
        encoder(encoder.preprocess.normalize(batch.pixels[encoder.preprocess]))
    for site, at in maps.items():
        distance = found["attention"].distance.sel(encoder="pre-trained", site=site)
        np.testing.assert_allclose(distance, attention_distance(at, (4, 4), 4, prefix=1).mean(0), rtol=1e-5)
    assert found["knn"].accuracy.notnull().any()


@pytest.mark.parametrize("name", ["simmim", "moco_v3"])
def test_bfloat16_changes_the_loss_little(name: str) -> None:
    from sightline.core import plugins
    from sightline.core.schedules import Progress
    from sightline.training.objective import Views

    module = plugins.find("objectives", name)
    config = module.Config(**({"mask_unit": 4} if name == "simmim" else {"hidden": 16, "out": 8}))
    torch.manual_seed(0)
    objective = module.Objective(build(Backbone("beit", size=16, width=16, depth=2, heads=2, patch=4)).module, config)
    x = images((16, 16), 8)
    views = Views([x, x.flip(3)], torch.zeros(8, dtype=torch.long), np.arange(8, dtype=np.uint64), Progress(0, 10, 5))
    loss = objective(views)[0].item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert objective(views)[0].item() == pytest.approx(loss, rel=0.05)
