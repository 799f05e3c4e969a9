"""Contracts: every plugin fulfils its own, and what it leaves out has its default."""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sightline as sl
from sightline import analyses
from sightline.core import plugins
from sightline.core.contract import Reported, fulfil, members
from sightline.core.errors import InputError
from sightline.encoders import contract as encoders
from sightline.images.contract import image_source
from sightline.measure import contract as measure
from sightline.training import objective

ACCESS: dict[str, Any] = {
    "analyses": measure.analysis,
    "datasets": image_source,
    "families": encoders.family,
    "formats": encoders.format_named,
    "objectives": objective.objective_named,
    "sources": encoders.source,
    "studies": plugins.module_of,
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in ACCESS for name in plugins.built_in(kind)])
def test_a_plugin_has_what_its_contract_asks_for(kind: str, name: str) -> None:
    assert ACCESS[kind](name) is plugins.find(kind, name)


def test_every_kind_of_plugin_has_a_contract() -> None:
    assert plugins.ROOMS.keys() == ACCESS.keys()


def test_a_plugin_calls_its_classes_as_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "from sightline.measure.contract import Analysis",
        "class FooConfig: ...",
        "class FooAnalysis(Analysis): ...",
    ]
    (tmp_path / "foo.py").write_text("\n".join(lines), "utf-8")
    (tmp_path / "two.py").write_text("\n".join([*lines, "class OtherConfig: ..."]), "utf-8")
    monkeypatch.setattr(analyses, "__path__", [str(tmp_path)])
    plugins._own.cache_clear()
    plugins._places.cache_clear()
    try:
        plugin = plugins.find("analyses", "foo")
        assert (plugin.Config, plugin.Analysis) == (plugin.FooConfig, plugin.FooAnalysis)
        assert plugins.find("analyses", "foo").Config is plugin.FooConfig
        with pytest.raises(
            InputError, match="'two' has FooConfig and OtherConfig; only one of its classes may end in Config"
        ):
            plugins.find("analyses", "two")
    finally:
        plugins._own.cache_clear()
        plugins._places.cache_clear()


def test_defaults_fill_what_is_left_out_and_nothing_else() -> None:
    plugin = ModuleType("foo")
    vars(plugin).update(dict.fromkeys(members(measure.AnalysisFile), "mine"), Analysis="mine", PROJECTION=("head.*",))
    assert fulfil(plugin, measure.AnalysisPlugin, measure.OPTIONAL) == []
    assert (plugin.PROJECTION, plugin.IMAGES) == (("head.*",), {})
    assert (plugin.precision(None), plugin.summary(None)) == ("float32", [])
    assert (plugin.Config(), plugin.views(plugin.Config(), "test")) == (measure.NoSettings(), ("plain",))
    del plugin.cost, plugin.TITLE
    assert fulfil(plugin, measure.AnalysisPlugin, measure.OPTIONAL) == ["TITLE", "cost"]
    assert members(Reported) == ["TITLE", "QUESTION", "FORMULA", "HOW_TO_READ", "SOURCE", "figures", "headlines"]


@pytest.mark.parametrize("name", plugins.built_in("analyses"))
def test_splits_beyond_the_usual_ones_are_declared(name: str) -> None:
    plugin = measure.analysis(name)
    assert set(plugin.SPLITS) - {"train", "val", "test"} == set(plugin.IMAGES)


def test_an_encoder_is_frozen() -> None:
    encoder = sl.load_encoder("timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=8&num_heads=2")
    for field in dataclasses.fields(encoder):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(encoder, field.name, None)
    named = sl.load_encoder(encoder, name="mine", preprocess=sl.Preprocess((16, 16), 16, mean=(0, 0, 0)))
    assert (named.name, named.preprocess.mean, named.weights) == ("mine", (0, 0, 0), encoder.weights)
    assert (encoder.name, encoder.module) != ("mine", None)
    assert named.module is encoder.module
