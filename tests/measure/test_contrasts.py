"""Contrasts of results of a real pass: exactly the numbers of the tables, and exactly what fewer images would give."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.references import SMALL
from typer.testing import CliRunner

import sightline as sl
from sightline.cli import app
from sightline.measure.groups import GROUPS, ImageGroups

ANALYSES = ["cka", "knn", "attention", "diversity", "fourier", "spectra", "agreement"]
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def images() -> sl.Images:
    return sl.load_images("shapes?size=32", limit=48)


@pytest.fixture(scope="module")
def encoders() -> dict[str, sl.Encoder]:
    return {name: sl.load_encoder(f"{SMALL}&seed={seed}") for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def run(encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path_factory: pytest.TempPathFactory) -> sl.Run:
    out = tmp_path_factory.mktemp("run")
    return sl.analyze(encoders, images, ANALYSES, out=out, batch=8, workers=0, show_progress=False)


# What the findings of the papers ask for: name, this, that, what holds for both
ASKED: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    ("cka.diagonal", {"other": "b"}, {"other": "c"}, {"encoder": "a", "layer_type": "block", "tokens": "all"}),
    ("cka.diagonal", {"layer_type": "fc1"}, {"layer_type": "qkv"}, {"encoder": "a", "other": "b", "tokens": "all"}),
    (
        "cka.diagonal",
        {"depth": "first half"},
        {"depth": "last half"},
        {"encoder": "a", "other": "b", "layer_type": "block", "tokens": "all"},
    ),
    ("cka.row_max", {"other": "b"}, {"other": "c"}, {"encoder": "a", "layer_type": "block", "tokens": "all"}),
    (
        "cka.row_depth",
        {"depth": "first half"},
        0.25,
        {"encoder": "a", "other": "b", "layer_type": "block", "tokens": "all"},
    ),
    ("cka.distance_cka", {"other": "b"}, {"other": "c"}, {"encoder": "a", "distance": 1, "tokens": "all"}),
    ("cka.class_cka", {"encoder": "a"}, {"encoder": "b"}, {"site": "block.*", "tokens": "mean"}),
    ("knn.accuracy", {"encoder": "a"}, {"encoder": "b"}, {"depth": "last half", "feature": "cls"}),
    ("agreement.tau", {"other": "b"}, {"other": "c"}, {"encoder": "a", "k": 5, "images": "both wrong"}),
    ("agreement.f1", {"other": "b"}, {"other": "c"}, {"encoder": "a"}),
    ("attention.distance_mean", {"encoder": "a"}, {"encoder": "b"}, {"depth": "last half"}),
    ("attention.nmi_mean", {"encoder": "a"}, {"encoder": "b"}, {"depth": "last half"}),
    ("attention.nmi_std", {"encoder": "a"}, {"encoder": "b"}, {"depth": "first half"}),
    ("diversity.cosine", {"encoder": "a"}, {"encoder": "b"}, {"kind": "tokens", "depth": "last half"}),
    ("spectra.token_delta", {"encoder": "a"}, {"encoder": "b"}, {"level": "a third", "layer_type": "block"}),
    ("spectra.image_delta", {"encoder": "a"}, {"encoder": "b"}, {"level": "a third", "layer_type": "block"}),
    ("fourier.high_frequency", {"encoder": "a"}, {"encoder": "b"}, {"layer_type": "block"}),
]


@pytest.mark.parametrize(
    ("name", "this", "that", "both"), ASKED, ids=[f"{n}-{name}" for n, (name, *_) in enumerate(ASKED)]
)
def test_what_the_findings_ask_for(run: sl.Run, name: str, this: Any, that: Any, both: dict[str, Any]) -> None:
    found = run.contrast(name, this, that, **both)
    assert np.isfinite([found.value, found.low, found.high, found.p]).all()
    assert found.low <= found.value <= found.high
    if isinstance(that, dict):
        back = run.contrast(name, that, this, **both)
        np.testing.assert_allclose(
            [back.value, back.low, back.high], [-found.value, -found.high, -found.low], rtol=1e-9
        )


def test_the_value_is_that_of_the_tables(run: sl.Run) -> None:
    at = {"encoder_a": "a", "tokens": "all"}
    blocks = run["cka"].diagonal.sel(site_a=["block.0", "block.1"], **at)
    name, this, that, both = ASKED[0]
    known = float(blocks.sel(encoder_b="b").mean() - blocks.sel(encoder_b="c").mean())
    assert run.contrast(name, this, that, **both).value == pytest.approx(known, abs=1e-15)
    accuracy = run["knn"].accuracy.sel(site="block.1", feature="cls")
    found = run.contrast("knn.accuracy", {"encoder": "a"}, {"encoder": "b"}, site="block.1", feature="cls")
    assert found.value == float(accuracy.sel(encoder="a") - accuracy.sel(encoder="b"))


def test_cka_without_a_batch_is_cka_of_the_others(run: sl.Run, encoders: Any, images: sl.Images) -> None:
    """From features of whole batches, by the function on arrays."""
    import torch

    from sightline.measure.estimators.cka import centre, gram, products, ratio

    order = np.array_split(images.order("test", 0), 6)
    hsic = []
    for rows in order:
        pixels = [images.source.read(rows.tolist())]
        parts = []
        for name in "ab":
            encoder = encoders[name]
            cropped = np.stack([encoder.preprocess.crop(item.image) for item in pixels[0]])
            with encoder.evaluating(), torch.inference_mode(), sl.capture(encoder, ["block.1"]) as taken:
                encoder(encoder.preprocess.normalize(torch.from_numpy(cropped)))
            parts.append(gram(taken["block.1"].flatten(1)))
        hsic.append(len(rows) * products(centre(torch.stack(parts))).numpy())
    known = [ratio(np.sum([part for n, part in enumerate(hsic) if n != out], axis=0))[0, 1] for out in range(6)]
    found = run.estimate("cka.cka", encoder="a", other="b", site="block.1", tokens="all")
    np.testing.assert_allclose(sorted(next(iter(found.left_out.values()))), sorted(known), rtol=1e-5)


def test_a_number_without_a_group_is_that_of_fewer_images(
    run: sl.Run, encoders: dict[str, sl.Encoder], images: sl.Images
) -> None:
    groups = ImageGroups(images, ["test"]).of("test")
    fewer = replace(images, splits={**images.splits, "test": images.indices("test")[groups != 7]})
    names = ["knn", "attention", "agreement"]
    rest = sl.analyze(encoders, fewer, names, batch=8, workers=0, show_progress=False)
    asked = {
        "knn.accuracy": {"encoder": "a", "site": "block.1", "feature": "gap"},
        "attention.distance_mean": {"encoder": "b", "site": "block.0.attn_map"},
        "attention.nmi_std": {"encoder": "a", "site": "block.1.attn_map"},
        "agreement.tau": {"encoder": "a", "other": "b", "k": 5, "images": "all images"},
        "agreement.f1": {"encoder": "a", "other": "b"},
        "agreement.kappa": {"encoder": "a", "other": "c"},
        "agreement.test_accuracy": {"encoder": "c"},
    }
    for name, where in asked.items():
        left_out = next(iter(run.estimate(name, where).left_out.values()))
        np.testing.assert_allclose(left_out[7], rest.estimate(name, where).value, rtol=1e-6, err_msg=name)
    assert len(left_out) == GROUPS


def test_groups_share_the_images_and_do_not_depend_on_batches(images: sl.Images) -> None:
    groups = ImageGroups(images, ["test"])
    np.testing.assert_array_equal(np.sort(groups.of("test")), np.arange(48))  # fewer images than groups: each its own
    assert groups.axis.words == "test images"
    assert groups.axis == ImageGroups(images, ["test"]).axis != ImageGroups(images, ["train"]).axis


def test_a_finished_run_opens_with_what_it_kept(run: sl.Run) -> None:
    assert run.path is not None
    name, this, that, both = ASKED[0]
    assert sl.contrast(sl.open_run(run.path), name, this, that, **both) == run.contrast(name, this, that, **both)


def test_the_command_says_the_same(run: sl.Run) -> None:
    runner, path = CliRunner(), str(run.path)
    words = [
        "contrast",
        path,
        "knn.accuracy",
        "--this",
        "encoder=a",
        "--that",
        "encoder=b",
        "--where",
        "feature=cls,depth=last half",
        "--json",
    ]
    done = runner.invoke(app, words)
    known = run.contrast("knn.accuracy", {"encoder": "a"}, {"encoder": "b"}, feature="cls", depth="last half")
    assert json.loads(done.stdout)["value"] == pytest.approx(known.value)
    assert json.loads(done.stdout)["low"] == pytest.approx(known.low)
    listed = runner.invoke(app, ["contrast", path])
    assert "attention.nmi_mean: encoder (a, b, c), site (block.0.attn_map, block.1.attn_map)" in listed.stdout
    with pytest.raises(sl.InputError, match="Say which numbers are meant"):
        runner.invoke(app, words[:3], catch_exceptions=False)
