"""The segmentation analysis on features that are known: perfect ones, useless ones, and wrong input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from support import passes
from torch import nn

import sightline as sl
from sightline.analyses import segmentation
from sightline.analyses.segmentation import scoring
from sightline.analyses.segmentation.pictures import components
from sightline.core.errors import InputError
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images, Item
from sightline.images.targets import Targets
from sightline.measure.estimators.lda import Lda, add_patches, fit_lda
from sightline.report.figures import class_colours, coloured, picture_url

SIZE, PATCH = 32, 4


class Colours(nn.Module):
    """Two maps: the mean colour of each patch, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.colour = nn.AvgPool2d(PATCH)
        self.nothing = nn.Conv2d(3, 4, PATCH, PATCH)
        nn.init.zeros_(self.nothing.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.colour(x)
        return found.mean((2, 3)) + self.nothing(x).mean()


class Painted:
    """Images of patches in four colours, one for each class and the background, with a little noise."""

    def __init__(self, n: int) -> None:
        self.random, self.n = np.random.default_rng(0), n
        side = SIZE // PATCH
        classes = self.random.integers(-1, 3, (n, side, side))
        self.maps = classes.repeat(PATCH, 1).repeat(PATCH, 2)
        palette = np.array([[200, 30, 30], [30, 200, 30], [30, 30, 200], [120, 120, 120]])
        noise = self.random.integers(-9, 10, (n, SIZE, SIZE, 3))
        self.images = (palette[self.maps] + noise).clip(0, 255).astype(np.uint8)

    def read(self, indices: Any) -> list[Any]:
        return [Item(self.images[i], None) for i in indices]

    def targets(self, indices: Any) -> list[Any]:
        nothing = np.empty(0, np.int64), np.empty((0, 4), np.float32)
        return [Targets(*nothing, None, self.maps[i].astype(np.int64)) for i in indices]


def painted(val: bool = True, n: int = 40) -> Images:
    order = np.arange(n)
    splits = {"train": order[: n // 2], "val": order[n // 2 : 3 * n // 4], "test": order[3 * n // 4 :]}
    if not val:
        splits = {"train": order[: 3 * n // 4], "test": order[3 * n // 4 :]}
    names = np.array([f"{i:03d}" for i in order])
    labels = np.full(n, -1)
    return Images("painted", Painted(n), names, labels, ("red", "green", "blue"), splits, in_memory=True)


def measured(images: Images, sites: list[str], **config: Any) -> xr.Dataset:
    encoder = sl.load_encoder(Colours(), name="colours", preprocess=Preprocess((SIZE, SIZE)))
    settings = segmentation.SegmentationConfig(**{"steps": 40, "images": 16, "pictures": 2} | config)
    return passes.measured("segmentation", encoder, images, settings, sites=sites)


@pytest.mark.parametrize("val", [True, False])
def test_perfect_features_are_segmented_perfectly(val: bool) -> None:
    """At the centres of patches; between them interpolation draws the border, half a pixel of doubt on each side."""
    result = measured(painted(val), ["colour", "nothing"])
    at = result.sel(encoder="colours")
    assert float(at.val_miou.sel(site="colour")) == 1
    assert at.chosen.item() == "colour"
    assert float(at.miou.sel(site="colour")) > 0.6
    assert float(at.softmax_miou) > 0.6
    assert at.miou_low.sel(site="colour") < at.miou.sel(site="colour") < at.miou_high.sel(site="colour")
    assert np.isnan(at.miou.sel(site="nothing"))
    assert at.reason.sel(site="nothing").item() == "the features are the same for all patches"
    assert ("training images" in result.attrs["protocol"]) != val
    assert int(result.pixels.sum()) == 10 * SIZE * SIZE
    (label, number, detail), *_ = segmentation.headlines(result)
    assert (label, detail.split(",")[0]) == ("colours", "mIoU of a softmax on pixels of colour")
    assert number == f"{float(at.softmax_miou):.1%}"


@pytest.mark.parametrize("split", ["val", "test"])
def test_patches_that_are_not_finite_in_one_split_have_a_reason(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One patch of one image is infinite; the fit, which saw others, is fine."""
    read = scoring.Scoring.patches

    def broken(self: Any, layer: Any, of: str, rows: Any) -> torch.Tensor:
        found = read(self, layer, of, rows).clone()
        if of == split:
            found[0, 0, 0] = torch.inf
        return found

    monkeypatch.setattr(scoring.Scoring, "patches", broken)
    result = measured(painted(), ["colour"])
    at = result.sel(encoder="colours", site="colour")
    assert at.reason.item() == "the activations are not finite (NaN or infinity)"
    assert np.isnan([at.miou.item(), at.miou_low.item(), at.softmax_miou.item()]).all()
    assert np.isnan(at.val_miou.item()) if split == "val" else at.val_miou.item() == 1
    assert (at.chosen.item(), segmentation.headlines(result), segmentation.key_numbers(result)) == ("", [], [])


def test_the_key_number_is_of_the_chosen_block() -> None:
    """Another block is better on test images by chance; the curve shows both."""
    sites, over = ["block.0", "block.1"], ("encoder", "site")
    values = {"miou": [[0.5, 0.6]], "miou_low": [[0.4, 0.5]], "miou_high": [[0.7, 0.8]]}
    result = xr.Dataset(
        {name: (over, value) for name, value in values.items()} | {"chosen": ("encoder", ["block.0"])},
        {"encoder": ["a"], "site": sites, "layer_type": ("site", ["block", "block"])},
    )
    (number,) = segmentation.key_numbers(result)
    assert (number.values, number.ends, number.curves) == ({"a": 0.5}, {"a": (0.4, 0.7)}, {"a": [0.5, 0.6]})
    assert segmentation.key_numbers(result.assign(chosen=("encoder", [""]))) == []


def test_labels_are_compared_at_their_own_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions of the same patches, brought to the pixels of each map by torch's own interpolation.

    They are those of the classifier that the analysis has fitted. Its sums are float32, and patches of a class differ
    so little here that their rounding, another on each processor, turns its weights by half a percent: enough to move
    borders between patches by some pixels.
    """
    images, fits = painted(), []
    monkeypatch.setattr(scoring, "fit_lda", lambda *given: fits.append(fit_lda(*given)) or fits[-1])
    result = measured(images, ["colour"], steps=0, shrinkages=(1e-4,))
    source: Any = images.source
    test = images.indices("test")
    train = np.concatenate([images.indices("train")])
    norm = Preprocess((SIZE, SIZE))
    pooled = [nn.AvgPool2d(PATCH)(norm([source.images[i]]))[0] for i in range(len(images.ids))]
    x = torch.stack([pooled[i] for i in train]).flatten(2).transpose(1, 2).flatten(0, 1).double()
    labels = torch.from_numpy(source.maps[train][:, ::PATCH, ::PATCH] + 1).flatten()
    exact = fit_lda(add_patches(x, torch.nn.functional.one_hot(labels, 4)), (1e-4,))
    (fitted,) = fits
    assert isinstance(exact, Lda)
    assert isinstance(fitted, Lda)
    assert (fitted.weight - exact.weight).abs().max() < 0.02 * exact.weight.abs().max()
    scores = torch.einsum("ncyx,ck->nkyx", torch.stack([pooled[i] for i in test]).double(), fitted.weight[0])
    scores = scores + fitted.bias[0][:, None, None]
    up = torch.nn.functional.interpolate(scores, (SIZE, SIZE), mode="bilinear", align_corners=False)
    expected = segmentation.mean_iou(up.argmax(1).numpy(), source.maps[test] + 1, 4)
    np.testing.assert_allclose(float(result.miou.item()), expected, atol=2e-4)
    assert np.isnan(result.softmax_miou.item())


def test_pictures_show_what_was_decided() -> None:
    result = measured(painted(), ["colour"])
    source: Any = painted().source
    first = int(str(result.picture.values[0]))
    np.testing.assert_array_equal(result.picture_truth_0.values[0], source.maps[first] + 1)
    assert (result.picture_found_0.values[0] == source.maps[first] + 1).mean() > 0.6
    assert result.picture_parts_0.shape == (1, 2, SIZE // PATCH, SIZE // PATCH, 3)
    names = [figure.name for figure in segmentation.figures(result)]
    assert {"classes", "pictures", "components"} <= set(names)


def test_components_are_those_of_an_svd() -> None:
    x = torch.randn(200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([6.0, 5, 4, 1, 1, 1], dtype=torch.float64)
    labels = torch.arange(200) % 2
    fitted = fit_lda(add_patches(x, torch.nn.functional.one_hot(labels, 2)), (1e-3,))
    assert isinstance(fitted, Lda)
    expected = (x - x.mean(0)) @ torch.linalg.svd(x - x.mean(0), full_matrices=False)[2][:3].T
    torch.testing.assert_close(components(x, fitted).abs(), expected.abs())


def test_colours_of_classes_differ() -> None:
    assert len(np.unique(class_colours(40), axis=0)) == 41
    np.testing.assert_array_equal(coloured(np.array([[-1, 3]]), 40)[0], class_colours(40)[[40, 3]])
    assert picture_url(np.zeros((4, 4, 3), np.uint8), 8).startswith("data:image/png;base64,")


def test_images_without_maps_are_refused_before_the_pass(small: str, tmp_path: Path) -> None:
    images = sl.load_images(np.zeros((8, 32, 32, 3), np.uint8), labels=list("abababab"))
    with pytest.raises(InputError, match="no boxes, masks or segmentation maps; give others, such as shapes:scenes"):
        sl.analyze(small, images, ["segmentation"], show_progress=False)
    with pytest.raises(InputError, match="needs patches on a grid"):
        sl.analyze(small, "shapes?size=32", ["segmentation"], sites=["head.*"], show_progress=False)
