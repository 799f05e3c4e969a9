"""Projection heads: read off a training, saved with its encoder, shown as sites, and looked at by analyses."""

import json
import shutil
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import sightline as sl
from sightline.analyses.invariance import InvarianceConfig
from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.core.folders import latest
from sightline.encoders.modules.projection import Layer, Projected, empty_head, mlp_layers, save_head, state_of
from sightline.encoders.sources import zoo
from sightline.encoders.watching import capture
from sightline.images.views import make_view
from sightline.measure.estimators.cka import cka
from sightline.measure.estimators.neighbours import knn_predict
from sightline.training import backbones
from sightline.training.backbones import Backbone
from sightline.training.checkpoints import load_module
from sightline.training.recipe import make_recipe, read_recipe

IMAGES = "shapes?size=16&train=32&val=16&test=16"
TINY: dict[str, Any] = {
    "size": 16,
    "width": 16,
    "depth": 2,
    "heads": 2,
    "patch": 4,
    "batch": 16,
    "epochs": 1,
    "warmup_epochs": 0,
    "images": IMAGES,
    "evaluate_every": 0,
}
OWN: dict[str, dict[str, Any]] = {
    "simclr": {"layers": 2, "hidden": 24, "out": 12},
    "moco_v3": {"hidden": 24, "out": 12},
    "dino": {"hidden": 24, "bottleneck": 10, "out": 12, "local_crops": 2},
    "msn": {"hidden": 24, "out": 12, "prototypes": 20, "focal_views": 1},
}
PARTS = {
    "simclr": ["projector"] * 2,
    "moco_v3": ["projector"] * 3 + ["predictor"] * 2,
    "dino": ["projector"] * 3 + ["prototypes"],
    "msn": ["projector"] * 3 + ["prototypes"],
}


def make(name: str, backbone: Backbone, config: dict[str, Any]) -> Any:
    """An objective whose batch normalisations have seen something, and whose momentum encoder is elsewhere."""
    torch.manual_seed(0)
    plugin = plugins.find("objectives", name)
    objective = plugin.Objective(backbones.build(backbone).module, plugin.Config(**config)).eval()
    with torch.no_grad():
        for value in (*objective.parameters(), *objective.buffers()):
            if value.is_floating_point():
                value.add_(torch.rand_like(value) * 0.1)
    return objective


VIT = Backbone("vit", size=16, width=16, depth=1, heads=2, patch=4)
RESNET = Backbone("resnet10t", size=32)


def built(layers: Any) -> nn.Sequential:
    """A head with the weights of its layers."""
    head = empty_head([layer for layer, _ in layers])
    head.load_state_dict(state_of(layers))
    return head


def layers_of(modules: Any, x: Tensor) -> list[Tensor]:
    """What the linear layers give, each with the norm and the activation that follow it, one module after the other."""
    outputs: list[Tensor] = []
    for module in modules:
        x = module(x)
        outputs[len(outputs) - (not isinstance(module, nn.Linear)) :] = [x]
    return outputs


# Read off a training


@torch.no_grad()
@pytest.mark.parametrize("backbone", [VIT, RESNET])
@pytest.mark.parametrize("layers", [2, 3])
def test_layers_of_simclr(layers: int, backbone: Backbone) -> None:
    objective = make("simclr", backbone, {**OWN["simclr"], "layers": layers})
    head = built(objective.head_of(objective.encoder))
    x = torch.randn(5, objective.backbone.num_features)
    expected = layers_of(objective.projector.layers, x)
    assert len(head) == len(expected) == layers
    for layer, value in zip(head, expected, strict=True):
        x = layer(x)
        assert torch.equal(x, value)


@torch.no_grad()
@pytest.mark.parametrize(
    ("backbone", "norms"),
    [
        (VIT, ["batch", "batch", "batch, not affine", "batch", "batch, not affine"]),
        (RESNET, ["batch", "batch, not affine", "batch", ""]),
    ],
)
def test_layers_of_moco_v3(backbone: Backbone, norms: list[str]) -> None:
    """Those of the trained backbone, which is the one that is kept, and then the predictor's."""
    objective = make("moco_v3", backbone, OWN["moco_v3"])
    layers = objective.head_of(objective.encoder)
    assert [layer.norm for layer, _ in layers] == norms
    x = torch.randn(5, objective.backbone.num_features)
    z = objective.projector(x)
    head = built(layers)
    assert torch.equal(head[:-2](x), z)
    assert torch.equal(head(x), objective.predictor(z))
    assert not torch.allclose(head[:-2](x), objective.momentum_projector(x))


@torch.no_grad()
@pytest.mark.parametrize("batch_norm", [False, True])
def test_layers_of_dino(batch_norm: bool) -> None:
    """The teacher's, for the teacher's backbone; the student's, for a hybrid's."""
    own = OWN["dino"] | {"batch_norm": batch_norm, "norm_last_layer": False}
    objective = make("dino", VIT, own)
    x = torch.randn(5, 16)
    for encoder, trained in ((objective.encoder, objective.teacher_head), (objective.backbone, objective.head)):
        head = built(objective.head_of(encoder))
        torch.testing.assert_close(head(x), trained(x), rtol=0, atol=1e-6)
        assert torch.equal(head[:-1](x), trained.mlp(x))  # the bottleneck, not yet of length one
    assert objective.encoder is objective.teacher_backbone
    assert not torch.allclose(objective.teacher_head(x), objective.head(x))


@torch.no_grad()
def test_layers_of_msn() -> None:
    """The last layer gives the cosine of the projection with each prototype."""
    objective = make("msn", VIT, OWN["msn"])
    x = torch.randn(5, 16)
    for encoder, trained in ((objective.encoder, objective.target_head), (objective.backbone, objective.head)):
        head = built(objective.head_of(encoder))
        z = trained(x)
        assert torch.equal(head[:-1](x), z)
        expected = F.cosine_similarity(z.double()[:, None], objective.prototypes.double()[None], dim=2)
        torch.testing.assert_close(head(x).double(), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_hybrid_keeps_the_head_of_its_trained_backbone() -> None:
    settings = {"dino": OWN["dino"], "simmim": {"mask_unit": 4}}
    x = torch.randn(5, 16)
    both = make("hybrid", VIT, {"mim": "simmim", "cl": "dino", "weight": 0.5, "settings": settings})
    assert both.encoder is both.backbone
    head = built(both.head_of(both.encoder))
    torch.testing.assert_close(head(x), both.parts["dino"].head(x), rtol=0, atol=1e-6)
    alone = make("hybrid", VIT, {"mim": "simmim", "cl": "dino", "weight": 1.0, "settings": settings})
    head = built(alone.head_of(alone.encoder))
    torch.testing.assert_close(head(x), alone.parts["dino"].teacher_head(x), rtol=0, atol=1e-6)
    none = make("hybrid", VIT, {"mim": "simmim", "cl": "dino", "weight": 0.0, "settings": settings})
    assert none.head_of(none.encoder) == ()


def test_building_a_head_draws_no_random_numbers() -> None:
    """A training that is saved more often must go on with the same numbers."""
    before = torch.get_rng_state()
    empty_head([Layer("projector", 4, 8, norm="batch", activation="relu"), Layer("projector", 8, 2)])
    assert torch.equal(torch.get_rng_state(), before)


# Saved with its encoder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An encoder of each objective with a head, hardly trained."""
    folder = tmp_path_factory.mktemp("runs")
    for name, own in OWN.items():
        sl.pretrain(name, out=folder / name, settings=TINY | own, workers=0, show_progress=False)
    return {name: folder / name for name in OWN}


def kept(run: Path) -> Path:
    """The checkpoint of a run."""
    folder = latest(run)
    assert folder is not None
    return folder


def trained(run: Path) -> Any:
    """The whole objective, as its checkpoint has it."""
    recipe = make_recipe(run.name, read_recipe(run / "recipe.toml"))
    objective: Any = recipe.plugin.Objective(backbones.build(recipe.backbone).module, recipe.config)
    load_module(kept(run), objective)
    return objective.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", OWN)
def test_the_layers_of_the_head_are_sites(name: str, runs: dict[str, Path]) -> None:
    plain, both = (sl.load_encoder(f"run:{runs[name]}{options}") for options in ("", "?head=true"))
    images = torch.randn(6, 3, 16, 16)
    with capture(both, ["**"]) as acts:
        output = both(images)
    with capture(plain, ["**"]) as own:
        plain(images)
    heads = [f"head.{number}" for number in range(len(PARTS[name]))]
    assert list(acts) == [*own, *heads]
    for site, value in own.items():
        assert torch.equal(acts[site], value)
    assert (both.family, both.depth, both.tokens, both.preprocess) == ("projected", 2, plain.tokens, plain.preprocess)
    objective = trained(runs[name])
    features = own["norm"][:, 0]
    if name == "moco_v3":
        expected = objective.predictor(objective.projector(features))
    elif name == "msn":
        z, prototypes = (F.normalize(x, dim=1) for x in (objective.target_head(features), objective.prototypes))
        expected = z @ prototypes.T
    else:
        expected = (objective.projector if name == "simclr" else objective.teacher_head)(features)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    assert torch.equal(acts[heads[-1]], output)


@pytest.mark.parametrize("name", OWN)
def test_a_head_describes_itself(name: str, runs: dict[str, Path]) -> None:
    """Neither the recipe nor the weights of the training are needed."""
    about = json.loads((kept(runs[name]) / "head.json").read_text())
    assert [layer["part"] for layer in about["layers"]] == PARTS[name]
    assert about["layers"][0]["inputs"] == 16
    alone = runs[name].parent / f"{name} alone"
    alone.mkdir()
    for file in ("encoder.json", "encoder.safetensors", "head.json", "head.safetensors"):
        shutil.copy(kept(runs[name]) / file, alone / file)
    found = [sl.load_encoder(f"run:{run}?head=true") for run in (alone, runs[name])]
    assert found[0].weights == found[1].weights


def test_statistics_of_batch_normalisation_are_those_of_the_training(runs: dict[str, Path]) -> None:
    stored = load_file(kept(runs["simclr"]) / "head.safetensors")
    objective = trained(runs["simclr"])
    assert torch.equal(stored["0.norm.running_mean"], objective.projector.layers[1].running_mean)
    assert not torch.equal(stored["0.norm.running_var"], torch.ones(24))
    assert stored["0.norm.num_batches_tracked"] == 2


def test_notes_say_which_layers_are_what(runs: dict[str, Path]) -> None:
    notes = {name: sl.load_encoder(f"run:{run}?head=true").notes for name, run in runs.items()}
    assert notes["simclr"] == ["head.0 and head.1 are the projector"]
    assert notes["moco_v3"] == ["head.0 to head.2 are the projector, head.3 and head.4 the predictor"]
    assert notes["dino"] == notes["msn"] == ["head.0 to head.2 are the projector, head.3 the prototypes"]


def test_what_cannot_be_loaded_is_said(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["simclr"]
    for wrong in ("?head=yes", "?heads=true"):
        with pytest.raises(InputError, match=r"comes with its own weights and settings.*\?head=true"):
            sl.load_encoder(f"run:{run}{wrong}")
    with pytest.raises(InputError, match="decoder=true and head=true exclude each other"):
        sl.load_encoder(f"run:{run}?head=true&decoder=true")
    assert sl.load_encoder(f"run:{run}?head=false").weights == sl.load_encoder(f"run:{run}").weights
    for text in ("{}", '{"layers": [{"width": 3}]}', "no json"):
        shutil.copytree(kept(run), tmp_path / "broken", dirs_exist_ok=True)
        (tmp_path / "broken" / "head.json").write_text(text)
        with pytest.raises(InputError, match=r"Cannot read .*head\.json"):
            sl.load_encoder(f"run:{tmp_path / 'broken'}?head=true")
    wide = torch.nn.Sequential(nn.Linear(17, 4), nn.ReLU(), nn.Linear(4, 2)).state_dict()
    save_head(mlp_layers(wide, "projector", "relu"), tmp_path / "broken")
    with pytest.raises(InputError, match="takes 17 features, but the encoder gives 16"):
        sl.load_encoder(f"run:{tmp_path / 'broken'}?head=true")
    with pytest.raises(InputError, match="A head has no activation 'relux'; did you mean 'relu'"):
        Layer("projector", 4, 4, activation="relux")


@pytest.mark.parametrize("name", ["beit", "mae", "supervised"])
def test_encoders_of_the_zoo_without_a_head_say_so(name: str) -> None:
    with pytest.raises(InputError, match=f"zoo:{name}.head=true: this encoder is stored without a projection head"):
        sl.load_encoder(f"zoo:{name}?head=true")


@torch.no_grad()
def test_the_zoo_stores_heads_rounded(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[3] / "scripts" / "zoo.py"
    loader = SourceFileLoader("scripts_zoo", str(script))
    spec = spec_from_loader("scripts_zoo", loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "scripts_zoo", module)  # where dataclasses look for it
    loader.exec_module(module)
    run, target = tmp_path / "runs" / "moco_v3", tmp_path / "zoo" / "moco_v3"
    shutil.copytree(runs["moco_v3"], run)
    pd.read_csv(run / "metrics.csv").assign(knn_gap=0.5).to_csv(run / "metrics.csv", index=False)
    (run / "sessions.json").write_text('[{"date": "2026-11-18", "processor": "any", "cpu_seconds": 3600}]')
    monkeypatch.setattr(module, "ZOO", tmp_path / "zoo")
    module.Work(run.parent, None).pack(module.Training("moco_v3", "moco_v3"))
    assert pd.read_csv(target / "metrics.csv").knn_gap.tolist() == pd.read_csv(run / "metrics.csv").knn_gap.tolist()
    assert "cpu_hours = 1.0\ninterruptions = 0\n" in (target / "training.toml").read_text()
    whole, stored = (load_file(folder / "head.safetensors") for folder in (kept(run), target))
    for key, value in whole.items():
        assert torch.equal(stored[key], value.bfloat16() if value.is_floating_point() else value)
    monkeypatch.setattr(zoo, "PACKAGED", tmp_path / "zoo")
    encoder = sl.load_encoder("zoo:moco_v3?head=true")
    head: Any = encoder.module.head
    assert head[0].linear.weight.dtype == torch.float32
    assert torch.equal(head[0].linear.weight, whole["0.linear.weight"].bfloat16().float())


# Looked at


@pytest.fixture(scope="module")
def images() -> sl.Images:
    return sl.load_images("shapes?size=16&train=48&val=16&test=32")


@torch.no_grad()
def outputs(encoder: sl.Encoder, images: sl.Images, split: str, view: str = "plain") -> dict[str, Tensor]:
    """The layers of the head for all images of a split, computed without the sites."""
    rows = images.indices(split)
    items = images.source.read(rows)
    pixels = torch.stack([torch.from_numpy(encoder.preprocess.crop(np.asarray(item.image))) for item in items])
    seen = make_view(view, pixels, images.ids[rows].tolist())
    module: Any = encoder.module
    assert isinstance(module, Projected)
    module.eval()
    x = module.encoder.forward_features(encoder.preprocess.normalize(seen))[:, 0]
    found = {}
    for number, layer in enumerate(module.head):
        x = found[f"head.{number}"] = layer(x)
    return found


@pytest.mark.parametrize("name", ["simclr", "dino"])
def test_cka_and_knn_of_the_head(name: str, runs: dict[str, Path], images: sl.Images) -> None:
    """CKA of each layer with the classes and with each other, and its neighbours, against whole arrays."""
    encoder = sl.load_encoder(f"run:{runs[name]}?head=true", name="one")
    run = sl.analyze(encoder, images, ["cka", "knn"], batch=32, workers=0, show_progress=False)
    train, test = (outputs(encoder, images, split) for split in ("train", "test"))
    labels = {split: images.labels_of(split) for split in ("train", "test")}
    classes = np.eye(len(images.classes))[labels["test"]]
    own = run["cka"].sel(encoder="one", encoder_a="one", encoder_b="one", tokens="all")
    for site in test:
        expected = cka(test[site].double().numpy(), classes, batch=32)
        np.testing.assert_allclose(own.class_cka.sel(site=site), expected, atol=1e-5)
        other = cka(test[site].double().numpy(), test["head.0"].double().numpy(), batch=32)
        np.testing.assert_allclose(own.cka.sel(site_a=site, site_b="head.0"), other, atol=1e-5)
        decided = knn_predict(train[site].numpy(), labels["train"], test[site].numpy())
        accuracy = run["knn"].accuracy.sel(encoder="one", site=site, feature="gap")
        assert float(accuracy) == np.mean(decided == labels["test"])
    assert list(own.layer_type.sel(site=list(test)).values) == ["head"] * len(test)


def test_invariance_of_the_head(runs: dict[str, Path], images: sl.Images) -> None:
    """CKA of each layer on two augmented copies of all test images, which are one batch."""
    encoder = sl.load_encoder(f"run:{runs['simclr']}?head=true", name="one")
    config = InvarianceConfig(policies=("simclr",))
    run = sl.analyze(encoder, images, {"invariance": config}, batch=32, workers=0, show_progress=False)
    found = run["invariance"].invariance.sel(encoder="one", policy="simclr", tokens="all")
    copies = [outputs(encoder, images, "test", f"augment:simclr:{copy}") for copy in range(2)]
    for site in ("head.0", "head.1"):
        expected = cka(*(copy[site].double().numpy() for copy in copies), batch=32)
        np.testing.assert_allclose(found.sel(site=site), expected, atol=1e-5)


def test_a_classifier_is_looked_at_only_when_it_is_asked_for(images: sl.Images) -> None:
    """What analyses look at by default is as it was."""
    reference = f"timm:test_vit@random?img_size=16&patch_size=4&num_classes={len(images.classes)}"
    encoder = sl.load_encoder(reference, name="one")
    assert "head.0" in encoder.sites
    usual = sl.analyze(encoder, images, ["knn", "cka"], batch=16, workers=0, show_progress=False)
    assert not any(site.startswith("head.") for name in ("knn", "cka") for site in usual[name].site.values)
    asked = sl.analyze(encoder, images, ["knn"], sites=["head.*"], batch=16, workers=0, show_progress=False)
    assert asked["knn"].site.values.tolist() == ["head.0"]


def test_curves_go_on_with_the_head(runs: dict[str, Path], images: sl.Images) -> None:
    encoders = {"one": f"run:{runs['simclr']}?head=true", "other": f"run:{runs['dino']}"}
    run = sl.analyze(encoders, images, ["cka", "knn"], batch=16, workers=0, show_progress=False)
    for name, number in (("cka", "classes"), ("knn", "depth")):
        figure = next(f for f in plugins.find("analyses", name).figures(run[name]) if f.name == number)
        series = "series" if name == "cka" else "encoder"
        table = figure.table.loc[figure.table[series] == "one"]
        assert {"block.0", "block.1", "head.0", "head.1"} <= set(table.site)
