"""The same checks over every analysis: a new one is tested without a line of test code."""

import dataclasses
import doctest
import functools
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vl_convert
import xarray as xr
from support.references import SMALL

import sightline as sl
from sightline.core import plugins
from sightline.core.contract import TOPICS
from sightline.core.groups import Measured
from sightline.core.run_folder import Run
from sightline.encoders.attention import AttentionProduct
from sightline.encoders.watching import watch
from sightline.images.pipeline import batches
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images, join
from sightline.images.views import make_view
from sightline.measure import analyze as the_pass
from sightline.measure.contract import Analysis, analysis, measured_of, result_of
from sightline.measure.estimators.attention import attend
from sightline.measure.plan import Cost, Key, Plan, make_plans
from sightline.report.figures import Figure

ANALYSES = plugins.built_in("analyses")
BATCH = 8
SHORT = {"segmentation": {"steps": 20}, "tokens": {"images": 9}}  # what takes seconds with the default settings


def config_of(name: str) -> Any:
    return analysis(name).Config(**SHORT.get(name, {}))


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
    epochs = {n: sl.load_encoder(f"{SMALL}&seed={n}", name=f"run, step {n}") for n in (0, 1)}
    return {e.name: dataclasses.replace(e, reference=f"run:run?step={n}") for n, e in epochs.items()} | encoders


def plan_of(name: str, encoders: Any, images: Images, cache: Path, batch: int = BATCH) -> Plan:
    config = config_of(name)
    settings = {"batch": batch, "seed": 0, "precision": "float32"}
    return make_plans(members(name, encoders), images, {name: config}, None, settings, cache, torch.device("cpu"))[name]


def feed(metric: Any, plan: Plan, numbers: Any = None, change: Any = None, order: int = 0) -> None:
    """A plain twin of the pass, with a chance to change the activations on the way."""
    preprocesses = {encoder.preprocess for encoder in plan.encoders.values()}
    with torch.inference_mode():
        for batch in batches(plan.images, preprocesses, splits=plan.splits, batch=plan.batch, seed=order, workers=0):
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
                product = functools.partial(attend, tokens=encoder.tokens)
                with encoder.evaluating(), watch(encoder.sites, plan.sites[key], see, product):
                    encoder(encoder.preprocess.normalize(pixels))
            metric.update(batch, reductions)


def measured(name: str, plan: Plan, change: Any = None, order: int = 0) -> xr.Dataset:
    return with_kept(name, plan, change, order).table


def with_kept(name: str, plan: Plan, change: Any = None, order: int = 0) -> Measured:
    module = analysis(name)
    metric = module.Analysis(config_of(name), plan)
    feed(metric, plan, change=change, order=order)
    return Measured(name, *measured_of(metric))


class Results(dict[str, xr.Dataset]):
    """The result of each analysis, measured when it is first asked for, and what is kept beside it."""

    def __init__(self, measure: Callable[[str], Measured]) -> None:
        super().__init__()
        self.measure = measure
        self.whole: dict[str, Measured] = {}

    def __missing__(self, name: str) -> xr.Dataset:
        self.whole[name] = self.measure(name)
        self[name] = self.whole[name].table
        return self[name]


@pytest.fixture(scope="module")
def results(encoders: Any, images: Images, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("plain")
    return Results(lambda name: with_kept(name, plan_of(name, encoders, images, folder)))


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_says_what_it_is(name: str) -> None:
    module: Any = analysis(name)
    for text in (module.__doc__, module.TITLE, module.QUESTION, module.FORMULA, module.HOW_TO_READ, module.SOURCE):
        assert text.strip()
    assert isinstance(module.SITES, tuple)
    assert set(module.SPLITS) <= {"train", "val", "test", *module.IMAGES}
    assert isinstance(module.ANY_SITE, bool)
    for split in module.SPLITS:
        assert module.views(module.Config(), split)
    if module.BY_DEFAULT:  # then nothing is forwarded more than once
        assert all(module.views(module.Config(), split) == ("plain",) for split in module.SPLITS)
    assert {"rotation", "scale", "translation", "batching", "order"} >= module.INVARIANT_TO
    assert dataclasses.is_dataclass(module.Config)
    assert module.Config.__dataclass_params__.frozen
    assert issubclass(module.Analysis, Analysis)
    functions = [value for word, value in vars(module).items() if inspect.isfunction(value) and word[0] != "_"]
    measures = [f for f in functions if f.__module__.startswith((module.__name__, "sightline.measure.estimators."))]
    assert any(">>>" in (measure.__doc__ or "") for measure in measures), "the measure on whole arrays, with a doctest"
    assert doctest.testmod(module).failed == 0


def nowhere(function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*arguments: Any) -> Any:
        with torch.device("meta"):
            return function(*arguments)

    return inside


@pytest.mark.parametrize("name", ANALYSES)
def test_the_pass_gives_what_its_plain_twin_gives(
    name: str, encoders: Any, images: Images, results: dict[str, xr.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a default device that holds no numbers, so that no tensor can be made where nobody said."""
    for part in ("_step", "measured_of"):
        monkeypatch.setattr(the_pass, part, nowhere(getattr(the_pass, part)))
    run = sl.analyze(
        members(name, encoders), images, {name: config_of(name)}, batch=BATCH, workers=0, show_progress=False
    )
    xr.testing.assert_equal(run[name], results[name])


@pytest.mark.parametrize("name", ANALYSES)
def test_stages_of_residual_networks_are_in_results(name: str, encoders: Any, results: dict[str, xr.Dataset]) -> None:
    """Wherever a result has layers of an encoder with stages."""
    found = results[name]
    named = found.encoder.values if {"encoder", "site"} <= set(found.dims) else ()
    for encoder in (name for name in named if name in encoders and encoders[name].stages):
        assert int(found.stage.sel(encoder=encoder).max()) == len(encoders[encoder].stages)


@pytest.mark.parametrize("name", ANALYSES)
def test_merged_shards_are_one_process(
    name: str, encoders: Any, images: Images, results: dict[str, xr.Dataset], tmp_path: Path
) -> None:
    module = analysis(name)
    plan = plan_of(name, encoders, images, tmp_path)
    one, other = (module.Analysis(config_of(name), plan) for _ in range(2))
    feed(one, plan, numbers=range(0, 100, 2))
    feed(other, plan, numbers=range(1, 100, 2))
    one.merge_state(other)
    xr.testing.assert_allclose(result_of(one), results[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in ANALYSES if "batching" in analysis(n).INVARIANT_TO])
def test_any_batching_gives_the_same(
    name: str, encoders: Any, images: Images, results: dict[str, xr.Dataset], tmp_path: Path
) -> None:
    again = measured(name, plan_of(name, encoders, images, tmp_path, 40))
    # A matrix product of another shape adds up in another order.
    xr.testing.assert_allclose(again, results[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in ANALYSES if "order" in analysis(n).INVARIANT_TO])
def test_any_order_of_the_images_gives_the_same(
    name: str, encoders: Any, images: Images, results: dict[str, xr.Dataset], tmp_path: Path
) -> None:
    """Other images come first, and others together in a batch; in smaller ones where that does not matter either."""
    batch = 5 if "batching" in analysis(name).INVARIANT_TO else BATCH
    again = measured(name, plan_of(name, encoders, images, tmp_path, batch), order=1)
    xr.testing.assert_allclose(again, results[name], rtol=1e-4, atol=1e-6)


def test_another_order_is_another_one(images: Images) -> None:
    """Or the test above would show nothing."""
    preprocess = [Preprocess(size=(32, 32))]
    first = [
        next(iter(batches(images, preprocess, splits=["test"], batch=BATCH, seed=seed, workers=0))).ids
        for seed in (0, 1)
    ]
    assert set(first[0]) != set(first[1])


def _rotate(key: Key, x: torch.Tensor) -> torch.Tensor:
    axis = 1 if key.encoder == "cnn" and x.ndim == 4 else -1
    generator = torch.Generator().manual_seed(sum(map(ord, key.site)))
    rotation = torch.linalg.qr(torch.randn(x.shape[axis], x.shape[axis], generator=generator, dtype=torch.float64))[0]
    return (x.double().movedim(axis, -1) @ rotation).movedim(-1, axis).float()


CHANGES = {"rotation": _rotate, "scale": lambda _, x: 37.5 * x, "translation": lambda _, x: x + 2.5}


@pytest.mark.parametrize(
    ("name", "change"), [(n, c) for n in ANALYSES for c in CHANGES if c in analysis(n).INVARIANT_TO]
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
def test_what_is_kept_gives_the_numbers_again(name: str, results: Results) -> None:
    """Every number that has a rule follows from the sums over groups, and changes when some of them are left out."""
    assert name in results or len(results[name])
    found = results.whole[name]
    assert found.variables
    changed = False
    for variable in found.variables:
        if found.rule(variable) is None:
            assert found.why_without(variable)
            continue
        values = found.table[variable]
        known = np.nonzero(np.isfinite(values.values))
        assert len(known[0]), f"{variable} has no number"
        cells = dict(zip(map(str, values.dims), known, strict=True))
        weights = np.ones((3, found.groups(variable)))
        used = np.flatnonzero(found.used(variable, cells))
        assert len(used) > 1
        weights[[1, 2], used[:2]] = 0
        again = found.values(variable, cells, weights)
        np.testing.assert_allclose(again[0], values.values[known], rtol=1e-6, atol=1e-7, err_msg=variable)
        changed |= bool((again[1:] != again[0]).any())
    assert changed or all(found.rule(variable) is None for variable in found.variables)


@pytest.mark.parametrize("name", ANALYSES)
def test_figures_render(name: str, results: dict[str, xr.Dataset]) -> None:
    module = analysis(name)
    figures = module.figures(results[name])
    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        assert isinstance(figure, Figure)
        assert len(figure.table)
        assert vl_convert.vegalite_to_svg(figure.chart.to_json()).startswith("<svg")
    assert module.TOPIC in TOPICS
    for number in module.key_numbers(results[name]):
        assert set(number.values) <= set(map(str, results[name].encoder.values))
        assert np.isfinite(list(number.values.values())).all()
        assert all(number.write(encoder) for encoder in number.values)
        assert all(low <= high for low, high in number.ends.values())
        assert len(number.title) < 20
    if (like := module.likeness(results[name])) is not None:
        np.testing.assert_allclose(like.values, like.values.T)
    headlines = module.headlines(results[name])
    assert headlines
    for label, number, detail in headlines:
        assert label
        assert number
        assert detail


def held(metric: Any) -> int:
    """Bytes of all tensors and arrays that an analysis holds, but for plan and images, which are not its own."""
    seen, total, todo = set(), 0, [value for name, value in vars(metric).items() if not isinstance(value, Plan)]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, Plan | Images | type):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor | np.ndarray):
            total += value.nbytes
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif type(value).__module__.startswith("sightline."):
            todo += getattr(value, "__dict__", {}).values()
    return total


@pytest.fixture(scope="module")
def wide(encoders: dict[str, sl.Encoder]) -> dict[str, sl.Encoder]:
    """With features beside which the headers of files are small."""
    return encoders | {"cnn": sl.load_encoder("timm:resnet18@random?size=32&zero_init_last=False")}


@pytest.mark.parametrize("name", ANALYSES)
def test_cost_is_told_beforehand(name: str, wide: Any, images: Images, tmp_path: Path) -> None:
    """Within a factor of what the analysis then takes: exactly but for headers on disk, about so in memory."""
    module, plan = analysis(name), plan_of(name, wide, images, tmp_path)
    cost = module.cost(config_of(name), plan)
    assert isinstance(cost, Cost)
    assert not list(tmp_path.iterdir())  # asking costs nothing
    metric, most = module.Analysis(config_of(name), plan), 0

    def note(_: Key, x: Any) -> Any:
        nonlocal most
        most = max(most, held(metric))
        return x

    feed(metric, plan, change=note)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert cost.disk <= written <= 1.1 * cost.disk
    assert max(most, held(metric)) <= 3 * cost.memory
    if not written:  # others keep features on disk and take blocks of a fixed size to compute with
        assert cost.memory <= 10 * max(most, held(metric))
