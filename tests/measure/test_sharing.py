"""Which passes processes share, and that what they measure is what one process measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from support.references import SMALL
from typer.testing import CliRunner

import sightline as sl
from sightline.cli import app
from sightline.core.helpers import Helpers, LostError
from sightline.measure import sharing
from sightline.measure.request import choose_analyses


class Lost(Helpers):
    """Helpers that are lost when the work is half done."""

    @contextlib.contextmanager
    def taking_part(self, work: str, about: Mapping[str, Any]) -> Iterator[None]:
        try:
            yield
        finally:
            raise LostError("signal 9")


@pytest.mark.unit
def test_a_pass_goes_on_alone_where_helpers_are_lost(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[int] = []
    assert sharing.share_pass(Lost(1), "some:work", {}, lambda: done.append(1) or len(done)) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "lost (signal 9); going on together" in said
    assert said.endswith("lost (signal 9); going on alone")
    assert sharing.share_pass(None, "some:work", {}, lambda: "alone") == "alone"


@pytest.mark.unit
def test_helpers_are_for_several_threads_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = sharing.helpers_for("auto")
    assert found is not None
    assert found.count == 2
    assert sharing.helpers_for("cuda:1") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sharing.helpers_for("auto") is None
    assert sharing.helpers_for("cpu") is not None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sharing.helpers_for("cpu") is None
    monkeypatch.delenv("WORLD_SIZE")
    with monkeypatch.context() as joined:
        joined.setattr(torch.distributed, "is_initialized", lambda: True)
        assert sharing.helpers_for("cpu") is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert sharing.helpers_for("cpu") is None


def test_long_passes_through_small_encoders_are_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = sl.load_images("shapes?size=32&train=24&val=8&test=16")
    encoders = [sl.load_encoder(SMALL), sl.load_encoder(SMALL + "&seed=1")]
    knn, _ = choose_analyses(["knn"])  # train and test
    noise, _ = choose_analyses(["knn", "noise"])  # test once more for each of nine bands
    for configs, passes in ((knn, 2 * (24 + 16)), (noise, 2 * (24 + 16 + 9 * 16))):
        monkeypatch.setattr(sharing, "LONG", passes)
        assert sharing.worth_sharing(encoders, images, configs, tmp_path)
        monkeypatch.setattr(sharing, "LONG", passes + 1)
        assert not sharing.worth_sharing(encoders, images, configs, tmp_path)
    weights = sum(one.numel() for encoder in encoders for one in encoder.module.parameters())
    monkeypatch.setattr(sharing, "LONG", 1)
    monkeypatch.setattr(sharing, "FEW_WEIGHTS", weights - 1)
    assert not sharing.worth_sharing(encoders, images, knn, tmp_path)
    monkeypatch.setattr(sharing, "FEW_WEIGHTS", weights)
    assert sharing.worth_sharing(encoders, images, knn, tmp_path)
    begun, over = tmp_path / "begun", tmp_path / "over"
    for file in (begun / "cache" / "pass-0-of-1.safetensors", over / "results" / "knn.nc"):
        file.parent.mkdir(parents=True)
        file.touch()
    assert not sharing.worth_sharing(encoders, images, knn, begun)
    assert not sharing.worth_sharing(encoders, images, knn, over)
    assert sharing.worth_sharing(encoders, images, noise, over)
    assert sharing.worth_sharing(encoders, images, knn, over, anew=True)
    only_val = sl.load_images("shapes?size=32&train=24&val=16&test=0")
    monkeypatch.setattr(sharing, "LONG", 2 * (24 + 16))
    assert sharing.worth_sharing(encoders, only_val, knn, tmp_path)


@pytest.mark.processes
def test_two_processes_measure_what_one_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    words = ["compare", SMALL, f"b={SMALL}&seed=1", "--images", "shapes?size=32&train=40&val=8&test=40"]
    words += ["--only", "cka,knn,tokens,spectra", "--batch", "8", "--workers", "0"]
    runs = []
    for name, helpers in (("two", Helpers(1)), ("one", None)):
        monkeypatch.setattr(sharing, "LONG", 1)
        monkeypatch.setattr(sharing, "helpers_for", lambda device, helpers=helpers: helpers)
        result = CliRunner().invoke(app, [*words, "-o", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        runs.append(sl.open_run(tmp_path / name))
    assert [run.request["timing"]["processes"] for run in runs] == [2, 1]
    for analysis in ("cka", "knn", "tokens", "spectra"):
        xr.testing.assert_allclose(*(run[analysis] for run in runs), rtol=1e-9, atol=1e-9)
