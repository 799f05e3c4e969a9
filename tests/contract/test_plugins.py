"""The same checks over every plugin: a new analysis, objective, source, dataset or family is tested for nothing."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vl_convert
import xarray as xr

import sightline as sl
from sightline.core import plugins
from sightline.core.run_folder import Run, latest
from sightline.core.schedules import Progress
from sightline.encoders.attention import AttentionProduct
from sightline.encoders.contract import source
from sightline.encoders.encoder import build_encoder
from sightline.encoders.layouts.layout import open_file
from sightline.encoders.sites import select
from sightline.encoders.watching import watch
from sightline.images.augment.policy import Policy
from sightline.images.pipeline import batches
from sightline.images.sets import Images, join
from sightline.images.views import make_view
from sightline.measure.contract import Analysis, analysis
from sightline.measure.plan import Cost, Key, Plan, make_plans
from sightline.measure.streaming import result_of
from sightline.report.figures import Figure
from sightline.training.backbones import Backbone, build
from sightline.training.checkpoints import load_module, save_checkpoint, tensors_of
from sightline.training.feed import Feed
from sightline.training.loop import Loop, Stopped
from sightline.training.objective import First, Objective, Views, objective_named
from sightline.training.objectives.hybrid import possible_parts
from sightline.training.optimization import Optimization, make_optimizer
from sightline.training.pretrain import pretrain
from sightline.training.recipe import make_recipe

SMALL = "timm:vit_tiny_patch16_224@random?size=32&patch_size=8&depth=2&embed_dim=48&num_heads=3"
ANALYSES = plugins.built_in("analyses")
OBJECTIVES = plugins.built_in("objectives")
BATCH = 8


@pytest.fixture(scope="module")
def encoders() -> dict[str, sl.Encoder]:
    return {
        "vit": sl.load_encoder(SMALL),
        "no cls": sl.load_encoder(SMALL + "&class_token=False&global_pool=avg&reg_tokens=2"),
        "cnn": sl.load_encoder("timm:resnet18@random?size=32&zero_init_last=False"),
    }


@pytest.fixture(scope="module")
def images() -> Images:
    """With cue-conflict images beside them, for those that ask."""
    return join(
        sl.load_images("shapes?size=32", limit=40), "conflict", sl.load_images("shapes:conflict?size=32", limit=40)
    )


def members(name: str, encoders: dict[str, sl.Encoder]) -> dict[str, sl.Encoder]:
    """The encoders; for the dynamics of a training also two that pass for its epochs."""
    if name != "dynamics":
        return encoders
    epochs = {n: sl.load_encoder(f"{SMALL}&seed={n}", name=f"run, epoch {n}") for n in (0, 1)}
    return {e.name: dataclasses.replace(e, reference=f"run:run?epoch={n}") for n, e in epochs.items()} | encoders


def plan_of(name: str, encoders: Any, images: Images, cache: Path, batch: int = BATCH) -> Plan:
    config = plugins.find("analyses", name).Config()
    settings = {"batch": batch, "seed": 0, "precision": "float32"}
    return make_plans(members(name, encoders), images, {name: config}, None, settings, cache, torch.device("cpu"))[name]


def feed(metric: Any, name: str, plan: Plan, numbers: Any = None, change: Any = None) -> None:
    """A plain twin of the pass, with a chance to change the activations on the way."""
    preprocesses = {encoder.preprocess for encoder in plan.encoders.values()}
    with torch.inference_mode():
        for batch in batches(plan.images, preprocesses, splits=plan.splits, batch=plan.batch, seed=0, workers=0):
            if numbers is not None and batch.number not in numbers:
                continue
            reductions: dict[Key, Any] = {}
            metric.begin(batch)
            for (key, encoder), view in itertools.product(plan.encoders.items(), plan.views[batch.split]):

                def see(site: str, x: Any, key: str = key, view: str = view, into: Any = reductions) -> None:
                    whose = Key(key, site, view)
                    if isinstance(x, AttentionProduct) and not metric.products:
                        x = x.map()
                    into[whose] = metric.reduce(whose, x if change is None else change(whose, x))

                pixels = make_view(view, batch.pixels[encoder.preprocess], batch.ids, plan.seed)
                with encoder.evaluating(), watch(encoder.sites, plan.sites[key], see):
                    encoder(encoder.preprocess.normalize(pixels))
            metric.update(batch, reductions)


def measured(name: str, plan: Plan, change: Any = None) -> xr.Dataset:
    module = plugins.find("analyses", name)
    metric = module.Analysis(module.Config(), plan)
    feed(metric, name, plan, change=change)
    return result_of(metric)


class Results(dict[str, xr.Dataset]):
    """The result of each analysis, measured when it is first asked for."""

    def __init__(self, measure: Callable[[str], xr.Dataset]) -> None:
        super().__init__()
        self.measure = measure

    def __missing__(self, name: str) -> xr.Dataset:
        self[name] = self.measure(name)
        return self[name]


@pytest.fixture(scope="module")
def results(encoders: Any, images: Images, tmp_path_factory: pytest.TempPathFactory) -> dict[str, xr.Dataset]:
    folder = tmp_path_factory.mktemp("plain")
    return Results(lambda name: measured(name, plan_of(name, encoders, images, folder)))


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_says_what_it_is(name: str) -> None:
    module = plugins.find("analyses", name)
    for text in (module.__doc__, module.TITLE, module.QUESTION, module.FORMULA, module.HOW_TO_READ, module.SOURCE):
        assert text.strip()
    assert isinstance(module.SITES, tuple)
    assert set(module.SPLITS) <= {"train", "val", "test", *analysis(name).IMAGES}
    assert isinstance(module.ANY_SITE, bool)
    for split in module.SPLITS:
        assert module.views(module.Config(), split)
    if module.BY_DEFAULT:  # then nothing is forwarded more than once
        assert all(module.views(module.Config(), split) == ("plain",) for split in module.SPLITS)
    assert {"rotation", "scale", "translation", "batching", "order"} >= module.INVARIANT_TO
    assert dataclasses.is_dataclass(module.Config)
    assert module.Config.__dataclass_params__.frozen
    assert issubclass(module.Analysis, Analysis)
    public = [getattr(module, word) for word in module.__all__]
    assert any(inspect.isfunction(word) and ">>>" in (word.__doc__ or "") for word in public)
    page = Path(__file__).parents[2] / "docs" / "analyses" / f"{name}.md"
    assert page.is_file(), f"{name} needs a page in docs/analyses"


@pytest.mark.parametrize("name", ANALYSES)
def test_the_pass_gives_what_its_plain_twin_gives(
    name: str, encoders: Any, images: Images, results: dict[str, xr.Dataset]
) -> None:
    run = sl.analyze(members(name, encoders), images, [name], batch=BATCH, workers=0, show_progress=False)
    xr.testing.assert_equal(run[name], results[name])


@pytest.mark.parametrize("name", ANALYSES)
def test_merged_shards_are_one_process(
    name: str, encoders: Any, images: Images, results: dict[str, xr.Dataset], tmp_path: Path
) -> None:
    module = plugins.find("analyses", name)
    plan = plan_of(name, encoders, images, tmp_path)
    one, other = (module.Analysis(module.Config(), plan) for _ in range(2))
    feed(one, name, plan, numbers=range(0, 100, 2))
    feed(other, name, plan, numbers=range(1, 100, 2))
    one.merge_state(other)
    xr.testing.assert_allclose(result_of(one), results[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in ANALYSES if "batching" in plugins.find("analyses", n).INVARIANT_TO])
@pytest.mark.parametrize("batch", [5, 40])
def test_any_batching_gives_the_same(
    name: str, batch: int, encoders: Any, images: Images, results: dict[str, xr.Dataset], tmp_path: Path
) -> None:
    again = measured(name, plan_of(name, encoders, images, tmp_path, batch))
    # A matrix product of another shape adds up in another order.
    xr.testing.assert_allclose(again, results[name], rtol=1e-4, atol=1e-6)


def _rotate(key: Key, x: torch.Tensor) -> torch.Tensor:
    axis = 1 if key.encoder == "cnn" and x.ndim == 4 else -1
    generator = torch.Generator().manual_seed(sum(map(ord, key.site)))
    rotation = torch.linalg.qr(torch.randn(x.shape[axis], x.shape[axis], generator=generator, dtype=torch.float64))[0]
    return (x.double().movedim(axis, -1) @ rotation).movedim(-1, axis).float()


CHANGES = {"rotation": _rotate, "scale": lambda _, x: 37.5 * x, "translation": lambda _, x: x + 2.5}


@pytest.mark.parametrize(
    ("name", "change"),
    [(n, c) for n in ANALYSES for c in CHANGES if c in plugins.find("analyses", n).INVARIANT_TO],
)
def test_declared_invariances_hold(
    name: str, change: str, encoders: Any, images: Images, results: dict[str, xr.Dataset], tmp_path: Path
) -> None:
    changed = measured(name, plan_of(name, encoders, images, tmp_path), CHANGES[change])
    for variable, values in results[name].data_vars.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(changed[variable], values, atol=2e-4)


@pytest.mark.parametrize("name", ANALYSES)
def test_results_survive_saving(name: str, results: dict[str, xr.Dataset], tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(name, results[name])
    xr.testing.assert_identical(Run(tmp_path)[name], results[name])
    assert Run(tmp_path)[name].attrs == results[name].attrs


@pytest.mark.parametrize("name", ANALYSES)
def test_figures_render(name: str, results: dict[str, xr.Dataset]) -> None:
    module = plugins.find("analyses", name)
    figures = module.figures(results[name])
    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        assert isinstance(figure, Figure)
        assert len(figure.table)
        assert vl_convert.vegalite_to_svg(figure.chart.to_json()).startswith("<svg")
    for label, number, detail in module.headlines(results[name]):
        assert label
        assert number
        assert detail


@pytest.mark.parametrize("name", ANALYSES)
def test_cost_is_told_beforehand(name: str, encoders: Any, images: Images, tmp_path: Path) -> None:
    module = plugins.find("analyses", name)
    cost = module.cost(module.Config(), plan_of(name, encoders, images, tmp_path))
    assert isinstance(cost, Cost)
    assert cost.memory + cost.disk > 0
    assert not list(tmp_path.iterdir())  # asking costs nothing


# ---------------------------------------------------------------------------------------------------------------
# Objectives

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
    module = objective_named(name)
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
    made = make_objective(name, shapes)
    made.objective(made.views)[0].backward()
    twin = copy.deepcopy(make_objective(name, shapes).objective)
    assert tensors_of(twin).keys() == tensors_of(made.objective).keys()


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("name", OBJECTIVES)
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


# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", plugins.names("sources"))
def test_a_source_can_be_listed(name: str) -> None:
    module = source(name)
    assert module.__doc__
    assert module.__doc__.strip()
    assert module.EXAMPLE.startswith(f"{name}:")
    assert module.names()
    assert callable(module.load)


@pytest.mark.parametrize("name", plugins.names("formats"))
def test_a_format_is_a_source_that_all_formats_share(name: str) -> None:
    assert source(name).names() == ["FILE"]
    assert source(name).load is open_file


@pytest.mark.parametrize("name", plugins.names("sources"))
def test_an_unknown_id_is_one_sentence(name: str) -> None:
    with pytest.raises(sl.InputError) as caught:
        sl.load_encoder(f"{name}:./no-such-thing")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", plugins.names("datasets"))
def test_a_dataset_can_be_listed(name: str) -> None:
    module = plugins.find("datasets", name)
    assert module.__doc__.strip()
    assert callable(module.load)
    with pytest.raises(sl.InputError) as caught:
        sl.load_images(f"{name}:no-such-thing")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", plugins.names("families"))
def test_a_family_tells_its_own(name: str) -> None:
    module = plugins.find("families", name)
    assert module.__doc__.strip()
    assert not module.matches(torch.nn.Linear(2, 2))


def test_capture_leaves_the_output_unchanged(encoders: Any) -> None:
    for encoder in encoders.values():
        x = torch.randn(2, 3, *encoder.preprocess.size)
        with torch.inference_mode(), encoder.evaluating():
            plain = encoder(x)
            with sl.capture(encoder, ["**"]) as seen:
                assert torch.equal(encoder(x), plain)
        assert set(seen) == set(select(encoder.sites, ["**"]))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.module.modules())


def test_plugins_are_the_files_of_their_folder() -> None:
    for kind, rooms in plugins.ROOMS.items():
        folders = [Path(sl.__file__).parent / room.replace(".", "/") for room in rooms]
        files = [path for folder in folders for path in folder.iterdir() if not path.name.startswith("_")]
        assert plugins.built_in(kind) == sorted(path.stem for path in files if path.suffix == ".py" or path.is_dir())
