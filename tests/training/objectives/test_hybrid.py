"""Hybrid: the weighted sum of two objectives on one backbone; λ = 0 and λ = 1 are the parts themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.core.schedules import Progress
from sightline.training.backbones import Backbone, build
from sightline.training.objective import Views, objective_named
from sightline.training.objectives import hybrid

HYBRID = objective_named("hybrid")
VIT = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "simmim": {"mask_unit": 8},
    "mae": {"decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2},
    "moco_v3": {"hidden": 16, "out": 8},
    "simclr": {"hidden": 16, "out": 8},
    "dino": {"hidden": 16, "out": 32, "bottleneck": 8, "local_crops": 2},
}


def config_of(mim: str = "simmim", cl: str = "moco_v3", weight: float = 0.2) -> hybrid.HybridConfig:
    return hybrid.HybridConfig(mim, cl, weight, {name: SETTINGS[name] for name in (mim, cl)})


def make(plugin: Any, config: Any) -> Any:
    torch.manual_seed(0)
    module = build(VIT).module
    torch.manual_seed(1)
    return plugin.Objective(module, config)


def views_of(plugin: Any, config: Any, seed: int = 0, n: int = 4) -> Views:
    generator = torch.Generator().manual_seed(seed)
    pixels = [torch.randn(n, 3, p.size, p.size, generator=generator) for p in plugin.views(config, VIT)]
    return Views(pixels, torch.full((n,), -1), np.arange(seed, seed + n, dtype=np.uint64), Progress(0, 10, 5))


def train(objective: Any, plugin: Any, config: Any, steps: int = 3) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """A plain twin of the loop; losses, and gradients by the name that a weight has in its part."""
    optimizer = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr=1e-3)
    losses, gradients = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss, _ = objective(views_of(plugin, config, seed=step))
        loss.backward()
        if hasattr(objective, "before_step"):
            objective.before_step(Progress(step, 10, 5))
        gradients.append({name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None})
        optimizer.step()
        objective.after_step(Progress(step + 1, 10, 5))
        losses.append(loss.detach())
    return losses, gradients


@pytest.mark.parametrize("cl", ["moco_v3", "dino"])
@pytest.mark.parametrize(("mim", "weight"), [("simmim", 0.0), ("mae", 0.0), ("simmim", 1.0)])
def test_at_the_ends_training_is_bit_identical_to_the_part_alone(mim: str, cl: str, weight: float) -> None:
    config = config_of(mim, cl, weight)
    name = cl if weight else mim
    plugin: Any = plugins.find("objectives", name)
    both, alone = make(HYBRID, config), make(plugin, config.part(name))
    assert hybrid.views(config, VIT) == plugin.views(config.part(name), VIT)
    found, expected = train(both, hybrid, config), train(alone, plugin, config.part(name))
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    for ours, theirs in zip(found[1], expected[1], strict=True):
        own = {key.removeprefix(f"parts.{name}."): gradient for key, gradient in ours.items()}
        assert own.keys() == theirs.keys()
        assert all(torch.equal(own[key], theirs[key]) for key in theirs)
    for a, b in zip(both.encoder.parameters(), alone.encoder.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("mim", "cl"), [("simmim", "moco_v3"), ("mae", "simclr")])
def test_loss_and_gradients_are_the_weighted_sums_of_the_parts(mim: str, cl: str) -> None:
    config = config_of(mim, cl, 0.3)
    # In float64: batch normalisation of four images makes small gradients of large ones that cancel.
    objective, views = make(HYBRID, config).double(), views_of(hybrid, config)
    views = Views([x.double() for x in views.pixels], views.labels, views.keys, views.progress)
    assert len(views.pixels) == len(hybrid.views(config, VIT))
    count = len(plugins.find("objectives", mim).views(config.part(mim), VIT))
    weights = [p for p in objective.backbone.parameters() if p.requires_grad]
    losses = [
        objective.parts[mim](views.part(slice(0, count)))[0],
        objective.parts[cl](views.part(slice(count, None)))[0],
    ]
    slopes = [torch.autograd.grad(part, weights, allow_unused=True) for part in losses]
    loss, scalars = objective(views)
    assert loss.item() == pytest.approx(0.7 * losses[0].item() + 0.3 * losses[1].item(), rel=1e-5)
    assert scalars[f"{mim}.loss"].item() == pytest.approx(losses[0].item(), rel=1e-5)
    assert scalars[f"{cl}.loss"].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert all(not value.requires_grad for value in scalars.values())
    for found, a, b in zip(torch.autograd.grad(loss, weights), *slopes, strict=True):
        expected = 0.7 * (0 if a is None else a) + 0.3 * (0 if b is None else b)
        assert (found - expected).norm() <= 1e-5 * expected.norm()  # type: ignore[attr-defined]


def test_many_views_of_several_sizes_go_to_their_parts() -> None:
    config = config_of("mae", "dino", 0.5)
    objective, views = make(HYBRID, config), views_of(hybrid, config)
    assert [x.shape[-1] for x in views.pixels] == [16, 16, 16, 8, 8]
    expected = 0.5 * objective.parts["mae"](views.part(slice(0, 1)))[0]
    twin = make(HYBRID, config)  # since DINO's centre moves with every forward
    expected = expected + 0.5 * twin.parts["dino"](views.part(slice(1, None)))[0]
    assert objective(views)[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_momentum_encoder_starts_as_a_copy_of_the_final_weights() -> None:
    objective = make(HYBRID, config_of("mae", "moco_v3", 0.5))
    followers = dict(objective.parts["moco_v3"].momentum_backbone.named_parameters())
    for name, parameter in objective.backbone.named_parameters():
        assert torch.equal(parameter, followers[name])


def test_both_parts_train_the_one_backbone_and_what_one_freezes_is_frozen() -> None:
    objective = make(HYBRID, config_of("mae", "moco_v3", 0.5))
    assert objective.parts["mae"].backbone is objective.parts["moco_v3"].backbone is objective.encoder
    assert not objective.backbone.pos_embed.requires_grad
    assert not objective.backbone.patch_embed.proj.weight.requires_grad
    assert objective.saved_decoder() is objective.parts["mae"].decoder
    assert not hasattr(make(HYBRID, config_of()), "decoder")


def test_beits_tokenizer_reaches_beit() -> None:
    settings = {"beit": {"codes": 16, "tokenizer_width": 8}, "simclr": SETTINGS["simclr"]}
    config = hybrid.HybridConfig("beit", "simclr", 0.5, settings)
    plan = hybrid.first(config, VIT)
    assert plan is not None
    objective = hybrid.HybridObjective(build(VIT).module, config, plan.objective)
    loss, scalars = objective(views_of(hybrid, config))
    assert loss.item() == pytest.approx(0.5 * (scalars["beit.loss"] + scalars["simclr.loss"]).item(), rel=1e-5)
    assert objective.parts["beit"].tokenizer is plan.objective


def test_only_a_part_that_needs_something_first_asks_for_it() -> None:
    assert hybrid.first(config_of(), VIT) is None
    assert hybrid.first(hybrid.HybridConfig("beit", "simclr", 1.0), VIT) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mim": "sinmim"}, "not a reconstructive objective; did you mean 'simmim'"),
        ({"cl": "mae"}, "not a joint-embedding objective"),
        ({"weight": 1.5}, r"must be in \[0, 1\]"),
        ({"settings": {"moco": {}}}, "cannot be a part of a hybrid; did you mean 'moco_v3'"),
        ({"settings": {"supervised": {}}}, "cannot be a part of a hybrid; choose from beit, mae"),
        ({"settings": {"mae": {"mask_ration": 0.5}}}, "no setting mae.mask_ration; did you mean 'mask_ratio'"),
        ({"settings": {"moco_v3": {"temprature": 1}}}, "no setting moco_v3.temprature; did you mean 'temperature'"),
        ({"settings": {"simmim": {"mask_ratio": 2.0}}}, "mask_ratio must be between"),
    ],
)
def test_what_cannot_be_is_said(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        hybrid.HybridConfig(**settings)


def test_settings_of_a_part_that_is_not_chosen_may_wait() -> None:
    settings = {"simmim": {"mask_unit": 8}, "mae": {"mask_ratio": 0.5}}
    config = hybrid.HybridConfig(mim="mae", settings=settings)
    assert config.part("mae").mask_ratio == 0.5
    assert list(config.shares()) == ["mae", "moco_v3"]


def test_lists_of_a_recipe_become_tuples() -> None:
    config = hybrid.HybridConfig(settings={"simmim": {"crop": [0.5, 1.0]}})
    assert config.part("simmim").crop == (0.5, 1.0)


@pytest.mark.parametrize(("cl", "weight", "fewest"), [("moco_v3", 0.2, 2), ("moco_v3", 0.0, 1), ("dino", 0.5, 1)])
def test_a_forward_needs_as_many_images_as_the_parts_that_count(cl: str, weight: float, fewest: int) -> None:
    assert make(HYBRID, config_of(cl=cl, weight=weight)).fewest == fewest


def test_each_part_looks_at_its_own_views() -> None:
    config = hybrid.HybridConfig("simmim", "dino", 0.5, SETTINGS | {"dino": SETTINGS["dino"] | {"local_size": 10}})
    with pytest.raises(InputError, match="Small crops of 10 pixels cannot be cut into patches of 4"):
        make(HYBRID, config).check_views(hybrid.views(config, VIT))
    config = config_of(cl="dino", weight=0.5)
    make(HYBRID, config).check_views(hybrid.views(config, VIT))
