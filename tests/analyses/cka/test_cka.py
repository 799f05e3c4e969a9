"""The pass over images that measures CKA: equal to whole arrays, intervals, reasons, classes."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from support.cka import random, textbook_cka, textbook_hsic
from support.passes import CNN, activations, measured
from support.references import SMALL
from torch import nn

from sightline import load_encoder, load_images
from sightline.analyses import cka as plugin
from sightline.analyses.cka import CkaConfig
from sightline.measure.estimators.cka import centre, cka, gram, products


def view(x: np.ndarray, tokens: str) -> np.ndarray:
    if x.ndim == 4:
        return {"all": x, "patches": x, "mean": x.mean((2, 3))}[tokens]
    return {"all": x, "cls": x[:, 0], "patches": x[:, 1:], "mean": x[:, 1:].mean(1)}[tokens]


@pytest.fixture(scope="module")
def compared():
    encoders = {"a": load_encoder(SMALL), "b": load_encoder(SMALL + "&seed=1"), "r": load_encoder(CNN)}
    images = load_images("shapes?size=32", limit=72)
    return encoders, images, measured("cka", encoders, images, batch=32)


def test_the_pass_equals_the_whole_array(compared) -> None:
    encoders, images, result = compared
    order = images.order("test", 0)
    sites = {"a": ["block.1", "block.1.qkv"], "b": ["block.0", "block.1.fc1"], "r": ["block.3", "block.3.residual"]}
    acts = {name: activations(encoders[name], images, sites[name], order) for name in encoders}
    checked = 0
    for one, other, tokens in itertools.product(encoders, encoders, ("all", "cls", "mean", "patches")):
        if tokens == "cls" and "r" in (one, other):
            continue
        for site_a, site_b in itertools.product(sites[one], sites[other]):
            x, y = (view(acts[name][site].numpy(), tokens) for name, site in ((one, site_a), (other, site_b)))
            at = {"encoder_a": one, "encoder_b": other, "site_a": site_a, "site_b": site_b, "tokens": tokens}
            assert float(result.cka.sel(at)) == pytest.approx(textbook_cka(x, y, 32), abs=1e-5)
            checked += 1
    assert checked > 100


def test_symmetry_ones_and_reasons(compared) -> None:
    _, _, result = compared
    swapped = result.cka.transpose("tokens", "encoder_b", "encoder_a", "site_b", "site_a").values
    np.testing.assert_allclose(result.cka.values, swapped, atol=1e-12, equal_nan=True)
    own = result.cka.sel(encoder_a="a", encoder_b="a", tokens="all", site_a="block.1", site_b="block.1")
    assert float(own) == pytest.approx(1, abs=1e-12)
    reason = result.reason.sel(encoder="r")
    assert reason.sel(tokens="cls", site="block.0").item() == "this site has no such token view"
    assert reason.sel(tokens="all", site="block.0.qkv").item() == "this encoder has no such site"
    own = np.einsum("teess->tes", result.cka.values)  # NaN exactly where there is a reason
    np.testing.assert_array_equal(np.isfinite(own), result.reason.values == "")


def test_null_and_interval(compared) -> None:
    _, _, result = compared
    known = np.isfinite(result.cka.values)
    assert np.nanmax(np.abs(result.cka_null.values)) < 0.6
    assert abs(np.nanmean(result.cka_null.values)) < 0.1
    low, value, high = (result[name].values[known] for name in ("cka_low", "cka", "cka_high"))
    assert (low <= value + 1e-9).mean() > 0.95
    assert (value <= high + 1e-9).mean() > 0.95


def test_bootstrap_is_the_plain_one() -> None:
    """The interval equals resampling the batches one by one with the same draws."""
    encoders = {"a": load_encoder(SMALL), "b": load_encoder(SMALL + "&seed=1")}
    images = load_images("shapes?size=32", limit=64)
    config = CkaConfig(tokens=("all",), bootstrap=200)
    result = measured("cka", encoders, images, config, sites=["block.1"])
    order = images.order("test", 0)
    x, y = (activations(e, images, ["block.1"], order)["block.1"].reshape(64, -1) for e in encoders.values())
    grams = [torch.stack([gram(v[rows]) for v in (x, y)]) for rows in np.arange(64).reshape(8, 8)]
    hsic = np.array([products(centre(g)).numpy() for g in grams])
    draws = np.random.Generator(np.random.Philox(0)).multinomial(8, np.full(8, 1 / 8), size=200)
    values = []
    for draw in draws:
        total = sum(times * h for times, h in zip(draw, hsic, strict=True))
        values.append(total[0, 1] / np.sqrt(total[0, 0] * total[1, 1]))
    at = {"encoder_a": "a", "encoder_b": "b", "tokens": "all", "site_a": "block.1", "site_b": "block.1"}
    # The pass computes attention by other steps than the kernel, which differ in the last digits of float32.
    tail = stats.norm.cdf(np.sqrt(8 / 7) * stats.t.ppf(0.025, 7))  # of 8 batches
    assert float(result.cka_low.sel(at)) == pytest.approx(np.quantile(values, tail), abs=1e-7)
    assert float(result.cka_high.sel(at)) == pytest.approx(np.quantile(values, 1 - tail), abs=1e-7)


@pytest.mark.bf16
def test_bf16_rounds_the_model_not_the_measurement() -> None:
    encoders = {"a": load_encoder(SMALL), "b": load_encoder(SMALL + "&seed=1")}
    images = load_images("shapes?size=32", limit=32)
    result = measured("cka", encoders, images, precision="bf16", batch=32, sites=["block.1.fc1"])
    with torch.autocast("cpu", torch.bfloat16):
        order = images.order("test", 0)
        x, y = (activations(e, images, "block.1.fc1", order)["block.1.fc1"].float() for e in encoders.values())
    at = {"encoder_a": "a", "encoder_b": "b", "tokens": "all", "site_a": "block.1.fc1", "site_b": "block.1.fc1"}
    assert float(result.cka.sel(at)) == pytest.approx(textbook_cka(x.numpy(), y.numpy(), 32), abs=1e-7)


class Odd(nn.Module):
    """A module with a constant layer, a NaN layer, and an operation in place after a captured one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.constant, self.broken = nn.Conv2d(3, 4, 8, 8), nn.Identity(), nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.constant(torch.full_like(x, 0.3))
        self.broken(x / 0)
        return self.relu(x).mean((2, 3))


def test_constant_and_nan_layers_have_their_reason() -> None:
    torch.manual_seed(0)
    encoder = load_encoder(Odd(), name="odd", preprocess=load_encoder(SMALL).preprocess)
    images = load_images("shapes?size=32", limit=32)
    result = measured("cka", {"odd": encoder}, images, batch=16)
    own = result.sel(encoder="odd", tokens="all")
    for reason in (own.reason, own.class_reason):
        assert reason.sel(site="constant").item() == "the activations are the same for all images"
        assert "not finite" in reason.sel(site="broken").item()
        assert reason.sel(site="first").item() == ""
    np.testing.assert_array_equal(own.class_cka.isnull(), own.class_reason != "")
    values = result.cka.sel(encoder_a="odd", encoder_b="odd", tokens="all")
    assert np.isnan(values.sel(site_a="constant")).all()
    assert np.isnan(values.sel(site_b="broken")).all()
    # What ReLU writes in place afterwards is not what `first` gave.
    assert float(values.sel(site_a="first", site_b="relu")) < 0.999
    whole = activations(encoder, images, ["first", "relu"], images.order("test", 0))
    expected = textbook_cka(whole["first"].numpy(), whole["relu"].numpy(), 16)
    assert float(values.sel(site_a="first", site_b="relu")) == pytest.approx(expected, abs=1e-6)


class Scaled(nn.Module):
    """The same features at scales whose squares leave float32, and at one whose products leave float64."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.small, self.large, self.absurd = (nn.Identity() for _ in range(4))
        self.first = nn.Conv2d(3, 4, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(self.first(x))
        self.small(x * 1e-30)
        self.large(x * 1e18)
        self.absurd(x.double() * 1e100)
        return x.mean((2, 3))


def test_the_scale_of_a_layer_changes_nothing_or_is_the_reason() -> None:
    torch.manual_seed(0)
    encoder = load_encoder(Scaled(), name="s", preprocess=load_encoder(SMALL).preprocess)
    images = load_images("shapes?size=32", limit=16)
    result = measured("cka", {"s": encoder}, images)
    at = result.sel(encoder_a="s", encoder_b="s", tokens="all", site_a="one")
    for scaled in ("small", "large"):
        assert float(at.cka.sel(site_b=scaled)) == pytest.approx(1, abs=1e-6)
        assert str(result.reason.sel(encoder="s", tokens="all", site=scaled).values) == ""
    assert np.isnan(at.cka.sel(site_b="absurd"))
    why = "the activations are so large that their products are not finite"
    assert str(result.reason.sel(encoder="s", tokens="all", site="absurd").values) == why


class OneResponds(nn.Module):
    """A layer that says something about one image of the batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(len(x), 1, 1, 1)
        mask[0] = 1
        return self.layer(x * mask)


def test_every_nan_has_a_reason() -> None:
    encoder = load_encoder(OneResponds(), name="one", preprocess=load_encoder(SMALL).preprocess)
    images = load_images("shapes?size=32", limit=16)
    result = measured("cka", {"one": encoder}, images)
    assert np.isnan(result.cka.sel(tokens="all")).all()
    assert "equally alike" in str(result.reason.sel(tokens="all").values.item())


def test_batches_count_by_their_images() -> None:
    """17 images in batches of at most 8 are 6, 6 and 5: the ratio of sums is weighted by that."""
    x, y = random((17, 5), 0), random((17, 4), 1) + random((17, 4), 2)
    sums = np.zeros((2, 2))
    for rows in ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16]):
        centred = centre(torch.stack([gram(torch.from_numpy(v[rows])) for v in (x, y)]))
        sums += len(rows) * products(centred).numpy()
    assert cka(x, y, batch=8) == pytest.approx(sums[0, 1] / np.sqrt(sums[0, 0] * sums[1, 1]), abs=1e-12)


# Class CKA


def relabelled(images, labels):
    return dataclasses.replace(images, labels=np.asarray(labels, np.int64))


def class_cka(encoder, images, batch=16):
    return measured("cka", {"a": encoder}, images, CkaConfig(bootstrap=50), batch=batch, sites=["block.1"])


@pytest.mark.parametrize("unlabelled", [0.0, 0.4])
def test_class_cka_is_cka_with_the_one_hot_labels(unlabelled: float) -> None:
    """Of the labelled images of each batch, where a batch has at least four of them."""
    encoder, images = load_encoder(SMALL), load_images("shapes?size=32", limit=72)
    hidden = np.random.default_rng(0).random(len(images.labels)) < unlabelled
    images = relabelled(images, np.where(hidden, -1, images.labels % 5))
    order = images.order("test", 0)
    images.labels[order[:12]] = -1 if unlabelled else images.labels[order[:12]]  # a batch with fewer than four
    result = class_cka(encoder, images)
    x, labels = activations(encoder, images, ["block.1"], order)["block.1"], images.labels[order]
    sums, labelled = np.zeros(3), 0
    for rows in np.array_split(np.arange(len(order)), 5):
        rows = rows[labels[rows] >= 0]
        if len(rows) >= 4:
            a = x[rows, 1:].double().mean(1).numpy()
            a, y = a - a.mean(0), np.eye(5)[labels[rows]]
            k, l = a @ a.T, y @ y.T  # noqa: E741
            sums += len(rows) * np.array([textbook_hsic(k, l), textbook_hsic(k, k), textbook_hsic(l, l)])
            labelled += len(rows)
    at = {"tokens": "mean", "encoder": "a", "site": "block.1"}
    assert float(result.class_cka.sel(at)) == pytest.approx(sums[0] / np.sqrt(sums[1] * sums[2]), abs=1e-6)
    assert result.attrs["labelled_images"] == labelled
    assert (labelled < 60) == bool(unlabelled)
    assert str(result.class_reason.sel(at).values) == ""
    low, value, high = (result[f"class_cka{end}"].sel(at).item() for end in ("_low", "", "_high"))
    assert low <= value <= high
    assert abs(float(result.class_cka_null.sel(at))) < 0.3


def test_features_that_are_the_classes_have_class_cka_one() -> None:
    labels = np.random.default_rng(0).integers(0, 6, 96)
    assert cka(np.eye(6)[labels], 7 * np.eye(9)[labels + 2] + 1) == pytest.approx(1, abs=1e-12)
    assert cka(np.eye(6)[labels], random((96, 6), 1)) == pytest.approx(0, abs=0.1)


def in_order(labels):
    """Images that have these labels in the order of the pass."""
    images = load_images("shapes?size=32", limit=32)
    images = relabelled(images, np.zeros(len(images.ids)))
    images.labels[images.order("test", 0)] = labels
    return images


TOLD_APART = (
    "the images of each batch are of one class, or all but one of them are, or each is of a class of its own; "
    "give several images of each of several classes, or a larger batch (--batch)"
)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (-1, "no batch had 4 images with a label"),
        (3, TOLD_APART),
        (np.arange(32), TOLD_APART),
        (np.arange(32) == 7, TOLD_APART),
    ],
    ids=["no label", "one class", "each its own", "all but one the same"],
)
def test_classes_that_tell_nothing_apart_have_a_reason(labels, reason: str) -> None:
    result = class_cka(load_encoder(SMALL), in_order(labels))
    assert result.class_cka.isnull().all()
    assert set(result.class_reason.values.flat) == {reason}
    assert float(result.cka.isel(tokens=0).values.item()) == pytest.approx(1)  # the rest is not touched by it
    assert "classes" not in [figure.name for figure in plugin.figures(result)]


def test_a_larger_batch_has_several_images_of_a_class() -> None:
    """Two of each class, in different batches, and then in one."""
    images = in_order(np.arange(32) % 16)
    small, large = (class_cka(load_encoder(SMALL), images, batch=batch) for batch in (16, 32))
    assert small.class_cka.isnull().all()
    assert large.class_cka.notnull().all()
    assert (large.class_reason == "").all()


def test_intervals_of_few_batches_stay_within_bounds() -> None:
    """Of 64 images in two batches, Student's interval is wider than CKA can be."""
    images = load_images("shapes?size=32", limit=64)
    encoders = {"a": load_encoder(SMALL), "b": load_encoder(SMALL + "&seed=1")}
    result = measured("cka", encoders, images, CkaConfig(bootstrap=50), batch=32)
    for name in ("cka", "class_cka"):
        low, value, high = (result[f"{name}{end}"].values for end in ("_low", "", "_high"))
        known = np.isfinite(value)
        assert np.isfinite(low[known]).all()
        assert low[known].min() >= -1
        assert high[known].max() <= max(1, value[known].max())
        assert (low[known] <= value[known]).all()
        assert (value[known] <= high[known]).all()
    assert (result.cka_high == 1).any()
