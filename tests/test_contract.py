"""The same checks over every plugin: a new analysis, source, dataset or family is tested for nothing."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
import vl_convert
import xarray as xr

import sightline as sl
from sightline import plugins
from sightline.analyze import result_of
from sightline.figures import Figure
from sightline.images import Images, batches
from sightline.plan import Cost, Key, Plan, make_plans
from sightline.run import Run
from sightline.sites import select, watch

SMALL = "timm:vit_tiny_patch16_224@random?size=32&patch_size=8&depth=2&embed_dim=48&num_heads=3"
ANALYSES = plugins.names("analyses")
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
    return sl.load_images("shapes?size=32", limit=40)


def plan_of(name: str, encoders: Any, images: Images, cache: Path, batch: int = BATCH) -> Plan:
    config = plugins.find("analyses", name).Config()
    settings = {"batch": batch, "seed": 0, "precision": "float32"}
    return make_plans(encoders, images, {name: config}, None, settings, cache, torch.device("cpu"))[name]


def feed(metric: Any, name: str, plan: Plan, numbers: Any = None, change: Any = None) -> None:
    """A plain twin of the pass, with a chance to change the activations on the way."""
    preprocesses = {encoder.preprocess for encoder in plan.encoders.values()}
    with torch.inference_mode():
        for batch in batches(plan.images, preprocesses, splits=plan.splits, batch=plan.batch, seed=0, workers=0):
            if numbers is not None and batch.number not in numbers:
                continue
            reductions: dict[Key, Any] = {}
            for key, encoder in plan.encoders.items():

                def see(site: str, x: torch.Tensor, key: str = key, into: Any = reductions) -> None:
                    whose = Key(key, site, "plain")
                    into[whose] = metric.reduce(whose, x if change is None else change(whose, x))

                with encoder.evaluating(), watch(encoder.sites, plan.sites[key], see):
                    encoder(encoder.preprocess.normalize(batch.pixels[encoder.preprocess]))
            metric.update(batch, reductions)


def measured(name: str, plan: Plan, change: Any = None) -> xr.Dataset:
    module = plugins.find("analyses", name)
    metric = module.Analysis(module.Config(), plan)
    feed(metric, name, plan, change=change)
    return result_of(metric)


@pytest.fixture(scope="module")
def results(encoders: Any, images: Images, tmp_path_factory: pytest.TempPathFactory) -> dict[str, xr.Dataset]:
    folder = tmp_path_factory.mktemp("plain")
    return {name: measured(name, plan_of(name, encoders, images, folder)) for name in ANALYSES}


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_says_what_it_is(name: str) -> None:
    module = plugins.find("analyses", name)
    for text in (module.__doc__, module.TITLE, module.QUESTION, module.FORMULA, module.HOW_TO_READ):
        assert text.strip()
    assert isinstance(module.SITES, tuple)
    assert set(module.SPLITS) <= {"train", "val", "test"}
    assert "plain" in module.VIEWS
    assert {"rotation", "scale", "translation", "batching", "order"} >= module.INVARIANT_TO
    assert dataclasses.is_dataclass(module.Config)
    assert module.Config.__dataclass_params__.frozen
    assert issubclass(module.Analysis, torchmetrics.Metric)
    pure = getattr(module, name, None) or getattr(module, f"{name}_predict")
    assert inspect.isfunction(pure)
    assert ">>>" in pure.__doc__


@pytest.mark.parametrize("name", ANALYSES)
def test_the_pass_gives_what_its_plain_twin_gives(
    name: str, encoders: Any, images: Images, results: dict[str, xr.Dataset]
) -> None:
    run = sl.analyze(encoders, images, [name], batch=BATCH, workers=0, show_progress=False)
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
    xr.testing.assert_allclose(again, results[name], rtol=1e-9)


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


@pytest.mark.parametrize("name", plugins.names("sources"))
def test_a_source_can_be_listed(name: str) -> None:
    module = plugins.find("sources", name)
    assert module.__doc__.strip()
    assert module.EXAMPLE.startswith(f"{name}:")
    assert module.names()
    assert callable(module.load)


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
    folder = Path(sl.__file__).parent
    for kind in ("analyses", "datasets", "families", "sources"):
        assert plugins.names(kind) == sorted(p.stem for p in (folder / kind).glob("*.py") if p.stem != "__init__")
