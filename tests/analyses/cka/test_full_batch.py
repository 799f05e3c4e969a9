"""CKA of all images at once as a part of the pass: what it equals, what it leaves out, and what it refuses."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from support.plans import TEST, TRAIN, activations, computed, feed, make_plan

from sightline.analyses.cka import CkaAnalysis, CkaConfig, cost
from sightline.core.errors import InputError
from sightline.core.groups import split
from sightline.measure import gram_sums
from sightline.measure.contract import result_of
from sightline.measure.estimators.cka import bootstrap, cka
from sightline.measure.plan import Key, Plan

ONLY = {"test": ("plain",)}
POOLS = {
    "vit": {"all": lambda x: x, "cls": lambda x: x[:, 0], "mean": lambda x: x[:, 2:].mean(1)},
    "cnn": {"all": lambda x: x, "mean": lambda x: x.mean((2, 3))},
}


def measure(plan: Plan, data: dict[Key, torch.Tensor], **settings: Any) -> xr.Dataset:
    return split(computed(CkaAnalysis(CkaConfig(bootstrap=20, **settings), plan), plan, data))[0]


@pytest.mark.parametrize("unbiased", [True, False])
def test_it_is_cka_of_the_whole_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbiased: bool) -> None:
    plan = make_plan(tmp_path, views=ONLY)
    data = activations(plan)
    result = measure(plan, data, full_batch=True, unbiased=unbiased)
    monkeypatch.setattr(gram_sums, "bootstrap", lambda *given, bounds: bootstrap(*given, bounds=False))
    batched = measure(plan, data)
    assert result.attrs["estimator"] == f"{'un' * unbiased}biased full batch"
    labels = np.eye(3)[plan.images.labels]
    for a, b, tokens in (("vit", "vit", "cls"), ("vit", "cnn", "mean"), ("cnn", "vit", "all")):
        for site_a in plan.sites[a]:
            x = POOLS[a][tokens](data[Key(a, site_a, "plain")])
            for site_b in plan.sites[b]:
                y = POOLS[b][tokens](data[Key(b, site_b, "plain")])
                at = {"tokens": tokens, "encoder_a": a, "encoder_b": b, "site_a": site_a, "site_b": site_b}
                assert float(result.cka.sel(at)) == pytest.approx(cka(x, y, None, unbiased=unbiased), abs=1e-10)
            at = {"tokens": tokens, "encoder": a, "site": site_a}
            expected = cka(x, labels, None, unbiased=unbiased)
            assert float(result.class_cka.sel(at)) == pytest.approx(expected, abs=1e-10)
    result, batched = (found.sel(tokens="mean") for found in (result, batched))
    np.testing.assert_array_equal(result.reason, batched.reason)
    np.testing.assert_array_equal(np.isnan(result.cka), np.isnan(batched.cka))
    for name in ("cka", "class_cka"):  # the interval is that of the unbiased minibatches, moved, and then bounded
        low, high = (result[name] + batched[f"{name}{end}"] - batched[name] for end in ("_low", "_high"))
        assert high.max() > 1.05
        np.testing.assert_allclose(result[f"{name}_low"], low.clip(-1, 1), rtol=0, atol=1e-12)
        np.testing.assert_allclose(result[f"{name}_high"], high.clip(-1, 1), rtol=0, atol=1e-12)
    assert (np.nan_to_num(result.cka_null) == 0).all() == unbiased


def test_batches_do_not_matter_and_processes_add_up(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, views=ONLY)
    data = activations(plan)
    config = CkaConfig(full_batch=True, bootstrap=20)
    whole, _ = split(computed(CkaAnalysis(config, plan), plan, data))
    other = computed(CkaAnalysis(config, plan), plan, data, size=5)
    np.testing.assert_allclose(other.cka, whole.cka, rtol=0, atol=1e-12)
    one, two = (CkaAnalysis(config, plan) for _ in range(2))
    for metric, part in ((one, slice(0, None, 2)), (two, slice(1, None, 2))):
        torch.manual_seed(0)
        feed(metric, plan, data, part=part)
    one.merge_state(two)
    xr.testing.assert_allclose(result_of(one), whole, rtol=1e-12, atol=1e-12)


def test_layers_that_are_too_wide_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token view that suits no layer is left out; the one that suits most layers comes first."""
    plan = make_plan(tmp_path, views=ONLY)
    monkeypatch.setattr(gram_sums, "WIDEST", 6 * 6)  # tokens of the ViT, but not the map of the CNN
    result = measure(plan, activations(plan), full_batch=True)
    assert result.tokens.values.tolist() == ["mean", "all", "cls", "patches"]
    why = str(result.reason.sel(tokens="all", encoder="cnn", site="block.0").values)
    assert why.startswith("its 54 features are more than the 36 that a full batch can take")
    assert result.cka.sel(tokens="all", encoder_a="cnn").isnull().all()
    assert result.cka.sel(tokens="all", encoder_a="vit", encoder_b="vit").notnull().all()
    monkeypatch.setattr(gram_sums, "WIDEST", 6)
    assert measure(plan, activations(plan), full_batch=True).tokens.values.tolist() == ["mean", "cls"]
    with pytest.raises(InputError, match="at most 6 features, but these have 54 in the token views all, patches"):
        measure(plan, {}, full_batch=True, tokens=("all", "patches"))


def test_images_without_a_label_leave_no_class_cka(tmp_path: Path) -> None:
    labels = np.arange(TRAIN + TEST) % 3
    labels[::5] = -1
    plan = make_plan(tmp_path, labels[:TEST], views=ONLY)
    result = measure(plan, activations(plan), full_batch=True)
    assert result.class_cka.isnull().all()
    assert "a full batch needs the labels of all images, and 5 of them have none" in result.class_reason.values
    assert result.cka.sel(tokens="mean").notnull().any()


def test_what_the_machine_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path, views=ONLY)
    needed = cost(CkaConfig(full_batch=True), plan).memory - cost(CkaConfig(), plan).memory
    assert needed > 2 * 8 * (3 * 6 + 2 * 6 + 3) ** 2 / 2
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1}.get(name, needed - 1))
    with pytest.raises(InputError, match=r"choose fewer --sites, such as 'block\.\*'"):
        CkaAnalysis(CkaConfig(full_batch=True), plan)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1}.get(name, needed))
    CkaAnalysis(CkaConfig(full_batch=True), plan)
