"""A result does not depend on which other analyses are measured beside it, to the last bit."""

import copy

import pytest
import torch
import xarray as xr
from torch import nn

import sightline as sl
from sightline.measure.request import default_analyses

MEASURED = [*default_analyses(), "orientation"]  # orientation has a view of its own
OPTIONS = {"batch": 8, "workers": 0, "show_progress": False}


@pytest.fixture(scope="module")
def images() -> sl.Images:
    return sl.load_images("shapes?size=32&train=24&val=8&test=24")


@pytest.fixture(scope="module")
def encoders() -> dict[str, sl.Encoder]:
    from support.references import SMALL

    unfused = sl.load_encoder(SMALL + "&seed=1")
    for block in unfused.module.blocks:
        block.attn.fused_attn = False
    return {"a": sl.load_encoder(SMALL), "unfused": unfused}


@pytest.fixture(scope="module")
def together(encoders: dict[str, sl.Encoder], images: sl.Images) -> sl.Run:
    return sl.analyze(encoders, images, MEASURED, **OPTIONS)


@pytest.mark.parametrize("name", MEASURED)
def test_alone_as_beside_all_others(
    name: str, encoders: dict[str, sl.Encoder], images: sl.Images, together: sl.Run
) -> None:
    alone = sl.analyze(encoders, images, [name], **OPTIONS)
    xr.testing.assert_equal(alone[name], together[name])
    ours, theirs = (run.measured(name).kept for run in (alone, together))
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        xr.testing.assert_equal(ours, theirs)


def test_layers_that_compute_faster_while_nobody_looks(images: sl.Images) -> None:
    """PyTorch's own encoder layer takes another path unless hooks are on one of its parts."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, 32, 8, 8)
            layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True) for _ in range(2)]
            self.first, self.second = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = self.first(self.embed(x).flatten(2).transpose(1, 2))
            whole: torch.Tensor = self.second(tokens)
            return whole

    torch.manual_seed(0)
    module = sl.load_encoder(Plain().eval(), preprocess=sl.Preprocess((32, 32), 32))
    few, many = (
        sl.analyze({"plain": copy.deepcopy(module)}, images, ["cka"], sites=sites, **OPTIONS)["cka"].cka
        for sites in (["second"], ["second", "first.norm2"])
    )
    cell = {"site_a": "second", "site_b": "second", "encoder_a": "plain", "encoder_b": "plain"}
    xr.testing.assert_identical(few.sel(cell), many.sel(cell))
