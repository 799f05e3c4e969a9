"""What is asked of a pass: the analyses that run, what is left out and why, images beside the others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.references import SMALL

import sightline as sl
from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.core.run_folder import Run
from sightline.images.loading import load_images
from sightline.images.sets import Images, join
from sightline.measure.contract import analysis
from sightline.measure.request import choose_analyses, default_analyses

VIT = SMALL
CNN = "timm:resnet18@random?size=32&zero_init_last=False"


def measure(encoders: object, images: Images, *args: object, **settings: object) -> Run:
    return sl.analyze(encoders, images, *args, batch=8, workers=0, show_progress=False, **settings)


@pytest.fixture(scope="module")
def images() -> Images:
    return sl.load_images("shapes?size=32", limit=16)


def test_what_is_forwarded_once_runs_by_default() -> None:
    assert {"cka", "knn", "attention", "fourier"} <= set(default_analyses())
    assert not {"noise", "invariance", "orientation", "shape_bias"} & set(default_analyses())
    configs, named = choose_analyses(None, {"knn": analysis("knn").Config(k=3)})
    assert list(configs) == default_analyses()
    assert configs["knn"].k == 3
    assert named == {"knn"}
    assert set(choose_analyses("all")[0]) == set(plugins.names("analyses"))
    assert choose_analyses(["cka"], ["noise"])[1] == {"cka", "noise"}


def test_an_encoder_without_the_sites_is_left_out_with_the_reason(images: Images, tmp_path: Path) -> None:
    run = measure({"vit": VIT, "cnn": CNN}, images, ["attention", "cka"], out=tmp_path / "run")
    assert list(run["attention"].encoder.values) == ["vit"]
    assert list(run["cka"].encoder.values) == ["vit", "cnn"]
    why = run.request["left_out"]["attention"]["cnn"]
    assert why == "it has none of the sites block.*.attn_map, decoder.block.*.attn_map"
    page = sl.write_report(run).read_text()
    assert f"cnn is left out: {why}." in page


def test_what_was_named_must_be_possible(images: Images) -> None:
    with pytest.raises(InputError, match="attention cannot be measured on these encoders"):
        measure(CNN, images, ["attention"])
    with pytest.raises(InputError, match="attention cannot be measured on these encoders"):
        measure(CNN, images, also=["attention"], sites=["block.*"])


def test_what_was_not_named_is_left_out(tmp_path: Path) -> None:
    """Images without labels: what needs classes is left out, and the page says so."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    run = measure(CNN, load_images(pixels), out=tmp_path / "run")
    assert {"cka", "fourier"} <= set(run.names())
    assert {"knn", "attention"} <= set(run.request["left_out"])
    assert "labelled" in run.request["left_out"]["knn"]
    page = sl.write_report(run).read_text()
    assert "Not measured" in page
    # A later run that measures one of them takes its reason away, and keeps the others.
    again = measure(CNN, load_images(pixels), ["cka"], out=tmp_path / "run")
    assert "knn" in again.request["left_out"]


def test_the_sites_of_the_user_go_to_analyses_that_can_take_them(images: Images) -> None:
    run = measure(VIT, images, ["cka", "attention"], sites=["block.1.fc1"])
    assert list(run["cka"].site.values) == ["block.1.fc1"]
    assert "block.0.attn_map" in run["attention"].site.values


# Images beside the others


def test_joined_images_are_read_in_order() -> None:
    first, second = load_images("shapes?size=16&train=8&val=0&test=8"), load_images("shapes:conflict?size=16&test=40")
    both = join(first, "conflict", second.sample(16, seed=0))
    assert both.common_splits == ("train", "test")
    where = both.indices("conflict")
    mixed = [int(where[3]), 2, int(where[0]), 15]
    found = [item.image for item in both.source.read(mixed)]
    chosen = second.sample(16, seed=0).indices("test")
    wanted = [second.source.read([int(chosen[3])])[0].image, first.source.read([2])[0].image]
    wanted += [second.source.read([int(chosen[0])])[0].image, first.source.read([15])[0].image]
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    assert (both.labels[where] == second.labels[chosen]).all()
    assert (both.extras["texture"][where] == second.extras["texture"][chosen]).all()
    assert (both.extras["texture"][:16] == -1).all()
    assert len(set(both.ids)) == len(both.ids)


def test_joining_changes_nothing_for_the_others() -> None:
    first, second = load_images("shapes?size=16&train=8&val=0&test=8"), load_images("shapes:conflict?size=16&test=16")
    both = join(first, "conflict", second)
    assert both.describe() == first.describe()
    assert both.digest("train") == first.digest("train")
    assert both.digest("conflict") not in {both.digest("test"), first.digest("test")}


def test_classes_are_matched_by_name() -> None:
    pixels = torch.zeros(8, 3, 8, 8, dtype=torch.uint8)
    mine = load_images(pixels, labels=list("abcdabcd"), ids=[f"m{i}" for i in range(8)])
    theirs = load_images(pixels, labels=list("dbdbdbdb"), ids=[f"t{i}" for i in range(8)])
    both = join(mine, "others", theirs)
    names = [both.classes[label] for label in both.labels[both.indices("others")]]
    assert names == [theirs.classes[label] for label in theirs.labels_of("test")]
    with pytest.raises(InputError, match="The class 'a' of"):
        join(theirs, "others", mine)


def test_shape_bias_needs_conflict_images(images: Images) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
    mine = load_images(pixels, labels=list("ab" * 16))
    with pytest.raises(InputError, match="shape_bias needs cue-conflict images"):
        measure(CNN, mine, ["shape_bias"])
    with pytest.raises(InputError, match="used only by shape_bias"):
        measure(CNN, images, ["cka"], further={"conflict": "shapes:conflict?size=32"})
    with pytest.raises(InputError, match="has no texture labels"):
        measure(CNN, images, ["shape_bias"], further={"conflict": "shapes?size=32"})
    run = measure(CNN, images, ["shape_bias"])
    assert run.request["analyses"]["shape_bias"]["conflict"] == {
        "images": "shapes:conflict?size=32&seed=0",
        "count": 16,
    }
