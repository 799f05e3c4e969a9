"""CKA over the epochs of a training against the plain function, through real run folders, and what figures show."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from support.passes import OPTIONS, measured
from support.passes import activations as capture_all
from support.plans import MAP, TOKENS, activations, computed, make_plan
from support.references import SMALL
from typer.testing import CliRunner

from sightline import Encoder, Images, Run, analyze, load_encoder, load_images, open_run, save_encoder
from sightline.analyses.dynamics import DynamicsAnalysis, DynamicsConfig, cost
from sightline.analyses.dynamics.charts import figures, headlines
from sightline.analyses.dynamics.paths import path_efficiency
from sightline.cli.application import app
from sightline.cli.command import load_encoders
from sightline.core.errors import InputError
from sightline.measure.estimators.cka import cka
from sightline.measure.plan import Key, Plan

DEEPER = SMALL.replace("depth=2", "depth=4") + "&class_token=False&global_pool=avg&reg_tokens=2"
EPOCHS = 3


def walk(folder: Path, seed: int) -> None:
    """A run folder with the weights of a made training, three epochs after the start."""
    encoder, random = load_encoder(f"{SMALL}&seed={seed}"), torch.Generator().manual_seed(seed)
    for epoch in range(EPOCHS + 1):
        save_encoder(encoder, folder / "steps" / f"{epoch:08d}")
        for weights in encoder.module.parameters():
            weights.data += 0.05 * torch.randn(weights.shape, generator=random)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(["mae", "moco"]):
        walk(found / name, seed)
    return found


@pytest.fixture(scope="module")
def images() -> Images:
    return load_images("shapes?size=32", limit=48)


@pytest.fixture(scope="module")
def encoders(folder: Path) -> dict[str, Encoder]:
    found = [load_encoder(f"run:{folder / run}?step={n}") for run in ("mae", "moco") for n in range(EPOCHS + 1)]
    return {encoder.name: encoder for encoder in [*found, load_encoder(DEEPER, name="deeper")]}


@pytest.fixture(scope="module")
def run(encoders: dict[str, Encoder], images: Images, tmp_path_factory: pytest.TempPathFactory) -> Run:
    chosen = {"dynamics": DynamicsConfig(tokens=("mean", "cls"), bootstrap=200)}
    out = tmp_path_factory.mktemp("run") / "x"
    return analyze(encoders, images, chosen, out=out, **OPTIONS | {"batch": 16})


def test_cka_is_that_of_the_plain_function(run: Run, encoders: dict[str, Encoder], images: Images) -> None:
    values, seen = run["dynamics"].cka.sel(tokens="mean"), {}
    for name, encoder in encoders.items():
        for site, x in capture_all(encoder, images, "block.*", images.order("test", 0)).items():
            seen[name, site] = x[:, encoder.tokens.prefix :].mean(1)
    compared = 0
    for e, s, o, t in itertools.product(*(values[axis].values for axis in ("encoder", "site", "other", "other_site"))):
        if (o, t) not in seen:
            assert values.sel(encoder=e, site=s, other=o, other_site=t).isnull()
            continue
        # The sizes of the batches of the pass are those of the plain function.
        expected = cka(seen[e, s], seen[o, t], 16)
        assert float(values.sel(encoder=e, site=s, other=o, other_site=t)) == pytest.approx(expected, abs=1e-6)
        compared += 1
    assert compared == 8 * 2 * (2 + 2 + 4)
    assert values.other.values.tolist() == ["mae, step 0", "moco, step 0", "deeper"]


def test_the_start_is_like_itself_and_later_epochs_are_not(run: Run) -> None:
    result = run["dynamics"].sel(tokens="mean", other="mae, step 0")
    own = result.sel(encoder=result.training == "mae", site="block.1", other_site="block.1")
    assert own.step.values.tolist() == [0, 1, 2, 3]
    assert float(own.cka[0]) == pytest.approx(1)
    assert (own.cka[1:] < 0.99).all()
    assert (own.cka_low <= own.cka + 1e-12).all()
    assert (own.cka <= own.cka_high + 1e-12).all()


def test_a_missing_token_view_has_its_reason(run: Run) -> None:
    result = run["dynamics"]
    assert result.sel(tokens="cls", other="deeper").cka.isnull().all()
    assert (result.other_reason.sel(tokens="cls", other="deeper") == "this site has no such token view").all()
    assert (result.reason == "").all()


def test_twins_lie_at_the_same_relative_depth(run: Run) -> None:
    of = run["dynamics"].diagonal_site.sel(encoder="mae, step 2")
    assert of.sel(other="deeper").values.tolist() == ["block.0", "block.3"]
    assert of.sel(other="moco, step 0").values.tolist() == ["block.0", "block.1"]


def test_the_path_is_that_of_the_weights(run: Run, encoders: dict[str, Encoder]) -> None:
    result = run["dynamics"].sel(place="all", weights="all")
    path = [dict(encoders[f"moco, step {n}"].module.named_parameters()) for n in range(EPOCHS + 1)]
    found = result.efficiency.sel(encoder=result.training == "moco")
    np.testing.assert_allclose(found, path_efficiency(path), rtol=1e-12)


def test_figures_show_all_of_it(run: Run) -> None:
    result = run["dynamics"]
    found = {figure.name: figure.table for figure in figures(result)}
    assert list(found) == ["efficiency", "blocks", "start", "others", "pairs"]
    start = found["start"]
    assert (start.other == start.training + ", step 0").all()
    assert len(start) == 2 * (EPOCHS + 1) * 2
    np.testing.assert_allclose(start[start.step == 0].value, 1)
    assert len(found["others"]) == 2 * (EPOCHS + 1) * 2 * 2  # trainings, epochs, blocks; the other start and deeper
    pairs = found["pairs"]
    assert set(pairs.encoder) == {f"{name}, step {n}" for name in ("mae", "moco") for n in (0, EPOCHS)}
    assert len(pairs) == 2 * 2 * 2 * (2 + 4)
    last = found["efficiency"].query("training == 'mae' and step == 3 and weights == 'attn.qkv'").value.item()
    assert last == float(result.efficiency.sel(encoder="mae, step 3", place="all", weights="attn.qkv"))
    words = headlines(result)
    assert [word[0] for word in words] == ["mae", "mae", "moco", "moco"]
    total = result.sel(encoder="mae, step 3", place="all", weights="all")
    assert words[0][1] == f"{float(total.efficiency):.2f}"
    assert words[1][2].startswith("CKA of block.1 with its start, 95 % ")


def test_one_training_alone_has_no_others(encoders: dict[str, Encoder], images: Images) -> None:
    alone = {name: encoder for name, encoder in encoders.items() if name.startswith("mae, step")}
    result = measured("dynamics", alone, images, batch=16)
    assert [figure.name for figure in figures(result)] == ["efficiency", "blocks", "start"]
    assert result.other.values.tolist() == ["mae, step 0"]


def test_other_sites_than_blocks(encoders: dict[str, Encoder], images: Images) -> None:
    alone = {name: encoders[name] for name in ("mae, step 0", "mae, step 3")}
    result = measured("dynamics", alone, images, batch=16, sites=["block.*.attn", "norm"])
    (start,) = (figure.table for figure in figures(result) if figure.name == "start")
    assert start.site.tolist() == 2 * ["block.0.attn", "block.1.attn", "norm"]


# Made activations


def made(tmp_path: Path) -> Plan:
    layers = {name: {"block.0": TOKENS, "block.1": TOKENS} for name in ("vit-0", "vit-1", "vit")}
    plan = make_plan(tmp_path, layers=layers | {"cnn": {"block.0": MAP}}, views={"test": ("plain",)})
    for epoch in (0, 1):
        plan.encoders[f"vit-{epoch}"].reference = f"run:x?step={epoch}"
        plan.encoders[f"vit-{epoch}"].module = torch.nn.Linear(2, 2)
        plan.encoders[f"vit-{epoch}"].sites = {}
    return plan


def test_flaws_have_their_reasons(tmp_path: Path) -> None:
    plan = made(tmp_path)
    data = activations(plan)
    data[Key("vit-1", "block.1", "plain")][3] = np.nan
    data[Key("cnn", "block.0", "plain")][:] = 2.0
    result = computed(DynamicsAnalysis(DynamicsConfig(), plan), plan, data)
    one = result.sel(tokens="all", encoder="vit-1", site="block.1")
    assert one.cka.isnull().all()
    assert str(one.reason.item()).startswith("the activations are not finite")
    cnn = result.sel(tokens="all", other="cnn", other_site="block.0")
    assert cnn.cka.isnull().all()
    assert str(cnn.other_reason.item()) == "the activations are the same for all images"
    assert result.cka.sel(encoder="vit-1", site="block.0", other="vit").notnull().all()
    (start,) = (figure.table for figure in figures(result) if figure.name == "start")
    assert start[start.value.isna()].reason.str.startswith("the activations are not finite").all()


def test_bf16_is_close(tmp_path: Path) -> None:
    plan = made(tmp_path)
    data = activations(plan)
    whole = computed(DynamicsAnalysis(DynamicsConfig(), plan), plan, data)
    half = computed(DynamicsAnalysis(DynamicsConfig(), plan), plan, {key: x.bfloat16() for key, x in data.items()})
    xr.testing.assert_allclose(half.cka, whole.cka, atol=0.02)


def test_too_few_images_and_cost(tmp_path: Path) -> None:
    plan = made(tmp_path)
    few = dataclasses.replace(plan, images=dataclasses.replace(plan.images, splits={"test": np.arange(3)}))
    with pytest.raises(InputError, match="CKA needs at least 4 images"):
        DynamicsAnalysis(DynamicsConfig(), few)
    assert cost(DynamicsConfig(), plan).memory == 8 * 32 * (4 * 5 + 7)


# The command


def test_the_command_and_every_step(folder: Path, tmp_path: Path) -> None:
    words = ["compare", f"mine=run:{folder / 'mae'}?step=*", f"other={SMALL}", "--only", "dynamics", "--verbose"]
    words += ["--images", "shapes?size=32", "--limit", "16", "--batch", "8", "-o", str(tmp_path / "x")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "mine: " in done.output
    assert "path efficiency after 3 steps" in done.output
    result = open_run(tmp_path / "x")["dynamics"]
    assert result.encoder.values.tolist() == [f"mine, step {n}" for n in range(EPOCHS + 1)]
    assert result.other.values.tolist() == ["mine, step 0", "other"]
    assert set(result.training.values) == {"mine"}
    assert (tmp_path / "x" / "report.html").is_file()

    every = load_encoders([f"run:{folder / 'mae'}?step=*", f"NAME=run:{folder / 'moco'}?step=*", SMALL])
    names = [f"{name}, step {n}" for name in ("mae", "NAME") for n in range(EPOCHS + 1)]
    assert list(every) == [*names, "vit_tiny_patch16_224"]
    assert every["NAME, step 2"].weights == load_encoder(f"run:{folder / 'moco'}?step=2").weights


def test_a_folder_without_epochs_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, sentence in (("empty", "No steps are kept"), ("nothing", "There is no run folder")):
        done = CliRunner().invoke(app, ["compare", f"run:{tmp_path / name}?step=*", "--only", "dynamics"])
        assert isinstance(done.exception, InputError)
        assert sentence in str(done.exception)
