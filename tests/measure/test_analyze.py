"""The pass: shared out or mistreated, it gives the same numbers or one clear sentence."""

import json
import os
import subprocess
import sys
import weakref
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from support.processes import python_in_two
from torch import nn

import sightline as sl
from sightline.core.errors import InputError
from sightline.measure.plan import probe


@pytest.fixture
def encoders(small: str) -> dict[str, sl.Encoder]:
    return {"a": sl.load_encoder(small), "b": sl.load_encoder(small + "&seed=1")}


@pytest.fixture
def images() -> sl.Images:
    return sl.load_images("shapes?size=32", limit=40)


def measure(encoders: object, images: object, names: list[str] | None, **options: object) -> sl.Run:
    return sl.analyze(encoders, images, names, batch=8, workers=0, show_progress=False, **options)


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


def test_knn_needs_a_class_in_both_splits(encoders: dict[str, sl.Encoder]) -> None:
    pixels = np.zeros((8, 32, 32, 3), np.uint8)
    images = sl.load_images(pixels, labels=list(range(8)))
    with pytest.raises(InputError, match="no class of the test split is in the train split"):
        measure(encoders, images, ["knn"])


FULL = """
import resource, signal, sys, numpy as np, xarray as xr
from pathlib import Path
from sightline.core.run_folder import Run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
values = np.random.default_rng(0).normal(size=(500, 500))
try:
    Run(Path(sys.argv[1])).save("cka", xr.Dataset({"cka": (("a", "b"), values)}))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs a limit on the size of files")
def test_a_result_that_finds_no_room_ends_in_a_sentence(tmp_path: Path) -> None:
    """HDF5 on a disk that is really full crashes the process when it closes the file."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path / "x")], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("InputError Cannot write")
    assert not done.stderr
    assert not list((tmp_path / "x" / "results").iterdir())


def test_names_that_are_not_utf_8(encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path) -> None:
    strange = replace(images, classes=("caf\udce9", *images.classes[1:]))
    measure(encoders, strange, ["knn"], out=tmp_path / "x")
    assert sl.open_run(tmp_path / "x").request["images"]["classes"][0] == "caf\udce9"
    measure(encoders, strange, ["knn"], out=tmp_path / "x")  # the same comparison


def test_the_same_weights_twice_are_alike(encoders: dict[str, sl.Encoder], images: sl.Images) -> None:
    same = measure({"one": encoders["a"], "two": encoders["a"]}, images, ["cka"])["cka"].cka
    pair = same.sel(encoder_a="one", encoder_b="two", tokens="all", site_a="block.1", site_b="block.1")
    assert float(pair) == pytest.approx(1, abs=1e-12)


@pytest.mark.bf16
def test_bf16_is_close_to_float32(encoders: dict[str, sl.Encoder], images: sl.Images) -> None:
    exact, fast = (measure(encoders, images, ["cka"], precision=p)["cka"].cka for p in ("float32", "bf16"))
    assert float(abs(exact - fast).max()) < 0.05
    assert float(abs(exact - fast).max()) > 0


def test_the_choice_and_order_of_analyses_change_no_number(encoders: dict[str, sl.Encoder], images: sl.Images) -> None:
    alone, both, turned = (measure(encoders, images, names) for names in (["cka"], ["cka", "knn"], ["knn", "cka"]))
    xr.testing.assert_equal(alone["cka"], both["cka"])
    xr.testing.assert_equal(both["cka"], turned["cka"])
    assert alone.get("knn") is None
    assert alone.get("cka") is alone["cka"]


WORKER = """
import os, sys, torch, sightline as sl
torch.set_num_threads(1)
small, out = sys.argv[1:]
encoders = {"a": sl.load_encoder(small), "b": sl.load_encoder(small + "&seed=1")}
images, how = sl.load_images("shapes?size=32", limit=40), {"batch": 8, "workers": 0, "show_progress": False}
# A folder that is named by the time differs between processes: the first one's counts.
run = sl.analyze(encoders, images, out=out + ("" if os.environ["RANK"] == "0" else "-a-second-later"), **how)
# In memory, features are written to a temporary folder, which has to be the same one.
assert sl.analyze(encoders, images, ["knn"], **how)["knn"].accuracy.equals(run["knn"].accuracy)
torch.distributed.destroy_process_group()
"""


def test_two_processes_give_the_result_of_one(
    encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path, small: str
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    python_in_two(str(tmp_path / "worker.py"), small, str(tmp_path / "x"))
    shared, alone = sl.open_run(tmp_path / "x"), measure(encoders, images, None)
    assert shared.request["timing"]["processes"] == 2
    assert not list(tmp_path.glob("*-later"))
    for name in ("cka", "knn"):
        xr.testing.assert_allclose(shared[name], alone[name], rtol=1e-12, atol=1e-12)


# Bad input


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch": 3}, "The batch size is 3"),
        ({"precision": "float16"}, "choose float32 or bf16"),
        ({"seed": -1}, "The seed is -1"),
        ({"device": "cuda:99"}, "Device 'cuda:99' cannot be used"),
        ({"sites": ["blok.*"]}, "No site matches 'blok"),
        ({"only": ["ckaa"]}, "did you mean 'cka'"),
        ({"only": []}, "No analysis is chosen"),
        ({"only": {"knn": {"neighbours": 5}}}, "There is no setting 'neighbours' of knn"),
        ({"only": {"knn": 5}}, "a dictionary of values, not 5"),
        ({"encoders": {}}, "nothing to compare"),
        ({"encoders": {"x": "tim:vit"}}, "did you mean 'timm'"),
        ({"encoders": {"x": "vit"}}, "is not an encoder reference"),
        ({"images": "folder:nowhere"}, "nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    options: dict[str, object], sentence: str, encoders: dict[str, sl.Encoder], images: sl.Images, tmp_path: Path
) -> None:
    arguments = {"encoders": encoders, "images": images, "only": ["cka"], "workers": 0, "out": tmp_path / "x"}
    with pytest.raises(InputError, match=sentence) as caught:
        sl.analyze(**{**arguments, **options, "show_progress": False})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()  # nothing half-written


def test_a_site_must_match_somewhere_but_not_everywhere(encoders: dict[str, sl.Encoder], images: sl.Images) -> None:
    cnn = sl.load_encoder("timm:resnet18@random?size=32&zero_init_last=False")
    result = measure({**encoders, "r": cnn}, images, ["cka"], sites=["block.1", "block.1.qkv"])["cka"]
    assert list(result.site.values) == ["block.1.qkv", "block.1"]
    with pytest.raises(InputError, match="'r' has none of the sites"):
        measure({**encoders, "r": cnn}, images, ["cka"], sites=["block.1.qkv"])


class WithASpare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Conv2d(3, 4, 8, 8), nn.Linear(2, 2), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def test_parts_that_are_never_called_are_no_sites(images: sl.Images) -> None:
    encoder = sl.load_encoder(WithASpare(), name="mine", preprocess=sl.Preprocess((32, 32)))
    for sites in (None, ["**"], "**"):
        assert list(measure([encoder], images, ["cka"], sites=sites)["cka"].site.values) == ["first", "last"]
    with pytest.raises(InputError, match="No forward pass reaches a site that matches 'spare'"):
        measure([encoder], images, ["cka"], sites=["first", "spare"])
    other = sl.load_encoder(nn.Sequential(OrderedDict(spare=nn.Conv2d(3, 4, 8, 8))), name="other")
    with pytest.raises(InputError, match="'mine' never reaches site 'spare'"):
        measure([encoder, other], images, ["cka"], sites=["spare"])


def test_a_model_that_cannot_run_is_named(images: sl.Images) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(7, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with pytest.raises(InputError, match="Encoder 'picky' fails on an image of 224 × 224"):
        measure({"picky": Picky()}, images, ["cka"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_precision_are_named(small: str, images: sl.Images, dtype: torch.dtype) -> None:
    encoder = sl.load_encoder(small)
    encoder.module.to(dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(InputError, match=f"fails on an image of 32 × 32 pixels: .*; its weights are {name}, and") as it:
        measure({"mine": encoder}, images, ["cka"])
    assert "convert the module with .float(), and choose the precision bf16 (--precision bf16)" in str(it.value)
    assert "preprocessing" not in str(it.value)
    encoder.module.float()
    assert measure({"mine": encoder}, images, ["cka"])["cka"].cka.notnull().any()


def test_a_model_that_fails_without_a_word_is_named_too(images: sl.Images) -> None:
    class Silent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(InputError, match=r"Encoder 'silent' fails .* AssertionError"):
        measure({"silent": nn.Sequential(nn.Identity(), Silent())}, images, ["cka"], sites=["0"])


@pytest.mark.parametrize(
    ("tests", "sentence"), [([], "has no images"), ([17, 18, 19], "the test split of arrays has 3")]
)
def test_too_few_images_are_said_before_the_pass(
    tests: list[int], sentence: str, encoders: dict[str, sl.Encoder]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    images = sl.load_images(pixels, splits={"train": range(17), "test": tests})
    with pytest.raises(InputError, match=sentence):
        measure(encoders, images, ["cka"])


def test_nothing_but_unreadable_images_is_an_error(encoders: dict[str, sl.Encoder], tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"None of 8 images .* could be read: \d\.png: it is not an image"):
        measure(encoders, sl.load_images(f"folder:{tmp_path}"), ["cka"])


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
    with pytest.raises(InputError, match=r"on disk, but .* has 10 bytes"):
        measure(encoders, images, ["knn"], out=tmp_path / "x")


def test_probe_gives_shapes(small: str) -> None:
    encoder = sl.load_encoder(small)
    shapes = probe(encoder, ["block.0.attn_map", "block.1"])
    assert shapes == {"block.0.attn_map": (3, 17, 17), "block.1": (17, 48)}
    assert np.prod(shapes["block.1"]) == 17 * 48


class Rows(nn.Module):
    """Layers that give a number, a table and, of larger batches, fewer rows than there are images."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table, self.layer, self.part = (nn.Identity() for _ in range(4))
        self.first = nn.Conv2d(3, 4, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.first(x).mean((2, 3)))
        self.scale(x.mean())
        self.table(torch.ones(1, 5))
        self.part(x[: max(2, len(x) // 2)])
        return x


def test_sites_without_a_row_for_each_image_say_so(images: sl.Images) -> None:
    encoder = sl.load_encoder(Rows(), name="rows", preprocess=sl.Preprocess((32, 32)))
    run = measure({"rows": encoder}, images, ["cka"], sites=["*a*e*"])
    assert run["cka"].site_a.values.tolist() == ["layer"]
    why = "Site 'scale' of encoder 'rows' gives a tensor of shape () for 2 images, not a row for each"
    assert run.request["left_out"] == {"cka": {"scale, table of rows": why}}
    with pytest.raises(
        InputError, match=r"Site 'table' .* shape \(1, 5\) for 2 images, not a row for each; leave it out"
    ):
        measure({"rows": encoder}, images, ["cka"], sites=["table"])
    for analysis in ("cka", "knn"):
        with pytest.raises(InputError, match=r"Site 'part' .* of shape \(4, 4\) for 8 images, not a row for each"):
            measure({"rows": encoder}, images, [analysis], sites=["part"])


class OnlyGrey(Rows):
    """Has a layer that grey images reach, and others do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.part(x) if x.std((2, 3)).max() < 1e-6 else self.layer(x)


def test_a_site_that_images_do_not_reach_is_a_sentence(images: sl.Images) -> None:
    encoder = sl.load_encoder(OnlyGrey(), name="grey", preprocess=sl.Preprocess((32, 32)))
    with pytest.raises(InputError, match="'grey' reached site 'part' with grey images and does not with these"):
        measure({"grey": encoder}, images, ["cka"], sites=["first", "part"])
