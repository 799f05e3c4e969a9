"""The pass over images that measures CKA: equal to whole arrays, intervals, reasons, classes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats
from support.cka import random, textbook_cka, textbook_hsic
from support.references import SMALL
from torch import nn

from sightline import analyze, capture, load_encoder, load_images
from sightline.analyses import cka as plugin
from sightline.analyses.cka import CkaConfig
from sightline.core.errors import InputError
from sightline.measure.estimators.cka import centre, cka, gram, products


def activations(encoder, images, sites, order):
    """All activations of a site in the order of the pass: what the stream never holds."""
    arrays = [item.image for item in images.source.read([int(i) for i in order])]
    with torch.inference_mode(), capture(encoder, sites) as acts:
        encoder(encoder.preprocess(arrays))
    return {site: value.float().numpy() for site, value in acts.items()}


def view(x: np.ndarray, tokens: str) -> np.ndarray:
    if x.ndim == 4:
        return {"all": x, "patches": x, "mean": x.mean((2, 3))}[tokens]
    return {"all": x, "cls": x[:, 0], "patches": x[:, 1:], "mean": x[:, 1:].mean(1)}[tokens]


@pytest.fixture(scope="module")
def compared():
    encoders = {
        "a": load_encoder(SMALL),
        "b": load_encoder(SMALL + "&seed=1"),
        "r": load_encoder("timm:resnet18@random?size=32&zero_init_last=False"),
    }
    images = load_images("shapes?size=32", limit=72)
    return encoders, images, analyze(encoders, images, ["cka"], batch=32, workers=0, show_progress=False)["cka"]


def test_the_pass_equals_the_whole_array(compared) -> None:
    encoders, images, result = compared
    order = images.order("test", 0)
    sites = {"a": ["block.1", "block.1.qkv"], "b": ["block.0", "block.1.fc1"], "r": ["block.3", "block.3.residual"]}
    acts = {name: activations(encoders[name], images, sites[name], order) for name in encoders}
    checked = 0
    for one in encoders:
        for other in encoders:
            for tokens in ("all", "cls", "mean", "patches"):
                if tokens == "cls" and "r" in (one, other):
                    continue
                for site_a in sites[one]:
                    for site_b in sites[other]:
                        x, y = view(acts[one][site_a], tokens), view(acts[other][site_b], tokens)
                        at = {
                            "encoder_a": one,
                            "encoder_b": other,
                            "site_a": site_a,
                            "site_b": site_b,
                            "tokens": tokens,
                        }
                        assert float(result.cka.sel(at)) == pytest.approx(textbook_cka(x, y, 32), abs=1e-5)
                        checked += 1
    assert checked > 100


def test_symmetry_ones_and_reasons(compared) -> None:
    _, _, result = compared
    swapped = result.cka.transpose("tokens", "encoder_b", "encoder_a", "site_b", "site_a").values
    np.testing.assert_allclose(result.cka.values, swapped, atol=1e-12, equal_nan=True)
    own = result.cka.sel(encoder_a="a", encoder_b="a", tokens="all", site_a="block.1", site_b="block.1")
    assert float(own) == pytest.approx(1, abs=1e-12)
    assert (
        str(result.reason.sel(encoder="r", tokens="cls", site="block.0").values) == "this site has no such token view"
    )
    assert (
        str(result.reason.sel(encoder="r", tokens="all", site="block.0.qkv").values) == "this encoder has no such site"
    )
    unknown = result.reason.values == ""
    diagonal = np.array(
        [
            [
                [result.cka.sel(tokens=t, encoder_a=e, encoder_b=e, site_a=s, site_b=s) for s in result.site.values]
                for e in result.encoder.values
            ]
            for t in result.tokens.values
        ]
    )
    np.testing.assert_array_equal(np.isfinite(diagonal), unknown)  # NaN exactly where there is a reason


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
    result = analyze(encoders, images, {"cka": config}, batch=8, sites=["block.1"], workers=0, show_progress=False)[
        "cka"
    ]
    order = images.order("test", 0)
    x, y = (activations(e, images, ["block.1"], order)["block.1"].reshape(64, -1) for e in encoders.values())
    grams = [torch.stack([gram(torch.from_numpy(v[rows])) for v in (x, y)]) for rows in np.arange(64).reshape(8, 8)]
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
    options = {"batch": 32, "workers": 0, "sites": ["block.1.fc1"], "show_progress": False}
    result = analyze(encoders, images, ["cka"], precision="bf16", **options)["cka"]
    with torch.autocast("cpu", torch.bfloat16):
        order = images.order("test", 0)
        x, y = (activations(e, images, ["block.1.fc1"], order)["block.1.fc1"] for e in encoders.values())
    at = {"encoder_a": "a", "encoder_b": "b", "tokens": "all", "site_a": "block.1.fc1", "site_b": "block.1.fc1"}
    assert float(result.cka.sel(at)) == pytest.approx(textbook_cka(x, y, 32), abs=1e-7)


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
    images = load_images("shapes?size=32", limit=16)
    result = analyze({"odd": encoder}, images, ["cka"], batch=8, workers=0, show_progress=False)["cka"]
    reason = result.reason.sel(encoder="odd", tokens="all")
    assert str(reason.sel(site="constant").values) == "the activations are the same for all images"
    assert "not finite" in str(reason.sel(site="broken").values)
    assert str(reason.sel(site="first").values) == ""
    values = result.cka.sel(encoder_a="odd", encoder_b="odd", tokens="all")
    assert np.isnan(values.sel(site_a="constant")).all()
    assert np.isnan(values.sel(site_b="broken")).all()
    # What ReLU writes in place afterwards is not what `first` gave.
    assert float(values.sel(site_a="first", site_b="relu")) < 0.999
    whole = activations(encoder, images, ["first", "relu"], images.order("test", 0))
    expected = textbook_cka(whole["first"], whole["relu"], 8)
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
    result = analyze({"s": encoder}, images, ["cka"], batch=8, workers=0, show_progress=False)["cka"]
    at = result.sel(encoder_a="s", encoder_b="s", tokens="all", site_a="one")
    for scaled in ("small", "large"):
        assert float(at.cka.sel(site_b=scaled)) == pytest.approx(1, abs=1e-6)
        assert str(result.reason.sel(encoder="s", tokens="all", site=scaled).values) == ""
    assert np.isnan(at.cka.sel(site_b="absurd"))
    why = "the activations are so large that their products are not finite"
    assert str(result.reason.sel(encoder="s", tokens="all", site="absurd").values) == why


class OneResponds(torch.nn.Module):
    """A layer that says something about one image of the batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(len(x), 1, 1, 1)
        mask[0] = 1
        return self.layer(x * mask)


def test_every_nan_has_a_reason() -> None:
    encoder = load_encoder(OneResponds(), name="one", preprocess=load_encoder(SMALL).preprocess)
    images = load_images("shapes?size=32", limit=16)
    result = analyze({"one": encoder}, images, ["cka"], batch=8, workers=0, show_progress=False)["cka"]
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


def test_unknown_token_view() -> None:
    with pytest.raises(InputError, match="did you mean 'patches'"):
        plugin.CkaConfig(tokens=("patch",))
    for nothing in ({"tokens": ()}, {"bootstrap": 0}):
        with pytest.raises(InputError, match="at least"):
            plugin.CkaConfig(**nothing)


# ---------------------------------------------------------------------------------------------------------------
# Class CKA


def relabelled(images, labels):
    return dataclasses.replace(images, labels=np.asarray(labels, np.int64))


def class_cka(encoder, images, **options):
    settings = {"batch": 16, "workers": 0, "sites": ["block.1"], "show_progress": False, **options}
    return analyze({"a": encoder}, images, {"cka": CkaConfig(bootstrap=50)}, **settings)["cka"]


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
            a = x[rows, 1:].mean(1, dtype=np.float64)
            a, y = a - a.mean(0), np.eye(5)[labels[rows]]
            k, l = a @ a.T, y @ y.T  # noqa: E741
            sums += len(rows) * np.array([textbook_hsic(k, l), textbook_hsic(k, k), textbook_hsic(l, l)])
            labelled += len(rows)
    at = {"tokens": "mean", "encoder": "a", "site": "block.1"}
    assert float(result.class_cka.sel(at)) == pytest.approx(sums[0] / np.sqrt(sums[1] * sums[2]), abs=1e-6)
    assert result.attrs["labelled_images"] == labelled
    assert (labelled < 60) == bool(unlabelled)
    assert str(result.class_reason.sel(at).values) == ""
    assert (
        float(result.class_cka_low.sel(at)) <= float(result.class_cka.sel(at)) <= float(result.class_cka_high.sel(at))
    )
    assert abs(float(result.class_cka_null.sel(at))) < 0.3


def test_features_that_are_the_classes_have_class_cka_one() -> None:
    labels = np.random.default_rng(0).integers(0, 6, 96)
    assert cka(np.eye(6)[labels], 7 * np.eye(9)[labels + 2] + 1) == pytest.approx(1, abs=1e-12)
    assert cka(np.eye(6)[labels], random((96, 6), 1)) == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (-1, "no batch had 4 images with a label"),
        (
            3,
            "the images of each batch are of one class, or all but one of them are, or each is of a class of its own; ",
        ),
    ],
)
def test_without_two_classes_there_is_no_class_cka_but_a_reason(label: int, reason: str) -> None:
    images = load_images("shapes?size=32", limit=32)
    images = relabelled(images, np.full(len(images.labels), label))
    result = class_cka(load_encoder(SMALL), images)
    assert result.class_cka.isnull().all()
    assert all(str(why).startswith(reason) for why in result.class_reason.values.flat)
    assert float(result.cka.isel(tokens=0).values.item()) == pytest.approx(1)  # the rest is not touched by it
    assert "classes" not in [figure.name for figure in plugin.figures(result)]


def in_order(labels):
    """Images that have these labels in the order of the pass."""
    images = load_images("shapes?size=32", limit=32)
    images = relabelled(images, np.zeros(len(images.ids)))
    images.labels[images.order("test", 0)] = labels
    return images


@pytest.mark.parametrize("labels", [np.arange(32), np.arange(32) == 7], ids=["each its own", "all but one the same"])
def test_classes_that_tell_nothing_apart_have_a_reason(labels: np.ndarray) -> None:
    result = class_cka(load_encoder(SMALL), in_order(labels))
    assert result.class_cka.isnull().all()
    for why in map(str, result.class_reason.values.flat):
        assert why == (
            "the images of each batch are of one class, or all but one of them are, or each is of a class of its own; "
            "give several images of each of several classes, or a larger batch (--batch)"
        )


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
    result = analyze(encoders, images, {"cka": CkaConfig(bootstrap=50)}, batch=32, workers=0, show_progress=False)[
        "cka"
    ]
    for name in ("cka", "class_cka"):
        low, value, high = (result[f"{name}{end}"].values for end in ("_low", "", "_high"))
        known = np.isfinite(value)
        assert np.isfinite(low[known]).all()
        assert low[known].min() >= -1
        assert high[known].max() <= max(1, value[known].max())
        assert (low[known] <= value[known]).all()
        assert (value[known] <= high[known]).all()
    assert (result.cka_high == 1).any()


def test_a_layer_without_values_says_so_beside_its_classes() -> None:
    encoder = load_encoder(Odd(), name="odd", preprocess=load_encoder(SMALL).preprocess)
    result = class_cka(encoder, load_images("shapes?size=32", limit=32), sites=None).sel(encoder="a", tokens="all")
    assert str(result.class_reason.sel(site="constant").values) == "the activations are the same for all images"
    assert "not finite" in str(result.class_reason.sel(site="broken").values)
    np.testing.assert_array_equal(result.class_cka.isnull(), result.class_reason != "")
