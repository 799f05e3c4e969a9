"""Recipes: layers, TOML there and back, and a sentence for each mistake."""

import dataclasses
import re
import tomllib
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support.trainings import TINY_VIT

from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.core.settings import parse_settings, to_toml
from sightline.generation.training import make_recipe as make_rcdm
from sightline.training.backbones import Backbone, build
from sightline.training.optimization import Optimization
from sightline.training.recipe import COMMANDS, FOLDER, Pretraining, make_recipe, read_recipe, recipe_names
from sightline.transfer.detection.detect import make_recipe as make_detection
from sightline.transfer.finetune import make_recipe as make_finetuning
from sightline.transfer.segmentation.segment import make_recipe as make_segmentation

OBJECTIVES = plugins.names("objectives")


def test_layers_override_each_other() -> None:
    recipe = make_recipe("mae", {"lr": 0.1, "depth": 3, "mask_ratio": 0.5}, {"lr": 0.2}, {"mask_ratio": 0.6})
    assert recipe.optimization == Optimization(lr=0.2)
    assert recipe.backbone == Backbone(depth=3)
    assert recipe.training == Pretraining()
    assert recipe.config == plugins.find("objectives", "mae").Config(mask_ratio=0.6)


def test_measures_of_a_recipe_fall_away_with_its_backbone() -> None:
    base = TINY_VIT | {"size": 48, "init": "xavier"}
    assert make_recipe("simclr", base, {"lr": 0.1}).backbone == Backbone(**base)
    assert make_recipe("simclr", base, {"backbone": "resnet18"}).backbone == Backbone("resnet18", size=48)
    changed = make_recipe("simclr", base, {"backbone": "resnet18", "stem": "small"}).backbone
    assert changed == Backbone("resnet18", size=48, stem="small")


def test_whole_numbers_become_floats_where_those_are_wanted() -> None:
    recipe = make_recipe("simclr", {"lr": 1, "epochs": 3, "crop": [0.5, 1.0]})
    assert (type(recipe.optimization.lr), type(recipe.optimization.epochs)) == (float, float)
    assert recipe.config.crop == (0.5, 1.0)


@pytest.mark.parametrize(
    ("objective", "layer", "sentence"),
    [
        ("mae", {"dept": 3}, "no setting 'dept' of mae; did you mean 'depth'"),
        ("mae", {"mask_rato": 0.5}, "did you mean 'mask_ratio'"),
        ("mae", {"temperature": 0.5}, "no setting 'temperature' of mae"),
        ("mae", {"moco_v3": {"temperature": 0.5}}, "no setting 'moco_v3' of mae"),
        ("mae", {"settings": {}}, "no setting 'settings' of mae"),
        ("mae", {"depth": 3.5}, "depth is 3.5, but a whole number"),
        ("mae", {"depth": True}, "depth is True, but a whole number"),
        ("mae", {"lr": "high"}, "lr is 'high', but a number"),
        ("mae", {"lr": True}, "lr is True, but a number"),
        ("mae", {"backbone": 18}, "backbone is 18, but text"),
        ("mae", {"compile": 1}, "compile is 1, but true or false"),
        ("mae", {"crop": 0.5}, "crop is 0.5, but a list"),
        ("mae", {"precision": "fp16"}, "no precision 'fp16'"),
        ("mae", {"log_every": 0}, "log_every is 0"),
        ("mae", {"seed": -1}, "seed is -1, but it cannot be negative"),
        ("hybrid", {"simmim": {"mask_unt": 8}}, "no setting simmim.mask_unt; did you mean 'mask_unit'"),
        ("hybrid", {"supervised": {"crop": [0.5, 1.0]}}, "'supervised' cannot be a part of a hybrid"),
        ("maw", {}, "no objective 'maw'; did you mean 'mae'"),
    ],
)
def test_mistakes_are_sentences(objective: str, layer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        make_recipe(objective, layer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("crop", [[0.3], [0.3, 0.6, 1.0], ["a", "b"], [True, 1.0]])
def test_lists_have_their_length_and_kind(crop: list[Any]) -> None:
    with pytest.raises(InputError, match="crop"):
        make_recipe("mae", {"crop": crop})


@pytest.mark.parametrize("value", ["hot", True, [0.1]])
def test_settings_of_the_parts_of_a_hybrid_have_their_kind(value: Any) -> None:
    with pytest.raises(InputError, match="temperature"):
        make_recipe("hybrid", {"moco_v3": {"temperature": value}})


def test_tables_of_a_hybrid_are_layered_by_key() -> None:
    recipe = make_recipe("hybrid", {"moco_v3": {"hidden": 8, "out": 4}}, {"moco_v3": {"out": 2}, "weight": 0.5})
    assert recipe.config.part("moco_v3") == plugins.find("objectives", "moco_v3").Config(hidden=8, out=2)
    assert recipe.config.weight == 0.5


def test_a_recipe_of_another_objective_is_refused() -> None:
    with pytest.raises(InputError, match="for 'mae', not for 'simclr'"):
        make_recipe("simclr", {"objective": "mae"})


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_keys_are_unambiguous(objective: str) -> None:
    """A recipe is one flat table, so no two parts may have a setting of the same name."""
    parts = (Backbone, Optimization, Pretraining, plugins.find("objectives", objective).Config)
    keys = [{field.name for field in dataclasses.fields(part)} for part in parts]
    for one, other in combinations(keys, 2):
        assert not one & other
    assert "objective" not in set.union(*keys)
    assert not set.union(*keys) & set(OBJECTIVES)  # those are tables


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_toml_there_and_back(objective: str) -> None:
    images = 'folder:/tmp/ein "Bild" \\ Öl'
    recipe = make_recipe(objective, {"lr": 1e-5, "images": images, "size": 64, "betas": [0.8, 0.9]})
    assert make_recipe(objective, tomllib.loads(recipe.to_toml())) == recipe


@pytest.mark.parametrize("images", ["folder:/tmp/\N{CAMERA}", "folder:/tmp/a\tb", "folder:/tmp/\x7f"])
def test_any_path_survives_toml(images: str) -> None:
    recipe = make_recipe("mae", {"images": images})
    assert make_recipe("mae", tomllib.loads(recipe.to_toml())) == recipe


def test_tables_survive_toml() -> None:
    parts = {"mae": {"crop": [0.5, 1.0]}, "dino": {"multi_crop": False, "out": 64}}
    recipe = make_recipe("hybrid", {"mim": "mae", "cl": "dino", **parts})
    again = make_recipe("hybrid", tomllib.loads(recipe.to_toml()))
    assert again.config.part("mae") == recipe.config.part("mae")
    assert again.config.part("dino") == recipe.config.part("dino")
    assert again == recipe


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_values_can_be_a_layer_again(objective: str) -> None:
    """A resumed training compares the values that it was begun with."""
    recipe = make_recipe(objective, {"lr": 0.3})
    assert make_recipe(objective, recipe.values()) == recipe


@pytest.mark.parametrize("name", [name for name in recipe_names() if read_recipe(name)["objective"] not in COMMANDS])
def test_our_recipes_resolve(name: str) -> None:
    values = read_recipe(name)
    recipe = make_recipe(values["objective"], values)
    assert make_recipe(recipe.objective, tomllib.loads(recipe.to_toml())) == recipe
    assert recipe.plugin.views(recipe.config, recipe.backbone)
    assert recipe.backbone.reference().startswith("timm:")


@pytest.mark.parametrize("name", [name for name in recipe_names() if read_recipe(name)["objective"] in COMMANDS])
def test_our_recipes_of_transfer_resolve(name: str) -> None:
    values = read_recipe(name)
    ours = {"detect": make_detection, "finetune": make_finetuning, "rcdm": make_rcdm, "segment": make_segmentation}
    make: Any = ours[values["objective"]]
    recipe = make(values)
    assert make(tomllib.loads(to_toml(recipe.values()))) == recipe


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("simmim_vit_b16", 2e-4),
        ("hybrid_vit_b16", 2e-4),
        ("supervised_vit_b16", 1e-3),
        ("finetune_vit_b16", 4e-3),
        ("finetune_vit_b16_deit", 1e-3),
        ("finetune_vit_b16_simmim", 5e-3),
        ("mae_vit_b16", 2.4e-3),
        ("moco_v3_vit_b16", 2.4e-3),
        ("dino_vit_b16", 8e-3),
        ("dino_vit_b16_two_crops", 8e-3),
        ("simclr_resnet50", 4.8),
        ("simclr_resnet50_cifar10", 16.0),
        ("supervised_resnet50_cifar10", 9.6),
        ("msn_vit_b16", 1e-3),
    ],
)
def test_published_recipes_reach_the_rate_of_the_authors_code(name: str, rate: float) -> None:
    values = read_recipe(name)
    make = make_finetuning if values["objective"] == "finetune" else partial(make_recipe, values["objective"])
    assert make(values).optimization.peak_lr == pytest.approx(rate, rel=1e-12)


def test_a_base_rate_says_for_how_many_images_it_counts() -> None:
    for name in recipe_names():
        values = read_recipe(name)
        assert ("base_lr" in values) == ("base_batch" in values), name
        assert ("base_lr" in values) != ("lr" in values), name


def test_recipes_say_command_machine_and_what_to_expect() -> None:
    for name in recipe_names():
        head = (FOLDER / f"{name}.toml").read_text().partition("objective = ")[0]
        assert "#   sightline " in head or "#   srun " in head, name
        assert "# Machine:" in head or "# Time:" in head, name
        assert "# Expected:" in head, name
        assert len(head.partition("\n")[0]) <= 105, name  # `sightline list recipes` stays readable


@pytest.mark.parametrize("name", ["moco_v3_vit_b16", "simmim_vit_b16"])
def test_sizes_that_a_recipe_names_are_those_of_vision_transformers(name: str) -> None:
    """width, depth and heads of ViT-Ti, S, L and H, set as the head of the recipe says."""
    head = (FOLDER / f"{name}.toml").read_text().partition("# Sizes:")[2]
    words = dict(re.findall(r"((?:--set \w+=\d+ )+)\((ViT-\w+)", head))
    sizes = {size: parse_settings(re.findall(r"--set (\S+)", text)) for text, size in words.items()}
    assert sizes == {
        "ViT-Ti": {"width": 192, "heads": 3},
        "ViT-S": {"width": 384, "heads": 12 if name == "moco_v3_vit_b16" else 6},
        "ViT-L": {"width": 1024, "depth": 24, "heads": 16},
        "ViT-H": {"width": 1280, "depth": 32, "heads": 16},
    }
    values = read_recipe(name)
    small = make_recipe(values["objective"], values, sizes["ViT-S"])
    module: Any = build(small.backbone).module
    assert (module.embed_dim, len(module.blocks)) == (384, 12)
    assert module.blocks[0].attn.num_heads == sizes["ViT-S"]["heads"]


def test_every_objective_has_a_recipe() -> None:
    assert set(OBJECTIVES) <= set(recipe_names())
    assert all(read_recipe(name)["objective"] == name for name in OBJECTIVES)


def test_recipes_are_read_by_name_and_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes((FOLDER / "mae.toml").read_bytes())
    assert read_recipe(path) == read_recipe(str(path)) == read_recipe("mae")


def test_recipes_that_cannot_be_read_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no recipe 'moco_v'; did you mean 'moco_v3'"):
        read_recipe("moco_v")
    with pytest.raises(InputError, match="no recipe"):
        read_recipe(tmp_path / "none.toml")
    for content in (b"lr = ", b"lr = 1\nlr = 2", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(InputError, match="Cannot read the recipe") as caught:
            read_recipe(tmp_path / "bad.toml")
        assert "\n" not in str(caught.value)
