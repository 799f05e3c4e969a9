"""SimMIM: target and loss against plain float64 loops, and who sees which pixels."""

import math

import numpy as np
import pytest
import torch
from support.reconstruction import BATCH, make, make_views, naive_norm_target, other_pixels

from sightline.encoders.modules.masking import enlarge
from sightline.encoders.modules.vit import embed, encode
from sightline.training.objectives import simmim


@pytest.mark.parametrize("side", [3, 7, 41])
@pytest.mark.parametrize("size", [(16, 16), (5, 12)])
def test_simmims_normalised_target(side: int, size: tuple[int, int]) -> None:
    images = 3 + torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(5))
    images[1, 2] = 0.25  # nothing to divide by
    found = simmim.norm_target(images, side)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), naive_norm_target(images, side), rtol=1e-6, atol=1e-6)
    moved = simmim.norm_target(images * torch.tensor([2.0, 0.5, 4.0]).view(3, 1, 1) - 1, side)
    np.testing.assert_allclose(moved[0].numpy(), found[0].numpy(), atol=2e-5)


@pytest.mark.parametrize(("unit", "hidden", "side"), [(4, 10, 0), (8, 3, 0), (4, 10, 5)])
def test_simmim_loss(unit: int, hidden: int, side: int) -> None:
    objective, views = make("simmim", mask_unit=unit, norm_target=side), make_views()
    images, units = views.pixels[0], (16 // unit, 16 // unit)
    mask = objective.random_mask(views.random(math.prod(units)))
    assert (mask.sum(1) == hidden).all()  # ⌈0.6 · 16⌉ and ⌈0.6 · 4⌉
    masked = embed(objective.backbone, images, enlarge(mask, units, unit // 4).flatten(1), objective.mask_token)
    pred = objective.head(encode(objective.backbone, masked, (4, 4))[:, 1:]).detach().double().numpy()
    target = naive_norm_target(images, side) if side else images.double().numpy()
    above = below = 0.0
    for b in range(BATCH):
        for y in range(16):
            for x in range(16):
                if mask[b, (y // unit) * units[1] + x // unit]:
                    patch, inside = (y // 4) * 4 + x // 4, (y % 4) * 4 + x % 4  # channels are fastest
                    above += np.abs(target[b, :, y, x] - pred[b, patch, 3 * inside : 3 * inside + 3]).sum()
                    below += 1
    assert objective(views)[0].item() == pytest.approx(above / (below + 1e-5) / 3, rel=1e-5)


def test_simmim_predicts_from_visible_pixels_alone() -> None:
    objective, views = make("simmim"), make_views()
    mask = objective.random_mask(views.random(4))
    patches, pixels = enlarge(mask, (2, 2), 2).flatten(1), enlarge(mask, (2, 2), 8)
    pred = objective.forward_encoder(views.pixels[0], patches)
    assert torch.equal(objective.forward_encoder(other_pixels(views.pixels[0], pixels), patches), pred)
    assert not torch.equal(objective.forward_encoder(other_pixels(views.pixels[0], ~pixels), patches), pred)
