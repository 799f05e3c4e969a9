"""The pass: resumed, shared out, interrupted and mistreated, it gives the same numbers or one clear sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import sightline as sl
from sightline import analyze as pass_module  # noqa: F401  (the function; its module is imported below)
from sightline.errors import InputError
from sightline.plan import probe

module = sys.modules["sightline.analyze"]


@pytest.fixture
def encoders(small: str) -> dict[str, sl.Encoder]:
    return {"a": sl.load_encoder(small), "b": sl.load_encoder(small + "&seed=1")}


@pytest.fixture
def images() -> sl.Images:
    return sl.load_images("shapes?size=32", limit=40)


def measure(encoders: object, images: object, names: list[str], **options: object) -> sl.Run:
    return sl.analyze(encoders, images, names, batch=8, workers=0, show_progress=False, **options)  # type: ignore[arg-type]


def test_the_readme_example(encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path) -> None:
    run = measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    pair = run["cka"].cka.sel(encoder_a="a", encoder_b="b")
    assert set(pair.dims) == {"tokens", "site_a", "site_b"}
    assert list(run) == ["cka", "knn"]
    assert 0 <= float(run["knn"].accuracy.sel(encoder="a", site="block.1", feature="cls")) <= 1
    again = sl.open_run(tmp_path / "x")
    xr.testing.assert_identical(again["cka"], run["cka"])
    about = json.loads(again["cka"].attrs["provenance"])
    assert about["encoders"][0]["weights"] == encoders["a"].weights
    assert about["settings"] == {"batch": 8, "seed": 0, "precision": "float32"}


def test_hooks_and_modes_are_restored(encoders: dict[str, sl.Encoder], images: sl.Images) -> None:
    encoders["a"].module.train()
    encoders["a"].module.blocks[0].eval()
    measure(encoders, images, ["cka"])
    assert encoders["a"].module.training
    assert not encoders["a"].module.blocks[0].training
    assert encoders["a"].module.blocks[1].training
    for encoder in encoders.values():
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.module.modules())


def test_activations_do_not_outlive_their_layer(small: str, images: sl.Images) -> None:
    """When the last block starts, what the earlier fully connected layers gave is gone."""
    encoder = sl.load_encoder(small.replace("depth=2", "depth=6"))
    given: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    blocks = encoder.module.blocks
    handles = [
        block.mlp.fc1.register_forward_hook(lambda _, __, output: given.append(weakref.ref(output))) for block in blocks
    ]
    count = lambda *_: alive.append(sum(reference() is not None for reference in given))  # noqa: E731
    handles.append(blocks[5].norm1.register_forward_hook(count))
    measure({"a": encoder}, images, ["cka"])
    for handle in handles:
        handle.remove()
    assert len(given) > 5 * 6
    assert max(alive) == 0


class InterruptedByTestError(Exception):
    pass


def test_an_interrupted_pass_goes_on(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = measure(encoders, images, ["cka", "knn"])
    monkeypatch.setattr(module, "SAVE_EVERY", 0.0)
    step, steps = module._step, []

    def failing(*arguments: object) -> None:
        if len(steps) == 4:
            raise InterruptedByTestError
        steps.append(1)
        step(*arguments)

    monkeypatch.setattr(module, "_step", failing)
    with pytest.raises(InterruptedByTestError):
        measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    assert sl.open_run(tmp_path / "x").names() == []

    counted = []
    monkeypatch.setattr(module, "_step", lambda *a: (counted.append(1), step(*a)))
    run = measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    assert len(counted) == 10 - 4  # 5 batches of 8 in each of two splits, 4 of them done before
    for name in ("cka", "knn"):
        xr.testing.assert_equal(run[name], expected[name])  # to the last bit
    assert not list((tmp_path / "x" / "cache").glob("pass-*"))


def test_finished_analyses_are_not_computed_again(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(encoders, images, ["cka"], out=tmp_path / "x")
    seen: list[list[str]] = []
    step = module._step
    monkeypatch.setattr(module, "_step", lambda b, m, *rest: (seen.append(list(m)), step(b, m, *rest)))
    run = measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    assert {name for names in seen for name in names} == {"knn"}
    assert list(run) == ["cka", "knn"]
    seen.clear()
    measure(encoders, images, ["cka", "knn"], out=tmp_path / "x")
    assert seen == []


def test_a_partial_result_file_is_not_read(encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path) -> None:
    measure(encoders, images, ["cka"], out=tmp_path / "x")
    results = tmp_path / "x" / "results"
    (results / ".knn.nc.123.tmp").write_bytes((results / "cka.nc").read_bytes()[:100])
    assert sl.open_run(tmp_path / "x").names() == ["cka"]
    (results / "cka.nc").write_bytes(b"torn")
    with pytest.raises(InputError, match="delete the file to compute it again"):
        sl.open_run(tmp_path / "x")["cka"]


def test_another_run_is_not_overwritten(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, small: str
) -> None:
    measure(encoders, images, ["cka"], out=tmp_path / "x")
    before = (tmp_path / "x" / "results" / "cka.nc").read_bytes()
    other = {"a": encoders["a"], "b": sl.load_encoder(small + "&seed=2")}
    with pytest.raises(InputError, match=r"other encoders.*--overwrite"):
        measure(other, images, ["cka"], out=tmp_path / "x")
    assert (tmp_path / "x" / "results" / "cka.nc").read_bytes() == before
    measure(other, images, ["cka"], out=tmp_path / "x", overwrite=True)
    assert (tmp_path / "x" / "results" / "cka.nc").read_bytes() != before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not a run folder"):
        measure(encoders, images, ["cka"], out=tmp_path / "mine", overwrite=True)


def test_a_changed_module_is_not_taken_for_the_old_one(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path
) -> None:
    measure(encoders, images, ["knn"], out=tmp_path / "x")
    with torch.no_grad():
        encoders["a"].module.pos_embed.add_(1)
    with pytest.raises(InputError, match="other encoders"):
        measure(encoders, images, ["knn"], out=tmp_path / "x")


def test_the_same_weights_twice_are_alike(encoders: dict[str, sl.Encoder], images: sl.Images) -> None:
    same = measure({"one": encoders["a"], "two": encoders["a"]}, images, ["cka"])["cka"].cka
    pair = same.sel(encoder_a="one", encoder_b="two", tokens="all", site_a="block.1", site_b="block.1")
    assert float(pair) == pytest.approx(1, abs=1e-12)


def test_bf16_is_close_to_float32(encoders: dict[str, sl.Encoder], images: sl.Images) -> None:
    exact, fast = (measure(encoders, images, ["cka"], precision=p)["cka"].cka for p in ("float32", "bf16"))
    assert float(abs(exact - fast).max()) < 0.05
    assert float(abs(exact - fast).max()) > 0


WORKER = """
import sys, torch, sightline as sl
torch.set_num_threads(1)
small, out = sys.argv[1:]
encoders = {"a": sl.load_encoder(small), "b": sl.load_encoder(small + "&seed=1")}
sl.analyze(encoders, sl.load_images("shapes?size=32", limit=40), batch=8, workers=0, out=out, show_progress=False)
torch.distributed.destroy_process_group()
"""


def test_two_processes_give_the_result_of_one(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, small: str
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "worker.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *arguments, small, str(tmp_path / "x")], check=True, env=environment, timeout=300)
    shared, alone = sl.open_run(tmp_path / "x"), measure(encoders, images, ["cka", "knn"])
    assert shared.request["timing"]["processes"] == 2
    for name in alone:
        xr.testing.assert_allclose(shared[name], alone[name], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch": 3}, "The batch size is 3"),
        ({"precision": "float16"}, "choose float32 or bf16"),
        ({"device": "cuda:99"}, "Device 'cuda:99' cannot be used"),
        ({"sites": ["blok.*"]}, "No site matches 'blok"),
        ({"analyses": ["ckaa"]}, "did you mean 'cka'"),
        ({"analyses": []}, "No analysis is chosen"),
        ({"encoders": {}}, "nothing to compare"),
        ({"encoders": {"x": "tim:vit"}}, "did you mean 'timm'"),
        ({"encoders": {"x": "vit"}}, "is not an encoder reference"),
        ({"images": "folder:nowhere"}, "nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    options: dict[str, object], sentence: str, encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path
) -> None:
    arguments = {"encoders": encoders, "images": images, "analyses": ["cka"], "workers": 0, "out": tmp_path / "x"}
    with pytest.raises(InputError, match=sentence) as caught:
        sl.analyze(**{**arguments, **options, "show_progress": False})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()  # nothing half-written


def test_a_site_must_match_somewhere_but_not_everywhere(encoders: dict[str, sl.Encoder], images: sl.Images) -> None:
    cnn = sl.load_encoder("timm:resnet18@random?size=32&zero_init_last=False")
    result = measure({**encoders, "r": cnn}, images, ["cka"], sites=["block.1", "block.1.qkv"])["cka"]
    assert list(result.site.values) == ["block.1.qkv", "block.1"]
    with pytest.raises(InputError, match="'r' has none of the sites"):
        measure({**encoders, "r": cnn}, images, ["cka"], sites=["block.1.qkv"])


def test_a_model_that_cannot_run_is_named(images: sl.Images) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(7, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with pytest.raises(InputError, match="Encoder 'picky' fails on an image of 224 × 224"):
        measure({"picky": Picky()}, images, ["cka"])


def test_nan_weights_are_refused(small: str, images: sl.Images) -> None:
    encoder = sl.load_encoder(small)
    with torch.no_grad():
        encoder.module.blocks[1].mlp.fc1.weight[3, 3] = float("nan")
    with pytest.raises(InputError, match=r"NaN or infinite weights \(first in blocks.1.mlp.fc1.weight\)"):
        measure({"a": encoder}, images, ["cka"])


def test_no_room_on_disk_is_said_before_the_pass(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(InputError, match=r"on disk, but .* has 10 B"):
        measure(encoders, images, ["knn"], out=tmp_path / "x")


def test_probe_gives_shapes(small: str) -> None:
    encoder = sl.load_encoder(small)
    shapes = probe(encoder, ["block.0.attn_map", "block.1"])
    assert shapes == {"block.0.attn_map": (3, 17, 17), "block.1": (17, 48)}
    assert np.prod(shapes["block.1"]) == 17 * 48
