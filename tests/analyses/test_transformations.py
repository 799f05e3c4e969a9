"""How far transformations move an image in a layer: closed forms, plain twins, and what cannot be told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from support.passes import measured
from support.plans import TEST, activations, computed, make_plan

import sightline as sl
from sightline.analyses import transformations as plugin
from sightline.analyses.transformations import TransformationsAnalysis, TransformationsConfig, relative_distance, views
from sightline.core.errors import InputError
from sightline.encoders.encoder import build_encoder
from sightline.images.preprocess import Preprocess
from sightline.measure.plan import Key, Plan

CONFIG = TransformationsConfig(transformations=("mirror", "grey"), bootstrap=200)
VIEWS = {"test": views(CONFIG, "test")}
POOLS = {"vit": {"gap": lambda x: x.mean(1), "cls": lambda x: x[:, 0]}, "cnn": {"gap": lambda x: x.mean((2, 3))}}


def plain_distance(x: np.ndarray, y: np.ndarray, batches: list[np.ndarray]) -> float:
    """With loops over all pairs of images of a batch."""
    moved = sum(((x[i] - y[i]) ** 2).sum() for rows in batches for i in rows)
    apart = 0.0
    for rows in batches:
        pairs = [((x[i] - x[j]) ** 2).sum() for i in rows for j in rows if i != j]
        apart += len(rows) * np.mean(pairs)
    return float(np.sqrt(moved / apart))


def transformed(plan: Plan) -> dict[Key, torch.Tensor]:
    """Mirroring changes the first blocks alone, grey all of them a little; crops move everything somewhat."""
    random, data = torch.Generator().manual_seed(1), activations(plan)
    for key, values in list(data.items()):
        noise = [torch.randn(values.shape, generator=random) for _ in range(4)]
        first = key.site == "block.0"
        data[key._replace(view="mirror")] = values + noise[0] if first else values.clone()
        data[key._replace(view="grey")] = values + 0.1 * noise[1]
        for copy in range(2):
            data[key._replace(view=VIEWS["test"][-2 + copy])] = values + 0.3 * noise[2 + copy]
    return data


def test_a_probe_cannot_tell_what_pairs_can() -> None:
    """Objects that face either way: every image knows which, and its mirror image the opposite."""
    left = np.where(np.arange(100) % 2, 1.0, -1.0)[:, None]
    squared = relative_distance(left, -left) ** 2
    assert squared == pytest.approx(4 / (2 * 100 / 99))  # (2)² against twice the variance
    assert relative_distance(left, left) == 0
    both = np.concatenate([left, np.random.default_rng(0).normal(size=(100, 3))], 1)
    assert 0 < relative_distance(both, both * [-1, 1, 1, 1]) < relative_distance(left, -left)


def test_another_image_is_as_far_as_another_image() -> None:
    """If a transformation makes an unrelated image, the distance is 1 but for the draw; of a half, √½ of that."""
    x, y = np.random.default_rng(0).normal(size=(2, 500, 40))
    assert relative_distance(x, y) == pytest.approx(1, abs=0.02)
    half = np.concatenate([x[:, :20], y[:, 20:]], 1)
    assert relative_distance(x, half) == pytest.approx(np.sqrt(0.5), abs=0.02)
    assert relative_distance(7 * x + 3, 7 * half + 3) == pytest.approx(relative_distance(x, half), rel=1e-12)


def test_the_stream_equals_loops_over_pairs(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, views=VIEWS)
    data = transformed(plan)
    result = computed(TransformationsAnalysis(CONFIG, plan), plan, data)
    torch.manual_seed(0)
    batches = [rows.numpy() for rows in torch.randperm(TEST).split(8)]
    one, other = VIEWS["test"][-2:]
    for encoder, features in POOLS.items():
        for feature, pool in features.items():
            for site in plan.sites[encoder]:
                found = {v: pool(data[Key(encoder, site, v)]).double().numpy() for v in VIEWS["test"]}
                got = result.sel(encoder=encoder, site=site, feature=feature)
                for name in CONFIG.transformations:
                    expected = plain_distance(found["plain"], found[name], batches)
                    assert float(got.distance.sel(transformation=name)) == pytest.approx(expected, abs=1e-6)
                apart, moved = found[one] - found[other], found["plain"] - found["grey"]
                crops, grey = np.sqrt((apart**2).sum() / (moved**2).sum()), got.sel(transformation="grey")
                assert float(grey.to_crops) == pytest.approx(1 / crops, rel=1e-5)
                assert float(got.crops) == pytest.approx(float(grey.distance) * crops, rel=1e-5)
    mirror = result.sel(transformation="mirror", feature="gap")
    assert (mirror.distance.sel(site="block.1") == 0).all()
    assert (mirror.distance.sel(site="block.0") > 0.3).all()
    known = result.reason == ""
    for name in ("distance", "crops", "to_crops"):
        low, value, high = (result[f"{name}{end}"].where(known, drop=False) for end in ("_low", "", "_high"))
        assert ((low <= value) | value.isnull()).all()
        assert ((value <= high) | value.isnull()).all()
        assert (value.notnull() == known).all()
    assert result.reason.sel(encoder="cnn", site="block.0", feature="cls").item() == "this site has no such feature"


def mirror(plan: Plan, data: dict[Key, torch.Tensor]) -> xr.Dataset:
    """Of a single layer."""
    result = computed(TransformationsAnalysis(CONFIG, plan), plan, data)
    return result.sel(transformation="mirror", feature="gap").squeeze()


def test_intervals_cover_what_they_should(tmp_path: Path) -> None:
    """Over many draws of images the interval of the distance holds the number of infinitely many images."""
    inside = []
    plan = make_plan(tmp_path, layers={"cnn": {"block.0": (6,)}}, views=VIEWS)
    for seed in range(60):
        random = torch.Generator().manual_seed(seed)
        shape = (TEST, 6)
        x = torch.randn(shape, generator=random)
        data = {Key("cnn", "block.0", view): x + 0.5 * torch.randn(shape, generator=random) for view in VIEWS["test"]}
        data[Key("cnn", "block.0", "plain")] = x
        result = mirror(plan, data)
        inside.append(float(result.distance_low) <= np.sqrt(0.25 / 2) <= float(result.distance_high))
    assert 0.8 <= np.mean(inside) <= 1  # 24 images are few for a bootstrap


def test_an_image_counts_as_either_of_a_pair(tmp_path: Path) -> None:
    """Where all images move equally far, the interval is that of the pairs: a jackknife with loops has its error."""
    plan = make_plan(tmp_path, layers={"cnn": {"block.0": (6,)}}, views=VIEWS)
    x = torch.randn((TEST, 6), generator=torch.Generator().manual_seed(3))
    data = {Key("cnn", "block.0", view): x + float(k > 0) for k, view in enumerate(VIEWS["test"])}
    result = mirror(plan, data)
    torch.manual_seed(0)
    batches = [rows.numpy() for rows in torch.randperm(TEST).split(8)]
    plain = x.double().numpy()
    assert float(result.distance) == pytest.approx(plain_distance(plain, plain + 1, batches), rel=1e-6)
    left = [plain_distance(plain, plain + 1, [rows[rows != out] for rows in batches]) for out in range(TEST)]
    error = np.sqrt((TEST - 1) ** 2 / TEST * np.var(left))
    half = float(result.distance_high - result.distance_low) / 2
    assert half / (2.069 * error) == pytest.approx(1, abs=0.2)  # t with 23 degrees of freedom; was 0.5


def test_flaws_have_a_reason(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, views=VIEWS)
    data = transformed(plan)
    data[Key("vit", "norm", "grey")][3, 0, 0] = torch.nan
    for view in VIEWS["test"]:
        data[Key("cnn", "block.1", view)][:] = 0.1
    result = computed(TransformationsAnalysis(CONFIG, plan), plan, data).sel(feature="gap")
    assert str(result.reason.sel(encoder="vit", site="norm").values).startswith("the activations are not finite")
    assert str(result.reason.sel(encoder="cnn", site="block.1").values) == "the features are the same for all images"
    assert result.distance.sel(encoder="cnn", site="block.1").isnull().all()
    assert result.distance.sel(encoder="vit", site="block.0").notnull().all()


class Pixels(torch.nn.Module):
    """Features that are the pixels, or the mean of them and their mirror image, or grey ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.pixels = how, torch.nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "symmetric":
            x = x + x.flip(-1)
        if self.how == "grey":
            x = (x * torch.tensor([0.2989, 0.587, 0.114])[:, None, None]).sum(1)
        found: torch.Tensor = self.pixels(x)
        return found


def of_noise(names: list[str], **settings: Any) -> xr.Dataset:
    noise = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), dtype=np.uint8)
    images = sl.load_images(noise, labels=np.arange(64) % 2)
    bare = Preprocess(size=(8, 8), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    encoders = {name: build_encoder(Pixels(name), reference=name, preprocess=bare) for name in names}
    result = measured("transformations", encoders, images, TransformationsConfig(bootstrap=50, **settings), batch=16)
    return result.sel(feature="gap", site="pixels")


def test_an_encoder_is_invariant_to_what_it_cannot_see() -> None:
    """And an encoder of pixels sees a mirror image of noise as another image."""
    result = of_noise(["plain", "symmetric", "grey"], transformations=("mirror", "upside_down", "grey", "noise:0.5"))
    distance = result.distance.to_pandas()
    assert distance.loc["symmetric", "mirror"] == pytest.approx(0, abs=1e-6)
    assert distance.loc["grey", "grey"] == pytest.approx(0, abs=1e-3)
    assert distance.loc["plain", ["mirror", "upside_down"]].tolist() == pytest.approx([1, 1], abs=0.03)
    assert distance.loc["symmetric", "upside_down"] == pytest.approx(1, abs=0.05)
    assert (distance.loc["plain", ["grey", "noise:0.5"]] > 0.1).all()
    assert result.crops.notnull().all()


def test_crops_that_are_the_same_have_a_reason() -> None:
    """One policy makes the same two crops; what does not need them is measured."""
    result = of_noise(["plain"], transformations=("mirror",), crop="supervised?crop=[1, 1]&ratio=[1, 1]&flip=0")
    assert result.crops_reason.item() == "the two light crops of every image have the same features"
    assert np.isnan([result.crops.item(), result.to_crops.item(), result.crops_low.item()]).all()
    assert result.distance.item() == pytest.approx(1, abs=0.03)
    assert result.reason.item() == ""


def test_the_page(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, views=VIEWS)
    result = computed(TransformationsAnalysis(CONFIG, plan), plan, transformed(plan))
    figures = plugin.figures(result)
    assert [figure.name for figure in figures] == ["map", "depth-gap", "depth-cls"]
    cells = figures[0].table
    assert len(cells) == 3 * (2 * 2 + 2)  # with the crops; blocks of the ViT twice, of the CNN once
    cell = cells[(cells["map"] == "vit, cls") & (cells.row == "grey") & (cells.column == 1)].iloc[0]
    where = {"encoder": "vit", "feature": "cls", "site": "block.1"}
    assert cell.value == float(result.distance.sel(transformation="grey").sel(where))
    floor = figures[1].table.query("series == 'cnn' and transformation == 'mirror' and site == 'block.0'").iloc[0]
    assert floor.null == float(result.crops.sel(encoder="cnn", feature="gap", site="block.0"))
    label, number, detail = plugin.headlines(result)[0]
    assert (label, number) == ("vit", "0.00")
    assert detail.startswith("mirror at block.1, gap, 95 % 0.00 – 0.00; two light crops: ")
    assert plugin.summary(result)[0] == ("vit, block.1 (gap): mirror and grey move an image less than a light crop.")
    bare = result.assign(crops=result.crops * np.nan, crops_reason=result.reason.copy(data=result.reason.values))
    assert plugin.headlines(bare)[0][2] == detail.partition(";")[0]
    assert plugin.summary(bare) == []
    nothing = result.assign({name: values * np.nan for name, values in result.items() if values.dtype.kind == "f"})
    assert plugin.headlines(nothing) == []
    assert plugin.summary(nothing) == []


def test_features_of_different_images_are_refused() -> None:
    with pytest.raises(InputError, match="Features of the same 2 images"):
        relative_distance(np.zeros((4, 3)), np.zeros((5, 3)))
