"""Augmentation invariance against CKA of whole arrays of captured activations, and cases whose answer is known."""

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from support.passes import CNN, measured
from support.references import SMALL
from torch import Tensor, nn

from sightline import capture, load_encoder, load_images
from sightline.analyses.invariance import InvarianceConfig, figures, headlines
from sightline.core.errors import InputError
from sightline.images.views import make_view
from sightline.measure.estimators.cka import cka

STILL = "supervised?crop=[1, 1]&ratio=[1, 1]"  # the whole image; half of the time mirrored


def invariance(encoders: Any, config: InvarianceConfig, count: int = 40, **options: Any) -> xr.Dataset:
    return measured("invariance", encoders, load_images("shapes?size=32", limit=count), config, **options)


def test_the_pass_equals_cka_of_two_copies() -> None:
    encoders = {"vit": load_encoder(SMALL), "cnn": load_encoder(CNN)}
    result = invariance(encoders, InvarianceConfig(policies=("moco_v3", "supervised"), bootstrap=50), seed=3)
    assert result.invariance.dims == ("policy", "tokens", "encoder", "site")
    for name, encoder in encoders.items():
        for policy in ("moco_v3", "supervised"):
            x, y = (copy["block.1"] for copy in copies(encoder, policy, ["block.1"], 40, 3))
            views = (
                {"all": (x, y), "mean": (x.mean((2, 3)), y.mean((2, 3)))}
                if name == "cnn"
                else {"all": (x, y), "cls": (x[:, 0], y[:, 0]), "patches": (x[:, 1:], y[:, 1:])}
            )
            for tokens, pair in views.items():
                value = result.invariance.sel(policy=policy, tokens=tokens, encoder=name, site="block.1")
                assert float(value) == pytest.approx(cka(*pair, batch=8), abs=1e-5)
    low, value, high = (result[f"invariance{end}"].values for end in ("_low", "", "_high"))
    known = np.isfinite(value)
    assert ((low <= value + 1e-9) & (value <= high + 1e-9))[known].mean() > 0.9
    assert abs(np.nanmean(result.invariance_null)) < 0.15
    reason = result.reason.sel(tokens="cls", encoder="cnn", site="block.1")
    assert set(reason.values) == {"this site has no such token view"}
    np.testing.assert_array_equal(known, result.reason.values == "")


def test_copies_that_do_not_differ_are_seen_alike() -> None:
    result = invariance(load_encoder(SMALL), InvarianceConfig(policies=(STILL + "&flip=0", "simclr")))
    same, other = (result.invariance.isel(policy=number) for number in (0, 1))
    np.testing.assert_allclose(same, 1, atol=1e-6)
    assert (other < 0.9).all()


def copies(encoder: Any, policy: str, sites: list[str], count: int, seed: int) -> list[dict[str, Tensor]]:
    """Activations of both copies of all images in the order of the pass."""
    images = load_images("shapes?size=32", limit=count)
    order = images.order("test", seed)
    arrays = [item.image for item in images.source.read(order.tolist())]
    pixels = torch.from_numpy(np.stack([encoder.preprocess.crop(array) for array in arrays]))
    found = []
    for copy in range(2):
        view = make_view(f"augment:{policy}:{copy}", pixels, images.ids[order].tolist(), seed=seed)
        with torch.inference_mode(), capture(encoder, sites) as activations:
            encoder(encoder.preprocess.normalize(view))
        found.append(dict(activations))
    return found


@pytest.mark.parametrize("unbiased", [True, False])
def test_all_layers_against_all_layers(unbiased: bool) -> None:
    """Of each encoder alone, the first copy in rows; minibatches and all images at once."""
    encoders = {"a": load_encoder(SMALL), "b": load_encoder(SMALL + "&depth=3")}
    config = {"policies": ("moco_v3", "supervised"), "tokens": ("mean", "cls"), "bootstrap": 20, "unbiased": unbiased}
    batched = invariance(encoders, InvarianceConfig(**config), seed=3)
    whole = invariance(encoders, InvarianceConfig(**config, full_batch=True), seed=3)
    assert batched.cka.dims == ("policy", "tokens", "encoder", "site_a", "site_b")
    assert batched.attrs["estimator"] == f"{'un' * unbiased}biased minibatch"
    assert whole.attrs["estimator"] == f"{'un' * unbiased}biased full batch"
    for name, policy in (("a", "moco_v3"), ("b", "supervised")):
        sites = [f"block.{i}" for i in range(encoders[name].depth)]
        first, second = copies(encoders[name], policy, sites, 40, 3)
        for row in sites:
            for column in sites:
                x, y = first[row][:, 0], second[column][:, 0]
                where = {"policy": policy, "tokens": "cls", "encoder": name, "site_a": row, "site_b": column}
                full = cka(x, y, batch=None, unbiased=unbiased)
                assert float(whole.cka.sel(where)) == pytest.approx(full, abs=1e-5)
                if unbiased:
                    assert float(batched.cka.sel(where)) == pytest.approx(cka(x, y, batch=8), abs=1e-5)
    for result in (batched, whole):
        for end in ("", "_low", "_high", "_null"):
            diagonal = np.diagonal(result[f"cka{end}"], axis1=3, axis2=4)
            np.testing.assert_array_equal(diagonal, result[f"invariance{end}"])
        assert (np.isnan(result.cka.sel(encoder="a")) == [[False, False, True]] * 2 + [[True] * 3]).all()
        own = result.cka.sel(policy="moco_v3").values
        assert not np.allclose(own, own.swapaxes(-1, -2))
    if unbiased:  # the interval is that of the minibatch estimate, moved
        moved = whole.cka - (batched.cka - batched.cka_low)
        np.testing.assert_allclose(whole.cka_low, moved, rtol=0, atol=1e-12)
        assert (whole.cka_null.sel(encoder="b") == 0).all()


class Patches(nn.Module):
    """A map whose mean over positions is the same for an image and its mirror image."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(3, 8, 1)
        self.broken, self.constant = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.map(x).square()
        self.constant(torch.ones_like(x))
        self.broken(x / 0)
        return x.mean((2, 3))


def patches() -> Any:
    torch.manual_seed(0)
    return load_encoder(Patches(), name="patches", preprocess=load_encoder(SMALL).preprocess)


def test_a_layer_can_be_invariant_in_one_token_view_and_not_in_another() -> None:
    result = invariance(patches(), InvarianceConfig(policies=(STILL,)), sites="map").squeeze()
    assert float(result.invariance.sel(tokens="mean")) == pytest.approx(1, abs=1e-5)
    assert float(result.invariance.sel(tokens="all")) < 0.999


def test_layers_without_a_value_say_why() -> None:
    result = invariance(
        patches(), InvarianceConfig(policies=("simclr",), tokens=("mean",)), sites=["constant", "broken"]
    )
    reason = result.reason.squeeze()
    assert str(reason.sel(site="constant").values) == "the activations are the same for all images"
    assert "not finite" in str(reason.sel(site="broken").values)
    assert result.invariance.isnull().all()
    assert figures(result) == []
    assert headlines(result) == []


@pytest.mark.bf16
def test_one_batch_has_no_interval_and_bf16_is_close() -> None:
    config = InvarianceConfig(policies=("simclr?crop=[0.5, 1]",), tokens=("mean",))
    result = invariance(load_encoder(SMALL), config, count=16, batch=16)
    assert result.invariance_low.isnull().all()
    ((label, number, detail),) = headlines(result)
    assert (label, number) == ("vit_tiny_patch16_224", f"{float(result.invariance[0, 0, 0, -1]):.2f}")
    assert detail == "simclr?crop=[0.5, 1] copies at block.1"
    rounded = invariance(load_encoder(SMALL), config, count=16, batch=16, precision="bf16")
    np.testing.assert_allclose(rounded.invariance, result.invariance, atol=0.02)


def test_the_figure_has_a_panel_for_each_policy() -> None:
    result = invariance(
        {"a": load_encoder(SMALL), "b": load_encoder(SMALL + "&depth=3")}, InvarianceConfig(bootstrap=20)
    )
    figure, layers = figures(result)
    assert len(layers.table) == 4 * (2 * 2 + 3 * 3)
    assert layers.table.pair.unique()[:2].tolist() == ["a, simclr", "a, moco_v3"]
    cell = layers.table.query("pair == 'b, dino' and row == 0 and column == 2").iloc[0]
    where = {"policy": "dino", "tokens": "all", "encoder": "b", "site_a": "block.0", "site_b": "block.2"}
    assert cell.value == float(result.cka.sel(where))
    assert figure.table.policy.unique().tolist() == ["simclr", "moco_v3", "dino", "supervised"]
    assert len(figure.table) == 4 * (2 + 3)
    row = figure.table.query("policy == 'dino' and series == 'b' and site == 'block.1'").iloc[0]
    assert row.depth == 0.5
    assert row.value == float(result.invariance.sel(policy="dino", tokens="all", encoder="b", site="block.1"))


def test_too_few_images() -> None:
    images = load_images("shapes?size=32&train=8&val=4&test=3")
    with pytest.raises(InputError, match="leave invariance out"):
        measured("invariance", load_encoder(SMALL), images)
