"""The same checks over every objective: a new one is tested without a line of test code."""

import copy
import dataclasses
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sightline as sl
from sightline.api import pretrain
from sightline.core import plugins
from sightline.core.folders import latest
from sightline.core.schedules import Progress
from sightline.core.stopping import Stopped
from sightline.encoders.encoder import build_encoder
from sightline.images.augment.policy import Policy
from sightline.images.sets import Images
from sightline.training.backbones import Backbone, build
from sightline.training.checkpoints import load_module, save_checkpoint, tensors_of
from sightline.training.feed import Feed
from sightline.training.loop import Loop
from sightline.training.objective import First, Objective, Views, objective_named
from sightline.training.objectives.hybrid import possible_parts
from sightline.training.optimization import Optimization, make_optimizer
from sightline.training.recipe import make_recipe

OBJECTIVES = plugins.built_in("objectives")
TINY = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4)
BACKBONES = {"vit": TINY, "beit": dataclasses.replace(TINY, backbone="beit")}
SHAPES = "shapes?size=16&train=64&val=16&test=16"
# Settings that are too large for a test, by the names that objectives give them.
LITTLE: dict[str, Any] = {
    "hidden": 16,
    "bottleneck": 8,
    "out": 16,
    "prototypes": 16,
    "codes": 16,
    "decoder_width": 16,
    "decoder_depth": 1,
    "decoder_heads": 2,
    "mask_unit": 4,
    "local_crops": 2,
    "focal_views": 2,
    "tokenizer_width": 8,
    "tokenizer_epochs": 0.5,
    "freeze_last_layer": 0,
}
STEP = Progress(0, 100, 10)


def little(name: str) -> dict[str, Any]:
    """Small settings of an objective, and of all that may be its parts."""
    config = plugins.find("objectives", name).Config
    known = {field.name for field in dataclasses.fields(config)}
    if "settings" in known:
        return {part: little(part) for part in OBJECTIVES if part in parts_of(name)}
    return {key: value for key, value in LITTLE.items() if key in known}


def parts_of(name: str) -> set[str]:
    assert name == "hybrid"
    return set(possible_parts("reconstructive", "joint-embedding"))


@dataclasses.dataclass
class Made:
    """An objective with small settings, and one batch of its views."""

    objective: Any
    views: Views
    encoder: sl.Encoder


def make_objective(name: str, data: Images, seed: int = 0, kind: str = "vit") -> Made:
    module: Any = objective_named(name)
    config = make_recipe(name, little(name)).config
    encoder = build(BACKBONES[kind], len(data.classes) if module.LABELS else 0, seed)
    torch.manual_seed(seed)
    plan = module.first(config, TINY)
    objective = module.Objective(encoder.module, config, *([] if plan is None else [plan.objective]))
    feed = Feed(data, module.views(config, TINY), batch=16, epochs=1, workers=0)
    return Made(objective.train(), next(feed.views())[0], encoder)


@pytest.fixture(scope="module")
def shapes() -> Images:
    return sl.load_images(SHAPES)


def no_progress(views: Views) -> Views:
    return Views(views.pixels, views.labels, views.keys, STEP)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_says_what_it_is(name: str) -> None:
    module: Any = objective_named(name)
    assert module.__doc__.strip()
    assert "Source" in module.__doc__
    assert module.TITLE.strip()
    assert dataclasses.is_dataclass(module.Config)
    assert module.Config.__dataclass_params__.frozen
    assert module.Config.__doc__.strip()
    config = module.Config()
    assert config == module.Config()
    policies = module.views(config, Backbone())
    assert isinstance(policies, tuple)
    assert policies
    assert all(isinstance(policy, Policy) for policy in policies)
    assert issubclass(module.Objective, Objective)
    assert isinstance(module.Objective.encoder, property)
    assert callable(module.Objective.after_step)
    assert isinstance(module.first(config, Backbone()), First | None)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_gives_a_loss_and_scalars(name: str, shapes: Images) -> None:
    made = make_objective(name, shapes)
    loss, scalars = made.objective(made.views)
    assert loss.shape == ()
    assert loss.requires_grad
    assert loss.isfinite()
    assert "loss" not in scalars  # the loop's own column
    for key, value in scalars.items():
        assert value.shape == (), key
        assert value.isfinite(), key
        assert not value.requires_grad, key  # or a curve would keep the graph of a step


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_layers_of_a_head_fit_together(name: str, kind: str, shapes: Images) -> None:
    """The first sees the features of the encoder, each other one what the one before it gives."""
    made: Any = make_objective(name, shapes, kind=kind).objective
    layers = [layer for layer, _ in made.head_of(made.encoder)]
    widths = [made.encoder.num_features, *(layer.outputs for layer in layers)]
    assert [layer.inputs for layer in layers] == widths[:-1]


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_reach_all_that_is_trained_and_nothing_else(name: str, kind: str, shapes: Images) -> None:
    """DDP waits for the gradient of every parameter that asks for one."""
    made = make_objective(name, shapes, kind=kind)
    made.objective(made.views)[0].backward()
    for key, parameter in made.objective.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, key
    trained = [p for p in made.encoder.module.parameters() if p.requires_grad]
    assert trained
    assert sum(bool(p.grad.any()) for p in trained if p.grad is not None) > 0.9 * len(trained)
    # What follows, or is fixed, is not trained: no encoder but the trained one has gradients.
    ours = {id(p) for p in made.encoder.module.parameters()}
    for key, parameter in made.objective.named_parameters():
        if any(word in key for word in ("momentum_", "teacher_", "target_", "tokenizer.")):
            assert not parameter.requires_grad, key
            assert id(parameter) not in ours


def descend(made: Made, steps: int, follow: bool) -> list[float]:
    """Losses of steps on one batch; teachers, centres and the like follow, or stay where they are."""
    optimizer = make_optimizer(made.objective, Optimization(lr=3e-3, weight_decay=0.0))
    losses = []
    for step in range(steps):
        loss, _ = made.objective(no_progress(made.views))
        loss.backward()
        losses.append(loss.item())
        made.objective.before_step(STEP)
        optimizer.step()
        optimizer.zero_grad()
        if follow:
            made.objective.after_step(Progress(step + 1, 100, 10))
    return losses


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_of_one_batch_falls(name: str, kind: str, shapes: Images) -> None:
    """With targets that stay, since it may well rise while a teacher's distribution is still finding its shape."""
    losses = descend(make_objective(name, shapes, kind=kind), 30, follow=False)
    assert np.mean(losses[-5:]) < 0.97 * np.mean(losses[:3]), losses


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_stay_finite_while_targets_move(name: str, shapes: Images) -> None:
    made = make_objective(name, shapes)
    assert np.isfinite(descend(made, 15, follow=True)).all()
    assert all(parameter.isfinite().all() for parameter in made.objective.parameters())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_state_of_an_objective_survives_saving(name: str, shapes: Images, tmp_path: Path) -> None:
    made = make_objective(name, shapes)
    settings = Optimization(lr=1e-3)
    optimizer = make_optimizer(made.objective, settings)
    for step in range(2):
        made.objective(no_progress(made.views))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        made.objective.after_step(Progress(step + 1, 100, 10))
    folder = save_checkpoint(tmp_path, 2, made.objective, optimizer, {}, {})
    other = make_objective(name, shapes, seed=1)
    assert any(
        not torch.equal(value, tensors_of(other.objective)[key]) for key, value in tensors_of(made.objective).items()
    )
    load_module(folder, other.objective)
    views = no_progress(made.views)
    (one, scalars), (two, more) = made.objective(views), other.objective(views)
    assert torch.equal(one, two)
    assert scalars.keys() == more.keys()
    assert all(torch.equal(value, more[key]) for key, value in scalars.items())
    # And what follows a step.
    for objective in (made.objective, other.objective):
        objective.after_step(Progress(3, 100, 10))
    assert all(
        torch.equal(value, tensors_of(other.objective)[key]) for key, value in tensors_of(made.objective).items()
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_keeps_an_encoder(name: str, kind: str, shapes: Images) -> None:
    made = make_objective(name, shapes, kind=kind)
    module = made.objective.encoder
    assert type(module).__module__.startswith("timm.")
    assert module.state_dict().keys() == made.encoder.module.state_dict().keys()
    built = build_encoder(module, reference="run:x", preprocess=made.encoder.preprocess)
    assert (built.family, built.depth, built.heads, built.patch) == (kind, 2, 2, 4)
    with built.evaluating():
        assert built(torch.randn(2, 3, 16, 16)).isfinite().all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_can_be_copied(name: str, shapes: Images) -> None:
    """Also after a step, when it may hold what it has just seen, and the copy goes its own way."""
    made = make_objective(name, shapes)
    made.objective(made.views)[0].backward()
    twin = copy.deepcopy(made.objective)
    assert tensors_of(twin).keys() == tensors_of(made.objective).keys()
    losses = [objective(no_progress(made.views))[0] for objective in (made.objective, twin)]
    assert torch.equal(*losses)
    before = {key: value.clone() for key, value in tensors_of(twin).items()}
    assert all(torch.equal(value, before[key]) for key, value in tensors_of(made.objective).items())
    with torch.no_grad():
        for parameter in made.objective.parameters():
            parameter.add_(1)
    made.objective.after_step(Progress(1, 100, 10))
    assert all(torch.equal(value, before[key]) for key, value in tensors_of(twin).items())


# What is saved of another backbone does not depend on the objective: one is enough.
@pytest.mark.parametrize(("name", "kind"), [*((name, "vit") for name in OBJECTIVES), ("beit", "beit")])
def test_a_stopped_training_of_any_objective_goes_on_bit_exactly(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        **dataclasses.asdict(BACKBONES[kind]),
        **little(name),
        "images": SHAPES,
        "batch": 16,
        "epochs": 2,
        "lr": 1e-3,
        "warmup_epochs": 0.5,
        "drop_path": 0.1,  # so that the generator's state matters
        "log_every": 1,
        "evaluate_every": 0,
    }

    def run(folder: str, resume: bool = False) -> sl.Encoder:
        return pretrain(name, out=tmp_path / folder, settings=settings, resume=resume, workers=0, show_progress=False)

    whole = run("whole")
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_told_to_stop", lambda loop: signal.SIGTERM if _finished(loop) == 3 else 0)
        with pytest.raises(Stopped, match="after step 3 of 8"):
            run("stopped")
    assert sl.load_encoder(f"run:{tmp_path / 'stopped'}").weights != whole.weights
    again = run("stopped", resume=True)
    assert again.weights == whole.weights
    files = [latest(tmp_path / folder) for folder in ("whole", "stopped")]
    one, other = (folder / "training.safetensors" for folder in files if folder is not None)
    assert one.read_bytes() == other.read_bytes()


def _finished(loop: Loop) -> int:
    """Steps of a training proper; what it needs trained before is not stopped."""
    assert loop.monitor is not None
    return int(loop.monitor.rows[-1]["step"]) if loop.encoder is not None and loop.monitor.rows else 0
