"""Schedules against their closed forms, groups of parameters, and one step of each optimiser against plain algebra."""

import math
from typing import Any

import pytest
import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import nn

from sightline.core.errors import InputError
from sightline.core.lars import LARS, trusted
from sightline.core.schedules import Progress
from sightline.encoders.modules.vit import fix_positions
from sightline.training.backbones import Backbone, build
from sightline.training.optimization import Optimization, make_optimizer, schedule, set_schedule
from sightline.training.recipe import read_recipe

STEPS, PER_EPOCH = 200, 20


def rates(**settings: Any) -> list[float]:
    made = Optimization(**{"lr": 0.4, "epochs": STEPS / PER_EPOCH, **settings})
    return [schedule(made, Progress(step, STEPS, PER_EPOCH))[0] for step in range(STEPS + 1)]


def decays(**settings: Any) -> list[float]:
    made = Optimization(**{"epochs": STEPS / PER_EPOCH, **settings})
    return [schedule(made, Progress(step, STEPS, PER_EPOCH))[1] for step in range(STEPS + 1)]


def test_cosine_with_warm_up() -> None:
    expected = [
        0.4 * t / 30 if t < 30 else 0.01 + (0.4 - 0.01) * 0.5 * (1 + math.cos(math.pi * (t - 30) / 170))
        for t in range(201)
    ]
    assert rates(warmup_epochs=1.5, min_lr=0.01) == pytest.approx(expected, abs=1e-15)
    assert rates(warmup_epochs=1.5, min_lr=0.01)[200] == pytest.approx(0.01)


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert rates()[0] == pytest.approx(0.4)
    assert rates()[100] == pytest.approx(0.2)
    assert rates()[200] == pytest.approx(0.0, abs=1e-15)


def timms(settings: Optimization, per_epoch: int, prefix: bool) -> list[float]:
    """The rates of timm's CosineLRScheduler, as SimMIM calls it, or with the warm-up before the cosine."""
    steps, warmup = round(settings.epochs * per_epoch), round(settings.warmup_epochs * per_epoch)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=settings.peak_lr)
    theirs = CosineLRScheduler(
        optimizer,
        t_initial=steps - warmup * prefix,
        lr_min=settings.min_lr,
        warmup_lr_init=settings.warmup_lr,
        warmup_t=warmup,
        warmup_prefix=prefix,
        cycle_limit=1,
        t_in_epochs=False,
    )
    found = []
    for step in range(steps + 1):
        theirs.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", ["finetune_vit_b16_simmim", "finetune_vit_b16_deit", "supervised_vit_b16"])
@pytest.mark.parametrize("kind", ["cosine_from_start", "cosine"])
def test_cosines_are_those_of_timms_scheduler(name: str, kind: str) -> None:
    recipe = {key: value for key, value in read_recipe(name).items() if key in vars(Optimization())}
    assert recipe["schedule"] == "cosine_from_start"
    settings = Optimization(**recipe | {"schedule": kind})
    expected = timms(settings, 7, prefix=kind == "cosine")
    progress = [Progress(step, len(expected) - 1, 7) for step in range(len(expected))]
    assert [schedule(settings, at)[0] for at in progress] == pytest.approx(expected, rel=1e-12, abs=0)


def test_a_cosine_from_the_start_drops_where_the_warm_up_ends() -> None:
    simmim = rates(schedule="cosine_from_start", warmup_epochs=2)  # 20 % of the training, as in its fine-tuning
    assert simmim[:40] == rates(warmup_epochs=2)[:40]
    assert (max(simmim), simmim[39], simmim[40]) == pytest.approx((0.39, 0.39, 0.4 * 0.9045), rel=1e-4)
    assert simmim[200] == pytest.approx(0.0, abs=1e-15)
    assert rates(schedule="cosine_from_start", min_lr=0.01) == rates(min_lr=0.01)  # without warm-up it is the other
    stretched = [0.4 * 0.5 * (1 + math.cos(math.pi * t / 250)) for t in range(201)]
    assert rates(schedule="cosine_from_start", stretch=1.25) == pytest.approx(stretched)
    assert rates(schedule="cosine_from_start", warmup_epochs=20)[200] == pytest.approx(0.2)


def test_multistep() -> None:
    expected = [0.4 if t < 120 else 0.04 if t < 160 else 0.004 for t in range(201)]
    assert rates(schedule="multistep", milestones=(0.6, 0.8)) == pytest.approx(expected)
    warmed = rates(schedule="multistep", milestones=(0.6, 0.8), warmup_epochs=1)
    assert warmed[:20] == pytest.approx([0.4 * t / 20 for t in range(20)])
    assert warmed[20:] == pytest.approx(expected[20:])


def test_linear() -> None:
    """As mmsegmentation's `poly` of power 1: the line begins with the training, and the warm-up multiplies it."""
    line = [0.01 + 0.39 * (1 - t / 200) for t in range(201)]
    assert rates(schedule="linear", min_lr=0.01) == pytest.approx(line)
    warmed = rates(schedule="linear", min_lr=0.01, warmup_epochs=1.5)
    assert warmed == pytest.approx([rate * min(1, t / 30) for t, rate in enumerate(line)])


def test_constant() -> None:
    assert set(rates(schedule="constant")) == {0.4}
    assert rates(schedule="constant", warmup_epochs=2)[:41] == pytest.approx([0.4 * t / 40 for t in range(41)])


def test_a_warm_up_as_long_as_the_training_only_rises() -> None:
    assert rates(warmup_epochs=10) == pytest.approx([0.4 * t / 200 for t in range(201)])
    assert rates(warmup_epochs=20)[200] == pytest.approx(0.2)


def test_a_warm_up_may_begin_above_zero() -> None:
    assert rates(warmup_epochs=2, warmup_lr=0.1)[:41] == pytest.approx([0.1 + 0.3 * t / 40 for t in range(41)])
    assert rates(warmup_epochs=2, warmup_lr=0.1)[40:] == rates(warmup_epochs=2)[40:]
    assert rates(warmup_epochs=2, warmup_lr=0.1, schedule="multistep")[10] == pytest.approx(0.175)
    assert rates(warmup_lr=0.1) == rates()  # without warm-up there is nothing to begin
    assert max(rates(warmup_epochs=2, warmup_lr=7.0)) == pytest.approx(0.4)


def test_a_stretched_schedule_ends_with_the_training() -> None:
    """MSN's authors lay out their cosines for 1.25 times the training."""
    expected = [
        0.4 * t / 30 if t < 30 else 0.01 + (0.4 - 0.01) * 0.5 * (1 + math.cos(math.pi * (t - 30) / 220))
        for t in range(201)
    ]
    assert rates(warmup_epochs=1.5, min_lr=0.01, stretch=1.25) == pytest.approx(expected, abs=1e-15)
    rising = [0.4 + (0.04 - 0.4) * 0.5 * (1 + math.cos(math.pi * t / 250)) for t in range(201)]
    assert decays(weight_decay=0.04, weight_decay_end=0.4, stretch=1.25) == pytest.approx(rising)


def test_the_lowest_rate_is_never_above_the_highest() -> None:
    assert max(rates(min_lr=7.0)) == pytest.approx(0.4)


def test_weight_decay() -> None:
    assert set(decays(weight_decay=0.3)) == {0.3}
    rising = [0.4 + (0.04 - 0.4) * 0.5 * (1 + math.cos(math.pi * t / 200)) for t in range(201)]
    assert decays(weight_decay=0.04, weight_decay_end=0.4) == pytest.approx(rising)
    assert decays(weight_decay=0.04, weight_decay_end=0.4, warmup_epochs=5) == pytest.approx(rising)
    assert decays(weight_decay=0.1, weight_decay_end=0.0)[200] == pytest.approx(0.0, abs=1e-15)


def test_the_linear_scaling_rule() -> None:
    assert Optimization(base_lr=0.3, batch=4096).peak_lr == pytest.approx(0.3 * 16)
    assert Optimization(base_lr=0.3, batch=64).peak_lr == pytest.approx(0.3 / 4)
    assert Optimization(base_lr=0.3, batch=64, lr=0.7).peak_lr == 0.7
    assert Optimization(base_lr=1.25e-3, base_batch=512, batch=2048).peak_lr == pytest.approx(5e-3)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": "adam"}, "no optimizer 'adam'; did you mean 'adamw'"),
        ({"schedule": "cosin"}, "no schedule 'cosin'; did you mean 'cosine'"),
        ({"batch": 0}, "batch is 0"),
        ({"base_batch": 0}, "base_batch is 0"),
        ({"warmup_lr": -1.0}, "warmup_lr is -1.0"),
        ({"stretch": 0.5}, "stretch is 0.5"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"epochs": 0.0}, "epochs is 0.0"),
        ({"epochs": math.nan}, "epochs is nan"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"clip": -1.0}, "clip is -1.0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Optimization(**settings)


class WithTokens(nn.Module):
    """A ViT with a mask token and a head, as an objective has them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = build(Backbone("vit", size=16, width=16, depth=1, heads=2, patch=4)).module
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))


def test_what_is_decayed() -> None:
    module = WithTokens()
    names = {parameter: name for name, parameter in module.named_parameters()}
    decayed, plain = make_optimizer(module, Optimization(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {names[p] for p in decayed["params"]} == {
        "backbone.patch_embed.proj.weight",
        "backbone.blocks.0.attn.qkv.weight",
        "backbone.blocks.0.attn.proj.weight",
        "backbone.blocks.0.mlp.fc1.weight",
        "backbone.blocks.0.mlp.fc2.weight",
        "head.0.weight",
    }
    assert {names[p] for p in plain["params"]} == set(names.values()) - {names[p] for p in decayed["params"]}
    assert {"mask_token", "backbone.cls_token", "backbone.pos_embed", "head.1.weight"} <= {
        names[p] for p in plain["params"]
    }


def test_tokens_and_positions_are_not_decayed_by_other_names() -> None:
    import torchvision

    module = nn.Module()
    module.vit = torchvision.models.VisionTransformer(8, 4, 1, 2, 8, 16)
    module.position_embedding = nn.Embedding(4, 8)  # CLIP's of Hugging Face
    module.register_tokens = nn.Parameter(torch.zeros(1, 4, 8))
    names = {parameter: name for name, parameter in module.named_parameters()}
    plain = {names[p] for p in make_optimizer(module, Optimization()).param_groups[1]["params"]}
    tokens = {"vit.class_token", "vit.encoder.pos_embedding", "position_embedding.weight", "register_tokens"}
    assert tokens <= plain
    assert {name for name in plain - tokens if module.get_parameter(name).ndim > 1} == set()


def test_frozen_parameters_are_in_no_group() -> None:
    module = WithTokens()
    fix_positions(module.backbone)
    module.head.requires_grad_(False)
    names = {parameter: name for name, parameter in module.named_parameters()}
    held = {names[p] for group in make_optimizer(module, Optimization()).param_groups for p in group["params"]}
    assert held == {name for name in names.values() if not name.startswith("head") and name != "backbone.pos_embed"}


def test_shared_parameters_are_moved_once() -> None:
    layer = nn.Linear(3, 3)
    optimizer = make_optimizer(nn.ModuleList([layer, nn.Sequential(layer)]), Optimization())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_set_schedule_scales_the_rate_of_a_group_and_decays_what_may_be_decayed() -> None:
    groups: list[dict[str, object]] = [
        {"lr": 1.0, "weight_decay": 0.1, "scale": 1.0, "decays": True},
        {"lr": 1.0, "weight_decay": 0.0, "scale": 0.5, "decays": False},
    ]
    set_schedule(groups, 0.5, 0.2)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.5, 0.2), (0.25, 0.0)]


def moved(settings: Optimization, steps: int = 3) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], nn.Linear]:
    """Start, gradients and end of a linear layer that is trained for some steps."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    start = [p.detach().clone().double() for p in layer.parameters()]
    optimizer = make_optimizer(layer, settings)
    gradients = []
    for _ in range(steps):
        gradients.append([torch.randn_like(p) for p in layer.parameters()])
        for parameter, gradient in zip(layer.parameters(), gradients[-1], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return start, [[g.double() for g in step] for step in gradients], layer


def check(settings: Optimization, rule: Any) -> None:
    start, gradients, layer = moved(settings)
    for number, parameter in enumerate(layer.parameters()):
        decay = settings.weight_decay if number == 0 else 0.0
        expected = rule(start[number], [step[number] for step in gradients], decay)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_adamw_is_what_its_paper_says() -> None:
    def rule(x: torch.Tensor, gradients: list[torch.Tensor], decay: float) -> torch.Tensor:
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for t, g in enumerate(gradients, 1):
            m, v = 0.8 * m + 0.2 * g, 0.7 * v + 0.3 * g**2
            x = x - 0.01 * decay * x - 0.01 * (m / (1 - 0.8**t)) / ((v / (1 - 0.7**t)).sqrt() + 1e-8)
        return x

    check(Optimization(lr=0.01, betas=(0.8, 0.7), weight_decay=0.3), rule)


def test_sgd_is_what_it_says() -> None:
    def rule(x: torch.Tensor, gradients: list[torch.Tensor], decay: float) -> torch.Tensor:
        v = torch.zeros_like(x)
        for g in gradients:
            v = 0.8 * v + g + decay * x
            x = x - 0.01 * v
        return x

    check(Optimization(optimizer="sgd", lr=0.01, sgd_momentum=0.8, weight_decay=0.3), rule)


@pytest.mark.parametrize("decay", [0.3, 0.0])
def test_lars_scales_layers_whatever_their_decay(decay: float) -> None:
    """10⁻³ ‖x‖ / ‖g + decay x‖ for all layers, as in the code of MoCo-v3 and SimCLR; biases take plain steps."""

    def rule(x: torch.Tensor, gradients: list[torch.Tensor], decay: float) -> torch.Tensor:
        v = torch.zeros_like(x)
        for g in gradients:
            if x.ndim > 1:
                g = g + decay * x
                g = g * 0.001 * math.sqrt((x**2).sum()) / math.sqrt((g**2).sum())
            v = 0.8 * v + g
            x = x - 0.5 * v
        return x

    check(Optimization(optimizer="lars", lr=0.5, sgd_momentum=0.8, weight_decay=decay), rule)


def test_lars_in_float64_is_a_plain_loop() -> None:
    """A convolution, a matrix that is 0, one without gradient, a bias, and a learning rate that changes."""
    chance = torch.Generator().manual_seed(0)
    shapes = [(4, 3, 2, 2), (5, 4), (5, 4), (5,)]
    weights = [nn.Parameter(torch.randn(shape, generator=chance, dtype=torch.float64)) for shape in shapes]
    weights[1].data.zero_()
    plain = [weight.detach().numpy().copy() for weight in weights]
    velocity = [0.0 * x for x in plain]
    optimizer = LARS(weights, lr=0.0, momentum=0.9, weight_decay=0.01)
    for step in range(6):
        rate = 2.0 / (1 + step)
        optimizer.param_groups[0]["lr"] = rate
        for number, weight in enumerate(weights):
            weight.grad = torch.randn(weight.shape, generator=chance, dtype=torch.float64) * (number != 2)
            u = weight.grad.numpy().copy()
            if u.ndim > 1:
                u = u + 0.01 * plain[number]
                size, length = (float((x**2).sum()) ** 0.5 for x in (plain[number], u))
                u = u * (0.001 * size / length if size > 0 and length > 0 else 1.0)
            velocity[number] = 0.9 * velocity[number] + u
            plain[number] = plain[number] - rate * velocity[number]
        optimizer.step()
    for weight, expected in zip(weights, plain, strict=True):
        torch.testing.assert_close(weight.detach(), torch.from_numpy(expected), rtol=1e-13, atol=1e-15)


def test_lars_does_not_need_all_gradients() -> None:
    one, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    one.grad = torch.full((2, 2), 5.0)
    loss = LARS([one, other], lr=1.0).step(lambda: 3.0)
    assert (loss, other.tolist()) == (3.0, [[1.0, 1.0], [1.0, 1.0]])
    torch.testing.assert_close(one.detach(), torch.full((2, 2), 0.999))


def test_layers_in_one_tensor_are_scaled_by_themselves() -> None:
    """As probes have them: each with its own weight decay."""
    chance = torch.Generator().manual_seed(1)
    weight, gradient = (torch.randn(3, 4, 5, generator=chance, dtype=torch.float64) for _ in range(2))
    decay = torch.tensor([0.0, 0.1, 3.0], dtype=torch.float64).view(3, 1, 1)
    together = trusted(weight, gradient, decay, dim=(1, 2))
    for number in range(3):
        alone = trusted(weight[number], gradient[number], float(decay[number]))
        torch.testing.assert_close(together[number], alone, rtol=1e-14, atol=0)
